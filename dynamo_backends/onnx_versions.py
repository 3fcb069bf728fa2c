"""The versions of ONNX that our models are written in."""

from __future__ import annotations

IR_VERSION = 10
"""The oldest that holds all we use, so that most tools read it."""

MINIMUM_OPSET = 18
"""Torchlib's translations are written for opset 18; nothing older is emitted."""
