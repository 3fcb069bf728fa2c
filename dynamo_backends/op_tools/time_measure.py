"""``OpTimeMeasure``: how long each operator takes, forward and backward."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from pathlib import Path
from typing import Any

from ..report.table_page import TablePage
from ..tables import fit_table
from .call import Call, results_of, versions_of
from .clocks import Clock, device_of
from .gradients import Edges, Gradients
from .tool import OpTool


@dataclasses.dataclass
class Timed:
    """One call.

    Attributes:
        name: the operator.
        call: it with its arguments, in words.
        source: the user's line.
        direction: ``forward`` or ``backward``.
        began: seconds on the clock of ``time.perf_counter``.
        seconds: how long it took, on its device.
        thread: of the call.
    """

    name: str
    call: str
    source: str
    direction: str
    began: float
    seconds: float
    thread: int


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

    def __init__(self, *, lines: bool = False, trace: str | os.PathLike[str] | None = None, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._lines = lines
        self._trace = None if trace is None else Path(trace)
        self._pending: list[tuple[Timed, list[Clock]]] = []

    @property
    def timed(self) -> list[Timed]:
        return [self._read(timed, clocks) for timed, clocks in list(self._pending)]

    @property
    def operators(self) -> list[OperatorTime]:
        """The operators, the one with the most time first."""
        found: dict[str, OperatorTime] = {}
        for timed in self.timed:
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
        rows = [
            (
                operator.name,
                operator.calls,
                operator.forward * 1e3,
                operator.backward * 1e3,
                operator.total * 1e3,
                operator.slowest_seconds * 1e3,
                operator.slowest.removeprefix(operator.name),
            )
            for operator in operators
        ]
        title = f"OpTimeMeasure: {sum(operator.total for operator in operators) * 1e3:.3g} ms"
        headers = ["operator", "calls", "forward (ms)", "backward (ms)", "total (ms)", "slowest (ms)", "with"]
        return TablePage(title, headers, rows)

    def _before(self, call: Call) -> tuple[Edges | None, list[int], Clock]:
        edges = self._watches.edges(call)
        versions = versions_of(call) if edges is not None else []
        return edges, versions, Clock(device_of(list(call.tensors.values()))).start()

    def _after(self, call: Call, before: tuple[Edges | None, list[int], Clock], result: object) -> None:
        edges, versions, clock = before
        clock.stop()
        text, source = str(call), call.source
        self._note(Timed(call.name, text, source, "forward", clock.began, 0.0, threading.get_native_id()), [clock])
        if edges is None:
            return
        name, thread = call.name, threading.get_native_id()

        def finished(gradients: Gradients) -> None:
            if gradients.clocks:
                began = gradients.clocks[0].began
                self._note(Timed(name, text, source, "backward", began, 0.0, thread), gradients.clocks)

        self._watches.watch(name, edges, results_of(call, result, versions), finished, with_times=True)

    def _note(self, timed: Timed, clocks: list[Clock]) -> None:
        with self._lock:
            self._pending.append((timed, clocks))
        if self._lines:
            timed = self._read(timed, clocks)
            self._print(f"{timed.name:40} {timed.direction:8} {timed.seconds * 1e3:10.4f} ms  {timed.call}")

    @staticmethod
    def _read(timed: Timed, clocks: list[Clock]) -> Timed:
        if not timed.seconds:
            timed.seconds = sum(clock.seconds for clock in clocks)
        return timed

    def _end(self) -> None:
        operators = self.operators
        total = sum(operator.total for operator in operators) or 1.0
        rows = [
            (
                operator.name,
                operator.calls,
                f"{operator.forward * 1e3:.3f} ms",
                f"{operator.backward * 1e3:.3f} ms" if operator.backward else "-",
                f"{operator.total / total:.1%}",
                f"{operator.slowest_seconds * 1e3:.3f} ms",
                operator.slowest,
            )
            for operator in operators
        ]
        if rows:
            headers = ["operator", "calls", "forward", "backward", "share", "slowest", "with"]
            self._print(fit_table(rows, headers))
        if self._trace is not None:
            self.write_trace(self._trace)
