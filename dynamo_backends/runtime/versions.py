"""Which opsets and IR versions the installed ONNX Runtime accepts."""

from __future__ import annotations

import functools

import onnxruntime

from ..versions import IR_VERSION, MINIMUM_OPSET
from .messages import ORT_ERRORS

ALWAYS_LOADED = 23
"""Each version of onnx and ONNX Runtime that the package may be installed with has it (1.20 and 1.24)."""


@functools.cache
def maximum_opset() -> int:
    """The newest opset that both onnx defines and the installed ONNX Runtime loads without a warning.

    onnx runs ahead of the runtime, so each candidate is tried on a one-node model, newest first.
    """
    import onnx  # not before an opset is asked for that may be too new
    from onnx import helper

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    for opset in range(onnx.defs.onnx_opset_version(), MINIMUM_OPSET, -1):
        value = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1])
        result = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1])
        graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "probe", [value], [result])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=IR_VERSION)
        try:
            onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        except ORT_ERRORS:
            continue
        return opset
    return MINIMUM_OPSET
