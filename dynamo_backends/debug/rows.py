"""The dataclasses of a comparison: a row for each value, the value to blame, and the verdict on the run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import msgspec
import torch

from ..dumps.blame import Cause, CauseKind
from ..dumps.schema import BlamedValue, BlameEntry, Error, MeasureEntry, RowEntry, ValueRow, WrongNodeEntry
from ..errors import first_line
from ..graphs.locations import Frame, location_text
from ..numerics.rule import Measure
from ..numerics.segments import Judged
from ..numerics.verdicts import RIGHT, Verdict
from .chosen_runs import SizesByName, sizes_text

OK = "ok"

MOST_WRONG_NODES = 20
"""Nodes of one graph that are wrong by themselves, with their wrong elements, that are listed."""

_MOST_GRADIENTS = 2
"""Gradients that a verdict names; the manifest has all."""


def exception_text(error: Exception) -> str:
    """``ValueError: the first line of its message``."""
    return f"{type(error).__name__}: {first_line(str(error))}"


@dataclasses.dataclass
class Row(ValueRow[Measure]):
    """One value of the graph, of which ``entry`` is written."""

    stack: Sequence[Frame] = ()  # outermost first
    judged: Judged | None = None  # of the first wrong value
    is_returned: bool = False  # whether the run has it without looking into a session

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
    def is_right(self) -> bool:
        """Whether the error is within the tolerance; true also for a value that was not judged."""
        return not self.complaint and (self.error is None or self.error.is_rounding)

    @property
    def eager_overflows(self) -> bool:
        """Whether eager is NaN or infinite at elements where the run is not, on the same inputs."""
        if self.eager_extent is None or self.extent is None:
            return False
        return self.eager_extent.nan + self.eager_extent.infinite > self.extent.nan + self.extent.infinite

    @property
    def fault(self) -> str:
        """The error, its element and tolerance; ``""`` if it is rounding or of a discrete dtype."""
        dtype = self.torch_dtype
        is_discrete = not dtype.is_floating_point and not dtype.is_complex
        return "" if is_discrete else str(Verdict(ours=self.error, index=self.index))

    @property
    def mark(self) -> str:
        """``=`` bitwise equal to eager, ``~`` within rounding, ``!`` wrong, ``?`` not deterministic, blank: not
        known."""
        if self.instability is not None:
            return "?"
        if not self.is_right:
            return "!"
        if self.error is None:
            return " "
        return "=" if self.equals_eager else "~"

    @property
    def entry(self) -> RowEntry:
        return msgspec.convert(self, RowEntry, from_attributes=True)

    @property
    def wrong_node(self) -> WrongNodeEntry:
        error = msgspec.convert(self.error, MeasureEntry | None, from_attributes=True)
        elements = self.wrong_elements.text if self.wrong_elements is not None else self.complaint
        return WrongNodeEntry(self.name, self.operator, self.where, self.module, self.converter, error, elements)

    @property
    def size_of_fault(self) -> float:
        """The error relative to the scale of the value; infinite for another dtype or shape."""
        return self.error.relative if self.error is not None and not self.complaint else math.inf


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
        return text + (f", and {more}" if self.more else "")

    @property
    def entry(self) -> BlameEntry:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(BlamedValue)}
        cause = self.cause
        return BlameEntry(**fields, kind=cause.kind, name=cause.name, stage=cause.stage, cause=str(cause))


@dataclasses.dataclass(frozen=True)
class Finding:
    """The comparison of one stage, or of the results with the captured graph."""

    culprit: Blame | None = None  # the wrong stage, pass or decomposition
    wrong: list[Blame] = dataclasses.field(default_factory=list)  # wrong results that no stage explains
    unchecked: list[str] = dataclasses.field(default_factory=list)  # what could not be compared, with the reason
    sizes: SizesByName | None = None  # those of another call that it is about


@dataclasses.dataclass(frozen=True)
class ExpectedValues:
    """The inputs of a node that is wrong alone, and its results in eager and in float64, by ONNX value name."""

    region: int
    input: Mapping[str, torch.Tensor]
    eager: Mapping[str, torch.Tensor]
    exact: Mapping[str, torch.Tensor]


@dataclasses.dataclass
class GraphComparison:
    """The comparison of one run of a graph; see ``GraphEntry`` for fields of the same name."""

    blame: Blame | None = None  # the first wrong value; ``None`` if all are right
    not_comparable: str = ""  # why the run cannot be compared
    note: str = ""  # such as what explains a difference that is not a fault
    rows: list[Row] = dataclasses.field(default_factory=list)  # every value, in execution order
    unchecked: list[str] = dataclasses.field(default_factory=list)
    sizes: SizesByName = dataclasses.field(default_factory=dict)  # those of the run that may differ between runs
    wrong_nodes: Sequence[Row] = ()  # those that are wrong by themselves, the largest errors first
    faults: Sequence[Error[Measure]] = ()  # of wrong stages, passes and results, in addition to those of the rows
    expected: ExpectedValues | None = None

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
    def nonfinite(self) -> dict[str, int]:
        """How many elements are NaN or infinite, by result of the graph that has some."""
        extents = ((row.user_name or row.name, row.extent) for row in self.rows if row.is_output)
        return {name: item.nan + item.infinite for name, item in extents if item is not None and not item.is_finite}

    @property
    def worst(self) -> Error[Measure] | None:
        """The largest error relative to its scale.

        If the run is right: among the outputs. If not: among ``faults`` and the blamed value; ``None`` if none of them
        has a size, as for a wrong dtype.
        """
        if self.blame is None:
            errors = [Error(row.name, row.error, row.eager) for row in self.rows if row.is_output and row.error]
        else:
            wrong = [row for row in self.rows if row.name == self.blame.value and row.error and not row.is_right]
            wrong = wrong or list(self.wrong_nodes[:1])  # a pass changed an earlier value, which the session has not
            errors = [*self.faults, *(Error(row.name, row.error, row.eager) for row in wrong if row.error)]
        return max(errors, key=lambda error: error.onnx.relative, default=None)
