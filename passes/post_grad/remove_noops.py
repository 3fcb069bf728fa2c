"""Removes operators that return their argument, by the rule of ``joint.remove_noops``.

What partitioning leaves of them, and where there was no stage ``joint``: ``aot_autograd(fw_compiler=...)`` starts here.
"""

from __future__ import annotations

from ..engine.registry import Pass
from ..joint.remove_noops import remove_noops

PASS = Pass("post_grad.remove_noops", "Removes operators that return their argument, such as detach.", remove_noops)
