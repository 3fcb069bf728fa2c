"""Runs a captured call again, times it, and compares it with the captured results and with float64."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..errors import first_line
from ..numerics.exact import widen
from ..numerics.function_runs import FunctionRun
from ..numerics.whole_graph import measure
from .call_execution import CallExecution, named_tensors
from .captures import CapturedCall, CaptureError
from .clocks import Clock, device_of
from .dispatch_modes import without_modes
from .gradients import Gradients
from .judge import Comparison, compare_gradients, compare_results
from .names import function_of, why_not_comparable
from .references import on_onnx
from .value_files import NotStoredError, decode


@dataclasses.dataclass
class LoadedCall:
    """A captured call with its values. Tensors are by name."""

    captured: CapturedCall
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: Mapping[str, torch.Tensor]
    grad_outputs: Mapping[str, torch.Tensor]  # gradients of the results; empty if there was no backward
    grad_inputs: Mapping[str, torch.Tensor]  # what the call added to the gradients of its arguments
    rng_state: torch.Tensor | None  # of the CPU, before the call, if it drew random numbers


def load_call(captured: CapturedCall) -> LoadedCall:
    """Reads a captured call. Only tensors and plain values are read, and nothing is executed.

    Raises:
        CaptureError: a file is missing or invalid, a value was not stored, or the operator does not exist.
    """

    def tensors(what: str) -> dict[str, torch.Tensor]:
        return _tensors(_read(captured, what)) if what in captured.files else {}

    given = _read(captured, "input")
    try:
        args, kwargs = decode(given.get("args")), decode(given.get("kwargs"))
        function = function_of(captured.operator)
    except (NotStoredError, LookupError) as error:
        raise CaptureError(f"{captured.folder}: {error}") from error
    if not isinstance(args, tuple) or not isinstance(kwargs, dict):
        raise CaptureError(f"{captured.folder / 'input.pth'} does not hold arguments")
    output = _read(captured, "output") if "output" in captured.files else {}
    results = dict(named_tensors(output.get("output"), "output")) | _tensors(output.get("changed", {}))
    has_state = (captured.folder / "rng_state.pth").exists()
    state = _tensors(_read(captured, "rng_state")).get("cpu") if has_state else None
    return LoadedCall(captured, function, args, kwargs, results, tensors("grad_outputs"), tensors("grad_inputs"), state)


@dataclasses.dataclass
class RerunResult:
    """The outcome of running a captured call again."""

    operator: str
    call: str  # as text
    folder: str
    forward_seconds: list[float] = dataclasses.field(default_factory=list)  # of each run
    backward_seconds: list[float] = dataclasses.field(default_factory=list)  # empty without a backward
    verdicts: list[Comparison] = dataclasses.field(default_factory=list)  # the comparison with float64, if asked for
    difference_to_captured: dict[str, float] = dataclasses.field(default_factory=dict)  # the largest of each value
    not_compared: str = ""  # why a requested comparison is missing

    @property
    def ok(self) -> bool:
        """Whether all comparisons with float64 passed."""
        return all(item.allclose for item in self.verdicts)


def run_call(
    loaded: LoadedCall, *, runs: int = 1, forward_only: bool = False, compare: bool = False, runtime: str = "torch"
) -> RerunResult:
    """Runs a captured call ``runs`` times, in PyTorch or with ``runtime="onnx"`` on ONNX Runtime, and if asked for
    compares the last run with float64.

    Raises:
        Whatever the operator or the runtime raises.
    """
    has_backward = bool(loaded.grad_outputs) and not forward_only
    result = RerunResult(loaded.captured.operator, loaded.captured.call, str(loaded.captured.folder))
    clocks: list[Clock] = []

    def timer() -> Clock:
        clocks.append(Clock(device_of(pytree.tree_leaves((loaded.args, loaded.kwargs)))))
        return clocks[-1]

    with without_modes(), torch.random.fork_rng(devices=[]):
        if loaded.rng_state is not None:
            torch.set_rng_state(loaded.rng_state)
        execution = CallExecution(loaded.function, loaded.args, loaded.kwargs)
        function = on_onnx(loaded.function) if runtime == "onnx" else None
        for _ in range(runs):
            clocks.clear()
            with torch.set_grad_enabled(has_backward):
                run = execution.run(execution.leaves(), function=function, timer=timer)
            found = execution.results(run)
            inputs = execution.gradients(run, loaded.grad_outputs, timer) if has_backward else {}
            result.forward_seconds.append(clocks[0].seconds)
            result.backward_seconds += [clock.seconds for clock in clocks[1:]]
        results = {name: value for name, value in found.items() if name in loaded.results or " after it" not in name}
        result.difference_to_captured = _differences(loaded.results, results)
        result.difference_to_captured |= {
            f"gradient of {name}": d for name, d in _differences(loaded.grad_inputs, inputs).items()
        }
        if compare:
            try:
                result.verdicts, result.not_compared = _compare(loaded, execution, run, results, inputs)
            except Exception as error:  # whatever the operator raises in float64
                result.not_compared = f"{type(error).__name__}: {first_line(str(error))}"
    return result


def _compare(
    loaded: LoadedCall,
    execution: CallExecution,
    run: FunctionRun,
    results: Mapping[str, torch.Tensor],
    grad_inputs: Mapping[str, torch.Tensor],
) -> tuple[list[Comparison], str]:
    """The comparison of a run with float64, or the reason why there is none."""
    reason = why_not_comparable(loaded.function)
    if not reason:
        args, kwargs = execution.arguments()
        torch.set_rng_state(execution.random_state)
        with execution.recording:  # records decisions and random numbers for float64
            loaded.function(*args, **kwargs)
        reason = execution.recording.failure
    if reason:
        return [], reason
    returned, _ = run.returned
    compared, _ = compare_results(execution, results, returned)
    if grad_inputs:
        outputs = {name: value for name, value in loaded.grad_outputs.items() if name in results}
        compared += compare_gradients(execution, Gradients(outputs, dict(grad_inputs)))
    return compared, ""


def _differences(expected: Mapping[str, torch.Tensor], actual: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """The largest difference between values of the same name and shape."""
    pairs = ((name, value, actual.get(name)) for name, value in expected.items())
    return {
        name: measure(ours.detach().cpu(), widen(value)).max_abs
        for name, value, ours in pairs
        if ours is not None and ours.shape == value.shape
    }


def _read(captured: CapturedCall, what: str) -> Mapping[str, Any]:
    path = captured.folder / f"{what}.pth"
    try:
        found = torch.load(path, weights_only=True, map_location="cpu")
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError, OSError) as error:
        raise CaptureError(f"{path} is missing, damaged or not of a capture: {type(error).__name__}") from error
    if not isinstance(found, dict):
        raise CaptureError(f"{path} is not a file of a capture")
    return found


def _tensors(values: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
