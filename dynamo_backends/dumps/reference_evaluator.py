"""Computes ONNX models with onnx's evaluator in Python, in their own precision or in float64."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from .submodels import Feeds

logger = logging.getLogger(__name__)

_MOST_NODES = 64  # larger models are slow in an evaluator that is written in Python

_NARROW = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.FLOAT)

_WITH_STASH_TYPE = ("LayerNormalization", "GroupNormalization", "RMSNormalization")

_DTYPE_ATTRIBUTES = ("to", "dtype", "stash_type", "softmax_precision")  # dtypes of results or intermediate values

Change = Callable[[np.ndarray], np.ndarray]
"""Returns an array in float64, as it is or off by a rounding."""


def widened(array: np.ndarray) -> np.ndarray:
    return array.astype(np.float64)


def computed_in_float64(
    model: ir.Model, feeds: Feeds, run: Callable[[ir.Model, Feeds], Feeds | None], change: Change = widened
) -> Feeds | None:
    """The outputs of a model in float64, by name; ``None`` if nothing can compute them.

    onnx's evaluator comes first, since a kernel of ONNX Runtime that is wrong in float32 may be wrong in float64 too;
    for large models ONNX Runtime does. What one of them lacks, the other computes. The model must have no local
    functions.

    Args:
        model, feeds: the model, and values of its inputs; others are ignored.
        run: runs a model on ONNX Runtime; ``None`` if that fails.
        change: of each floating-point input and weight. Single numbers and scales among the weights stay as they are.
    """
    wide, weights = _in_float64(model)
    known = {**feeds, **weights}
    is_wide = {str(value.name): value.dtype == ir.DataType.DOUBLE for value in wide.graph.inputs}
    given = {name: change(known[name]) if changes else known[name] for name, changes in is_wide.items()}
    if len(wide.graph) > _MOST_NODES:
        found = run(wide, given)
        return _evaluated(wide, given) if found is None else found
    found = _evaluated(wide, given)
    return run(wide, given) if found is None else found


def _evaluated(model: ir.Model, feeds: Feeds) -> Feeds | None:
    """The outputs of a model by name, computed by onnx's evaluator; ``None`` if that fails."""
    try:
        with np.errstate(all="ignore"):
            evaluator = reference_evaluator(_for_evaluator(model))
            results = zip(evaluator.output_names, evaluator.run(None, dict(feeds)), strict=True)
            return {name: np.asarray(value) for name, value in results}
    except Exception as error:  # whatever an operator's Python raises
        logger.info("the reference evaluator fails: %r", error)
        return None


def reference_evaluator(model: onnx.ModelProto) -> onnx.reference.ReferenceEvaluator:
    """onnx-array-api's evaluator, with two operators replaced that do not follow ONNX.

    onnx-array-api 0.3's ``ScatterElements`` ignores the reduction ``mul``: onnx's own is used. onnx 1.23's
    ``GatherElements`` fails on more than 64 rows, and if there are fewer indices than elements along another axis.
    """
    from onnx.reference import ReferenceEvaluator
    from onnx.reference.op_run import OpRun
    from onnx_array_api.reference import ExtendedReferenceEvaluator

    class GatherElements(OpRun):
        """``data`` may be larger than ``indices`` along the other axes."""

        def _run(self, data: np.ndarray, indices: np.ndarray, axis: int = 0) -> tuple[np.ndarray]:
            axis %= data.ndim
            within = tuple(slice(None if i == axis else size) for i, size in enumerate(indices.shape))
            return (np.take_along_axis(data[within], indices.astype(np.int64), axis),)

    known = [item for item in ExtendedReferenceEvaluator.default_ops if item.__name__ != "ScatterElements"]
    known.append(GatherElements)
    return ReferenceEvaluator(model, new_ops=ExtendedReferenceEvaluator.filter_ops(model, known, opsets=None))


def _in_float64(model: ir.Model) -> tuple[ir.Model, Feeds]:
    """A copy in which all floating-point values are float64, and weights are inputs; and their values."""
    copy, weights = model.clone(), dict[str, np.ndarray]()
    scales = {value for node in copy.graph if node.op_type == "Resize" for value in node.inputs[1:]}
    own = set(copy.graph.initializers.values()) - scales
    for graph in copy.graphs():
        values = [*graph.inputs, *graph.initializers.values()]
        for node in graph:
            values.extend(node.outputs)
            _widen_attributes(node)
        for value in values:
            if value.dtype in _NARROW:
                value.type = ir.TensorType(ir.DataType.DOUBLE)  # a new type: the copy shares the old one with the model
            tensor = value.const_value
            if tensor is None or tensor.dtype not in (*_NARROW, ir.DataType.DOUBLE):
                continue
            array = widened(tensor.numpy())
            if value in own and array.size > 1:
                weights[str(value.name)], value.const_value = array, None
                del copy.graph.initializers[str(value.name)]
                if value not in copy.graph.inputs:
                    copy.graph.inputs.append(value)
            else:
                value.const_value = ir.tensor(array, name=value.name)
    return copy, weights


def _widen_attributes(node: ir.Node) -> None:
    """Widens the dtypes and tensors in a node's attributes, and the dtype of its intermediate values."""
    if node.op_type in _WITH_STASH_TYPE and node.domain in ("", "ai.onnx"):
        node.attributes["stash_type"] = ir.AttrInt64("stash_type", int(ir.DataType.DOUBLE))  # float32 by default
    for name, attribute in list(node.attributes.items()):
        value: Any = None if attribute.is_ref() else attribute.value
        if attribute.type == ir.AttributeType.TENSOR and value is not None and value.dtype in _NARROW:
            node.attributes[name] = ir.AttrTensor(name, ir.tensor(widened(value.numpy())))
        elif name in _DTYPE_ATTRIBUTES and value in _NARROW:
            node.attributes[name] = ir.AttrInt64(name, int(ir.DataType.DOUBLE))
        elif name in ("value_float", "value_floats") and node.op_type == "Constant":
            del node.attributes[name]
            node.attributes["value"] = ir.AttrTensor("value", ir.tensor(np.asarray(value, np.float64)))


def _for_evaluator(model: ir.Model) -> onnx.ModelProto:
    """For onnx's evaluator, which computes layer normalization in the dtype of the inputs, and rejects another
    ``stash_type``."""
    proto = ir.to_proto(model)
    for node in proto.graph.node:
        is_dropped = node.op_type == "LayerNormalization"
        kept = [item for item in node.attribute if not (is_dropped and item.name == "stash_type")]
        del node.attribute[:]
        node.attribute.extend(kept)
    return proto
