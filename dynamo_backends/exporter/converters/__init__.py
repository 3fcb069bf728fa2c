"""Our own translations, where torchlib has none or a wrong one. One module a family of operators.

A converter takes the operator's arguments, tensors as ``onnx_ir.Value`` with known dtype and shape, and returns the
results, written with onnxscript's operators::

    @converter(torch.ops.aten.silu_backward.default)
    def silu_backward(grad, x):
        sigmoid = op.Sigmoid(x)
        return op.Mul(grad, ...)

It may raise ``NotTranslatable(reason)`` for arguments it does not handle; the node then runs in PyTorch, and the reason
is what the user reads.
"""

from __future__ import annotations

import importlib
import pkgutil

from .registry import CONVERTERS, NotTranslatable, converter

__all__ = ["CONVERTERS", "NotTranslatable", "converter"]

for _module in pkgutil.iter_modules(__path__):
    if _module.name != "registry":
        importlib.import_module(f"{__name__}.{_module.name}")
