"""Translates the nodes of an FX graph to an ONNX model, mostly for ``partition`` and ``pipeline``.

It takes the nodes of a region with their fake tensors, and returns an ONNX model. Each ATen operator has a converter:
torchlib's (the converters of ``torch.onnx``), or ours where torchlib has none or a wrong one. ONNX Runtime is not used
here.
"""
