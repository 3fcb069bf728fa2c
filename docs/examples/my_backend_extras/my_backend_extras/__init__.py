"""An operator with its translation to ONNX, and two passes, for dynamo-backends."""
