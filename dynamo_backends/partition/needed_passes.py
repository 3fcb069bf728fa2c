"""Models as ONNX Runtime runs them right, for who runs one that is not from the end of the stage ``onnx``."""

from __future__ import annotations

import onnx_ir as ir

from passes.engine.manager import PassManager, all_passes


def with_needed_passes(model: ir.Model, *, without: str = "") -> ir.Model:
    """A copy of a model after the passes without which ONNX Runtime's kernels compute something else.

    Args:
        model: as exported, or after some of our passes.
        without: the name of one that is left out.

    Raises:
        PassError: one of them failed.
    """
    model = model.clone()
    PassManager(passes=[item for item in all_passes() if item.is_needed and item.name != without]).run("onnx", model)
    return model
