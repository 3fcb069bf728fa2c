"""Graph passes for a compiler whose target is ONNX: an ordered list of stages, each a list of passes.

It knows nothing of the backends that use it; ``manager`` is the way in.
"""

__dynamo_backends_passes__ = True
