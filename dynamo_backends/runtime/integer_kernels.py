"""What ONNX Runtime's integer kernels compute on this processor."""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Iterator

import numpy as np
import onnx
import onnx_ir as ir

from ..versions import IR_VERSION
from .settings import SessionSettings, create_session

_TERMS = 64

PRODUCTS = frozenset({"MatMulInteger", "MatMulIntegerToFloat", "QLinearMatMul", "ConvInteger", "QLinearConv"})
"""Operators that multiply integers of 8 bits."""


def multiplies_integers(content: bytes) -> bool:
    """Whether a serialized model multiplies integers of 8 bits."""
    model = ir.from_proto(onnx.load_from_string(content))
    return any(node.op_type in PRODUCTS for node in ir.traversal.RecursiveGraphIterator(model.graph))


_is_for_any: contextvars.ContextVar[bool] = contextvars.ContextVar("is_for_any_processor", default=False)


@contextlib.contextmanager
def for_any_processor() -> Iterator[None]:
    """A context in which models are made that may run on another processor than this one."""
    token = _is_for_any.set(True)
    try:
        yield
    finally:
        _is_for_any.reset(token)


def is_for_any_processor() -> bool:
    """Whether ``for_any_processor`` is active."""
    return _is_for_any.get()


def multiplies_mixed_signs() -> bool:
    """Whether the product of uint8 with int8 is exact on the CPU provider of the processor that will run the model."""
    return not is_for_any_processor() and _multiplies_mixed_signs_here()


@functools.cache
def _multiplies_mixed_signs_here() -> bool:
    """Whether it is exact on this processor.

    Without VNNI or AMX, x86 kernels add two products in 16 bits, which saturates. A processor says what it has, but not
    which kernel ONNX Runtime takes, so a product is computed: of the largest numbers.
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
