"""What ``OpAutoCompare`` compares a call with: the call again in float64, on another device, or on ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..numerics.again import AsItIs, CallAgain, How, InFloat64, OnDevice
from .call import Call, named_tensors, signature
from .names import memory_of

FLOAT64 = "float64"
ONNX = "onnx"


class Reference:
    """Makes calls again.

    Args:
        kind: ``float64``, ``onnx``, or a device such as ``cuda``.

    Attributes:
        is_exact: whether its results have no rounding of the model's dtype.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.is_exact = kind == FLOAT64
        self._compiled: dict[object, Callable[..., Any]] = {}
        if kind not in (FLOAT64, ONNX):
            try:
                torch.empty(0, device=kind)
            except (RuntimeError, AssertionError) as error:
                said = f"reference is 'float64', 'onnx' or a device of this machine, not {kind!r}: {error}"
                raise ValueError(said) from error

    def how(self, *, decides_itself: bool = False) -> How:
        """In what calls are made again."""
        if self.kind == FLOAT64:
            return InFloat64(decides_itself=decides_itself)
        return AsItIs() if self.kind == ONNX else OnDevice(self.kind)

    def prepare(self, call: Call) -> CallAgain:
        """Before a call: copies of its arguments."""
        function = call.in_pytorch
        if self.kind == ONNX:
            gradients = tuple(value.requires_grad for value in call.tensors.values()), call.has_gradients
            key = (call.function, signature(call.args), signature(call.kwargs), gradients)
            if key not in self._compiled:
                self._compiled[key] = on_onnx(function)
            function = self._compiled[key]
        memory = memory_of(call.function, call.kwargs)
        return CallAgain(function, call.args, call.kwargs, self.how(), in_pytorch=call.in_pytorch, **memory)


def on_onnx(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that runs on ONNX Runtime whole, its gradients too, or raises."""

    def call(*args: Any, **kwargs: Any) -> Any:  # a function of Python: Dynamo does not compile PyTorch's own
        return function(*args, **kwargs)

    call.__code__ = call.__code__.replace()  # Dynamo's limit of compiles is one for all functions of the same code
    return torch.compile(call, backend="onnxrt", fullgraph=True, dynamic=False, options={"fallback": "error"})


def named_results(result: object, written: Mapping[int, torch.Tensor], names: Sequence[str]) -> dict[str, object]:
    """The results of a call made again, named as ``results_of`` names those of the call itself."""
    found: dict[str, object] = dict(named_tensors(result, "output"))
    returned = {id(value) for value in found.values()}
    for position, value in written.items():
        if id(value) not in returned:
            found[f"{names[position]} after it"] = value
    return found
