"""Values of a call in a file: tensors as they are in memory, and everything else in what ``torch.load`` reads with
``weights_only=True``.

What is neither is described: such a call can be looked at, and not run again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..debug.tensor_files import summary
from .call import is_plain

_TYPE = "__type__"
_DESCRIBED, _SUMMARY = "described", "summary"
_PLAIN = (bool, int, float, complex, str, torch.dtype, torch.layout, torch.device)
"""What ``torch.load`` reads as it is."""


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
    if value is None or type(value) in _PLAIN:
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
    if isinstance(value, torch.memory_format):
        return {_TYPE: "memory_format", "value": str(value).removeprefix("torch.")}
    return {_TYPE: _DESCRIBED, "value": f"{type(value).__name__}: {value!r}"[:200]}


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
    kind, stored = value.get(_TYPE), value.get("value")
    if kind is None:
        return {key: decode(item) for key, item in value.items()}
    if kind == "slice" and isinstance(stored, list) and len(stored) == 3:
        return slice(*map(decode, stored))
    if kind == "ellipsis":
        return Ellipsis
    if kind == "memory_format" and isinstance(found := getattr(torch, str(stored), None), torch.memory_format):
        return found
    if kind == _DESCRIBED:
        raise NotStoredError(f"an argument is no plain tensor and was not stored: {stored}")
    if kind == _SUMMARY:
        raise NotStoredError(f"a tensor was larger than the limit and was not stored: {stored}")
    raise NotStoredError(f"this is no value that was captured: {value!r}")


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
