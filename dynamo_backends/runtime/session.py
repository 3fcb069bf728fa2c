"""ONNX Runtime sessions: one for each model and number of threads.

Each session has its own thread pool. (ONNX Runtime's pool for all sessions of a process has one size, which cannot be
changed, takes the place of the pools of everyone's sessions, and does not work in forked children.) A pool that spins
while idle steals the cores of PyTorch's OpenMP and of the next session. So only the session of an inference graph with
a single region and one set of weights spins, and for a short time.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import onnxruntime
import torch

from ..common.fork_safety import never_free, renew_in_children
from .constants import declared, give
from .settings import SessionSettings, create_session

if TYPE_CHECKING:
    import onnx_ir as ir


logger = logging.getLogger(__name__)

_MOST_POOLS = 4
"""Numbers of threads for which a session is kept."""


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
            model = serialized(model, without=list(constants)) + declarations(constants)
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

    def variant(self, model: ir.Model | None = None, **changes: Any) -> Session:
        """A new session of the same or another model, with ``changes`` of the settings; raises as the constructor."""
        settings = dataclasses.replace(self.settings, **changes)
        return Session(self.model if model is None else model, settings, self.constants)


def declarations(constants: Mapping[str, torch.Tensor]) -> bytes:
    """What a serialized model ends with, for constants that are given to its session."""
    return declared((name, tensor.dtype, tensor.shape) for name, tensor in constants.items())
