"""Bisection with PyTorch's ``CompilerBisector``: finds the stage, the pass and the match that break a model.

A backend that uses the passes stands before Inductor in the bisector's list. Its subsystems are the stages, such as
``joint_passes``. In a process::

    register_backend("onnxrt")                                    # importing the backend's package does it

    def is_right() -> bool:                                       # compiles again; whether the result is right
        torch._dynamo.reset()
        return torch.allclose(torch.compile(model, backend="onnxrt")(x), model(x), atol=1e-4)

    CompilerBisector.do_bisect(is_right)  # BisectionResult(backend='onnxrt', subsystem='joint_passes', ...)
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from typing import IO

from torch._inductor import compiler_bisector
from torch._inductor.compiler_bisector import BisectSubsystem, CompilerBisector

from .registry import STAGES

_BEFORE = ("eager", "aot_eager")
"""Backends that the bisector tries before the one under test; all others use parts of Inductor."""


def register_backend(name: str) -> None:
    """Adds a backend to the bisector, before Inductor, with one subsystem for each stage."""
    backends = compiler_bisector.BACKENDS
    if name in backends:
        return
    later = {key: backends.pop(key) for key in list(backends) if key not in _BEFORE}
    backends[name] = [BisectSubsystem(f"{stage}_passes") for stage in STAGES]
    backends.update(later)


def bisect_command(command: Sequence[str], backend: str, log: IO[str]) -> str | None:
    """Runs a command repeatedly to find the pass and the match that make it fail.

    The command compiles with ``torch.compile``, whose backend the bisector overrides, and exits with 0 if its results
    are right. PyTorch's ``compiler_bisector run`` does the same for PyTorch's own backends only.

    Args:
        command: the program and its arguments.
        backend: the backend under test; those after it in the bisector's list are not tried.
        log: a named file for the output of the command and of PyTorch's bisector.

    Returns:
        The finding as a sentence, or ``None`` if the command never failed.

    Raises:
        OSError: the command cannot be started.
    """
    register_backend(backend)
    with tempfile.TemporaryDirectory() as folder:
        CompilerBisector.in_process_cache = os.path.join(folder, "state")
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": CompilerBisector.in_process_cache}

        said = ""  # the last line of the last run that failed

        def succeeds() -> bool:
            nonlocal said
            if CompilerBisector.get_backend() not in (*_BEFORE, backend):
                return True
            log.flush()
            before = os.path.getsize(log.name)
            run = subprocess.run(command, env={**environment, **_instructions()}, stdout=log, stderr=subprocess.STDOUT)
            if run.returncode != 0:
                with open(log.name, errors="replace", encoding="utf-8") as file:
                    file.seek(before)
                    said = file.read().strip().rpartition("\n")[2]
            return run.returncode == 0

        with redirect_stdout(log), redirect_stderr(log):
            result = CompilerBisector.do_bisect(succeeds)
    if result is None:
        return None
    if result.backend != backend:
        text = f"the command fails with backend {result.backend!r} already: the fault is in PyTorch or in the command"
        return f"{text}; it says: {said}" if said else text
    if result.subsystem is None:
        return (
            f"the fault is in {backend}, and in none of its passes: backend='onnx_debug' says which operator is wrong"
        )
    return f"the fault is in {backend}, stage {result.subsystem.removesuffix('_passes')}: {result.debug_info}"


def _instructions() -> dict[str, str]:
    """Environment variables of the process under test; it reads the rest from the bisector's files."""
    backend, subsystem = CompilerBisector.get_backend(), CompilerBisector.get_subsystem()
    variables = {"TORCH_COMPILE_BACKEND": backend or "", "TORCH_BISECT_BACKEND": backend or ""}
    if backend and subsystem:
        variables["TORCH_BISECT_SUBSYSTEM"] = subsystem
        if CompilerBisector.get_run_state(backend, subsystem) == "test_disable":
            variables["TORCH_BISECT_MAX"] = "-1"
    return variables
