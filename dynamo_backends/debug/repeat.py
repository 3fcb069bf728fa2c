"""Whether a session gives the same results each time, and with another number of threads.

Right after a region ran in a compared run, it is run again on the same inputs: a few times as it ran, once in a session
of its own with another number of threads. Results whose bits differ are kept. Where they differ by more than rounding,
each node alone is repeated too, and the first that differs by itself is the culprit.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Sequence

import torch

from ..artifacts import RunnableRegion
from ..errors import SessionError
from ..numerics.distance import EQUAL, Distance, distance, is_explained
from ..runtime.binding import BoundSession

logger = logging.getLogger(__name__)

_NODE_TIMES = 10
_REGION_TIMES = 4
"""How often a node alone and a region are repeated, besides once with other threads. A race shows in one of two to four
runs; and the more rarely, the more is done between the runs, so that they come one right after the other."""

_TIMES_OF_ONE_THREAD = 1
"""How often a region is that ran with one thread. It has no races; memory that nobody wrote differs at once."""


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
        with_threads = f"with {self.threads} thread{'s' if self.threads > 1 else ''}"
        return f"{with_threads}, run to run" if self.between_runs else f"{with_threads} and with {self.other_threads}"

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


def repeat_region(
    region: RunnableRegion, bound: BoundSession, args: Sequence[object], outputs: Sequence[object]
) -> RepeatedRegion:
    """Runs a region again on the arguments of its call.

    Args:
        region: the region.
        bound: the session that ran.
        args: what it was called with; nothing may have written into them since.
        outputs: what it returned.
    """
    unstable: dict[int, Instability] = {}
    try:
        with torch.no_grad():
            times = _REGION_TIMES if bound.threads > 1 else _TIMES_OF_ONE_THREAD
            for threads, results in _again(bound, args, times=times):
                for i, found in _differences(outputs, results):
                    unstable.setdefault(i, Instability(bound.threads, threads, _dtype(outputs[i]), found))
    except Exception as error:  # no memory for a second session: that must not end the user's run; the note says it
        if not isinstance(error, SessionError):
            logger.exception("%s region %d could not run again", region.graph, region.index)
        return RepeatedRegion(unstable, f"{type(error).__name__}: {error}")
    return RepeatedRegion(unstable)


def repeat_node(session: BoundSession, args: Sequence[object]) -> dict[int, Instability]:
    """Runs the session of one node again and again on the same arguments.

    Returns:
        For each result that came out differently, by its position, the largest difference; another number of threads
        counts only where nothing else differs.
    """
    first = session(args)
    worst: dict[int, Instability] = {}
    for threads, results in _again(session, args, times=_NODE_TIMES):
        for i, found in _differences(first, results):
            known = worst.get(i)
            other = Instability(session.threads, threads, _dtype(first[i]), found)
            if known is None or (known.between_runs == other.between_runs and _size(other) > _size(known)):
                worst[i] = other
    return worst


def instability_of(first: torch.Tensor, other: torch.Tensor, threads: int) -> Instability | None:
    """How two runs with the same number of threads differ; ``None`` if they have the same bits."""
    found = next((item for _, item in _differences([first], [other])), None)
    return None if found is None else Instability(threads, threads, first.dtype, found)


def _again(session: BoundSession, args: Sequence[object], *, times: int) -> list[tuple[int, list[object]]]:
    """The results of further runs, one right after the other, with the number of threads of each."""
    runs = [(session.threads, session(args)) for _ in range(times)]
    other = session.with_threads(1 if session.threads > 1 else 2)
    return [*runs, (other.threads, other(args))]


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
