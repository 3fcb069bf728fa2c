"""Times functions against each other on a machine that does other things too.

The functions take turns in rounds, A B C A B C ..., and are compared within each round, so that what slows the machine
for a while slows all of them. The medians over the rounds count.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Sequence

_SECONDS_A_TURN = 0.04
_SECONDS_A_SAMPLE = 0.0005
"""A call that is shorter is timed with others of its kind: reading the clock takes a tenth of a microsecond."""

_SECONDS_TO_WARM_UP = 0.01
_MOST_SAMPLES = 20
_SECONDS_QUIET = 0.004


@dataclasses.dataclass(frozen=True)
class Turn:
    """What a function does in a turn: samples of some calls each, after a warm-up that is not timed."""

    samples: int
    calls: int

    def milliseconds(self, function: Callable[[], object]) -> float:
        """How long a call takes in a turn: the median of the samples.

        Before the samples the function is called without being timed, once and for ten milliseconds: the caches hold
        another function's data, and the threads of a pool sleep.
        """
        start = time.perf_counter()
        function()
        while time.perf_counter() - start < _SECONDS_TO_WARM_UP:
            function()
        return statistics.median(seconds(function, self.calls) for _ in range(self.samples)) * 1e3


def turn_of(function: Callable[[], object]) -> Turn:
    """As many samples as fit in 40 milliseconds, at least two and at most twenty; one of a call that takes longer.

    Calls the function three times, of which the last is timed.
    """
    function()
    function()
    once = max(seconds(function), 1e-7)
    calls = max(1, math.ceil(_SECONDS_A_SAMPLE / once))
    fitting = math.ceil(_SECONDS_A_TURN / (calls * once))
    return Turn(1 if once > _SECONDS_A_TURN else min(_MOST_SAMPLES, max(2, fitting)), calls)


def wait_until_quiet(longest: float = 1.0) -> bool:
    """Waits until no thread of this process computes, at most some seconds; returns whether none does.

    Threads of a pool that have nothing to do look for work for a while before they sleep. Those of a session of ONNX
    Runtime with its default settings do so for 70 ms on an AMD EPYC; the process whose turn comes next would have to
    share the processor with them.
    """
    end = time.perf_counter() + longest
    while time.perf_counter() < end:
        before = time.process_time()
        time.sleep(_SECONDS_QUIET)
        if time.process_time() - before < _SECONDS_QUIET / 4:
            return True
    return False


def seconds(function: Callable[[], object], calls: int = 1) -> float:
    """How long a call takes, the mean of some."""
    start = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - start) / calls


def median_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> float:
    """The median over the rounds of one function's time by another's."""
    return statistics.median(a / b for a, b in zip(numerator, denominator, strict=True))


def median_difference(minuend: Sequence[float], subtrahend: Sequence[float]) -> tuple[float, float]:
    """The median over the rounds of one function's time minus another's, and its standard error."""
    differences = [a - b for a, b in zip(minuend, subtrahend, strict=True)]
    return statistics.median(differences), standard_error(differences)


def spread(values: Sequence[float]) -> float:
    """The distance between the quartiles; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return high - low


def standard_error(values: Sequence[float]) -> float:
    """The standard error of the median, from the quartiles: a normal distribution's are 1.349 deviations apart."""
    return 1.2533 * spread(values) / 1.349 / math.sqrt(len(values))
