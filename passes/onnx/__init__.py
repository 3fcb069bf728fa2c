"""Passes of the stage ``onnx``: on one region's ONNX model."""
