"""A captured operator again: run, timed, and compared with what it gave and with float64."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ..captures import CapturedCall, CaptureError
from ..errors import first_line
from ..numerics.again import CallAgain, InFloat64
from ..numerics.distance import distance
from ..numerics.twice import NotRepeatableError
from .call import Call, named_tensors
from .clocks import Clock, device_of
from .gradients import Gradients
from .judge import CallJudge, Verdict
from .modes import aside
from .names import function_of, may_write, memory_of, why_not_comparable
from .references import FLOAT64, Reference, on_onnx
from .stored import NotStoredError, decode


@dataclasses.dataclass
class LoadedCall:
    """What a captured call was made of.

    Attributes:
        captured: where it is.
        function: the operator.
        args, kwargs: of the call.
        output: what it returned, as it is stored; ``None`` if it did not return.
        grad_outputs: the gradients of its results, by name; empty if there was no backward.
        grad_inputs: what it added to the gradients of its arguments, by name.
        rng_state: of the CPU's random numbers before it, if it drew any.
    """

    captured: CapturedCall
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Mapping[str, Any] | None
    grad_outputs: Mapping[str, torch.Tensor]
    grad_inputs: Mapping[str, torch.Tensor]
    rng_state: torch.Tensor | None


def load_call(captured: CapturedCall) -> LoadedCall:
    """Reads a captured call. Nothing in it is executed: tensors and plain values are all that is read.

    Raises:
        CaptureError: a file is missing or no capture's, a value was not stored, or there is no such operator here.
    """
    given = _read(captured.folder / "input.pth")
    if not isinstance(given, dict) or not {"args", "kwargs"} <= given.keys():
        raise CaptureError(f"{captured.folder / 'input.pth'} holds no arguments")
    try:
        args, kwargs = decode(given["args"]), decode(given["kwargs"])
        function = function_of(captured.operator)
    except (NotStoredError, LookupError) as error:
        raise CaptureError(f"{captured.folder}: {error}") from error
    if not isinstance(args, tuple) or not isinstance(kwargs, dict):
        raise CaptureError(f"{captured.folder / 'input.pth'} holds no arguments")
    state = _read_if_there(captured.folder / "rng_state.pth").get("cpu")
    return LoadedCall(
        captured,
        function,
        args,
        kwargs,
        _read_if_there(captured.folder / "output.pth") or None,
        _tensors(_read_if_there(captured.folder / "grad_outputs.pth")),
        _tensors(_read_if_there(captured.folder / "grad_inputs.pth")),
        state if isinstance(state, torch.Tensor) else None,
    )


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
    forward: list[float]
    backward: list[float]
    verdicts: list[Verdict]
    recorded: dict[str, float]
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
        runs: how often.
        forward_only: whether its backward is left out.
        compare: whether the results of the last run are compared with float64.
        runtime: ``torch``, or ``onnx`` for ONNX Runtime.

    Raises:
        ValueError: there is no such runtime, or no run.
        SessionError, UnsupportedOperatorError, ...: whatever the operator or the runtime raises.
    """
    if runs < 1:
        raise ValueError(f"runs is 1 or more, not {runs}")
    if runtime not in ("torch", "onnx"):
        raise ValueError(f"runtime is 'torch' or 'onnx', not {runtime!r}")
    function = on_onnx(loaded.function) if runtime == "onnx" else loaded.function
    result = RunCall(loaded.captured, [], [], [], {})
    found: dict[str, torch.Tensor] = {}
    gradients = Gradients()
    for _ in range(runs):
        found, gradients = _run_once(loaded, function, result, forward_only=forward_only)
    result.recorded = _differences(loaded, found, gradients)
    if compare:
        result.not_compared = why_not_comparable(loaded.function)
        try:
            result.verdicts = [] if result.not_compared else _judge(loaded, found, gradients)
        except Exception as error:  # whatever the operator raises in float64
            result.not_compared = f"{type(error).__name__}: {first_line(str(error))}"
    return result


def _run_once(
    loaded: LoadedCall, function: Callable[..., Any], result: RunCall, *, forward_only: bool
) -> tuple[dict[str, torch.Tensor], Gradients]:
    args, kwargs, leaves = _fresh(loaded)
    clock = Clock(device_of(list(leaves.values())))
    has_backward = bool(loaded.grad_outputs) and not forward_only
    with torch.set_grad_enabled(has_backward), torch.random.fork_rng(devices=[]):
        if loaded.rng_state is not None:
            torch.set_rng_state(loaded.rng_state)
        clock.start()
        returned = function(*args, **kwargs)
        clock.stop()
    result.forward.append(clock.seconds)
    found = dict(named_tensors(returned, "output"))
    if not found and isinstance(returned, (bool, int, float)):
        found["output"] = torch.tensor(returned)
    gradients = Gradients()
    ends = {name: value for name, value in found.items() if name in loaded.grad_outputs and value.requires_grad}
    of = {name: value for name, value in leaves.items() if value.requires_grad}
    if not has_backward or not ends or not of:
        return found, gradients
    gradients.outputs = {name: loaded.grad_outputs[name].detach() for name in ends}
    clock = Clock(device_of(list(leaves.values()))).start()
    grads = torch.autograd.grad(
        list(ends.values()), list(of.values()), list(gradients.outputs.values()), allow_unused=True
    )
    clock.stop()
    result.backward.append(clock.seconds)
    gradients.inputs = {name: grad for name, grad in zip(of, grads, strict=True) if grad is not None}
    gradients.alike = {name: [name] for name in gradients.inputs}
    return found, gradients


def _fresh(loaded: LoadedCall) -> tuple[Any, Any, dict[str, torch.Tensor]]:
    """Copies of the arguments, and those that are leaves; what a call writes into is given as a result of one."""
    call = Call(loaded.captured.operator, loaded.function, loaded.args, loaded.kwargs)
    writes = may_write(loaded.function, loaded.kwargs)
    leaves = {
        name: value.detach().clone(memory_format=torch.preserve_format).requires_grad_(value.requires_grad)
        for name, value in call.tensors.items()
    }
    given = {name: leaf.clone() if writes and leaf.requires_grad else leaf for name, leaf in leaves.items()}
    return _replaced(loaded.args, "args", given), _replaced(loaded.kwargs, "kwargs", given), leaves


def _replaced(value: Any, name: str, given: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return given[name]
    if isinstance(value, dict):
        return {key: _replaced(item, f"{name}[{key}]", given) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_replaced(item, f"{name}[{i}]", given) for i, item in enumerate(value))
    return value


def _judge(loaded: LoadedCall, found: Mapping[str, torch.Tensor], gradients: Gradients) -> list[Verdict]:
    call = Call(loaded.captured.operator, loaded.function, loaded.args, loaded.kwargs)
    args, kwargs, _ = _fresh(loaded)
    with aside(), torch.random.fork_rng(devices=[]):
        if loaded.rng_state is not None:
            torch.set_rng_state(loaded.rng_state)
        again = CallAgain(loaded.function, args, kwargs, InFloat64(), **memory_of(loaded.function, loaded.kwargs))
        with again.recording():
            loaded.function(*args, **kwargs)
        if again.failure:
            raise NotRepeatableError(again.failure)
        judge = CallJudge(again, call.leaf_names, Reference(FLOAT64))
        verdicts = judge.results(found, None)
        return verdicts + (judge.gradients(gradients) if gradients.inputs else [])


def _differences(loaded: LoadedCall, found: Mapping[str, torch.Tensor], gradients: Gradients) -> dict[str, float]:
    recorded = dict(named_tensors((loaded.output or {}).get("output"), "output"))
    pairs = [(name, value, found.get(name)) for name, value in recorded.items()]
    pairs += [(f"gradient of {name}", value, gradients.inputs.get(name)) for name, value in loaded.grad_inputs.items()]
    return {
        name: distance(ours.detach().cpu(), value.detach().double() if value.is_floating_point() else value).max_abs
        for name, value, ours in pairs
        if ours is not None and ours.shape == value.shape
    }


def _read(path: Path) -> Any:
    try:
        return torch.load(path, weights_only=True, map_location="cpu")
    except FileNotFoundError:
        raise CaptureError(f"{path} is missing") from None
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError, OSError) as error:
        raise CaptureError(f"{path} is no file of a capture, or damaged: {type(error).__name__}") from error


def _read_if_there(path: Path) -> Mapping[str, Any]:
    if not path.exists():
        return {}
    value = _read(path)
    if not isinstance(value, dict):
        raise CaptureError(f"{path} is no file of a capture")
    return value


def _tensors(values: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
