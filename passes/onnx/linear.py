"""Computes a linear layer on the tensor it is given, instead of on its rows as a matrix.

ATen has products of matrices only, so that PyTorch flattens the input of a linear layer and unflattens the result.
ONNX's ``MatMul`` takes any rank; ``onnx.transposed_products``, which follows, takes the weight as it lies in memory.

Rule: a ``MatMul`` of matrices, or a ``Gemm`` with alpha = beta = 1 and the first operand as it is, whose first operand
is a ``Reshape`` of a tensor, and whose result is used by ``Reshape`` only, is computed on that tensor where

1. the tensor has rank 3 or more and the last dimension of the matrix, and one of these, or the only ``Reshape`` after
   it, gives it its leading dimensions back; or
2. the same, but none does, and there is no bias (the flattening is saved);
3. the tensor has another last dimension, this product alone uses the matrix, and one of these splits its rows: the
   tensor is reshaped to these leading dimensions instead.

Before and after (x: [B, S, K], w: [N, K], b: [N])::

    f = Reshape(x, [B * S, K])               t = Transpose <perm=[1, 0]> (w)
    t = Transpose <perm=[1, 0]> (w)          y = Add(MatMul(x, t), b)
    g = Gemm(f, t, b)
    y = Reshape(g, [B, S, N])

It must not fire where the matrix itself is an output, or used otherwise; nor where the bias costs more than the views:
with 3., where it leaves as many nodes, unless a sum or GELU follows that can take it; and for many rows of few columns.
``Add`` and ``FusedMatMul`` took the time of ``Gemm`` for K, N from 96 to 3072 (1 and 2 threads), but 76 us instead of
67 us for 1152 rows with K = N = 48.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ..engine.context import PassContext
from ..engine.onnx.editing import (
    NearMiss,
    constant,
    erase_unused,
    hidden_value,
    is_only_used_by,
    new_constant,
    nodes_of,
    producer,
    require,
    rewrite_each,
    sizes,
    substitute,
)
from ..engine.registry import Pass

_OF = 4

_MANY_ROWS = 256
_SMALL_WEIGHT = 48 * 48


def linear(model: ir.Model, context: PassContext) -> int:
    """Replaces products of flattened tensors in place; returns how many."""
    products = nodes_of(model, "Gemm", "MatMul")
    return rewrite_each(context, products, _OF, lambda node: _rewrite(model, context, node))


def _rewrite(model: ir.Model, context: PassContext, node: ir.Node) -> bool:
    flattening = producer(node.inputs[0], "Reshape")
    if flattening is None or not _is_plain(node):
        return False
    value, matrix = flattening.inputs[0], sizes(node.outputs[0])
    full, rows = sizes(value), sizes(node.inputs[0])
    if value is None or full is None or rows is None or matrix is None or len(rows) != 2 or len(matrix) != 2:
        raise NearMiss("the shapes are not known, or not those of matrices", 2)
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    require(bias is None or sizes(bias) in ([matrix[-1]], [1, matrix[-1]]), "what is added is no vector", 2)
    result = node.outputs[0]
    views = list(result.consumers())
    is_needed = result.is_graph_output() or not all(_takes_any_shape(user, result) for user in views)
    require(not is_needed, "the matrix itself is needed", 3)
    last_views = [_last_view(view) for view in views]
    if full[-1] != rows[-1]:
        return _unflatten(model, context, node, flattening, last_views)
    if len(full) < 3:
        return False  # nothing is flattened
    shape = [*full[:-1], matrix[-1]]
    same = [view for view in last_views if sizes(view.outputs[0]) == shape]
    if bias is not None:
        require(bool(same), "the result is given another shape", 3)
        is_cheap = not _is_narrow(rows, matrix) or _takes_bias(same[0])
        require(is_cheap, "adding the bias apart costs more than the views", 3)
    return _substitute(model, context, node, value, bias, shape, same[0] if same else None)


def _unflatten(model: ir.Model, context: PassContext, node: ir.Node, flattening: ir.Node, views: list[ir.Node]) -> bool:
    """Gives the tensor the leading dimensions that the result will have."""
    value, rows, columns = flattening.inputs[0], sizes(node.inputs[0]), sizes(node.outputs[0])
    assert value is not None and rows is not None and columns is not None and node.graph is not None
    shapes = [(view, sizes(view.outputs[0]) or []) for view in views]
    fitting = [(view, shape) for view, shape in shapes if len(shape) > 2 and shape[-1] == columns[-1]]
    if not fitting or not is_only_used_by(flattening.outputs[0], node):
        return False
    view, (*lead, _) = fitting[0]
    target = [*lead, rows[-1]]
    can_be_written = 0 not in target and sum(isinstance(size, str) for size in target) <= 1
    require(can_be_written, f"the shape {target} cannot be written down", 3)
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    require(bias is None or _takes_bias(view), "nothing is saved: the bias is then added apart", 3)
    full = hidden_value(flattening.outputs[0], "full", target)
    array = np.array([-1 if isinstance(size, str) else size for size in target], np.int64)
    argument = new_constant(model, f"{full.name}__shape", array)
    reshape = ir.Node("", "Reshape", [value, argument], outputs=[full], name=f"node_{full.name}")
    reshape.metadata_props.update(flattening.metadata_props)
    node.graph.insert_before(node, [reshape])
    fired = _substitute(model, context, node, full, bias, [*lead, columns[-1]], view)
    erase_unused([full])
    return fired


def _is_narrow(rows: list[int | str], columns: list[int | str]) -> bool:
    """Whether a product of these sizes, [M, K] and [M, N], is so quick that adding a bias to its rows shows."""
    count, inner, outer = rows[0], rows[1], columns[1]
    if not isinstance(inner, int) or not isinstance(outer, int) or inner * outer > _SMALL_WEIGHT:
        return False
    return isinstance(count, int) and count > _MANY_ROWS


def _takes_bias(view: ir.Node) -> bool:
    """Whether what follows may be fused with the bias: GELU, or the sum of a residual connection."""
    users = view.outputs[0].consumers()
    return len(users) == 1 and users[0].op_type in ("Gelu", "Add") and not view.outputs[0].is_graph_output()


def _is_plain(node: ir.Node) -> bool:
    """Whether a node computes ``a @ b`` or ``a @ transpose(b)``, plus ``c``."""
    usual = {"alpha": 1, "beta": 1, "transA": 0}
    return all(item.value == usual.get(item.name, item.value) for item in node.attributes.values())


def _last_view(view: ir.Node) -> ir.Node:
    """The ``Reshape`` that alone uses a ``Reshape``, else that one: heads that were split, and are not after all."""
    users = view.outputs[0].uses()
    if len(users) == 1 and not view.outputs[0].is_graph_output():
        user, position = users[0]
        if user.op_type == "Reshape" and user.domain in ("", "ai.onnx") and position == 0:
            return user
    return view


def _takes_any_shape(user: ir.Node, value: ir.Value) -> bool:
    """Whether a node is a ``Reshape`` to a shape that does not depend on the one of its input."""
    if user.op_type != "Reshape" or user.domain not in ("", "ai.onnx") or user.inputs[0] is not value:
        return False
    target = constant(user.inputs[1])
    if target is None:  # computed from symbolic sizes: zeros would be empty tensors, whose sizes are all known
        return sizes(user.outputs[0]) is not None
    return not (target == 0).any()


def _substitute(
    model: ir.Model,
    context: PassContext,
    node: ir.Node,
    value: ir.Value,
    bias: ir.Value | None,
    shape: list[int | str],
    view: ir.Node | None,
) -> bool:
    product = _product(node, value)
    matrix = node.outputs[0]
    result = matrix if view is None else view.outputs[0]
    full = product.outputs[0]
    full.name, full.type, full.shape = f"{result.name}__product", matrix.type, ir.Shape(shape)
    product.metadata_props.update(node.metadata_props)
    nodes = [product]
    if bias is not None:
        full = hidden_value(result, "full", shape)
        nodes.append(ir.Node("", "Add", [product.outputs[0], bias], outputs=[full]))
    others = [user for user in matrix.consumers() if view is None or _last_view(user) is not view]
    if view is None:  # nothing has the shape of the result: it stands beside the matrix
        stand_in = ir.Node("", "Identity", [matrix], outputs=[hidden_value(result, "full", shape)])
        view = stand_in
        assert node.graph is not None
        node.graph.insert_after(node, [stand_in])
    if not substitute(model, context, [view.outputs[0]], nodes, after=node):
        erase_unused([view.outputs[0]] if view.op_type == "Identity" else [])
        return False
    for other in others:
        other.replace_input_with(0, full)
    erase_unused([matrix])
    return True


def _product(node: ir.Node, value: ir.Value) -> ir.Node:
    """``value`` times the second operand of ``node``."""
    weight, transposed = node.inputs[1], node.attributes.get("transB")
    if transposed is not None and transposed.value == 1:
        return ir.Node("com.microsoft", "FusedMatMul", [value, weight], [transposed])
    return ir.Node("", "MatMul", [value, weight])


PASS = Pass("onnx.linear", "Computes linear layers without flattening their input.", linear)
