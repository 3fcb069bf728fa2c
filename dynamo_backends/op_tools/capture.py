"""``OpCapture``: writes the inputs, outputs and gradients of every operator to files."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shlex
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..common.random_state import RandomState
from ..debug.dump_folder import DumpFolder, new_folder, rank
from .call import AFTER, Call, CallText
from .gradients import Gradients
from .names import function_of
from .tool import OpTool
from .value_files import FORMAT, NotStoredError, decode, encode

logger = logging.getLogger(__name__)


class OpCapture(OpTool):
    """Writes ``<folder>/<rank>/<time>/<operator>/<number>/`` for each call.

    ``call.json`` describes the call. ``input.pth``, ``output.pth``, ``grad_inputs.pth`` and ``grad_outputs.pth`` are
    read by ``torch.load(weights_only=True)``: the arguments before the call, what it returned and changed, what it adds
    to the gradients of its arguments, and the gradients of its results. ``rng_state.pth`` exists if the call drew
    random numbers on the CPU. ``dynamo-backends op ls`` lists calls, and ``dynamo-backends op run`` runs them again.

    Args:
        folder: where to write; created if it does not exist.
        every: capture every n-th call of each operator.
        first: capture at most this many calls of each operator; ``None`` for all.
        max_bytes: a larger tensor is replaced by a summary; -1 for no limit.
        min_free_bytes: stop capturing, with a warning, when the disk has less free space.
        arguments: see ``OpTool``.

    Attributes:
        folder: what this capture writes; ``folder.location`` is the path.
    """

    _sees_gradients = True

    def __init__(
        self,
        folder: str | os.PathLike[str] = "op_capture_result",
        *,
        every: int = 1,
        first: int | None = None,
        max_bytes: int = 256 * 2**20,
        min_free_bytes: int = 2**30,
        **arguments: Any,
    ) -> None:
        super().__init__(**arguments)
        if every < 1:
            raise ValueError(f"every must be 1 or more, not {every}")
        if first is not None and first < 0:
            raise ValueError(f"first must be 0 or more, not {first}")
        self._root = folder
        self._every = every
        self._first = first
        self._max_bytes = max_bytes if max_bytes >= 0 else 2**63
        self._min_free_bytes = min_free_bytes
        self._written = 0
        self._bytes = 0
        self._is_full = False
        self.folder = CaptureFolder(folder)

    def _begin(self) -> None:
        self.folder = CaptureFolder(self._root)
        self._is_full = False

    def _before(self, call: Call) -> tuple[str, RandomState] | None:
        """Writes the arguments; returns the call's folder and the state of the random numbers."""
        if call.number % self._every or (self._first is not None and call.number // self._every >= self._first):
            return None
        relative = self.write_call(call.text, call.args, call.kwargs)
        return None if relative is None else (relative, RandomState.now())

    def _after(
        self, call: Call, before: tuple[str, RandomState] | None, result: object
    ) -> Callable[[Gradients], None] | None:
        if before is None:
            return None
        relative, rng_state = before
        changed = {name: value for name, value in call.results.items() if name.endswith(AFTER)}
        self.save(relative, "output", {"output": result, "changed": changed})
        if not rng_state.equals(RandomState.now()):
            self.save(relative, "rng_state", rng_state.to_dict())

        def finished(gradients: Gradients) -> None:
            self.save(relative, "grad_outputs", gradients.outputs)
            self.save(relative, "grad_inputs", gradients.inputs)

        return finished

    def write_call(self, call: CallText, args: object, kwargs: object) -> str | None:
        """Writes a call and its arguments.

        Returns:
            The call's folder, relative to the capture's; ``None`` if the disk is full.
        """
        if not self._has_space():
            return None
        relative = f"{operator_folder(call.name)}/{call.number}"
        stored = encode({"args": args, "kwargs": kwargs}, self._max_bytes)
        description = {"format": FORMAT, **vars(call), "torch": str(torch.__version__)}
        try:
            function_of(call.name)
            decode(stored)
        except (LookupError, NotStoredError) as error:
            description["not_again"] = str(error)
        self.folder.write_text(f"{relative}/call.json", json.dumps(description, indent=1))
        self._save(relative, "input", stored)
        with self._lock:
            self._written += 1
        return relative

    def _has_space(self) -> bool:
        location = self.folder.location
        if location is None or self._is_full:
            return False
        free = shutil.disk_usage(location).free
        if free < self._min_free_bytes:
            self._is_full = True
            logger.warning("%s has %.1f GB free, less than min_free_bytes: capturing stops", location, free / 1e9)
        return not self._is_full

    def save(self, relative: str, what: str, value: Mapping[str, object]) -> None:
        """Writes one file, such as ``output``, to the folder of a call."""
        self._save(relative, what, encode(value, self._max_bytes))

    def _save(self, relative: str, what: str, stored: Any) -> None:
        path = f"{relative}/{what}.pth"
        if self.folder.write_with(path, lambda target: torch.save(stored, target)):
            with self._lock:
                self._bytes += self.folder.path(path).stat().st_size
            self._print(f"{self.folder.path(path)} saved")

    def _end(self) -> None:
        if self._written and self.folder.location is not None:
            self._print(f"\n{self._written} calls captured, {self._bytes / 1e6:.1f} MB")
            self._print(f"try: {shlex.join(['dynamo-backends', 'op', 'ls', '--', str(self.folder.location)])}")


class CaptureFolder(DumpFolder):
    """The folder of one capture, ``<folder>/<rank>/<time>``. Writing never raises ``OSError``, see ``DumpFolder``."""

    def _make_run_folder(self) -> Path:
        return new_folder(self.root / (rank() or "0"), time.strftime("%Y-%m-%d--%H-%M-%S"))


def operator_folder(name: str) -> str:
    """A folder name for an operator. Different operators have different folders."""
    folder = re.sub(r"[^\w.]", "_", name).strip(".")[:150]
    return folder if folder == name else f"{folder}_{hashlib.sha256(name.encode()).hexdigest()[:8]}"
