"""The stages of passes."""

STAGES = ("pre_grad", "joint", "post_grad", "onnx")
"""In the order a compile meets them:

1. ``pre_grad``   Dynamo's graph, torch IR.
2. ``joint``      forward and backward together, before the partitioner; or the inference graph.
3. ``post_grad``  the forward, backward or inference graph on its own, ATen.
4. ``onnx``       one region's ONNX model.
"""
