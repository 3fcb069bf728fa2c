"""``OpTimeMeasure``: how long each operator takes, forward and backward."""

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
class Timed:
    """One call.

    Attributes:
        name: the operator.
        call: it with its arguments, in words.
        source: the user's line.
        direction: ``forward`` or ``backward``.
        thread: of the call.
        clocks: of the call, or of the nodes of its backward; an accelerator is waited for when they are read.
    """

    name: str
    call: str
    source: str
    direction: str
    thread: int
    clocks: list[Clock]

    @property
    def began(self) -> float:
        """Seconds on the clock of ``time.perf_counter``."""
        return self.clocks[0].began

    @functools.cached_property
    def seconds(self) -> float:
        """How long it took, on its device."""
        return sum(clock.seconds for clock in self.clocks)


@dataclasses.dataclass
class OperatorTime:
    """All calls of an operator.

    Attributes:
        name: the operator.
        calls: how many were made.
        forward, backward: seconds in all.
        slowest: the longest forward call, in words.
        slowest_seconds: how long it took.
    """

    name: str
    calls: int = 0
    forward: float = 0.0
    backward: float = 0.0
    slowest: str = ""
    slowest_seconds: float = 0.0

    @property
    def total(self) -> float:
        return self.forward + self.backward


class OpTimeMeasure(OpTool):
    """Measures each operator, and prints a table at the end, the longest first.

    At the level ``torch`` the backward of an operator is what the nodes took that autograd made for it; at the level
    ``aten`` operators of the backward stand for themselves.

    Args:
        lines: whether each call is printed as it happens; printing takes longer than most operators.
        trace: a file to write at the end in the Chrome trace format, for ``chrome://tracing`` or Perfetto.
        arguments: of ``OpTool``.

    Attributes:
        timed: every call, in the order of their ends.
    """

    _computes = False
    _sees_gradients = True
    _times_gradients = True

    def __init__(self, *, lines: bool = False, trace: str | os.PathLike[str] | None = None, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._lines = lines
        self._trace = None if trace is None else Path(trace)
        self.timed: list[Timed] = []

    @property
    def operators(self) -> list[OperatorTime]:
        """The operators, the one with the most time first."""
        found: dict[str, OperatorTime] = {}
        for timed in list(self.timed):
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
        """A row for each operator, for programs; times in seconds."""
        return [{**dataclasses.asdict(operator), "total": operator.total} for operator in self.operators]

    def write_trace(self, path: str | os.PathLike[str]) -> None:
        """Writes every call in the Chrome trace format.

        Args:
            path: of the JSON file.
        """
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
            for timed in self.timed
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
        headers = [
            "operator",
            "calls",
            "forward (ms)",
            "backward (ms)",
            "total (ms)",
            "share (%)",
            "slowest (ms)",
            "with",
        ]
        return TablePage(f"OpTimeMeasure: {total * 1e3:.3g} ms", headers, rows)

    def _before(self, call: Call) -> Clock:
        return Clock(device_of(call.tensors.values()))

    def _execute(self, call: Call, clock: Clock | None) -> Any:
        with clock or contextlib.nullcontext():
            return call.function(*call.args, **call.kwargs)

    def _after(self, call: Call, clock: Clock, result: object) -> Callable[[Gradients], None]:
        forward = Timed(call.name, str(call), call.source, "forward", threading.get_native_id(), [clock])
        self._note(forward)

        def finished(gradients: Gradients) -> None:
            if gradients.clocks:
                self._note(dataclasses.replace(forward, direction="backward", clocks=gradients.clocks))

        return finished

    def _note(self, timed: Timed) -> None:
        with self._lock:
            self.timed.append(timed)
        if self._lines:
            self._print(f"{timed.name:40} {timed.direction:8} {timed.seconds * 1e3:10.4f} ms  {timed.call}")

    def _end(self) -> None:
        super()._end()
        if self._trace is not None:
            self.write_trace(self._trace)
