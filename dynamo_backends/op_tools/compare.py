"""``OpAutoCompare``: runs each operator again on a reference, and compares results and gradients."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ..common.text_table import fit_table
from ..errors import first_line, writing
from ..numerics.function_runs import FunctionRun, Rerun
from ..numerics.verdicts import Verdict
from .call import Call, CallText, are_readable
from .call_execution import CallExecution, ChangedSinceError, Values, ValuesOf, on_onnx
from .capture import OpCapture
from .gradients import Gradients
from .names import why_not_comparable
from .tool import OpTool

_STEP = 1e-6
_DERIVATIVE_ERROR = 1e-3
"""The step of a numerical derivative, and its tolerance relative to its size, as in ``torch.autograd.gradcheck``."""

_DIFFERENCE_ERROR = 1e-8
"""The error of a numerical derivative in float64, relative to the results."""


class NoDerivativeError(RuntimeError):
    """There is no derivative by differences in float64."""


@dataclasses.dataclass(kw_only=True)
class Comparison(CallText):
    """The comparison of one result or gradient of a call with the reference."""

    value: str  # "output", "output[1]", "args[0] after it", "gradient of args[1]"
    allclose: bool  # no element has an error above its tolerance, and shape and dtype are right
    max_diff: float  # the largest absolute error
    allowed: float | None  # the tolerance of the element with the largest share; None where elements are counted
    complaint: str = ""  # what is wrong besides the size of an error
    share: float = 0.0  # the largest error as a multiple of its element's tolerance

    def __str__(self) -> str:
        which = "" if self.value == "output" else f" {self.value}"
        complaint = f"  {self.complaint}" if self.complaint else ""
        return (
            f"OpAutoCompare: {self.name + which:60} allclose: {str(self.allclose):5} "
            f"max_diff: {self.max_diff:12.9f}{complaint}"
        )


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
        self._reference = str(reference)
        self._device = _device_of(self._reference)
        self._compiled: dict[object, Callable[..., Any]] = {}  # one for each signature: Dynamo limits recompilations
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
        comparisons = [dataclasses.asdict(item) for item in self.comparisons]
        return {"reference": self._reference, "comparisons": comparisons, "unchecked": self.unchecked}

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
        name, text = call.name, call.text
        run = self._elsewhere(call, execution)
        actual: Values = call.results or ({"output": result} if isinstance(result, (bool, int, float)) else {})
        try:
            others = None if run is None else execution.results(run())
            compared, expected = _compare_values(execution, actual, others=others)
        except Exception as error:  # the user's operator may fail in float64, or the runtime may lack it
            self._skip(name, _reason(error), text)
            return None
        self._add(text, execution, compared, output={"output": result}, reference=expected)

        def finished(gradients: Gradients) -> None:
            if gradients.are_mixed:
                self._skip(f"{name} backward", "the gradient of one result contains another's", text)
                return
            try:
                with torch.enable_grad():
                    others = None if run is None else execution.gradients(run(), gradients.outputs)
                compared = _compare_gradients(execution, gradients, others)
            except Exception as error:  # as in the forward
                self._skip(f"{name} backward", _reason(error), text)
                return
            if self._numerical and "ctc_loss" not in name:  # its gradient includes that of log_softmax
                compared += self._by_differences(text, execution, gradients)
            files = {"grad_outputs": gradients.outputs, "grad_inputs": gradients.inputs}
            self._add(text, execution, compared, **files)

        return finished

    def _elsewhere(self, call: Call, execution: CallExecution) -> Callable[[], FunctionRun] | None:
        """Runs the call on another runtime; ``None`` for float64."""
        if self._device is None:
            return None
        function: Callable[..., Any] = call.in_pytorch
        if self._reference == "onnx":
            key = (call.function, str(call), *(value.requires_grad for value in call.tensors.values()))
            function = self._compiled.setdefault(key, on_onnx(function))
        return lambda: execution.run(execution.leaves(device=self._device), function=function)

    def _by_differences(self, call: CallText, execution: CallExecution, gradients: Gradients) -> list[Comparison]:
        compared, name = [], f"{call.name} by differences"
        try:
            for argument, comparison in _compare_derivatives(execution, gradients.outputs, self._generator):
                if comparison is not None:
                    compared.append(comparison)
                    continue
                reason = f"no derivative for {argument} here: two of its values are equal, or one is 0"
                self._skip(name, reason, call)
        except Exception as error:
            self._skip(name, _reason(error), call)
        return compared

    def _add(self, call: CallText, execution: CallExecution, compared: Sequence[Comparison], **files: Values) -> None:
        """Stores and prints the comparisons of a call, and captures the call if one failed."""
        items = [dataclasses.replace(item, **vars(call)) for item in compared]
        with self._lock:
            self.comparisons += items
        for item in items:
            self._print(str(item))
        if all(item.allclose for item in items):
            return
        self._print(f"OpAutoCompare: {call.name:60} input: {call.call}  {call.source}  {call.module}".rstrip())
        if self._capture is not None and self._captured[call.name] < self._capture_first:
            self._captured[call.name] += 1
            folder = self._capture.write_call(call, *execution.arguments())
            if folder is not None:
                for file, value in files.items():
                    self._capture.save(folder, file, value)

    def _end(self) -> None:
        self._print("\n" + self.table())
        if self._json is not None:
            with writing(self._json):
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
        return text + ("\n\nnot compared:\n" + fit_table(skipped, ["operator", "calls", "why"]) if skipped else "")


def _device_of(reference: str) -> torch.device | None:
    """The device of a reference; ``None`` for float64.

    Raises:
        ValueError: the device does not exist.
    """
    try:
        return None if reference == "float64" else torch.empty(0, device=reference.replace("onnx", "cpu")).device
    except (RuntimeError, AssertionError) as error:
        wanted = "reference must be 'float64', 'onnx' or a device of this machine"
        raise ValueError(f"{wanted}, not {reference!r}: {error}") from error


def _reason(error: Exception) -> str:
    if isinstance(error, (ChangedSinceError, NoDerivativeError)):
        return str(error)
    cause: BaseException = error
    while inner := getattr(cause, "inner_exception", None) or cause.__cause__:  # Dynamo's own message says nothing
        cause = inner
    return f"the reference fails: {type(cause).__name__}: {first_line(str(cause))}"


def _compare_values(
    execution: CallExecution,
    actual: Values,
    values_of: ValuesOf | None = None,
    others: Values | None = None,
    dtypes: Sequence[torch.dtype] = (),
) -> tuple[list[Comparison], Values]:
    """Compares values of a call, by default its results, with float64.

    Args:
        execution, actual, values_of, dtypes: see ``CallExecution.check``.
        others: the same values on another runtime, which must be right, too.

    Returns:
        The comparisons, and the reference's values: ``others``, if there are any.

    Raises:
        Whatever the function raises in float64.
        UnstableError: it does not return the same each time.
    """
    check = execution.check(actual, values_of or execution.results, dtypes)
    reference: Values = check.exact if others is None else others
    comparisons = []
    for name, value in actual.items():
        if name in check.exact and name in reference:
            values = (value,) if others is None else (value, others[name].to(value.device))
            verdicts = [check.judge(name, item.detach() if isinstance(item, torch.Tensor) else item) for item in values]
            comparisons.append(_comparison(name, max(verdicts, key=_rank)))
    return comparisons, reference


def _compare_gradients(
    execution: CallExecution, gradients: Gradients, others: Values | None = None
) -> list[Comparison]:
    """Compares what a call added to the gradients of its arguments; for the arguments and errors see
    ``_compare_values``."""
    values_of = functools.partial(execution.gradients, tangents=gradients.outputs)
    dtypes = [tangent.dtype for tangent in gradients.outputs.values()]  # under autocast, lower than the arguments'
    with torch.enable_grad():
        found, _ = _compare_values(execution, gradients.inputs, values_of, others, dtypes)
    return [dataclasses.replace(item, value=f"gradient of {item.value}") for item in found]


def _compare_derivatives(
    execution: CallExecution, tangents: Values, generator: torch.Generator
) -> Iterator[tuple[str, Comparison | None]]:
    """Compares derivatives of the results, multiplied by ``tangents``, by autograd in float64 with derivatives by
    differences, in one random direction of each real argument; ``None`` where an argument has no derivative.

    As ``torch.autograd.gradcheck`` with ``fast_mode``, but with the gradients of this call as tangents, and the
    direction is not normal to the gradient, so that a wrong factor is always seen.

    Raises:
        NoDerivativeError: float64 lacks an operator.
        ChangedSinceError: an argument was changed in place since the call.
    """
    leaves = execution.leaves(wide=True)
    with torch.enable_grad():
        gradients = execution.gradients(execution.run(leaves, Rerun(execution.recording)), tangents)

    def terms_at(leaf: torch.Tensor, moved: torch.Tensor) -> torch.Tensor:
        mode = Rerun(execution.recording)
        found = execution.results(execution.run([moved if item is leaf else item for item in leaves], mode))
        if mode.inexact:
            raise NoDerivativeError("; ".join(mode.inexact.values()))
        return torch.cat([(found[name] * tangents[name].double()).flatten() for name in tangents if name in found])

    for name, leaf in execution.differentiable(leaves).items():
        if name not in gradients or not leaf.is_floating_point():
            continue
        gradient, start = gradients[name].detach(), leaf.detach()
        direction = torch.randn(leaf.shape, dtype=torch.float64, generator=generator).to(leaf.device)
        size = float(gradient.norm())
        if size:
            along = gradient / size
            direction += (1 - float((along * direction).sum())) * along
        behind, here, ahead = (terms_at(leaf, start + distance * direction) for distance in (-_STEP, 0.0, _STEP))
        slopes = [float(difference.sum()) / _STEP for difference in (here - behind, ahead - here)]
        by_differences, by_autograd = sum(slopes) / 2, float((gradient * direction).sum())
        allowed = _DERIVATIVE_ERROR * max(size, abs(by_differences)) + _DIFFERENCE_ERROR * float(here.abs().sum())
        if abs(slopes[0] - slopes[1]) > allowed:
            yield name, None
            continue
        error = abs(by_autograd - by_differences)
        complaint = f"the derivative of its results is {by_differences:.6g}, not {by_autograd:.6g}"
        yield (
            name,
            Comparison(
                value=f"gradient of {name} by differences",
                allclose=error <= allowed,
                max_diff=error,
                allowed=allowed,
                complaint="" if error <= allowed else complaint,
                share=error / allowed if allowed else 0.0,
            ),
        )


def _rank(found: Verdict) -> tuple[bool, float]:
    return found.is_wrong, found.ours.share if found.ours is not None else 0.0


def _comparison(name: str, found: Verdict) -> Comparison:
    error = found.ours
    return Comparison(
        value=name,
        allclose=not found.is_wrong,
        max_diff=error.max_abs if error is not None else math.inf if found.is_wrong else 0.0,
        allowed=(error.limit or None) if error is not None else None,
        complaint=found.complaint or (str(found) if error is not None and error.nonfinite else ""),
        share=math.inf if found.complaint else error.share if error is not None else 0.0,
    )
