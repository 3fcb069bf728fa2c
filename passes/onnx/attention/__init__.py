"""Computes attention by one operator, ONNX's ``Attention`` of opset 23.

Rule: ``MatMul(Softmax(scores), v)`` with ``scores = MatMul(q, k^T)`` becomes one ``Attention``, where

1. q, k and v have four dimensions, [batch, heads, length, features], and known numbers of heads and features;
2. constant positive numbers that scale q, k or the product become the attribute ``scale``;
3. one mask may be added to the scaled product, or hide scores by a ``Where`` with a very low number;
4. keys and values that ``Expand`` repeats for groups of queries are read unrepeated; and where the translation has
   made heads that share keys rows of one product, [batch, heads of keys, queries, features], they become heads again;
5. but for one position such heads stay, or become, rows: the kernel reads all keys for each of its heads
   (``benchmarks/grouped_attention.py``);
6. where q, k and v are transposed from [batch, length, heads, features] and the result is transposed back, the
   operator does that too: it reads and writes [batch, length, heads * features].

Before and after, for two heads of eight features::

    q = Transpose <perm=[0, 2, 1, 3]> (Reshape(x, [0, 0, 2, 8]))    y = Attention <q_num_heads=2, kv_num_heads=2,
    k = Transpose <perm=[0, 2, 3, 1]> (Reshape(z, [0, 0, 2, 8]))               scale=0.3535> (x, z, w, mask)
    v = Transpose <perm=[0, 2, 1, 3]> (Reshape(w, [0, 0, 2, 8]))
    s = Softmax(Add(Mul(MatMul(q, k), 0.3535), mask))
    y = Reshape(Transpose <perm=[0, 2, 1, 3]> (MatMul(s, v)), [0, 0, 16])

Rows that the mask hides altogether: eager's ``scaled_dot_product_attention`` gives 0 (the translation has a ``Where``
for it), a written-out softmax gives the mean of v for a mask of finite numbers and NaN for one of -inf. ONNX Runtime's
kernel gives 0 for -inf *and for the lowest float32*, the number most masks are made of. So the mask is raised to
-3e38 and a ``Where`` puts 0 or NaN into such rows; neither is done where constants show that there is no such row.

It must not fire

- where the scores or probabilities have other users, as in the forward graphs of training;
- where the mask has no row for each query (one such is expanded if the sizes are known), or two masks are added;
- with fewer heads than threads: the kernel gives each thread whole heads, the separate products share them finer.
"""

from __future__ import annotations

import onnx_ir as ir
import torch

from ...engine.context import PassContext
from ...engine.onnx.editing import Builder, nodes_of, producer, require, rewrite_each
from ...engine.onnx.inference import infer_types
from ...engine.registry import Pass
from .finding import NODES, batches_apart, find_attention, groups_together
from .fusion import Fusion

_FIRST_OPSET = 23


def fuse_attention(model: ir.Model, context: PassContext) -> int:
    """Replaces written-out attention in place; returns how often."""
    if next(nodes_of(model, "Softmax"), None) is None:
        return 0
    opset = model.opset_imports.get("", 1)
    infer_types(model.graph, opset)  # of values between the nodes of one operator
    builder = Builder(model, context)

    def rewrite(node: ir.Node) -> bool:
        softmax = producer(_probabilities(node.inputs[0]), "Softmax")
        if softmax is None or node.graph is not model.graph:
            return False
        require(opset >= _FIRST_OPSET, f"ONNX has Attention from opset {_FIRST_OPSET} on", NODES)
        found = find_attention(node, softmax, context.target.threads or torch.get_num_threads())
        return Fusion(builder, found).run()

    fired = rewrite_each(context, nodes_of(model, "MatMul"), NODES, rewrite)
    builder.erase_unused()
    return fired


def _probabilities(value: ir.Value | None) -> ir.Value | None:
    """What the product with v reads, its batches and heads apart."""
    node = producer(value, "Reshape")
    return node.inputs[0] if node is not None and groups_together(node) > 1 else batches_apart(value)


PASS = Pass("onnx.attention", "Computes attention by one operator, ONNX's Attention of opset 23.", fuse_attention)
