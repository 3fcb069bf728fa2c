"""ONNX Runtime sessions: one per model and thread count, and a cheap question whether the runtime takes a
model.

Each session has its own thread pool. A pool that spins while it waits steals the cores of PyTorch's
OpenMP and of the next session, so a session that shares its graph with others does not spin, and a lone
one spins for a short time only.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence

import onnx_ir as ir
import onnxruntime
import torch
from onnxruntime.capi import _pybind_state as ort_c

from ..errors import SessionError
from ..forks import never_free, renew_in_children
from .kernels import serialized
from .providers import Provider, provider_name

ORT_ERRORS: tuple[type[BaseException], ...] = (
    *(item for item in vars(ort_c).values() if isinstance(item, type) and issubclass(item, Exception)),
    RuntimeError,
)
"""All that ONNX Runtime raises: its exceptions have no common base, and its checks raise RuntimeError."""

_SPIN_MICROSECONDS = 100
_SILENT = 4


@dataclasses.dataclass(frozen=True)
class SessionSettings:
    """How a model becomes a session; made once for each region, for whoever makes a session of it.

    Attributes:
        providers: in the order of preference.
        threads: size of the session's pool, the calling thread included; ``None``: ``torch.get_num_threads()`` at each
            call.
        shares_graph: whether other sessions run in the same graph: then idle threads do not spin, else shortly.
        optimize: whether ONNX Runtime's graph optimizations run.
        disabled_optimizers: names of those that do not.
    """

    providers: tuple[Provider, ...] = dataclasses.field(hash=False)  # a provider's options are a dict
    threads: int | None = None
    shares_graph: bool = False
    optimize: bool = True
    disabled_optimizers: tuple[str, ...] = ()

    @property
    def current_threads(self) -> int:
        """Threads of a session that runs now."""
        return self.threads or torch.get_num_threads()

    def options(self, threads: int) -> onnxruntime.SessionOptions:
        """ONNX Runtime's form of the settings, with this number of threads."""
        options = onnxruntime.SessionOptions()
        options.log_severity_level = _SILENT  # refusals are exceptions, and reported by us
        options.intra_op_num_threads = threads
        if self.shares_graph:
            options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        else:
            options.add_session_config_entry("session.intra_op.spin_duration_us", str(_SPIN_MICROSECONDS))
        if not self.optimize:
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        return options


def _create_session(
    model: bytes, settings: SessionSettings, options: onnxruntime.SessionOptions
) -> onnxruntime.InferenceSession:
    """An ``InferenceSession`` of a serialized model.

    Raises:
        SessionError: the runtime refused the model, with what it said.
    """
    try:
        return onnxruntime.InferenceSession(
            model,
            options,
            providers=list(settings.providers),
            disabled_optimizers=list(settings.disabled_optimizers) or None,
        )
    except ORT_ERRORS as error:
        raise SessionError(str(error)) from error


def refusal(model: ir.Model, providers: Sequence[Provider], *, only_first: bool = False) -> str | None:
    """What the runtime says against a model, or ``None`` if it would run it unoptimized on one thread.

    Args:
        model: the model.
        providers: in the order of preference.
        only_first: whether all nodes must be the first provider's; without it the CPU provider may take some.
    """
    settings = SessionSettings(tuple(providers), optimize=False)
    options = settings.options(threads=1)
    if only_first and provider_name(providers[0]) != "CPUExecutionProvider":
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    try:
        _create_session(serialized(model), settings, options)
    except SessionError as error:
        return str(error)
    return None


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
        self.model = model if isinstance(model, bytes) else serialized(model)
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
        return _create_session(self.model, self.settings, self.settings.options(threads))

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

    def save_optimized(self, path: str) -> None:
        """Writes the model as this session runs it, with ONNX Runtime's layouts, fusions and internal operators.

        Raises:
            SessionError: ONNX Runtime cannot write it.
        """
        options = self.settings.options(threads=1)
        options.optimized_model_filepath = path
        _create_session(self.model, self.settings, options)
