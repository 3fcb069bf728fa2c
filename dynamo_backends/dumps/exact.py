"""What an ONNX model computes in float64: by onnx's reference, or where that lacks an operator by ONNX Runtime."""

from __future__ import annotations

import logging

import numpy as np
import onnx_ir as ir

from .candidates import Feeds, Runner
from .execution import PLAIN
from .reference import reference_evaluator

logger = logging.getLogger(__name__)

_LOW = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_MOST_NODES = 64
"""Nodes that onnx's reference, which is written in Python, is asked for."""


def exact_outputs(model: ir.Model, feeds: Feeds, runner: Runner) -> dict[str, np.ndarray] | None:
    """The outputs of a model in float64 on the same inputs, by name; ``None`` if nothing computes them.

    Args:
        model: the model; its inlined form, left as it is.
        feeds: its inputs.
        runner: for ONNX Runtime's float64, which is asked where the reference has no such operator or the model is
            large. The reference is asked first, because a kernel that is wrong in float32 may be wrong in float64.
    """
    wide = widened(model)
    wanted = {str(value.name) for value in model.graph.inputs}
    arrays = {name: _wide(feed) for name, feed in feeds.items() if name in wanted}
    if len(wide.graph) <= _MOST_NODES:
        found = _by_reference(wide, arrays)
        if found is not None:
            return found
    outcome = runner.run(wide, arrays, PLAIN)
    return dict(outcome.outputs) if outcome.kind == "ran" else None


def _by_reference(model: ir.Model, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray] | None:
    try:
        with np.errstate(all="ignore"):
            results = reference_evaluator(ir.to_proto(model)).run(None, arrays)
    except Exception as error:  # it raises whatever its operators do: it cannot tell, and ONNX Runtime is asked
        logger.info("the reference evaluator fails, ONNX Runtime is asked: %s: %s", type(error).__name__, error)
        return None
    return {str(value.name): np.asarray(item) for value, item in zip(model.graph.outputs, results, strict=True)}


def widened(model: ir.Model) -> ir.Model:
    """A copy in which all that is floating-point is float64."""
    copy = model.clone()
    for graph in copy.graphs():
        values = [*graph.inputs, *graph.initializers.values()]
        for node in graph:
            values.extend(node.outputs)
            _widen_attributes(node)
        for value in values:
            if value.dtype in _LOW:
                value.type = ir.TensorType(ir.DataType.DOUBLE)  # the old one is shared with the original
            if value.const_value is not None and value.const_value.dtype in _LOW:
                value.const_value = ir.tensor(value.const_value.numpy().astype(np.float64), name=value.name)
    return copy


def _widen_attributes(node: ir.Node) -> None:
    for name, attribute in list(node.attributes.items()):
        if attribute.is_ref():
            continue
        if attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype in _LOW:
            wide = attribute.as_tensor().numpy().astype(np.float64)
            node.attributes[name] = ir.AttrTensor(name, ir.tensor(wide))
        elif name in ("to", "dtype") and attribute.type == ir.AttributeType.INT and attribute.as_int() in set(_LOW):
            node.attributes[name] = ir.AttrInt64(name, int(ir.DataType.DOUBLE))
        elif name in ("value_float", "value_floats") and node.op_type == "Constant":
            del node.attributes[name]
            node.attributes["value"] = ir.AttrTensor("value", ir.tensor(np.asarray(attribute.value, np.float64)))
        elif name in ("stash_type", "softmax_precision"):
            node.attributes[name] = ir.AttrInt64(name, int(ir.DataType.DOUBLE))


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64) if ir.DataType.from_numpy(array.dtype) in _LOW else array
