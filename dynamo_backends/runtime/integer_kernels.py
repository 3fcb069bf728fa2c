"""ONNX Runtime's operators that multiply 8-bit integers, and whether uint8 times int8 is exact on this processor."""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from ..versions import IR_VERSION
from .settings import SessionSettings, create_session

_TERMS = 64

PRODUCTS = {
    **dict.fromkeys(("MatMulInteger", "ConvInteger"), (0, 1)),
    **dict.fromkeys(("QLinearMatMul", "QLinearConv", "QGemm"), (0, 3)),
    **dict.fromkeys(("MatMulIntegerToFloat", "DynamicQuantizeMatMul", "QAttention"), (0, 1)),
}
"""Operators that multiply integers of 8 bits, ONNX's and ONNX Runtime's, with the positions of both operands."""


def has_mixed_signs(node: ir.Node) -> bool:
    """Whether one of ``PRODUCTS`` multiplies uint8 with int8, or may do so: types inside functions are not known."""
    first, second = (node.inputs[i] for i in PRODUCTS[node.op_type])
    is_unsigned = first is None or first.dtype != ir.DataType.INT8  # float32 is quantized to uint8
    return is_unsigned and (second is None or second.dtype != ir.DataType.UINT8)


def needs_exact_mixed_signs(model: ir.Model) -> bool:
    """Whether a model multiplies uint8 with int8, which is exact on this processor but not on all."""
    products = (node for graph in model.graphs() for node in graph if node.op_type in PRODUCTS)
    return any(map(has_mixed_signs, products)) and mixed_signs_are_exact()


_is_for_any: contextvars.ContextVar[bool] = contextvars.ContextVar("is_for_any_processor", default=False)


@contextlib.contextmanager
def for_any_processor() -> Iterator[None]:
    """A context for making models that must be right on every processor, for example those of ``export``."""
    token = _is_for_any.set(True)
    try:
        yield
    finally:
        _is_for_any.reset(token)


def is_for_any_processor() -> bool:
    """Whether ``for_any_processor`` is active."""
    return _is_for_any.get()


def mixed_signs_are_exact() -> bool:
    """Whether the product of uint8 with int8 is exact on the CPU provider of the processor that will run the model."""
    return not is_for_any_processor() and _are_exact_here()


@functools.cache
def _are_exact_here() -> bool:
    """Whether it is exact on this processor.

    Without VNNI or AMX, x86 kernels add two products in 16 bits, which saturates. The processor's flags do not tell
    which kernel ONNX Runtime uses, so a product of the largest numbers is computed.
    """
    left = ir.Value(name="left", type=ir.TensorType(ir.DataType.UINT8), shape=ir.Shape([1, _TERMS]))
    right = ir.Value(name="right", type=ir.TensorType(ir.DataType.INT8), shape=ir.Shape([_TERMS, _TERMS]))
    right.const_value = ir.tensor(np.full((_TERMS, _TERMS), 127, np.int8), name="right")
    product = ir.Value(name="product", type=ir.TensorType(ir.DataType.INT32), shape=ir.Shape([1, _TERMS]))
    node = ir.Node("", "MatMulInteger", [left, right], outputs=[product])
    graph = ir.Graph([left], [product], nodes=[node], initializers=[right], opset_imports={"": 18}, name="product")
    content = ir.to_proto(ir.Model(graph, ir_version=IR_VERSION)).SerializeToString()
    settings = SessionSettings(("CPUExecutionProvider",), threads=1)
    session = create_session(content, settings, settings.options(threads=1))
    [found] = session.run(None, {"left": np.full((1, _TERMS), 255, np.uint8)})
    return bool((found == _TERMS * 255 * 127).all())
