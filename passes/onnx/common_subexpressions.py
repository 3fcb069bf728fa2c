"""Computes equal subexpressions once: nodes with the same operator, attributes and inputs become one.

Not for random operators. The work is ``onnx_ir``'s ``CommonSubexpressionEliminationPass``.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import common

from ..engine.context import PassContext
from ..engine.registry import Pass


def common_subexpressions(model: ir.Model, context: PassContext) -> int:
    """Merges equal nodes in place; returns how many are gone."""
    before = len(model.graph)
    common.CommonSubexpressionEliminationPass()(model)
    return before - len(model.graph)


PASS = Pass("onnx.common_subexpressions", "Computes equal subexpressions once.", common_subexpressions)
