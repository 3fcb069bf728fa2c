"""ONNX Runtime sessions: one per model and thread count, and a cheap question whether the runtime takes a
model.

Each session has its own thread pool. A pool that spins while it waits steals the cores of PyTorch's
OpenMP and of the next session, so a session that shares its graph with others does not spin, and a lone
one spins for a short time only.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence

import onnx_ir as ir
import onnxruntime
from onnxruntime.capi import _pybind_state as ort_c

from ..errors import SessionError
from .kernels import serialized
from .providers import Provider, provider_name

ORT_ERRORS: tuple[type[BaseException], ...] = (
    *(item for item in vars(ort_c).values() if isinstance(item, type) and issubclass(item, Exception)),
    RuntimeError,
)
"""All that ONNX Runtime raises: its exceptions have no common base, and its checks raise RuntimeError."""

_SPIN_MICROSECONDS = 100
_SILENT = 4


def session_options(threads: int, *, alone: bool = True, optimize: bool = True) -> onnxruntime.SessionOptions:
    """The settings of a session.

    Args:
        threads: size of the session's pool, the calling thread included.
        alone: whether no other session runs in the same graph; only then do idle threads spin, and shortly.
        optimize: whether ONNX Runtime's graph optimizations run.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = _SILENT  # refusals are exceptions, and reported by us
    options.intra_op_num_threads = threads
    if alone:
        options.add_session_config_entry("session.intra_op.spin_duration_us", str(_SPIN_MICROSECONDS))
    else:
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if not optimize:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return options


def _create_session(
    model: bytes,
    providers: Sequence[Provider],
    options: onnxruntime.SessionOptions,
    disabled_optimizers: Sequence[str] = (),
) -> onnxruntime.InferenceSession:
    """An ``InferenceSession`` of a serialized model, without the optimizers named.

    Raises:
        SessionError: the runtime refused the model, with what it said.
    """
    try:
        return onnxruntime.InferenceSession(
            model, options, providers=list(providers), disabled_optimizers=list(disabled_optimizers) or None
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
    options = session_options(1, optimize=False)
    if only_first and provider_name(providers[0]) != "CPUExecutionProvider":
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    try:
        _create_session(serialized(model), providers, options)
    except SessionError as error:
        return str(error)
    return None


class Session:
    """The sessions of one model, by number of threads; each is made when it is first asked for.

    Attributes:
        model: what ONNX Runtime loads, serialized: the model with its long sums in stages.

    Raises:
        KernelFaultError: a kernel that is known to be wrong would run.
        SessionError: ONNX Runtime refused the model.
    """

    def __init__(
        self,
        model: ir.Model,
        providers: Sequence[Provider],
        *,
        threads: int,
        alone: bool = True,
        optimize: bool = True,
        disabled_optimizers: Sequence[str] = (),
    ) -> None:
        self.model = serialized(model)
        self.providers = tuple(providers)
        self._alone = alone
        self._optimize = optimize
        self._disabled_optimizers = list(disabled_optimizers)
        self._lock = threading.Lock()
        self._by_threads = {threads: self._create(threads)}

    def _create(self, threads: int) -> onnxruntime.InferenceSession:
        options = session_options(threads, alone=self._alone, optimize=self._optimize)
        return _create_session(self.model, self.providers, options, self._disabled_optimizers)

    def __call__(self, threads: int) -> onnxruntime.InferenceSession:
        """The session whose pool has ``threads`` threads."""
        found = self._by_threads.get(threads)
        if found is not None:
            return found
        with self._lock:
            if threads not in self._by_threads:
                self._by_threads[threads] = self._create(threads)
            return self._by_threads[threads]

    def alone_with(self, threads: int) -> Session:
        """A new session of the same model with this number of threads, which this object does not keep."""
        other = copy.copy(self)
        other._lock = threading.Lock()
        other._by_threads = {threads: self._create(threads)}
        return other

    def save_optimized(self, path: str) -> None:
        """Writes the model with ONNX Runtime's layouts, fusions and internal operators to ``path``."""
        options = session_options(1)
        options.optimized_model_filepath = path
        _create_session(self.model, self.providers, options)
