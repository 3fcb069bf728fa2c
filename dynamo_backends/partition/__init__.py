"""Splits graphs into regions for ONNX Runtime, and defines the compiled graph, ``Program``.

``regions`` takes a functional ATen graph, and returns its regions and the reason for each node that stays in PyTorch.
``program`` loads a Program. Two modules check results: ``pass_verification`` those of passes, ``provider_check`` those
of execution providers. ``pipeline`` and ``cache`` call it.
"""
