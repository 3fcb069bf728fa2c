"""FX graphs as JSON and back, without pickle and without source text.

A target is stored by name, and only of a closed list of kinds: operators of PyTorch's dispatcher, the arithmetic of
``operator``, functions of ``math``, ``torch.sym_...``, a few of Python's own, and the regions of a graph. Anything
else raises ``CannotStoreError``, as does an argument whose type is not exactly one of those below: a graph comes back
as it was, or is not stored. A file may be crafted: no name in it reaches another function.
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
"""The functions of ``operator`` that compute with numbers, and ``getitem``: not ``attrgetter``, ``methodcaller`` or
``call``, by which any function is reached, nor those that change their argument."""
_FUNCTIONS: Mapping[str, Mapping[str, Callable[..., object]]] = {
    "_operator": {name: getattr(operator, name) for name in _ARITHMETIC.split()},
    "math": {name: found for name, found in vars(math).items() if callable(found) and not name.startswith("_")},
    "torch": {name: found for name, found in vars(torch).items() if callable(found) and name.startswith("sym_")},
    "builtins": {
        name: getattr(builtins, name) for name in ("abs", "bool", "float", "int", "max", "min", "pow", "round")
    },
}
"""The functions that a graph may call besides operators, by module and name."""
_NAMES = {function: (kind, name) for kind, named in _FUNCTIONS.items() for name, function in named.items()}
_OPERATORS = ("dynamo_backends", "passes.operators")
"""The namespace of the operators that our passes put into graphs, and the module that defines them."""
_OPERATIONS = ("placeholder", "get_attr", "output")
"""What nodes may be besides calls."""


class CannotStoreError(Exception):
    """A graph has something that cannot be described exactly; the message says what, the same for alike things."""


def encode_target(target: object) -> list[str]:
    """A function that a node calls, as its kind and its name.

    Raises:
        CannotStoreError: it is of no kind that is stored.
    """
    if isinstance(target, torch._ops.OpOverload):
        namespace, _, name = target._schema.name.partition("::")
        encoded = ["op", namespace, name, target._overloadname]
    elif (named := _NAMES.get(target)) is not None:  # type: ignore[call-overload]  # a function can be a key
        encoded = list(named)
    else:
        raise CannotStoreError(f"a call of {type(target).__name__}")
    if decode_target(encoded) is not target:
        raise CannotStoreError(f"a call of another {'.'.join(encoded)}")
    return encoded


def decode_target(encoded: Sequence[str]) -> Callable[..., object] | None:
    """The function of a kind and a name, or ``None`` if there is none."""
    kind, *names = encoded
    if kind == "op":
        namespace, name, overload = names
        if namespace == _OPERATORS[0]:
            importlib.import_module(_OPERATORS[1])  # it defines them; where nothing calls them it is not needed
        return operator_named(namespace, name, overload)
    [name] = names
    return _FUNCTIONS.get(kind, {}).get(name)


_BY_NAME: dict[str, type] = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}


def encode(value: object, positions: Mapping[fx.Node, int]) -> Any:
    """An argument of a node; ``positions`` are those of the nodes it may name.

    Raises:
        CannotStoreError: it is of a type that is not stored.
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
    for name, of in _BY_NAME.items():
        if kind is of:
            return [name, str(value).removeprefix("torch.")]
    raise CannotStoreError(f"an argument of type {kind.__name__}")


def decode(encoded: Any, nodes: Sequence[fx.Node]) -> Any:
    """The argument that ``encode`` described.

    Raises:
        ValueError: it described nothing of that kind.
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
            raise ValueError(f"{content} is no {kind}")
        return value
    items = [decode(item, nodes) for item in content]
    if kind == "list":
        return items
    if kind == "tuple":
        return tuple(items)
    if kind == "slice":
        return slice(*items)
    raise ValueError(f"there are no arguments of the kind {kind}")


def encode_graph(graph: fx.Graph, *, regions: int = 0) -> list[Any]:
    """A graph as a list of its nodes: operation, name, target, arguments, keyword arguments.

    Args:
        graph: the graph.
        regions: how many modules ``region_i`` it may call, besides the functions that have a name.

    Raises:
        CannotStoreError: it has something that is not stored.
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
        ValueError: a function of it does not exist, or what becomes a name in its code is none.
    """
    graph = fx.Graph()
    nodes: list[fx.Node] = []
    calls = _calls_of(regions)
    for op, name, target, args, kwargs in encoded:
        names = [key for key, _ in kwargs[1]] + ([] if op == "call_function" else target.split("."))
        if not all(part.isidentifier() and not part.startswith("__") for part in names):
            raise ValueError(f"{names} are no names")
        if op == "call_function":
            called = decode_target(target)
            if called is None:
                raise ValueError(f"there is no {'.'.join(target)}")
            target = called
        elif op not in _OPERATIONS and (op, target) not in calls:
            raise ValueError(f"there are no {op} nodes of {target}")
        if args[0] != "tuple" or kwargs[0] != "dict":
            raise ValueError(f"{name} has no arguments")
        nodes.append(graph.create_node(op, target, decode(args, nodes), decode(kwargs, nodes), name=name))
    return graph


def _calls_of(regions: int) -> set[tuple[str, str]]:
    return {("call_module", region_name(i)) for i in range(regions)}
