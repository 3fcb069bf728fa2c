"""Python subprocesses that import nothing from the current folder.

``python -m`` and ``python -c`` put the current folder first on ``sys.path``, so that a ``json.py`` or ``numpy.py``
there would run. ``-P`` leaves it out. ``PYTHONPATH`` and editable installs still work, except for relative entries.

::

    worker = Worker("dynamo_backends.dumps.candidate_runs")
    worker.ask({"model": "model.onnx"}, longest=600)     # the answer, or a ``WorkerExit``
    worker.stop()
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

_ROOT = str(Path(__file__).parents[2])

_START = """
import sys
root, module = sys.argv[1:]
if root not in sys.path:
    sys.path.insert(0, root)
from importlib import import_module
import_module(module).main()
"""
"""Adds the folder of this package, so that the subprocess runs the same version when it is not installed."""

_READY = "ready\n"
_START_SECONDS = 120.0


def worker_command(module: str) -> list[str]:
    """The command that runs ``main()`` of a module of this distribution in a subprocess."""
    return [sys.executable, "-P", "-c", _START, _ROOT, module]


def worker_environment() -> dict[str, str]:
    """This process's environment, without relative entries of ``PYTHONPATH``."""
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if os.path.isabs(path)]
    others = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**others, "PYTHONPATH": os.pathsep.join(paths)} if paths else others


class WorkerStartError(RuntimeError):
    """A worker exited or hung before its first request."""


@dataclasses.dataclass(frozen=True)
class WorkerExit:
    """The exit of a worker that did not answer."""

    code: int  # as in ``subprocess``: negative for a signal
    timed_out: bool  # it was killed because it took too long


def exit_code_text(code: int) -> str:
    """An exit code as text."""
    if code >= 0:
        return f"exit code {code}"
    known = {item.value: item.name for item in signal.Signals}
    return f"the process ended by signal {-code}" + (f" ({known[-code]})" if -code in known else "")


class Worker:
    """A subprocess that answers requests, each a line of JSON. It starts at the first request, and again after an exit.

    Args:
        module: a module whose ``main`` calls ``answer_requests``.
        environment: additional environment variables.
    """

    def __init__(self, module: str, environment: Mapping[str, str] = MappingProxyType({})) -> None:
        self._module = module
        self._environment = environment
        self._process: subprocess.Popen[str] | None = None
        self._errors: IO[str] | None = None

    @property
    def errors(self) -> str:
        """The output of the process, standard error and prints; ``""`` after ``stop``."""
        if self._errors is None:
            return ""
        self._errors.seek(0)
        return self._errors.read()

    def ask(self, request: object, longest: float) -> Any:
        """Sends a request and returns the answer, or a ``WorkerExit``.

        Args:
            request: data for JSON.
            longest: the timeout in seconds, after which the worker is killed.

        Raises:
            WorkerStartError: the process does not start; the message has the reason.
        """
        if self._process is None or self._process.poll() is not None:
            self._process = self._started()
        line, timed_out = _exchange(self._process, json.dumps(request), longest)
        if line:
            return json.loads(line)
        process, self._process = self._process, None
        return WorkerExit(_finished(process), timed_out)

    def stop(self) -> None:
        """Stops the process and its subprocesses."""
        if self._process is not None:
            _finished(self._process)
        if self._errors is not None:
            self._errors.close()
        self.forget()

    def forget(self) -> None:
        """In a forked process: leaves the worker to the parent."""
        self._process = self._errors = None

    def _started(self) -> subprocess.Popen[str]:
        self.stop()
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115  closed by stop
        process = subprocess.Popen(
            worker_command(self._module),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            encoding="utf-8",
            env={**worker_environment(), **self._environment},
            start_new_session=True,  # so that its subprocesses, such as Inductor's compilers, are killed too
        )
        line, timed_out = _exchange(process, None, _START_SECONDS)
        if line == _READY:
            return process
        lines = [f"exit code {_finished(process)}", *filter(None, map(str.strip, self.errors.splitlines()))]
        reason = f"it was not ready in {_START_SECONDS:g} s" if timed_out else lines[-1]
        raise WorkerStartError(f"the subprocess {self._module} does not start: {reason}")


def answer_requests(answer: Callable[[Any], object]) -> None:
    """The loop of a worker: answers each request on standard input. Prints of libraries go to standard error."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    answers.write(_READY)
    answers.flush()
    for line in sys.stdin:
        answers.write(json.dumps(answer(json.loads(line))) + "\n")
        answers.flush()


def _exchange(process: subprocess.Popen[str], request: str | None, longest: float) -> tuple[str, bool]:
    """Sends a request. Returns the next line of the process, ``""`` if it exits, and whether the timeout killed it."""
    assert process.stdin is not None and process.stdout is not None
    timed_out = threading.Event()

    def kill() -> None:
        timed_out.set()
        _kill(process)

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
    """Closes the pipes of a process, kills it if it does not exit, and returns its exit code."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=5)
    _kill(process)
    return process.wait()


def _kill(process: subprocess.Popen[str]) -> None:
    """Kills a process and its subprocesses."""
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
