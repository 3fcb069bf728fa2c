"""Encodes the values of a call for ``torch.save``, so that ``torch.load(weights_only=True)`` reads them.

Tensors and plain values are stored. Other objects are stored as a description, and such a call cannot be run again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..debug.tensor_files import summary
from .call import is_readable

FORMAT = 3
"""The version of ``call.json``."""

_TYPE = "__type__"
_PLAIN = (bool, int, float, complex, str, torch.dtype, torch.layout, torch.device)
"""Types that ``torch.load(weights_only=True)`` reads."""

_FORMATS = (torch.preserve_format, torch.contiguous_format, torch.channels_last, torch.channels_last_3d)
_CONSTANTS = {repr(item): item for item in (Ellipsis, *_FORMATS)}


class NotStoredError(ValueError):
    """A value of a captured call was not stored, only its description."""


def encode(value: Any, max_bytes: int) -> Any:
    """Encodes a value: tensors, numbers, lists, ...

    A tensor of more than ``max_bytes`` is replaced by a summary: dtype, shape, range, mean, number of NaN.
    """
    if isinstance(value, torch.Tensor):
        if not is_readable(value) or value.layout is not torch.strided or value.is_quantized:
            return {_TYPE: "no plain tensor", "value": f"{type(value).__name__} {value.layout} {tuple(value.shape)}"}
        if value.numel() * value.element_size() > max_bytes:
            return {_TYPE: "larger than max_bytes", "value": summary(value.detach().resolve_conj().resolve_neg())}
        return compact_copy(value)
    if value is None or type(value) in _PLAIN:
        return value
    if isinstance(value, Mapping):
        return {str(key): encode(item, max_bytes) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [encode(item, max_bytes) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, slice):
        return {_TYPE: "slice", "value": encode([value.start, value.stop, value.step], max_bytes)}
    if repr(value) in _CONSTANTS:
        return {_TYPE: "constant", "value": repr(value)}
    return {_TYPE: "no plain value", "value": f"{type(value).__name__}: {value!r}"[:200]}


def decode(value: Any) -> Any:
    """Decodes a stored value.

    Raises:
        NotStoredError: it is a description, or not the result of ``encode``.
    """
    if isinstance(value, (list, tuple)):
        return type(value)(map(decode, value))
    if not isinstance(value, dict):
        return value
    kind, stored = value.get(_TYPE), value.get("value")
    if kind is None:
        return {key: decode(item) for key, item in value.items()}
    if kind == "slice" and isinstance(stored, list) and len(stored) == 3:
        return slice(*map(decode, stored))
    if kind == "constant" and str(stored) in _CONSTANTS:
        return _CONSTANTS[str(stored)]
    raise NotStoredError(f"a value was not stored, because it is {kind}: {stored}")


def compact_copy(value: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU with the same strides and ``requires_grad``, without the rest of the storage that it views."""
    plain = value.detach().resolve_conj().resolve_neg()
    span = 1 + sum((size - 1) * stride for size, stride in zip(plain.shape, plain.stride(), strict=True))
    if not plain.numel() or span > 2 * plain.numel():  # its elements are far apart in memory
        copy = plain.contiguous().clone()
    else:
        memory = plain.as_strided((span,), (1,), plain.storage_offset()).clone()
        copy = memory.as_strided(plain.shape, plain.stride())
    return copy.cpu().requires_grad_(value.requires_grad)
