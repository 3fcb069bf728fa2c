"""Runs a session on torch tensors without copies.

Tensors go in and come out through DLPack. What DLPack or ONNX Runtime cannot express is translated at the
border:

- booleans, which DLPack did not have before ONNX Runtime 1.32, may come back as ``uint8``;
- a tensor whose dimensions are permuted in memory goes in as the row-major tensor it is a permutation of;
- any other non-contiguous tensor is copied, the only copy made;
- symbolic integers and booleans go in as 0-d tensors and come out as Python numbers;
- results get the strides eager gives them.

At the first call with new sizes the shapes and dtypes that came out are compared with eager's. From then on ONNX
Runtime writes its results into PyTorch's memory. What it allocates itself is a part of its arena, which lives as long
as any part of it does; so such results are copied, unless the session has no part in the arena.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Sequence

import onnxruntime
import torch

from ..common.strides import ExactStrides
from ..errors import SessionError, WrongResultError
from .constants import TABLE, Declaration
from .dtypes import TORCH_DTYPES
from .expected_shapes import Size, Sizes, differs, follow, written
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


@dataclasses.dataclass(frozen=True)
class InputSpec:
    """One model input.

    Attributes:
        name: the ONNX value.
        dtype: torch dtype; ``None``: a number.
        permutation: the order of its dimensions in memory.
        sizes: its shape, for a number the number; ``None`` if it is not known.
        device: where it is.
    """

    name: str
    dtype: torch.dtype | None
    permutation: tuple[int, ...] | None = None
    sizes: tuple[Size, ...] | None = None
    device: torch.device = torch.device("cpu")

    def as_it_lies(self, value: torch.Tensor) -> torch.Tensor:
        """An argument with its dimensions in the order of its memory."""
        return value if self.permutation is None else value.permute(self.permutation)

    @property
    def declaration(self) -> Declaration:
        """The tensor that the model takes; its sizes are numbers."""
        assert self.dtype is not None and self.sizes is not None
        order = range(len(self.sizes)) if self.permutation is None else self.permutation
        return self.name, self.dtype, [int(self.sizes[i]) for i in order]


@dataclasses.dataclass(frozen=True)
class OutputSpec:
    """One model output.

    Attributes:
        name: the ONNX value.
        dtype: torch dtype; ``torch.bool`` or ``torch.int64`` with ``is_number`` for a Python number.
        is_number: a symbolic integer or boolean, returned as a Python number.
        permutation: the model returns the result transposed by it; the caller sees it transposed back.
        strides: eager's strides in elements where the result is not dense in memory (an expanded tensor),
            else ``None``.
        exact: all of eager's strides where those of dimensions of size one do not follow from ``permutation``, else
            ``None``; they address nothing, but kernels and memory formats are chosen by them.
        sizes: eager's shape; ``None``: any shape is right.
        device: where eager has the result; a number is on the CPU.
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


_MAXIMUM_JUDGED = 1_000
"""How many different sizes of arguments a session remembers the verdict of."""


def _converter(spec: InputSpec) -> Callable[[object], Value]:
    """How arguments of one input become OrtValues; what can be decided before the call is decided here."""
    if spec.dtype is None:
        return number_to_ort  # type: ignore[return-value]
    convert = bool_to_ort if spec.dtype is torch.bool else plain_to_ort
    if spec.permutation is None:
        return convert
    permutation = spec.permutation
    return lambda value: convert(value.permute(permutation))  # type: ignore[attr-defined]


class BoundSession:
    """A session with the specifications of its arguments and outputs; safe to call from several threads.

    Args:
        session: the session.
        inputs: one for each argument; what the session does not take, as it is a constant there, is not given to it.
        outputs: one for each output.
    """

    def __init__(
        self,
        session: Session,
        inputs: Sequence[InputSpec],
        outputs: Sequence[OutputSpec],
    ) -> None:
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
        self._sizes = Sizes([spec.sizes for spec in inputs])
        self.judged: dict[tuple[int, ...], list[tuple[tuple[int, ...], torch.dtype]] | WrongResultError] = {}
        """For sizes of arguments, shape and dtype of each result as it lies in memory, booleans as ``uint8``; none if
        they do not follow from the sizes, or cannot be made before the call."""
        self._expected = _memories_of(outputs)

    @property
    def bound(self) -> BoundSession:
        """Itself, see ``frozen.FrozenSession.bound``."""
        return self

    def chosen(self, args: Sequence[torch.Tensor | int | bool], *, complete: bool = False) -> BoundSession:
        """Itself, see ``frozen.FrozenSession.chosen``."""
        return self

    def stale(self, args: Sequence[torch.Tensor | int | bool]) -> dict[int, str]:
        """Nothing: it has no weights, see ``frozen.FrozenSession.stale``."""
        return {}

    @property
    def threads(self) -> int:
        """Threads of the session that the next call runs."""
        return self.session.settings.current_threads

    def with_threads(self, threads: int) -> BoundSession:
        """The same on a new session of its own, with this number of threads."""
        other = copy.copy(self)
        other.session = self.session.variant(threads=threads)
        return other

    def __call__(self, args: Sequence[torch.Tensor | int | bool]) -> list[torch.Tensor | int | bool]:
        """Runs the model.

        Args:
            args: one value for each input spec, tensors of its dtype and number of dimensions.

        Returns:
            One value for each output spec, with eager's dtype, shape and strides.

        Raises:
            WrongResultError: a result has another shape or dtype than in eager; each later call with these sizes raises
                it without running.
            SessionError: ONNX Runtime failed while running.
        """
        if len(args) != len(self.inputs):
            raise ValueError(f"{len(args)} arguments where the session takes {len(self.inputs)}")
        sizes = self._sizes.of(args)
        judgement = self.judged.get(sizes)
        if isinstance(judgement, WrongResultError):
            raise WrongResultError(judgement.result, judgement.what)
        expected = self._expected if judgement is None else judgement
        memories = [torch.empty(shape, dtype=dtype, device="cpu") for shape, dtype in expected]
        try:
            feeds = {name: convert(args[i]) for name, i, convert in self._converters}
            fetches = [memory_to_ort(memory, o.dtype) for memory, o in zip(memories, self.outputs, strict=False)]
        except RuntimeError as error:  # a tensor without memory, as inside vmap; a dtype that DLPack does not have
            raise SessionError(f"a tensor cannot be given to ONNX Runtime: {error}") from error
        if self._asynchronous:
            wait_for_streams(self._asynchronous)
        session = self.session(self.threads)
        try:
            results = CALLS.run(session, self._run_options, feeds, fetches, self._output_names, self._devices)
        except ORT_ERRORS as error:
            if judgement is None and self._expected:  # its results may have other shapes: how they differ, it says then
                self._expected = []
                return self(args)
            raise session_error(error, self.session.model) from error
        finally:
            ARENA.used()
        if judgement is None:
            self._judge(results, sizes)
        if not memories:
            try:
                memories = [memory_from_ort(value, copies=self.session.settings.arena) for value in results]
            except RuntimeError as error:  # a dtype that DLPack does not have, as float8
                raise SessionError(f"a result of ONNX Runtime cannot be made a tensor: {error}") from error
        return [_present(memory, spec) for memory, spec in zip(memories, self.outputs, strict=True)]

    def _judge(self, results: Sequence[Value], sizes: tuple[int, ...]) -> None:
        """Compares the shapes and dtypes that came out with eager's, and remembers the judgement on these sizes."""
        known = self._sizes.known(sizes)
        are_known = all(follow(spec.sizes, known) for spec in self.outputs)
        found = (_wrong_result(results[i], spec, known) for i, spec in enumerate(self.outputs))
        wrong = next((text for text in found if text is not None), None)
        if len(self.judged) >= _MAXIMUM_JUDGED:
            self.judged.clear()
        if wrong is not None:
            self.judged[sizes] = wrong
            raise wrong
        shapes = [tuple(value.shape()) for value in results]
        dtypes = [torch.uint8 if spec.dtype is torch.bool else spec.dtype for spec in self.outputs]
        on_cpu = all(spec.device.type == "cpu" for spec in self.outputs)
        can_be_made = are_known and on_cpu and not any(0 in shape for shape in shapes)  # without elements, no memory
        self.judged[sizes] = list(zip(shapes, dtypes, strict=True)) if can_be_made else []


def _memories_of(outputs: Sequence[OutputSpec]) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of each result as it lies in memory; none if some are symbolic, or cannot be made before the
    first call: without them a first call takes its results twice, as ONNX Runtime's and as PyTorch's."""
    found = []
    for spec in outputs:
        sizes = [size for size in spec.sizes or () if isinstance(size, int)]
        if spec.sizes is None or len(sizes) != len(spec.sizes) or 0 in sizes or spec.device.type != "cpu":
            return []
        order = range(len(sizes)) if spec.permutation is None else spec.permutation
        dtype = torch.uint8 if spec.dtype is torch.bool else spec.dtype
        found.append((tuple(sizes[i] for i in order), dtype))
    return found


def _wrong_result(value: Value, spec: OutputSpec, known: dict[str, int]) -> WrongResultError | None:
    """How a result, as it lies in memory, differs in dtype or shape from eager's; ``None`` if it does not."""
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
    return WrongResultError(spec.name, f"has shape {tuple(shape)} where eager returns {written(spec.sizes, known)}")


def _present(memory: torch.Tensor, spec: OutputSpec) -> torch.Tensor | int | bool:
    """A result as eager returns it: no view, as Dynamo's guards would ask for the sizes of what it is a view of."""
    if not memory.numel():  # ONNX Runtime gives its strides as 0
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
    """A copy of ``tensor`` with these strides, zero strides (expanded dimensions) included."""
    result = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    source, target = tensor, result
    for dim, stride in enumerate(strides):
        if stride == 0 and tensor.shape[dim] > 1:
            source, target = source.narrow(dim, 0, 1), target.narrow(dim, 0, 1)
    target.copy_(source)
    return result
