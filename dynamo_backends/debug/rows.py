"""What a comparison finds: a row for each value, what is to blame, and the verdict on the run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import torch

from ..dumps.blame import Cause, Kind
from ..exporter.locations import Frame, place
from ..numerics.differences import Deviation
from ..numerics.distance import Distance, is_explained
from ..numerics.extent import Element, Extent
from .choice import SizesByName, sizes_text
from .repeat import Instability

OK = "ok"

_NAMED = 2
"""How many gradients a verdict names; the manifest has all."""


@dataclasses.dataclass
class Row:
    """One value of the graph.

    Attributes:
        name: the FX node, with ``__i`` for the i-th of several results; the ONNX value bears the same name.
        operator: the ATen operator, or ``placeholder`` or ``get_attr``.
        module: path of the ``nn.Module`` that called it.
        source: the user's own ``file:line``.
        user_name: what the user calls it: ``fc.weight`` of an argument, ``grad of fc.weight`` of a result; or ``""``.
        stack: the calls that led to it, outermost first.
        dtype: eager's dtype, without the ``torch.`` prefix.
        shape: eager's shape.
        region: the region that computes it; ``None`` in PyTorch.
        is_output: whether the graph returns it.
        equals_eager: the runtime's propagated value is eager's, bit for bit.
        onnx: propagated distance to exact.
        eager: eager's distance to exact.
        local_onnx: distance of the node alone, on eager's inputs, to eager if that is no more than rounding, else to
            float64 on these inputs.
        local_eager: eager's distance to the same: nothing, or the error that it has.
        in_model_onnx: distance of the node in the region's model, on the runtime's own upstream values, to float64 on
            these; looked at where the propagated value is not explained by eager's error.
        in_model_eager: eager's distance to the same.
        session: distance to exact of what the session that really ran computed: what it returned, or the value of that
            name in the model ONNX Runtime made of it.
        session_instability: how that came out another time, where its bits differed.
        local_instability: the same of the node alone, on eager's inputs; it is looked for where the session or the node
            alone differs by more than rounding.
        beside: the largest magnitude of what it is computed together with, see ``is_explained``: the other results of
            its node, and in a backward graph the gradients that the graph returns.
        inputs: the values that the node reads, as rows have their names.
        has_infinite_argument: whether a number among its arguments is infinite or NaN, as where a mask is filled.
        is_uninitialized: whether it is memory as it is, without values.
        eager_extent: the range of eager's value, and how many elements are NaN or infinite; ``None`` of integers.
        onnx_extent: the same of the runtime's propagated value, and of a value that PyTorch computed in the run.
        session_extent: the same of what ``session`` is the distance of.
        nonfinite_elements: some elements that are NaN or infinite, of eager's value or else of the runtime's.
        complaint: a dtype or shape that is not eager's, or ``""``.
    """

    name: str
    operator: str
    module: str = ""
    source: str = ""
    user_name: str = ""
    stack: Sequence[Frame] = ()
    dtype: str = ""
    shape: tuple[int, ...] = ()
    region: int | None = None
    is_output: bool = False
    equals_eager: bool = False
    onnx: Distance | None = None
    eager: Distance | None = None
    local_onnx: Distance | None = None
    local_eager: Distance | None = None
    in_model_onnx: Distance | None = None
    in_model_eager: Distance | None = None
    session: Distance | None = None
    session_instability: Instability | None = None
    local_instability: Instability | None = None
    beside: float = 0.0
    inputs: Sequence[str] = ()
    has_infinite_argument: bool = False
    is_uninitialized: bool = False
    eager_extent: Extent | None = None
    onnx_extent: Extent | None = None
    session_extent: Extent | None = None
    nonfinite_elements: Sequence[Element] = ()
    complaint: str = ""

    @property
    def where(self) -> str:
        """The line, see ``exporter.locations.place``."""
        return place(self.source, str(self.stack[-1]) if self.stack else "")

    @property
    def is_computed(self) -> bool:
        """Whether the graph computes it, and does not take it as an argument or hold it."""
        return self.operator not in ("placeholder", "get_attr")

    @property
    def type(self) -> str:
        """dtype and shape, for people."""
        return f"{self.dtype} {'x'.join(map(str, self.shape)) or 'scalar'}"

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def ours(self) -> Distance | None:
        """The distance to exact of the value as it really was where that is known, else of the propagated one."""
        return self.session or self.onnx

    def is_explained(self, ours: Distance | None, eager: Distance | None) -> bool:
        """Whether eager's error and rounding explain one; what was not measured needs no explanation."""
        return ours is None or eager is None or is_explained(ours, eager, self.torch_dtype, self.beside)

    @property
    def locally_explained(self) -> bool:
        """Whether the node by itself is right: on eager's inputs it is as near to exact as eager."""
        return self.is_explained(self.local_onnx, self.local_eager)

    @property
    def propagated_explained(self) -> bool:
        """Whether the value in the region's model is as near to exact as eager's."""
        return self.is_explained(self.onnx, self.eager)

    @property
    def in_model_explained(self) -> bool:
        """Whether the node in the region's model is right on what it was given there."""
        return self.is_explained(self.in_model_onnx, self.in_model_eager)

    @property
    def jumps(self) -> bool:
        """Whether the error jumps up here: the value is wrong, and what the node was given does not explain it."""
        is_wrong_here = not (self.in_model_explained and self.locally_explained)
        return bool(self.complaint) or (not self.propagated_explained and is_wrong_here)

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
        return not self.complaint and self.is_explained(self.ours, self.eager)

    @property
    def error(self) -> Error | None:
        """The value's error as it really was where that is known."""
        return None if self.ours is None else Error(self.name, self.ours, self.eager)

    @property
    def errors(self) -> list[Error]:
        """The distances to exact that rounding does not explain, with eager's."""
        pairs = (
            (self.ours, self.eager),
            (self.local_onnx, self.local_eager),
            (self.in_model_onnx, self.in_model_eager),
        )
        found = [
            Error(self.name, ours, eager)
            for ours, eager in pairs
            if ours is not None and not self.is_explained(ours, eager)
        ]
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
        if self.complaint or not self.locally_explained or not self.in_model_explained:
            return "!"
        if self.onnx is None:
            return " "
        return "=" if self.equals_eager else "~"

    def as_json(self) -> dict[str, object]:
        fields = {field.name: _as_json(getattr(self, field.name)) for field in dataclasses.fields(self)}
        return {**fields, "mark": self.mark, "locally_explained": self.locally_explained}


def _as_json(value: object) -> object:
    if isinstance(value, (list, tuple)):
        return [_as_json(item) for item in value]
    return value.as_json() if isinstance(value, (Distance, Extent, Element, Instability, Frame)) else value


_SAID_IN_NOTE = (Kind.PASS, Kind.DECOMPOSITION, Kind.TRACE, Kind.STAGE)


@dataclasses.dataclass(frozen=True)
class Blame:
    """A value that is wrong, and what made it so.

    Attributes:
        value: the FX node, with ``__i`` for the i-th of several results; what a result is called that has no row.
        cause: what made it wrong.
        region: the region that computes it; ``None`` in PyTorch, or where a stage before the regions is to blame.
        source: the line, see ``exporter.locations.place``, or ``""``.
        user_name: what the user calls it, ``grad of fc.weight``, or ``""``.
        gradients: in a backward, what the user gets that is computed next of it: ``grad of fc.weight``.
        said: how it is wrong.
    """

    value: str
    cause: Cause
    region: int | None = None
    source: str = ""
    user_name: str = ""
    gradients: Sequence[str] = ()
    said: Deviation = Deviation()

    def __str__(self) -> str:
        name = self.user_name if self.cause.kind == Kind.RESULT and self.user_name else self.value
        parts = [f"{name} ({self.source or 'no source line'})", str(self.cause)]
        parts += [] if self.cause.kind in _SAID_IN_NOTE else [self.said]
        more = f" and {len(self.gradients) - _NAMED} more" if len(self.gradients) > _NAMED else ""
        named = f", on the way to {', '.join(self.gradients[:_NAMED])}{more}" if self.gradients else ""
        return ": ".join(filter(None, parts)) + named

    def as_json(self) -> dict[str, object]:
        return {
            "value": self.value,
            "user_name": self.user_name,
            "gradients": list(self.gradients),
            "region": self.region,
            "source": self.source,
            "kind": self.cause.kind.value,
            "name": self.cause.name,
            "stage": self.cause.stage,
            "cause": str(self.cause),
        }


@dataclasses.dataclass(frozen=True)
class Error:
    """The error of one value: its name, its distance to float64, and eager's; ``None`` where that is not known."""

    value: str
    onnx: Distance
    eager: Distance | None

    @property
    def relative(self) -> float:
        """To the largest magnitude of the value; infinite where elements are NaN or infinite on one side only."""
        if self.onnx.nonfinite:
            return math.inf
        return self.onnx.max_abs / self.onnx.scale if self.onnx.scale else self.onnx.max_abs

    def as_json(self) -> dict[str, object]:
        eager = self.eager.as_json() if self.eager else None
        return {"value": self.value, "onnx": self.onnx.as_json(), "eager": eager}


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
