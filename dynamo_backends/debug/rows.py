"""The dataclasses of a comparison: a row for each value, the value to blame, and the verdict on the run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import msgspec
import torch

from ..dumps.blame import Cause, CauseKind
from ..dumps.schema import BlamedValue, BlameEntry, ElementEntry, MeasureEntry, RowEntry, ValueFacts, WrongNodeEntry
from ..errors import first_line
from ..graphs.locations import Frame, location_text
from ..numerics.measure import Measure
from ..numerics.value_range import Extent
from ..numerics.verdicts import RIGHT, Verdict, index_of
from .chosen_runs import SizesByName, sizes_text
from .repeated_runs import Instability

OK = "ok"

MOST_WRONG_NODES = 20
"""Nodes of one graph that are wrong by themselves, with their wrong elements, that are listed."""

_MOST_GRADIENTS = 2
"""Gradients that a verdict names; the manifest has all."""


def exception_text(error: Exception) -> str:
    """``ValueError: the first line of its message``."""
    return f"{type(error).__name__}: {first_line(str(error))}"


@dataclasses.dataclass
class Row(ValueFacts):
    """One value of the graph, with the measures that ``RowEntry`` describes."""

    stack: Sequence[Frame] = ()
    onnx: Measure | None = None
    eager: Measure | None = None
    local_onnx: Measure | None = None
    local_eager: Measure | None = None
    session: Measure | None = None
    session_instability: Instability | None = None
    local_instability: Instability | None = None
    eager_extent: Extent | None = None
    onnx_extent: Extent | None = None
    session_extent: Extent | None = None
    nonfinite_elements: Sequence[ElementEntry] = ()

    @property
    def where(self) -> str:
        """The source line, see ``graphs.locations.location_text``."""
        return location_text(self.source, str(self.stack[-1]) if self.stack else "")

    @property
    def type(self) -> str:
        """dtype and shape as text."""
        return f"{self.dtype} {'x'.join(map(str, self.shape)) or 'scalar'}"

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def ours(self) -> Measure | None:
        """The error of the value in the session that ran if it is known, else of the propagated value."""
        return self.session or self.onnx

    def replace_ours(self, measure: Measure) -> None:
        """Replaces ``ours`` by a measure with a larger tolerance."""
        if self.session is not None:
            self.session = measure
        else:
            self.onnx = measure

    @property
    def explained(self) -> bool:
        """Whether rounding explains the error of ``ours``."""
        return not self.complaint and (self.ours is None or self.ours.is_rounding)

    @property
    def locally_explained(self) -> bool:
        """Whether rounding explains the error of the node alone, on its inputs in the model."""
        return not self.complaint and (self.local_onnx is None or self.local_onnx.is_rounding)

    @property
    def propagated_explained(self) -> bool:
        """Whether rounding explains the error of the value in the region's model."""
        return self.onnx is None or self.onnx.is_rounding

    @property
    def unstable_alone(self) -> bool:
        """Whether repeats of the node alone, on eager's inputs, differ by more than rounding."""
        found = self.local_instability
        return found is not None and not found.is_rounding(self.local_eager)

    @property
    def unstable_in_session(self) -> bool:
        """Whether repeats of the session differ by more than propagated rounding."""
        found = self.session_instability
        return found is not None and not found.is_rounding(self.eager)

    @property
    def error(self) -> Error | None:
        return None if self.ours is None else Error(self.name, self.ours, self.eager)

    @property
    def unexplained_errors(self) -> list[Error]:
        """The errors that rounding does not explain, with eager's."""
        pairs = [(self.ours, self.eager), (self.local_onnx, self.local_eager)]
        pairs = [pair for pair in pairs if pair[0] is not None and not pair[0].is_rounding]
        if self.unstable_in_session and self.session_instability is not None:
            pairs.append((self.session_instability.difference, self.eager))
        if self.unstable_alone and self.local_instability is not None:
            pairs.append((self.local_instability.difference, self.local_eager))
        return [Error(self.name, measure, eager) for measure, eager in pairs if measure is not None]

    @property
    def local_fault(self) -> str:
        """The error of the node alone, its element and tolerance; ``""`` if it is rounding or of a discrete dtype."""
        found, dtype = self.local_onnx, self.torch_dtype
        if found is None or found.is_rounding or not (dtype.is_floating_point or dtype.is_complex):
            return ""
        return str(Verdict(ours=found, index=index_of(found, torch.empty(self.shape, dtype=dtype, device="meta"))))

    @property
    def mark(self) -> str:
        """``=`` bitwise equal to eager, ``~`` within rounding, ``!`` the node is wrong, ``?`` not deterministic, blank:
        not compared."""
        if self.unstable_alone:
            return "?"
        if not self.locally_explained:
            return "!"
        if self.onnx is None:
            return " "
        return "=" if self.equals_eager else "~"

    @property
    def entry(self) -> RowEntry:
        return msgspec.convert(self, RowEntry, from_attributes=True)

    @property
    def wrong_node(self) -> WrongNodeEntry:
        error = msgspec.convert(self.local_onnx, MeasureEntry | None, from_attributes=True)
        elements = self.wrong_elements.text if self.wrong_elements is not None else self.complaint
        return WrongNodeEntry(self.name, self.operator, self.where, self.module, self.converter, error, elements)

    @property
    def size_of_fault(self) -> float:
        """The error of the node alone, relative to its scale; infinite for another dtype or shape."""
        return self.local_onnx.relative if self.local_onnx is not None and not self.complaint else math.inf


_DIFFERENCE_IN_NOTE = (CauseKind.PASS, CauseKind.DECOMPOSITION, CauseKind.TRACE, CauseKind.STAGE)


@dataclasses.dataclass(frozen=True)
class Blame(BlamedValue):
    """A wrong value, its cause, and how it differs."""

    cause: Cause
    difference: Verdict = dataclasses.field(default=RIGHT, kw_only=True)
    has_own_converter: bool = dataclasses.field(default=False, kw_only=True)  # whether ``code`` is a user's

    def __str__(self) -> str:
        name = self.user_name if self.cause.kind == CauseKind.RESULT and self.user_name else self.value
        in_module = f" in {self.module}" if self.module else ""
        cause = str(self.cause) or ("converter" if self.code else "")
        cause += f" ({self.code})" if self.code else ""
        cause += " or kernel" if self.cause.kind == CauseKind.NODE and self.code and not self.has_own_converter else ""
        parts = [f"{name} ({self.source or 'no source line'}){in_module}", cause]
        parts += [] if self.cause.kind in _DIFFERENCE_IN_NOTE else [str(self.difference)]
        hidden = len(self.gradients) - _MOST_GRADIENTS
        gradients = ", ".join(self.gradients[:_MOST_GRADIENTS]) + (f" and {hidden} more" if hidden > 0 else "")
        text = ": ".join(filter(None, parts))
        text += f", on the way to {gradients}" if gradients else ""
        more = "1 more node is wrong by itself" if self.more == 1 else f"{self.more} more nodes are wrong by themselves"
        text += f", and {more}" if self.more else ""
        return text + (f", because {self.because}" if self.because else "")

    @property
    def entry(self) -> BlameEntry:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(BlamedValue)}
        cause = self.cause
        return BlameEntry(**fields, kind=cause.kind, name=cause.name, stage=cause.stage, cause=str(cause))


@dataclasses.dataclass(frozen=True)
class Error:
    """The error of one value against float64, and eager's error if it is known."""

    value: str
    onnx: Measure
    eager: Measure | None


@dataclasses.dataclass(frozen=True)
class Finding:
    """The comparison of one stage, or of the results with the captured graph."""

    culprit: Blame | None = None  # the wrong stage, pass or decomposition
    wrong: list[Blame] = dataclasses.field(default_factory=list)  # wrong results that no stage explains
    because: str = ""  # what explains them
    unchecked: list[str] = dataclasses.field(default_factory=list)  # what could not be compared, with the reason


@dataclasses.dataclass
class GraphComparison:
    """The comparison of one run of a graph; see ``GraphEntry`` for fields of the same name."""

    blame: Blame | None = None  # the first wrong value; ``None`` if all are right
    not_comparable: str = ""  # why the run cannot be compared
    note: str = ""  # such as what explains a difference that is not a fault
    has_tie: bool = False  # whether a tie of a quantization explains an error
    rows: list[Row] = dataclasses.field(default_factory=list)  # every value, in execution order
    unchecked: list[str] = dataclasses.field(default_factory=list)
    sizes: SizesByName = dataclasses.field(default_factory=dict)  # those of the run that may differ between runs
    wrong_nodes: Sequence[Row] = ()  # those that are wrong by themselves, the largest errors first
    faults: Sequence[Error] = ()  # of wrong stages, passes and results, in addition to those of the rows
    rescued: Mapping[int, str] = dataclasses.field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return self.blame is None and not self.not_comparable

    @property
    def verdict(self) -> str:
        """``ok``, ``not comparable: why``, or ``diverges at NODE (file:line)`` with the cause; and the sizes."""
        if self.ok:
            return OK
        text = f"diverges at {self.blame}" if self.blame is not None else f"not comparable: {self.not_comparable}"
        return f"{text}, with {sizes_text(self.sizes)}" if self.sizes else text

    def row_of(self, value: str) -> Row | None:
        return next((row for row in self.rows if row.name == value), None)

    @property
    def worst(self) -> Error | None:
        """The largest error relative to its scale.

        If the run is right: among the outputs. If not: among ``faults`` and the unexplained errors of the outputs and
        of the blamed value; ``None`` if none of them has a size, as for a wrong dtype.
        """
        outputs = [row for row in self.rows if row.is_output]
        if self.blame is None:
            errors = [error for row in outputs if (error := row.error) is not None]
        else:
            blamed = [row for row in self.rows if row.name == self.blame.value]
            errors = [*self.faults, *(error for row in outputs + blamed for error in row.unexplained_errors)]
        return max(errors, key=lambda error: error.onnx.relative, default=None)
