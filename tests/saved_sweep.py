"""Compiles the bench's models ahead of time in one process and runs them in another that traces nothing.

::

    python tests/saved_sweep.py                        # all models, inference and training
    python tests/saved_sweep.py --only bert,t5 --mode inference
    python tests/saved_sweep.py --sample 2 --seed 7    # two random cases

The second process has other weights and another number of threads. Eight threads call the loaded function at once, and
after them a forked child, unless PyTorch runs a part: its threads do not survive a fork. Results must be about as near
to float64 as eager's. What PyTorch cannot save is listed; the exit code is 1 if anything else is not right.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ahead_of_time
import numpy as np
import torch
from torch._dynamo.utils import counters

from dynamo_backends.bench.case import Case
from dynamo_backends.bench.loading import Inputs, LoadedCase, load
from dynamo_backends.bench.models import MODELS
from dynamo_backends.bench.reference import CaseJudge
from dynamo_backends.bench.steps import Steps
from dynamo_backends.cli.show import saved_programs

MODES = ("inference", "train")
OF_PYTORCH = {"wav2vec2": "PyTorch cannot pickle modules with parametrized weights, which its guards contain"}
"""Models that PyTorch 2.13 cannot save, with every backend."""

_THREADS = 8


def save_case(case: Case, path: Path) -> None:
    loaded = load(case)
    with torch.set_grad_enabled(case.mode == "train"):
        ahead_of_time.save(loaded.model, loaded.inputs[0], {"backend": "onnxrt"}, path)


def check_case(case: Case, path: Path) -> None:
    """Raises if a loaded function is wrong."""
    torch.set_num_threads(torch.get_num_threads() + 1)
    loaded = load(case)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in loaded.model.parameters():  # other weights of the same size
            weight.copy_(weight.flatten()[torch.randperm(weight.numel(), generator=generator)].view(weight.shape))
    function = ahead_of_time.load(loaded.model, path)
    with torch.set_grad_enabled(case.mode == "train"):
        if case.mode == "inference":
            _check_threads(function, loaded.inputs[0])
        steps = Steps(case, loaded)
        judge = CaseJudge(steps)
        found = judge.difference(steps.results(function))
        assert not found, found
        if case.mode == "inference" and not any(program.coverage.fallbacks for _, program in saved_programs(path)):
            _check_child(function, loaded, steps.results(function)[0])
    ours = counters["dynamo_backends"]
    assert ours["graphs_loaded"] == 1 + (case.mode == "train") and not counters["stats"]["calls_captured"], ours
    assert not any(ours[name] for name in ("internal_failures", "runtime_failures", "wrong_results")), ours


def _check_threads(function: Callable[..., Any], inputs: Inputs) -> None:
    """The first call, by several threads at once."""
    together = threading.Barrier(_THREADS)

    def call(_: int) -> object:
        with torch.no_grad():
            together.wait()
            return function(*inputs.args, **inputs.kwargs)

    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        first, *others = pool.map(call, range(_THREADS))
    for other in others:
        torch.testing.assert_close(other, first)


def _check_child(function: Callable[..., Any], loaded: LoadedCase, expected: Sequence[Any]) -> None:
    """A call in a forked child, where PyTorch's own threads hang: numpy compares."""
    inputs = loaded.inputs[0]

    def call() -> None:
        for found, right in zip(function(*inputs.args, **inputs.kwargs), expected, strict=True):
            np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-5)  # sums in another order; by numpy

    child = multiprocessing.get_context("fork").Process(target=call)
    child.start()
    child.join(120)
    assert child.exitcode == 0, f"the forked child: {child.exitcode}"


def judged(case: tuple[str, str]) -> str:
    """Why a case is not right, ``""`` if it is."""
    model, mode = case
    with tempfile.TemporaryDirectory() as folder:
        caches = {name: f"{folder}/{name}" for name in ("DYNAMO_BACKENDS_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")}
        for step in ("save", "check"):
            command = [
                sys.executable,
                __file__,
                "--step",
                step,
                "--only",
                model,
                "--mode",
                mode,
                "--file",
                f"{folder}/f",
            ]
            try:
                ended = subprocess.run(
                    command, env={**os.environ, **caches}, capture_output=True, text=True, timeout=600
                )
            except subprocess.TimeoutExpired:
                return f"{step}: takes more than 600 s"
            if ended.returncode:
                lines = [line for line in ended.stderr.strip().splitlines() if line.strip()]
                return f"{step}: {' | '.join(lines[-3:])}" if lines else f"{step}: ended with {ended.returncode}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(MODELS), help="models, separated by commas")
    parser.add_argument("--mode", default=",".join(MODES))
    parser.add_argument("--sample", type=int, help="run so many random cases")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--step", choices=("save", "check"), help=argparse.SUPPRESS)
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.step is not None:
        warnings.simplefilter("ignore")
        {"save": save_case, "check": check_case}[chosen.step](Case(chosen.only, chosen.mode), chosen.file)
        return 0
    cases = list(itertools.product(chosen.only.split(","), chosen.mode.split(",")))
    random.Random(chosen.seed).shuffle(cases)
    faults, start = 0, time.monotonic()
    with concurrent.futures.ThreadPoolExecutor(chosen.processes) as pool:
        for case, fault in zip(cases[: chosen.sample], pool.map(judged, cases[: chosen.sample]), strict=True):
            known = OF_PYTORCH.get(case[0]) if fault.startswith("save: ") else None
            faults += bool(fault) and known is None
            print(
                f"{' '.join(case):28} {'right' if not fault else f'not saved: {known}' if known else fault}", flush=True
            )
    print(f"{len(cases[: chosen.sample])} cases, {faults} not right, {time.monotonic() - start:.0f} s")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
