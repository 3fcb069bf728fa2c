"""Two passes; imported by the entry point ``dynamo_backends_passes``."""

from __future__ import annotations

import torch

from passes import OnnxPattern, Pattern, onnx_pattern_pass, pattern_pass, register

from .operators import swiglu


def _same_shape(match):
    """Why a match is rejected, or ``None``: the operator does not broadcast."""
    gate, up = (match.kwargs[name].meta["val"] for name in ("gate", "up"))
    return None if gate.shape == up.shape and gate.dtype == up.dtype else "gate and up differ in shape or dtype"


def _swiglu():
    x = torch.empty(2, 3)
    return [
        Pattern(
            "swiglu",
            lambda gate, up: torch.nn.functional.silu(gate) * up,
            lambda gate, up: swiglu(gate, up),
            [x, torch.empty(2, 3)],
            check=_same_shape,
        )
    ]


def _relu_once():
    return [OnnxPattern("relu_once", lambda op, x: op.Relu(op.Relu(x)), lambda op, x: op.Relu(x))]


register(pattern_pass("post_grad.my_backend_extras.swiglu", "Computes silu(gate) * up by one operator.", _swiglu))
register(onnx_pattern_pass("onnx.my_backend_extras.relu_once", "Makes one of two ReLUs.", _relu_once))
