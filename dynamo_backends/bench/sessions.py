"""The time of a call that is spent outside ONNX Runtime's sessions."""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

_MAX_CALLS = 20
_SECONDS = 0.5


def microseconds_outside(function: Callable[[], object]) -> float | None:
    """The time of a call minus that of the native session runs in it, the median of up to twenty calls.

    ``None`` if the call runs no session. A bound method of the session class that was looked up earlier is not timed.
    """
    if "onnxruntime" not in sys.modules:
        return None
    outside: list[float] = []
    end = time.perf_counter() + _SECONDS
    with _timed_runs() as inside:
        while not outside or (len(outside) < _MAX_CALLS and time.perf_counter() < end):
            inside.clear()
            start = time.perf_counter()
            function()
            seconds = time.perf_counter() - start
            if not inside:
                return None
            outside.append(seconds - sum(inside))
    return statistics.median(outside) * 1e6


@contextlib.contextmanager
def _timed_runs() -> Iterator[list[float]]:
    """A list to which the seconds of each session run are appended."""
    from ..runtime.ort_internals import CALLS  # imports ONNX Runtime

    inside: list[float] = []

    def timed(original: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                inside.append(time.perf_counter() - start)

        return run

    session_class: Any = CALLS.session_class
    with contextlib.ExitStack() as stack:
        for name in list(vars(session_class)):
            if name.startswith("run") and name != "run_async":
                stack.enter_context(mock.patch.object(session_class, name, timed(getattr(session_class, name))))
        yield inside
