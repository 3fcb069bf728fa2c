"""The table of a comparison: a row for each value of two models that ran, aligned and judged."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from .aligning import Summary, aligned, digest
from .differences import (
    DIFFERENT,
    NOTHING,
    ONLY_FIRST,
    ONLY_SECOND,
    UNSURE,
    Difference,
    described,
    difference,
    kind_of,
)
from .matching import Matched, content
from .models import type_name
from .running import ModelRun, NodeValue

_RELIABLE = 0.8
"""The share of common names with the same type, from which on names are believed."""


@dataclasses.dataclass(frozen=True)
class Side:
    """A value of one of the models.

    Attributes:
        kind: ``initializer``, ``constant``, ``input``, ``result`` or ``output``.
        name: its name.
        operator: of its node, or ``""``.
        type: ``float32``.
        shape: its sizes; ``None`` if it is no tensor.
        digest: four letters, see ``aligning.digest``.
        source: the user's line that it comes from, where the model says so.
    """

    kind: str
    name: str
    operator: str
    type: str
    shape: tuple[int, ...] | None
    digest: str
    source: str = ""

    @classmethod
    def of(cls, item: NodeValue) -> Side:
        """That of a value."""
        value, shape, letters = item.value, None, ""
        type_ = described(value)
        if isinstance(value, np.ndarray):
            type_, shape, letters = type_name(value.dtype), value.shape, digest(value)
        return cls(item.kind, item.name, item.operator, type_, shape, letters, item.source)


@dataclasses.dataclass(frozen=True)
class Row:
    """A value of the first model beside that of the second.

    Attributes:
        mark: a key of ``LEGEND``.
        first, second: ``None`` where only the other model has it.
        difference: of the two.
        limit: the largest difference that rounding explains.
    """

    mark: str
    first: Side | None
    second: Side | None
    difference: Difference | None = None
    limit: float = 0.0

    @property
    def name(self) -> str:
        """The first model's name of it, or the second's."""
        side = self.first or self.second
        assert side is not None
        return side.name


def aligned_rows(
    one: ModelRun, other: ModelRun, matched: Sequence[Matched], movements: Mapping[str, Difference]
) -> list[Row]:
    """The rows: what both models have stored, their results, and their outputs.

    Args:
        one, other: the models that ran.
        matched: which of their inputs and initializers are each other's.
        movements: by how much rounding moves the values of the first.
    """
    stored = [item for item in one.values if item.kind != "result"]
    theirs_stored = [item for item in other.values if item.kind != "result"]
    results = [item for item in one.values if item.kind == "result"]
    theirs = [item for item in other.values if item.kind == "result"]
    by_their_names = _names_mean_the_same([item for item in results if item.name not in one.outputs], theirs)
    partners = {item.partner: item.name for item in matched}
    _match_stored(stored, theirs_stored, partners, by_their_names)
    by_name = {item.name: item for item in other.values}
    rows = [_row(item, by_name.get(partners.get(item.name, "")), movements, trusted=True) for item in stored]
    used = set(partners.values())
    rows += [_row(None, item, movements) for item in theirs_stored if item.name not in used]
    pairs, order = aligned(results, theirs, partners, by_their_names)
    partners |= {results[i].name: theirs[j].name for i, j in pairs.items()}
    for i, j in order:
        a = results[i] if i is not None else None
        b = theirs[j] if j is not None else None
        trusted = a is not None and b is not None and _are_the_same(a, b, partners, by_their_names)
        rows.append(_row(a, b, movements, trusted=trusted))
    return rows + _output_rows(one, other, movements)


def _match_stored(
    ours: Sequence[NodeValue], theirs: Sequence[NodeValue], partners: dict[str, str], by_their_names: bool
) -> None:
    """Adds constants of nodes and small ones to the matched initializers: by name if names are believed, by content."""
    used = set(partners.values())
    free = {item.name: item for item in theirs if item.name not in used and item.kind != "input"}
    left = [item for item in ours if item.name not in partners and item.kind != "input"]
    for item in left:
        same = free.get(item.name)
        if same is None or not _have_one_type(item, same):
            continue
        if by_their_names or difference(item.value, same.value).is_equal:
            partners[item.name] = free.pop(item.name).name
    by_content: dict[object, list[str]] = {}
    for name, item in free.items():
        by_content.setdefault(content(item.value), []).append(name)
    for item in left:
        key = content(item.value)
        if item.name not in partners and key is not None and by_content.get(key):
            partners[item.name] = by_content[key].pop(0)


def _names_mean_the_same(ours: Sequence[NodeValue], theirs: Sequence[NodeValue]) -> bool:
    """Whether results of one name are the same in both models: most have the same type and shape.

    Exporters count their values (``val_12``): then a name that both have says nothing.
    """
    by_name = {item.name: item for item in theirs}
    common = [item for item in ours if item.name in by_name]
    return bool(common) and sum(_have_one_type(item, by_name[item.name]) for item in common) >= _RELIABLE * len(common)


def _are_the_same(a: NodeValue, b: NodeValue, partners: Mapping[str, str], by_their_names: bool) -> bool:
    """Whether two results must be equal: by their names, or as one operator of matched values."""
    if by_their_names and a.name == b.name:
        return True
    ours = [partners.get(name) for name in a.inputs if name]
    return a.operator == b.operator and _have_one_type(a, b) and ours == [name for name in b.inputs if name]


def _row(
    a: NodeValue | None, b: NodeValue | None, movements: Mapping[str, Difference], *, trusted: bool = False
) -> Row:
    first, second = None if a is None else Side.of(a), None if b is None else Side.of(b)
    if a is None or b is None:
        return Row(ONLY_FIRST if b is None else ONLY_SECOND, first, second)
    found = difference(a.value, b.value)
    movement = movements.get(f"output {a.name}" if a.kind == "output" else a.name, NOTHING)
    mark = found.mark(movement, DIFFERENT if trusted else UNSURE)
    return Row(mark, first, second, found, found.limit(movement))


def _output_rows(one: ModelRun, other: ModelRun, movements: Mapping[str, Difference]) -> list[Row]:
    """The outputs, matched by name; those of other names by value, then by type and place."""
    ours, theirs = _outputs(one), _outputs(other)
    pairs = {name: theirs.pop(name) for name in ours if name in theirs}
    likeness: tuple[Callable[[NodeValue, NodeValue], bool], ...] = (_are_near, _have_one_type, _have_one_kind)
    for is_alike in likeness:
        for name, item in ours.items():
            partner = next((other for other in theirs.values() if is_alike(item, other)), None)
            if name not in pairs and partner is not None:
                pairs[name] = theirs.pop(partner.name)
    rows = [_row(item, pairs.get(name), movements, trusted=True) for name, item in ours.items()]
    return rows + [_row(None, item, movements) for item in theirs.values()]


def _outputs(run: ModelRun) -> dict[str, NodeValue]:
    operators = {item.name: item.operator for item in run.values}
    return {name: NodeValue("output", name, operators.get(name, ""), (), run.outputs[name]) for name in run.outputs}


def _are_near(a: NodeValue, b: NodeValue) -> bool:
    return _have_one_type(a, b) and Summary.of(a).is_near(Summary.of(b))


def _have_one_type(a: NodeValue, b: NodeValue) -> bool:
    return described(a.value) == described(b.value)


def _have_one_kind(a: NodeValue, b: NodeValue) -> bool:
    """Whether both are tensors of the same shape, one in another precision maybe."""
    if not isinstance(a.value, np.ndarray) or not isinstance(b.value, np.ndarray):
        return type(a.value) is type(b.value)
    return a.value.shape == b.value.shape and kind_of(a.value.dtype) == kind_of(b.value.dtype)


def first_different(rows: Sequence[Row]) -> Row | None:
    """The first row, in the order of the first model, that differs.

    ``None`` if all outputs agree: then what differs on the way is computed otherwise, and no fault.
    """
    different = [row for row in rows if row.mark == DIFFERENT]
    is_wrong = any(row.first is not None and row.first.kind == "output" for row in different)
    return different[0] if is_wrong else None
