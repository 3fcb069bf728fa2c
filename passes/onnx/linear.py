"""Computes linear layers without flattening their input to a matrix.

ATen's matrix products take matrices only, so PyTorch flattens the input of a linear layer and unflattens the result.
ONNX's ``MatMul`` takes any rank; ``onnx.transposed_products``, which runs later, reads the weight without transposing.

Rule: a product is a ``MatMul`` of matrices, or a ``Gemm`` with alpha = beta = 1 and transA = 0, whose first operand is
a ``Reshape`` of a tensor and whose users are all ``Reshape``. It is computed on the tensor

1. if the tensor has rank 3 or more and the last dimension of the matrix, and one of the users, or the only ``Reshape``
   after it, restores the leading dimensions; or
2. if none does, but there is no bias: one flattening is saved;
3. if the tensor has another last dimension, only this product uses the matrix, and a user splits its rows: the tensor
   is reshaped to these leading dimensions.

Before and after (x: [B, S, K], w: [N, K], b: [N])::

    f = Reshape(x, [B * S, K])               t = Transpose <perm=[1, 0]> (w)
    t = Transpose <perm=[1, 0]> (w)          y = Add(MatMul(x, t), b)
    g = Gemm(f, t, b)
    y = Reshape(g, [B, S, N])

Not if the matrix is an output or has other users; nor if adding the bias costs more than the reshapes: in 3. unless a
sum or GELU follows that absorbs it, and for many rows of few columns. ``Add`` and ``FusedMatMul`` took the time of
``Gemm`` for K, N from 96 to 3072 (1 and 2 threads), but 76 us instead of 67 us for 1152 rows with K = N = 48.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ..engine.context import PassContext
from ..engine.onnx.editing import (
    MatchError,
    constant,
    erase_unused,
    hidden_value,
    is_only_used_by,
    new_constant,
    nodes_of,
    only_user,
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
    """Rewrites products of flattened tensors in place; returns how many."""
    products = nodes_of(model, "Gemm", "MatMul")
    return rewrite_each(context, products, _OF, lambda node: _rewrite(model, context, node))


def _rewrite(model: ir.Model, context: PassContext, node: ir.Node) -> bool:
    flattening = producer(node.inputs[0], "Reshape")
    if flattening is None or not _is_plain(node):
        return False
    value, matrix = flattening.inputs[0], sizes(node.outputs[0])
    full, rows = sizes(value), sizes(node.inputs[0])
    if value is None or full is None or rows is None or matrix is None or len(rows) != 2 or len(matrix) != 2:
        raise MatchError("the shapes are unknown, or not those of matrices", 2)
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    require(bias is None or sizes(bias) in ([matrix[-1]], [1, matrix[-1]]), "the bias is no vector", 2)
    result = node.outputs[0]
    views = list(result.consumers())
    is_needed = result.is_graph_output() or not all(_takes_any_shape(user, result) for user in views)
    require(not is_needed, "the matrix has other users", 3)
    last_views = [_last_view(view) for view in views]
    if full[-1] != rows[-1]:
        return _unflatten(model, context, node, flattening, last_views)
    if len(full) < 3:
        return False  # nothing is flattened
    shape = [*full[:-1], matrix[-1]]
    same = [view for view in last_views if sizes(view.outputs[0]) == shape]
    if bias is not None:
        require(bool(same), "the result is reshaped to other dimensions", 3)
        is_cheap = not _is_narrow(rows, matrix) or _takes_bias(same[0])
        require(is_cheap, "adding the bias costs more than the reshapes", 3)
    return _substitute(model, context, node, value, bias, shape, same[0] if same else None)


def _unflatten(model: ir.Model, context: PassContext, node: ir.Node, flattening: ir.Node, views: list[ir.Node]) -> bool:
    """Reshapes the tensor to the leading dimensions of the result: case 3."""
    value, rows, columns = flattening.inputs[0], sizes(node.inputs[0]), sizes(node.outputs[0])
    assert value is not None and rows is not None and columns is not None and node.graph is not None
    shapes = [(view, sizes(view.outputs[0]) or []) for view in views]
    fitting = [(view, shape) for view, shape in shapes if len(shape) > 2 and shape[-1] == columns[-1]]
    if not fitting or not is_only_used_by(flattening.outputs[0], node):
        return False
    view, (*lead, _) = fitting[0]
    target = [*lead, rows[-1]]
    can_be_written = 0 not in target and sum(isinstance(size, str) for size in target) <= 1
    require(can_be_written, f"the shape {target} is no constant", 3)
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    require(bias is None or _takes_bias(view), "nothing is saved: the bias becomes a node", 3)
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
    """Whether a product of [M, K] to [M, N] is so fast that a separate bias is noticeable."""
    count, inner, outer = rows[0], rows[1], columns[1]
    if not isinstance(inner, int) or not isinstance(outer, int) or inner * outer > _SMALL_WEIGHT:
        return False
    return isinstance(count, int) and count > _MANY_ROWS


def _takes_bias(view: ir.Node) -> bool:
    """Whether GELU or a sum follows, which ONNX Runtime fuses with the bias."""
    return only_user(view.outputs[0], "Gelu", "Add") is not None


def _is_plain(node: ir.Node) -> bool:
    """Whether a node computes ``a @ b`` or ``a @ transpose(b)``, plus ``c``."""
    usual = {"alpha": 1, "beta": 1, "transA": 0}
    return all(item.value == usual.get(item.name, item.value) for item in node.attributes.values())


def _last_view(view: ir.Node) -> ir.Node:
    """The ``Reshape`` that is the only user of a ``Reshape``, else the latter."""
    user = only_user(view.outputs[0], "Reshape")
    return user if user is not None and user.inputs[0] is view.outputs[0] else view


def _takes_any_shape(user: ir.Node, value: ir.Value) -> bool:
    """Whether a node is a ``Reshape`` whose result does not depend on its input's shape."""
    if user.op_type != "Reshape" or user.domain not in ("", "ai.onnx") or user.inputs[0] is not value:
        return False
    target = constant(user.inputs[1])
    if target is None:  # computed from symbolic sizes, which are not 0
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
    if view is None:  # case 2: no value has the shape of the result yet
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
