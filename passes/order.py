"""The names of the built-in passes, in the order they run within their stage.

``catalog.py`` imports the passes; this module does not, for code that only needs the names.
"""

from __future__ import annotations

ORDER = (
    "pre_grad.interpolate",
    "pre_grad.activations",
    "joint.remove_noops",
    "joint.common_subexpressions",
    "post_grad.direct_writes",
    "post_grad.bfloat16_in_float32",
    "onnx.lift_constants",
    "onnx.quantized_products",
    "onnx.quantized_convolutions",
    "onnx.rotary_embedding",
    "onnx.attention",
    "onnx.linear",
    "onnx.layer_norm",
    "onnx.gelu",
    "onnx.transposed_products",
    "onnx.long_sums",
    "onnx.kept_casts",
)

LOOKED_FOR: dict[str, dict[str, tuple[str, ...]]] = {
    "pre_grad.interpolate": {"interpolate": ()},
    "pre_grad.activations": {"tanh": ("add", "mul"), "erf": ("add", "mul"), "sigmoid": ("mul",)},
}
"""By pass of the stage ``pre_grad``, the functions it replaces, each with the functions one of which must read its
result (none: any). A graph without them needs no import of the pass."""
