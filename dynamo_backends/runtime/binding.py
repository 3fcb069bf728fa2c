"""Arguments and results of a session: their specifications, and their conversion between PyTorch and ONNX Runtime.

Tensors are passed through DLPack. What DLPack or ONNX Runtime cannot express is converted:

- booleans, which DLPack lacks before ONNX Runtime 1.32, may come back as ``uint8``;
- an argument whose dimensions are permuted in memory is passed as the row-major tensor it is a permutation of;
- any other non-contiguous argument is copied: the only copy;
- symbolic integers and booleans are passed as 0-d tensors and returned as Python numbers;
- results get eager's strides.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import torch

from ..common.strides import ExactStrides
from ..errors import WrongResultError
from .constants import Declaration
from .dtypes import TORCH_DTYPES
from .expected_shapes import Size, differs, format_shape
from .ort_internals import Value
from .tensors import bool_to_ort, number_to_ort, plain_to_ort


def _in_memory_order(sizes: Sequence[Size], permutation: Sequence[int] | None) -> tuple[Size, ...]:
    return tuple(sizes if permutation is None else [sizes[i] for i in permutation])


@dataclasses.dataclass(frozen=True)
class InputSpec:
    """One model input.

    Attributes:
        name: the ONNX value.
        dtype: torch dtype; ``None`` for a number.
        permutation: the order of its dimensions in memory.
        sizes: its shape; for a number, the number; ``None`` if not known.
        device: the argument's device.
    """

    name: str
    dtype: torch.dtype | None
    permutation: tuple[int, ...] | None = None
    sizes: tuple[Size, ...] | None = None
    device: torch.device = torch.device("cpu")

    def in_memory_order(self, value: torch.Tensor) -> torch.Tensor:
        """A view of an argument with its dimensions in the order of the memory."""
        return value if self.permutation is None else value.permute(self.permutation)

    @property
    def memory_shape(self) -> tuple[int, ...] | None:
        """The shape of the model's input; ``None`` if a size is symbolic or not known."""
        if self.dtype is None:
            return ()
        fixed = [size for size in _in_memory_order(self.sizes or (), self.permutation) if isinstance(size, int)]
        return None if self.sizes is None or len(fixed) < len(self.sizes) else tuple(fixed)

    @property
    def declaration(self) -> Declaration:
        """Name, dtype and shape of the model's input, which must be a tensor of fixed shape."""
        assert self.dtype is not None and self.memory_shape is not None
        return self.name, self.dtype, self.memory_shape


@dataclasses.dataclass(frozen=True)
class OutputSpec:
    """One model output.

    Attributes:
        name: the ONNX value.
        dtype: torch dtype; ``torch.bool``, ``torch.int64`` or ``torch.float64`` if ``is_number``.
        is_number: whether it is a symbolic number or boolean, returned as a Python number.
        permutation: the model returns the result permuted by this; it is permuted back.
        strides: eager's strides in elements, if the result is not dense in memory (expanded); else ``None``.
        exact: all of eager's strides, if those of dimensions of size one do not follow from ``permutation``; else
            ``None``. They address nothing, but kernels and memory formats are chosen by them.
        sizes: eager's shape; ``None`` if any shape is right.
        device: eager's device; the CPU for a number.
        written: the position of the argument in whose memory it is computed, if that is dense; the model reads the
            argument only where it computes the result, by a kernel that may work in place.
    """

    name: str
    dtype: torch.dtype
    is_number: bool = False
    permutation: tuple[int, ...] | None = None
    strides: tuple[int, ...] | None = None
    exact: ExactStrides | None = None
    sizes: tuple[Size, ...] | None = None
    device: torch.device = torch.device("cpu")
    written: int | None = None

    @functools.cached_property
    def inverse(self) -> tuple[int, ...]:
        """The permutation that undoes ``permutation``."""
        assert self.permutation is not None
        return tuple(self.permutation.index(i) for i in range(len(self.permutation)))

    @property
    def memory_dtype(self) -> torch.dtype:
        """The dtype of the memory that PyTorch allocates for it."""
        return torch.uint8 if self.dtype is torch.bool else self.dtype

    @property
    def memory_sizes(self) -> tuple[Size, ...] | None:
        """The shape of its memory; ``None`` if any is right, or if PyTorch cannot allocate it."""
        if self.sizes is None or self.device.type not in ("cpu", "cuda"):
            return None
        return _in_memory_order(self.sizes, self.permutation)

    @property
    def may_be_single(self) -> bool:
        """Whether it may have one element."""
        return self.sizes is not None and all(size == 1 or isinstance(size, str) for size in self.sizes)

    @property
    def is_its_memory(self) -> bool:
        """Whether eager's result is a dense row-major tensor."""
        special = (self.permutation, self.strides, self.exact)
        return self.dtype is not torch.bool and not self.is_number and all(item is None for item in special)


def converter(spec: InputSpec) -> Callable[[object], Value]:
    """Converts arguments of one input to OrtValues. Decisions that do not depend on the call are made here."""
    if spec.dtype is None:
        return number_to_ort  # type: ignore[return-value]
    convert = bool_to_ort if spec.dtype is torch.bool else plain_to_ort
    if spec.permutation is None:
        return convert
    permutation = spec.permutation
    return lambda value: convert(value.permute(permutation))  # type: ignore[attr-defined]


def wrong_result(value: Value, spec: OutputSpec, known: dict[str, int]) -> WrongResultError | None:
    """The error for a result whose dtype or shape differs from eager's; ``None`` if they agree."""
    dtype = TORCH_DTYPES.get(value.element_type())
    if dtype is not spec.dtype:
        return WrongResultError(spec.name, f"is {dtype} where eager returns {spec.dtype}")
    if spec.sizes is None:
        return None
    shape = value.shape()
    if spec.permutation is not None and len(shape) == len(spec.permutation):
        shape = [shape[i] for i in spec.inverse]
    if not differs(shape, spec.sizes, known):
        return None
    expected = format_shape(spec.sizes, known)
    return WrongResultError(spec.name, f"has shape {tuple(shape)} where eager returns {expected}")


def present(memory: torch.Tensor, spec: OutputSpec) -> torch.Tensor | int | bool:
    """A result as eager returns it. It is detached: Dynamo's guards would check the base of a view."""
    tensor = memory.view(torch.bool).detach() if spec.dtype is torch.bool else memory
    if spec.is_number:
        return tensor.item()
    if spec.exact is not None:
        shape = tensor.shape if spec.permutation is None else [tensor.shape[i] for i in spec.inverse]
        return tensor.as_strided(shape, spec.exact.of(shape)).detach()
    if spec.permutation is not None:
        return tensor.permute(spec.inverse).detach()
    if spec.strides is not None:
        return _with_strides(tensor, spec.strides)
    return tensor


def _with_strides(tensor: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """A copy of ``tensor`` with these strides, including zero strides (expanded dimensions)."""
    result = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    source, target = tensor, result
    for dim, stride in enumerate(strides):
        if stride == 0 and tensor.shape[dim] > 1:
            source, target = source.narrow(dim, 0, 1), target.narrow(dim, 0, 1)
    target.copy_(source)
    return result
