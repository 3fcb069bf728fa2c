"""Which of ONNX Runtime's kernels computes each product of a model, and with how many bits.

A pass may leave the choice to ONNX Runtime, by an ``If`` of which the condition depends on weights
(``onnx.quantized_products``). Then the condition is computed here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import onnx_ir as ir
import torch

from passes.engine.onnx.editing import is_weight

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
_INTEGERS = (ir.DataType.INT8, ir.DataType.UINT8)


@dataclasses.dataclass(frozen=True)
class ProductKernel:
    """How a product is computed.

    Attributes:
        node: the name of the ONNX node's result, which is mostly that of the FX node.
        kernel: the operator: ``MatMulNBits``.
        bits: of both operands: ``float32 x 4 bits``.
        source: the user's line, if it is known.
    """

    node: str
    kernel: str
    bits: str
    source: str

    @property
    def has_integers(self) -> bool:
        """Whether an operand is quantized, also one that is made float32 when the session is made."""
        return "bits" in self.bits


def product_kernels(model: ir.Model, weights: Mapping[str, torch.Tensor]) -> list[ProductKernel]:
    """The products of a model, in execution order.

    Args:
        model: as ONNX Runtime gets it.
        weights: values of its inputs that are weights, by name; others are not needed.
    """
    choices = _choices(model, weights)
    return [_described(node, name) for node, name in _chosen_nodes(model.graph, choices)]


def _chosen_nodes(graph: ir.Graph, choices: Mapping[str, bool], name: str = "") -> Iterator[tuple[ir.Node, str]]:
    """The products and the name of the value that each is for."""
    for node in graph:
        result = name or str(node.outputs[0].name)
        if node.op_type in _PRODUCTS:
            yield node, result
        if node.op_type == "If":
            condition = choices.get(str(node.inputs[0].name) if node.inputs[0] is not None else "")
            for branch, is_for in (("then_branch", True), ("else_branch", False)):
                if condition in (None, is_for):
                    yield from _chosen_nodes(node.attributes[branch].as_graph(), choices, result)


def _described(node: ir.Node, name: str) -> ProductKernel:
    first, second = node.inputs[0], node.inputs[_SECOND_OPERAND.get(node.op_type, 1)]
    right = f"{node.attributes['bits'].as_int()} bits" if "bits" in node.attributes else _bits(second)
    return ProductKernel(name, node.op_type, f"{_bits(first)} x {right}", node.metadata_props.get("source", ""))


def _bits(value: ir.Value | None) -> str:
    if value is None or value.dtype is None:
        return "unknown"
    if value.dtype in _INTEGERS:
        return "8 bits"
    dtype = "float32" if value.dtype == ir.DataType.FLOAT else value.dtype.name.lower()
    return f"{dtype} (from 8 bits)" if _is_from_integers(value) else dtype


def _is_from_integers(value: ir.Value) -> bool:
    """Whether weights of 8 bits are made a float when the session is made."""
    if is_weight(value):
        return value.dtype in _INTEGERS
    node = value.producer()
    if node is None or node.op_type == "If":
        return False
    inputs = [item for item in node.inputs if item is not None and item.const_value is None]
    return all(map(_is_known, inputs)) and any(map(_is_from_integers, inputs))


def _is_known(value: ir.Value) -> bool:
    node = value.producer()
    if node is None:
        return is_weight(value) or value.const_value is not None
    return node.op_type != "If" and all(item is None or _is_known(item) for item in node.inputs)


def _choices(model: ir.Model, weights: Mapping[str, torch.Tensor]) -> dict[str, bool]:
    """The conditions that depend on weights alone, by name."""
    conditions = [node.inputs[0] for node in model.graph if node.op_type == "If"]
    known = {str(value.name): value for value in conditions if value is not None and _is_known(value)}
    if not known:
        return {}
    part = ir.convenience.extract(model.graph, [value for value in model.graph.inputs if is_weight(value)], list(known))
    content = ir.to_proto(ir.Model(part, ir_version=IR_VERSION)).SerializeToString()
    settings = SessionSettings((CPU,), threads=1, arena=False)
    session = create_session(content, settings, settings.options(threads=1))
    feeds = {item.name: weights[item.name].detach().numpy() for item in session.get_inputs()}
    return dict(zip(known, map(bool, session.run(list(known), feeds)), strict=True))
