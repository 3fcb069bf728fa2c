"""Whether a session gives the same results each time, and with another number of threads.

Right after a region ran in a compared run, it is run again on the same inputs: a few times as it ran, once in a session
of its own with another number of threads. Results whose bits differ are kept. Where they differ by more than rounding,
each node alone is repeated too, and the first that differs by itself is the culprit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch

from ..numerics.distance import distance, ordinary, same_elements
from ..numerics.measure import FORMATS, Measure
from ..runtime.binding import BoundSession

_NODE_TIMES = 10
_REGION_TIMES = 4
"""How often a node alone and a region are repeated, besides once with other threads. A race shows in one of two to four
runs; and the more rarely, the more is done between the runs, so that they come one right after the other."""

_SUMMED = 16.0
"""How many times larger than a result's ordinary elements what it sums up is: in another order, with other threads."""

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
    difference: Measure

    @property
    def between_runs(self) -> bool:
        """Whether nothing but the run was another."""
        return self.threads == self.other_threads

    def is_rounding(self, eager: Measure | None) -> bool:
        """Whether the difference may be another order of addition: it is within the tolerance at each element, or no
        larger than eager's error, its distance to float64, and the factor of the rule."""
        found, rule = self.difference, FORMATS.get(str(self.dtype).removeprefix("torch."))
        if found.is_rounding or found.nonfinite or rule is None or eager is None:
            return found.is_rounding
        return found.max_abs <= rule.factor * eager.max_abs

    def __str__(self) -> str:
        with_threads = f"with {self.threads} thread{'s' if self.threads > 1 else ''}"
        return f"{with_threads}, run to run" if self.between_runs else f"{with_threads} and with {self.other_threads}"


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


def repeat_region(bound: BoundSession, args: Sequence[object], outputs: Sequence[object]) -> RepeatedRegion:
    """Runs the session of a region again on the arguments of its call, into which nothing may have written since.

    ``outputs`` are what it returned.
    """
    unstable: dict[int, Instability] = {}
    try:
        with torch.no_grad():
            times = _REGION_TIMES if bound.threads > 1 else _TIMES_OF_ONE_THREAD
            for threads, results in _again(bound, args, times=times):
                for i, found in differences_of(outputs, results, bound.threads, threads):
                    unstable.setdefault(i, found)
    except Exception as error:  # no memory for a second session: the user's run goes on, and ``unchecked`` says it
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
        for i, found in differences_of(first, results, session.threads, threads):
            known = worst.get(i)
            if known is None or (known.between_runs == found.between_runs and _size(found) > _size(known)):
                worst[i] = found
    return worst


def instability_of(first: torch.Tensor, other: torch.Tensor, threads: int) -> Instability | None:
    """How two runs with the same number of threads differ; ``None`` if they have the same bits."""
    return dict(differences_of([first], [other], threads, threads)).get(0)


def _again(session: BoundSession, args: Sequence[object], *, times: int) -> list[tuple[int, list[object]]]:
    """The results of further runs, one right after the other, with the number of threads of each."""
    runs = [(session.threads, session(args)) for _ in range(times)]
    other = session.with_threads(1 if session.threads > 1 else 2)
    return [*runs, (other.threads, other(args))]


def _size(instability: Instability) -> tuple[int, float]:
    return instability.difference.nonfinite, instability.difference.max_abs


def differences_of(
    first: Sequence[object], other: Sequence[object], threads: int, other_threads: int
) -> Iterator[tuple[int, Instability]]:
    """The positions of results with other bits, and how they differ."""
    for i, (before, after) in enumerate(zip(first, other, strict=True)):
        if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
            continue
        if not same_elements(before, after):
            is_rounded = before.is_floating_point()
            usual = torch.full(before.shape, _SUMMED * ordinary(before)) if is_rounded else None
            found = distance(after, before.double() if is_rounded else before, inner_size=usual)
            yield i, Instability(threads, other_threads, before.dtype, found)
