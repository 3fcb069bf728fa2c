"""Computes equal subexpressions once, by the rule of ``joint.common_subexpressions``.

What passes after it made equal; and where there was no stage ``joint``: ``aot_autograd(fw_compiler=...)`` starts here.
"""

from __future__ import annotations

from ..engine.registry import Pass
from ..joint.common_subexpressions import common_subexpressions

PASS = Pass(
    "post_grad.common_subexpressions", "Computes equal subexpressions once.", common_subexpressions, cleans_up=True
)
