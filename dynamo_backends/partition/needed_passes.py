"""Applies the needed passes (``Pass.is_needed``), without which ONNX Runtime computes a model wrongly.

A model from before the end of the stage ``onnx`` must go through them before it runs.
"""

from __future__ import annotations

import onnx_ir as ir

from passes.engine.manager import PassManager, all_passes


def with_needed_passes(model: ir.Model, *, without: str = "") -> ir.Model:
    """A copy of a model after the needed passes.

    Args:
        model: before or after other passes.
        without: the name of a pass to leave out.

    Raises:
        PassError: a pass failed.
    """
    model = model.clone()
    PassManager(passes=[item for item in all_passes() if item.is_needed and item.name != without]).run("onnx", model)
    return model
