"""Python in a subprocess, which imports nothing from the current folder.

``python -m`` and ``python -c`` put the current folder in front of ``sys.path``, where a ``json.py`` or ``numpy.py``
would be executed. ``-P`` leaves it out; ``PYTHONPATH`` and editable installs work as ever, but for entries that are
relative to the current folder.

::

    worker = Worker("dynamo_backends.dumps.candidate_runs")
    worker.ask({"model": "model.onnx"}, longest=600)     # the answer, or an ``Ended``
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


def how_it_ended(code: int) -> str:
    """In words, how a process ended that has this exit code."""
    if code >= 0:
        return f"exit code {code}"
    known = {item.value: item.name for item in signal.Signals}
    return f"the process ended by signal {-code}" + (f" ({known[-code]})" if -code in known else "")


class Worker:
    """A process that answers requests, a line of JSON each; it starts at the first question, and anew after it ended.

    Args:
        module: its ``main`` calls ``answer_requests``.
        environment: variables it has besides those of this process.
    """

    def __init__(self, module: str, environment: Mapping[str, str] = MappingProxyType({})) -> None:
        self._module = module
        self._environment = environment
        self._process: subprocess.Popen[str] | None = None
        self._errors: IO[str] | None = None

    @property
    def errors(self) -> str:
        """What the process wrote to standard error, and what was printed in it; ``""`` after ``stop``."""
        if self._errors is None:
            return ""
        self._errors.seek(0)
        return self._errors.read()

    def ask(self, request: object, longest: float) -> Any:
        """The answer to a request; an ``Ended`` if there is none.

        Args:
            request: what JSON can hold.
            longest: seconds after which the worker is killed.

        Raises:
            WorkerStartError: the process does not start; the message says why.
        """
        if self._process is None or self._process.poll() is not None:
            self._process = self._started()
        line, timed_out = _exchange(self._process, json.dumps(request), longest)
        if line:
            return json.loads(line)
        process, self._process = self._process, None
        return Ended(_finished(process), timed_out)

    def stop(self) -> None:
        """Ends the process, if there is one, and what it started."""
        if self._process is not None:
            _finished(self._process)
        if self._errors is not None:
            self._errors.close()
        self.forget()

    def forget(self) -> None:
        """Leaves the process to the parent that this process was forked from."""
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
            start_new_session=True,  # so that what it starts (Inductor's compilers) ends with it
        )
        line, timed_out = _exchange(process, None, _START_SECONDS)
        if line == _READY:
            return process
        said = [f"exit code {_finished(process)}", *filter(None, map(str.strip, self.errors.splitlines()))]
        why = f"it was not ready in {_START_SECONDS:g} s" if timed_out else said[-1]
        raise WorkerStartError(f"the subprocess {self._module} does not start: {why}")


def answer_requests(answer: Callable[[Any], object]) -> None:
    """Answers each request on standard input until there are no more: the ``main`` of a worker.

    What libraries print is no answer, and goes to standard error.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    answers.write(_READY)
    answers.flush()
    for line in sys.stdin:
        answers.write(json.dumps(answer(json.loads(line))) + "\n")
        answers.flush()


def _exchange(process: subprocess.Popen[str], request: str | None, longest: float) -> tuple[str, bool]:
    """The next line of a process, ``""`` if it ends; and whether it was killed because that took too long."""
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
    """The exit code of a process, which ends when it can read no more; it is killed if it does not."""
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=5)
    _kill(process)
    return process.wait()


def _kill(process: subprocess.Popen[str]) -> None:
    """Kills a process, and what it started."""
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
