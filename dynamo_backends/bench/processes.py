"""The processes of the bench, as the parent sees them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..common.python_process import Ended, Worker, WorkerStartError, how_it_ended


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
        keep: told at its end what the process wrote to standard error.
    """

    def __init__(
        self, timeout: float, environment: Mapping[str, str], keep: Callable[[str], None] = lambda errors: None
    ) -> None:
        self._keep = keep
        self._timeout = timeout
        self._worker = Worker(f"{__package__}.worker", environment)
        self._end: WorkerError | None = None

    def ask(self, what: str, **arguments: object) -> dict[str, Any]:
        """The answer to one line.

        Raises:
            WorkerError: it has none; the process is ended if it can give no other.
        """
        if self._end is not None:
            raise self._end
        try:
            answer = self._worker.ask({"do": what, **arguments}, self._timeout)
        except WorkerStartError as error:
            self._end = WorkerError("crashed", str(error))
            raise self._end from None
        if isinstance(answer, Ended):
            said = ": ".join(filter(None, (how_it_ended(answer.code), last_error(self._worker.errors))))
            self._end = WorkerError("crashed", said)
            if answer.timed_out:
                self._end = WorkerError("timed out", f"took longer than {self._timeout:g} s")
            raise self._end
        if "error" in answer:
            raise WorkerError(**answer["error"])
        found: dict[str, Any] = answer["ok"]
        return found

    def close(self) -> None:
        """Ends the process, and what it started."""
        self._keep(self._worker.errors)
        self._worker.stop()


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
