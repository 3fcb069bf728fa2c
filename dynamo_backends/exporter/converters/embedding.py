"""Embeddings."""

from __future__ import annotations

import onnx_ir as ir
import torch

from .registry import NotTranslatable, converter

aten = torch.ops.aten


@converter(aten._embedding_bag.default)
def embedding_bag(*args: object, **kwargs: object) -> ir.Value:
    """Torchlib translates the first result; the others, which the gradient needs, are made up."""
    raise NotTranslatable("what its gradient needs has no translation")
