"""Our own passes, in the order they run within their stage. Importing it registers them, before those of others.

A pass is a module ``passes/<stage>/<name>.py``, or a folder of that name, with a ``PASS``.
"""

from __future__ import annotations

import importlib

from .engine.registry import Pass, register

ORDER = (
    "joint.remove_noops",
    "joint.fold_uniform_constants",
    "joint.canonical_aten",
    "joint.common_subexpressions",
    "joint.attention",
    "joint.attention_in_training",
    "joint.pad_matmul",
    "post_grad.remove_noops",
    "post_grad.bfloat16_in_float32",
    "post_grad.merge_views",
    "post_grad.common_subexpressions",
    "post_grad.remove_unused",
    "onnx.lift_constants",
    "onnx.fold_constants",
    "onnx.remove_noops",
    "onnx.gathers",
    "onnx.common_subexpressions",
    "onnx.rotary_embedding",
    "onnx.attention",
    "onnx.merge_views",
    "onnx.linear",
    "onnx.layer_norm",
    "onnx.gelu",
    "onnx.transposed_products",
    "onnx.remove_unused",
)

OURS: tuple[Pass, ...] = tuple(importlib.import_module(f".{name}", __package__).PASS for name in ORDER)

for item in OURS:
    register(item)
