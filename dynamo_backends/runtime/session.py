"""ONNX Runtime sessions: one for each model and number of threads.

Each session has its own thread pool. (ONNX Runtime's pool for all sessions of a process has one size, which cannot be
changed, takes the place of the pools of everyone's sessions, and does not work in forked children.) A pool that spins
while idle steals the cores of PyTorch's OpenMP and of the next session. So only the session of an inference graph with
a single region and one set of weights spins, and for a short time.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import tempfile
import threading
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import onnxruntime
import torch

from ..common.fork_safety import never_free, renew_in_children
from ..common.strides import element_bytes
from .constants import declared, give
from .settings import SessionSettings, create_session

if TYPE_CHECKING:
    import onnx_ir as ir


logger = logging.getLogger(__name__)

_MOST_POOLS = 4
"""Numbers of threads for which a session is kept."""


_CHUNK = 2**22
"""Bytes of a constant that are compared at once."""


class Session:
    """The sessions of one model by number of threads, created at first use; those created last are kept.

    A forked child creates its own, because the parent's threads are not in the child.

    Args:
        model: the model; or the bytes of a model that passed the check, from ``kernel_faults.serialized``.
        settings: of the session.
        constants: values of inputs that are constants of the session, by name; a serialized model declares them
            (``constants.declared``).

    Attributes:
        model: the serialized model that ONNX Runtime loads.
        settings, constants: as given.
        inputs: the names of the inputs of each call.
        output_types: by name, the types of the outputs, as ONNX Runtime writes them (``tensor(float)``).

    Raises:
        KernelFaultError: a node would run on a wrong kernel.
        SessionError: ONNX Runtime rejected the model.
    """

    def __init__(
        self,
        model: ir.Model | bytes,
        settings: SessionSettings,
        constants: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ) -> None:
        if not isinstance(model, bytes):
            from .kernel_faults import check, serialized  # imports onnx: a serialized model runs without it

            constants = {value.name: constants[value.name] for value in model.graph.inputs if value.name in constants}
            check(model, settings.providers)
            model = serialized(model, without=list(constants)) + _declarations(constants)
        self.model = model
        self.settings = settings
        self.constants = dict(constants)
        self._lock = threading.Lock()
        threads = settings.current_threads
        first = self.create(threads)
        self.inputs = frozenset(item.name for item in first.get_inputs())
        self.output_types = {item.name: item.type for item in first.get_outputs()}
        self._by_threads = {threads: first}
        renew_in_children(self)

    def renew_in_child(self) -> None:
        """See ``fork_safety.Renewable``."""
        self._lock = threading.Lock()
        for session in self._by_threads.values():
            never_free(session)
        self._by_threads = {}

    def create(self, threads: int) -> onnxruntime.InferenceSession:
        """A new session with a pool of ``threads`` threads."""
        options = self.settings.options(threads)
        give(options, self.constants)
        return create_session(self.model, self.settings, options)

    def __call__(self, threads: int) -> onnxruntime.InferenceSession:
        """The session with a pool of ``threads`` threads."""
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
    def pool_threads(self) -> int:
        """Number of threads of its pools; the calling thread is not one of them."""
        return sum(threads - 1 for threads in list(self._by_threads))

    def variant(
        self,
        model: ir.Model | None = None,
        *,
        optimize: bool | None = None,
        also_disabled: Sequence[str] = (),
        threads: int | None = None,
    ) -> Session:
        """A new session that differs from this one only in what is given; raises as the constructor does."""
        settings = dataclasses.replace(
            self.settings,
            optimize=self.settings.optimize if optimize is None else optimize,
            disabled_optimizers=tuple(dict.fromkeys([*self.settings.disabled_optimizers, *also_disabled])),
            threads=threads or self.settings.threads,
        )
        return Session(self.model if model is None else model, settings, self.constants)

    def optimized(self) -> tuple[ir.Model, dict[str, torch.Tensor]]:
        """The model of ``save_optimized``, and its large constants, which are inputs of the model.

        A constant that ONNX Runtime did not change is that of this session, and is not copied. Sizes and positions stay
        in the model: ONNX Runtime infers shapes from them.

        Raises:
            SessionError: ONNX Runtime cannot write it.
        """
        import onnx_ir as ir  # see the constructor

        with tempfile.TemporaryDirectory() as folder:
            model = ir.load(self.save_optimized(folder))
            constants = {}
            for name, value in list(model.graph.initializers.items()):
                if not isinstance(value.const_value, ir.ExternalTensor):
                    continue
                if value.const_value.dtype == ir.DataType.INT64:
                    value.const_value = ir.Tensor(value.const_value.numpy().copy(), name=name)
                else:
                    known = self.constants.get(name)
                    is_known = known is not None and _has_bytes(known, value.const_value)
                    constants[name] = known if known is not None and is_known else tensor_of(value.const_value)
                    value.const_value = None
                    del model.graph.initializers[name]
                    model.graph.inputs.append(value)
        return model, constants

    def save_optimized(self, folder: str) -> str:
        """Writes the model that the session runs, with ONNX Runtime's layouts, fusions and internal operators.

        Constants of more than a kilobyte are written as external data. Returns the path of the model in the folder.

        Raises:
            SessionError: ONNX Runtime cannot write it.
        """
        options = self.settings.options(threads=1)
        path = options.optimized_model_filepath = os.path.join(folder, "model.onnx")
        if self.constants:
            prefix = "session.optimized_model_external_initializers_"
            options.add_session_config_entry(f"{prefix}file_name", "constants.data")
            options.add_session_config_entry(f"{prefix}min_size_in_bytes", "1024")
        give(options, self.constants)
        create_session(self.model, self.settings, options)
        return path


def final_session(model: ir.Model, settings: SessionSettings, constants: Mapping[str, torch.Tensor]) -> Session:
    """A session of a model that ``Session.optimized`` returned; the model is not checked or changed.

    Raises:
        SessionError: ONNX Runtime rejected the model.
    """
    import onnx_ir as ir

    copy = model.clone()
    for value in [value for value in copy.graph.inputs if value.name in constants]:
        copy.graph.inputs.remove(value)
    return Session(ir.to_proto(copy).SerializeToString() + _declarations(constants), settings, constants)


def _declarations(constants: Mapping[str, torch.Tensor]) -> bytes:
    return declared((name, tensor.dtype, tensor.shape) for name, tensor in constants.items())


def _has_bytes(tensor: torch.Tensor, value: ir.ExternalTensor) -> bool:
    """Whether a tensor has the dtype, shape and bytes of a constant in a file."""
    import onnx_ir as ir

    dtype, sizes = ir.tensor_adapters.to_torch_dtype(value.dtype), tuple(value.shape.numpy())
    if (tensor.dtype, tuple(tensor.shape)) != (dtype, sizes) or not tensor.is_contiguous() or not value.size:
        return False
    ours = element_bytes(tensor)
    with open(value.path, "rb") as file:
        file.seek(value.offset or 0)
        return all(file.read(part.numel()) == bytes(np.from_dlpack(part)) for part in ours.split(_CHUNK))


def tensor_of(value: ir.TensorProtocol) -> torch.Tensor:
    """A copy of a constant, of any dtype."""
    import onnx_ir as ir

    dtype, sizes = ir.tensor_adapters.to_torch_dtype(value.dtype), value.shape.numpy()
    if not value.size:
        return torch.empty(sizes, dtype=dtype)
    return torch.frombuffer(bytearray(value.tobytes()), dtype=dtype).reshape(sizes)
