"""Operators that add several numbers at one place of a tensor that indices choose, as ``index_put`` may."""

from __future__ import annotations

import torch

aten = torch.ops.aten

SUMS_AT_INDICES = {aten.index_add.default, aten.embedding_dense_backward.default, aten.unfold_backward.default}
