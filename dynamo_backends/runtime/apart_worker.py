"""The process that makes and runs sessions for ``apart.py``, so that a provider that crashes ends only this process.

It reads a request a line, JSON, from standard input, and answers with a line: ``null``, or what ONNX Runtime said.
"""

from __future__ import annotations

import base64
import json
import os
import sys
from typing import Any

import numpy as np
import onnxruntime

_DTYPES = {
    "tensor(float)": np.float32,
    "tensor(double)": np.float64,
    "tensor(float16)": np.float16,
    "tensor(bool)": np.bool_,
    **{f"tensor({name})": np.dtype(name) for name in ("int8", "int16", "int32", "int64", "uint8", "uint16")},
}


def main() -> None:
    """Answers requests until there are no more."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no answer
    for line in sys.stdin:
        answers.write(json.dumps(_refusal(json.loads(line))) + "\n")
        answers.flush()


def _refusal(request: dict[str, Any]) -> str | None:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = request["threads"]
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, request["graph_optimization_level"])
    for key, value in request["config"].items():
        options.add_session_config_entry(key, value)
    try:
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
    if request["sizes"] is not None:
        _run(session, request["sizes"])
    return None


def _run(session: onnxruntime.InferenceSession, sizes: dict[str, list[int]]) -> None:
    """Runs a session on ones. What it raises is no matter, the arguments may be to blame; that it comes back is."""
    inputs = session.get_inputs()
    if any(item.type not in _DTYPES or item.name not in sizes for item in inputs):
        return
    try:
        session.run(None, {item.name: np.ones(sizes[item.name], _DTYPES[item.type]) for item in inputs})
    except Exception as error:  # see above
        print(error, file=sys.stderr)


if __name__ == "__main__":
    main()
