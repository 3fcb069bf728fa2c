"""Kernels of ONNX Runtime that compute something wrong, and the check that keeps them from running.

A session is only made of a model that went through ``serialized``. The check asks by the kernel: whoever wrote the
node, a translation of ours, torchlib's, a pass of another package, it does not run. ``docs/upstream.md`` has each
fault with a model that shows it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import onnx_ir as ir
import torch

from ..errors import KernelFaultError
from ..reasons import Kind, Reason
from .long_sums import with_accurate_sums


@dataclasses.dataclass(frozen=True)
class KernelFault:
    """A kernel that must not run.

    Attributes:
        op_type: the operator, of ONNX's own domain.
        applies: whether a node of that operator meets the fault.
        reason: what the kernel does, for people.
    """

    op_type: str
    applies: Callable[[ir.Node], bool]
    reason: Reason


def _reduces(node: ir.Node) -> bool:
    """Whether a scatter adds, multiplies or compares; a reduction that a function's caller chooses may."""
    reduction = node.attributes.get("reduction")
    if reduction is None:
        return False
    return reduction.is_ref() or reduction.as_string() not in ("", "none")


def _is_not_double(node: ir.Node) -> bool:
    """Whether the kernel is not that of float64; where the type is not known it may be another."""
    return node.inputs[0] is None or node.inputs[0].dtype != ir.DataType.DOUBLE


def _must_be_deterministic(node: ir.Node) -> bool:
    return torch.are_deterministic_algorithms_enabled()


FAULTS = (
    KernelFault(
        "ScatterND",
        _reduces,
        Reason(
            Kind.UPSTREAM_FAULT,
            "ONNX Runtime's ScatterND with a reduction gives its indices to several threads, and where two name one "
            "place a sum is lost",
        ),
    ),
    KernelFault(
        "ReduceLogSumExp",
        _is_not_double,
        Reason(
            Kind.UPSTREAM_FAULT,
            "ONNX Runtime's ReduceLogSumExp takes 0 for the largest number where -inf comes first: the rest may "
            "underflow",
        ),
    ),
    KernelFault(
        "ScatterND",
        _must_be_deterministic,
        Reason(
            Kind.UPSTREAM_FAULT,
            "torch.use_deterministic_algorithms(True), and ONNX Runtime's ScatterND writes repeated indices in any "
            "order",
        ),
    ),
)
"""Seen in ONNX Runtime 1.31 on the CPU provider, which takes the nodes that another leaves: they hold for every
provider."""


def fault_in(model: ir.Model) -> tuple[ir.Node, KernelFault] | None:
    """The first node of a model that would run on a kernel that is known to be wrong, with the fault.

    Args:
        model: its subgraphs and functions are searched too.
    """
    for node in _all_nodes(model):
        if node.domain not in ("", "ai.onnx"):
            continue
        for fault in _BY_OPERATOR.get(node.op_type, ()):
            if fault.applies(node):
                return node, fault
    return None


_BY_OPERATOR = {name: [fault for fault in FAULTS if fault.op_type == name] for name in {f.op_type for f in FAULTS}}


def _all_nodes(model: ir.Model) -> Iterator[ir.Node]:
    yield from ir.traversal.RecursiveGraphIterator(model.graph)
    for function in model.functions.values():
        yield from ir.traversal.RecursiveGraphIterator(function)


def check(model: ir.Model) -> None:
    """Checks that no kernel that is known to be wrong would run.

    Raises:
        KernelFaultError: one would; the message names the node.
    """
    found = fault_in(model)
    if found is not None:
        node, fault = found
        raise KernelFaultError(node.name or node.op_type, fault.reason, node.metadata_props.get("fx_node"))


def serialized(model: ir.Model) -> bytes:
    """A model as ONNX Runtime loads it, its long sums in stages.

    Raises:
        KernelFaultError: a node of it would run on a kernel that is known to be wrong.
    """
    check(model)
    return ir.to_proto(with_accurate_sums(model)).SerializeToString()
