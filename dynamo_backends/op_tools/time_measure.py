"""``OpTimeMeasure``: times each operator, forward and backward."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..report.table_page import TablePage
from .call import Call
from .clocks import Clock, device_of
from .gradients import Gradients
from .tool import OpTool


@dataclasses.dataclass
class CallTime:
    """The time of one call, or of its backward."""

    name: str  # of the operator
    call: str  # the operator with its arguments, as text
    source: str  # the user's line
    direction: str  # "forward" or "backward"
    thread: int
    clocks: list[Clock]  # of the call, or of each node of its backward; reading one synchronizes with an accelerator

    @property
    def began(self) -> float:
        """The start, in seconds of ``time.perf_counter``."""
        return self.clocks[0].began

    @functools.cached_property
    def seconds(self) -> float:
        """The duration on its device."""
        return sum(clock.seconds for clock in self.clocks)


@dataclasses.dataclass
class OperatorTime:
    """The time of all calls of an operator, in seconds."""

    name: str
    calls: int = 0
    forward: float = 0.0
    backward: float = 0.0
    slowest: str = ""  # the slowest forward call, as text
    slowest_seconds: float = 0.0

    @property
    def total(self) -> float:
        return self.forward + self.backward


class OpTimeMeasure(OpTool):
    """Times each operator, and prints a table at the end, the slowest operator first.

    At the level ``torch`` the backward time of an operator is that of its autograd nodes. At the level ``aten`` the
    operators of the backward have rows of their own.

    Args:
        lines: print each call when it ends. Printing takes longer than most operators.
        trace: a file to write at the end in the Chrome trace format, for ``chrome://tracing`` or Perfetto.
        arguments: see ``OpTool``.

    Attributes:
        times: of all calls, in the order in which they ended.
    """

    _computes = False
    _sees_gradients = True
    _times_gradients = True

    def __init__(self, *, lines: bool = False, trace: str | os.PathLike[str] | None = None, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._lines = lines
        self._trace = None if trace is None else Path(trace)
        self.times: list[CallTime] = []

    @property
    def operators(self) -> list[OperatorTime]:
        """The operators, the slowest first."""
        found: dict[str, OperatorTime] = {}
        for timed in list(self.times):
            operator = found.setdefault(timed.name, OperatorTime(timed.name))
            if timed.direction == "backward":
                operator.backward += timed.seconds
                continue
            operator.calls += 1
            operator.forward += timed.seconds
            if timed.seconds >= operator.slowest_seconds:
                operator.slowest, operator.slowest_seconds = timed.call, timed.seconds
        return sorted(found.values(), key=lambda operator: -operator.total)

    def as_json(self) -> list[dict[str, object]]:
        """The operators, for JSON; times in seconds."""
        return [{**dataclasses.asdict(operator), "total": operator.total} for operator in self.operators]

    def write_trace(self, path: str | os.PathLike[str]) -> None:
        """Writes all calls to a JSON file in the Chrome trace format."""
        events = [
            {
                "name": timed.name,
                "cat": timed.direction,
                "ph": "X",
                "ts": timed.began * 1e6,
                "dur": timed.seconds * 1e6,
                "pid": os.getpid(),
                "tid": timed.thread,
                "args": {"call": timed.call, "source": timed.source},
            }
            for timed in self.times
        ]
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))

    def _page(self) -> TablePage:
        operators = self.operators
        total = sum(operator.total for operator in operators)
        rows = [
            (
                operator.name,
                operator.calls,
                operator.forward * 1e3,
                operator.backward * 1e3,
                operator.total * 1e3,
                100 * operator.total / (total or 1.0),
                operator.slowest_seconds * 1e3,
                operator.slowest.removeprefix(operator.name),
            )
            for operator in operators
        ]
        times = ["forward (ms)", "backward (ms)", "total (ms)", "share (%)", "slowest (ms)"]
        headers = ["operator", "calls", *times, "with"]
        return TablePage(f"OpTimeMeasure: {total * 1e3:.3g} ms", headers, rows)

    def _before(self, call: Call) -> Clock:
        return Clock(device_of(call.tensors.values()))

    def _execute(self, call: Call, clock: Clock | None) -> Any:
        with clock or contextlib.nullcontext():
            return call.function(*call.args, **call.kwargs)

    def _after(self, call: Call, clock: Clock, result: object) -> Callable[[Gradients], None]:
        forward = CallTime(call.name, str(call), call.source, "forward", threading.get_native_id(), [clock])
        self._add(forward)

        def finished(gradients: Gradients) -> None:
            if gradients.clocks:
                self._add(dataclasses.replace(forward, direction="backward", clocks=gradients.clocks))

        return finished

    def _add(self, timed: CallTime) -> None:
        with self._lock:
            self.times.append(timed)
        if self._lines:
            self._print(f"{timed.name:40} {timed.direction:8} {timed.seconds * 1e3:10.4f} ms  {timed.call}")

    def _end(self) -> None:
        super()._end()
        if self._trace is not None:
            self.write_trace(self._trace)
