"""The errors a user of the backends can see, beside ``ValueError`` for options."""

from __future__ import annotations


class UnsupportedOperatorError(RuntimeError):
    """A node cannot run on ONNX Runtime and ``options={"fallback": "error"}`` forbids PyTorch to run it."""


class TranslationError(RuntimeError):
    """An FX node has no translation to ONNX, or its translation failed."""


class SessionError(RuntimeError):
    """ONNX Runtime refused a model. ``message`` is what it said."""


class KernelFaultError(SessionError):
    """A model was not given to ONNX Runtime: one of its kernels would compute something wrong.

    Attributes:
        reason: what the kernel does.
        fx_node: the name of the FX node the ONNX node comes from; ``None`` if it does not say.
    """

    def __init__(self, onnx_node: str, reason: str, fx_node: str | None) -> None:
        super().__init__(f"{onnx_node}: {reason}")
        self.reason = reason
        self.fx_node = fx_node


class WrongResultError(SessionError):
    """What ONNX Runtime returned has another shape or dtype than eager's result."""
