"""Delta debugging: the smallest part that still fails.

Zeller and Hildebrandt, "Simplifying and Isolating Failure-Inducing Input", 2002: halves, then smaller and smaller
pieces, and what is left without each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def smallest(items: Sequence[T], fails: Callable[[Sequence[T]], bool]) -> list[T]:
    """Some of ``items``, in their order, that fail, where without any one of them they do not.

    Args:
        items: what fails as a whole.
        fails: whether some of them do; never asked of none.
    """
    kept, pieces = list(items), 2
    while len(kept) > 1:
        pieces = min(pieces, len(kept))
        bounds = [len(kept) * i // pieces for i in range(pieces + 1)]
        parts = [kept[start:end] for start, end in zip(bounds, bounds[1:], strict=False)]
        rests = [[*kept[:start], *kept[end:]] for start, end in zip(bounds, bounds[1:], strict=False)]
        part = next((part for part in parts if fails(part)), None)
        if part is not None:
            kept, pieces = part, 2
            continue
        rest = next((rest for rest in rests if fails(rest)), None) if pieces > 2 else None
        if rest is not None:
            kept, pieces = rest, max(pieces - 1, 2)
            continue
        if pieces == len(kept):
            break
        pieces *= 2
    return kept
