"""ONNX models: editing, patterns, snapshots, inference of types."""
