"""The workers of the bench, from the parent's side."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..common.python_process import Worker, WorkerExit, WorkerStartError, exit_code_text


class WorkerError(Exception):
    """A worker could not answer a request.

    Attributes:
        kind: ``failed`` (it raised), ``crashed``, ``timed out``, ``not supported``, ``wrong`` or ``usage``.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Process:
    """A worker; ``bench/worker.py`` documents its requests.

    Args:
        timeout: seconds for each request.
        environment: additional environment variables.
        keep: called when the process is closed, with its standard error.
    """

    def __init__(
        self, timeout: float, environment: Mapping[str, str], keep: Callable[[str], None] = lambda errors: None
    ) -> None:
        self._keep = keep
        self._timeout = timeout
        self._worker = Worker(f"{__package__}.worker", environment)
        self._end: WorkerError | None = None

    def ask(self, what: str, **arguments: object) -> dict[str, Any]:
        """The answer to a request.

        Raises:
            WorkerError: the worker raised, crashed or timed out. After a crash or timeout every request raises.
        """
        if self._end is None:
            try:
                answer = self._worker.ask({"do": what, **arguments}, self._timeout)
            except WorkerStartError as error:
                answer = {"error": {"kind": "crashed", "message": str(error)}}
            if not isinstance(answer, WorkerExit):
                if "error" in answer:
                    raise WorkerError(**answer["error"])
                result: dict[str, Any] = answer["ok"]
                return result
            parts = (exit_code_text(answer.code), last_error(self._worker.errors))
            crash = WorkerError("crashed", ": ".join(filter(None, parts)))
            timeout = WorkerError("timed out", f"took longer than {self._timeout:g} s")
            self._end = timeout if answer.timed_out else crash
        raise self._end

    def close(self) -> None:
        """Ends the process and its children."""
        self._keep(self._worker.errors)
        self._worker.stop()


def fresh_caches(folder: str) -> dict[str, str]:
    """Environment variables that move the compilers' caches into a folder; downloads stay where they are."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    downloads = {"HF_HOME": str(cache / "huggingface"), "TORCH_HOME": str(cache / "torch")}
    return {
        **{name: os.environ.get(name, path) for name, path in downloads.items()},
        "XDG_CACHE_HOME": folder,
        "DYNAMO_BACKENDS_CACHE_DIR": str(Path(folder) / "dynamo_backends"),  # takes precedence over XDG_CACHE_HOME
        "TORCHINDUCTOR_CACHE_DIR": str(Path(folder) / "inductor"),
        "TRITON_CACHE_DIR": str(Path(folder) / "triton"),
    }


def last_error(text: str) -> str:
    """The last line that names an exception, else the last line; at most 400 characters."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Failed)\w*: ", line)]
    return (named or lines)[-1][:400]
