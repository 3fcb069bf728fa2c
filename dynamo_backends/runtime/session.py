"""ONNX Runtime sessions: one per model and thread count.

Each session has its own thread pool. A pool that spins while it waits steals the cores of PyTorch's
OpenMP and of the next session, so a session that shares its graph with others does not spin, and a lone
one spins for a short time only.
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
import threading
from collections.abc import Sequence

import onnx_ir as ir
import onnxruntime

from ..forks import never_free, renew_in_children
from .kernels import serialized
from .settings import SessionSettings, create_session


class Session:
    """The sessions of one model, by number of threads; each is made when it is first asked for.

    A forked child makes its own: the threads of its parent's are not there.

    Args:
        model: the model; or what ``kernels.serialized``, which checks it, made of it.
        settings: how it becomes a session.

    Attributes:
        model: what ONNX Runtime loads, serialized: the model with its long sums in stages.
        settings: as given.

    Raises:
        KernelFaultError: a kernel that is known to be wrong would run.
        SessionError: ONNX Runtime refused the model.
    """

    def __init__(self, model: ir.Model | bytes, settings: SessionSettings) -> None:
        self.model = model if isinstance(model, bytes) else serialized(model, settings.providers)
        self.settings = settings
        self._lock = threading.Lock()
        threads = settings.current_threads
        self._by_threads = {threads: self._create(threads)}
        renew_in_children(self)

    def renew_in_child(self) -> None:
        """See ``forks.Renewable``."""
        self._lock = threading.Lock()
        for session in self._by_threads.values():
            never_free(session)
        self._by_threads = {}

    def _create(self, threads: int) -> onnxruntime.InferenceSession:
        return create_session(self.model, self.settings, self.settings.options(threads))

    def __call__(self, threads: int) -> onnxruntime.InferenceSession:
        """The session whose pool has ``threads`` threads."""
        found = self._by_threads.get(threads)
        if found is not None:
            return found
        with self._lock:
            if threads not in self._by_threads:
                self._by_threads[threads] = self._create(threads)
            return self._by_threads[threads]

    def variant(
        self,
        model: ir.Model | None = None,
        *,
        optimize: bool | None = None,
        also_disabled: Sequence[str] = (),
        threads: int | None = None,
    ) -> Session:
        """A new session that differs from this one in what is given, and in nothing else.

        Args:
            model: another model.
            optimize: whether ONNX Runtime's graph optimizations run.
            also_disabled: optimizers that do not run, besides those that do not run here.
            threads: a fixed number of threads.

        Raises:
            KernelFaultError, SessionError: as the constructor.
        """
        settings = dataclasses.replace(
            self.settings,
            optimize=self.settings.optimize if optimize is None else optimize,
            disabled_optimizers=tuple(dict.fromkeys([*self.settings.disabled_optimizers, *also_disabled])),
            threads=threads or self.settings.threads,
        )
        return Session(self.model if model is None else model, settings)

    def optimized(self) -> bytes:
        """The model of ``save_optimized``, serialized.

        Raises:
            SessionError: ONNX Runtime cannot write it.
        """
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "model.onnx")
            self.save_optimized(path)
            with open(path, "rb") as file:
                return file.read()

    def save_optimized(self, path: str) -> None:
        """Writes the model as this session runs it, with ONNX Runtime's layouts, fusions and internal operators.

        Raises:
            SessionError: ONNX Runtime cannot write it.
        """
        options = self.settings.options(threads=1)
        options.optimized_model_filepath = path
        create_session(self.model, self.settings, options)
