"""Applies the passes without which ONNX Runtime computes a model wrongly (``Pass.is_needed``).

Whoever runs a model that did not go through all passes of the stage ``onnx`` applies them first.
"""

from __future__ import annotations

import onnx_ir as ir

from passes.engine.manager import PassManager, all_passes


def with_needed_passes(model: ir.Model, *, without: str = "") -> ir.Model:
    """A copy of a model after the needed passes.

    Args:
        model: an exported model, possibly after some passes.
        without: the name of a pass to leave out.

    Raises:
        PassError: a pass failed.
    """
    model = model.clone()
    PassManager(passes=[item for item in all_passes() if item.is_needed and item.name != without]).run("onnx", model)
    return model
