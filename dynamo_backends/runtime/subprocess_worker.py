"""The subprocess of ``subprocess_session``, which makes and runs sessions that may crash.

Each request is a line of JSON. With a model, the answer is ``null``, or why the session fails; without one, the digits
to which the provider computes float32, by operator (``precision_probe``).
"""

from __future__ import annotations

import base64
import sys
from typing import Any

import numpy as np
import onnxruntime

from ..common.python_process import answer_requests
from . import precision_probe
from .provider_libraries import add_providers

_NAMES = {"float": "float32", "double": "float64"}

_DTYPES = {
    f"tensor({name})": np.dtype(_NAMES.get(name, name))
    for name in ("float", "double", "float16", "bool", "int8", "int16", "int32", "int64", "uint8", "uint16")
}
"""NumPy's dtypes by ONNX Runtime's names of types."""

_RUNS = 3
"""A provider that reads uninitialized memory returns other results in each run."""

_TOLERANCE = 0.1
"""Of the largest value: more than rounding, even to bfloat16. Smaller errors are found in the first real call, against
float64 (``partition/runnable_region.py``)."""


def main() -> None:
    """Answers requests until standard input ends."""
    answer_requests(_answer)


def _answer(request: dict[str, Any]) -> object:
    if request["model"] is None:
        return {operator: _digits(request, operator) for operator in precision_probe.operands()}
    model = base64.b64decode(request["model"])
    try:
        session = _session(model, request)
    except Exception as error:  # ONNX Runtime's exceptions have no common base
        return str(error) or type(error).__name__
    sizes = request["sizes"]
    return None if sizes is None else _wrong(session, model, sizes, request["custom_op_libraries"])


def _digits(request: dict[str, Any], operator: str) -> str | None:
    """The digits of an operator in float32; ``None`` if the provider does not run it."""
    try:
        session = _session(precision_probe.model_of(operator), request)
        return precision_probe.digits(operator, lambda x: session.run(None, {"x": x})[0])
    except Exception as error:
        print(error, file=sys.stderr)
        return None


def _session(model: bytes, request: dict[str, Any]) -> onnxruntime.InferenceSession:
    options = _options(request["custom_op_libraries"], request["graph_optimization_level"])
    options.intra_op_num_threads = request["threads"]
    for key, value in request["config"].items():
        options.add_session_config_entry(key, value)
    providers = list(zip(request["providers"], request["provider_options"], strict=True))
    return onnxruntime.InferenceSession(
        model,
        options,
        providers=None if add_providers(options, providers) else providers,
        disabled_optimizers=request["disabled_optimizers"] or None,
        enable_fallback=0,
    )


def _options(libraries: list[str], optimization: str) -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, optimization)
    for path in libraries:
        options.register_custom_ops_library(path)
    return options


def _wrong(
    session: onnxruntime.InferenceSession, model: bytes, sizes: dict[str, list[int]], libraries: list[str]
) -> str | None:
    """Which result differs from the CPU provider's on made-up arguments, in one of a few runs; ``None`` if none does,
    or they cannot be compared."""
    inputs = session.get_inputs()
    if any(item.type not in _DTYPES or item.name not in sizes for item in inputs):
        return None
    random = np.random.default_rng(0)
    feeds = {}
    for item in inputs:
        dtype = _DTYPES[item.type]
        values = random.random(sizes[item.name]) if dtype.kind == "f" else np.ones(sizes[item.name])
        feeds[item.name] = values.astype(dtype)
    try:
        runs = [session.run(None, feeds) for _ in range(_RUNS)]
        options = _options(libraries, "ORT_DISABLE_ALL")
        on_cpu = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        expected = on_cpu.run(None, feeds)
    except Exception as error:  # the arguments may cause it
        print(error, file=sys.stderr)
        return None
    for results in runs:
        for item, ours, cpus in zip(session.get_outputs(), results, expected, strict=True):
            if not _is_near(ours, cpus):
                return f"{item.name} differs from the CPU provider's result"
    return None


def _is_near(actual: object, expected: object) -> bool:
    if not isinstance(actual, np.ndarray) or not isinstance(expected, np.ndarray) or expected.dtype.kind != "f":
        return True
    if actual.shape != expected.shape:
        return False
    finite = np.isfinite(expected)
    largest = np.abs(expected[finite]).max(initial=0.0)
    errors = np.abs(actual[finite].astype(np.float64) - expected[finite].astype(np.float64))
    return bool((errors <= _TOLERANCE * largest).all())  # False for NaN
