"""The errors a user of the backends can see, beside ``ValueError`` for options."""

from __future__ import annotations


class UnsupportedOperatorError(RuntimeError):
    """A node cannot run on ONNX Runtime and ``options={"fallback": "error"}`` forbids PyTorch to run it."""


class TranslationError(RuntimeError):
    """An FX node has no translation to ONNX, or its translation failed."""


class SessionError(RuntimeError):
    """ONNX Runtime refused a model. ``message`` is what it said."""
