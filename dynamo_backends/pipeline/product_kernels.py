"""Which of ONNX Runtime's kernels computes each product of a model, and with how many bits.

A pass may leave the choice to ONNX Runtime, by an ``If`` whose condition depends on weights
(``onnx.quantized_products``). A small session evaluates that condition here.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Iterator, Mapping

import onnx_ir as ir
import torch

from passes.engine.choices import OTHERWISE

from ..errors import SessionError, first_line
from ..runtime.constants import computed_from
from ..runtime.integer_kernels import PRODUCTS
from ..runtime.providers import CPU
from ..runtime.session import Session
from ..runtime.settings import SessionSettings
from ..versions import IR_VERSION

logger = logging.getLogger(__name__)

UNKNOWN = "unknown"
"""Why a branch may be taken, if ONNX Runtime rejects the condition."""

_PRODUCTS = {
    **dict.fromkeys(("MatMul", "Gemm", "FusedMatMul", "Conv", "ConvTranspose", "MatMulNBits"), (0, 1)),
    **PRODUCTS,
}


@dataclasses.dataclass(frozen=True)
class ProductKernel:
    """How a product is computed.

    Attributes:
        node: the name of the ONNX node's result, which is mostly that of the FX node.
        kernel: the operator: ``MatMulNBits``.
        bits: of both operands: ``float32 x 4 bits``.
        source: the user's line, if it is known.
        why: why the second branch of an ``If`` is taken, or that each call decides; else empty.
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
        weights: values of the inputs that are constants of the session, by name, in the order of the memory.
    """
    integers = {name for name, tensor in weights.items() if tensor.dtype in (torch.int8, torch.uint8)}
    return list(_Products(model, weights).of(model.graph, set(weights), integers))


class _Products:
    def __init__(self, model: ir.Model, weights: Mapping[str, torch.Tensor]) -> None:
        self._undecided = "each call decides"
        self._choices = self._known_choices(model, weights)

    def of(
        self, graph: ir.Graph, known: set[str], integers: set[str], name: str = "", why: str = ""
    ) -> Iterator[ProductKernel]:
        """The products of a graph; those of a branch have the name of its ``If``, and why it is taken.

        Args:
            graph: the graph.
            known: the names of values outside that ONNX Runtime knows when it makes the session.
            integers: of these, the ones of 8 bits and what is computed from them; and dequantized values.
            name, why: of the branch.
        """
        known, integers = computed_from(graph, known), set(integers)
        for node in graph:
            result = name or str(node.outputs[0].name)
            is_made = _name(node.outputs[0]) in known and any(_name(value) in integers for value in node.inputs)
            if is_made or node.op_type == "DequantizeLinear":
                integers.update(map(_name, node.outputs))
            if node.op_type in _PRODUCTS:
                first, second = (node.inputs[i] for i in _PRODUCTS[node.op_type])
                right = f"{node.attributes['bits'].as_int()} bits" if "bits" in node.attributes else None
                bits = f"{_bits(first, integers)} x {right or _bits(second, integers)}"
                yield ProductKernel(result, node.op_type, bits, node.metadata_props.get("source", ""), why)
            if node.op_type == "If":
                condition = self._choices.get(_name(node.inputs[0]))
                for branch, is_for in (("then_branch", True), ("else_branch", False)):
                    if condition in (None, is_for):
                        reason = "" if is_for else node.metadata_props.get(OTHERWISE, "")
                        reason = self._undecided if condition is None else reason
                        yield from self.of(node.attributes[branch].as_graph(), known, integers, result, reason)

    def _known_choices(self, model: ir.Model, weights: Mapping[str, torch.Tensor]) -> dict[str, bool]:
        """The conditions that depend on weights alone, by name."""
        computed = computed_from(model.graph, weights)
        known = [_name(node.inputs[0]) for node in model.graph if node.op_type == "If"]
        known = [name for name in dict.fromkeys(known) if name in computed]
        if not known:
            return {}
        inputs = [value for value in model.graph.inputs if _name(value) in weights]
        graph = ir.convenience.extract(model.graph, inputs, known)
        graph.inputs[:] = [value for value in graph.inputs if value.uses()]
        part = ir.Model(graph, ir_version=IR_VERSION)
        try:
            session = Session(part, SessionSettings((CPU,), threads=1, arena=False), constants=weights)
        except SessionError as error:
            logger.warning("kernels of quantized products are unknown: %s", first_line(str(error)))
            self._undecided = UNKNOWN
            return {}
        return dict(zip(known, map(bool, session.ort_session(1).run(known, {})), strict=True))


def _bits(value: ir.Value | None, integers: Collection[str]) -> str:
    if value is None or value.dtype is None:
        return "unknown"
    if value.dtype in (ir.DataType.INT8, ir.DataType.UINT8):
        return "8 bits"
    dtype = "float32" if value.dtype == ir.DataType.FLOAT else value.dtype.name.lower()
    return f"{dtype} (from 8 bits)" if _name(value) in integers else dtype


def _name(value: ir.Value | None) -> str:
    return "" if value is None else str(value.name)
