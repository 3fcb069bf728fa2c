"""Times functions against each other on a machine that does other things too.

The functions take turns in rounds, A B C A B C ..., and are compared within each round, so that what slows the machine
for a while slows all of them. The medians over the rounds count.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

_SECONDS_A_TURN = 0.04
_MOST_CALLS = 20


def milliseconds_by_round(functions: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """How long one call of each function took in each round: the median of a turn of several calls.

    A turn is one call that is not timed, since the caches hold another function's data, and as many more as fit in 40
    milliseconds, at least two.
    """
    calls = {}
    for name, function in functions.items():
        function()
        calls[name] = min(_MOST_CALLS, max(2, math.ceil(_SECONDS_A_TURN / max(_seconds(function), 1e-6))))
    found: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            function()
            found[name].append(statistics.median(_seconds(function) for _ in range(calls[name])) * 1e3)
    return found


def _seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


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
