"""Graph passes for a compiler whose target is ONNX: an ordered list of stages, each a list of passes.

It knows nothing of the backends that use it. Another package writes passes with ``register_pass``, and patterns with
``passes.patterns`` (on FX graphs) and ``passes.onnx_patterns`` (on ONNX models); ``passes.manager`` runs them.
"""

from .context import PassContext, Refusal, Target
from .registry import Pass, register, register_pass, unregister

__dynamo_backends_passes__ = True

__all__ = ["Pass", "PassContext", "Refusal", "Target", "register", "register_pass", "unregister"]
