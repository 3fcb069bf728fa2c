"""The versions that this package is written for: of PyTorch, and of the ONNX that our models are written in.

Private parts of PyTorch are used in ``graphs/aot.py``, ``graphs/inductor.py`` and ``exporter/torch_internals.py``, and
they change between versions. ``python tests/with_torch.py VERSION`` runs the tests with another version of PyTorch; one
that passes is added to ``TESTED``.
"""

from __future__ import annotations

TESTED = ("2.13", "2.14", "2.15")
"""The versions of PyTorch that were tested, oldest first. The requirements of the package exclude older ones."""

IR_VERSION = 10
"""The oldest that holds all we use, so that most tools read it."""

MINIMUM_OPSET = 18
"""Torchlib's translations are written for opset 18; nothing older is emitted."""
