"""The process that makes and runs sessions for ``apart.py``, so that a provider that crashes ends only this process.

It reads a request a line, JSON, from standard input, and answers with a line: ``null``, or what ONNX Runtime said.
"""

from __future__ import annotations

import base64
import sys
from typing import Any

import numpy as np
import onnxruntime

from ..common.python_process import answer_requests

_NAMES = {"float": "float32", "double": "float64"}

_DTYPES = {
    f"tensor({name})": np.dtype(_NAMES.get(name, name))
    for name in ("float", "double", "float16", "bool", "int8", "int16", "int32", "int64", "uint8", "uint16")
}
"""The dtypes of NumPy by ONNX Runtime's names of types."""

_RUNS = 3
"""A provider that reads memory that nobody wrote computes something else each time."""

_FAR = 0.1
"""The share of the largest value that is no rounding, not even to bfloat16. What is nearer is judged on the arguments
of the first call, against float64 (``partition/provider_check.py``)."""


def main() -> None:
    """Answers requests until there are no more."""
    answer_requests(_refusal)


def _refusal(request: dict[str, Any]) -> str | None:
    try:
        options = _options(request["custom_op_libraries"], request["graph_optimization_level"])
        options.intra_op_num_threads = request["threads"]
        for key, value in request["config"].items():
            options.add_session_config_entry(key, value)
        session = onnxruntime.InferenceSession(
            base64.b64decode(request["model"]),
            options,
            providers=request["providers"],
            provider_options=request["provider_options"],
            disabled_optimizers=request["disabled_optimizers"] or None,
            enable_fallback=0,
        )
    except Exception as error:  # ONNX Runtime's exceptions have no common base; all are answers
        return str(error) or type(error).__name__
    if request["sizes"] is None:
        return None
    return _wrong(session, base64.b64decode(request["model"]), request["sizes"], request["custom_op_libraries"])


def _options(libraries: list[str], optimization: str) -> onnxruntime.SessionOptions:
    """Options of a session that knows the custom operators of libraries; they are loaded here, too."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, optimization)
    for path in libraries:
        options.register_custom_ops_library(path)
    return options


def _wrong(
    session: onnxruntime.InferenceSession, model: bytes, sizes: dict[str, list[int]], libraries: list[str]
) -> str | None:
    """How a session's results differ from the CPU provider's on made-up arguments, in one of a few runs; ``None`` if
    they do not, or cannot be compared. What a run raises is no matter, the arguments may be to blame."""
    inputs = session.get_inputs()
    if any(item.type not in _DTYPES or item.name not in sizes for item in inputs):
        return None
    random = np.random.default_rng(0)
    feeds = {}
    for item in inputs:
        dtype = _DTYPES[item.type]
        made_up = random.random(sizes[item.name]) if dtype.kind == "f" else np.ones(sizes[item.name])
        feeds[item.name] = made_up.astype(dtype)
    try:
        found = [session.run(None, feeds) for _ in range(_RUNS)]
        options = _options(libraries, "ORT_DISABLE_ALL")
        on_cpu = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        expected = on_cpu.run(None, feeds)
    except Exception as error:  # see above
        print(error, file=sys.stderr)
        return None
    for results in found:
        for item, ours, theirs in zip(session.get_outputs(), results, expected, strict=True):
            if not _is_near(ours, theirs):
                return f"{item.name} is another on the CPU provider"
    return None


def _is_near(ours: object, theirs: object) -> bool:
    if not isinstance(ours, np.ndarray) or not isinstance(theirs, np.ndarray) or theirs.dtype.kind != "f":
        return True
    if ours.shape != theirs.shape:
        return False
    finite = np.isfinite(theirs)
    largest = np.abs(theirs[finite]).max(initial=0.0)
    between = np.abs(ours[finite].astype(np.float64) - theirs[finite].astype(np.float64))
    return bool((between <= _FAR * largest).all())  # NaN is far
