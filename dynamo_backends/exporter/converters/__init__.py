"""Our converters, for operators that torchlib converts wrongly or not at all; a module for each family of operators.

A converter takes the operator's arguments, with tensors as ``onnx_ir.Value`` of known dtype and shape. It emits ONNX
nodes by calling onnxscript's operators, and returns the operator's results::

    @converter(torch.ops.aten.silu_backward.default)
    def silu_backward(grad, x):
        sigmoid = op.Sigmoid(x)
        return op.Mul(grad, ...)

For arguments that it does not support, it raises ``NotTranslatable(reason)``. The node then runs in PyTorch, and the
reason is reported.
"""

from __future__ import annotations

import importlib
import pkgutil

from .registry import CONVERTERS, NotTranslatable, converter, converter_of

__all__ = ["CONVERTERS", "NotTranslatable", "converter", "converter_of"]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
