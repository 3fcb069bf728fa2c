"""What a comparison finds: a row for each value, what is to blame, and the verdict on the run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import msgspec
import torch

from ..dumps.blame import Cause, Kind
from ..dumps.schema import BlamedValue, BlameEntry, ElementEntry, RowEntry, ValueFacts
from ..graphs.locations import Frame, place
from ..numerics.measure import Measure
from ..numerics.value_range import Extent
from ..numerics.verdicts import RIGHT, Verdict
from .chosen_runs import SizesByName, sizes_text
from .repeated_runs import Instability

OK = "ok"

_NAMED = 2
"""How many gradients a verdict names; the manifest has all."""


@dataclasses.dataclass
class Row(ValueFacts):
    """One value of the graph, with its numbers as ``RowEntry`` describes them."""

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
        """The line, see ``exporter.locations.place``."""
        return place(self.source, str(self.stack[-1]) if self.stack else "")

    @property
    def type(self) -> str:
        """dtype and shape, for people."""
        return f"{self.dtype} {'x'.join(map(str, self.shape)) or 'scalar'}"

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    def explain(self, found: Measure | None) -> None:
        """Takes a measure of ``ours`` that has more of what rounding makes in its tolerance."""
        if self.session is not None:
            self.session = found or self.session
        else:
            self.onnx = found or self.onnx

    @property
    def ours(self) -> Measure | None:
        """The distance to exact of the value as it really was where that is known, else of the propagated one."""
        return self.session or self.onnx

    @property
    def locally_explained(self) -> bool:
        """Whether the node by itself is right: on what it was given it is as near to exact as rounding makes it."""
        return not self.complaint and (self.local_onnx is None or self.local_onnx.is_rounding)

    @property
    def propagated_explained(self) -> bool:
        """Whether the value in the region's model is as near to exact as eager's."""
        return self.onnx is None or self.onnx.is_rounding

    @property
    def unstable_alone(self) -> bool:
        """Whether the node by itself, on eager's inputs, gives results that differ by more than rounding."""
        found = self.local_instability
        return found is not None and not found.is_rounding(self.local_eager)

    @property
    def unstable_in_session(self) -> bool:
        """Whether the session that ran gives results that differ by more than rounding carried through the graph."""
        found = self.session_instability
        return found is not None and not found.is_rounding(self.eager)

    @property
    def explained(self) -> bool:
        """Whether the value, as it really was where that is known, is as near to exact as eager's."""
        return not self.complaint and (self.ours is None or self.ours.is_rounding)

    @property
    def error(self) -> Error | None:
        """The value's error as it really was where that is known."""
        return None if self.ours is None else Error(self.name, self.ours, self.eager)

    @property
    def errors(self) -> list[Error]:
        """The distances to exact that rounding does not explain, with eager's."""
        pairs = ((self.ours, self.eager), (self.local_onnx, self.local_eager))
        found = [Error(self.name, ours, eager) for ours, eager in pairs if ours is not None and not ours.is_rounding]
        if self.unstable_in_session and self.session_instability is not None:
            found.append(Error(self.name, self.session_instability.difference, self.eager))
        if self.unstable_alone and self.local_instability is not None:
            found.append(Error(self.name, self.local_instability.difference, self.local_eager))
        return found

    @property
    def mark(self) -> str:
        """``=`` eager's bits, ``~`` another rounding, ``!`` wrong by itself, ``?`` different each time, blank: not
        compared."""
        if self.unstable_alone:
            return "?"
        if not self.locally_explained:
            return "!"
        if self.onnx is None:
            return " "
        return "=" if self.equals_eager else "~"

    @property
    def entry(self) -> RowEntry:
        """What a dump has of it."""
        return msgspec.convert(self, RowEntry, from_attributes=True)


_SAID_IN_NOTE = (Kind.PASS, Kind.DECOMPOSITION, Kind.TRACE, Kind.STAGE)


@dataclasses.dataclass(frozen=True)
class Blame(BlamedValue):
    """A value that is wrong, what made it so, and how it is wrong."""

    cause: Cause
    said: Verdict = dataclasses.field(default=RIGHT, kw_only=True)

    def __str__(self) -> str:
        name = self.user_name if self.cause.kind == Kind.RESULT and self.user_name else self.value
        in_module = f" in {self.module}" if self.module else ""
        cause = str(self.cause) or ("converter" if self.code else "")
        cause += f" ({self.code})" if self.code else ""
        parts = [f"{name} ({self.source or 'no source line'}){in_module}", cause]
        parts += [] if self.cause.kind in _SAID_IN_NOTE else [str(self.said)]
        more = f" and {len(self.gradients) - _NAMED} more" if len(self.gradients) > _NAMED else ""
        named = f", on the way to {', '.join(self.gradients[:_NAMED])}{more}" if self.gradients else ""
        others = f", and {self.more} more nodes are wrong by themselves" if self.more else ""
        because = f", because {self.because}" if self.because else ""
        return ": ".join(filter(None, parts)) + named + others + because

    @property
    def entry(self) -> BlameEntry:
        """What a dump has of it."""
        known = {field.name: getattr(self, field.name) for field in dataclasses.fields(BlamedValue)}
        cause = self.cause
        return BlameEntry(**known, kind=cause.kind, name=cause.name, stage=cause.stage, cause=str(cause))


@dataclasses.dataclass(frozen=True)
class Error:
    """The error of one value: its name, its distance to float64, and eager's; ``None`` where that is not known."""

    value: str
    onnx: Measure
    eager: Measure | None

    @property
    def relative(self) -> float:
        """See ``Measure.relative``."""
        return self.onnx.relative


@dataclasses.dataclass(frozen=True)
class Finding:
    """What a stage, or the captured graph, says of a run.

    Attributes:
        culprit: the stage, pass or decomposition that is wrong, or ``None``.
        wrong: the results that are not right though no stage is to blame.
        because: what explains them, or ``""``.
        unchecked: what could not be compared, with the reason.
    """

    culprit: Blame | None = None
    wrong: list[Blame] = dataclasses.field(default_factory=list)
    because: str = ""
    unchecked: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class GraphComparison:
    """The outcome for one run of a graph.

    Attributes:
        blame: what is wrong first; ``None`` if nothing is.
        not_comparable: why the run cannot be compared, or ``""``.
        note: which side is nearer to exact, and what explains a difference that is not a fault.
        rows: every value, in execution order.
        unchecked: what could not be compared or had no float64 to be compared with, each with the reason.
        sizes: of the run, by argument, where they may be others: the shape of a tensor as a list, or a number.
        faults: the errors that the stages, passes and results were found to have, beside those of the rows.
        rescued: by index of a region that PyTorch ran because its session failed, what ONNX Runtime said.
    """

    blame: Blame | None = None
    not_comparable: str = ""
    note: str = ""
    rows: list[Row] = dataclasses.field(default_factory=list)
    unchecked: list[str] = dataclasses.field(default_factory=list)
    sizes: SizesByName = dataclasses.field(default_factory=dict)
    faults: Sequence[Error] = ()
    rescued: Mapping[int, str] = dataclasses.field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return self.blame is None and not self.not_comparable

    @property
    def verdict(self) -> str:
        """``ok``, ``not comparable: why``, or ``diverges at NODE (file:line)``, the cause, and the sizes of the run."""
        if self.ok:
            return OK
        said = f"diverges at {self.blame}" if self.blame is not None else f"not comparable: {self.not_comparable}"
        return f"{said}, with {sizes_text(self.sizes)}" if self.sizes else said

    def row_of(self, value: str) -> Row | None:
        return next((row for row in self.rows if row.name == value), None)

    @property
    def worst(self) -> Error | None:
        """The error that is largest relative to its scale.

        Of a run that is right: among the outputs, as they really were computed. Of one that is not: among the faults,
        those of the outputs, of what the verdict names, and of what was found in the stages before; ``None`` if none of
        them is a matter of size, such as a wrong dtype.
        """
        outputs = [row for row in self.rows if row.is_output]
        if self.blame is None:
            found = [error for row in outputs if (error := row.error) is not None]
        else:
            named = [row for row in self.rows if row.name == self.blame.value]
            found = [*self.faults, *(error for row in outputs + named for error in row.errors)]
        return max(found, key=lambda error: error.relative, default=None)
