"""Operators by names that come from a file, of the cache or of a captured call: whoever wrote it chooses the name."""

from __future__ import annotations

import torch

_READS_FILES = "aten::from_file"


def operator_named(namespace: str, name: str, overload: str) -> torch._ops.OpOverload | None:
    """An operator of PyTorch's dispatcher, or ``None`` if there is none of this name, or it opens a file.

    ``torch.ops`` also has methods, which load libraries, and what only TorchScript calls: ``aten::save`` writes a file.

    Args:
        namespace: ``aten``.
        name: ``add``.
        overload: ``Tensor``; ``default`` for the one without a name.
    """
    packet = getattr(getattr(torch.ops, namespace, None), name, None)
    found = getattr(packet, overload, None) if isinstance(packet, torch._ops.OpOverloadPacket) else None
    return found if isinstance(found, torch._ops.OpOverload) and _computes(found) else None


def packet_named(namespace: str, name: str) -> torch._ops.OpOverloadPacket | None:
    """The same without an overload: some overload of it is such an operator."""
    packet = getattr(getattr(torch.ops, namespace, None), name, None)
    if not isinstance(packet, torch._ops.OpOverloadPacket):
        return None
    return packet if any(_computes(getattr(packet, overload)) for overload in packet.overloads()) else None


def _computes(operator: torch._ops.OpOverload) -> bool:
    return operator._schema.name != _READS_FILES and torch._C._dispatch_has_kernel(operator.name())


_NAMESPACES = {"c10d", "_c10d_functional", "_c10d_functional_autograd", "symm_mem"}


def is_collective(target: object) -> bool:
    """Whether a function is such an operator.

    Nothing in their schemas says so, and all processes must run them in one order, each once: the program's.
    """
    if isinstance(target, torch._ops.OpOverloadPacket):
        return target._qualified_op_name.split("::")[0] in _NAMESPACES
    return isinstance(target, torch._ops.OpOverload) and target.namespace in _NAMESPACES
