"""Finds where NaN and infinities come from in a compared run, and which results they reach.

::

    found = find_nonfinite(run.graphs[0])
    for origin in found.origins:
        print(origin.kind, origin.node, origin.source, origin.why)

The *origin* of a NaN or infinity is a node whose result has it and whose inputs do not: in eager, on ONNX Runtime, or
both. Those that the user intends are reported separately: in inputs of the graph, or from an infinite number in the
code, such as a mask with ``-inf``. The compared run recorded the range of all values, so nothing runs again.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

from ..numerics.element_records import Extent, NonfiniteElement
from ..numerics.rule import FORMATS
from .reading import DumpedGraph
from .schema import RowEntry

KINDS = {"nan": "NaN", "infinite": "infinity"}

_SIDES = ("eager", "onnx")


@dataclasses.dataclass(frozen=True)
class NodeInput:
    """An input of a node."""

    name: str
    extent: Extent | None  # ``None`` for integers


@dataclasses.dataclass(frozen=True)
class Origin:
    """A node whose result has NaN or infinities that its inputs do not have."""

    node: str  # the value, ``name__i`` for one of several results
    kind: str  # ``NaN`` or ``infinity``
    operator: str  # the ATen operator
    module: str  # the path of the ``nn.Module``
    source: str  # the user's line
    region: int | None  # ``None`` for PyTorch
    dtype: str
    shape: Sequence[int]
    elements: int
    eager: int | None  # eager, onnx: the number of such elements in eager and on ONNX Runtime; ``None`` if unknown
    onnx: int | None
    side: str  # ``both``, ``eager`` or ``onnx``
    why: str  # the usual reason, or ``""``
    inputs: Sequence[NodeInput]
    examples: Sequence[NonfiniteElement]  # some of the elements, with those of the inputs that they come from
    reaches: Sequence[str]  # the results of the graph that have it
    ends_at: Sequence[tuple[str, str, str]]  # the first nodes that read it and are finite: name, operator and line


@dataclasses.dataclass(frozen=True)
class Nonfinite:
    """The NaN and infinities in the compared run of a graph, in execution order."""

    origins: Sequence[Origin]
    intended: Sequence[Origin]  # an argument is infinite, as of a mask; or memory was not initialized
    graph_inputs: Sequence[str]  # the inputs and constants of the graph that have NaN or infinities
    values: int  # how many values were checked

    def as_json(self) -> dict[str, object]:
        return dataclasses.asdict(self)


def find_nonfinite(graph: DumpedGraph) -> Nonfinite:
    """Finds NaN and infinities in a compared run; ``DumpError`` if no run was compared, or the dump is damaged."""
    origins: list[Origin] = []
    intended: list[Origin] = []
    rows = {row.name: row for row in graph.rows()}
    for row in rows.values():
        if not row.is_computed:
            continue
        for key in KINDS:
            if any(_begins_in(rows, row, side, key) for side in _SIDES):
                is_intended = (key == "infinite" and row.has_infinite_argument) or row.is_uninitialized
                (intended if is_intended else origins).append(_origin(rows, row, key))
    graph_inputs = [
        row.user_name or name
        for name, row in rows.items()
        if not row.is_computed and any(_count(row, "eager", key) for key in KINDS)
    ]
    return Nonfinite(origins, intended, graph_inputs, len(rows))


def _extent(row: RowEntry, side: str) -> Extent | None:
    """A value's range in eager, on the inputs that ONNX Runtime had, or in the run."""
    return row.eager_extent if side == "eager" else row.extent


def _count(row: RowEntry, side: str, key: str) -> int | None:
    return getattr(_extent(row, side), key, None)


def _begins_in(rows: Mapping[str, RowEntry], row: RowEntry, side: str, key: str) -> bool:
    """Whether a value has it and its inputs do not. Inputs that are unknown on this side count with eager's values."""
    if not _count(row, side, key):
        return False
    for read in (rows[name] for name in row.inputs if name in rows):
        count = _count(read, side, key)
        if count or (count is None and _count(read, "eager", key)):
            return False
    return True


def _origin(rows: Mapping[str, RowEntry], row: RowEntry, key: str) -> Origin:
    inputs = [NodeInput(name, _extent(rows[name], "eager")) for name in row.inputs if name in rows]
    eager, onnx = _count(row, "eager", key), _count(row, "onnx", key)
    reaches, ends_at = _follow(rows, row.name)
    wanted = ("nan",) if key == "nan" else ("inf", "-inf")
    examples = [element for element in row.nonfinite_elements if element.value in wanted]
    return Origin(
        node=row.name,
        kind=KINDS[key],
        **{name: getattr(row, name) for name in ("operator", "module", "source", "region", "dtype", "shape")},
        elements=math.prod(row.shape),
        eager=eager,
        onnx=onnx,
        side="both" if eager and onnx else "onnx" if onnx else "eager",
        why=_why(row, key, inputs, examples),
        inputs=inputs,
        examples=examples,
        reaches=reaches,
        ends_at=ends_at,
    )


def _follow(rows: Mapping[str, RowEntry], name: str) -> tuple[list[str], list[tuple[str, str, str]]]:
    """The results of the graph that a NaN or infinity reaches, and the first nodes that do not have it."""
    has = {name}
    reaches, ends_at = [], []
    for row in rows.values():
        if row.name != name and not has.intersection(row.inputs):
            continue
        if any(_count(row, side, other) for side in _SIDES for other in KINDS):
            has.add(row.name)
            if row.is_output:
                reaches.append(row.user_name or row.name)
        elif _extent(row, "eager") is not None:
            ends_at.append((row.name, row.operator, row.source))
    return reaches, ends_at


def _why(row: RowEntry, key: str, inputs: Sequence[NodeInput], examples: Sequence[NonfiniteElement]) -> str:
    """The usual reason for such a result of these inputs, or of the elements that it comes from, if known."""
    name = row.operator.removeprefix("aten.").split(".")[0].lstrip("_")
    extents = [item.extent for item in inputs if item.extent is not None]
    smallest = min((item.smallest for item in extents if item.smallest is not None), default=None)
    largest = max((item.largest for item in extents if item.largest is not None), default=None)
    if key == "nan" and any(item.infinite for item in extents):
        if "softmax" in name or "attention" in name:
            return "an infinity among its inputs: a row of a softmax that is -infinity everywhere is NaN"
        return "an infinity among its inputs: infinity minus infinity, or infinity times 0, is NaN"
    read = [value for example in examples for value in example.inputs.values() if isinstance(value, (int, float))]
    if read:
        smallest, largest = min(read), max(read)
    if smallest is None or largest is None:
        return ""
    for names, made, is_reason, said in _REASONS:
        if name in names and made == key and is_reason(smallest, largest):
            return said
    if key == "infinite" and row.dtype in FORMATS:
        return f"too large for {row.dtype}, whose largest number is {FORMATS[row.dtype].largest:g}"
    return ""


_LOGARITHMS = ("log", "log2", "log10", "log1p", "xlogy")
_QUOTIENTS = ("div", "reciprocal", "remainder", "fmod")
_ROOTS = ("sqrt", "rsqrt")

_REASONS: Sequence[tuple[Sequence[str], str, Callable[[float, float], bool], str]] = (
    (_LOGARITHMS, "nan", lambda low, high: low < 0, "the logarithm of a negative number is NaN"),
    (_LOGARITHMS, "infinite", lambda low, high: low <= 0, "the logarithm of 0 is -infinity"),
    (_QUOTIENTS, "nan", lambda low, high: low <= 0 <= high, "0 divided by 0 is NaN"),
    (_QUOTIENTS, "infinite", lambda low, high: low <= 0 <= high, "a number divided by 0 is infinite"),
    (_ROOTS, "nan", lambda low, high: low < 0, "the square root of a negative number is NaN"),
    (_ROOTS, "infinite", lambda low, high: low <= 0, "1 divided by the square root of 0 is infinite"),
    (("pow",), "nan", lambda low, high: low < 0, "a negative number to a power that is no integer is NaN"),
    (("pow",), "infinite", lambda low, high: low <= 0 <= high, "0 to a negative power is infinite"),
    (("acos", "asin", "atanh"), "nan", lambda low, high: low < -1 or high > 1, "outside of [-1, 1] it is NaN"),
)
"""Operators, what they return, the condition on the smallest and largest element of the inputs, and the reason."""
