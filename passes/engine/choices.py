"""The name of the metadata that marks an ``If`` made by ``Builder.choose``, whose condition depends on weights.

ONNX Runtime evaluates such a condition when it makes a session. The runtime folder reads the metadata too.
"""

from __future__ import annotations

OTHERWISE = "otherwise"
"""Metadata of an ``If`` that ``Builder.choose`` made: why the second branch is taken."""
