"""Splits a graph into regions for ONNX Runtime and nodes for PyTorch, and defines the result of a compile, ``Program``.

``regions`` takes a functional ATen graph, and returns its regions and the reason for each node that stays in PyTorch.
``program`` loads a Program, which makes the function that runs it. Two modules check results: ``pass_verification``
those of passes, ``runnable_region`` those of execution providers. ``pipeline/stages`` calls ``regions``; ``pipeline``
and ``cache`` use Programs.
"""
