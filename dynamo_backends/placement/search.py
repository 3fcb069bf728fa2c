"""Finds the fastest engine of a frame from the times of real steps. ``autotuner`` runs the engines.

An engine runs all graphs of a frame: forward and backward, or the inference graph. Engines take turns of some steps::

    round 1     every engine
    round 2     the reference, PyTorch, and the engines that took at most half as long again as the fastest

The first step of a turn is not timed: caches and threads are still those of the engine before. The time of a graph is
the mean of the faster half of its calls, because the others may have waited for other programs. The fastest engine
wins if it beats the reference by a margin.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence

_CALLS = (2, 3)
"""Minimum of timed calls of each graph in a turn, by round."""

_SHORT, _MOST_CALLS = 20.0, 20
"""A turn shorter than this, in milliseconds, gets so many calls: interruptions weigh more on short ones."""

_HOPELESS, _NEAR = 1.5, 1.25
"""Multiples of the fastest time up to which an engine is timed further, and is timed again later."""

_MARGIN = 0.95
"""A winner must take at most this share of the reference's time."""


class Search:
    """Chooses the engine of each call, and takes the times of calls. Graphs are identified by position.

    Args:
        engines: the candidates; the first is the reference.
        graphs: 2 for a forward and a backward, 1 for an inference graph.
        known: milliseconds by engine, of an earlier search, which is the result of this one.

    Attributes:
        engine: runs the current step; the fastest once ``is_over``.
    """

    def __init__(self, engines: Sequence[str], graphs: int, known: Mapping[str, float] | None = None) -> None:
        self._reference = self.engine = engines[0]
        self._times: dict[str, list[list[float]]] = {engine: [[] for _ in range(graphs)] for engine in engines}
        self._turns = self._plan()
        self._calls, self._seen = 0, [0] * graphs  # of the current turn
        self._duration = 0.0
        self._last, self._elements = graphs - 1, 1
        self.is_over = known is not None
        if known is not None:
            self._times = {engine: [[milliseconds]] for engine, milliseconds in known.items()}
            self.engine = self._fastest()

    def _plan(self) -> Iterator[tuple[str, int]]:
        """The turns: an engine, and the number of calls to time."""
        for calls in _CALLS:
            engines = [engine for engine in self._times if engine == self._reference or not self._is_hopeless(engine)]
            for engine in engines if len(engines) > 1 else ():
                if engine in self._times:  # it may have been rejected
                    yield engine, calls

    def begin(self, graph: int) -> str:
        """The engine of a call. A call of the first graph may begin another turn, or end the search."""
        is_step = graph == 0 and self._last == len(self._seen) - 1  # not a forward that no backward followed
        while is_step and not self.is_over and self._is_end_of_turn():
            self.engine, self._calls = next(self._turns, ("", 0))
            self._seen, self._duration = [0] * len(self._seen), 0.0
            if not self._calls:
                self.engine, self.is_over = self._fastest(), True
        self._last = graph
        return self.engine

    def ran(self, graph: int, milliseconds: float, elements: int = 1) -> None:
        """Takes the time of a call.

        Args:
            graph: the position of the graph.
            milliseconds: the time.
            elements: of the first graph's arguments with symbolic sizes: times are compared for each element.
        """
        if graph == 0:
            self._elements = elements
        self._seen[graph] += 1
        if self._seen[graph] > 1 and not self.is_over:
            self._duration += milliseconds
            self._times[self.engine][graph].append(milliseconds / self._elements)

    def reject(self, engine: str) -> None:
        """Takes an engine out; if this is its turn, the reference runs the rest of the step."""
        self._times.pop(engine, None)
        if engine == self.engine:
            self.engine, self._calls = self._reference, 0

    @property
    def milliseconds(self) -> dict[str, float]:
        """The time of a step, or with symbolic sizes of an element, by engine."""
        return {engine: sum(map(_typical, times)) for engine, times in self._times.items() if all(times)}

    def near(self) -> list[str]:
        """The fastest engine, and those that may be the fastest at another time."""
        times = self.milliseconds
        return [engine for engine, time in times.items() if time <= _NEAR * times[self.engine]]

    def _fastest(self) -> str:
        times = self.milliseconds
        fastest = min(times, key=times.__getitem__, default=self._reference)
        wins = fastest != self._reference and times[fastest] <= _MARGIN * times[self._reference]
        return fastest if wins else self._reference

    def _is_end_of_turn(self) -> bool:
        timed = min(self._seen) - 1
        if not self._calls or (timed >= _CALLS[0] and self._is_hopeless(self.engine)):
            return True
        return timed >= (self._calls if self._duration >= _SHORT else _MOST_CALLS)

    def _is_hopeless(self, engine: str) -> bool:
        times = self.milliseconds
        return engine in times and times[engine] > _HOPELESS * min(times.values())


def _typical(times: Sequence[float]) -> float:
    return statistics.fmean(sorted(times)[: (len(times) + 1) // 2])
