"""Torch tensors as ONNX Runtime's values and back, on the same memory, through DLPack."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from onnxruntime.capi import _pybind_state as ort_c
from torch._C import (
    _from_dlpack,  # the functions behind torch.utils.dlpack, without its checks
    _storage_Use_Count,  # what Inductor's CUDA graphs ask
    _to_dlpack,
)

_from_torch = ort_c.OrtValue.from_dlpack


def ort_device(device: torch.device) -> ort_c.OrtDevice:
    """ONNX Runtime's name of a torch device (cpu or cuda)."""
    kind = ort_c.OrtDevice.cuda() if device.type == "cuda" else ort_c.OrtDevice.cpu()
    return ort_c.OrtDevice(kind, ort_c.OrtDevice.default_memory(), device.index or 0)


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


def to_ort(value: torch.Tensor) -> ort_c.OrtValue:
    """An OrtValue on a tensor's memory, or on a contiguous copy's; keeps the tensor alive."""
    if value.dtype is torch.bool:
        return bool_to_ort(value)
    return plain_to_ort(value)


def plain_to_ort(value: torch.Tensor) -> ort_c.OrtValue:
    if not value.is_contiguous():
        value = value.contiguous()
    if value.is_neg():
        value = value.resolve_neg()
    if value._is_zerotensor():  # autograd's zeros, which have no memory
        value = value.clone()
    return _from_torch(_to_dlpack(value))


def bool_to_ort(value: torch.Tensor) -> ort_c.OrtValue:
    if value._is_zerotensor():
        value = value.clone()
    return _from_torch(_to_dlpack(value.contiguous().view(torch.uint8)), True)


def number_to_ort(value: int | bool) -> ort_c.OrtValue:
    if isinstance(value, bool):
        return bool_to_ort(torch.tensor(value, device="cpu"))  # whatever the default device is
    return _from_torch(_to_dlpack(torch.tensor(value, dtype=torch.int64, device="cpu")))


def memory_to_ort(memory: torch.Tensor, dtype: torch.dtype) -> ort_c.OrtValue:
    """An OrtValue on the memory of a contiguous tensor, for a result of ``dtype``; that of booleans is ``uint8``."""
    return _from_torch(_to_dlpack(memory), dtype is torch.bool)


def memory_from_ort(value: ort_c.OrtValue, *, copies: bool = True) -> torch.Tensor:
    """A copy of an OrtValue, or its memory itself; of booleans it is ``uint8``."""
    memory: torch.Tensor = _from_dlpack(value.to_dlpack())
    return memory.clone() if copies else memory
