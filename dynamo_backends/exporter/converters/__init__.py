"""Our converters, for operators that torchlib translates wrongly or not at all; a module for each family of operators.

A converter takes the operator's arguments, tensors as ``onnx_ir.Value`` with known dtype and shape, and returns the
results, written with onnxscript's operators::

    @converter(torch.ops.aten.silu_backward.default)
    def silu_backward(grad, x):
        sigmoid = op.Sigmoid(x)
        return op.Mul(grad, ...)

It may raise ``NotTranslatable(reason)`` for arguments it does not handle. The node then runs in PyTorch, and the user
sees the reason.
"""

from __future__ import annotations

import importlib
import pkgutil

from .registry import CONVERTERS, NotTranslatable, converter

__all__ = ["CONVERTERS", "NotTranslatable", "converter"]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
