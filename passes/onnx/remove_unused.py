"""Removes nodes and initializers that no output depends on. The work is ``onnx_ir``'s ``RemoveUnusedNodesPass``.

Needed: what other passes leave behind would be in the dump and in the session.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes import common

from ..engine.context import PassContext
from ..engine.registry import Pass


def remove_unused(model: ir.Model, context: PassContext) -> int:
    """Removes what is not used, in place; returns how many nodes are gone."""
    before = len(model.graph)
    common.RemoveUnusedNodesPass()(model)
    return before - len(model.graph)


PASS = Pass("onnx.remove_unused", "Removes nodes that no output depends on.", remove_unused, cleans_up=True)
