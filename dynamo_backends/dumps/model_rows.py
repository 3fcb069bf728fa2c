"""Aligns the values of two runs, and makes a table row for each pair.

Values correspond by name, by value, or as results of the same operator on corresponding values.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TypeAlias

import numpy as np

from .model_inputs import Matched, content
from .model_judging import ValueDifference, difference
from .model_values import ModelRun, NodeValue
from .models import described, kind_of

_RELIABLE = 0.8  # names are trusted if this share of the common names has the same type and line in both models

_NEAR = 1e-3  # how far the sums of equal values may differ, relative to the sum of the magnitudes


@dataclasses.dataclass(frozen=True)
class AlignedRow:
    """Two corresponding values, or a value that only one model has.

    Attributes:
        mark: a key of ``LEGEND``.
        local: how the second differs from what the first model computes on the second's own numbers.
    """

    mark: str
    first: NodeValue | None
    second: NodeValue | None
    local: ValueDifference | None = None

    @functools.cached_property
    def total(self) -> ValueDifference | None:
        """How both differ, with the errors of all nodes before."""
        if self.first is None or self.second is None:
            return None
        return difference(self.first.value, self.second.value)

    @property
    def name(self) -> str:
        """The name in the first model, or in the second."""
        side = self.first or self.second
        assert side is not None
        return side.name

    @property
    def is_output(self) -> bool:
        return "output" in (self.first and self.first.kind, self.second and self.second.kind)

    @property
    def is_alone(self) -> bool:
        """Whether only one model has the value."""
        return self.first is None or self.second is None

    def as_json(self) -> dict[str, object]:
        names = ("first", "second", "local", "total")
        return {"mark": self.mark, **{name: (item := getattr(self, name)) and item.as_json() for name in names}}


Pair: TypeAlias = "tuple[NodeValue | None, NodeValue | None]"


@dataclasses.dataclass
class Alignment:
    """The values of two runs that correspond.

    Attributes:
        stored: pairs of inputs, initializers and constants.
        results: pairs of results, in the order of the first model.
        outputs: pairs of outputs.
        sure: names in the first model of the results that must be equal; others correspond by value or place only.
    """

    stored: list[Pair]
    results: list[Pair]
    outputs: list[Pair]
    sure: set[str]


def aligned(one: ModelRun, other: ModelRun, matched: Sequence[Matched], *, by_place: bool = False) -> Alignment:
    """Aligns two runs; ``matched`` are corresponding inputs and initializers.

    Outputs correspond by name, or by place if none has the name of another; with ``by_place``, names do not count.
    """
    stored, their_stored = ([item for item in run.values if item.kind != "result"] for run in (one, other))
    results, their_results = ([item for item in run.values if item.kind == "result"] for run in (one, other))
    trust_names = _names_are_reliable([item for item in results if item.name not in one.outputs], their_results)
    partners = {item.partner: item.name for item in matched}
    _match_stored(stored, their_stored, partners, trust_names)
    free, their_free = _free(stored, partners), _free(their_stored, set(partners.values()))
    pairs: dict[int, int] = {}  # the positions of corresponding results
    place = {item.name: j for j, item in enumerate(their_results)}
    for i, item in enumerate(results):
        same = their_results[place[item.name]] if item.name in place else None
        is_trusted = same is not None and trust_names and item.shape == same.shape and _may_be_of_one_place(item, same)
        if same is not None and (is_trusted or is_near(item, same)):
            pairs[i] = place[item.name]
    _match_by_value(results, their_results, pairs)
    _match_by_operator(results, their_results, pairs, partners, free, their_free)
    _match_in_gaps(results, their_results, pairs)
    partners |= {results[i].name: their_results[j].name for i, j in pairs.items()}
    by_name, used = {item.name: item for item in other.values}, set(partners.values())
    found: list[Pair] = [(item, by_name.get(partners.get(item.name, ""))) for item in stored]
    found += [(None, item) for item in their_stored if item.name not in used]
    in_order = list(_in_order(results, their_results, pairs))
    both = [(a, b) for a, b in in_order if a is not None and b is not None]
    sure = {a.name for a, b in both if _are_the_same(a, b, partners, trust_names)}
    return Alignment(found, in_order, _output_pairs(one, other, by_place=by_place), sure)


def _free(stored: Sequence[NodeValue], used: Collection[str]) -> dict[str, str]:
    """The constants that correspond to none, by name, with their types."""
    kinds = ("initializer", "constant")
    return {item.name: described(item.value) for item in stored if item.kind in kinds and item.name not in used}


def _match_stored(
    ours: Sequence[NodeValue], theirs: Sequence[NodeValue], partners: dict[str, str], trust_names: bool
) -> None:
    """Adds constants to ``partners``: those of one name if names are trusted or the values equal, then by content."""
    used = set(partners.values())
    free = {item.name: item for item in theirs if item.name not in used and item.kind != "input"}
    left = [item for item in ours if item.name not in partners and item.kind != "input"]
    for item in left:
        same = free.get(item.name)
        if same is None or not have_one_type(item, same):
            continue
        if trust_names or difference(item.value, same.value).is_equal:
            partners[item.name] = free.pop(item.name).name
    by_content: dict[object, list[str]] = {}
    for name, item in free.items():
        by_content.setdefault(content(item.value), []).append(name)
    for item in left:
        key = content(item.value)
        if item.name not in partners and key is not None and by_content.get(key):
            partners[item.name] = by_content[key].pop(0)


def _names_are_reliable(ours: Sequence[NodeValue], theirs: Sequence[NodeValue]) -> bool:
    """Whether results with a common name correspond: most have the same type and shape, and are of one line.

    Names like ``view_12``, which exporters count up, mean nothing in another model.
    """
    by_name = {item.name: item for item in theirs}
    pairs = [(item, by_name[item.name]) for item in ours if item.name in by_name]
    alike = sum(have_one_type(*pair) and _may_be_of_one_place(*pair) for pair in pairs)
    return bool(pairs) and alike >= _RELIABLE * len(pairs)


def _may_be_of_one_place(a: NodeValue, b: NodeValue) -> bool:
    """Whether two results have the same line and module, as far as these are known."""
    return all(not x or not y or x == y for x, y in ((a.source, b.source), (a.module, b.module)))


def _are_the_same(a: NodeValue, b: NodeValue, partners: Mapping[str, str], trust_names: bool) -> bool:
    """Whether two results must be equal: by name, or as the same operator on corresponding values."""
    if trust_names and a.name == b.name and _may_be_of_one_place(a, b):
        return True
    ours = [partners.get(name) for name in a.inputs if name]
    is_same = _operator_name(a) == _operator_name(b)
    return is_same and have_one_type(a, b) and ours == [name for name in b.inputs if name]


def _operator_name(item: NodeValue) -> str:
    """``gelu`` of ``com.microsoft.Gelu`` and ``aten.gelu.default``; ``convtranspose`` of ``ConvTranspose`` and
    ``aten.conv_transpose2d.input``."""
    parts = item.operator.split(".")
    name = parts[1] if parts[0] == "aten" and len(parts) > 1 else parts[-1]
    return re.sub(r"_|[123]d$", "", name.lower())


def _output_pairs(one: ModelRun, other: ModelRun, *, by_place: bool) -> list[Pair]:
    """Outputs that correspond by name or place, see ``aligned``; of other numbers of outputs, those with the same name,
    or near in value, of one type, or of one shape and kind."""
    ours, theirs = _outputs(one), _outputs(other)
    if len(ours) == len(theirs) and (by_place or not ours.keys() & theirs.keys()):
        return list(zip(ours.values(), theirs.values(), strict=True))
    pairs = {name: theirs.pop(name) for name in ours if name in theirs}
    for match in (lambda a, b: have_one_type(a, b) and is_near(a, b), have_one_type, _have_one_kind):
        for name, item in ours.items():
            partner = next((candidate for candidate in theirs.values() if match(item, candidate)), None)
            if name not in pairs and partner is not None:
                pairs[name] = theirs.pop(partner.name)
    return [*((item, pairs.get(name)) for name, item in ours.items()), *((None, item) for item in theirs.values())]


def _outputs(run: ModelRun) -> dict[str, NodeValue]:
    operators = {item.name: item.operator for item in run.values}
    return {name: NodeValue("output", name, operators.get(name, ""), (), run.outputs[name]) for name in run.outputs}


def have_one_type(a: NodeValue, b: NodeValue) -> bool:
    return described(a.value) == described(b.value)


def _have_one_kind(a: NodeValue, b: NodeValue) -> bool:
    """Whether both are tensors of the same shape and kind; the precision may differ."""
    if not isinstance(a.value, np.ndarray) or not isinstance(b.value, np.ndarray):
        return type(a.value) is type(b.value)
    return a.shape == b.shape and kind_of(a.value.dtype) == kind_of(b.value.dtype)


def is_near(a: NodeValue, b: NodeValue) -> bool:
    """Whether two values have as many elements, with nearly equal sums."""
    bound = _NEAR * max(a.sums[-1], b.sums[-1])
    return a.size == b.size and all(abs(x - y) <= bound for x, y in zip(a.sums, b.sums, strict=True))


def _match_in_gaps(one: Sequence[NodeValue], other: Sequence[NodeValue], pairs: dict[int, int]) -> None:
    """Matches the remaining values between two matches, in order, by operator and shape.

    These depend on a node that only one model has.
    """
    last = -1
    for i, item in enumerate(one):
        if i not in pairs:
            used = set(pairs.values())
            end = min((j for k, j in pairs.items() if k > i and j > last), default=len(other))
            alike = (
                j
                for j in range(last + 1, end)
                if j not in used and other[j].shape == item.shape and other[j].operator == item.operator
            )
            found = next(alike, None)
            if found is None:
                continue
            pairs[i] = found
        last = max(last, pairs[i])


def _match_by_value(one: Sequence[NodeValue], other: Sequence[NodeValue], pairs: dict[int, int]) -> None:
    """Matches near values; of several, prefers the same operator, then the same shape, then the next in order."""
    used, free = set(pairs.values()), collections.defaultdict[int, list[int]](list)  # by size
    for j, item in enumerate(other):
        if j not in used:
            free[item.size].append(j)
    expected = 0
    for i, item in enumerate(one):
        if i not in pairs:
            ranks = {
                j: (other[j].operator != item.operator, other[j].shape != item.shape, abs(j - expected))
                for j in free.get(item.size, ())
                if is_near(other[j], item)
            }
            if ranks:
                pairs[i] = min(ranks, key=ranks.__getitem__)
                free[item.size].remove(pairs[i])
        expected = pairs.get(i, expected) + 1


def _match_by_operator(
    one: Sequence[NodeValue],
    other: Sequence[NodeValue],
    pairs: dict[int, int],
    partners: dict[str, str],
    free: Mapping[str, str],
    their_free: Mapping[str, str],
) -> None:
    """Matches results of the same operator on corresponding values, even if they differ: there a fault begins.

    Constants that correspond to none are matched by type and by their place among the inputs.
    """
    known = partners | {one[i].name: other[j].name for i, j in pairs.items()}
    used = set(pairs.values())
    candidates: dict[object, int] = {}
    for j, item in enumerate(other):
        if j not in used:
            places = tuple(their_free.get(name, "") or name for name in item.inputs)
            candidates.setdefault((_operator_name(item), places), j)
    for i, item in enumerate(one):
        places = tuple(free.get(name, "") or known.get(name, "") for name in item.inputs)
        key = _operator_name(item), places
        found = candidates.get(key)
        if i in pairs or found is None or item.shape != other[found].shape:
            continue
        pairs[i] = j = candidates.pop(key)
        known[item.name] = other[j].name
        for name, partner in zip(item.inputs, other[j].inputs, strict=True):
            if name in free and name not in partners:
                partners[name] = known[name] = partner


def _in_order(ours: Sequence[NodeValue], theirs: Sequence[NodeValue], pairs: Mapping[int, int]) -> Iterator[Pair]:
    """The pairs in the order of the first model; a value that only the second has follows its predecessor there."""
    used = {j: i for i, j in pairs.items()}
    following: dict[int, list[NodeValue]] = {}
    at = -1
    for j, item in enumerate(theirs):
        at = used.get(j, at)
        if j not in used:
            following.setdefault(at, []).append(item)
    yield from ((None, item) for item in following.get(-1, []))
    for i, item in enumerate(ours):
        yield item, theirs[pairs[i]] if i in pairs else None
        yield from ((None, extra) for extra in following.get(i, []))
