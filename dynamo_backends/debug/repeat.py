"""Whether a session gives the same results each time, and with another number of threads.

Right after a region ran in a compared run, it is run again on the same inputs: once as it ran, once in a session of its
own with another number of threads. Results whose bits differ are kept. Where they differ by more than rounding, each
node alone is repeated too, and the first that differs by itself is the culprit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch

from ..errors import SessionError
from ..numerics.distance import EQUAL, Distance, distance, is_explained
from ..pipeline import CompiledRegion
from ..runtime.binding import BoundSession

_TIMES = 10
"""How often a node alone is repeated. A race shows in one of two to three runs: all ten agree once in a hundred."""


@dataclasses.dataclass(frozen=True)
class Instability:
    """How a value came out another time.

    Attributes:
        threads: threads of the first run.
        other_threads: threads of the other.
        dtype: of the results.
        difference: of the two, measured as if the first were exact.
    """

    threads: int
    other_threads: int
    dtype: torch.dtype
    difference: Distance

    @property
    def between_runs(self) -> bool:
        """Whether nothing but the run was another."""
        return self.threads == self.other_threads

    def is_rounding(self, eager: Distance | None) -> bool:
        """Whether the difference is no more than rounding and eager's own error account for.

        Args:
            eager: eager's distance to float64 at this value; ``None`` if it is not known, or should not count.
        """
        return is_explained(self.difference, eager or EQUAL, self.dtype)

    def __str__(self) -> str:
        if self.between_runs:
            return f"with {self.threads} threads, run to run"
        return f"with {self.threads} threads and with {self.other_threads}"

    def as_json(self) -> dict[str, object]:
        return {
            "threads": self.threads,
            "other_threads": self.other_threads,
            "difference": self.difference.as_json(),
        }


@dataclasses.dataclass(frozen=True)
class RepeatedRegion:
    """What came of running a region again.

    Attributes:
        unstable: for each output whose bits differed, by its position, how.
        failure: why the region could not be run again, or ``""``.
    """

    unstable: dict[int, Instability] = dataclasses.field(default_factory=dict)
    failure: str = ""

    @property
    def is_suspicious(self) -> bool:
        """Whether an output differed by more than the rounding of its own dtype."""
        return any(not item.is_rounding(None) for item in self.unstable.values())


def repeat_region(compiled: CompiledRegion, args: Sequence[object], outputs: Sequence[object]) -> RepeatedRegion:
    """Runs a region twice more on the arguments of its call.

    Args:
        compiled: the region.
        args: what it was called with; nothing may have written into them since.
        outputs: what it returned.
    """
    assert compiled.bound is not None
    unstable: dict[int, Instability] = {}
    try:
        for threads, results in _again(compiled.bound, args, times=1):
            for i, found in _differences(outputs, results):
                unstable.setdefault(i, Instability(compiled.bound.threads, threads, _dtype(outputs[i]), found))
    except SessionError as error:
        return RepeatedRegion(unstable, str(error))
    return RepeatedRegion(unstable)


def repeat_node(session: BoundSession, args: Sequence[object]) -> dict[int, Instability]:
    """Runs the session of one node again and again on the same arguments.

    Returns:
        For each result that came out differently, by its position, the largest difference; another number of threads
        counts only where nothing else differs.
    """
    first = session(args)
    worst: dict[int, Instability] = {}
    for threads, results in _again(session, args, times=_TIMES):
        for i, found in _differences(first, results):
            known = worst.get(i)
            other = Instability(session.threads, threads, _dtype(first[i]), found)
            if known is None or (known.between_runs == other.between_runs and _size(other) > _size(known)):
                worst[i] = other
    return worst


def _again(session: BoundSession, args: Sequence[object], *, times: int) -> Iterator[tuple[int, list[object]]]:
    """Results of further runs, with the number of threads of each."""
    for _ in range(times):
        yield session.threads, session(args)
    other = session.with_threads(1 if session.threads > 1 else 2)
    yield other.threads, other(args)


def _size(instability: Instability) -> tuple[int, float]:
    return instability.difference.nonfinite, instability.difference.max_abs


def _differences(first: Sequence[object], other: Sequence[object]) -> Iterator[tuple[int, Distance]]:
    for i, (before, after) in enumerate(zip(first, other, strict=True)):
        if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
            continue
        if not _same_bits(before, after):
            yield i, distance(after, before.double() if before.is_floating_point() else before)


def _same_bits(first: torch.Tensor, other: torch.Tensor) -> bool:
    if torch.equal(first, other):
        return True
    return first.is_floating_point() and bool(((first == other) | (first.isnan() & other.isnan())).all())


def _dtype(value: object) -> torch.dtype:
    assert isinstance(value, torch.Tensor)
    return value.dtype
