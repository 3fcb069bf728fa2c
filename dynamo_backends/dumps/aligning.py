"""Which results of two models are each other's: by name, by value, by operator."""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from .differences import kind_of
from .running import NodeValue

_SUMMARIZED = 2**24
"""Elements of which the digest of a value is made; of a larger one the first."""

_NEAR = 1e-3
"""How near the sums of two values are, relative to the sum of the magnitudes, that may be the same."""

_GAP = 4_000_000
"""Pairs that the edit distance looks at; a larger gap between two matches is left to names and values."""


def aligned(
    ours: Sequence[NodeValue], theirs: Sequence[NodeValue], partners: Mapping[str, str], by_their_names: bool
) -> tuple[dict[int, int], list[tuple[int | None, int | None]]]:
    """Which results are each other's, and the order of all rows."""
    one, other = [Summary.of(item) for item in ours], [Summary.of(item) for item in theirs]
    pairs: dict[int, int] = {}
    place = {item.name: j for j, item in enumerate(theirs)}
    for i, item in enumerate(ours):
        same = place.get(item.name)
        if same is not None and (one[i].is_near(other[same]) or (by_their_names and one[i].shape == other[same].shape)):
            pairs[i] = same
    _align_gaps(ours, theirs, one, other, pairs)
    _match_moved(one, other, pairs)
    _match_by_operator(ours, theirs, one, other, pairs, partners)
    return pairs, _order(len(ours), len(theirs), pairs)


def _align_gaps(
    ours: Sequence[NodeValue],
    theirs: Sequence[NodeValue],
    one: Sequence[Summary],
    other: Sequence[Summary],
    pairs: dict[int, int],
) -> None:
    """Aligns what lies between two matches by the edit distance."""
    fixed = _increasing(sorted(pairs.items()))
    used = set(pairs.values())
    edges = [(-1, -1), *fixed, (len(ours), len(theirs))]
    for (i0, j0), (i1, j1) in zip(edges, edges[1:], strict=False):
        mine = [i for i in range(i0 + 1, i1) if i not in pairs]
        its = [j for j in range(j0 + 1, j1) if j not in used]
        if not mine or not its or len(mine) * min(len(its), 2 * max(50, abs(len(mine) - len(its)) + 1)) > _GAP:
            continue
        for i, j in _edit_distance([one[i] for i in mine], [other[j] for j in its]):
            pairs[mine[i]] = its[j]


def _edit_distance(one: Sequence[Summary], other: Sequence[Summary]) -> list[tuple[int, int]]:
    """The pairs of the best alignment of two sequences, by onnx-array-api's ``DistanceExecution``."""
    from onnx_array_api.reference import DistanceExecution, ResultExecution, ResultType

    class ByValue(DistanceExecution):
        """The edit distance with values as the main cost: what cannot be the same costs more than to leave out both."""

        def distance_pair(self, r1: ResultExecution, r2: ResultExecution) -> float:
            a, b = r1.value, r2.value
            cost = float(self._cost_type(r1.dtype, r2.dtype) * self.type_cost)
            cost += self.op_type_cost * (r1.op_type != r2.op_type)
            if a.is_near(b):
                return cost + self.op_type_cost * (a.shape != b.shape)
            if a.shape == b.shape and r1.op_type == r2.op_type:
                return cost + self.insert_cost
            return 3.0 * self.insert_cost

    def results(items: Sequence[Summary]) -> list[ResultExecution]:
        # onnx-array-api always pairs the first of both: so the first is one that is in both.
        start = ResultExecution(ResultType.RESULT, None, (), "", "", "", _START)
        return [
            start,
            *(ResultExecution(ResultType.RESULT, i.dtype, i.shape, "", i.operator, "", i) for i in items),
        ]

    _, way = ByValue().distance_sequence(results(one), results(other))
    found = []
    last = (0, 0)
    for i, j in way[1:]:
        if (i, j) == (last[0] + 1, last[1] + 1):
            a, b = one[i - 1], other[j - 1]
            if a.is_near(b) or (a.shape == b.shape and a.operator == b.operator):
                found.append((i - 1, j - 1))
        last = (i, j)
    return found


def _match_moved(one: Sequence[Summary], other: Sequence[Summary], pairs: dict[int, int]) -> None:
    """Matches equal values that the models compute in another order; constant ones tell nothing."""
    used = set(pairs.values())
    by_shape: dict[object, list[tuple[float, int]]] = {}
    for j, item in enumerate(other):
        if j not in used and item.tells:
            by_shape.setdefault(item.shape, []).append((item.magnitude, j))
    for candidates in by_shape.values():
        candidates.sort()
    for i, item in enumerate(one):
        candidates = by_shape.get(item.shape, [])
        if i in pairs or not item.tells or not candidates:
            continue
        start = bisect.bisect_left(candidates, (item.magnitude * (1 - 2 * _NEAR), -1))
        end = bisect.bisect_right(candidates, (item.magnitude * (1 + 2 * _NEAR), len(other)))
        near = [k for k in range(start, end) if item.is_near(other[candidates[k][1]])]
        if near:
            best = min(near, key=lambda k: _unlike(i, item, candidates[k][1], other[candidates[k][1]]))
            pairs[i] = candidates.pop(best)[1]


def _unlike(i: int, item: Summary, j: int, partner: Summary) -> tuple[bool, int]:
    """Which of several near values is the worse partner: of another operator, further away."""
    return item.operator != partner.operator, abs(j - i)


def _match_by_operator(
    ours: Sequence[NodeValue],
    theirs: Sequence[NodeValue],
    one: Sequence[Summary],
    other: Sequence[Summary],
    pairs: dict[int, int],
    partners: Mapping[str, str],
) -> None:
    """Matches what the same operator makes of matched values, however different: there a fault begins."""
    known = dict(partners) | {ours[i].name: theirs[j].name for i, j in pairs.items()}
    used = set(pairs.values())
    free = {}
    for j, item in enumerate(theirs):
        if j not in used:
            free[(item.operator, tuple(item.inputs))] = j
    for i, item in enumerate(ours):
        if i in pairs:
            continue
        same = free.get((item.operator, tuple(known.get(name, "") for name in item.inputs)))
        if same is not None and same not in used and one[i].shape == other[same].shape:
            pairs[i] = same
            used.add(same)
            known[item.name] = theirs[same].name


def _increasing(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The longest part of pairs, sorted by the first, in which the second increases too."""
    ends: list[int] = []
    last: list[int] = []
    before: list[int] = []
    for k, (_, j) in enumerate(pairs):
        at = bisect.bisect_left(ends, j)
        if at == len(ends):
            ends.append(j)
            last.append(k)
        else:
            ends[at], last[at] = j, k
        before.append(last[at - 1] if at else -1)
    k = last[-1] if last else -1
    found = []
    while k >= 0:
        found.append(pairs[k])
        k = before[k]
    return found[::-1]


def _order(ours: int, theirs: int, pairs: Mapping[int, int]) -> list[tuple[int | None, int | None]]:
    """The rows in the order of the first model; what only the second has, behind what is before it there."""
    used = {j: i for i, j in pairs.items()}
    behind: dict[int, list[int]] = {}
    at = -1
    for j in range(theirs):
        if j in used:
            at = used[j]
        else:
            behind.setdefault(at, []).append(j)
    rows: list[tuple[int | None, int | None]] = [(None, j) for j in behind.get(-1, [])]
    for i in range(ours):
        rows.append((i, pairs.get(i)))
        rows += [(None, j) for j in behind.get(i, [])]
    return rows


@dataclasses.dataclass(frozen=True)
class Summary:
    """What is looked at of a value to find its partner.

    Attributes:
        operator, dtype, shape, size: of the value.
        sums: of each quarter of the elements.
        magnitude: the sum of all magnitudes; ``nan`` if there is none to compare.
        tells: whether the elements are not all alike.
    """

    operator: str
    dtype: object
    shape: tuple[int, ...] | None
    size: int
    sums: tuple[float, ...] = ()
    magnitude: float = math.nan
    tells: bool = False

    @classmethod
    def of(cls, item: NodeValue) -> Summary:
        """The summary of a value."""
        import numpy as np

        value = item.value
        if not isinstance(value, np.ndarray) or kind_of(value.dtype) == "string":
            shape = value.shape if isinstance(value, np.ndarray) else None
            return cls(item.operator, None, shape, -1 if shape is None else int(value.size))  # type: ignore[union-attr]
        flat = value.reshape(-1)
        sums, magnitude = _quarters(flat)
        tells = bool(flat.size > 1 and (flat != flat[0]).any())
        return cls(item.operator, value.dtype, value.shape, int(value.size), sums, magnitude, tells)

    def is_near(self, other: Summary) -> bool:
        """Whether the values may be the same."""
        if self.size != other.size or not self.sums or not other.sums:
            return False
        room = _NEAR * max(self.magnitude, other.magnitude)
        return all(
            abs(a - b) <= room
            for a, b in zip((*self.sums, self.magnitude), (*other.sums, other.magnitude), strict=True)
        )


_START = Summary("", None, (), 0, (0.0,), 0.0)


def digest(value: np.ndarray) -> str:
    """Four letters that tell of a value, the same for nearly equal ones; ``????`` for text.

    Each is onnx-array-api's of the sum of a quarter of the elements, here to four digits of the largest.
    """
    from onnx_array_api.reference.evaluator_yield import make_summary

    if kind_of(value.dtype) == "string":
        return "????"
    sums = np.array(_quarters(value.reshape(-1)[:_SUMMARIZED])[0])
    largest = float(np.abs(sums).max(initial=0.0))
    scaled = sums * 10.0 ** (3 - math.floor(math.log10(largest))) if largest else sums
    letters: str = make_summary(np.round(scaled))
    return letters


def _quarters(flat: np.ndarray) -> tuple[tuple[float, ...], float]:
    """The sums of each quarter of the elements, and of all magnitudes; NaN and infinities as large numbers."""
    flat = flat.real + flat.imag if kind_of(flat.dtype) == "complex" else flat
    with np.errstate(all="ignore"):
        wide = np.nan_to_num(flat.astype(np.float64), nan=1e9, posinf=1e10, neginf=-1e10)
        wide = np.clip(wide, -1e30, 1e30)
    return tuple(float(part.sum()) for part in np.array_split(wide, 4)), float(np.abs(wide).sum())
