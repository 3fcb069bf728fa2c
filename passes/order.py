"""The names of our own passes, in the order they run within their stage.

Apart from the catalog, which imports the passes: who only asks whether a stage has any need not.
"""

from __future__ import annotations

ORDER = (
    "pre_grad.interpolate",
    "pre_grad.activations",
    "joint.remove_noops",
    "joint.common_subexpressions",
    "post_grad.bfloat16_in_float32",
    "post_grad.remove_unused",
    "onnx.lift_constants",
    "onnx.rotary_embedding",
    "onnx.attention",
    "onnx.linear",
    "onnx.layer_norm",
    "onnx.gelu",
    "onnx.transposed_products",
    "onnx.remove_unused",
    "onnx.long_sums",
    "onnx.kept_casts",
)

LOOKED_FOR: dict[str, dict[str, tuple[str, ...]]] = {
    "pre_grad.interpolate": {"interpolate": ()},
    "pre_grad.activations": {"tanh": ("add", "mul"), "erf": ("add", "mul"), "sigmoid": ("mul",)},
}
"""Of each pass of the stage ``pre_grad``, the functions it looks for, and where that tells, those that must read their
result: who finds none in a graph need not import it."""
