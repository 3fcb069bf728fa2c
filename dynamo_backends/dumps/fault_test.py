"""Whether a part of a model fails: the question that a bisection asks again and again, and never twice.

``Memory`` keeps the answers in a file, one a line, so that a bisection that was stopped goes on where it was.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import onnx_ir as ir

from .candidate_runs import LONGEST, Feeds, Outcome, Runner, write_model
from .reading import DATA_SET, DumpError, write_data_set
from .schema import Settings
from .submodels import Parts, inputs_of, outputs_of
from .value_differences import distance

_NOT_STARTED = (126, 127)  # exit codes of a shell that cannot start a command

T = TypeVar("T")


class Memory:
    """Answers on disk; a file whose answers are about something else than ``identity`` is replaced.

    Attributes:
        resumed: how many answers the file had.
    """

    def __init__(self, path: Path, identity: Sequence[object]) -> None:
        self._path = path
        digest = hashlib.sha256(json.dumps([str(item) for item in identity]).encode()).hexdigest()
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
        # A line without an answer: the process ended while it wrote it.
        answers = [line.rpartition(" ") for line in lines[1:] if line.endswith((" 0", " 1"))]
        self._known = {key: answer == "1" for key, _, answer in answers} if lines[:1] == [digest] else {}
        self.resumed = len(self._known)
        if not self._known:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(digest + "\n", encoding="utf-8")

    def ask(self, kept: Sequence[object], find_out: Callable[[], bool]) -> bool:
        """The answer about some parts, kept or found out."""
        key = hashlib.sha256(json.dumps(list(kept)).encode()).hexdigest()
        if key not in self._known:
            self._known[key] = find_out()
            with self._path.open("a", encoding="utf-8") as file:
                file.write(f"{key} {int(self._known[key])}\n")
        return self._known[key]


def reference(known: np.ndarray, exact: np.ndarray | None) -> tuple[np.ndarray, list[np.ndarray]]:
    """What a value is compared with, and what is right beside it: float64's result and the known, where there is one.

    Where float64 does not overflow and the known value does, the known value is all there is.
    """
    is_exact = exact is not None and exact.dtype == np.float64 and exact.shape == known.shape
    if exact is None or not is_exact or distance(known, exact).measured.nonfinite:
        return known, []
    return exact, [known]


def fault_of(value: np.ndarray, known: np.ndarray, exact: np.ndarray | None = None) -> float | None:
    """The error of a value that is wrong, infinite where it is NaN or of another type; ``None`` if it is right."""
    if value.dtype != known.dtype or value.shape != known.shape:
        return float("inf")
    found = distance(value, *reference(known, exact))
    return None if found.is_rounding else found.error


@dataclasses.dataclass(frozen=True)
class Diverges:
    """A part fails if it returns, as it runs, something else than what is right."""

    parts: Parts  # the model
    known: Feeds  # right values of all its tensors, computed without optimization
    settings: Settings  # of the session
    runner: Runner  # runs it

    def __call__(self, kept: Collection[int], outputs: Collection[str] | None = None) -> bool:
        return bool(self.wrong(kept, outputs))

    def wrong(self, kept: Collection[int], outputs: Collection[str] | None = None) -> dict[str, float]:
        """The outputs of some nodes, by default all, that are wrong, with the error of each, see ``fault_of``."""
        model = self.parts.cut(kept, self.known, outputs=outputs, constants=self.parts.weights)
        if model is None:
            return {}
        outcome = self.runner.run(model, self.known, self.settings)  # no outputs: it fails in another way
        if not any(fault_of(value, self.known[name]) is not None for name, value in outcome.outputs.items()):
            return {}
        exact = self.runner.exact(model, self.known) or {}
        found = {
            name: (fault_of(value, self.known[name]), fault_of(value, self.known[name], exact.get(name)))
            for name, value in outcome.outputs.items()
        }
        return {name: error for name, (by_known, error) in found.items() if by_known is not None and error is not None}


@dataclasses.dataclass(frozen=True)
class EndsAs:
    """A part fails if it ends as the whole did: no session, no results, or a crash."""

    parts: Parts  # the model
    known: Feeds | None  # values of its tensors; ``None`` where it is not run: then a session is only made
    settings: Settings  # of the session
    runner: Runner  # runs it
    outcome: Outcome  # how the whole ended

    def __call__(self, kept: Collection[int], outputs: Collection[str] | None = None) -> bool:
        model = self.parts.cut(kept, self.known, outputs=outputs, constants=self.parts.weights)
        if model is None:
            return False
        feeds = None if self.outcome.kind == "refused" else self.known
        return is_same_end(self.runner.run(model, feeds, self.settings), self.outcome)


def is_same_end(one: Outcome, other: Outcome) -> bool:
    """Whether two candidates ended in the same way: the same kind of failure, and the same said but for names.

    Of a crash it is the signal that counts: a segmentation fault is not the failure that an abort is.
    """
    if one.kind == "crashed":
        return (one.kind, one.message) == (other.kind, other.message)
    return one.kind == other.kind and essence(one.message) == essence(other.message)


def essence(message: str) -> str:
    """What ONNX Runtime said, without names, places and numbers, which differ between models."""
    first = next((line for line in message.splitlines() if line.strip()), "")
    text = re.sub(r"'[^']*'|\"[^\"]*\"|\([^()]*\)|\S*/\S+", "_", first)
    text = re.sub(r"(name|node|[Oo]utput|[Ii]nput|Op)[:= ]+[\w./]+", r"\1", text)
    return re.sub(r"\d+", "0", text)


@dataclasses.dataclass(frozen=True)
class Command:
    """A part fails if a command of the user's says so: its exit code is not 0."""

    parts: Parts  # the model
    # values of its tensors, which become a data set beside the model; ``None`` where there are none
    known: Feeds | None
    command: str  # with ``{model}`` where the path of the model goes, and ``{folder}`` for that of its folder

    def __post_init__(self) -> None:
        if "{model}" not in self.command and "{folder}" not in self.command:
            raise DumpError(f"--check {self.command!r} must say where the model goes: 'python check.py {{model}}'")

    def __call__(self, kept: Collection[int]) -> bool:
        model = self.parts.cut(kept, self.known)
        return model is not None and self.fails(model, inputs_of(model, self.known), outputs_of(model, self.known))

    def fails(self, model: ir.Model, inputs: Feeds, right: Feeds) -> bool:
        """Whether the command fails on a model; ``DumpError`` if the command cannot be started."""
        with tempfile.TemporaryDirectory(prefix="dynamo_backends_check_") as name:
            path = write_model(model, Path(name))
            write_data_set(Path(name, DATA_SET), "input", inputs)
            write_data_set(Path(name, DATA_SET), "output", right)
            words = [word.replace("{model}", str(path)).replace("{folder}", name) for word in shlex.split(self.command)]
            try:
                ended = subprocess.run(
                    words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=LONGEST
                )
            except subprocess.TimeoutExpired:
                raise DumpError(f"--check: {words[0]} did not end in {LONGEST:g} seconds") from None
            except OSError as error:
                raise DumpError(f"--check: {words[0]} cannot be started: {error.strerror}") from None
            if ended.returncode in _NOT_STARTED:
                raise DumpError(f"--check: the command cannot be started: {ended.stderr.strip()[-300:]}")
            return ended.returncode != 0


def smallest(items: Sequence[T], fails: Callable[[Sequence[T]], bool]) -> list[T]:
    """Delta debugging: some of ``items``, which fail as a whole, in their order; without any one they do not fail.

    Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input", 2002: halves, then smaller and smaller
    pieces, and what is left without each.
    """
    kept, pieces = list(items), 2
    while len(kept) > 1:
        pieces = min(pieces, len(kept))
        bounds = [len(kept) * i // pieces for i in range(pieces + 1)]
        parts = [kept[start:end] for start, end in zip(bounds, bounds[1:], strict=False)]
        rests = [[*kept[:start], *kept[end:]] for start, end in zip(bounds, bounds[1:], strict=False)]
        part = next((part for part in parts if fails(part)), None)
        if part is not None:
            kept, pieces = part, 2
            continue
        rest = next((rest for rest in rests if fails(rest)), None) if pieces > 2 else None
        if rest is not None:
            kept, pieces = rest, max(pieces - 1, 2)
            continue
        if pieces == len(kept):
            break
        pieces *= 2
    return kept
