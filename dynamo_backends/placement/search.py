"""Finds the fastest configuration of engines: decides what to run next from the times of real steps.

A *configuration* names the engine of each graph of a frame: of the forward and the backward, or of the inference graph.
Configurations run one at a time, each for a *round* of whole steps::

    1                           the reference, PyTorch, for all graphs
    2, 3                        each other engine, for all graphs
    then again                  the fastest, and those that take at most half as long again
    then, if it may be faster   the fastest engine for each graph

The fastest wins, if it beats the reference by a margin. The first call of a round is not timed: caches and threads are
still those of the last round. A round ends early when its configuration is hopeless.

``TrainingSearch`` also chooses an engine for forwards that no backward follows.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence

Configuration = tuple[str, ...]
"""The engine of each graph."""

_FIRST_CALLS, _CALLS = 2, 3
"""Minimum of timed calls of each graph, in the first round of a configuration and in later ones."""

_SHORT, _MOST_CALLS = 20.0, 20
"""A round shorter than this, in milliseconds, gets up to so many calls: interruptions by the system weigh more on short
calls."""

_HOPELESS, _NEAR = 1.5, 1.25
"""Multiples of the fastest time up to which a configuration is timed further, and is tried again later."""


@dataclasses.dataclass(frozen=True)
class SearchOutcome:
    """The result of a search.

    Attributes:
        winner: the engine of each graph.
        milliseconds: the time of a step of each timed configuration; with symbolic sizes, for each element of the
            arguments.
        rejected: why engines were rejected, by their names.
    """

    winner: Configuration
    milliseconds: Mapping[Configuration, float]
    rejected: Mapping[str, str]

    def __str__(self) -> str:
        times = sorted(self.milliseconds.items(), key=lambda item: item[1])
        texts = [f"{' + '.join(dict.fromkeys(engines))} {time:.3g} ms" for engines, time in times]
        return "; ".join([*texts, *(f"{engine} is rejected: {why}" for engine, why in self.rejected.items())])

    @property
    def challenger(self) -> Configuration | None:
        """The second fastest, if it is near enough to try again."""
        near = {
            engines: time
            for engines, time in self.milliseconds.items()
            if engines != self.winner and time <= _NEAR * self.milliseconds.get(self.winner, 0.0)
        }
        return min(near, key=near.__getitem__, default=None)


@dataclasses.dataclass
class _Round:
    """Calls of a configuration: the number to time, and the number seen of each graph."""

    engines: Configuration
    calls: int
    milliseconds: float = 0.0
    seen: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)

    def end(self) -> None:
        """Ends the round without further calls."""
        self.calls, self.milliseconds = 0, _SHORT

    def is_over(self, graphs: int, last: int) -> bool:
        """Whether each graph was timed often enough; called before the first graph runs.

        A forward without a backward ends no round of whole steps. ``last`` is the graph that was called last.
        """
        needed = _calls_needed(self.calls, self.milliseconds)
        return last == graphs - 1 and all(self.seen[graph] >= needed for graph in range(graphs))


def _calls_needed(calls: int, milliseconds: float) -> int:
    """The calls of a round that should time this many, and took so long until now; the first one is not timed."""
    return 1 + (calls if milliseconds >= _SHORT else max(calls, _MOST_CALLS))


class EngineSearch:
    """Chooses the configuration of each call, and takes the times of calls. Graphs are identified by position.

    Args:
        engines: the candidates; the first is the reference.
        graphs: 2 for a forward and a backward, 1 for an inference graph.
        margin: a winner must take at most this share of the reference's time.
    """

    def __init__(self, engines: Sequence[str], graphs: int, margin: float) -> None:
        self._reference = engines[0]
        self._graphs = graphs
        self._margin = margin
        self._times: dict[Configuration, list[list[float]]] = {}
        self._rejected: dict[tuple[int, str], str] = {}
        self._waiting = collections.deque(_Round((engine,) * graphs, _FIRST_CALLS) for engine in engines)
        self._next_phase = 0
        self._incumbent = (self._reference,) * graphs
        self._known: Mapping[Configuration, float] = {}
        self._round = self._waiting.popleft()
        self._last = graphs - 1
        self._elements = 1
        self.outcome: SearchOutcome | None = None

    def try_again(self, outcome: SearchOutcome, challenger: Configuration) -> None:
        """Times a winner and its challenger again, alternately."""
        self._times, self._known, self._incumbent = {}, outcome.milliseconds, outcome.winner
        self._waiting = collections.deque(_Round(engines, _CALLS) for engines in (outcome.winner, challenger) * 2)
        self._next_phase = 2
        self._round = self._waiting.popleft()
        self.outcome = None

    @property
    def is_alone(self) -> bool:
        """Whether an engine is chosen for forwards that no backward follows, see ``TrainingSearch``."""
        return False

    @property
    def configuration(self) -> Configuration:
        """The current configuration."""
        return self._round.engines if self.outcome is None else self.outcome.winner

    @property
    def outcome_of_forwards(self) -> SearchOutcome | None:
        """Which engine runs forwards while no backward follows; ``None`` if it is not known, or one follows."""
        return None

    def engine(self, graph: int) -> str:
        """The engine that runs a graph in this call. A call of the first graph may begin a round, or end the search."""
        if graph == 0:
            while self.outcome is None and self._round.is_over(self._graphs, self._last):
                self._begin_next()
        self._last = graph
        return self.configuration[graph]

    def ran(self, graph: int, milliseconds: float, elements: int = 1) -> None:
        """Takes the time of a call.

        Args:
            graph: the position of the graph.
            milliseconds: the time.
            elements: of the first graph's arguments with symbolic sizes: times are compared for each element.
        """
        if self.outcome is not None:
            return
        if graph == 0:
            self._elements = elements
        self._round.seen[graph] += 1
        if self._round.seen[graph] > 1:
            self._round.milliseconds += milliseconds
            times = self._times.setdefault(self._round.engines, [[] for _ in range(self._graphs)])
            times[graph].append(milliseconds / self._elements)
            if graph == self._graphs - 1 and self._is_hopeless(self._round.engines):
                self._round.end()

    def reject(self, graph: int, engine: str, why: str) -> None:
        """Rejects an engine for a graph; the reference replaces it in all configurations."""
        self._rejected[graph, engine] = why
        before = self._round.engines
        self._times = {engines: times for engines, times in self._times.items() if engines[graph] != engine}
        rounds: dict[Configuration, _Round] = {}
        for item in (self._round, *self._waiting):
            item.engines = tuple(
                self._reference if (i, name) in self._rejected else name for i, name in enumerate(item.engines)
            )
            if item is self._round or item.engines not in self._times:
                rounds.setdefault(item.engines, item)
        self._waiting = collections.deque(item for item in rounds.values() if item is not self._round)
        if self._round.engines != before and self._round.engines in self._times:  # this configuration was timed before
            self._round.end()

    def _is_hopeless(self, engines: Configuration) -> bool:
        """Whether even the fastest calls of a configuration are far slower than the best: a single slow one may have
        waited for other programs."""
        times = self._times[engines]
        if any(len(of_graph) < 2 for of_graph in times):
            return False
        return sum(map(min, times)) > _HOPELESS * min(self._costs().values())

    def _begin_next(self) -> None:
        while not self._waiting and self._next_phase < 3:
            self._next_phase += 1
            self._waiting.extend(_Round(engines, _CALLS) for engines in self._of_phase(self._next_phase))
        if self._waiting:
            self._round = self._waiting.popleft()
        else:
            self.outcome = self._end()

    def _of_phase(self, phase: int) -> list[Configuration]:
        """The configurations to time again, or, in the second phase, the fastest engine for each graph."""
        costs = self._costs()
        ranked = sorted(costs, key=costs.__getitem__)
        if phase == 1:
            near = [engines for engines in ranked if costs[engines] <= _HOPELESS * costs[ranked[0]]]
            return [] if near == [self._incumbent] else [*dict.fromkeys([*near, self._incumbent])]
        if phase == 2 and self._graphs == 2:
            mixed, cost = self._mixed()
            if mixed not in costs and cost < self._margin * costs[ranked[0]]:
                return [mixed]
        return []

    def _mixed(self) -> tuple[Configuration, float]:
        """The fastest engine for each graph, and the time expected of them."""
        fastest = []
        for graph in range(self._graphs):
            medians = {engines[graph]: _typical(times[graph]) for engines, times in self._times.items() if times[graph]}
            if not medians:
                return self._incumbent, 0.0
            fastest.append(min(medians.items(), key=lambda item: item[1]))
        return tuple(engine for engine, _ in fastest), sum(time for _, time in fastest)

    def _costs(self) -> dict[Configuration, float]:
        return {
            engines: sum(_typical(of_graph) for of_graph in times if of_graph) for engines, times in self._times.items()
        }

    def _end(self) -> SearchOutcome:
        costs = self._costs()
        winner = min(costs, key=costs.__getitem__, default=self._incumbent)
        if costs.get(winner, 0.0) > self._margin * costs.get(self._incumbent, math.inf):
            winner = self._incumbent
        rejected = {engine: why for (_, engine), why in self._rejected.items()}
        return SearchOutcome(winner, {**self._known, **costs}, rejected)


class TrainingSearch(EngineSearch):
    """Chooses the engines of a forward and its backward, and of forwards that no backward follows.

    Whoever evaluates a model and forgets ``torch.no_grad()`` calls forwards alone. After as many of them in a row as a
    search takes calls, they are timed alone, and the backward's engine is the reference. With the next backward the
    search by whole steps goes on. If steps have several forwards, the row must be so many times longer than the longest
    one that a backward followed.
    """

    def __init__(self, engines: Sequence[str], margin: float) -> None:
        super().__init__(engines, 2, margin)
        self.of_forwards = EngineSearch(engines, 1, margin)
        self._rounds = 2 * len(engines) + 1  # at most: each engine, each again, the fastest for each graph
        self._row, self._longest = 0, 1  # forwards since the last backward, and the maximum that a backward followed
        self._milliseconds = 0.0  # of the forwards in the row
        self._is_whole_step = True

    @property
    def is_alone(self) -> bool:
        """See ``EngineSearch.is_alone``."""
        calls = self._rounds * self._longest
        needed = calls * _calls_needed(_CALLS, self._milliseconds / calls)
        return self.outcome is None and self._row > needed

    @property
    def outcome_of_forwards(self) -> SearchOutcome | None:
        """See ``EngineSearch.outcome_of_forwards``."""
        return self.of_forwards.outcome if self.is_alone else None

    @property
    def configuration(self) -> Configuration:
        """The current configuration."""
        if self.is_alone:
            return self.of_forwards.configuration[0], self._reference
        return super().configuration

    def engine(self, graph: int) -> str:
        """See ``EngineSearch.engine``."""
        if graph == 0:
            self._row += 1
            self._is_whole_step = not self.is_alone
            if self.is_alone:
                return self.of_forwards.engine(0)
        else:
            if self.is_alone:  # steps after a row of forwards are timed afresh
                self._times.pop(self._round.engines, None)
                self._round = _Round(self._round.engines, self._round.calls)
            self._longest = max(self._longest, self._row)
            self._row, self._milliseconds = 0, 0.0
        return super().engine(graph)

    def ran(self, graph: int, milliseconds: float, elements: int = 1) -> None:
        """See ``EngineSearch.ran``. The backward after a row of forwards alone is not timed."""
        if graph == 0:
            self._milliseconds += milliseconds
        if self._is_whole_step:
            super().ran(graph, milliseconds, elements)
        elif graph == 0:
            self.of_forwards.ran(0, milliseconds, elements)

    def reject(self, graph: int, engine: str, why: str) -> None:
        """See ``EngineSearch.reject``."""
        super().reject(graph, engine, why)
        if graph == 0:
            self.of_forwards.reject(0, engine, why)


def _typical(times: Sequence[float]) -> float:
    """The mean of the faster half: the others may have waited for other programs."""
    return statistics.fmean(sorted(times)[: (len(times) + 1) // 2])
