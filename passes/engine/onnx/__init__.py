"""Editing, matching and keeping whole of ONNX models."""
