"""Times functions against each other on a busy machine.

The functions take turns in rounds, A B C A B C ..., and are compared within each round, so that a slow phase of the
machine affects all of them. Results are medians over the rounds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

_SECONDS_A_TURN = 0.04
_SECONDS_QUIET = 0.004


def milliseconds(function: Callable[[], object]) -> float:
    """The time of a call in a turn of 40 milliseconds, or of one call, after a warm-up; see
    ``torch.utils.benchmark.Timer``."""
    import torch
    from torch.utils.benchmark import Timer

    timer = Timer("function()", globals={"function": function}, num_threads=torch.get_num_threads())
    found = timer.blocked_autorange(min_run_time=_SECONDS_A_TURN).median * 1e3
    wait_until_quiet()
    return found


def wait_until_quiet(longest: float = 1.0) -> None:
    """Waits until no thread of this process is busy, at most ``longest`` seconds.

    Idle threads of a pool spin before they sleep, those of an ONNX Runtime session by default for 70 ms (AMD EPYC), and
    would slow the process whose turn is next.
    """
    end = time.perf_counter() + longest
    before = -longest
    while time.process_time() - before >= _SECONDS_QUIET / 4 and time.perf_counter() < end:
        before = time.process_time()
        time.sleep(_SECONDS_QUIET)


def median_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> float:
    """The median of the ratio in each round."""
    return statistics.median(a / b for a, b in zip(numerator, denominator, strict=True))


def spread(values: Sequence[float]) -> float:
    """The interquartile range; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return high - low
