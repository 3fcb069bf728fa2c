"""The converter of ``swiglu``; imported by the entry point ``dynamo_backends_converters``."""

from __future__ import annotations

from onnxscript import opset18 as op
from onnxscript import script
from onnxscript.values import Opset

from dynamo_backends import register_converter

from .operators import swiglu

extras = Opset("my_backend_extras", 1)


@script(extras, default_opset=op)
def SwiGLU(gate, up):
    return op.Mul(op.Mul(gate, op.Sigmoid(gate)), up)


register_converter(swiglu)(SwiGLU)
