"""A model on ONNX Runtime, called with PyTorch's tensors and without copies.

If the shapes of all results follow from the arguments, ONNX Runtime writes into tensors that PyTorch allocated. It
fails if a result has another shape or dtype than its memory, so nothing else checks them, also with new sizes; except
for single elements, of whose memory ONNX Runtime changes the number of dimensions. Otherwise ONNX Runtime allocates the
results, and shapes and dtypes are compared with eager's. Such a result is part of its arena and would keep the whole
arena alive; it is copied, unless the session does not use the arena.

On a GPU a call launches the model and returns, see ``cuda_stream``.

Each of ONNX Runtime's sessions has its own thread pool. (Its pool for all sessions of a process has one size, which
cannot be changed, takes the place of the pools of everyone's sessions, and does not work in forked children.) A pool
that spins while idle steals the cores of PyTorch's OpenMP and of the next session. So only the session of an inference
graph with a single region and one set of weights spins, and for a short time.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import onnxruntime
import torch

from ..common.fork_safety import never_free, renew_in_children
from ..common.session_events import SESSION_CLOCK, count
from ..errors import SessionError, WrongResultError, first_line
from .binding import InputSpec, OutputSpec, converter, present, wrong_result
from .constants import TABLE, declared, give
from .cuda_stream import SessionStream
from .expected_shapes import SymbolicSizes
from .memory_arena import ARENA
from .messages import ORT_ERRORS, session_error
from .ort_internals import CALLS, Value
from .provider_options import CUDA
from .settings import SessionSettings, create_session
from .tensors import is_dense_memory, memory_converter, memory_from_ort, ort_device, wait_for_streams

if TYPE_CHECKING:
    import onnx_ir as ir


logger = logging.getLogger(__name__)

_MOST_POOLS = 4
"""Numbers of threads for which a session is kept."""

_MAXIMUM_WRONG = 1_000
"""Sets of argument sizes of wrong results that are remembered."""


class Session:
    """A model, the specifications of its arguments and results, and ONNX Runtime's sessions of it. It is thread-safe.

    ONNX Runtime has a session for each number of threads, created at first use; those created last are kept. A forked
    child creates its own, because the parent's threads are not in the child.

    Args:
        model: the model; or the bytes of a model that passed the check, from ``kernel_faults.serialized``.
        settings: of ONNX Runtime's sessions.
        inputs: one for each argument of a call. Those that the model does not read, as its constants, are not passed.
        outputs: one for each result.
        constants: values of inputs that are constants of the session, by name; a serialized model declares them
            (``constants.declared``).

    Attributes:
        model: the serialized model that ONNX Runtime loads.
        settings, inputs, outputs, constants: as given.
        input_names: the names of the inputs that each call passes.
        output_types: by name, the types of the model's outputs, as ONNX Runtime writes them (``tensor(float)``).

    Raises:
        KernelFaultError: a node would run on a wrong kernel.
        SessionError: ONNX Runtime rejected the model.
    """

    def __init__(
        self,
        model: ir.Model | bytes,
        settings: SessionSettings,
        inputs: Sequence[InputSpec] = (),
        outputs: Sequence[OutputSpec] = (),
        constants: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ) -> None:
        if not isinstance(model, bytes):
            from .kernel_faults import check, serialized  # imports onnx: a serialized model runs without it

            constants = {value.name: constants[value.name] for value in model.graph.inputs if value.name in constants}
            check(model, settings.providers)
            model = serialized(model, without=list(constants)) + declarations(constants)
        self.model = model
        self.settings = settings
        self.constants = dict(constants)
        devices = [*(spec.device for spec in inputs), *(spec.device for spec in outputs)]
        self._devices_used = list(dict.fromkeys(devices))
        self._stream = SessionStream.of(settings.providers, self._devices_used)
        self._lock = threading.Lock()
        threads = settings.current_threads
        first = self.create(threads)
        self._read = frozenset(item.name for item in first.get_inputs())
        self.output_types = {item.name: item.type for item in first.get_outputs()}
        self._by_threads = {threads: first}
        self._bind(inputs, outputs)
        renew_in_children(self)

    def _bind(self, inputs: Sequence[InputSpec], outputs: Sequence[OutputSpec]) -> None:
        """Decides what does not depend on a call."""
        self.inputs = tuple(inputs)
        self.outputs = tuple(outputs)
        self._converters = [
            (name, i, converter(spec))
            for i, spec in enumerate(inputs)
            for name in (spec.name, spec.name + TABLE)
            if name in self._read
        ]
        self.input_names = [name for name, _, _ in self._converters]
        self._output_names = [spec.name for spec in outputs]
        self._devices = [ort_device(spec.device) for spec in outputs]
        self._run_options = onnxruntime.RunOptions()
        if self._stream is not None and all(spec.device.type == "cuda" for spec in outputs):
            self._run_options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        is_ordered = self._stream is not None
        self._waits_for = [device for device in self._devices_used if device.type == "cuda" and not is_ordered]
        self._written = [(i, spec.written) for i, spec in enumerate(outputs) if spec.written is not None]
        self._sizes = SymbolicSizes([spec.sizes for spec in inputs])
        self._shapes = self._sizes.shapes([spec.memory_sizes for spec in outputs])
        self._memory_converters = [memory_converter(spec.dtype) for spec in outputs]
        self._memory = [(spec.memory_dtype, spec.device) for spec in outputs]
        self._single = [i for i, spec in enumerate(outputs) if spec.may_be_single]
        self._presented = [(i, spec) for i, spec in enumerate(outputs) if not spec.is_its_memory]
        self._has_warned = False
        self.wrong: dict[tuple[int, ...], WrongResultError] = {}
        """Errors of wrong results by sizes of the arguments."""

    def renew_in_child(self) -> None:
        """See ``fork_safety.Renewable``."""
        self._lock = threading.Lock()
        for session in self._by_threads.values():
            never_free(session)
        self._by_threads = {}

    def create(self, threads: int) -> onnxruntime.InferenceSession:
        """A new session of ONNX Runtime, with a pool of ``threads`` threads."""
        options = self.settings.options(threads)
        give(options, self.constants)
        if self._stream is None:
            return create_session(self.model, self.settings, options)
        settings = self.settings.with_options(CUDA, self._stream.provider_options)
        session = create_session(self.model, settings, options)
        weakref.finalize(session, self._stream.wait)
        return session

    def ort_session(self, threads: int) -> onnxruntime.InferenceSession:
        """ONNX Runtime's session with a pool of ``threads`` threads."""
        session = self._by_threads.get(threads)
        if session is not None:
            return session
        with self._lock:
            session = self._by_threads.get(threads)
            if session is None:
                session = self._by_threads[threads] = self.create(threads)
                if len(self._by_threads) > _MOST_POOLS:
                    del self._by_threads[next(iter(self._by_threads))]  # a call that uses it refers to it
                    logger.info("a session is freed: one for %d threads replaced it", threads)
            return session

    @property
    def threads(self) -> int:
        """Number of threads of the next call."""
        return self.settings.current_threads

    @property
    def pool_threads(self) -> int:
        """Number of threads of its pools; the calling thread is not one of them."""
        return sum(threads - 1 for threads in list(self._by_threads))

    @property
    def written(self) -> list[int]:
        """The positions of the arguments in whose memory results are computed."""
        return [argument for _, argument in self._written]

    def variant(self, model: ir.Model | None = None, **changes: Any) -> Session:
        """A new session of the same or another model, with ``changes`` of the settings; raises as the constructor."""
        settings = dataclasses.replace(self.settings, **changes)
        return Session(self.model if model is None else model, settings, self.inputs, self.outputs, self.constants)

    def returning(self, outputs: Sequence[OutputSpec]) -> Session:
        """The same session, with other specifications of the model's outputs."""
        other = copy.copy(self)
        other._bind(self.inputs, outputs)
        renew_in_children(other)
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
            results[i] = present(memories[i], spec)
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
        expected = zip(shapes, self._memory, strict=False)
        if not self._written:
            return [torch.empty(shape, dtype=dtype, device=device) for shape, (dtype, device) in expected]
        written = {i: self.inputs[at].in_memory_order(args[at]) for i, at in self._written}
        return [
            written[i]
            if i in written and is_dense_memory(written[i])
            else torch.empty(shape, dtype=dtype, device=device)
            for i, (shape, (dtype, device)) in enumerate(expected)
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
        if self._waits_for:
            wait_for_streams(self._waits_for)
        session = self.ort_session(self.threads)
        names, output_names = self.input_names, self._output_names

        def launch() -> Sequence[Value]:
            return CALLS.run(session, self._run_options, names, arguments, fetches, output_names, self._devices)

        started = time.perf_counter()
        try:
            results = launch() if self._stream is None else self._stream.run(launch)
        except ORT_ERRORS as error:
            raise session_error(error, self.model) from error
        finally:
            if self.settings.idle_seconds:
                ARENA.used(self.settings.idle_seconds)
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
            error = wrong_result(value, spec, known)
            if error is not None:
                if len(self.wrong) >= _MAXIMUM_WRONG:
                    self.wrong.clear()
                self.wrong[sizes] = error
                raise WrongResultError(error.result, error.what)  # one that is raised keeps the arguments alive

        def memories_of_results() -> list[torch.Tensor]:
            copies = self.settings.arena or self._stream is not None  # the GPU's memory is always an arena
            return [memory_from_ort(value, copies=copies) for value in results]

        try:
            memories = memories_of_results() if self._stream is None else self._stream.copy(memories_of_results)
        except RuntimeError as error:  # a dtype that DLPack lacks, as float8
            raise SessionError(f"a result of ONNX Runtime cannot be converted to a tensor: {error}") from error
        # ONNX Runtime gives empty results strides of 0
        return [memory if memory.numel() else memory.new_empty(memory.shape) for memory in memories]


def declarations(constants: Mapping[str, torch.Tensor]) -> bytes:
    """What a serialized model ends with, for constants that are given to its session."""
    return declared((name, tensor.dtype, tensor.shape) for name, tensor in constants.items())
