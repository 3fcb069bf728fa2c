"""Which of ONNX Runtime's kernels computes each product of a model, and with how many bits.

A pass may leave the choice to ONNX Runtime, by an ``If`` of which the condition depends on weights
(``onnx.quantized_products``). Then the condition is computed here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import onnx_ir as ir
import torch

from ..versions import IR_VERSION
from .providers import CPU
from .settings import SessionSettings, create_session

_SECOND_OPERAND = {"QLinearConv": 3, "QLinearMatMul": 3}
_PRODUCTS = frozenset(
    {
        *("MatMul", "Gemm", "FusedMatMul", "Conv", "ConvTranspose", *_SECOND_OPERAND),
        *("MatMulInteger", "MatMulIntegerToFloat", "ConvInteger", "MatMulNBits"),
    }
)
OTHERWISE = "otherwise"
"""Metadata of an ``If``: why the second branch is taken."""

_INTEGERS = (ir.DataType.INT8, ir.DataType.UINT8)


@dataclasses.dataclass(frozen=True)
class ProductKernel:
    """How a product is computed.

    Attributes:
        node: the name of the ONNX node's result, which is mostly that of the FX node.
        kernel: the operator: ``MatMulNBits``.
        bits: of both operands: ``float32 x 4 bits``.
        source: the user's line, if it is known.
        why: why a branch without integers was taken, or that the branch depends on the call; else empty.
    """

    node: str
    kernel: str
    bits: str
    source: str
    why: str

    @property
    def has_integers(self) -> bool:
        """Whether an operand is quantized, also one that is made float32 when the session is made."""
        return "bits" in self.bits


def product_kernels(model: ir.Model, weights: Mapping[str, torch.Tensor]) -> list[ProductKernel]:
    """The products of a model, in execution order.

    Args:
        model: as ONNX Runtime gets it.
        weights: values of the inputs that are constants of the session, by name.
    """
    return list(_Products(model, weights).of(model.graph))


class _Products:
    def __init__(self, model: ir.Model, weights: Mapping[str, torch.Tensor]) -> None:
        self._weights = weights
        self._choices = self._known_choices(model)

    def of(self, graph: ir.Graph, name: str = "", why: str = "") -> Iterator[ProductKernel]:
        """The products of a graph; those of a branch have the name of its ``If``, and why it is taken."""
        for node in graph:
            result = name or str(node.outputs[0].name)
            if node.op_type in _PRODUCTS:
                yield self._described(node, result, why)
            if node.op_type == "If":
                condition = self._choices.get(_name(node.inputs[0]))
                for branch, is_for in (("then_branch", True), ("else_branch", False)):
                    if condition in (None, is_for):
                        reason = "" if is_for else node.metadata_props.get(OTHERWISE, "")
                        if condition is None:
                            reason = "each call decides"
                        yield from self.of(node.attributes[branch].as_graph(), result, reason)

    def _described(self, node: ir.Node, name: str, why: str) -> ProductKernel:
        first, second = node.inputs[0], node.inputs[_SECOND_OPERAND.get(node.op_type, 1)]
        right = f"{node.attributes['bits'].as_int()} bits" if "bits" in node.attributes else self._bits(second)
        bits = f"{self._bits(first)} x {right}"
        return ProductKernel(name, node.op_type, bits, node.metadata_props.get("source", ""), why)

    def _bits(self, value: ir.Value | None) -> str:
        if value is None or value.dtype is None:
            return "unknown"
        if value.dtype in _INTEGERS:
            return "8 bits"
        dtype = "float32" if value.dtype == ir.DataType.FLOAT else value.dtype.name.lower()
        return f"{dtype} (from 8 bits)" if self._is_from_integers(value) else dtype

    def _is_from_integers(self, value: ir.Value) -> bool:
        """Whether it is dequantized, or computed from weights of 8 bits when the session is made."""
        if _name(value) in self._weights:
            return value.dtype in _INTEGERS
        node = value.producer()
        if node is not None and node.op_type == "DequantizeLinear":
            return True
        if node is None or not self._is_known(value):
            return False
        return any(item is not None and self._is_from_integers(item) for item in node.inputs)

    def _is_known(self, value: ir.Value) -> bool:
        """Whether a value depends on weights and constants alone."""
        node = value.producer()
        if node is None:
            return _name(value) in self._weights or value.const_value is not None
        return node.op_type != "If" and all(item is None or self._is_known(item) for item in node.inputs)

    def _known_choices(self, model: ir.Model) -> dict[str, bool]:
        """The conditions that depend on weights alone, by name."""
        conditions = [node.inputs[0] for node in model.graph if node.op_type == "If"]
        known = [_name(value) for value in conditions if value is not None and self._is_known(value)]
        if not known:
            return {}
        inputs = [value for value in model.graph.inputs if _name(value) in self._weights]
        part = ir.Model(ir.convenience.extract(model.graph, inputs, known), ir_version=IR_VERSION)
        settings = SessionSettings((CPU,), threads=1, arena=False)
        session = create_session(ir.to_proto(part).SerializeToString(), settings, settings.options(threads=1))
        feeds = {item.name: self._weights[item.name].detach().numpy() for item in session.get_inputs()}
        return dict(zip(known, map(bool, session.run(known, feeds)), strict=True))


def _name(value: ir.Value | None) -> str:
    return "" if value is None else str(value.name)
