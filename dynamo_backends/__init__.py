"""Run and debug PyTorch models on ONNX Runtime through ``torch.compile``.

``torch.compile(model, backend="onnxrt")`` needs no import of this package. Its names are for

- showing what the backends do: ``explain`` and ``coverage``, before compiling; ``dump``, for a block::

    with dynamo_backends.dump("folder"):
        compiled(x)

- writing a model to an ONNX file: ``export``;
- translating operators: ``register_converter``, ``unregister_converter``, ``operator_set``, ``NotTranslatable``;
- calling AOTAutograd: ``onnx_compiler`` and ``decomposition_table``::

    from torch._dynamo.backends.common import aot_autograd
    from dynamo_backends import decomposition_table, onnx_compiler

    records = []
    compiler = onnx_compiler(debug=True, dump_dir="dump", record=records)
    backend = aot_autograd(
        fw_compiler=compiler,
        partition_fn=compiler.partition_fn,
        decompositions=decomposition_table(),
        keep_inference_input_mutations=True,
    )

- saving what was compiled: ``keep_value_guards_unsafe``, for ``options={"guard_filter_fn": ...}``;
- serving a compiled model: ``warm_up``, ``metrics``, ``prometheus_collector``;
- catching errors: ``UnsupportedOperatorError``, ``TranslationError``, ``SessionError``, ``ExportError``,
  ``WarmUpError``.

Names are imported at first use, so that ``dynamo-backends --help`` starts without PyTorch.
"""

# This module imports nothing: every ``import torch`` runs it (``torch_logs``), and ``python -m dynamo_backends`` runs
# it while the current folder is still in front of ``sys.path``, where a ``typing.py`` would be executed.

TYPE_CHECKING = False  # what type checkers take for true

if TYPE_CHECKING:
    from .backends import dump, onnx_compiler
    from .errors import ExportError, SessionError, TranslationError, UnsupportedOperatorError, WarmUpError
    from .explanations.functions import coverage, explain
    from .exporter.converters.registry import NotTranslatable
    from .exporter.decompositions import decomposition_table
    from .exporter.registration import register_converter, unregister_converter
    from .exporter.torch_internals import operator_set
    from .graphs.guard_filter import keep_value_guards_unsafe
    from .onnx_files.export import export
    from .serving.metrics import metrics, prometheus_collector
    from .serving.warming_up import warm_up

__all__ = [
    "ExportError",
    "NotTranslatable",
    "SessionError",
    "TranslationError",
    "UnsupportedOperatorError",
    "WarmUpError",
    "coverage",
    "decomposition_table",
    "dump",
    "explain",
    "export",
    "keep_value_guards_unsafe",
    "metrics",
    "onnx_compiler",
    "operator_set",
    "prometheus_collector",
    "register_converter",
    "unregister_converter",
    "warm_up",
]

_MODULES = {
    "ExportError": ".errors",
    "NotTranslatable": ".exporter.converters.registry",
    "SessionError": ".errors",
    "TranslationError": ".errors",
    "UnsupportedOperatorError": ".errors",
    "WarmUpError": ".errors",
    "coverage": ".explanations.functions",
    "decomposition_table": ".exporter.decompositions",
    "dump": ".backends",
    "explain": ".explanations.functions",
    "export": ".onnx_files.export",
    "keep_value_guards_unsafe": ".graphs.guard_filter",
    "metrics": ".serving.metrics",
    "onnx_compiler": ".backends",
    "operator_set": ".exporter.torch_internals",
    "prometheus_collector": ".serving.metrics",
    "register_converter": ".exporter.registration",
    "unregister_converter": ".exporter.registration",
    "warm_up": ".serving.warming_up",
}


def __getattr__(name: str) -> object:
    import importlib

    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    importlib.import_module(".common.installation", __name__)
    value = getattr(importlib.import_module(_MODULES[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
