"""The settings of a session, and the one function that makes sessions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import onnxruntime
import torch

from ..errors import SessionError
from .custom_operators import loaded_libraries, register_libraries
from .memory_arena import ARENA
from .messages import ORT_ERRORS, session_error
from .provider_libraries import ProviderError, add_providers, version_text
from .providers import (
    SILENT,
    Provider,
    only_cpu,
    options_of,
    provider_name,
    runs_on_gpu,
    unchanged_gpu,
    with_threads,
)

_DEQUANTIZED_ONCE = {"session.disable_quant_qdq": "1"}
"""ONNX Runtime dequantizes constant weights when it makes the session, and computes nothing with 8 bits. Otherwise each
call dequantizes: 11 instead of 0.35 ms for one row and 2048 x 2048 weights (AMD EPYC, one thread)."""


@dataclasses.dataclass(frozen=True)
class SessionSettings:
    """How to make a session of a model.

    Attributes:
        providers: in order of preference.
        threads: size of the session's pool, including the calling thread; ``None`` for ``torch.get_num_threads()`` at
            each call.
        shares_graph: whether PyTorch or another session runs right after it (training, several regions, several sets of
            weights); then idle threads do not spin.
        spin: how long idle threads spin otherwise, in milliseconds.
        optimize: whether ONNX Runtime's graph optimizations run.
        disabled_optimizers: names of optimizers that do not run.
        arena: whether it allocates from the arena. Without it each result has its own memory, freed with the result:
            for a session that runs once and returns many values.
        idle_seconds: how long the arena keeps its memory after a run. 0 for a session that runs while a graph is
            compiled, after which memory is freed anyway.
    """

    providers: tuple[Provider, ...] = dataclasses.field(hash=False)  # a provider's options are a dict
    threads: int | None = None
    shares_graph: bool = False
    spin: int = 1
    optimize: bool = True
    disabled_optimizers: tuple[str, ...] = ()
    arena: bool = True
    idle_seconds: int = 0

    @property
    def current_threads(self) -> int:
        """Number of threads of a call made now; by default a single one if a GPU runs the nodes."""
        return self.threads or (1 if runs_on_gpu(self.providers) else torch.get_num_threads())

    def with_options(self, provider: str, options: Callable[[Mapping[str, str]], Mapping[str, str]]) -> SessionSettings:
        """A copy with other options of one of the providers: a function of those that it has."""
        pairs = [(provider_name(item), options_of(item)) for item in self.providers]
        providers = tuple((name, dict(options(given)) if name == provider else given) for name, given in pairs)
        return dataclasses.replace(self, providers=providers)

    @property
    def config(self) -> dict[str, str]:
        """ONNX Runtime's configuration entries, except those for memory.

        Only the CPU provider dequantizes weights once: another may have kernels for quantized weights.
        """
        quantization = _DEQUANTIZED_ONCE if only_cpu(self.providers) else {}
        if self.shares_graph:
            return {"session.intra_op.allow_spinning": "0", **quantization}
        return {"session.intra_op.spin_duration_us": str(self.spin * 1_000), **quantization}

    def as_json(self) -> dict[str, object]:
        """All that is needed to make such a session without this package.

        Returns:
            ``providers`` by name, ``provider_options`` (a dict for each), the ``packages`` of those that are not built
            in, ``graph_optimization_level``, ``disabled_optimizers``, the current number of ``threads``, ``config``,
            and the paths of ``custom_op_libraries``.
        """
        pairs = with_threads(self.providers, self.current_threads)
        return {
            "providers": [name for name, _ in pairs],
            "provider_options": [{key: str(value) for key, value in given.items()} for _, given in pairs],
            "packages": [text for name, given in pairs if (text := version_text(name, given))],
            "graph_optimization_level": "ORT_ENABLE_ALL" if self.optimize else "ORT_DISABLE_ALL",
            "disabled_optimizers": list(self.disabled_optimizers),
            "threads": self.current_threads,
            "config": self.config,
            "custom_op_libraries": list(loaded_libraries()),
        }

    def options(self, threads: int) -> onnxruntime.SessionOptions:
        """ONNX Runtime's options for these settings and this number of threads."""
        options = onnxruntime.SessionOptions()
        options.log_severity_level = SILENT
        options.intra_op_num_threads = threads
        if self.arena:
            ARENA.use(options)
        else:
            options.enable_cpu_mem_arena = False
        if self.shares_graph:  # a memory pattern would be one more block for all values of a run
            options.enable_mem_pattern = False
        for key, value in self.config.items():
            options.add_session_config_entry(key, value)
        register_libraries(options)
        if not self.optimize:
            options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        return options


def create_session(
    model: bytes, settings: SessionSettings, options: onnxruntime.SessionOptions
) -> onnxruntime.InferenceSession:
    """An ``InferenceSession`` of a serialized model, which must have been checked (``kernel_faults.check``).

    Raises:
        SessionError: ONNX Runtime rejected the model, or a provider did not start.
    """
    providers = with_threads(settings.providers, options.intra_op_num_threads)
    try:
        by_device = add_providers(options, providers)
        with unchanged_gpu():
            session = onnxruntime.InferenceSession(
                model,
                options,
                providers=None if by_device else providers,
                disabled_optimizers=list(settings.disabled_optimizers) or None,
                enable_fallback=0,  # to the CPU provider, with a print
            )
    except ProviderError as error:
        raise SessionError(str(error)) from error
    except ORT_ERRORS as error:
        raise session_error(error, model) from error
    started = session.get_providers()
    for name, _ in providers:
        if name not in started:  # ONNX Runtime only logs this
            raise SessionError(f"execution provider {name!r} did not start; these did: {started}")
    return session
