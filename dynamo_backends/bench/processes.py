"""The processes of the bench, as the parent sees them."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from ..python_process import worker_command, worker_environment


class WorkerError(Exception):
    """A process could not do what it was asked for.

    Attributes:
        kind: ``failed`` (it raised), ``crashed`` (it ended), ``timed out``, ``not supported`` or ``usage``.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Process:
    """A worker; see ``worker`` for what can be asked of it.

    Args:
        timeout: seconds after which it is ended, for each thing asked.
        environment: variables it has besides those of this process.
    """

    def __init__(self, timeout: float, environment: Mapping[str, str]) -> None:
        self._timeout = timeout
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115  closed by close
        self._process = subprocess.Popen(
            worker_command(f"{__package__}.worker"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            encoding="utf-8",
            env={**worker_environment(), **environment},
            start_new_session=True,  # so that what it starts (Inductor's compilers) ends with it
        )
        self._answers: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def ask(self, what: str, **arguments: object) -> dict[str, Any]:
        """The answer to one line.

        Raises:
            WorkerError: it has none; the process is ended if it can give no other.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, which the missing answer says
            self._process.stdin.write(json.dumps({"do": what, **arguments}) + "\n")
            self._process.stdin.flush()
        try:
            line = self._answers.get(timeout=self._timeout)
        except queue.Empty:
            self.close()
            raise WorkerError("timed out", f"took longer than {self._timeout:g} s") from None
        if line is None:
            code = self._process.wait()
            said = last_error(self.errors)
            self.close()
            raise WorkerError("crashed", f"{_exit(code)}{': ' if said else ''}{said}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WorkerError(answer["error"]["kind"], answer["error"]["message"])
        found: dict[str, Any] = answer["ok"]
        return found

    @property
    def errors(self) -> str:
        """What the process wrote to standard error."""
        if self._errors.closed:
            return ""
        self._errors.seek(0)
        return self._errors.read()

    def close(self) -> None:
        """Ends the process, and what it started."""
        if self._process.poll() is None:
            assert self._process.stdin is not None
            with contextlib.suppress(OSError):
                self._process.stdin.close()
        if hasattr(os, "killpg"):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        else:
            self._process.kill()
        self._process.wait()
        self._errors.close()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put(None)


def fresh_caches(folder: str) -> dict[str, str]:
    """Variables of the environment by which compilers find empty caches, in a folder.

    What was downloaded stays where it is.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    downloads = {"HF_HOME": str(cache / "huggingface"), "TORCH_HOME": str(cache / "torch")}
    return {
        **{name: os.environ.get(name, place) for name, place in downloads.items()},
        "XDG_CACHE_HOME": folder,
        "DYNAMO_BACKENDS_CACHE_DIR": str(Path(folder) / "dynamo_backends"),  # which goes before it
        "TORCHINDUCTOR_CACHE_DIR": str(Path(folder) / "inductor"),
        "TRITON_CACHE_DIR": str(Path(folder) / "triton"),
    }


def last_error(text: str) -> str:
    """The last line that names an exception, or just the last; at most 400 characters."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Failed)\w*: ", line)]
    return (named or lines)[-1][:400]


def _exit(code: int) -> str:
    """How a process ended, in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"ended by signal {-code}"
