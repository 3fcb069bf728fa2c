"""Torch tensors as ONNX Runtime's values and back, on the same memory, through DLPack."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._C import _storage_Use_Count  # what Inductor's CUDA graphs ask
from torch.utils.dlpack import from_dlpack, to_dlpack

from .ort_internals import CALLS, Device, Value

_plain, _booleans = CALLS.plain, CALLS.booleans


def ort_device(device: torch.device) -> Device:
    """ONNX Runtime's name of a torch device (cpu or cuda)."""
    return CALLS.device("cuda" if device.type == "cuda" else "cpu", device.index or 0)


def wait_for_streams(devices: Sequence[torch.device]) -> None:
    """Waits until PyTorch has computed what it was asked to on these devices.

    A CUDA provider runs on a stream of its own, and does not wait for PyTorch's, in which arguments may still be
    computed. PyTorch need not wait for ONNX Runtime: a run ends only when its stream has.
    """
    for device in devices:
        torch.cuda.current_stream(device).synchronize()


def uses_of(storage: torch.UntypedStorage) -> int:
    """How many tensors and others hold a storage: the reference count of PyTorch's ``StorageImpl``."""
    return _storage_Use_Count(storage._cdata)


def on_same_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with a storage of its own on the memory of another one, which it holds once: whoever holds the result,
    however often, does not count among the ``uses_of`` that one's storage."""
    same: torch.Tensor = from_dlpack(to_dlpack(tensor.detach()))
    return same


def to_ort(value: torch.Tensor) -> Value:
    """A value of ONNX Runtime on a tensor's memory, or on a contiguous copy's; keeps the tensor alive."""
    if value.dtype is torch.bool:
        return bool_to_ort(value)
    return plain_to_ort(value)


def plain_to_ort(value: torch.Tensor) -> Value:
    if not value.is_contiguous():
        value = value.contiguous()
    if value.is_neg():
        value = value.resolve_neg()
    if value._is_zerotensor():  # autograd's zeros, which have no memory
        value = value.clone()
    return _plain(value)


def bool_to_ort(value: torch.Tensor) -> Value:
    if value._is_zerotensor():
        value = value.clone()
    return _booleans(value.contiguous())


def number_to_ort(value: int | bool) -> Value:
    if isinstance(value, bool):
        return bool_to_ort(torch.tensor(value, device="cpu"))  # whatever the default device is
    return _plain(torch.tensor(value, dtype=torch.int64, device="cpu"))


def memory_to_ort(memory: torch.Tensor, dtype: torch.dtype) -> Value:
    """A value on the memory of a contiguous tensor, for a result of ``dtype``; that of booleans is ``uint8``."""
    return _booleans(memory) if dtype is torch.bool else _plain(memory)


def memory_from_ort(value: Value, *, copies: bool = True) -> torch.Tensor:
    """A copy of an OrtValue, or its memory itself; of booleans it may be ``uint8``."""
    memory = CALLS.tensor(value)
    return memory.clone() if copies else memory
