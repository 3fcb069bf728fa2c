"""Computes what depends on constants and known sizes alone.

Rule: these nodes become constants:

1. ``Shape`` and ``Size`` of a value whose sizes asked for are known;
2. nodes whose inputs are all constant, up to 4 MiB of results, of the operators in ``_EXACT``: those that move data,
   compare, compute integers or round correctly, so that the result does not depend on who computes it.

The work is ``onnxscript.optimizer.fold_constants``, which knows some more such: what is known of shapes though not
constant. Shapes that the translation left open, of values between the nodes of one operator, are inferred first.

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
import onnx_ir as ir
from onnx_ir.passes import common
from onnxscript import optimizer

from ..engine.context import PassContext
from ..engine.onnx.editing import constant
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
    """Folds in place; returns how many nodes are gone, or 1 if others only read something else."""
    infer_types(model.graph, model.opset_imports.get("", 1))
    if not any(map(_may_be_folded, model.graph)) or not context.allows("the model"):
        return 0
    nodes = [(node, node.inputs) for node in model.graph]
    with np.errstate(all="ignore"):
        optimizer.fold_constants(
            model,
            input_size_limit=_MOST_BYTES,
            output_size_limit=_MOST_BYTES,
            should_fold=lambda node: _is_exact(node) and context.allows(node),
        )
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    gone = sum(node.graph is None for node, _ in nodes)
    return gone or int(nodes != [(node, node.inputs) for node in model.graph])


def _may_be_folded(node: ir.Node) -> bool:
    if node.op_type in ("Shape", "Size"):
        return True
    return bool(node.inputs) and all(value is None or value.const_value is not None for value in node.inputs)


def _is_exact(node: ir.Node) -> bool:
    """Whether what a node returns, whose inputs are all constant, does not depend on who computes it."""
    if node.op_type not in _EXACT or node.domain not in ("", "ai.onnx"):
        return False
    arrays = [None if value is None else constant(value) for value in node.inputs]
    return not _is_large(node, arrays) and not _is_delicate(node, arrays)


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
