"""
A custom operator
=================

An operator made with ``torch.library.custom_op``, its gradient, and its converter, so that it runs on ONNX Runtime in
inference and training.
"""

import torch
from onnxscript import opset18 as op
from torch._dynamo.utils import counters

from dynamo_backends import register_converter

# %%
# The operator
# ------------
#
# Its computation, its fake implementation, and its derivative.


@torch.library.custom_op("tutorial::soft_clip", mutates_args=())
def soft_clip(x: torch.Tensor, limit: float) -> torch.Tensor:
    return limit * torch.tanh(x / limit)


@soft_clip.register_fake
def _(x, limit):
    return torch.empty_like(x)


def backward(ctx, gradient):
    (result,) = ctx.saved_tensors
    return gradient * (1 - (result / ctx.limit) ** 2), None


def setup_context(ctx, inputs, output):
    ctx.save_for_backward(output)
    ctx.limit = inputs[1]


soft_clip.register_autograd(backward, setup_context=setup_context)

x = torch.randn(4, 8, requires_grad=True)


def model(x):
    return soft_clip(x * 2, 1.5).sum()


# %%
# Without a converter
# -------------------
#
# It runs in PyTorch, and a counter says so.

torch.compile(model, backend="onnxrt", options={"placement": "onnx"})(x.detach())
print([event for event in counters["dynamo_backends"] if event.startswith("fallback ")])

# %%
# With a converter
# ----------------
#
# The converter takes ``onnx_ir`` values, and returns one. Number, dtype and shape of its results are checked against
# the fake implementation.


@register_converter(soft_clip)
def convert_soft_clip(x, limit):
    return op.Mul(op.Tanh(op.Div(x, limit)), limit)


torch._dynamo.reset()
options = {"fallback": "error", "placement": "onnx"}
value = torch.compile(model, backend="onnxrt", options=options)(x)
value.backward()
mine, x.grad = x.grad, None
expected = model(x)
expected.backward()
torch.testing.assert_close(value, expected)
torch.testing.assert_close(mine, x.grad)

# %%
# Is it right?
# ------------
#
# ``onnx_debug`` checks the values.

import tempfile  # noqa: E402
from pathlib import Path  # noqa: E402

from dynamo_backends.dumps.reading import find_run  # noqa: E402

torch._dynamo.reset()
folder = tempfile.mkdtemp()
torch.compile(model, backend="onnx_debug", options={"dump_dir": folder})(x).backward()
for graph in find_run(Path(folder)).graphs:
    print(graph.name, graph.entry.verdict)
    assert graph.entry.verdict == "ok"
