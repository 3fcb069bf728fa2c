"""Collects events and durations of the calls of one compiled model, separately from models that share its graphs.

From ``Recorder.enter`` until the call ends, the recorder gets each event that this thread counts (``events.count``) and
each graph that runs (``reporting``).
"""

from __future__ import annotations

import collections
import contextvars
import functools
import time
import weakref
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from passes.engine.locks import Lock

from ..events import Listener, RanGraph, listeners
from .session_clock import SESSION_CLOCK

P = ParamSpec("P")
T = TypeVar("T")


def reporting(run: Callable[P, T], graph: RanGraph) -> Callable[P, T]:
    """Wraps a runner: each call passes ``graph`` to the recorders of the current call."""

    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        for listener in listeners.get():
            listener.ran(graph)
        return run(*args, **kwargs)

    return call


LATENCIES = 2048
"""How many durations a recorder keeps, those of the last calls."""


class Recorder:
    """Collects the events and durations of a compiled model's calls. Thread-safe; its memory is bounded.

    Attributes:
        counts: the number of each event.
        reasons: the last reason of an event that has one.
        graphs: the graphs that ran and are still alive.
        calls, seconds: the number of calls that ended, and their total duration.
        session_seconds: the part of ``seconds`` inside ONNX Runtime.
    """

    def __init__(self) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self.reasons: dict[str, str] = {}
        self.graphs: weakref.WeakSet[RanGraph] = weakref.WeakSet()
        self.calls = 0
        self.seconds = self.session_seconds = 0.0
        self._latencies: collections.deque[float] = collections.deque(maxlen=LATENCIES)
        self._lock = Lock()

    def __reduce__(self) -> tuple[type[Recorder], tuple[()]]:
        """A copy of a compiled model starts without events."""
        return Recorder, ()

    def enter(self) -> Callable[[], None]:
        """Starts a call; the result ends it."""
        token = listeners.set((*listeners.get(), self))
        return functools.partial(self._leave, token, SESSION_CLOCK.seconds, time.perf_counter())

    def _leave(self, token: contextvars.Token[tuple[Listener, ...]], in_sessions: float, started: float) -> None:
        seconds = time.perf_counter() - started
        listeners.reset(token)
        with self._lock:
            self.calls += 1
            self.seconds += seconds
            self.session_seconds += SESSION_CLOCK.seconds - in_sessions
            self._latencies.append(seconds)

    def add(self, event: str, number: int, reason: str) -> None:
        """Counts an event; keeps its reason, unless it is empty."""
        with self._lock:
            self.counts[event] += number
            if reason:
                self.reasons[event] = reason

    def ran(self, graph: RanGraph) -> None:
        """Adds a graph that runs."""
        self.graphs.add(graph)

    def latencies(self) -> list[float]:
        """The durations of the last calls, in seconds, at most ``LATENCIES``."""
        with self._lock:
            return list(self._latencies)
