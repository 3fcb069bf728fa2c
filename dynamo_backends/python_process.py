"""Python in a subprocess, which imports nothing from the current folder.

``python -m`` and ``python -c`` put the current folder in front of ``sys.path``, where a ``json.py`` or ``numpy.py``
would be executed. ``-P`` leaves it out; ``PYTHONPATH`` and editable installs work as ever, but for entries that are
relative to the current folder.

::

    worker = Worker("dynamo_backends.dumps.worker")
    worker.ask('{"model": "model.onnx"}', longest=600)     # a line, or an ``Ended``
    worker.stop()
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

_ROOT = str(Path(__file__).parents[1])

_START = """
import sys
root, module = sys.argv[1:]
if root not in sys.path:
    sys.path.insert(0, root)
from importlib import import_module
import_module(module).main()
"""
"""The folder of this package is added for a checkout that is not installed, and for one that the caller put on its
``sys.path``: the subprocess runs the same version."""

_READY = "ready\n"
_START_SECONDS = 120.0


def worker_command(module: str) -> list[str]:
    """The command that runs ``main()`` of a module in a process of its own.

    Args:
        module: its absolute name, in this distribution.
    """
    return [sys.executable, "-P", "-c", _START, _ROOT, module]


def worker_environment() -> dict[str, str]:
    """This process's environment, without the entries of ``PYTHONPATH`` that depend on the current folder."""
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if os.path.isabs(path)]
    others = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**others, "PYTHONPATH": os.pathsep.join(paths)} if paths else others


class WorkerStartError(RuntimeError):
    """A worker ended, or hung, before it was asked for anything: what it was to be asked is not to blame."""


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a worker ended instead of answering.

    Attributes:
        code: its exit code, as ``subprocess`` has it.
        timed_out: whether it was killed because it took too long.
    """

    code: int
    timed_out: bool


class Worker:
    """A process that answers lines with lines; it starts at the first question, and anew after it ended.

    Args:
        module: its ``main`` calls ``answer_requests``.
    """

    def __init__(self, module: str) -> None:
        self._module = module
        self._process: subprocess.Popen[str] | None = None

    def ask(self, request: str, longest: float) -> str | Ended:
        """The answer to a line.

        Args:
            request: without a newline in it.
            longest: seconds after which the worker is killed.

        Raises:
            WorkerStartError: the process does not start; the message says why.
        """
        if self._process is None or self._process.poll() is not None:
            self._process = self._started()
        line, timed_out = _exchange(self._process, request, longest)
        if line:
            return line
        process, self._process = self._process, None
        return Ended(_finished(process), timed_out)

    def stop(self) -> None:
        """Ends the process, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            _finished(process)

    def forget(self) -> None:
        """Leaves the process to the parent that this process was forked from."""
        self._process = None

    def _started(self) -> subprocess.Popen[str]:
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
            process = subprocess.Popen(
                worker_command(self._module),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                encoding="utf-8",
                env=worker_environment(),
            )
            line, timed_out = _exchange(process, None, _START_SECONDS)
            if line == _READY:
                return process
            code = _finished(process)
            errors.seek(0)
            said = [text.strip() for text in errors if text.strip()] or [f"exit code {code}"]
        why = f"it was not ready in {_START_SECONDS:g} s" if timed_out else said[-1]
        raise WorkerStartError(f"the subprocess {self._module} does not start: {why}")


def answer_requests(answer: Callable[[str], str]) -> None:
    """Answers each line of standard input with a line, until there are no more: the ``main`` of a worker.

    What libraries print is no answer, and goes nowhere.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    answers.write(_READY)
    answers.flush()
    for line in sys.stdin:
        answers.write(answer(line) + "\n")
        answers.flush()


def _exchange(process: subprocess.Popen[str], request: str | None, longest: float) -> tuple[str, bool]:
    """The next line of a process, ``""`` if it ends; and whether it was killed because that took too long."""
    assert process.stdin is not None and process.stdout is not None
    timed_out = threading.Event()

    def kill() -> None:
        timed_out.set()
        process.kill()

    timer = threading.Timer(longest, kill)
    timer.start()
    try:
        if request is not None:
            process.stdin.write(request + "\n")
            process.stdin.flush()
        return process.stdout.readline(), timed_out.is_set()
    except BrokenPipeError:
        return "", timed_out.is_set()
    finally:
        timer.cancel()


def _finished(process: subprocess.Popen[str]) -> int:
    """The exit code of a process, which ends when it can read no more; it is killed if it does not."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
    try:
        return process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
