"""Registers, runs and checks passes; edits and matches FX graphs and ONNX models."""
