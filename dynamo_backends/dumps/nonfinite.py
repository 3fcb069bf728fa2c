"""Where NaN and infinities come from in a compared run, and where they go.

::

    found = find_nonfinite(run.graphs[0])
    for birth in found.births:
        print(birth.kind, birth.node, birth.source, birth.why)

A NaN or an infinity is *born* in a node that has it in its result and in none of its inputs: in eager's values, in
those that ONNX Runtime computed, or both. What the graph was given, and what a number in the user's code asks for (a
mask that is filled with ``-inf``), is told apart: the user means it. The comparison when the graph was dumped recorded
the range of each value, so all nodes are looked at, also those that PyTorch ran; nothing runs again.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

from .reading import DumpedGraph
from .schema import ElementEntry, ExtentEntry, RowEntry

KINDS = {"nan": "NaN", "infinite": "infinity"}

_SIDES = ("eager", "onnx")


@dataclasses.dataclass(frozen=True)
class Input:
    """What a node read."""

    name: str  # of the value
    extent: ExtentEntry | None  # ``None`` if it is no float


@dataclasses.dataclass(frozen=True)
class Birth:
    """A node whose result has NaN or infinities that its inputs do not have."""

    node: str  # the value, ``name__i`` for one of several results
    kind: str  # ``NaN`` or ``infinity``
    operator: str  # operator, module, source: the ATen operator, the path of the ``nn.Module``, and the user's line
    module: str
    source: str
    region: int | None  # that computes it; ``None`` for PyTorch
    dtype: str  # dtype, shape, elements: of the value
    shape: Sequence[int]
    elements: int
    # eager, onnx: how many elements are NaN or infinite in eager and on ONNX Runtime; ``None`` where that is unknown
    eager: int | None
    onnx: int | None
    side: str  # who has it: ``both``, ``eager`` or ``onnx``
    # whether ONNX Runtime has it in the session that ran, and not with its values exposed, where nothing is fused
    # across them
    only_in_session: bool
    why: str  # the usual reason, or ``""``
    inputs: Sequence[Input]  # what the node read
    # elements that are NaN or infinite, with the elements of the inputs they were made of
    examples: Sequence[ElementEntry]
    reaches: Sequence[str]  # the results of the graph that it is in
    # the first nodes that read it and have no NaN or infinity: name, operator and line
    ends_at: Sequence[tuple[str, str, str]]


@dataclasses.dataclass(frozen=True)
class Nonfinite:
    """All that is NaN or infinite in the compared run of a graph, in execution order."""

    births: Sequence[Birth]  # the nodes that make it
    # those with an infinite number among their arguments, such as masks, and memory that was not written
    meant: Sequence[Birth]
    given: Sequence[str]  # the names of inputs and constants of the graph that have NaN or infinities
    values: int  # how many values were looked at

    def as_json(self) -> dict[str, object]:
        """For ``--json`` and a report."""
        return dataclasses.asdict(self)


def find_nonfinite(graph: DumpedGraph) -> Nonfinite:
    """Where NaN and infinities come from in a compared run; ``DumpError`` if none was compared, or it is damaged."""
    births: list[Birth] = []
    meant: list[Birth] = []
    rows = {row.name: row for row in graph.rows()}
    for row in rows.values():
        if not row.is_computed:
            continue
        for key in KINDS:
            if any(_is_born(rows, row, side, key) for side in _SIDES):
                is_meant = (key == "infinite" and row.has_infinite_argument) or row.is_uninitialized
                (meant if is_meant else births).append(_birth(rows, row, key))
    given = [
        row.user_name or name
        for name, row in rows.items()
        if not row.is_computed and any(_count(row, "eager", key) for key in KINDS)
    ]
    return Nonfinite(births, meant, given, len(rows))


def _extent(row: RowEntry, side: str) -> ExtentEntry | None:
    """A value's range on a side; ONNX Runtime's as it ran, where that is known, else with values exposed."""
    return row.eager_extent if side == "eager" else row.session_extent or row.onnx_extent


def _count(row: RowEntry, side: str, key: str) -> int | None:
    return getattr(_extent(row, side), key, None)


def _is_born(rows: Mapping[str, RowEntry], row: RowEntry, side: str, key: str) -> bool:
    """Whether a value has on a side what none of its inputs has there; eager's of inputs that are not known there."""
    if not _count(row, side, key):
        return False
    for read in (rows[name] for name in row.inputs if name in rows):
        count = _count(read, side, key)
        if count or (count is None and _count(read, "eager", key)):
            return False
    return True


def _birth(rows: Mapping[str, RowEntry], row: RowEntry, key: str) -> Birth:
    inputs = [Input(name, _extent(rows[name], "eager")) for name in row.inputs if name in rows]
    eager, onnx, exposed = _count(row, "eager", key), _count(row, "onnx", key), row.onnx_extent
    reaches, ends_at = _follow(rows, row.name)
    wanted = ("nan",) if key == "nan" else ("inf", "-inf")
    examples = [element for element in row.nonfinite_elements if element.value in wanted]
    return Birth(
        node=row.name,
        kind=KINDS[key],
        **{name: getattr(row, name) for name in ("operator", "module", "source", "region", "dtype", "shape")},
        elements=math.prod(row.shape),
        eager=eager,
        onnx=onnx,
        side="both" if eager and onnx else "onnx" if onnx else "eager",
        only_in_session=bool(onnx) and exposed is not None and not getattr(exposed, key),
        why=_why(row, key, inputs, examples),
        inputs=inputs,
        examples=examples,
        reaches=reaches,
        ends_at=ends_at,
    )


def _follow(rows: Mapping[str, RowEntry], name: str) -> tuple[list[str], list[tuple[str, str, str]]]:
    """The results of the graph that a NaN or infinity gets into, and the nodes where it ends."""
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


_LARGEST = {"float16": 65504.0, "bfloat16": 3.3895e38, "float32": 3.4028e38, "float64": 1.7977e308}


def _why(row: RowEntry, key: str, inputs: Sequence[Input], examples: Sequence[ElementEntry]) -> str:
    """What usually makes this of these inputs; where it is known which elements made it, of those."""
    name = row.operator.removeprefix("aten.").split(".")[0].lstrip("_")
    extents = [item.extent for item in inputs if item.extent is not None]
    smallest = min((item.smallest for item in extents if item.smallest is not None), default=None)
    largest = max((item.largest for item in extents if item.largest is not None), default=None)
    infinite = any(item.infinite for item in extents)
    if key == "nan" and infinite:
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
    if key == "infinite" and row.dtype in _LARGEST:
        return f"too large for {row.dtype}, whose largest number is {_LARGEST[row.dtype]:g}"
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
    (("acos", "asin", "atanh"), "nan", lambda low, high: low < -1 or high > 1, "beyond 1 and -1 it is NaN"),
)
"""Operators, and why they make NaN or infinities of inputs whose smallest and largest element are such."""
