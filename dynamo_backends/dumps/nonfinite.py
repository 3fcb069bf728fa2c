"""Finds where NaN and infinities come from in a compared run, and what becomes of them.

::

    found = find_nonfinite(run.graphs[0])
    for origin in found.origins:
        print(origin.kind, origin.row.name, origin.row.source, origin.why)

A filter on the rows of ``side_by_side.json``; nothing runs again. The *origin* of a NaN or infinity is a node whose
result has it and whose inputs do not: in eager, on ONNX Runtime, or both. Of a value that the session does not have,
because it computes several nodes as one, only eager's is known. What the user intends is reported separately: in inputs
of the graph, or from an infinite number in the code, such as a mask with ``-inf``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from ..numerics.element_records import Extent, NonfiniteElement
from ..numerics.rule import FORMATS
from .reading import DumpedGraph
from .schema import RowEntry

KINDS = {"nan": "NaN", "infinite": "infinity"}

_SELECTING = ("where", "masked_fill", "nan_to_num", "index", "index_select", "gather", "select", "slice", "topk")
"""Operators that leave elements out. Any other that returns finite numbers has computed them from NaN or infinity."""


@dataclasses.dataclass(frozen=True)
class Origin:
    """A node whose result has NaN or infinities that its inputs do not have."""

    row: RowEntry
    kind: str  # ``NaN`` or ``infinity``
    eager: int | None  # how many such elements eager has
    onnx: int | None  # how many ONNX Runtime has; ``None`` if the session does not have the value
    why: str  # the usual reason, or ``""``
    inputs: Mapping[str, Extent | None]  # their ranges in eager; ``None`` for integers
    examples: Sequence[NonfiniteElement]  # some of the elements, with those of the inputs that they come from
    reaches: Sequence[RowEntry]  # the results of the graph that have it
    ends_at: Sequence[RowEntry]  # the first nodes that read it and are finite
    depending: Sequence[RowEntry]  # the finite results that are computed from it, of those that do not leave it out

    @property
    def side(self) -> str:
        """Where it is: ``both``, ``eager`` or ``onnx``."""
        return "both" if self.eager and self.onnx else "onnx" if self.onnx else "eager"

    @property
    def used_by(self) -> Sequence[RowEntry]:
        """The nodes that compute finite numbers from it."""
        return [row for row in self.ends_at if _name(row) not in _SELECTING]

    @property
    def is_left_out(self) -> bool:
        """Whether no result depends on it."""
        return not self.reaches and not self.depending

    def as_json(self) -> dict[str, object]:
        names = ("operator", "module", "source", "region", "dtype", "shape")
        fields = {name: getattr(self, name) for name in ("kind", "eager", "onnx", "side", "why", "inputs", "examples")}
        lists = {name: [row.name for row in getattr(self, name)] for name in ("reaches", "ends_at", "depending")}
        return {"node": self.row.name, **{name: getattr(self.row, name) for name in names}, **fields, **lists}


@dataclasses.dataclass(frozen=True)
class Nonfinite:
    """The NaN and infinities in the compared run of a graph, in execution order."""

    origins: Sequence[Origin]
    intended: Sequence[Origin]  # an argument is infinite, as of a mask; or memory was not initialized
    graph_inputs: Sequence[str]  # the inputs and constants of the graph that have NaN or infinities
    values: int  # how many values were checked

    def as_json(self) -> dict[str, object]:
        lists = {name: [item.as_json() for item in getattr(self, name)] for name in ("origins", "intended")}
        return {**lists, "graph_inputs": self.graph_inputs, "values": self.values}


def find_nonfinite(graph: DumpedGraph) -> Nonfinite:
    """Finds NaN and infinities in a compared run; ``DumpError`` if no run was compared, or the dump is damaged."""
    origins: list[Origin] = []
    intended: list[Origin] = []
    rows = {row.name: row for row in graph.rows()}
    for row in rows.values():
        for key in KINDS if row.is_computed else ():
            if _begins_in(rows, row, "eager", key) or _begins_in(rows, row, "onnx", key):
                is_intended = (key == "infinite" and row.has_infinite_argument) or row.is_uninitialized
                (intended if is_intended else origins).append(_origin(rows, row, key))
    graph_inputs = [
        row.user_name or name
        for name, row in rows.items()
        if not row.is_computed and any(_count(row, "eager", key) for key in KINDS)
    ]
    return Nonfinite(origins, intended, graph_inputs, len(rows))


def _count(row: RowEntry, side: str, key: str) -> int | None:
    """How many elements are NaN or infinite; ``None`` if unknown."""
    is_known = side == "eager" or row.origin
    return getattr(row.eager_extent if side == "eager" else row.extent, key, None) if is_known else None


def _begins_in(rows: Mapping[str, RowEntry], row: RowEntry, side: str, key: str) -> bool:
    """Whether a value has it and its inputs do not. Inputs that are unknown on this side count with eager's values."""
    read = [rows[name] for name in row.inputs if name in rows]
    counts = (_count(item, side, key) for item in read)
    before = (_count(item, "eager", key) if count is None else count for item, count in zip(read, counts, strict=True))
    return bool(_count(row, side, key)) and not any(before)


def _has_any(row: RowEntry) -> bool:
    return any(_count(row, side, key) for side in ("eager", "onnx") for key in KINDS)


def _origin(rows: Mapping[str, RowEntry], row: RowEntry, key: str) -> Origin:
    readers: dict[str, list[RowEntry]] = {}
    for item in rows.values():  # a row that was added for a verdict may come after its readers
        for name in item.inputs:
            readers.setdefault(name, []).append(item)
    has, ends, uses = set[str](), set[str](), set[str]()
    pending = [(row, row, True)]
    while pending:
        item, before, carries = pending.pop()
        # What the session has, and eager does not, goes through values that the session does not show.
        goes_through = not item.origin and not any(_count(before, "eager", kind) for kind in KINDS)
        found = (has if _has_any(item) or goes_through else ends) if carries else uses
        if item.name in found:
            continue
        found.add(item.name)
        if found is ends and _name(item) in _SELECTING:
            continue
        if found is ends:
            uses.add(item.name)
        pending += [(reader, item, found is has) for reader in readers.get(item.name, ())]
    reaches = [item for name, item in rows.items() if name in has and item.is_output]
    ends_at = [item for name, item in rows.items() if name in ends]
    depending = [item for name, item in rows.items() if name in uses and item.is_output]
    inputs = {name: rows[name].eager_extent for name in row.inputs if name in rows}
    wanted = ("nan",) if key == "nan" else ("inf", "-inf")
    examples = [element for element in row.nonfinite_elements if element.value in wanted]
    why = _why(row, key, [item for item in inputs.values() if item is not None], examples)
    counts = _count(row, "eager", key), _count(row, "onnx", key)
    return Origin(row, KINDS[key], *counts, why, inputs, examples, reaches, ends_at, depending)


def _name(row: RowEntry) -> str:
    return row.operator.removeprefix("aten.").split(".")[0].lstrip("_")


def _why(row: RowEntry, key: str, extents: Sequence[Extent], examples: Sequence[NonfiniteElement]) -> str:
    """The usual reason for such a result of these inputs, or of the elements that it comes from, if known."""
    name = _name(row)
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
