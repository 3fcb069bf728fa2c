"""The machinery of passes: registry, context, manager, and the editing and matching of FX graphs and ONNX models."""
