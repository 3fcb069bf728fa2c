"""The tools that observe calls: ``OpObserve``, ``OpTimeMeasure`` and ``OpOverflowCheck``."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..common.text_table import fit_table
from ..numerics.element_records import Extent
from ..numerics.value_range import extent
from .call import Call, CallText, describe, is_readable
from .gradients import Clock, Gradients
from .names import has_no_values, may_write
from .tool import OpTool


@dataclasses.dataclass(kw_only=True)
class Signature(CallText):
    """Calls of one operator with the same dtypes, shapes and plain values; in words the first of them."""

    result: str  # as text
    count: int = 1


class OpObserve(OpTool):
    """Prints each signature at its first call, and a table of counts at the end.

    Takes the arguments of ``OpTool``.
    """

    _computes = False

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._seen: dict[str, Signature] = {}

    @property
    def signatures(self) -> list[Signature]:
        """The signatures, in the order of their first calls."""
        return list(self._seen.values())

    def _after(self, call: Call, before: object, result: object) -> None:
        text = str(call)
        with self._lock:
            seen = self._seen.get(text)
            if seen is not None:
                seen.count += 1
                return
            seen = self._seen[text] = Signature(**vars(call.text), result=describe(result))
        self._print(f"{seen.call} -> {seen.result}  {seen.source}  {seen.module}".rstrip())

    def _summary(self) -> tuple[Sequence[str], Sequence[Sequence[object]]]:
        seen = sorted(self._seen.values(), key=lambda seen: -seen.count)
        rows = [(item.call, item.result, item.count, item.source, item.module) for item in seen]
        return ["call", "result", "calls", "line", "module"], rows


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
                operator.backward += gradients.seconds

        return finished


@dataclasses.dataclass(kw_only=True)
class Overflow(CallText):
    """A result or gradient with NaN or infinity, made from finite arguments."""

    value: str  # "output", "gradient of args[0]"
    nan: int  # how many elements
    infinite: int
    smallest: float | None  # of the finite elements; None if there are none
    largest: float | None

    def __str__(self) -> str:
        counts = [f"{count} {what}" for count, what in ((self.nan, "NaN"), (self.infinite, "infinite")) if count]
        finite = f", the others {self.smallest:.3g} to {self.largest:.3g}" if self.smallest is not None else ""
        made = f"{self.name} made {' and '.join(counts)}{finite} in its {self.value}"
        return f"{made}: {self.call}  {self.source}  {self.module}".rstrip()


class NonFiniteError(RuntimeError):
    """An operator made NaN or infinity from finite arguments."""


class OpOverflowCheck(OpTool):
    """Finds the operators that make NaN or infinity from finite arguments, in the forward and in the gradients.

    An infinite argument, such as an attention mask, is not reported.

    Args:
        raises: raise ``NonFiniteError`` at the first one. By default each operator is printed once.
        arguments: see ``OpTool``.

    Attributes:
        found: all overflows, in order.
    """

    _sees_gradients = True

    def __init__(self, *, raises: bool = False, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.found: list[Overflow] = []
        self._raises = raises

    @property
    def first(self) -> Overflow | None:
        """The first overflow; ``None`` if there was none."""
        return self.found[0] if self.found else None

    def _before(self, call: Call) -> bool | None:
        """Whether all arguments are finite, if the call may overwrite them; else ``None``, and ``_after`` checks."""
        return _are_finite(call) if may_write(call.function, call.kwargs) else None

    def _after(self, call: Call, was_finite: bool | None, result: object) -> Callable[[Gradients], None]:
        name, number, text, place = call.name, call.number, str(call), call.place

        def note(value: str, found: Extent) -> None:
            words = CallText(name=name, number=number, call=text, source=place.source, module=place.module)
            self._note(Overflow(**vars(words), **vars(found), value=value))

        if not has_no_values(call.in_pytorch):
            for value, found in _not_finite(call.results).items():
                if was_finite if was_finite is not None else _are_finite(call):
                    note(value, found)

        def finished(gradients: Gradients) -> None:
            if not _not_finite(gradients.outputs):
                for value, found in _not_finite(gradients.inputs).items():
                    note(f"gradient of {value}", found)

        return finished

    def _note(self, overflow: Overflow) -> None:
        if overflow.name not in {known.name for known in self.found}:
            self._print(str(overflow))
        self.found.append(overflow)

    def _handle(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before = len(self.found)
        result = super()._handle(function, args, kwargs)
        if self._raises and len(self.found) > before:
            raise NonFiniteError(str(self.found[before]))
        return result

    def _end(self) -> None:
        if not self.found:
            self._print("no operator made NaN or infinity from finite arguments")
            return
        counts = Counter((item.name, item.value, item.source, item.module) for item in self.found)
        rows = [(name, value, calls, source, module) for (name, value, source, module), calls in counts.items()]
        table = fit_table(rows, ["operator", "value", "calls", "line", "module"])
        self._print(f"\nfirst: {self.found[0]}\n{table}")


def _are_finite(call: Call) -> bool:
    leaves = pytree.tree_leaves((call.args, call.kwargs))
    if any(isinstance(leaf, (float, complex)) and not math.isfinite(abs(leaf)) for leaf in leaves):
        return False
    return not _not_finite(call.tensors)


def _not_finite(values: Mapping[str, torch.Tensor]) -> dict[str, Extent]:
    """The ranges of the tensors that have NaN or infinity."""
    extents = {name: extent(value) for name, value in values.items() if is_readable(value)}
    return {name: item for name, item in extents.items() if item is not None and not item.is_finite}
