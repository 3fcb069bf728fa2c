"""Values of a call in a file: tensors as they are in memory, and everything else in what ``torch.load`` reads with
``weights_only=True``.

What is neither is described: such a call can be looked at, and not run again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..debug.tensors import summary
from .call import is_plain

_TYPE = "__type__"
_DESCRIBED, _SUMMARY = "described", "summary"


class NotStoredError(ValueError):
    """A value of a captured call was not stored, but described."""


def encode(value: Any, most_bytes: int) -> Any:
    """A value as it is stored.

    Args:
        value: of a call: tensors, numbers, lists, ...
        most_bytes: a larger tensor is a summary: dtype, shape, range, mean, number of NaN.
    """
    if isinstance(value, torch.Tensor):
        if not is_plain(value) or value.layout is not torch.strided or value.is_quantized:
            return {_TYPE: _DESCRIBED, "value": f"{type(value).__name__} {value.layout} {tuple(value.shape)}"}
        if value.numel() * value.element_size() > most_bytes:
            return {_TYPE: _SUMMARY, "value": summary(value.detach().resolve_conj().resolve_neg())}
        return compact_copy(value)
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Mapping):
        return {str(key): encode(item, most_bytes) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [encode(item, most_bytes) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, slice):
        return {_TYPE: "slice", "value": [encode(item, most_bytes) for item in (value.start, value.stop, value.step)]}
    if value is Ellipsis:
        return {_TYPE: "ellipsis"}
    if isinstance(value, complex):
        return {_TYPE: "complex", "value": [value.real, value.imag]}
    for kind in (torch.dtype, torch.layout, torch.memory_format):
        if isinstance(value, kind):
            return {_TYPE: "torch", "value": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {_TYPE: "device", "value": str(value)}
    return {_TYPE: _DESCRIBED, "value": f"{type(value).__name__}: {value!r}"[:200]}


def why_not_stored(value: Any) -> str:
    """Why ``decode`` would not give back a value that ``encode`` gave; ``""`` if it would."""
    try:
        decode(value)
    except NotStoredError as error:
        return str(error)
    return ""


def decode(value: Any) -> Any:
    """The value that was stored.

    Raises:
        NotStoredError: it was described, or is not of ours.
    """
    if isinstance(value, list):
        return [decode(item) for item in value]
    if isinstance(value, tuple):
        return tuple(decode(item) for item in value)
    if not isinstance(value, dict):
        return value
    kind = value.get(_TYPE)
    if kind is None:
        return {key: decode(item) for key, item in value.items()}
    if kind == _DESCRIBED:
        raise NotStoredError(f"an argument is no plain tensor and was not stored: {value.get('value')}")
    if kind == _SUMMARY:
        raise NotStoredError(f"a tensor was larger than the limit and was not stored: {value.get('value')}")
    try:
        return _DECODERS[kind](value.get("value"))
    except (KeyError, TypeError, AttributeError, ValueError, RuntimeError) as error:
        raise NotStoredError(f"this is no value that was captured: {value!r}") from error


def _torch(name: str) -> object:
    found = getattr(torch, name)
    if not isinstance(found, (torch.dtype, torch.layout, torch.memory_format)):
        raise ValueError(name)
    return found


_DECODERS: dict[Any, Any] = {
    "slice": lambda items: slice(*map(decode, items)),
    "ellipsis": lambda _: Ellipsis,
    "complex": lambda parts: complex(*parts),
    "torch": _torch,
    "device": torch.device,
}


def compact_copy(value: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, in memory of its own that is no larger than it needs to be.

    A tensor is often a small view into a large one, or one row that is expanded. The copy requires a gradient where the
    tensor does.
    """
    plain = value.detach().resolve_conj().resolve_neg()
    span = 1 + sum((size - 1) * stride for size, stride in zip(plain.shape, plain.stride(), strict=True))
    if not plain.numel() or span > 2 * plain.numel():  # most of the memory between its elements is others'
        copy = plain.contiguous().clone()
    else:
        memory = plain.as_strided((span,), (1,), plain.storage_offset()).clone()
        copy = memory.as_strided(plain.shape, plain.stride())
    return copy.cpu().requires_grad_(value.requires_grad)
