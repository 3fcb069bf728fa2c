"""Computes what depends on constants and known sizes alone.

Rule: these nodes become constants:

1. ``Shape`` and ``Size`` of a value whose sizes asked for are known;
2. nodes whose inputs are all constant, up to 4 MiB of results, of the operators in ``_EXACT``: those that move data,
   compare, compute integers or round correctly, so that the result does not depend on who computes it.

Shapes that the translation left open, of values between the nodes of one operator, are inferred first.

Before and after (x: [2, 3, 4])::

    s = Shape <start=1, end=2> (x)           y = Slice(x, [1], [3], [1])
    y = Slice(x, [1], s, [1])

The translation has been folded once already (``model.onnx``), small constants only. It must not fire on random
operators, on functions such as ``Exp`` that each library rounds in its own way, nor on results that are outputs of the
model.
"""

from __future__ import annotations

import math

import numpy as np
import onnx
import onnx_ir as ir

from ..engine.context import PassContext
from ..engine.onnx.editing import constant, erase_unused, new_constant
from ..engine.onnx.inference import infer_types
from ..engine.registry import Pass

_MOST_BYTES = 4 * 2**20

_EXACT = frozenset(
    {
        *("Abs", "Add", "And", "Cast", "CastLike", "Ceil", "Concat", "ConstantOfShape", "Div", "Equal"),
        *("Expand", "Flatten", "Floor", "Gather", "GatherElements", "GatherND", "Greater", "GreaterOrEqual"),
        *("Identity", "IsNaN", "Less", "LessOrEqual", "Max", "Min", "Mod", "Mul", "Neg", "Not", "Or", "Pad"),
        *("Range", "Reshape", "ScatterND", "Sign", "Slice", "Split", "Sqrt", "Squeeze", "Sub", "Tile"),
        *("Transpose", "Trilu", "Unsqueeze", "Where", "Xor"),
    }
)


def fold_constants(model: ir.Model, context: PassContext) -> int:
    """Folds in place; returns how many nodes are gone."""
    fired = 0
    opset = model.opset_imports.get("", 1)
    for node in list(model.graph):
        infer_types([node], opset)
        if node.domain not in ("", "ai.onnx") or any(output.is_graph_output() for output in node.outputs):
            continue
        arrays = _known_sizes(node) if node.op_type in ("Shape", "Size") else _computed(model, node)
        if arrays is None or not context.allows(node):
            continue
        for value, array in zip(node.outputs, arrays, strict=True):
            name = value.name or node.name or "folded"
            value.name = f"{name}__folded"
            value.replace_all_uses_with(new_constant(model, name, array))
        erase_unused(node.outputs)
        fired += 1
    return fired


def _known_sizes(node: ir.Node) -> list[np.ndarray] | None:
    value = node.inputs[0]
    if value is None or value.shape is None:
        return None
    dims = list(value.shape)
    if node.op_type == "Shape":
        start, end = (node.attributes.get(name) for name in ("start", "end"))
        dims = dims[slice(start.as_int() if start else None, end.as_int() if end else None)]
    if not all(isinstance(dim, int) for dim in dims):
        return None
    known = [int(dim) for dim in dims]
    return [np.array(math.prod(known) if node.op_type == "Size" else known, np.int64)]


def _computed(model: ir.Model, node: ir.Node) -> list[np.ndarray] | None:
    if node.op_type not in _EXACT or not node.inputs:
        return None
    if any(value is not None and value.const_value is None for value in node.inputs):  # lift_constants ran before
        return None
    arrays = [None if value is None else constant(value) for value in node.inputs]
    if any(array is None and value is not None for array, value in zip(arrays, node.inputs, strict=True)):
        return None
    if _is_large(node, arrays) or _is_delicate(node, arrays):
        return None
    names = ["" if value is None else f"input_{i}" for i, value in enumerate(node.inputs)]
    outputs = [f"output_{i}" for i in range(len(node.outputs))]
    proto = onnx.helper.make_node(node.op_type, names, outputs)
    proto.attribute.extend(ir.serde.serialize_attribute(attribute) for attribute in node.attributes.values())
    graph = onnx.helper.make_graph(
        [proto],
        "folded",
        [onnx.ValueInfoProto(name=name) for name in names if name],
        [onnx.ValueInfoProto(name=name) for name in outputs],
    )
    version = model.graph.opset_imports[""]
    alone = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", version)])
    feeds = {name: array for name, array in zip(names, arrays, strict=True) if array is not None}
    try:
        with np.errstate(all="ignore"):
            results = onnx.reference.ReferenceEvaluator(alone).run(None, feeds)
    except (ArithmeticError, IndexError, RuntimeError, TypeError, ValueError):
        return None  # the runtime says what is wrong with it, or can do it
    folded = [np.asarray(result) for result in results]
    for value, array in zip(node.outputs, folded, strict=True):
        if value.dtype is not None and value.dtype != ir.tensor(array).dtype:
            return None  # the reference does not say what the type is
    return folded


def _is_delicate(node: ir.Node, arrays: list[np.ndarray | None]) -> bool:
    """Types that numpy does not compute with, integers divided by zero, and numbers no integer can hold."""
    if any(array is not None and array.dtype.kind not in "biuf" for array in arrays):
        return True
    first = arrays[0]
    if node.op_type in ("Cast", "CastLike") and first is not None and first.dtype.kind == "f":
        result = node.outputs[0].dtype
        is_float = result is not None and result.is_floating_point()
        return not is_float and not bool(((first >= 0) & (first < 2**7)).all())
    divisor = arrays[1] if node.op_type in ("Div", "Mod") else None
    return divisor is not None and divisor.dtype.kind in "iu" and bool((divisor == 0).any())


def _is_large(node: ir.Node, arrays: list[np.ndarray | None]) -> bool:
    """Whether the results may be large; those of unknown shape are as large as all the inputs."""
    total = sum(array.nbytes for array in arrays if array is not None)
    if total > _MOST_BYTES:
        return True
    if node.op_type in ("Expand", "ConstantOfShape", "Tile", "Range", "Pad"):
        shape = node.outputs[0].shape
        if shape is None or not all(isinstance(dim, int) for dim in shape):
            return True
        return math.prod(int(dim) for dim in shape) * 8 > _MOST_BYTES
    return False


PASS = Pass("onnx.fold_constants", "Computes what depends on constants and known sizes alone.", fold_constants)
