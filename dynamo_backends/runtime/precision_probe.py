"""Finds out to how many digits a provider rounds float32, because it may ignore an option without a word.

A product and a convolution of numbers ``1 + step`` are sums of equal terms ``(1 + step) ** 2``. If an operand or a
result is rounded to a dtype that cannot represent ``1 + step``, the result is off by at least the step; otherwise by
the rounding errors of float32, which are far smaller than each of the steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

STEPS: Mapping[str, float] = {"float32": 2.0**-12, "float16": 2.0**-9, "bfloat16": 2.0**-6}
"""A step by dtype that it represents, and the next one does not. TF32 has the digits of float16."""

_FEWER = "fewer digits than bfloat16"

Run = Callable[[np.ndarray], np.ndarray]
"""Computes a product or a convolution with the weights of ``product`` or ``convolution``."""

_ROWS, _TERMS = 24, 64


def _factors(rows: int, *others: int) -> np.ndarray:
    """Rows of ``1 + step`` for each of the steps in turn."""
    steps = np.resize(np.array(list(STEPS.values())), rows).reshape(rows, *[1] * len(others))
    return np.broadcast_to(1 + steps, (rows, *others)).astype(np.float32)


def operands() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The argument and the weights of each operator: ``MatMul`` and ``Conv``."""
    return {
        "MatMul": (_factors(_ROWS, _TERMS), np.ascontiguousarray(_factors(_ROWS, _TERMS).T)),
        "Conv": (_factors(3, 16, 8, 8), _factors(_ROWS, 16, 3, 3)),
    }


def digits(operator: str, run: Run) -> str:
    """The dtype to whose digits an operator rounds float32: one of ``STEPS``, or a text if it has fewer.

    Args:
        operator: one of ``operands()``.
        run: computes it with the weights there.
    """
    argument, weights = operands()[operator]
    terms = argument[0].size if operator == "MatMul" else weights[0].size
    results = np.asarray(run(argument), dtype=np.float64)
    for i, (dtype, step) in enumerate(STEPS.items()):
        of_step = results[i :: len(STEPS), i :: len(STEPS)]
        if (np.abs(of_step / terms - (1 + step) ** 2) < step / 2).all():
            return dtype
    return _FEWER


def is_enough(found: str, asked: str) -> bool:
    """Whether the digits of a dtype are as many as asked."""
    order = list(STEPS)
    return found in order[: order.index(asked) + 1]


def model_of(operator: str) -> bytes:
    """The serialized model of an operator, with constant weights."""
    import onnx  # imported lazily: only models of this module need it

    argument, weights = operands()[operator]
    node = onnx.helper.make_node(operator, ["x", "w"], ["y"])
    arguments = [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, argument.shape)]
    results = [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)]
    graph = onnx.helper.make_graph([node], "g", arguments, results, [onnx.numpy_helper.from_array(weights, "w")])
    opsets = [onnx.helper.make_opsetid("", 18)]
    content: bytes = onnx.helper.make_model(graph, ir_version=8, opset_imports=opsets).SerializeToString()
    return content
