"""Operators that other processes take part in."""

from __future__ import annotations

import torch

_NAMESPACES = {"c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem"}


def is_collective(target: object) -> bool:
    """Whether a function is such an operator.

    Nothing in their schemas says so, and all processes must run them in one order, each once: the program's.
    """
    if isinstance(target, torch._ops.OpOverloadPacket):
        return target._qualified_op_name.split("::")[0] in _NAMESPACES
    return isinstance(target, torch._ops.OpOverload) and target.namespace in _NAMESPACES
