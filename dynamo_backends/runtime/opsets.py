"""The opsets that the installed ONNX Runtime accepts."""

from __future__ import annotations

import functools

import onnxruntime

from ..versions import IR_VERSION, MINIMUM_OPSET
from .messages import ORT_ERRORS
from .providers import SILENT

ALWAYS_LOADED = 23
"""An opset that every allowed version of onnx and ONNX Runtime has."""


@functools.cache
def maximum_opset() -> int:
    """The newest opset that onnx defines and the installed ONNX Runtime loads.

    onnx is ahead of ONNX Runtime, so opsets are tried on a one-node model, newest first.
    """
    import onnx.parser  # slow, and only needed for a new opset

    options = onnxruntime.SessionOptions()
    options.log_severity_level = SILENT
    for opset in range(onnx.defs.onnx_opset_version(), MINIMUM_OPSET, -1):
        header = f'<ir_version: {IR_VERSION}, opset_import: ["": {opset}]>'
        model = onnx.parser.parse_model(f"{header} probe (float[1] x) => (float[1] y) {{ y = Identity(x) }}")
        try:
            onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        except ORT_ERRORS:
            continue
        return opset
    return MINIMUM_OPSET
