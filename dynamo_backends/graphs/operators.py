"""Looks up operators of PyTorch's dispatcher by name, and recognizes collectives.

Names come from files that may be crafted: the cache, a captured call. So only operators with a kernel that open no
file are found: not ``torch.ops.load_library``, nor TorchScript's ``aten::save``.
"""

from __future__ import annotations

import torch

_READS_FILES = "aten::from_file"
_COLLECTIVES = {"c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem"}
"""Namespaces of collectives."""


def operator_named(namespace: str, name: str, overload: str) -> torch._ops.OpOverload | None:
    """The operator of a name, such as ``("aten", "add", "Tensor")``; ``None`` if it is missing or not allowed."""
    packet = getattr(getattr(torch.ops, namespace, None), name, None)
    found = getattr(packet, overload, None) if isinstance(packet, torch._ops.OpOverloadPacket) else None
    return found if isinstance(found, torch._ops.OpOverload) and _is_allowed(found) else None


def packet_named(namespace: str, name: str) -> torch._ops.OpOverloadPacket | None:
    """The overloads of an operator; ``None`` if it is missing or none is allowed."""
    packet = getattr(getattr(torch.ops, namespace, None), name, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return None
    return packet if any(_is_allowed(getattr(packet, overload)) for overload in packet.overloads()) else None


def _is_allowed(operator: torch._ops.OpOverload) -> bool:
    return operator._schema.name != _READS_FILES and torch._C._dispatch_has_kernel(operator.name())


def is_collective(target: object) -> bool:
    """Whether a function is a collective, by its namespace: all processes must call it once, in the same order."""
    if isinstance(target, torch._ops.OpOverloadPacket):
        return target._qualified_op_name.split("::")[0] in _COLLECTIVES
    return isinstance(target, torch._ops.OpOverload) and target.namespace in _COLLECTIVES
