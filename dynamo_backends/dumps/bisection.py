"""The result of a bisection, and what its searches share: checks of parts of a model, delta debugging."""

from __future__ import annotations

import dataclasses
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
import onnx_ir as ir

from ..numerics.verdicts import Verdict
from .blame import Cause, CauseKind
from .candidate_runs import LONGEST, CandidateOutcome, CandidateRunner, write_model
from .cut_folder import CutModel, run_repro, write_cut
from .model_judging import Part, ValueDifference
from .model_sessions import PLAIN
from .models import described
from .reading import DATA_SET, DumpError, write_data_set
from .schema import BlameEntry, Settings
from .submodels import Feeds, Parts, known_of

RIGHT, WRONG = "right", "wrong"

_NOT_STARTED = (126, 127)  # exit codes of a shell that cannot start a command

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class BisectionStep:
    """One step of a bisection.

    ``outcome`` is ``right``, ``wrong``, ``rejected``, ``failed``, ``crashed``, or why it is unknown. ``value`` is the
    first wrong value; its ``error`` is infinite if it is NaN or has another shape.
    """

    what: str  # what was switched off or compared
    outcome: str
    value: str = ""
    error: float | None = None


@dataclasses.dataclass(frozen=True)
class Cut:
    """The smallest model that fails."""

    folder: Path
    operators: Sequence[str]  # of its nodes
    of: int  # how many nodes the whole model has
    confirmed: bool  # whether its ``repro.py`` fails in the same way in a fresh process
    said: str  # what ``repro.py`` printed


@dataclasses.dataclass
class Bisection:
    """The result of a bisection."""

    graph: str  # ``graph_000/forward``, or the path of a file
    verdict: str | None  # of the run, ``None`` if no run was compared
    # ``decomposition``, ``FX pass``, ``stage`` (PyTorch's own changes between stages), ``PyTorch`` (the node ran
    # there), ``forward`` (this graph is right), ``translation``, ``kernel``, ``translation or kernel``, ``ONNX pass``,
    # ``ONNX Runtime optimizer``, ``session`` (it cannot be created), ``run`` (it fails or crashes), ``run to run`` (it
    # is not deterministic), ``check`` (the user's command fails), ``nothing``, ``unknown``
    place: str = "nothing"
    cause: str = ""  # the pass, the optimizer, the operator, or the error message
    value: str = ""  # the first wrong value
    source: str = ""  # the user's line
    trials: list[BisectionStep] = dataclasses.field(default_factory=list)
    cut: Cut | None = None
    advice: list[str] = dataclasses.field(default_factory=list)  # what to do next
    sessions: int = 0  # how many were created
    # the verdicts of the other graphs that the reference names: ``0`` is a forward and a backward
    others: dict[str, str | None] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class BisectionSearch:
    """The state of a bisection. ``result`` is the bisection so far."""

    result: Bisection
    folder: Path  # of the cut
    runner: CandidateRunner
    progress: Callable[[str], None]  # is called with a line of text
    versions: Mapping[str, str]  # of the libraries of the run
    blame: BlameEntry | None = None  # of the verdict

    @property
    def blamed(self) -> Cause:
        """The cause that the verdict names."""
        return Cause(self.blame.kind, self.blame.name) if self.blame else Cause(CauseKind.RESULT)

    def tried(self, what: str, outcome: str, value: str = "", found: ValueDifference | None = None) -> None:
        """Records a step."""
        self.result.trials.append(BisectionStep(what, outcome, value, None if found is None else found.error))

    def plain(self, model: ir.Model, feeds: Feeds) -> Feeds | None:
        """The outputs of a model on ONNX Runtime without optimizations; ``None`` if it does not run."""
        outcome = self.runner.run(model, feeds, PLAIN)
        return outcome.outputs if outcome.kind == "ran" else None

    def judge(
        self, model: ir.Model, known: Feeds, name: str, value: np.ndarray, expected: np.ndarray | None = None
    ) -> ValueDifference | None:
        """Judges an output of a model, see ``Part.judge``."""
        if expected is not None and (value.dtype, value.shape) != (expected.dtype, expected.shape):
            return ValueDifference(Verdict(f"{described(value)} instead of {described(expected)}"))
        return Part(lambda: model, known, name, self.plain).judge(value, expected)

    def found(self, place: str, value: str, cause: str, *advice: str) -> None:
        """Records where the fault is."""
        self.result.place, self.result.value, self.result.cause = place, value, cause
        self.result.advice += advice

    def reduce(self, start: Sequence[int], check: Callable[[Sequence[int]], bool]) -> list[int]:
        """Delta debugging of the nodes ``start`` by ``check``."""
        best = len(start)

        def fails(kept: Sequence[int]) -> bool:
            nonlocal best
            answer = check(kept)
            if answer and len(kept) < best:
                best = len(kept)
                self.progress(f"{best} nodes still fail ({self.runner.count} sessions)")
            return answer

        return delta_debug(list(start), fails)

    def finish(
        self,
        piece: CutModel,
        of: int,
        outcome: CandidateOutcome | None = None,
        *,
        before: ir.Model | None = None,
        confirm: Callable[[], bool] | None = None,
    ) -> Bisection:
        """Writes the cut, and checks that it fails in the same way in a fresh process.

        Args:
            piece: the cut.
            of: how many nodes the whole model has.
            outcome: that of the whole model, if it has no results.
            before: the model before an ONNX pass.
            confirm: whether the cut fails; by default its ``repro.py`` is run.
        """
        shutil.rmtree(self.folder / DATA_SET, ignore_errors=True)
        write_cut(self.folder, piece, self.versions)
        if before is not None:
            write_model(before, self.folder, "before.onnx", whole=True)
        self.progress("running repro.py in a fresh process")
        if confirm is not None:
            confirmed, said = confirm(), f"the check fails on {self.folder / 'model.onnx'}"
        else:
            fresh = run_repro(self.folder)
            confirmed = fresh.kind == piece.outcome and (outcome is None or is_same_failure(fresh, outcome))
            said = f"{fresh.kind}: {fresh.message}"
        operators = [node.op_type for node in piece.model.graph]
        self.result.cut = Cut(self.folder, operators, of, confirmed, said)
        self.result.source = self.result.source or line_of(piece.model.graph)
        self.result.advice.append(f"python {self.folder / 'repro.py'}")
        return self.result


def line_of(nodes: Iterable[ir.Node]) -> str:
    """The user's line of the first node that has one."""
    return next((node.metadata_props["source"] for node in nodes if node.metadata_props.get("source")), "")


@dataclasses.dataclass(frozen=True)
class RanModel:
    """A model that ran. A part of it fails if its session returns wrong values."""

    parts: Parts
    known: Feeds  # right values of all tensors, computed without optimizations
    settings: Settings  # of the session of the compared run
    search: BisectionSearch
    outputs: Feeds = dataclasses.field(default_factory=dict)  # of the session, if it ran

    def __call__(self, kept: Collection[int], outputs: Collection[str] | None = None) -> bool:
        return bool(self.wrong(kept, outputs))

    def wrong(self, kept: Collection[int], outputs: Collection[str] | None = None) -> dict[str, ValueDifference]:
        """The wrong outputs of some nodes; empty if the run fails."""
        model = self.parts.cut(kept, self.known, outputs=outputs, constants=self.parts.weights)
        if model is None:
            return {}
        results = self.search.runner.run(model, self.known, self.settings).outputs
        found = {n: self.search.judge(model, self.known, n, value, self.known[n]) for n, value in results.items()}
        return {name: item for name, item in found.items() if item is not None and item.is_wrong}


def is_same_failure(one: CandidateOutcome, other: CandidateOutcome) -> bool:
    """Whether two failures are of one kind, with the same signal or, but for names, the same message."""
    if one.kind == "crashed":
        return (one.kind, one.message) == (other.kind, other.message)
    return one.kind == other.kind and normalized_message(one.message) == normalized_message(other.message)


def normalized_message(message: str) -> str:
    """ONNX Runtime's message without names, paths and numbers, which differ between models."""
    first = next((line for line in message.splitlines() if line.strip()), "")
    first = re.sub(r"Load model from \S+ failed:\s*", "", first)
    text = re.sub(r"'[^']*'|\"[^\"]*\"|\([^()]*\)|\S*/\S+", "_", first)
    text = re.sub(r"(name|node|[Oo]utput|[Ii]nput|Op)[:= ]+[\w./]+", r"\1", text)
    return re.sub(r"\d+", "0", text)


@dataclasses.dataclass(frozen=True)
class Command:
    """A part fails if the user's command returns an exit code other than 0."""

    parts: Parts
    known: Feeds | None  # values of its tensors, for a data set next to the model; ``None`` for no data set
    command: str  # ``{model}`` stands for the path of the model, ``{folder}`` for that of its folder

    def __post_init__(self) -> None:
        if "{model}" not in self.command and "{folder}" not in self.command:
            raise DumpError(f"--check {self.command!r} must name the model, as in 'python check.py {{model}}'")

    def __call__(self, kept: Collection[int]) -> bool:
        model = self.parts.cut(kept, self.known)
        return model is not None and self.fails(model, self.known)

    def fails(self, model: ir.Model, known: Feeds | None) -> bool:
        """Whether the command fails on a model; ``DumpError`` if it cannot be started."""
        with tempfile.TemporaryDirectory(prefix="dynamo_backends_check_") as name:
            path = write_model(model, Path(name))
            write_data_set(Path(name, DATA_SET), "input", known_of(model.graph.inputs, known))
            write_data_set(Path(name, DATA_SET), "output", known_of(model.graph.outputs, known))
            words = [word.replace("{model}", str(path)).replace("{folder}", name) for word in shlex.split(self.command)]
            try:
                done = subprocess.run(words, capture_output=True, text=True, timeout=LONGEST)
            except (OSError, subprocess.TimeoutExpired) as error:
                why = getattr(error, "strerror", None) or f"timeout after {LONGEST:g} seconds"
                raise DumpError(f"--check: {words[0]} does not run: {why}") from None
            if done.returncode in _NOT_STARTED:
                raise DumpError(f"--check: the command cannot be started: {done.stderr.strip()[-300:]}")
            return done.returncode != 0


def delta_debug(items: Sequence[T], fails: Callable[[Sequence[T]], bool]) -> list[T]:
    """Delta debugging: a part of ``items`` that fails, but not without any one of its items. All of them must fail.

    Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input", 2002: tries halves, then smaller and
    smaller pieces, and all items but one piece.
    """
    kept, pieces = list(items), 2
    while len(kept) > 1:
        pieces = min(pieces, len(kept))
        bounds = [len(kept) * i // pieces for i in range(pieces + 1)]
        ranges = list(zip(bounds, bounds[1:], strict=False))
        part = next((kept[start:end] for start, end in ranges if fails(kept[start:end])), None)
        if part is not None:
            kept, pieces = part, 2
            continue
        rests = ([*kept[:start], *kept[end:]] for start, end in ranges)
        rest = next((rest for rest in rests if fails(rest)), None) if pieces > 2 else None
        if rest is not None:
            kept, pieces = rest, max(pieces - 1, 2)
        elif pieces == len(kept):
            break
        else:
            pieces *= 2
    return kept
