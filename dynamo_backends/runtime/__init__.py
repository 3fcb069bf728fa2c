"""ONNX Runtime: execution providers, sessions, and zero-copy calls with PyTorch tensors.

It takes ONNX models and tensors, and returns sessions and results. It does not know FX graphs. Only ``ort_internals``
and ``messages`` use ONNX Runtime's private parts and parse its messages.
"""
