"""Finds where NaN and infinities come from in a compared run, and where they end.

::

    found = find_nonfinite(run.graphs[0])
    for origin in found.origins:
        print(origin.kind, origin.row.name, origin.row.source)

A filter on the rows of ``side_by_side.json``; nothing runs again. The *origin* of a NaN or infinity is a node whose
result has it and whose inputs do not: in eager, on ONNX Runtime, or both. Of a value that the session does not have,
because it computes several nodes as one, only eager's is known. What the user intends is reported separately: in inputs
of the graph, or from an infinite number in the code, such as a mask with ``-inf``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from ..numerics.element_records import Extent, NonfiniteElement
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
    inputs: Mapping[str, Extent | None]  # their ranges in eager; ``None`` for integers
    examples: Sequence[NonfiniteElement]  # some of the elements, with those of the inputs that they come from
    reaches: Sequence[RowEntry]  # the results of the graph that have it
    ends_at: Sequence[RowEntry]  # the first nodes that read it and are finite
    used_by: Sequence[RowEntry]  # those of them that compute finite numbers from it, and do not leave it out
    side: str  # where it is: ``both``, ``eager`` or ``onnx``


@dataclasses.dataclass(frozen=True)
class Nonfinite:
    """The NaN and infinities in the compared run of a graph, in execution order."""

    origins: Sequence[Origin]
    intended: Sequence[Origin]  # an argument is infinite, as of a mask; or memory was not initialized
    graph_inputs: Sequence[str]  # the inputs and constants of the graph that have NaN or infinities
    values: int  # how many values were checked


def find_nonfinite(graph: DumpedGraph) -> Nonfinite:
    """Finds NaN and infinities in a compared run; ``DumpError`` if no run was compared, or the dump is damaged."""
    origins: list[Origin] = []
    intended: list[Origin] = []
    rows = {row.name: row for row in graph.rows()}
    readers: dict[str, list[RowEntry]] = {}
    for row in rows.values():  # one that was added for a verdict may come after its readers
        for name in row.inputs:
            readers.setdefault(name, []).append(row)
    for row in rows.values():
        for key in KINDS if row.is_computed else ():
            if _begins_in(rows, row, "eager", key) or _begins_in(rows, row, "onnx", key):
                is_intended = (key == "infinite" and row.has_infinite_argument) or row.is_uninitialized
                (intended if is_intended else origins).append(_origin(rows, readers, row, key))
    given = {row.user_name or row.name: row for row in rows.values() if not row.is_computed}
    return Nonfinite(origins, intended, [name for name, row in given.items() if _has_any(row, "eager")], len(rows))


def _count(row: RowEntry, side: str, key: str) -> int | None:
    """How many elements are NaN or infinite; ``None`` if unknown."""
    is_known = side == "eager" or row.origin
    return getattr(row.eager_extent if side == "eager" else row.extent, key, None) if is_known else None


def _has_any(row: RowEntry, *sides: str) -> bool:
    return any(_count(row, side, key) for side in sides for key in KINDS)


def _begins_in(rows: Mapping[str, RowEntry], row: RowEntry, side: str, key: str) -> bool:
    """Whether a value has it and its inputs do not. Inputs that are unknown on this side count with eager's values."""
    read = [rows[name] for name in row.inputs if name in rows]
    counts = (_count(item, side, key) for item in read)
    before = (_count(item, "eager", key) if count is None else count for item, count in zip(read, counts, strict=True))
    return bool(_count(row, side, key)) and not any(before)


def _origin(rows: Mapping[str, RowEntry], readers: Mapping[str, Sequence[RowEntry]], row: RowEntry, key: str) -> Origin:
    has, ends = {row.name}, set[str]()
    pending = [(reader, row) for reader in readers.get(row.name, ())]
    while pending:
        item, before = pending.pop()
        # What the session has, and eager does not, goes through values that the session does not show.
        is_hidden = not item.origin and not _has_any(before, "eager")
        if item.name not in has and (is_hidden or _has_any(item, "eager", "onnx")):
            has.add(item.name)
            pending += [(reader, item) for reader in readers.get(item.name, ())]
        elif item.name not in has:
            ends.add(item.name)
    inputs = {name: rows[name].eager_extent for name in row.inputs if name in rows}
    wanted = ("nan",) if key == "nan" else ("inf", "-inf")
    examples = [element for element in row.nonfinite_elements if element.value in wanted]
    reaches = [item for name, item in rows.items() if name in has and item.is_output]
    ends_at = [item for name, item in rows.items() if name in ends]
    eager, onnx = _count(row, "eager", key), _count(row, "onnx", key)
    used_by = [item for item in ends_at if _name(item) not in _SELECTING]
    side = "both" if eager and onnx else "onnx" if onnx else "eager"
    return Origin(row, KINDS[key], eager, onnx, inputs, examples, reaches, ends_at, used_by, side)


def _name(row: RowEntry) -> str:
    return row.operator.removeprefix("aten.").split(".")[0].lstrip("_")
