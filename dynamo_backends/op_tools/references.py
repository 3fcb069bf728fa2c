"""Where ``OpAutoCompare`` runs calls again: in float64, on another device, or on ONNX Runtime."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .call import Call, signature


class Reference:
    """Where calls are run again: ``float64``, ``onnx``, or a device such as ``cuda``.

    Attributes:
        device: of the copies of the arguments; ``None`` for ``float64``.

    Raises:
        ValueError: the device does not exist.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._compiled: dict[object, Callable[..., Any]] = {}
        try:
            self.device = None if kind == "float64" else torch.empty(0, device="cpu" if kind == "onnx" else kind).device
        except (RuntimeError, AssertionError) as error:
            raise ValueError(
                f"reference must be 'float64', 'onnx' or a device of this machine, not {kind!r}: {error}"
            ) from error

    def function(self, call: Call) -> Callable[..., Any] | None:
        """What computes a call on ONNX Runtime; ``None`` for another reference.

        Each signature is compiled separately, because Dynamo limits recompilations.
        """
        if self.kind != "onnx":
            return None
        gradients = tuple(value.requires_grad for value in call.tensors.values()), call.has_gradients
        key = (call.function, signature(call.args), signature(call.kwargs), gradients)
        if key not in self._compiled:
            self._compiled[key] = on_onnx(call.in_pytorch)
        return self._compiled[key]


def on_onnx(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function on ONNX Runtime, with its gradients. It raises an error if an operator cannot run there."""

    def call(*args: Any, **kwargs: Any) -> Any:  # Dynamo compiles Python functions only
        return function(*args, **kwargs)

    call.__code__ = call.__code__.replace()  # Dynamo's limit of recompilations is for each code object
    return torch.compile(call, backend="onnxrt", fullgraph=True, dynamic=False, options={"fallback": "error"})
