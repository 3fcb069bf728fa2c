"""The references of ``OpAutoCompare``: float64, another device, or ONNX Runtime."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .call import Call, signature
from .call_execution import FLOAT64, CallExecution, RunTarget
from .names import function_name, may_write

ONNX = RunTarget(device=torch.device("cpu"))


class Reference:
    """Where calls are run again: ``float64``, ``onnx``, or a device such as ``cuda``.

    Raises:
        ValueError: the device does not exist.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._compiled: dict[object, Callable[..., Any]] = {}
        self._target = {"float64": FLOAT64, "onnx": ONNX}.get(kind)
        if self._target is None:
            try:
                self._target = RunTarget(device=torch.empty(0, device=kind).device)
            except (RuntimeError, AssertionError) as error:
                raise ValueError(
                    f"reference must be 'float64', 'onnx' or a device of this machine, not {kind!r}: {error}"
                ) from error

    def target(self, call: Call) -> RunTarget:
        """The target of a call. Each signature is compiled separately, because Dynamo limits recompilations."""
        assert self._target is not None
        if self._target is not ONNX:
            return self._target
        gradients = tuple(value.requires_grad for value in call.tensors.values()), call.has_gradients
        key = (call.function, signature(call.args), signature(call.kwargs), gradients)
        if key not in self._compiled:
            self._compiled[key] = on_onnx(call.in_pytorch)
        return dataclasses.replace(ONNX, function=self._compiled[key])


def execution_of(function: Callable[..., Any], args: Sequence[object], kwargs: Mapping[str, object]) -> CallExecution:
    """Prepares to run a call of an operator again. To be called before the call."""
    reads_memory = "as_strided" in function_name(function)
    return CallExecution(function, args, kwargs, writes=may_write(function, kwargs), reads_memory=reads_memory)


def on_onnx(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function on ONNX Runtime, with its gradients. It raises an error if an operator cannot run there."""

    def call(*args: Any, **kwargs: Any) -> Any:  # Dynamo compiles Python functions only
        return function(*args, **kwargs)

    call.__code__ = call.__code__.replace()  # Dynamo's limit of recompilations is for each code object
    return torch.compile(call, backend="onnxrt", fullgraph=True, dynamic=False, options={"fallback": "error"})
