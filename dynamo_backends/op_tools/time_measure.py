"""``OpTimeMeasure``: times each operator, forward and backward. For a trace of a step, use ``torch.profiler``."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from .call import Call
from .clocks import Clock
from .gradients import Gradients
from .tool import OpTool


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

    Takes the arguments of ``OpTool``.
    """

    _computes = False
    _sees_gradients = True

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._operators: dict[str, OperatorTime] = {}

    @property
    def operators(self) -> list[OperatorTime]:
        """The operators, the slowest first."""
        return sorted(self._operators.values(), key=lambda operator: -operator.total)

    def _summary(self) -> tuple[Sequence[str], Sequence[Sequence[object]]]:
        operators = self.operators
        total = sum(operator.total for operator in operators) or 1.0
        rows = []
        for operator in operators:
            times = operator.forward, operator.backward, operator.total, operator.slowest_seconds
            numbers = [*(seconds * 1e3 for seconds in times), 100 * operator.total / total]
            arguments = operator.slowest.removeprefix(operator.name)
            rows.append((operator.name, operator.calls, *(f"{number:.4g}" for number in numbers), arguments))
        times_in_ms = ["forward (ms)", "backward (ms)", "total (ms)", "slowest (ms)"]
        return ["operator", "calls", *times_in_ms, "share (%)", "slowest call"], rows

    def _before(self, call: Call) -> Clock:
        return Clock()

    def _execute(self, call: Call, clock: Clock | None) -> Any:
        with clock or contextlib.nullcontext():
            return call.function(*call.args, **call.kwargs)

    def _after(self, call: Call, clock: Clock, result: object) -> Callable[[Gradients], None]:
        with self._lock:
            operator = self._operators.setdefault(call.name, OperatorTime(call.name))
            operator.calls += 1
            operator.forward += clock.seconds
            if clock.seconds >= operator.slowest_seconds:
                operator.slowest, operator.slowest_seconds = str(call), clock.seconds

        def finished(gradients: Gradients) -> None:
            with self._lock:
                operator.backward += sum(clock.seconds for clock in gradients.clocks)

        return finished
