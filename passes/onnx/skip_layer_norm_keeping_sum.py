"""Fuses the sum of a residual connection, which is used again, with the layer normalization that follows.

Rule: as ``onnx.skip_layer_norm``, for ``LayerNormalization`` of a sum that other nodes use as well.

Before and after (x, r: [B, S, H])::

    s = Add(x, r)                            n, _, _, s = com.microsoft.SkipLayerNormalization (x, r, w, c)
    n = LayerNormalization(s, w, c)          y = Add(s, t)
    y = Add(s, t)

It must not fire where ``onnx.skip_layer_norm`` must not.

Off by default: one node less for each layer normalization, and slower. ONNX Runtime 1.31 leaves these two apart itself;
its fused kernel takes 170 us where they take 37 us (CPU, 2x64x256, one thread), 5-15 % of a GPT-2, ViT or Whisper.
"""

from __future__ import annotations

import onnx_ir as ir

from ..context import PassContext
from ..onnx_graph import nodes_of
from ..registry import Pass
from .skip_layer_norm import fuse


def skip_layer_norm_keeping_sum(model: ir.Model, context: PassContext) -> int:
    """Fuses sums with normalizations in place; returns how many."""
    return sum(fuse(model, context, node, None) for node in nodes_of(model, "LayerNormalization"))


PASS = Pass(
    "onnx.skip_layer_norm_keeping_sum",
    "Fuses a sum that is used again with a layer normalization: fewer nodes, slower on the CPU.",
    skip_layer_norm_keeping_sum,
    default=False,
)
