"""The tested versions of PyTorch, and the ONNX versions of our models.

``docs/versions.md`` lists the private parts of PyTorch that are used, which change between versions.
``python tests/with_torch.py VERSION`` runs the tests with another version of PyTorch; one that passes is added to
``TESTED``.
"""

from __future__ import annotations

TESTED = ("2.13", "2.14", "2.15")
"""The versions of PyTorch that were tested, oldest first. The requirements of the package exclude older ones."""

IR_VERSION = 10
"""The oldest that holds all we use, so that most tools read it."""

MINIMUM_OPSET = 18
"""Torchlib's translations are written for opset 18; nothing older is emitted."""
