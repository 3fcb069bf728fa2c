"""Tensors as numpy's arrays, with which they share memory where possible."""

from __future__ import annotations

import numpy as np
import torch

from .rule import FORMATS, Format


def dense(value: torch.Tensor) -> torch.Tensor:
    """A sparse tensor as a dense one, a jagged one as its concatenated rows; without a conjugate bit."""
    if value.is_nested:
        return value.values()
    return value.resolve_conj() if value.layout is torch.strided else value.to_dense()


def as_array(value: torch.Tensor) -> np.ndarray:
    """A tensor's elements; dtypes that numpy does not have, such as bfloat16, in float32; packed ones as bytes."""
    value = bits(dense(value).detach().resolve_neg().cpu())
    if value.dtype is torch.bool:
        return np.from_dlpack(value.contiguous().view(torch.uint8)).view(bool)
    is_known = value.dtype in (torch.float16, torch.float32, torch.float64) or not value.is_floating_point()
    if value.dtype is torch.complex32:
        value = value.to(torch.complex64)
    return np.from_dlpack((value if is_known else value.float()).contiguous())


def bits(value: torch.Tensor) -> torch.Tensor:
    """A tensor of packed numbers, which have no dtype of their own, as bytes; any other unchanged."""
    return value.view(torch.uint8) if value.dtype is torch.float4_e2m1fn_x2 else value


def is_equal(first: torch.Tensor, other: torch.Tensor) -> bool:
    """``torch.equal`` for tensors of one dtype, which PyTorch does not have for each."""
    if first.dtype in (torch.float4_e2m1fn_x2, torch.float8_e8m0fnu):
        first, other = first.view(torch.uint8), other.view(torch.uint8)
    return torch.equal(first, other)


def dtype_name(dtype: torch.dtype) -> str:
    """The name by which ``rule`` knows a dtype."""
    return str(dtype).removeprefix("torch.").replace("complex32", "float16")


def format_of(dtype: torch.dtype) -> Format:
    """The format of a floating-point dtype, or of the parts of a complex one."""
    parts = {torch.complex64: torch.float32, torch.complex128: torch.float64, torch.complex32: torch.float16}
    return FORMATS[dtype_name(parts.get(dtype, dtype))]


def same_elements(first: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one dtype have the same shape and elements; NaN equals NaN."""
    if is_equal(first, other):
        return True
    is_float = first.is_floating_point() or first.is_complex()
    return is_float and first.shape == other.shape and bool(((first == other) | (first.isnan() & other.isnan())).all())


def index_of(position: int, value: torch.Tensor) -> tuple[int, ...]:
    """The index of an element at a position in row-major order."""
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(position), value.shape)) if value.numel() else ()


def same_number(first: object, other: object) -> bool:
    """Whether results that are not both tensors are equal; a tensor of one element equals its number."""
    if any(isinstance(item, torch.Tensor) and item.numel() != 1 for item in (first, other)):
        return False
    return bool(first == other) or bool(first != first and other != other)
