"""Times functions against each other on a busy machine.

The functions take turns in rounds, A B C A B C ..., and are compared within each round, so that a slow phase of the
machine affects all of them. Results are medians over the rounds.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence

_SECONDS_A_TURN = 0.04
_SECONDS_A_SAMPLE = 0.0005
"""Shorter calls are timed several at a time, as reading the clock takes 0.1 microseconds."""

_SECONDS_TO_WARM_UP = 0.01
_MAX_SAMPLES = 20
_SECONDS_QUIET = 0.004


@dataclasses.dataclass(frozen=True)
class Turn:
    """The turn of a function in each round: an untimed warm-up, then ``samples`` of ``calls`` calls each."""

    samples: int
    calls: int

    def milliseconds(self, function: Callable[[], object]) -> float:
        """The time of a call: the median of the samples.

        The warm-up is at least one call and ten milliseconds, to fill the caches and wake the threads of the pool.
        """
        start = time.perf_counter()
        function()
        while time.perf_counter() - start < _SECONDS_TO_WARM_UP:
            function()
        return statistics.median(seconds(function, self.calls) for _ in range(self.samples)) * 1e3


def turn_of(function: Callable[[], object]) -> Turn:
    """As many samples as fit in 40 milliseconds, from 2 to 20; one if a call takes longer.

    Calls the function three times and times the last.
    """
    function()
    function()
    once = max(seconds(function), 1e-7)
    calls = max(1, math.ceil(_SECONDS_A_SAMPLE / once))
    fitting = math.ceil(_SECONDS_A_TURN / (calls * once))
    return Turn(1 if once > _SECONDS_A_TURN else min(_MAX_SAMPLES, max(2, fitting)), calls)


def wait_until_quiet(longest: float = 1.0) -> bool:
    """Waits until no thread of this process is busy, at most ``longest`` seconds; returns whether none is.

    Idle threads of a pool spin before they sleep, those of an ONNX Runtime session by default for 70 ms (AMD EPYC), and
    would slow the process whose turn is next.
    """
    end = time.perf_counter() + longest
    while time.perf_counter() < end:
        before = time.process_time()
        time.sleep(_SECONDS_QUIET)
        if time.process_time() - before < _SECONDS_QUIET / 4:
            return True
    return False


def seconds(function: Callable[[], object], calls: int = 1) -> float:
    """The mean time of some calls."""
    start = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - start) / calls


def median_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> float:
    """The median of the ratio in each round."""
    return statistics.median(a / b for a, b in zip(numerator, denominator, strict=True))


def median_difference(minuend: Sequence[float], subtrahend: Sequence[float]) -> tuple[float, float]:
    """The median of the difference in each round, and its standard error."""
    differences = [a - b for a, b in zip(minuend, subtrahend, strict=True)]
    return statistics.median(differences), standard_error(differences)


def spread(values: Sequence[float]) -> float:
    """The interquartile range; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return high - low


def standard_error(values: Sequence[float]) -> float:
    """The standard error of the median, from the interquartile range: 1.349 deviations of a normal distribution."""
    return 1.2533 * spread(values) / 1.349 / math.sqrt(len(values))
