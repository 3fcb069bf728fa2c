"""Runs a session several times on the same inputs, and measures how its results differ.

Right after a region ran in a compared run, it is repeated: a few times with the same session, once with another number
of threads. If results differ by more than rounding, each node alone is repeated too, to find the first unstable one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch

from ..numerics.measure import FORMATS, Measure
from ..numerics.tensor_measure import measure_tensor, ordinary, same_elements
from ..runtime.binding import BoundSession

_NODE_REPEATS = 10
_REGION_REPEATS = 4
"""Repeats with the same threads. A race shows in one of two to four runs, more rarely if other work is done in
between."""

_ONE_THREAD_REPEATS = 1
"""Repeats of a region that ran with one thread. It has no races, and uninitialized memory differs at once."""

_SUM_SIZE = 16.0
"""The assumed size of the sums behind a result, relative to its ordinary elements: threads may change their order."""


@dataclasses.dataclass(frozen=True)
class Instability:
    """The difference between two runs of the same session."""

    threads: int  # of the first run
    other_threads: int
    dtype: torch.dtype  # of the results
    difference: Measure  # the other run's error, with the first run as the reference

    @property
    def between_runs(self) -> bool:
        """Whether the runs had the same number of threads."""
        return self.threads == self.other_threads

    def is_rounding(self, eager: Measure | None) -> bool:
        """Whether another order of addition explains the difference.

        It does if each element is within the tolerance, or the difference is at most eager's error times the factor of
        the dtype.
        """
        found, rule = self.difference, FORMATS.get(str(self.dtype).removeprefix("torch."))
        if found.is_rounding or found.nonfinite or rule is None or eager is None:
            return found.is_rounding
        return found.max_abs <= rule.factor * eager.max_abs

    def __str__(self) -> str:
        with_threads = f"with {self.threads} thread{'s' if self.threads > 1 else ''}"
        return f"{with_threads}, run to run" if self.between_runs else f"{with_threads} and with {self.other_threads}"


@dataclasses.dataclass(frozen=True)
class RepeatedRegion:
    """The further runs of a region."""

    unstable: dict[int, Instability]  # the difference of each output whose bits differed, by position
    failure: str = ""  # why the region could not be repeated

    @property
    def is_suspicious(self) -> bool:
        """Whether an output differed by more than the rounding of its own dtype."""
        return any(not item.is_rounding(None) for item in self.unstable.values())


def repeat_region(bound: BoundSession, args: Sequence[object], outputs: Sequence[object]) -> RepeatedRegion:
    """Repeats a region's session on the unchanged arguments of its call, which returned ``outputs``."""
    unstable: dict[int, Instability] = {}
    try:
        with torch.no_grad():
            times = _REGION_REPEATS if bound.threads > 1 else _ONE_THREAD_REPEATS
            for threads, results in _repeat(bound, args, times=times):
                for i, found in _differences(outputs, results, bound.threads, threads):
                    unstable.setdefault(i, found)
    except Exception as error:  # no memory for a second session: ``unchecked`` says so, and the user's run goes on
        return RepeatedRegion(unstable, f"{type(error).__name__}: {error}")
    return RepeatedRegion(unstable)


def repeat_node(session: BoundSession, args: Sequence[object]) -> dict[int, Instability]:
    """Repeats the session of one node on the same arguments.

    Returns:
        The largest difference of each result that differed, by position. A run with other threads counts only if runs
        with the same threads did not differ.
    """
    first = session(args)
    worst: dict[int, Instability] = {}
    for threads, results in _repeat(session, args, times=_NODE_REPEATS):
        for i, found in _differences(first, results, session.threads, threads):
            known = worst.get(i)
            if known is None or (known.between_runs == found.between_runs and _size(found) > _size(known)):
                worst[i] = found
    return worst


def instability_of(first: torch.Tensor, second: torch.Tensor, threads: int) -> Instability | None:
    """How two runs with the same number of threads differ; ``None`` if their bits are equal."""
    return dict(_differences([first], [second], threads, threads)).get(0)


def _repeat(session: BoundSession, args: Sequence[object], *, times: int) -> list[tuple[int, list[object]]]:
    """The number of threads and the results of each further run."""
    runs = [(session.threads, session(args)) for _ in range(times)]
    other = session.with_threads(1 if session.threads > 1 else 2)
    return [*runs, (other.threads, other(args))]


def _size(instability: Instability) -> tuple[int, float]:
    return instability.difference.nonfinite, instability.difference.max_abs


def _differences(
    first: Sequence[object], second: Sequence[object], threads: int, other_threads: int
) -> Iterator[tuple[int, Instability]]:
    """The positions of results whose bits differ, and the differences."""
    for i, (before, after) in enumerate(zip(first, second, strict=True)):
        if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
            continue
        if not same_elements(before, after):
            is_float = before.is_floating_point()
            sums = torch.full(before.shape, _SUM_SIZE * ordinary(before)) if is_float else None
            found = measure_tensor(after, before.double() if is_float else before, inner_size=sums)
            yield i, Instability(threads, other_threads, before.dtype, found)
