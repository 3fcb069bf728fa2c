"""``OpAutoCompare``: runs each operator again on a reference, and compares results and gradients."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ..common.text_table import fit_table
from ..errors import first_line
from ..numerics.function_runs import FunctionRun
from .call import Call, are_readable
from .call_execution import CallExecution, ChangedSinceError, NoDerivativeError
from .capture import OpCapture, description_of
from .captures import Description
from .gradients import Gradients
from .judge import Comparison, compare_derivatives, compare_gradients, compare_results
from .names import why_not_comparable
from .references import Reference
from .tool import OpTool


class OpAutoCompare(OpTool):
    """Runs each call again on a reference, and prints the errors of its results and gradients.

    Args:
        reference: ``"float64"``; ``"onnx"``, which is ONNX Runtime through our exporter; or another device, ``"cuda"``.
        numerical_gradients: whether to compare gradients with a numerical derivative, too. It finds wrong derivative
            formulas, which float64 cannot find. It also reports operators whose gradient differs by design, such as
            straight-through estimators.
        capture: a folder where failing calls are written as by ``OpCapture``; ``None`` to write none.
        capture_first: how many failing calls of each operator are written.
        json: a file to write all comparisons to when the tool stops.
        arguments: see ``OpTool``.

    Attributes:
        comparisons: all of them, in the order in which they were made.
    """

    _sees_gradients = True

    def __init__(
        self,
        *,
        reference: str = "float64",
        numerical_gradients: bool = False,
        capture: str | os.PathLike[str] | None = "op_capture_result",
        capture_first: int = 10,
        json: str | os.PathLike[str] | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__(**arguments)
        self._reference = Reference(str(reference))
        if numerical_gradients and self.level != "torch":
            raise ValueError("numerical_gradients=True requires level='torch', which sees gradients")
        self._numerical = numerical_gradients
        self._generator = torch.Generator().manual_seed(0)  # leaves the user's random numbers alone
        self._json = None if json is None else Path(json)
        self._capture = None if capture is None else OpCapture(capture, quiet=True)
        self._capture_first = capture_first
        self._captured: Counter[str] = Counter()
        self.comparisons: list[Comparison] = []

    @property
    def unchecked(self) -> dict[str, str]:
        """The operators with calls that could not be compared, and the reason with the line of the first."""
        return dict(self._skipped)

    @property
    def failed(self) -> list[Comparison]:
        """The failed comparisons, in the order in which they were made."""
        return [item for item in self.comparisons if not item.allclose]

    def as_json(self) -> dict[str, object]:
        """All comparisons, for JSON."""
        return {
            "reference": self._reference.kind,
            "comparisons": [dataclasses.asdict(item) for item in self.comparisons],
            "unchecked": dict(self.unchecked),
        }

    def _begin(self) -> None:
        if self._capture is not None:
            self._capture._begin()

    def _before(self, call: Call) -> CallExecution | None:
        reason = why_not_comparable(call.in_pytorch)
        if not are_readable((call.args, call.kwargs)):
            reason = "not all arguments are plain tensors"
        if reason:
            self._skip(call.name, reason, call)
            return None
        return CallExecution(call.in_pytorch, call.args, call.kwargs)

    def _execute(self, call: Call, execution: CallExecution | None) -> Any:
        with execution.recording if execution is not None else contextlib.nullcontext():
            return call.function(*call.args, **call.kwargs)

    def _after(self, call: Call, execution: CallExecution | None, result: object) -> Callable[[Gradients], None] | None:
        if execution is None:
            return None
        if execution.recording.failure:
            self._skip(call.name, execution.recording.failure, call)
            return None
        description = description_of(call)
        name = call.name
        device, function = self._reference.device, self._reference.function(call)

        def run() -> FunctionRun:
            return execution.run(execution.leaves(device=device), function=function)

        elsewhere = None if device is None else run
        try:
            compared, expected = compare_results(execution, call.results, result, elsewhere)
        except Exception as error:  # the user's operator may fail in float64, or the runtime may lack it
            self._skip(name, _reason(error), call)
            return None
        self._add(description, execution, compared, output={"output": result}, reference=expected)

        def finished(gradients: Gradients) -> None:
            if gradients.are_mixed:
                self._skip(f"{name} backward", "the gradient of one result contains another's", call)
                return
            try:
                compared = compare_gradients(execution, gradients, elsewhere)
            except Exception as error:  # as in the forward
                self._skip(f"{name} backward", _reason(error), call)
                return
            if self._numerical and "ctc_loss" not in name:  # its gradient includes that of log_softmax
                try:
                    derivatives, undefined = compare_derivatives(execution, gradients, self._generator)
                    compared += derivatives
                except Exception as error:
                    self._skip(f"{name} by differences", _reason(error), call)
                else:
                    for argument in undefined:
                        reason = f"no derivative for {argument} here: two of its values are equal, or one is 0"
                        self._skip(f"{name} by differences", reason, call)
            files = {"grad_outputs": gradients.outputs, "grad_inputs": gradients.inputs}
            self._add(description, execution, compared, **files)

        return finished

    def _add(
        self,
        description: Description,
        execution: CallExecution,
        compared: Sequence[Comparison],
        **files: Mapping[str, object],
    ) -> None:
        """Stores and prints the comparisons of a call, and captures the call if one failed."""
        name, call, source = description.operator, description.call, description.source
        number, module = description.number, description.module_path
        items = [
            dataclasses.replace(item, name=name, number=number, call=call, source=source, module=module)
            for item in compared
        ]
        with self._lock:
            self.comparisons += items
        for item in items:
            self._print(str(item))
        if all(item.allclose for item in items):
            return
        self._print(f"OpAutoCompare: {name:60} input: {call}  {source}  {module}".rstrip())
        if self._capture is not None and self._captured[name] < self._capture_first:
            self._captured[name] += 1
            folder = self._capture.write_call(description, *execution.arguments())
            if folder is not None:
                for file, value in files.items():
                    self._capture.save(folder, file, value)

    def _end(self) -> None:
        self._print("\n" + self.table())
        if self._json is not None:
            self._json.write_text(json.dumps(self.as_json(), indent=1))

    def table(self) -> str:
        """A table with a row for each operator: failed ones first, then by the largest share of the tolerance."""
        by_name: dict[str, list[Comparison]] = defaultdict(list)
        for item in self.comparisons:
            by_name[item.name].append(item)
        ranked = []
        for name, items in by_name.items():
            failed = [item for item in items if not item.allclose]
            worst = max(failed or items, key=lambda item: item.share)
            allowed = "" if worst.allowed is None else f"{worst.allowed:.3g}"
            counts = len({item.number for item in items}), len(failed)
            place = worst.source, worst.module
            row = (name, *counts, f"{worst.max_diff:.3g}", allowed, worst.value, worst.complaint, *place)
            ranked.append(((len(failed), worst.share), row))
        rows = [row for _, row in sorted(ranked, key=lambda item: item[0], reverse=True)]
        headers = ["operator", "calls", "failed", "max_diff", "allowed", "of", "complaint", "line", "module"]
        text = fit_table(rows, headers) if rows else "no operator was compared"
        skipped = [(name, self._skipped_calls[name], why) for name, why in self.unchecked.items()]
        if skipped:
            text += "\n\nnot compared:\n" + fit_table(skipped, ["operator", "calls", "why"])
        return text


def _reason(error: Exception) -> str:
    if isinstance(error, (ChangedSinceError, NoDerivativeError)):
        return str(error)
    cause: BaseException = error
    while inner := getattr(cause, "inner_exception", None) or cause.__cause__:  # Dynamo's own message says nothing
        cause = inner
    return f"the reference fails: {type(cause).__name__}: {first_line(str(cause))}"
