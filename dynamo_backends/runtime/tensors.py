"""Converts PyTorch's tensors to ONNX Runtime's values and back, on the same memory, through DLPack."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch._C import _storage_Use_Count  # Inductor's CUDA graphs use it too
from torch.utils import _pytree as pytree
from torch.utils.dlpack import from_dlpack, to_dlpack

from .ort_internals import CALLS, Device, Value

_plain, _booleans = CALLS.plain, CALLS.booleans


def ort_device(device: torch.device) -> Device:
    """ONNX Runtime's device for a torch device (cpu or cuda)."""
    return CALLS.device("cuda" if device.type == "cuda" else "cpu", device.index or 0)


def device_type_of(values: object) -> str:
    """The type of device of nested values: that of the first tensor which is not on the CPU, else ``cpu``."""
    tensors = (item for item in pytree.tree_leaves(values) if isinstance(item, torch.Tensor))
    return next((item.device.type for item in tensors if item.device.type not in ("cpu", "meta")), "cpu")


def wait_for_streams(devices: Sequence[torch.device]) -> None:
    """Waits for PyTorch's streams on these devices.

    A provider without a ``SessionStream``, such as TensorRT's, has its own stream, and does not wait for arguments that
    PyTorch still computes. PyTorch need not wait for ONNX Runtime: a run returns when its stream is done.
    """
    for device in devices:
        torch.cuda.current_stream(device).synchronize()


def uses_of(storage: torch.UntypedStorage) -> int:
    """The reference count of a storage (PyTorch's ``StorageImpl``)."""
    return _storage_Use_Count(storage._cdata)


def on_same_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor with a new storage on the same memory. The new storage holds the old one once: further references to the
    result do not change ``uses_of`` the old storage."""
    same: torch.Tensor = from_dlpack(to_dlpack(tensor.detach()))
    return same


def is_dense_memory(value: torch.Tensor) -> bool:
    """Whether a tensor is passed as it is: ``to_ort`` makes no copy of it."""
    return value.is_contiguous() and not value.is_neg() and not value._is_zerotensor()


def to_ort(value: torch.Tensor) -> Value:
    """A value on a tensor's memory, or on that of a contiguous copy; it keeps the tensor alive."""
    return bool_to_ort(value) if value.dtype is torch.bool else plain_to_ort(value)


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


def number_to_ort(value: float | bool) -> Value:
    if isinstance(value, bool):
        return bool_to_ort(torch.tensor(value, device="cpu"))  # the default device may be another
    dtype = torch.float64 if isinstance(value, float) else torch.int64
    return _plain(torch.tensor(value, dtype=dtype, device="cpu"))


def memory_converter(dtype: torch.dtype) -> Callable[[torch.Tensor], Value]:
    """Makes values on contiguous tensors, for results of ``dtype``; memory for booleans is ``uint8``."""
    return _booleans if dtype is torch.bool else _plain


def memory_from_ort(value: Value, *, copies: bool = True) -> torch.Tensor:
    """A copy of a value, or a tensor on its memory; booleans may be ``uint8``."""
    memory = CALLS.tensor(value)
    return memory.clone() if copies else memory
