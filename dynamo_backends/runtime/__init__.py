"""ONNX Runtime: execution providers, sessions, and the zero-copy binding of PyTorch's tensors.

It takes ONNX models and tensors, and gives sessions and results. It knows nothing of FX graphs. ``ort_internals`` and
``messages`` are the only modules that use its private parts and read its messages.
"""
