"""Converts FX graphs to JSON and back, without pickle or source text.

Functions are stored by name: operators of PyTorch's dispatcher, arithmetic of ``operator`` and ``math``,
``torch.sym_...``, a few builtins, and regions. Any other function or type of argument raises ``CannotStoreError``. So a
graph is restored exactly or not stored, and a crafted file cannot call any other function.
"""

from __future__ import annotations

import builtins
import importlib
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.immutable_collections import immutable_dict, immutable_list

from .artifacts import region_name
from .operators import operator_named

_ARITHMETIC = (
    "abs add and_ eq floordiv ge getitem gt index inv invert is_ is_not le lshift lt mod mul ne neg not_ or_ pos pow "
    "rshift sub truediv truth xor"
)
"""Of ``operator``: no functions that change an argument, nor ``attrgetter``, ``methodcaller`` and ``call``, which reach
any function."""
_FUNCTIONS: Mapping[str, Mapping[str, Callable[..., object]]] = {
    "_operator": {name: getattr(operator, name) for name in _ARITHMETIC.split()},
    "math": {name: found for name, found in vars(math).items() if callable(found) and not name.startswith("_")},
    "torch": {name: found for name, found in vars(torch).items() if callable(found) and name.startswith("sym_")},
    "builtins": {
        name: getattr(builtins, name) for name in ("abs", "bool", "float", "int", "max", "min", "pow", "round")
    },
}
"""Allowed functions besides operators, by module and name."""
_NAMES = {function: (kind, name) for kind, named in _FUNCTIONS.items() for name, function in named.items()}
_OPERATORS = ("dynamo_backends", "passes.operators")
"""The namespace of our own operators, and the module that defines them."""
_OPERATIONS = ("placeholder", "get_attr", "output")
"""Allowed opcodes besides calls."""


class CannotStoreError(Exception):
    """A graph cannot be stored exactly. Messages are counted, so they name types and not values."""


def encode_target(target: object) -> list[str]:
    """The kind and name of a function: ``["op", "aten", "add", "Tensor"]``, ``["math", "ceil"]``.

    Raises:
        CannotStoreError: the function is not allowed, or the name belongs to another function.
    """
    if isinstance(target, torch._ops.OpOverload):
        namespace, _, name = target._schema.name.partition("::")
        encoded = ["op", namespace, name, target._overloadname]
    elif (named := _NAMES.get(target)) is not None:  # type: ignore[call-overload]  # functions are hashable
        encoded = list(named)
    else:
        raise CannotStoreError(f"a call of {type(target).__name__}")
    if decode_target(encoded) is not target:
        raise CannotStoreError(f"a call of a function that is not {'.'.join(encoded)}")
    return encoded


def decode_target(encoded: Sequence[str]) -> Callable[..., object] | None:
    """The function that ``encode_target`` described; ``None`` if it does not exist or is not allowed."""
    kind, *names = encoded
    if kind == "op":
        namespace, name, overload = names
        if namespace == _OPERATORS[0]:
            importlib.import_module(_OPERATORS[1])  # defines the operators
        return operator_named(namespace, name, overload)
    [name] = names
    return _FUNCTIONS.get(kind, {}).get(name)


_BY_NAME: dict[str, type] = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}


def encode(value: object, positions: Mapping[fx.Node, int]) -> Any:
    """An argument of a node as JSON, with the positions of the nodes that it may contain.

    Raises:
        CannotStoreError: a value is of any other type than those below.
    """
    if isinstance(value, fx.Node):
        return ["node", positions[value]]
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if kind is float:
        return ["float", value.hex()]  # type: ignore[attr-defined]
    if kind in (list, immutable_list):
        return ["list", [encode(item, positions) for item in value]]  # type: ignore[attr-defined]
    if kind is tuple:
        return ["tuple", [encode(item, positions) for item in value]]  # type: ignore[attr-defined]
    if kind in (dict, immutable_dict) and all(type(key) is str for key in value):  # type: ignore[attr-defined]
        return ["dict", [[key, encode(item, positions)] for key, item in value.items()]]  # type: ignore[attr-defined]
    if kind is slice:
        return ["slice", [encode(item, positions) for item in (value.start, value.stop, value.step)]]  # type: ignore[attr-defined]
    if kind is torch.device:
        return ["device", str(value)]
    for name, type_ in _BY_NAME.items():
        if kind is type_:
            return [name, str(value).removeprefix("torch.")]
    raise CannotStoreError(f"an argument of type {kind.__name__}")


def decode(encoded: Any, nodes: Sequence[fx.Node]) -> Any:
    """The argument that ``encode`` described.

    Raises:
        ValueError: the kind is unknown, or the value has another type.
    """
    if not isinstance(encoded, list):
        return encoded
    kind, content = encoded
    if kind == "node":
        return nodes[content]
    if kind == "float":
        return float.fromhex(content)
    if kind == "dict":
        return {key: decode(item, nodes) for key, item in content}
    if kind == "device":
        return torch.device(content)
    if kind in _BY_NAME:
        value = getattr(torch, content)
        if not isinstance(value, _BY_NAME[kind]):
            raise ValueError(f"torch.{content} is not a {kind}")
        return value
    items = [decode(item, nodes) for item in content]
    if kind == "list":
        return items
    if kind == "tuple":
        return tuple(items)
    if kind == "slice":
        return slice(*items)
    raise ValueError(f"unknown kind of argument: {kind}")


def encode_graph(graph: fx.Graph, *, regions: int = 0) -> list[Any]:
    """A graph as a list of nodes: opcode, name, target, arguments, keyword arguments.

    It may call the modules ``region_0``, ``region_1``, ... up to the number of ``regions``.

    Raises:
        CannotStoreError: an opcode, function or argument is not allowed.
    """
    positions: dict[fx.Node, int] = {}
    encoded = []
    calls = _calls_of(regions)
    for node in graph.nodes:
        target: Any = node.target
        if node.op == "call_function":
            target = encode_target(node.target)
        elif node.op not in _OPERATIONS and (node.op, target) not in calls:
            raise CannotStoreError(f"a {node.op} node")
        encoded.append([node.op, node.name, target, encode(node.args, positions), encode(dict(node.kwargs), positions)])
        positions[node] = len(positions)
    return encoded


def decode_graph(encoded: Sequence[Any], *, regions: int = 0) -> fx.Graph:
    """The graph that ``encode_graph`` described.

    Raises:
        ValueError: an opcode or function is not allowed, or a name is not an identifier.
    """
    graph = fx.Graph()
    nodes: list[fx.Node] = []
    calls = _calls_of(regions)
    for op, name, target, args, kwargs in encoded:
        names = [key for key, _ in kwargs[1]] + ([] if op == "call_function" else target.split("."))
        if not all(part.isidentifier() and not part.startswith("__") for part in names):
            raise ValueError(f"not all of {names} are identifiers")
        if op == "call_function":
            called = decode_target(target)
            if called is None:
                raise ValueError(f"unknown function: {'.'.join(target)}")
            target = called
        elif op not in _OPERATIONS and (op, target) not in calls:
            raise ValueError(f"not allowed: {op} of {target}")
        if args[0] != "tuple" or kwargs[0] != "dict":
            raise ValueError(f"the arguments of {name} are not a tuple and a dict")
        nodes.append(graph.create_node(op, target, decode(args, nodes), decode(kwargs, nodes), name=name))
    return graph


def _calls_of(regions: int) -> set[tuple[str, str]]:
    return {("call_module", region_name(i)) for i in range(regions)}
