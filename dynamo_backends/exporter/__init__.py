"""FX graph to ONNX IR: torchlib's translations, ours where torchlib has none or is wrong, and the assembly.

The exporter knows nothing of ONNX Runtime. ``torch_internals`` is the only module that touches private PyTorch APIs.
"""
