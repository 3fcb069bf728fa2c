"""Captured calls: finds them in a folder, and runs them again, in time and against float64.

Only tensors and plain values are read from files, and only PyTorch's functions and registered operators are run.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.utils import _pytree as pytree

from ..numerics.exact import widen
from ..numerics.function_runs import copies, passed, requires_grad
from ..numerics.whole_graph import measure
from .call import CallText, named_arguments, named_results, named_tensors
from .call_execution import on_onnx
from .clocks import Clock
from .compare import Comparison, OpAutoCompare
from .names import function_of
from .value_files import FORMAT, NotStoredError, decode

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
    """Runs a captured call ``runs`` times, in PyTorch or with ``runtime="onnx"`` on ONNX Runtime, and if asked for once
    more in PyTorch under ``OpAutoCompare``.

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
    tangents = {} if forward_only else _tensors(captured.read("grad_outputs"))
    state = _tensors(captured.read("rng_state")).get("cpu", torch.get_rng_state())
    leaves, spec = pytree.tree_flatten((args, kwargs))

    def run(called: Callable[..., Any]) -> dict[str, torch.Tensor]:
        """The results of one run, and the gradients of its arguments."""
        own = copies(leaves)
        args, kwargs = pytree.tree_unflatten([passed(leaf) if requires_grad(leaf) else leaf for leaf in own], spec)
        torch.set_rng_state(state)
        with torch.set_grad_enabled(bool(tangents)):
            with Clock() as clock:
                returned = called(*args, **kwargs)
            result.forward_seconds.append(clock.seconds)
            found = named_results(returned, named_arguments(args, kwargs))
            outputs = {name: value for name, value in found.items() if name in tangents and value.requires_grad}
            if outputs:
                given = [tangents[name].to(value.dtype) for name, value in outputs.items()]
                with Clock() as clock:
                    torch.autograd.backward(list(outputs.values()), given, inputs=list(filter(requires_grad, own)))
                result.backward_seconds.append(clock.seconds)
        for name, leaf in named_arguments(*pytree.tree_unflatten(own, spec)).items():
            if leaf.grad is not None:
                found[f"gradient of {name}"] = leaf.grad
        return found

    with torch.random.fork_rng(devices=[]):
        called = on_onnx(function) if runtime == "onnx" else function
        for _ in range(runs):
            found = run(called)
        expected = dict(named_tensors(output.get("output"), "output")) | _tensors(output.get("changed", {}))
        for name, value in _tensors(captured.read("grad_inputs")).items():
            expected[f"gradient of {name}"] = value
        result.difference_to_captured = _differences(expected, found)
        if compare:
            reference = "onnx" if runtime == "onnx" else "float64"
            with _Compare(reference=reference, predicate=lambda call: call.function is function) as tool:
                run(function)
            del result.forward_seconds[runs:], result.backward_seconds[runs:]
            result.verdicts, result.not_compared = tool.comparisons, "; ".join(tool.unchecked.values())
    return result


class _Compare(OpAutoCompare):
    def __init__(self, **arguments: Any) -> None:
        super().__init__(capture=None, quiet=True, **arguments)

    def _skip(self, name: str, reason: str, call: object = None) -> None:
        super()._skip(name, reason)  # the line is ours


def _differences(expected: Mapping[str, torch.Tensor], actual: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """The largest difference between values of the same name and shape."""
    pairs = ((name, value, actual.get(name)) for name, value in expected.items())
    return {
        name: measure(ours.detach().cpu(), widen(value)).max_abs
        for name, value, ours in pairs
        if ours is not None and ours.shape == value.shape
    }


def _tensors(values: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}
