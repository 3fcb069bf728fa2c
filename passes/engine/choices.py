"""Choices that passes leave to ONNX Runtime: an ``If`` whose condition depends on weights (``Builder.choose``).

This module has only the name of the metadata that marks one, because the runtime reads it too.
"""

from __future__ import annotations

OTHERWISE = "otherwise"
"""Metadata of an ``If`` that ``Builder.choose`` made: why the second branch is taken."""
