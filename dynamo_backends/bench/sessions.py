"""How much of a call is spent outside ONNX Runtime's sessions."""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

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

    def timed(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                inside.append(time.perf_counter() - start)

        return run

    kind: Any = CALLS.session_class
    with contextlib.ExitStack() as stack:
        for name in list(vars(kind)):
            if name.startswith("run") and name != "run_async":
                stack.enter_context(mock.patch.object(kind, name, timed(getattr(kind, name))))
        yield inside
