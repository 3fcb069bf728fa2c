"""Pads matrix products to sizes the hardware's matrix units are made for.

Rule: where a static size of ``mm``, ``addmm`` or ``bmm`` is no multiple of 8 (float16, bfloat16) or 4 (float32), the
matrices are padded with zeros and the result is cut::

    y: f16[33, 50] = mm(a, b)                                  # a: f16[33, 77], b: f16[77, 50]

    a_: f16[40, 80] = constant_pad_nd(a, [0, 3, 0, 7]); b_: f16[80, 56] = constant_pad_nd(b, [0, 6, 0, 3])
    y_: f16[40, 56] = mm(a_, b_)
    y: f16[33, 50] = slice(slice(y_, 0, 0, 33), 1, 0, 50)

Before partitioning, so that a gradient's products are padded too. The zeros added in the inner dimension meet zeros
only, so infinities and NaN stay where they are.

Not if a size is symbolic or 1, the dtype is another, or nothing would change. Off by default: on the CPU the copies
cost more than they gain, and of another device nothing is known yet. The alignment is that of PyTorch's
``get_alignment_size_dtype`` (``torch/_inductor/fx_passes/pad_mm.py``), whose pass measures on the user's GPU.
"""

from __future__ import annotations

import torch
from torch import fx

from ..engine.context import PassContext
from ..engine.fx.editing import call, is_row_major, replace, value_of
from ..engine.registry import Pass

aten = torch.ops.aten

_ALIGNMENT = {torch.float16: 8, torch.bfloat16: 8, torch.float32: 4}
_MATRICES = {aten.mm.default: 0, aten.bmm.default: 0, aten.addmm.default: 1}
"""Products, and where their first matrix stands among the arguments."""


def pad_matmul(module: fx.GraphModule, context: PassContext) -> int:
    """Pads products in place; returns how many."""
    fired = 0
    for target in _MATRICES:
        for node in module.graph.find_nodes(op="call_function", target=target):
            reason = _reason_against(node)
            if reason is not None:
                context.refuse(node, reason, matched=1, of=1)
            else:
                fired += replace(node, _padded_product(node), context)
    return fired


def _sizes(node: fx.Node) -> tuple[int, int, int]:
    """Rows, inner size and columns."""
    position = _MATRICES[node.target]
    first, second = value_of(node.args[position]), value_of(node.args[position + 1])
    assert first is not None and second is not None
    return first.shape[-2], first.shape[-1], second.shape[-1]


def _reason_against(node: fx.Node) -> str | None:
    value = value_of(node)
    if value is None or value.dtype not in _ALIGNMENT:
        return "its dtype has no alignment"
    if not all(isinstance(size, int) for size in (*value.shape, *_sizes(node))):
        return "its sizes are symbolic"
    if not is_row_major(value):
        return "its result is not row-major"
    if 0 in (*value.shape, *_sizes(node)):
        return "it is empty"
    if all(_missing(size, value.dtype) == 0 for size in _sizes(node)):
        return "its sizes are aligned"
    return None


def _missing(size: int, dtype: torch.dtype) -> int:
    return 0 if size == 1 else -size % _ALIGNMENT[dtype]


def _padded_product(node: fx.Node) -> fx.Node:
    """A new node that computes what ``node`` does, by the padded matrices."""
    value = value_of(node)
    assert value is not None
    rows, inner, columns = _sizes(node)
    more_rows, more_inner, more_columns = (_missing(size, value.dtype) for size in (rows, inner, columns))
    position = _MATRICES[node.target]
    first, second = node.args[position : position + 2]
    args = [
        *(_padded(node, bias, more_rows, more_columns) for bias in node.args[:position]),
        _padded(node, first, more_rows, more_inner),
        _padded(node, second, more_inner, more_columns),
    ]
    result = call(node, node.target, tuple(args), dict(node.kwargs))
    result._rename(f"{node.name}_padded")
    made = result
    for dim, size, more in ((value.ndim - 2, rows, more_rows), (value.ndim - 1, columns, more_columns)):
        if more:
            made = call(node, aten.slice.Tensor, (made, dim, 0, size))
    if made is not result:
        made = call(node, aten.clone.default, (made,), {"memory_format": torch.contiguous_format})
    return made


def _padded(node: fx.Node, matrix: object, more_rows: int, more_columns: int) -> fx.Node:
    """A matrix, batch of matrices or bias with zeros below and to the right; not where a bias broadcasts."""
    assert isinstance(matrix, fx.Node)
    value = value_of(matrix)
    assert value is not None
    columns = more_columns if value.ndim and value.shape[-1] != 1 else 0
    rows = more_rows if value.ndim > 1 and value.shape[-2] != 1 else 0
    if not rows and not columns:
        return matrix
    padding = [0, columns, 0, rows] if value.ndim > 1 else [0, columns]
    return call(node, aten.constant_pad_nd.default, (matrix, padding, 0.0))


PASS = Pass("joint.pad_matmul", "Pads matrix products to aligned sizes.", pad_matmul, default=False)
