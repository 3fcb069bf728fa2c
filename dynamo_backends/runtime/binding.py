"""Runs a session on PyTorch tensors without copies.

Tensors are passed through DLPack. What DLPack or ONNX Runtime cannot express is converted:

- booleans, which DLPack lacks before ONNX Runtime 1.32, may come back as ``uint8``;
- an argument whose dimensions are permuted in memory is passed as the row-major tensor it is a permutation of;
- any other non-contiguous argument is copied: the only copy;
- symbolic integers and booleans are passed as 0-d tensors and returned as Python numbers;
- results get eager's strides.

The first call with new sizes checks shapes and dtypes of the results against eager's. Later calls let ONNX Runtime
write into tensors that PyTorch allocated. A result that ONNX Runtime allocates is part of its arena and would keep the
whole arena alive; it is copied, unless the session does not use the arena.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence

import onnxruntime
import torch

from ..common.session_clock import SESSION_CLOCK
from ..common.strides import ExactStrides
from ..errors import SessionError, WrongResultError
from .constants import TABLE, Declaration
from .dtypes import TORCH_DTYPES
from .expected_shapes import Size, SymbolicSizes, differs, follow, format_shape
from .memory_arena import ARENA
from .messages import ORT_ERRORS, session_error
from .ort_internals import CALLS, Value
from .session import Session
from .tensors import (
    bool_to_ort,
    memory_from_ort,
    memory_to_ort,
    number_to_ort,
    ort_device,
    plain_to_ort,
    wait_for_streams,
)


def _memory_shape(sizes: Sequence[Size] | None, permutation: Sequence[int] | None) -> tuple[int, ...] | None:
    """A shape in the order of the memory; ``None`` if a size is symbolic or not known."""
    fixed = [size for size in sizes or () if isinstance(size, int)]
    if sizes is None or len(fixed) != len(sizes):
        return None
    return tuple(fixed if permutation is None else [fixed[i] for i in permutation])


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
        return () if self.dtype is None else _memory_shape(self.sizes, self.permutation)

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
    """

    name: str
    dtype: torch.dtype
    is_number: bool = False
    permutation: tuple[int, ...] | None = None
    strides: tuple[int, ...] | None = None
    exact: ExactStrides | None = None
    sizes: tuple[Size, ...] | None = None
    device: torch.device = torch.device("cpu")

    @functools.cached_property
    def inverse(self) -> tuple[int, ...]:
        """The permutation that undoes ``permutation``."""
        assert self.permutation is not None
        return tuple(self.permutation.index(i) for i in range(len(self.permutation)))

    @property
    def memory_dtype(self) -> torch.dtype:
        """The dtype of the memory that PyTorch allocates for it."""
        return torch.uint8 if self.dtype is torch.bool else self.dtype


_MAXIMUM_JUDGED = 1_000
"""Sets of argument sizes whose check is remembered."""


def _converter(spec: InputSpec) -> Callable[[object], Value]:
    """Converts arguments of one input to OrtValues. Decisions that do not depend on the call are made here."""
    if spec.dtype is None:
        return number_to_ort  # type: ignore[return-value]
    convert = bool_to_ort if spec.dtype is torch.bool else plain_to_ort
    if spec.permutation is None:
        return convert
    permutation = spec.permutation
    return lambda value: convert(value.permute(permutation))  # type: ignore[attr-defined]


class BoundSession:
    """A session with the specifications of its arguments and outputs. It is thread-safe.

    An argument that is a constant of the session is not passed to it.
    """

    def __init__(self, session: Session, inputs: Sequence[InputSpec], outputs: Sequence[OutputSpec]) -> None:
        self.session = session
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self._converters = [
            (name, i, _converter(spec))
            for i, spec in enumerate(inputs)
            for name in (spec.name, spec.name + TABLE)
            if name in session.inputs
        ]
        self._output_names = [spec.name for spec in outputs]
        self._devices = [ort_device(spec.device) for spec in outputs]
        devices = [spec.device for spec in self.inputs] + [spec.device for spec in self.outputs]
        self._asynchronous = [device for device in dict.fromkeys(devices) if device.type == "cuda"]
        self._run_options = onnxruntime.RunOptions()
        self._sizes = SymbolicSizes([spec.sizes for spec in inputs])
        self.judged: dict[tuple[int, ...], list[tuple[tuple[int, ...], torch.dtype]] | WrongResultError] = {}
        """By sizes of the arguments: shape and dtype of the memory of each result; empty if PyTorch cannot allocate
        the results before the call; the error if a result was wrong."""
        self._expected = _memories_of(outputs)

    @property
    def bound(self) -> BoundSession:
        """Itself, see ``FrozenSession.bound``."""
        return self

    def chosen(self, args: Sequence[torch.Tensor | int | bool], *, complete: bool = False) -> BoundSession:
        """Itself, see ``FrozenSession.chosen``."""
        return self

    def stale(self, args: Sequence[torch.Tensor | int | bool]) -> dict[int, str]:
        """Empty: it has no weights, see ``FrozenSession.stale``."""
        return {}

    @property
    def threads(self) -> int:
        """Number of threads of the next call."""
        return self.session.settings.current_threads

    def with_threads(self, threads: int) -> BoundSession:
        """A copy on a new session with a fixed number of threads."""
        other = copy.copy(self)
        other.session = self.session.variant(threads=threads)
        return other

    def __call__(self, args: Sequence[torch.Tensor | int | bool]) -> list[torch.Tensor | int | bool]:
        """Runs the model.

        Args:
            args: one value for each input spec; tensors have its dtype and number of dimensions.

        Returns:
            One value for each output spec, with eager's dtype, shape and strides.

        Raises:
            WrongResultError: a result's shape or dtype differs from eager's. Later calls with these sizes raise it
                without running.
            SessionError: ONNX Runtime failed while running.
        """
        if len(args) != len(self.inputs):
            raise ValueError(f"got {len(args)} arguments, expected {len(self.inputs)}")
        sizes = self._sizes.of(args)
        judgement = self.judged.get(sizes)
        if isinstance(judgement, WrongResultError):
            raise WrongResultError(judgement.result, judgement.what)
        expected = self._expected if judgement is None else judgement
        memories = [torch.empty(shape, dtype=dtype, device="cpu") for shape, dtype in expected]
        try:
            feeds = {name: convert(args[i]) for name, i, convert in self._converters}
            fetches = [memory_to_ort(memory, o.dtype) for memory, o in zip(memories, self.outputs, strict=False)]
        except RuntimeError as error:  # a tensor without memory, as inside vmap; a dtype that DLPack lacks
            raise SessionError(f"a tensor cannot be passed to ONNX Runtime: {error}") from error
        if self._asynchronous:
            wait_for_streams(self._asynchronous)
        session = self.session(self.threads)
        started = time.perf_counter()
        try:
            results = CALLS.run(session, self._run_options, feeds, fetches, self._output_names, self._devices)
        except ORT_ERRORS as error:
            if judgement is None and self._expected:  # results may not fit the memory; run without it to see the shapes
                self._expected = []
                return self(args)
            raise session_error(error, self.session.model) from error
        finally:
            ARENA.used()
        SESSION_CLOCK.seconds += time.perf_counter() - started
        if judgement is None:
            self._judge(results, sizes)
        if not memories:
            try:
                memories = [memory_from_ort(value, copies=self.session.settings.arena) for value in results]
            except RuntimeError as error:  # a dtype that DLPack lacks, as float8
                raise SessionError(f"a result of ONNX Runtime cannot be converted to a tensor: {error}") from error
        return [_present(memory, spec) for memory, spec in zip(memories, self.outputs, strict=True)]

    def _judge(self, results: Sequence[Value], sizes: tuple[int, ...]) -> None:
        """Checks the shapes and dtypes of results against eager's, and remembers the outcome for these sizes.

        Raises:
            WrongResultError: a result differs.
        """
        known = self._sizes.known(sizes)
        are_known = all(follow(spec.sizes, known) for spec in self.outputs)
        errors = (_wrong_result(value, spec, known) for value, spec in zip(results, self.outputs, strict=True))
        wrong = next((error for error in errors if error is not None), None)
        if len(self.judged) >= _MAXIMUM_JUDGED:
            self.judged.clear()
        if wrong is not None:
            self.judged[sizes] = wrong
            raise wrong
        shapes = [tuple(value.shape()) for value in results]
        on_cpu = all(spec.device.type == "cpu" for spec in self.outputs)
        can_allocate = are_known and on_cpu and not any(0 in shape for shape in shapes)  # empty tensors have no memory
        memories = [(shape, spec.memory_dtype) for shape, spec in zip(shapes, self.outputs, strict=True)]
        self.judged[sizes] = memories if can_allocate else []


def _memories_of(outputs: Sequence[OutputSpec]) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of the memory of each result; empty if PyTorch cannot allocate all results before the first
    call. Allocating them saves the first call a copy of its results."""
    memories = []
    for spec in outputs:
        shape = _memory_shape(spec.sizes, spec.permutation)
        if shape is None or 0 in shape or spec.device.type != "cpu":
            return []
        memories.append((shape, spec.memory_dtype))
    return memories


def _wrong_result(value: Value, spec: OutputSpec, known: dict[str, int]) -> WrongResultError | None:
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


def _present(memory: torch.Tensor, spec: OutputSpec) -> torch.Tensor | int | bool:
    """A result as eager returns it. It is detached: Dynamo's guards would check the base of a view."""
    if not memory.numel():  # ONNX Runtime gives strides of 0
        memory = memory.new_empty(memory.shape)
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
