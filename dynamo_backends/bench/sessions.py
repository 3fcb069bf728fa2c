"""How much of a call is spent outside ONNX Runtime's sessions."""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

_MOST_CALLS = 20
_SECONDS = 0.5


def microseconds_outside(function: Callable[[], object]) -> float | None:
    """The part of a call that no session runs, the median over up to twenty calls; ``None`` if no session runs in it.

    A session's time is that of the native call, whoever makes it. What calls it through another name than that of the
    class (a method that was looked up before) is not seen.
    """
    if "onnxruntime" not in sys.modules:
        return None
    found: list[float] = []
    end = time.perf_counter() + _SECONDS
    with _timed_runs() as inside:
        while not found or (len(found) < _MOST_CALLS and time.perf_counter() < end):
            inside.clear()
            start = time.perf_counter()
            function()
            taken = time.perf_counter() - start
            if not inside:
                return None
            found.append(taken - sum(inside))
    return statistics.median(found) * 1e6


@contextlib.contextmanager
def _timed_runs() -> Iterator[list[float]]:
    """The seconds of each run of a session, as they are made."""
    from ..runtime.ort_internals import CALLS  # not before: it loads ONNX Runtime

    inside: list[float] = []
    kind: Any = CALLS.session_class
    originals = {name: item for name, item in vars(kind).items() if name.startswith("run") and name != "run_async"}
    for name in originals:
        setattr(kind, name, _timed(getattr(kind, name), inside))
    try:
        yield inside
    finally:
        for name, original in originals.items():
            setattr(kind, name, original)


def _timed(original: Callable[..., Any], inside: list[float]) -> Callable[..., Any]:
    clock = time.perf_counter

    def run(*args: Any, **kwargs: Any) -> Any:
        start = clock()
        try:
            return original(*args, **kwargs)
        finally:
            inside.append(clock() - start)

    return run
