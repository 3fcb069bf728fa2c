"""Repeats a region's session on the arguments of its call, to find results that are not the same each time."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from ..numerics.arrays import same_elements
from ..runtime.binding import BoundSession

REPEATS = 2
"""Runs after the real one. A race shows in one of two to four runs, more rarely if other work is done in between; the
command ``determinism`` makes more runs."""


@dataclasses.dataclass(frozen=True)
class RepeatedRegion:
    """The further runs of a region."""

    others: dict[int, list[torch.Tensor]]  # by position of the output, those that differ in a bit from the first run's
    failure: str = ""  # why the region could not be repeated


def repeat_region(bound: BoundSession, args: Sequence[object], outputs: Sequence[object]) -> RepeatedRegion:
    """Repeats a region's session on the unchanged arguments of its call, which returned ``outputs``."""
    others: dict[int, list[torch.Tensor]] = {}
    try:
        with torch.no_grad():
            for _ in range(REPEATS):
                for i, value in differing(outputs, bound(args)):
                    others.setdefault(i, []).append(value)
    except Exception as error:  # ``unchecked`` says so, and the user's run goes on
        return RepeatedRegion(others, f"{type(error).__name__}: {error}")
    return RepeatedRegion(others)


def differing(first: Sequence[object], second: Sequence[object]) -> list[tuple[int, torch.Tensor]]:
    """The tensors of ``second`` that differ in a bit from those of ``first``, with their positions."""
    return [
        (i, after)
        for i, (before, after) in enumerate(zip(first, second, strict=True))
        if isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor) and not same_elements(before, after)
    ]
