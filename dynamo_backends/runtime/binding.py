"""Runs a session on PyTorch tensors without copies.

Tensors are passed through DLPack. What DLPack or ONNX Runtime cannot express is converted:

- booleans, which DLPack lacks before ONNX Runtime 1.32, may come back as ``uint8``;
- an argument whose dimensions are permuted in memory is passed as the row-major tensor it is a permutation of;
- any other non-contiguous argument is copied: the only copy;
- symbolic integers and booleans are passed as 0-d tensors and returned as Python numbers;
- results get eager's strides.

If the shapes of all results follow from the arguments, ONNX Runtime writes into tensors that PyTorch allocated. It
fails if a result has another shape or dtype than its memory, so nothing else checks them, also with new sizes; except
for single elements, of whose memory ONNX Runtime changes the number of dimensions. Otherwise ONNX Runtime allocates the
results, and shapes and dtypes are compared with eager's. Such a result is part of its arena and would keep the whole
arena alive; it is copied, unless the session does not use the arena.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Sequence

import onnxruntime
import torch

from ..common.session_events import SESSION_CLOCK, count
from ..common.strides import ExactStrides
from ..errors import SessionError, WrongResultError, first_line
from .constants import TABLE, Declaration
from .dtypes import TORCH_DTYPES
from .expected_shapes import Size, SymbolicSizes, differs, format_shape
from .memory_arena import ARENA
from .messages import ORT_ERRORS, session_error
from .ort_internals import CALLS, Value
from .session import Session
from .tensors import (
    bool_to_ort,
    is_dense_memory,
    memory_converter,
    memory_from_ort,
    number_to_ort,
    ort_device,
    plain_to_ort,
    wait_for_streams,
)

logger = logging.getLogger(__name__)


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
        if self.sizes is None or self.device.type != "cpu":
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


_MAXIMUM_WRONG = 1_000
"""Sets of argument sizes of wrong results that are remembered."""


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
        self._input_names = [name for name, _, _ in self._converters]
        self._output_names = [spec.name for spec in outputs]
        self._devices = [ort_device(spec.device) for spec in outputs]
        devices = [spec.device for spec in self.inputs] + [spec.device for spec in self.outputs]
        self._asynchronous = [device for device in dict.fromkeys(devices) if device.type == "cuda"]
        self._written = [(i, spec.written) for i, spec in enumerate(outputs) if spec.written is not None]
        self._run_options = onnxruntime.RunOptions()
        self._sizes = SymbolicSizes([spec.sizes for spec in inputs])
        self._shapes = self._sizes.shapes([spec.memory_sizes for spec in outputs])
        self._memory_converters = [memory_converter(spec.dtype) for spec in outputs]
        self._dtypes = [spec.memory_dtype for spec in outputs]
        self._single = [i for i, spec in enumerate(outputs) if spec.may_be_single]
        self._presented = [(i, spec) for i, spec in enumerate(outputs) if not spec.is_its_memory]
        self._has_warned = False
        self.wrong: dict[tuple[int, ...], WrongResultError] = {}
        """Errors of wrong results by sizes of the arguments."""

    @property
    def written(self) -> list[int]:
        """The positions of the arguments in whose memory results are computed."""
        return [argument for _, argument in self._written]

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
        wrong = self.wrong.get(sizes)
        if wrong is not None:
            raise WrongResultError(wrong.result, wrong.what)
        memories, failure = self._memories(args, sizes), ""
        if memories:
            try:
                values = self._run(args, memories)
                if any(list(values[i].shape()) != list(memories[i].shape) for i in self._single):
                    failure = "a result of one element has another number of dimensions than its memory"
            except SessionError as error:
                failure = first_line(str(error)) or "ONNX Runtime failed"
        if failure or not memories:
            memories = self._run_and_check(args, sizes)  # if the run with memory failed, it shows which result is wrong
            if failure:
                self._tell_of_repetition(failure)
        results: list[torch.Tensor | int | bool] = [*memories]
        for i, spec in self._presented:
            results[i] = _present(memories[i], spec)
        return results

    def _tell_of_repetition(self, failure: str) -> None:
        """Reports that a run failed with memory for the results, and succeeded without it; warns once."""
        count("repeated_runs", failure)
        if not self._has_warned:
            self._has_warned = True
            logger.warning("a region ran twice, the second time without memory for its results: %s", failure)

    def _memories(self, args: Sequence[torch.Tensor | int | bool], sizes: tuple[int, ...]) -> list[torch.Tensor]:
        """Memory for the results: new, or an argument's if the result is computed there.

        Empty if not all shapes are known, or if a result is empty and has no memory.
        """
        shapes = () if self._shapes is None else self._shapes(sizes)
        if not all(map(all, shapes)):
            return []
        expected = zip(shapes, self._dtypes, strict=False)
        if not self._written:
            return [torch.empty(shape, dtype=dtype, device="cpu") for shape, dtype in expected]
        written = {i: self.inputs[at].in_memory_order(args[at]) for i, at in self._written}
        return [
            written[i]
            if i in written and is_dense_memory(written[i])
            else torch.empty(shape, dtype=dtype, device="cpu")
            for i, (shape, dtype) in enumerate(expected)
        ]

    def _run(self, args: Sequence[torch.Tensor | int | bool], memories: Sequence[torch.Tensor]) -> Sequence[Value]:
        """Runs the session once; it writes into ``memories``, or allocates the results if there are none.

        Raises:
            SessionError: ONNX Runtime failed; also if a result has another shape or dtype than its memory.
        """
        try:
            arguments = [convert(args[i]) for _, i, convert in self._converters]
            fetches = [convert(memory) for memory, convert in zip(memories, self._memory_converters, strict=False)]
        except RuntimeError as error:  # a tensor without memory, as inside vmap; a dtype that DLPack lacks
            raise SessionError(f"a tensor cannot be passed to ONNX Runtime: {error}") from error
        if self._asynchronous:
            wait_for_streams(self._asynchronous)
        session = self.session(self.threads)
        names, output_names = self._input_names, self._output_names
        started = time.perf_counter()
        try:
            results = CALLS.run(session, self._run_options, names, arguments, fetches, output_names, self._devices)
        except ORT_ERRORS as error:
            raise session_error(error, self.session.model) from error
        finally:
            if self.session.settings.idle_seconds:
                ARENA.used(self.session.settings.idle_seconds)
        SESSION_CLOCK.seconds += time.perf_counter() - started
        return results

    def _run_and_check(self, args: Sequence[torch.Tensor | int | bool], sizes: tuple[int, ...]) -> list[torch.Tensor]:
        """Runs the session without memory, and compares shapes and dtypes of the results with eager's.

        Raises:
            WrongResultError: a result differs. It is remembered for these sizes.
            SessionError: ONNX Runtime failed.
        """
        results = self._run(args, [])
        known = self._sizes.known(sizes)
        for value, spec in zip(results, self.outputs, strict=True):
            error = _wrong_result(value, spec, known)
            if error is not None:
                if len(self.wrong) >= _MAXIMUM_WRONG:
                    self.wrong.clear()
                self.wrong[sizes] = error
                raise WrongResultError(error.result, error.what)  # one that is raised keeps the arguments alive
        try:
            memories = [memory_from_ort(value, copies=self.session.settings.arena) for value in results]
        except RuntimeError as error:  # a dtype that DLPack lacks, as float8
            raise SessionError(f"a result of ONNX Runtime cannot be converted to a tensor: {error}") from error
        # ONNX Runtime gives empty results strides of 0
        return [memory if memory.numel() else memory.new_empty(memory.shape) for memory in memories]


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
