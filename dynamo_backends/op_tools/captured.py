"""Captured calls: finds them in a folder, and runs them again, in time and against float64.

Only tensors and plain values are read from files, and only PyTorch's functions and registered operators are run.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from ..errors import first_line
from ..numerics.exact import widen
from ..numerics.whole_graph import measure
from .call import AFTER, CallText, named_tensors
from .call_execution import CallExecution, Values, on_onnx
from .clocks import Clock
from .dispatch_modes import without_modes
from .gradients import Gradients
from .judge import Comparison, compare_gradients, compare_values
from .names import function_of, why_not_comparable
from .value_files import NotStoredError, decode

FORMAT = 3
"""The version of ``call.json``."""

_FILES = ("input", "output", "grad_inputs", "grad_outputs", "reference")


class CaptureError(ValueError):
    """A folder is not a capture, or cannot be read."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CapturedCall(CallText):
    """One captured call: the content of its ``call.json``, and what its folder has."""

    format: int
    torch: str = ""  # the version
    not_again: str = ""  # why the call cannot be run again; "" if no reason is known
    folder: Path = Path()
    bytes: int = 0  # the size of its files
    files: Sequence[str] = ()  # those of "input", "output", "grad_inputs", "grad_outputs", "reference" that exist

    def read(self, what: str) -> dict[str, Any]:
        """The values in a file; none if it does not exist, except in that of the arguments.

        Raises:
            CaptureError: it is missing, damaged or not of a capture.
        """
        path = self.folder / f"{what}.pth"
        if what != "input" and not path.exists():
            return {}
        try:
            found = torch.load(path, weights_only=True, map_location="cpu")
        except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError, OSError) as error:
            raise CaptureError(f"{path} is missing, damaged or not of a capture: {type(error).__name__}") from error
        if not isinstance(found, dict):
            raise CaptureError(f"{path} is not a file of a capture")
        return found


def find_calls(folder: str | os.PathLike[str]) -> list[CapturedCall]:
    """Finds the calls in a folder of ``OpCapture``, or in any folder of it; sorted by run, operator and number.

    Raises:
        CaptureError: the folder does not exist or has no calls, or a description cannot be read.
    """
    path = Path(folder)
    if not path.is_dir():
        raise CaptureError(f"there is no folder {str(path)!r}")
    calls = [_described(file) for file in path.rglob("call.json")]
    if not calls:
        raise CaptureError(f"no captured operator in {str(path)!r}: a call is a folder with a call.json")
    return sorted(calls, key=lambda call: (str(call.folder.parent), call.number))


def _described(file: Path) -> CapturedCall:
    try:
        found = msgspec.json.decode(file.read_bytes(), type=CapturedCall)
    except (msgspec.DecodeError, RecursionError) as error:
        raise CaptureError(f"{file} is damaged or not the description of a captured call: {error}") from error
    if found.format != FORMAT:
        raise CaptureError(f"{file} has format {found.format}; this version reads {FORMAT}")
    folder = file.parent
    files = [name for name in _FILES if (folder / f"{name}.pth").exists()]
    reason = "" if "input" in files else "its arguments are missing"
    if files == ["input"]:
        reason = "it raised an error or did not finish when it was captured"
    size = sum((folder / f"{name}.pth").stat().st_size for name in files)
    return dataclasses.replace(found, folder=folder, bytes=size, files=files, not_again=found.not_again or reason)


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
    captured: CapturedCall,
    *,
    runs: int = 1,
    forward_only: bool = False,
    compare: bool = False,
    runtime: str = "torch",
) -> RerunResult:
    """Runs a captured call ``runs`` times, in PyTorch or with ``runtime="onnx"`` on ONNX Runtime, and if asked for
    compares the last run with float64.

    Raises:
        CaptureError: a file is missing or invalid, a value was not stored, or the operator does not exist.
        Whatever the operator or the runtime raises.
    """
    result = RerunResult(captured.name, captured.call, str(captured.folder))
    given, output = captured.read("input"), captured.read("output")
    try:
        args, kwargs = decode(given.get("args")), decode(given.get("kwargs"))
        function = function_of(captured.name)
    except (NotStoredError, LookupError) as error:
        raise CaptureError(f"{captured.folder}: {error}") from error
    if not isinstance(args, tuple) or not isinstance(kwargs, dict):
        raise CaptureError(f"{captured.folder / 'input.pth'} does not hold arguments")
    expected = dict(named_tensors(output.get("output"), "output")) | _tensors(output.get("changed", {}))
    gradients = Gradients(_tensors(captured.read("grad_outputs")), _tensors(captured.read("grad_inputs")))
    has_backward = bool(gradients.outputs) and not forward_only
    clocks: list[Clock] = []

    def timer() -> Clock:
        clocks.append(Clock())
        return clocks[-1]

    with without_modes(), torch.random.fork_rng(devices=[]):
        if (state := _tensors(captured.read("rng_state")).get("cpu")) is not None:
            torch.set_rng_state(state)
        execution = CallExecution(function, args, kwargs)
        elsewhere = on_onnx(function) if runtime == "onnx" else None
        for _ in range(runs):
            clocks.clear()
            with torch.set_grad_enabled(has_backward):
                run = execution.run(execution.leaves(), function=elsewhere, timer=timer)
            inputs = execution.gradients(run, gradients.outputs, timer) if has_backward else {}
            result.forward_seconds.append(clocks[0].seconds)
            result.backward_seconds += [clock.seconds for clock in clocks[1:]]
        results = {key: value for key, value in execution.results(run).items() if key in expected or AFTER not in key}
        result.difference_to_captured = _differences(expected, results)
        for name, difference in _differences(gradients.inputs, inputs).items():
            result.difference_to_captured[f"gradient of {name}"] = difference
        if compare:
            try:
                outputs = {name: value for name, value in gradients.outputs.items() if name in results}
                result.verdicts, result.not_compared = _compare(execution, results, Gradients(outputs, dict(inputs)))
            except Exception as error:  # whatever the operator raises in float64
                result.not_compared = f"{type(error).__name__}: {first_line(str(error))}"
    return result


def _compare(execution: CallExecution, results: Values, gradients: Gradients) -> tuple[list[Comparison], str]:
    """The comparison of a run with float64, or the reason why there is none."""
    reason = why_not_comparable(execution.function)
    if not reason:
        args, kwargs = execution.arguments()
        torch.set_rng_state(execution.random_state)
        with execution.recording:  # records decisions and random numbers for float64
            execution.function(*args, **kwargs)
        reason = execution.recording.failure
    if reason:
        return [], reason
    compared, _ = compare_values(execution, results)
    return compared + (compare_gradients(execution, gradients) if gradients.inputs else []), ""


def _differences(expected: Mapping[str, torch.Tensor], actual: Values) -> dict[str, float]:
    """The largest difference between values of the same name and shape."""
    pairs = ((name, value, actual.get(name)) for name, value in expected.items())
    return {
        name: measure(ours.detach().cpu(), widen(value)).max_abs
        for name, value, ours in pairs
        if ours is not None and ours.shape == value.shape
    }


def _tensors(values: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
