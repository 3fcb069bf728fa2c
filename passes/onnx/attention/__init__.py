"""Fuses attention that is written as several operators into ONNX's ``Attention`` of opset 23.

Rule: ``MatMul(Softmax(scores), v)`` with ``scores = MatMul(q, k^T)`` becomes one ``Attention``, where

1. q, k and v are [batch, heads, length, features], with known numbers of heads and features;
2. constant positive numbers that scale q, k or the scores become the attribute ``scale``;
3. one mask may be added to the scaled scores, or replace scores by a very low number in a ``Where``;
4. keys and values that ``Expand`` repeats for groups of queries are read without the repetition; rows of one product
   that the translation made of heads sharing keys, [batch, heads of keys, queries, features], become heads again;
5. for one position, such heads stay or become rows: the kernel reads all keys for each of its heads
   (``benchmarks/grouped_attention.py``);
6. if q, k and v are transposed from [batch, length, heads, features] and the result is transposed back, the operator
   reads and writes [batch, length, heads * features].

Before and after, for two heads of eight features::

    q = Transpose <perm=[0, 2, 1, 3]> (Reshape(x, [0, 0, 2, 8]))    y = Attention <q_num_heads=2, kv_num_heads=2,
    k = Transpose <perm=[0, 2, 3, 1]> (Reshape(z, [0, 0, 2, 8]))               scale=0.3535> (x, z, w, mask)
    v = Transpose <perm=[0, 2, 1, 3]> (Reshape(w, [0, 0, 2, 8]))
    s = Softmax(Add(Mul(MatMul(q, k), 0.3535), mask))
    y = Reshape(Transpose <perm=[0, 2, 1, 3]> (MatMul(s, v)), [0, 0, 16])

Rows whose mask hides all keys: eager's ``scaled_dot_product_attention`` returns 0, or NaN if a number in it is NaN (the
translation multiplies the result with 0 there; where PyTorch writes attention out, it chooses probabilities of 0). A
softmax that is written out by hand returns the mean of v for a finite mask, and NaN for -inf. ONNX Runtime's kernel
returns 0 for -inf *and for the lowest float32*, which most masks use. So the mask is raised to -3e38, and such rows are
multiplied with 0, or replaced by NaN, unless constants show that there are none.

Not if

- scores or probabilities have other users, as in training;
- the CPU provider runs a softmax that PyTorch has written out (``_safe_softmax``): it is 0 in rows whose scores are all
  -inf, and keeps NaN in hidden rows. On a GPU it is fused all the same, as eager has a kernel of its own there;
- the mask has no row for each query (one row is expanded if the sizes are known), or two masks are added;
- there are fewer heads than threads: the kernel splits work by heads only, the separate products split it further.
"""

from __future__ import annotations

import onnx_ir as ir
import torch

from ...engine.context import PassContext
from ...engine.onnx.editing import Builder, nodes_of, producer, require, rewrite_each
from ...engine.onnx.inference import infer_types
from ...engine.registry import Pass
from .finding import NODES, find_attention, find_probabilities, merged_groups, unmerged_batches
from .fusion import Fusion

_FIRST_OPSET = 23
_CPU = "CPUExecutionProvider"


def fuse_attention(model: ir.Model, context: PassContext) -> int:
    """Replaces attention in place; returns how often."""
    if next(nodes_of(model, "Softmax"), None) is None:
        return 0
    opset = model.opset_imports.get("", 1)
    infer_types(model.graph, opset)  # of values inside the translation of one operator
    builder = Builder(model, context)

    def rewrite(node: ir.Node) -> bool:
        probabilities = find_probabilities(_probabilities(node.inputs[0]))
        if probabilities is None or node.graph is not model.graph:
            return False
        require(opset >= _FIRST_OPSET, f"Attention needs opset {_FIRST_OPSET}", NODES)
        is_plain = not probabilities.reductions or context.target.providers[0] != _CPU
        require(is_plain, "the softmax is 0 where all scores are -inf, not only where the mask is", NODES)
        found = find_attention(node, probabilities, context.target.threads or torch.get_num_threads())
        return Fusion(builder, found).run()

    fired = rewrite_each(context, nodes_of(model, "MatMul"), NODES, rewrite)
    builder.erase_unused()
    return fired


def _probabilities(value: ir.Value | None) -> ir.Value | None:
    """The left operand of the product with v, before batches and heads, or groups of heads, are merged."""
    node = producer(value, "Reshape")
    return node.inputs[0] if node is not None and merged_groups(node) > 1 else unmerged_batches(value)


PASS = Pass("onnx.attention", "Computes attention by one operator, ONNX's Attention of opset 23.", fuse_attention)
