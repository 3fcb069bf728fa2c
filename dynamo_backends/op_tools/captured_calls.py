"""A captured operator again: run, timed, and compared with what it gave and with float64."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..errors import first_line
from ..numerics.call_execution import FLOAT64, CallExecution, Target, named_tensors
from ..numerics.distance import distance
from ..numerics.program_execution import NotRepeatableError
from .captures import CapturedCall, CaptureError
from .clocks import Clock, device_of
from .dispatch_modes import aside
from .gradients import Gradients
from .judge import CallJudge, Verdict
from .names import function_of, why_not_comparable
from .references import execution_of, on_onnx
from .value_files import NotStoredError, decode


@dataclasses.dataclass
class LoadedCall:
    """What a captured call was made of.

    Attributes:
        captured: where it is.
        function: the operator.
        args, kwargs: of the call.
        results: the tensors that it gave, by name.
        grad_outputs: the gradients of its results, by name; empty if there was no backward.
        grad_inputs: what it added to the gradients of its arguments, by name.
        rng_state: of the CPU's random numbers before it, if it drew any.
    """

    captured: CapturedCall
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: Mapping[str, torch.Tensor]
    grad_outputs: Mapping[str, torch.Tensor]
    grad_inputs: Mapping[str, torch.Tensor]
    rng_state: torch.Tensor | None


def load_call(captured: CapturedCall) -> LoadedCall:
    """Reads a captured call. Nothing in it is executed: tensors and plain values are all that is read.

    Raises:
        CaptureError: a file is missing or no capture's, a value was not stored, or there is no such operator here.
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
        raise CaptureError(f"{captured.folder / 'input.pth'} holds no arguments")
    output = _read(captured, "output") if "output" in captured.files else {}
    results = dict(named_tensors(output.get("output"), "output")) | _tensors(output.get("changed", {}))
    has_state = (captured.folder / "rng_state.pth").exists()
    state = _tensors(_read(captured, "rng_state")).get("cpu") if has_state else None
    return LoadedCall(captured, function, args, kwargs, results, tensors("grad_outputs"), tensors("grad_inputs"), state)


@dataclasses.dataclass
class RunCall:
    """What came of running a captured call again.

    Attributes:
        captured: which.
        forward, backward: seconds of each run; no ``backward`` where none was captured or asked for.
        verdicts: against float64, if it was asked for.
        recorded: for each captured result and gradient, the largest difference of this run to it.
        not_compared: why there are no verdicts, though they were asked for; or ``""``.
    """

    captured: CapturedCall
    forward: list[float] = dataclasses.field(default_factory=list)
    backward: list[float] = dataclasses.field(default_factory=list)
    verdicts: list[Verdict] = dataclasses.field(default_factory=list)
    recorded: dict[str, float] = dataclasses.field(default_factory=dict)
    not_compared: str = ""

    @property
    def ok(self) -> bool:
        """Whether nothing that was compared with float64 is wrong."""
        return all(verdict.allclose for verdict in self.verdicts)


def run_call(
    loaded: LoadedCall, *, runs: int = 1, forward_only: bool = False, compare: bool = False, runtime: str = "torch"
) -> RunCall:
    """Runs a captured call again.

    Args:
        loaded: the call.
        runs: how often, at least once.
        forward_only: whether its backward is left out.
        compare: whether the results of the last run are compared with float64.
        runtime: ``torch``, or ``onnx`` for ONNX Runtime.

    Raises:
        SessionError, UnsupportedOperatorError, ...: whatever the operator or the runtime raises.
    """
    function = on_onnx(loaded.function) if runtime == "onnx" else loaded.function
    has_backward = bool(loaded.grad_outputs) and not forward_only
    result = RunCall(loaded.captured)
    clocks: list[Clock] = []

    def timer() -> Clock:
        clocks.append(Clock(device_of(pytree.tree_leaves((loaded.args, loaded.kwargs)))))
        return clocks[-1]

    target = Target(function=function, timer=timer)
    with aside(), torch.random.fork_rng(devices=[]):
        if loaded.rng_state is not None:
            torch.set_rng_state(loaded.rng_state)
        execution = execution_of(loaded.function, loaded.args, loaded.kwargs)
        for _ in range(runs):
            clocks.clear()
            run = execution.run(target, with_gradients=has_backward)
            inputs = run.gradients(loaded.grad_outputs)
            result.forward.append(clocks[0].seconds)
            result.backward += [clock.seconds for clock in clocks[1:]]
        results = {
            name: value for name, value in run.results.items() if name in loaded.results or " after it" not in name
        }
        result.recorded = _differences(loaded.results, results)
        result.recorded |= {f"gradient of {name}": d for name, d in _differences(loaded.grad_inputs, inputs).items()}
        if compare:
            result.not_compared = why_not_comparable(loaded.function)
            try:
                if not result.not_compared:
                    judge = _judge_of(loaded, execution)
                    result.verdicts, _ = judge.results(results, run.returned)
                    if inputs:
                        outputs = {name: value for name, value in loaded.grad_outputs.items() if name in results}
                        result.verdicts += judge.gradients(
                            Gradients(outputs, inputs, {name: [name] for name in inputs})
                        )
            except Exception as error:  # whatever the operator raises in float64
                result.not_compared = f"{type(error).__name__}: {first_line(str(error))}"
    return result


def _judge_of(loaded: LoadedCall, execution: CallExecution) -> CallJudge:
    """What judges a call by float64; it is made once more for that, with the same random numbers."""
    args, kwargs = execution.arguments()
    torch.set_rng_state(execution.random_state)
    with execution.recording:
        loaded.function(*args, **kwargs)
    if execution.recording.failure:
        raise NotRepeatableError(execution.recording.failure)
    return CallJudge(execution, FLOAT64)


def _differences(expected: Mapping[str, torch.Tensor], found: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """The largest difference of each value to that of the same name and shape."""
    return {
        name: distance(ours.detach().cpu(), value.detach().double() if value.is_floating_point() else value).max_abs
        for name, value in expected.items()
        if (ours := found.get(name)) is not None and ours.shape == value.shape
    }


def _read(captured: CapturedCall, what: str) -> Mapping[str, Any]:
    path = captured.folder / f"{what}.pth"
    try:
        found = torch.load(path, weights_only=True, map_location="cpu")
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError, OSError) as error:
        raise CaptureError(f"{path} is missing, no file of a capture or damaged: {type(error).__name__}") from error
    if not isinstance(found, dict):
        raise CaptureError(f"{path} is no file of a capture")
    return found


def _tensors(values: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
