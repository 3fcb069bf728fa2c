"""Describes a graph as JSON, for its key in the cache: everything in it that its compile depends on.

Anything that cannot be described exactly raises ``CannotStoreError`` and is not cached: a wrong key would give wrong
results.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses import FakeTensor
from torch.utils import _pytree as pytree

from ..common.strides import element_bytes
from ..errors import Reason
from ..graphs.aliases import IN_PYTORCH
from ..graphs.artifacts import attribute
from ..graphs.graph_json import CannotStoreError, encode_graph
from ..graphs.size_assumptions import Assumptions

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def describe(module: fx.GraphModule) -> dict[str, Any]:
    """The nodes of an ATen graph, the properties of their values, the constants with their content, and the symbols.

    The lines and modules of the user's model that nodes come from are left out.

    Raises:
        CannotStoreError: a part of it cannot be described.
    """
    nodes = list(module.graph.nodes)
    operators = (node.target for node in nodes if isinstance(node.target, torch._ops.OpOverload))
    return {
        "nodes": encode_graph(module.graph),
        "values": [_describe_value(node.meta.get("val")) for node in nodes],
        "memory": _describe_memory(nodes),
        "marks": [_marks(node) for node in nodes],
        "schemas": sorted({str(operator._schema) for operator in operators}),
        "constants": {name: _describe_constant(tensor) for name, tensor in constants(module).items()},
        "symbols": Assumptions(module).known,
    }


def _marks(node: fx.Node) -> list[str] | None:
    """The marks of earlier stages on a node."""
    reason = node.meta.get(IN_PYTORCH)
    marks = [f"{reason.kind.name}: {reason.text}"] if isinstance(reason, Reason) else []
    if "partitioner_tag" in node.meta:  # forward or backward
        marks.append(str(node.meta["partitioner_tag"]))
    if "unbacked_bindings" in node.meta:
        marks.append(f"unbacked {sorted(map(str, node.meta['unbacked_bindings'] or ()))}")
    return marks or None


def constants(module: fx.GraphModule) -> dict[str, torch.Tensor]:
    """The tensors that a graph reads from its module, by name.

    Raises:
        CannotStoreError: it reads something else, such as a subgraph.
    """
    tensors = {}
    for node in module.graph.find_nodes(op="get_attr"):
        value = attribute(module, str(node.target))
        if not isinstance(value, torch.Tensor):
            raise CannotStoreError(f"an attribute of type {type(value).__name__}")
        tensors[str(node.target)] = value
    return tensors


def check_plain(tensor: torch.Tensor) -> None:
    """Checks that a tensor is fully described by its CPU memory, dtype and strides.

    Raises:
        CannotStoreError: it is not.
    """
    if type(tensor) not in _PLAIN or isinstance(tensor, FakeTensor):
        raise CannotStoreError(f"a constant of type {type(tensor).__name__}")
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        raise CannotStoreError(f"a constant on {tensor.device.type} of layout {tensor.layout}")
    if tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor() or tensor.is_quantized:
        raise CannotStoreError("a constant that is conjugated, negated or quantized")


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The elements of a plain tensor, in row-major order."""
    return element_bytes(tensor).numpy().tobytes()


def _describe_constant(tensor: torch.Tensor) -> list[Any]:
    check_plain(tensor)
    digest = hashlib.sha256(bytes_of(tensor)).hexdigest()
    return [str(tensor.dtype), list(tensor.shape), list(tensor.stride()), tensor.storage_offset(), digest]


def _describe_value(value: object) -> Any:
    """The properties of a node's value; of a tensor not its elements."""
    if isinstance(value, torch.Tensor):
        if type(value) not in (*_PLAIN, FakeTensor):
            raise CannotStoreError(f"a tensor of type {type(value).__name__}")
        if value.layout is not torch.strided:
            raise CannotStoreError(f"a tensor of layout {value.layout}")
        if value.device.type != "cpu":
            raise CannotStoreError(f"a tensor on {value.device.type}")
        numbers = (value.shape, value.stride(), (value.storage_offset(),))
        sizes = [[_describe_value(item) for item in items] for items in numbers]
        return ["tensor", str(value.dtype), *sizes, value.requires_grad, value.is_conj(), value.is_neg()]
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return ["symbolic", type(value).__name__, str(value.node.expr), str(value.node.hint)]
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return ["float", value.hex()]
    if type(value) in (list, tuple):
        return ["items", [_describe_value(item) for item in value]]  # type: ignore[attr-defined]
    raise CannotStoreError(f"a value of type {type(value).__name__}")


def _describe_memory(nodes: Sequence[fx.Node]) -> list[list[int]]:
    """Which values share memory: for each tensor of each node's value the number of its storage, by first use."""
    numbers: dict[int, int] = {}
    leaves = (
        [item for item in pytree.tree_leaves(node.meta.get("val")) if isinstance(item, torch.Tensor)] for node in nodes
    )
    return [[numbers.setdefault(item.untyped_storage()._cdata, len(numbers)) for item in tensors] for tensors in leaves]
