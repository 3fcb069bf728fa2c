"""Counts what is in ONNX models."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping

import onnx_ir as ir

ATTENTIONS = frozenset(
    {
        "Attention",
        "DecoderMaskedMultiHeadAttention",
        "DecoderMaskedSelfAttention",
        "GroupQueryAttention",
        "MultiHeadAttention",
        "PackedAttention",
        "PackedMultiHeadAttention",
        "QAttention",
        "SparseAttention",
    }
)
"""Operators that are a whole attention: the standard one, and ONNX Runtime's."""


def count_operators(models: Iterable[ir.Model]) -> collections.Counter[str]:
    """Nodes by operator, those of functions and inner graphs included, constants left out: nothing runs for them."""
    found: collections.Counter[str] = collections.Counter()
    for model in models:
        for part in (model.graph, *model.functions.values()):
            found.update(node.op_type for node in part.all_nodes() if node.op_type != "Constant")
    return found


def count_attentions(found: Mapping[str, int]) -> int:
    """How many of these operators are a whole attention."""
    return sum(number for name, number in found.items() if name in ATTENTIONS)
