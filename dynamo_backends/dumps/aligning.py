"""Which results of two models are each other's: by name, by value, by operator."""

from __future__ import annotations

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


def aligned(
    ours: Sequence[NodeValue], theirs: Sequence[NodeValue], partners: Mapping[str, str], by_their_names: bool
) -> tuple[dict[int, int], list[tuple[int | None, int | None]]]:
    """Which results are each other's, and the order of all rows.

    Args:
        ours, theirs: the results of both models in execution order.
        partners: the names of inputs and initializers that are each other's.
        by_their_names: whether results with the same name are the same, also if their values differ.
    """
    one, other = [Summary.of(item) for item in ours], [Summary.of(item) for item in theirs]
    pairs: dict[int, int] = {}
    place = {item.name: j for j, item in enumerate(theirs)}
    for i, item in enumerate(ours):
        same = place.get(item.name)
        if same is not None and (one[i].is_near(other[same]) or (by_their_names and one[i].shape == other[same].shape)):
            pairs[i] = same
    _match_by_value(one, other, pairs)
    _match_by_operator(ours, theirs, one, other, pairs, partners)
    return pairs, _order(len(ours), len(theirs), pairs)


def _match_by_value(one: Sequence[Summary], other: Sequence[Summary], pairs: dict[int, int]) -> None:
    """Matches near values: of several the one with the same operator and shape, then the next in order."""
    sums = np.array([item.sums for item in other]).reshape(-1, 5)
    sizes = np.array([item.size for item in other])
    free = np.ones(len(other), bool)
    free[list(pairs.values())] = False
    expected = 0
    for i, item in enumerate(one):
        if i not in pairs:
            room = _NEAR * np.maximum(sums[:, -1], item.sums[-1])
            near = free & (sizes == item.size) & (np.abs(sums - item.sums).max(axis=1) <= room)
            unlike = {
                j: (other[j].operator != item.operator, other[j].shape != item.shape, abs(j - expected))
                for j in np.flatnonzero(near).tolist()
            }
            if unlike:
                pairs[i] = min(unlike, key=unlike.__getitem__)
                free[pairs[i]] = False
        expected = pairs.get(i, expected) + 1


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
    free = {(item.operator, item.inputs): j for j, item in enumerate(theirs) if j not in used}
    for i, item in enumerate(ours):
        if i in pairs:
            continue
        same = free.get((item.operator, tuple(known.get(name, "") for name in item.inputs)))
        if same is not None and same not in used and one[i].shape == other[same].shape:
            pairs[i] = same
            used.add(same)
            known[item.name] = theirs[same].name


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
        operator, shape, size: of the value.
        sums: of each quarter of the elements, and of all magnitudes; ``nan`` if there are none.
    """

    operator: str
    shape: tuple[int, ...] | None
    size: int
    sums: tuple[float, ...]

    @classmethod
    def of(cls, item: NodeValue) -> Summary:
        """The summary of a value."""
        if not isinstance(item.value, np.ndarray):
            return cls(item.operator, None, -1, (math.nan,) * 5)
        is_text = kind_of(item.value.dtype) == "string"
        sums = (math.nan,) * 5 if is_text else _sums(item.value.reshape(-1))
        return cls(item.operator, item.value.shape, item.value.size, sums)

    def is_near(self, other: Summary) -> bool:
        """Whether the values may be the same."""
        room = _NEAR * max(self.sums[-1], other.sums[-1])
        return self.size == other.size and all(abs(a - b) <= room for a, b in zip(self.sums, other.sums, strict=True))


def digest(value: np.ndarray) -> str:
    """Four letters that tell of a value, the same for nearly equal ones; ``????`` for text.

    Each is onnx-array-api's of the sum of a quarter of the elements, here to four digits of the largest.
    """
    from onnx_array_api.reference.evaluator_yield import make_summary

    if kind_of(value.dtype) == "string":
        return "????"
    sums = np.array(_sums(value.reshape(-1)[:_SUMMARIZED])[:4])
    largest = float(np.abs(sums).max(initial=0.0))
    scaled = sums * 10.0 ** (3 - math.floor(math.log10(largest))) if largest else sums
    letters: str = make_summary(np.round(scaled))
    return letters


def _sums(flat: np.ndarray) -> tuple[float, ...]:
    """The sums of each quarter of the elements, and of all magnitudes; NaN and infinities as large numbers."""
    flat = flat.real + flat.imag if kind_of(flat.dtype) == "complex" else flat
    with np.errstate(all="ignore"):
        wide = np.nan_to_num(flat.astype(np.float64), nan=1e9, posinf=1e10, neginf=-1e10)
        wide = np.clip(wide, -1e30, 1e30)
    return (*(float(part.sum()) for part in np.array_split(wide, 4)), float(np.abs(wide).sum()))
