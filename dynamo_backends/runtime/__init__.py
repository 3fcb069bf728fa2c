"""ONNX Runtime: providers, versions, sessions and the zero-copy binding of torch tensors.

This package knows nothing of FX: it takes ONNX models and tensors.
"""
