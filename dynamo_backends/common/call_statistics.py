"""Collects events and durations of the calls of one compiled model, separately from models that share its graphs.

From ``CallStatistics.enter`` until the call ends, the statistics get each event that this thread counts
(``events.count``) and each graph that is called (``reporting``). A call in which no graph is called ran in PyTorch,
without this package: it is counted as ``calls_without_graph``.
"""

from __future__ import annotations

import collections
import dataclasses
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import ParamSpec, TypeVar

from ..events import GraphSummary, count, listeners
from .fork_safety import Lock
from .session_events import SESSION_CLOCK

P = ParamSpec("P")
T = TypeVar("T")


def reporting(run: Callable[P, T], graph: GraphSummary) -> Callable[P, T]:
    """Wraps a runner: each call passes ``graph`` to the listeners of the current call."""

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        for listener in listeners.get():
            listener.graph_called(graph)
        return run(*args, **kwargs)

    return call


LATENCIES = 2048
"""How many durations are kept, those of the last calls."""

_WITHOUT_GRAPH = (
    "no compiled graph ran: it is not compiled by this package, has no operators, or Dynamo skips it, as after too "
    "many recompiles (TORCH_LOGS=dynamo tells why)"
)


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """What ``CallStatistics`` has collected up to a moment.

    Attributes:
        counts: the number of each event.
        reasons: the last reason of an event that has one.
        graphs: the graphs that were called and are still alive.
        calls, seconds: the number of calls that ended, and their total duration.
        session_seconds: the part of ``seconds`` inside ONNX Runtime.
        latencies: the durations of the last calls, in seconds, at most ``LATENCIES``.
    """

    counts: collections.Counter[str]
    reasons: Mapping[str, str]
    graphs: Sequence[GraphSummary]
    calls: int
    seconds: float
    session_seconds: float
    latencies: Sequence[float]


class CallStatistics:
    """Collects the events and durations of a compiled model's calls. Thread-safe; its memory is bounded."""

    def __init__(self) -> None:
        self._counts: collections.Counter[str] = collections.Counter()
        self._reasons: dict[str, str] = {}
        self._graphs: weakref.WeakSet[GraphSummary] = weakref.WeakSet()
        self._latest_graph: Callable[[], GraphSummary | None] = lambda: None
        self._calls = 0
        self._seconds = self._session_seconds = 0.0
        self._latencies: collections.deque[float] = collections.deque(maxlen=LATENCIES)
        self._lock = Lock()

    def __reduce__(self) -> tuple[type[CallStatistics], tuple[()]]:
        """A copy of a compiled model starts without events."""
        return CallStatistics, ()

    def enter(self) -> Callable[[], None]:
        """Starts a call; the result ends it."""
        return _Call(self).end

    def add(self, event: str, number: int, reason: str) -> None:
        """Counts an event; keeps its reason, unless it is empty."""
        with self._lock:
            self._counts[event] += number
            if reason:
                self._reasons[event] = reason

    def add_graph(self, graph: GraphSummary) -> None:
        """Adds a graph that is called."""
        if self._latest_graph() is not graph:  # a set of weak references takes longer to ask
            with self._lock:
                self._graphs.add(graph)
            self._latest_graph = weakref.ref(graph)

    def add_call(self, seconds: float, session_seconds: float) -> None:
        """Adds the duration of a call that ended, and the part of it inside ONNX Runtime."""
        with self._lock:
            self._calls += 1
            self._seconds += seconds
            self._session_seconds += session_seconds
            self._latencies.append(seconds)

    def snapshot(self) -> Snapshot:
        """A copy of everything, of one moment."""
        with self._lock:
            return Snapshot(
                collections.Counter(self._counts),
                dict(self._reasons),
                list(self._graphs),
                self._calls,
                self._seconds,
                self._session_seconds,
                list(self._latencies),
            )


class _Call:
    """A call that has started: the listener that passes on what happens in it."""

    __slots__ = ("_error", "_has_graph", "_in_sessions", "_started", "_statistics", "_token")

    def __init__(self, statistics: CallStatistics) -> None:
        self._statistics = statistics
        self._has_graph = False
        self._error = sys.exception()  # the caller may be handling one
        self._token = listeners.set((*listeners.get(), self))
        self._in_sessions = SESSION_CLOCK.seconds
        self._started = time.perf_counter()

    def add(self, event: str, number: int, reason: str) -> None:
        self._has_graph |= event == "calls_without_graph"  # of a model that this one calls: it is counted once
        self._statistics.add(event, number, reason)

    def graph_called(self, graph: GraphSummary) -> None:
        self._has_graph = True
        self._statistics.add_graph(graph)

    def end(self) -> None:
        seconds = time.perf_counter() - self._started
        if not self._has_graph and sys.exception() is self._error:  # a call that raises may not get to a graph
            count("calls_without_graph", reason=_WITHOUT_GRAPH)
        listeners.reset(self._token)
        self._statistics.add_call(seconds, SESSION_CLOCK.seconds - self._in_sessions)
