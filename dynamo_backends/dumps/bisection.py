"""What a bisection found, and what all its searches share: the runner, the answers on disk, the folder."""

from __future__ import annotations

import dataclasses
import hashlib
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import onnx
import onnx_ir as ir

from .blame import Cause, Kind
from .candidate_runs import Feeds, Outcome, Runner, write_model
from .cut_folder import Piece, run_repro, write_piece
from .fault_test import Memory, is_same_end, smallest
from .model_sessions import PLAIN
from .reading import DATA_SET, DumpedGraph, Run
from .schema import Settings
from .submodels import Parts

MEMORY = "bisection.txt"  # the file of answers beside what was cut out

RIGHT, WRONG = "right", "wrong"


@dataclasses.dataclass(frozen=True)
class Trial:
    """The outcome of switching something off (``what``), with the value that is wrong and its largest error.

    The outcome is ``right``, ``wrong``, ``refused``, ``failed``, ``crashed``, or why it could not be told; the error is
    infinite where the value is NaN or of another shape.
    """

    what: str
    outcome: str
    value: str = ""
    error: float | None = None


@dataclasses.dataclass(frozen=True)
class Cut:
    """The smallest model that was found: the operators of its nodes, of how many nodes (``of``) of the region's model.

    ``confirmed``: whether its ``repro.py`` fails in the same way in a fresh process; ``said`` is what it printed there.
    """

    folder: Path
    operators: Sequence[str]
    of: int
    confirmed: bool
    said: str


@dataclasses.dataclass
class Bisection:
    """What a bisection found."""

    graph: str  # ``graph_000/forward``
    verdict: str | None  # of the run, ``None`` where none was compared
    # ``decomposition``, ``FX pass``, ``stage`` (what PyTorch makes between them), ``PyTorch`` (the node ran there),
    # ``forward`` (this graph is right), ``translation``, ``kernel``, ``ONNX pass``, ``ONNX Runtime optimizer``,
    # ``session`` (it cannot be made), ``run`` (it ends without a result), ``check`` (the user's command fails),
    # ``nothing``, ``unknown``
    place: str = "nothing"
    cause: str = ""  # the pass, the optimizer, the operator, or what was said
    value: str = ""  # the first value that is wrong
    source: str = ""  # the user's line
    trials: list[Trial] = dataclasses.field(default_factory=list)  # what was switched off, in order
    cut: Cut | None = None  # what was cut out
    advice: list[str] = dataclasses.field(default_factory=list)  # what to do next
    sessions: int = 0  # how many were made
    resumed: int = 0  # how many answers came from an earlier bisection that was stopped
    # the verdicts of the other graphs that were meant: ``0`` is a forward and a backward
    others: dict[str, str | None] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Search:
    """What the searches of a bisection share.

    Attributes:
        run, graph: what is bisected.
        folder: where the cut goes.
        runner: runs candidates.
        progress: is called with what is done.
        blamed: the cause that the verdict names.
        found: what was found so far.
    """

    run: Run
    graph: DumpedGraph
    folder: Path
    runner: Runner
    progress: Callable[[str], None]

    def __post_init__(self) -> None:
        blame = self.graph.entry.blame
        self.blamed = Cause(blame.kind, blame.name) if blame else Cause(Kind.RESULT)
        self.found = Bisection(self.graph.reference, self.graph.verdict)

    def tried(self, what: str, outcome: str, value: str = "", error: float | None = None) -> None:
        """Notes what came of a trial."""
        self.found.trials.append(Trial(what, outcome, value, error))

    def values(self, parts: Parts, feeds: Feeds) -> Outcome:
        """All tensors of a model, nothing optimized."""
        return self.runner.run(parts.exposed(), feeds, PLAIN)

    def reduce(
        self,
        model: Path,
        question: str,
        settings: Settings,
        start: Sequence[int],
        check: Callable[[Sequence[int]], bool],
    ) -> list[int]:
        """Delta debugging of the nodes ``start`` by ``check``.

        The answers are kept on disk; they are about a file of the dump, a question, and the settings of the session.
        """
        digest = hashlib.sha256(model.read_bytes()).hexdigest()
        memory = Memory(self.folder / MEMORY, [digest, question, settings, onnx.__version__])
        self.found.resumed = memory.resumed
        best = len(start)

        def fails(kept: Sequence[int]) -> bool:
            nonlocal best
            answer = memory.ask(kept, lambda: check(kept))
            if answer and len(kept) < best:
                best = len(kept)
                self.progress(f"{best} nodes still fail ({self.runner.count} sessions)")
            return answer

        return smallest(list(start), fails)

    def finish(
        self,
        piece: Piece,
        of: int,
        outcome: Outcome | None = None,
        *,
        before: ir.Model | None = None,
        confirm: Callable[[], bool] | None = None,
    ) -> Bisection:
        """Writes what was cut out of so many nodes, and sees whether it fails in the same way in a fresh process.

        Args:
            piece, of: what was cut out, and how many nodes the region's model has.
            outcome: how the whole ended, where it did without a result.
            before: what an ONNX pass was given.
            confirm: whether it fails; by default its ``repro.py`` is run.
        """
        shutil.rmtree(self.folder / DATA_SET, ignore_errors=True)
        write_piece(self.folder, piece, self.run.manifest.versions)
        if before is not None:
            write_model(before, self.folder, "before.onnx", whole=True)
        self.progress("running repro.py in a fresh process")
        if confirm is not None:
            confirmed, said = confirm(), f"the check fails on {self.folder / 'model.onnx'}"
        else:
            fresh = run_repro(self.folder)
            confirmed = fresh.kind == piece.ends and (outcome is None or is_same_end(fresh, outcome))
            said = f"{fresh.kind}: {fresh.message}"
        operators = [node.op_type for node in piece.model.graph]
        self.found.cut = Cut(self.folder, operators, of, confirmed, said)
        self.found.source = self.found.source or line_of(list(piece.model.graph))
        self.found.advice.append(f"python {self.folder / 'repro.py'}")
        return self.found


def line_of(nodes: Sequence[ir.Node]) -> str:
    """The user's line of the first of some nodes that has one."""
    return next((node.metadata_props["source"] for node in nodes if node.metadata_props.get("source")), "")
