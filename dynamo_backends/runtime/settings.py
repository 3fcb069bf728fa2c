"""How a model becomes a session: the settings of a session, and the one place that makes one."""

from __future__ import annotations

import dataclasses

import onnxruntime
import torch

from ..errors import SessionError
from .custom_operators import loaded_libraries, register_libraries
from .memory_arena import ARENA
from .messages import ORT_ERRORS, session_error
from .providers import Provider, only_cpu, provider_name, with_threads

_SILENT = 4

_DEQUANTIZED_ONCE = {"session.disable_quant_qdq": "1"}
"""ONNX Runtime folds the dequantization of constant weights, and computes nothing with 8 bits. Without it the
dequantization runs in each call: 11 instead of 0.35 ms for one row and 2048 x 2048 weights (AMD EPYC, one thread)."""


@dataclasses.dataclass(frozen=True)
class SessionSettings:
    """How a model becomes a session; made once for each region, for whoever makes a session of it.

    Attributes:
        providers: in the order of preference.
        threads: size of the session's pool, the calling thread included; ``None``: ``torch.get_num_threads()`` at each
            call.
        shares_graph: whether something else, another session or PyTorch, runs as soon as it is done: then idle threads
            do not spin, else shortly.
        spin: how many milliseconds that is.
        optimize: whether ONNX Runtime's graph optimizations run.
        disabled_optimizers: names of those that do not.
        arena: whether its memory is the arena's. Without, each result has memory of its own, which is let go with it:
            for a session that runs once, and returns many.
    """

    providers: tuple[Provider, ...] = dataclasses.field(hash=False)  # a provider's options are a dict
    threads: int | None = None
    shares_graph: bool = False
    spin: int = 1
    optimize: bool = True
    disabled_optimizers: tuple[str, ...] = ()
    arena: bool = True

    @property
    def current_threads(self) -> int:
        """Threads of a session that runs now."""
        return self.threads or torch.get_num_threads()

    @property
    def config(self) -> dict[str, str]:
        """ONNX Runtime's configuration entries of a session that has these settings, but those for its memory.

        Another provider than the CPU's gets the graph with its quantizations, as it may have kernels for them.
        """
        quantization = _DEQUANTIZED_ONCE if only_cpu(self.providers) else {}
        if self.shares_graph:
            return {"session.intra_op.allow_spinning": "0", **quantization}
        return {"session.intra_op.spin_duration_us": str(self.spin * 1_000), **quantization}

    def as_json(self) -> dict[str, object]:
        """All that is needed to make such a session without this package.

        Returns:
            ``providers``, by name, ``provider_options``, one dict for each, ``graph_optimization_level``,
            ``disabled_optimizers``, ``threads`` of a session that is made now, ``config``, and the paths of
            ``custom_op_libraries``.
        """
        pairs = with_threads(self.providers, self.current_threads)
        return {
            "providers": [name for name, _ in pairs],
            "provider_options": [{key: str(value) for key, value in given.items()} for _, given in pairs],
            "graph_optimization_level": "ORT_ENABLE_ALL" if self.optimize else "ORT_DISABLE_ALL",
            "disabled_optimizers": list(self.disabled_optimizers),
            "threads": self.current_threads,
            "config": self.config,
            "custom_op_libraries": list(loaded_libraries()),
        }

    def options(self, threads: int) -> onnxruntime.SessionOptions:
        """ONNX Runtime's form of the settings, with this number of threads."""
        options = onnxruntime.SessionOptions()
        options.log_severity_level = _SILENT  # refusals are exceptions, and reported by us
        options.intra_op_num_threads = threads
        if self.arena:
            ARENA.use(options)
        else:
            options.enable_cpu_mem_arena = False
        if self.shares_graph:  # a block for all values of a run, beside what the arena has of other sessions
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
    """An ``InferenceSession`` of a serialized model, which is not checked here (``kernels.serialized``).

    Raises:
        SessionError: the runtime refused the model, with what it said; or a provider did not start.
    """
    try:
        session = onnxruntime.InferenceSession(
            model,
            options,
            providers=with_threads(settings.providers, options.intra_op_num_threads),
            disabled_optimizers=list(settings.disabled_optimizers) or None,
            enable_fallback=0,  # to the CPU provider, with a print
        )
    except ORT_ERRORS as error:
        raise session_error(error, model) from error
    started = session.get_providers()
    for provider in settings.providers:
        if provider_name(provider) not in started:  # ONNX Runtime writes a line, and goes on without it
            raise SessionError(f"execution provider {provider_name(provider)!r} did not start; there are {started}")
    return session
