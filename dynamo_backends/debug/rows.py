"""What a comparison finds: a row for each value, and the verdict on the run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch

from ..dumps.blame import Cause
from ..exporter.locations import Frame, place
from ..numerics.distance import Distance, is_explained
from ..numerics.extent import Element, Extent
from .choice import SizesByName
from .repeat import Instability

OK = "ok"


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
    def library_line(self) -> str:
        """``file:line`` of the innermost call, if it is not of the user's own files; else ``""``."""
        innermost = str(self.stack[-1]) if self.stack else ""
        return "" if innermost == self.source else innermost

    @property
    def where(self) -> str:
        """The line, as it is said: see ``exporter.locations.place``."""
        return place(self.source, self.library_line)

    @property
    def is_computed(self) -> bool:
        """Whether the graph computes it, and does not take it as an argument or hold it."""
        return self.operator not in ("placeholder", "get_attr")

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def locally_explained(self) -> bool:
        """Whether the node by itself is right: on eager's inputs it is as near to exact as eager."""
        if self.local_onnx is None or self.local_eager is None:
            return True
        return is_explained(self.local_onnx, self.local_eager, self.torch_dtype, self.beside)

    @property
    def propagated_explained(self) -> bool:
        """Whether the value in the region's model is as near to exact as eager's."""
        if self.onnx is None or self.eager is None:
            return True
        return is_explained(self.onnx, self.eager, self.torch_dtype, self.beside)

    @property
    def in_model_explained(self) -> bool:
        """Whether the node in the region's model is right on what it was given there."""
        if self.in_model_onnx is None or self.in_model_eager is None:
            return True
        return is_explained(self.in_model_onnx, self.in_model_eager, self.torch_dtype, self.beside)

    @property
    def jumps(self) -> bool:
        """Whether the error jumps up here: the value is wrong, and what the node was given does not explain it."""
        if self.complaint:
            return True
        return not self.propagated_explained and not (self.in_model_explained and self.locally_explained)

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
        ours = self.session or self.onnx
        if ours is None or self.eager is None:
            return not self.complaint
        return not self.complaint and is_explained(ours, self.eager, self.torch_dtype, self.beside)

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
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields = {
            key: item.as_json() if isinstance(item, (Distance, Instability)) else item for key, item in fields.items()
        }
        for name in ("eager_extent", "onnx_extent", "session_extent"):
            fields[name] = None if fields[name] is None else dataclasses.asdict(fields[name])
        fields["nonfinite_elements"] = [element.as_json() for element in self.nonfinite_elements]
        fields["stack"] = [frame.as_json() for frame in self.stack]
        return {**fields, "mark": self.mark, "locally_explained": self.locally_explained}


@dataclasses.dataclass(frozen=True)
class Blame:
    """What a verdict names, for programs.

    Attributes:
        value: the FX node, with ``__i`` for the i-th of several results; what a result is called that has no row.
        cause: what made it wrong.
        region: the region that computes it; ``None`` in PyTorch, or where a stage before the regions is to blame.
        source: the line, see ``exporter.locations.place``, or ``""``.
        user_name: what the user calls it, ``grad of fc.weight``, or ``""``.
        gradients: in a backward, what the user gets that is computed next of it: ``grad of fc.weight``.
    """

    value: str
    cause: Cause
    region: int | None = None
    source: str = ""
    user_name: str = ""
    gradients: Sequence[str] = ()

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


@dataclasses.dataclass
class GraphComparison:
    """The outcome for one run of a graph.

    Attributes:
        verdict: ``ok``, ``diverges at NODE (file:line)``, where results are others each time or with other threads
            followed by ``: not deterministic: ...`` or ``: depends on the number of threads: ...``, or
            ``not comparable: why``.
        note: which side is nearer to exact, and what explains a difference that is not a fault.
        rows: every value, in execution order.
        unchecked: what could not be compared or had no float64 to be compared with, each with the reason.
        blame: what the verdict names; ``None`` if it is ``ok`` or names nothing.
        sizes: of the run, by argument, where they may be others: the shape of a tensor as a list, or a number.
    """

    verdict: str
    note: str = ""
    rows: list[Row] = dataclasses.field(default_factory=list)
    unchecked: list[str] = dataclasses.field(default_factory=list)
    blame: Blame | None = None
    sizes: SizesByName = dataclasses.field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return self.verdict == OK

    @property
    def worst(self) -> Row | None:
        """The output with the largest error relative to its scale, as it really was computed."""
        outputs = [row for row in self.rows if row.is_output and (row.session or row.onnx) is not None]
        return max(outputs, key=relative_error, default=None)

    def worst_as_json(self) -> dict[str, object] | None:
        row = self.worst
        if row is None:
            return None
        ours = row.session or row.onnx
        assert ours is not None
        return {"value": row.name, "onnx": ours.as_json(), "eager": row.eager.as_json() if row.eager else None}


def relative_error(row: Row) -> float:
    ours = row.session or row.onnx
    assert ours is not None
    if ours.nonfinite:
        return math.inf
    return ours.max_abs / ours.scale if ours.scale else ours.max_abs
