"""Translates FX nodes to an ONNX model: torchlib's converters, and ours where torchlib has none or a wrong one.

Input: the nodes of a region with their fake tensors. Output: an ONNX model. This folder does not use ONNX Runtime.
``torch_internals`` is the only module that uses private parts of ``torch.onnx``. ``partition`` and ``pipeline`` call
this folder.
"""
