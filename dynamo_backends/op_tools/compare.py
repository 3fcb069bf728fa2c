"""``OpAutoCompare``: each operator again on a reference, results and gradients."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..common.text_table import fit_table
from ..errors import first_line
from ..numerics.call_execution import CallExecution, ChangedSinceError
from ..report.table_page import TablePage
from .call import Call, are_plain
from .capture import OpCapture, description_of
from .gradients import Gradients
from .judge import CallJudge, Verdict
from .names import why_not_comparable
from .references import Reference, execution_of
from .tool import OpTool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compared(Verdict):
    """The verdict on one result, or one gradient, and the call it is of.

    Attributes:
        name: the operator.
        number: of the call, among those of the operator.
        call: the operator with its arguments, in words.
        source: the user's line.
    """

    name: str
    number: int
    call: str
    source: str

    def __str__(self) -> str:
        which = "" if self.value == "output" else f" {self.value}"
        complaint = f"  {self.complaint}" if self.complaint else ""
        return (
            f"OpAutoCompare: {self.name + which:60} allclose: {str(self.allclose):5} "
            f"max_diff: {self.max_diff:12.9f}{complaint}"
        )


class OpAutoCompare(OpTool):
    """Makes each call again on the reference, and prints how far its results and gradients are from that.

    Args:
        reference: ``"float64"``, the exact result up to float64's own rounding; ``"onnx"``, ONNX Runtime through our
            exporter; or another device, ``"cuda"``.
        numerical_gradients: whether gradients are also compared with the difference of results at near arguments, which
            finds a wrong formula of a derivative, that float64 would compute as wrongly. Operators whose gradient is
            another on purpose (straight-through estimators) are then reported.
        capture: a folder to which calls that fail are captured, as ``OpCapture`` does; ``None`` for no files.
        capture_first: how many of these of each operator.
        json: a file to write the results to at the end.
        arguments: of ``OpTool``.

    Attributes:
        compared: every comparison, in the order in which they were made.
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
        self._numerical = numerical_gradients
        self._json = None if json is None else Path(json)
        self._capture = None if capture is None else OpCapture(capture, quiet=True)
        self._capture_first = capture_first
        self._captured: Counter[str] = Counter()
        self.compared: list[Compared] = []

    @property
    def unchecked(self) -> dict[str, str]:
        """For each operator that could not be compared, once at least, why."""
        return dict(self._skipped)

    @property
    def failed(self) -> list[Compared]:
        """The comparisons that failed, in the order in which they were made."""
        return [item for item in self.compared if not item.allclose]

    def as_json(self) -> dict[str, object]:
        """Everything that was found, for programs."""
        return {
            "reference": self._reference.kind,
            "compared": [dataclasses.asdict(item) for item in self.compared],
            "unchecked": dict(self.unchecked),
        }

    def _page(self) -> TablePage:
        items = sorted(self.compared, key=lambda item: item.allclose)
        rows = [
            (
                item.name,
                item.number,
                item.value,
                f"{item.dtype} {'x'.join(map(str, item.shape)) or 'scalar'}",
                "ok" if item.allclose else "NO",
                item.max_diff,
                item.allowed,
                item.complaint,
                item.call.removeprefix(item.name),
                item.source,
            )
            for item in items
        ]
        headers = ["operator", "call", "value", "type", "allclose", "max_diff", "allowed", "complaint", "with", "line"]
        title = f"OpAutoCompare with {self._reference.kind}: {len(self.failed)} of {len(items)} values are wrong"
        notices = [f"{name} was not compared: {why}" for name, why in self.unchecked.items()]
        return TablePage(title, headers, rows, [i for i, item in enumerate(items) if not item.allclose], notices)

    def _begin(self) -> None:
        if self._capture is not None:
            self._capture._begin()

    def _before(self, call: Call) -> CallExecution | None:
        why_not = why_not_comparable(call.in_pytorch)
        if not are_plain((call.args, call.kwargs)):
            why_not = "its arguments are no plain tensors"
        if why_not:
            self._skip(call.name, why_not)
            return None
        return execution_of(call.in_pytorch, call.args, call.kwargs)

    def _execute(self, call: Call, execution: CallExecution | None) -> Any:
        with execution.recording if execution is not None else contextlib.nullcontext():
            return call.function(*call.args, **call.kwargs)

    def _after(self, call: Call, execution: CallExecution | None, result: object) -> Callable[[Gradients], None] | None:
        if execution is None:
            return None
        if execution.recording.failure:
            self._skip(call.name, execution.recording.failure)
            return None
        judge = CallJudge(execution, self._reference.target(call))
        description = {**description_of(call), "call": str(call)}
        name = call.name
        try:
            verdicts, exact = judge.results(call.results, result)
        except Exception as error:  # whatever the user's operator raises in float64, or a runtime that lacks it
            self._skip(name, _why_not(error))
            return None
        self._note(description, execution, verdicts, output={"output": result}, reference=exact)

        def finished(gradients: Gradients) -> None:
            if gradients.are_mixed:
                self._skip(f"{name} backward", "the gradient of one result contains another's")
                return
            try:
                verdicts = judge.gradients(gradients)
                if self._numerical and "ctc_loss" not in name:  # whose gradient is that of what was normalized
                    verdicts += judge.numerical_gradient(gradients)
            except Exception as error:  # as in the forward
                self._skip(f"{name} backward", _why_not(error))
                return
            files = {"grad_outputs": gradients.outputs, "grad_inputs": gradients.inputs}
            self._note(description, execution, verdicts, **files)

        return finished

    def _note(
        self,
        description: Mapping[str, Any],
        execution: CallExecution,
        verdicts: Sequence[Verdict],
        **files: Mapping[str, object],
    ) -> None:
        """Keeps and prints what was found of a call, and captures it if any of that failed."""
        name, number, call, source = (description[key] for key in ("operator", "number", "call", "source"))
        found = [Compared(**vars(item), name=name, number=number, call=call, source=source) for item in verdicts]
        with self._lock:
            self.compared += found
        for item in found:
            self._print(str(item))
        if all(item.allclose for item in found):
            return
        self._print(f"OpAutoCompare: {name:60} input: {call}  {source}".rstrip())
        if self._capture is not None and self._captured[name] < self._capture_first:
            self._captured[name] += 1
            folder = self._capture.write_call(description, *execution.arguments())
            if folder is not None:
                for what, value in files.items():
                    self._capture.save(folder, what, value)

    def _end(self) -> None:
        self._print("\n" + self.table())
        if self._json is not None:
            self._json.write_text(json.dumps(self.as_json(), indent=1))

    def table(self) -> str:
        """A row for each operator: those that fail first, then by the largest share of what is allowed."""
        by_name: dict[str, list[Compared]] = {}
        for item in self.compared:
            by_name.setdefault(item.name, []).append(item)
        found = []
        for name, items in by_name.items():
            failed = [item for item in items if not item.allclose]
            worst = max(failed or items, key=lambda item: item.share)
            found.append((len(failed), worst.share, name, len({item.number for item in items}), worst))
        rows = [
            (
                name,
                calls,
                failed,
                f"{worst.max_diff:.3g}",
                "" if worst.allowed is None else f"{worst.allowed:.3g}",
                worst.value,
                worst.complaint or worst.source,
            )
            for failed, _, name, calls, worst in sorted(found, key=lambda item: item[:2], reverse=True)
        ]
        headers = ["operator", "calls", "failed", "max_diff", "allowed", "of", "where"]
        text = fit_table(rows, headers) if rows else "no operator was compared"
        if self.unchecked:
            text += "\n\nnot compared:\n" + fit_table(self.unchecked.items(), ["operator", "why"])
        return text


def _why_not(error: Exception) -> str:
    if isinstance(error, ChangedSinceError):
        return str(error)
    while error.__cause__ is not None or getattr(error, "inner_exception", None) is not None:  # Dynamo's says nothing
        error = getattr(error, "inner_exception", None) or error.__cause__  # type: ignore[assignment]
    return f"the reference cannot: {type(error).__name__}: {first_line(str(error))}"
