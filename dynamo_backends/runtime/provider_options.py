"""The options of execution providers that this package sets by itself; what else a user gives is the user's.

Some options of some providers name libraries to load or files to read and write, and some are addresses of functions.
Nobody can list them all: ``is_own`` knows the harmless ones that are ours.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

_BFLOAT16_ON_OPENVINO = {"load_config": json.dumps({"CPU": {"INFERENCE_PRECISION_HINT": "bf16"}})}

PRECISIONS: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "OpenVINOExecutionProvider": {
        "highest": {"precision": "FP32"},
        "high": {"precision": "FP32"},
        "medium": _BFLOAT16_ON_OPENVINO,
    },
    "CUDAExecutionProvider": {"highest": {"use_tf32": "0"}, "high": {"use_tf32": "1"}, "medium": {"use_tf32": "1"}},
    "QNNExecutionProvider": {"highest": {"enable_htp_fp16_precision": "0"}},
}
"""The options by which a provider computes float32 as ``torch.get_float32_matmul_precision()`` has it."""

THREADS = {"OpenVINOExecutionProvider": "num_of_threads"}
"""The option of a provider whose threads are its own, not those of the session."""


def is_own(provider: str, option: str, value: str) -> bool:
    """Whether this package may have set an option of a provider to this value by itself."""
    if THREADS.get(provider) == option:
        return value.isdecimal()
    return any((option, value) in given.items() for given in PRECISIONS.get(provider, {}).values())
