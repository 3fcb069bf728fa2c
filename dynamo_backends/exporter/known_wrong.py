"""Operators whose translation is known to compute something else than eager, and so run in PyTorch.

Each rule looks at one node and returns the reason, or ``None``. A rule is there because a translation or a kernel was
seen to differ; the tests of the operator database show each.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator

import torch
from torch import fx

aten = torch.ops.aten

Rule = Callable[[fx.Node], "str | None"]

RANDOM = "random numbers come from PyTorch's generator"
UNINITIALIZED = "memory without values has no place in ONNX"


def reason_not_to_translate(node: fx.Node) -> str | None:
    """Why a node must not go to ONNX although a translation exists, or ``None``."""
    for rule in _RULES:
        reason = rule(node)
        if reason is not None:
            return reason
    return None


def _tensors(node: fx.Node) -> Iterator[torch.Tensor]:
    """The fake tensors a node takes and returns."""
    for value in [*(arg.meta.get("val") for arg in node.all_input_nodes), node.meta.get("val")]:
        yield from (item for item in (value if isinstance(value, (tuple, list)) else [value]) if isinstance(item, torch.Tensor))


_NOTHING_DRAWN = {"dropout_p": 0.0, "train": False, "training": False}
"""Arguments of random operators, and their values that say that nothing is drawn."""


def draws_random_numbers(node: fx.Node) -> bool:
    """Whether a node takes numbers from PyTorch's generator: it is random, and no argument says that it draws nothing."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in node.target.tags:
        return False
    given = dict(zip((parameter.name for parameter in node.target._schema.arguments), node.args, strict=False))
    given.update(node.kwargs)
    for parameter in node.target._schema.arguments:
        if parameter.name in _NOTHING_DRAWN:
            value = given.get(parameter.name, parameter.default_value)
            if isinstance(value, (bool, int, float)) and value == _NOTHING_DRAWN[parameter.name]:
                return False
    return True


def _random_or_impure(node: fx.Node) -> str | None:
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    if draws_random_numbers(node):
        return RANDOM
    if node.target._schema.is_mutable:
        return "it changes an argument in place"
    return None


def _complex(node: fx.Node) -> str | None:
    if any(tensor.is_complex() for tensor in _tensors(node)):
        return "ONNX Runtime has no complex tensors"
    return None


def _not_strided(node: fx.Node) -> str | None:
    for tensor in _tensors(node):
        if tensor.layout is not torch.strided:
            return f"{tensor.layout} tensors have no place in ONNX"
        if tensor.is_quantized:
            return "quantized tensors of PyTorch have no place in ONNX"
    return None


def _symbolic_float(node: fx.Node) -> str | None:
    values = [node.meta.get("val"), *(arg.meta.get("val") for arg in node.all_input_nodes)]
    if any(isinstance(value, (float, torch.SymFloat)) for value in values):
        return "a symbolic float has double precision, which its translation loses"
    return None


_INTEGER_DIVISIONS = {
    getattr(packet, overload)
    for packet in (aten.div, aten.floor_divide, aten.remainder, aten.fmod)
    for overload in packet.overloads()
} | {operator.floordiv, operator.mod}


def _integer_division(node: fx.Node) -> str | None:
    """ONNX Runtime ends the process on an integer division by zero; PyTorch raises."""
    if node.target not in _INTEGER_DIVISIONS:
        return None
    divisor = node.args[1]
    if isinstance(divisor, (int, float)) and divisor != 0:
        return None
    result = node.meta.get("val")
    integral = not (isinstance(result, torch.Tensor) and result.is_floating_point())
    if isinstance(divisor, fx.Node) and integral and isinstance(divisor.meta.get("val"), torch.Tensor):
        return "an integer division by zero ends the process in ONNX Runtime"
    return None


_UNINITIALIZED = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.empty_permuted.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}


def _uninitialized(node: fx.Node) -> str | None:
    return UNINITIALIZED if node.target in _UNINITIALIZED else None


_RULES: tuple[Rule, ...] = (_uninitialized, _random_or_impure, _complex, _not_strided, _symbolic_float, _integer_division)
