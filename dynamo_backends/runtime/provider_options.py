"""The options of execution providers that this package sets by itself.

A dump's options are only trusted if ``is_own`` knows them: some options of some providers name libraries to load or
files to write, or are addresses of functions, and no list of these would be complete.
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
"""A provider's options for each value of ``torch.get_float32_matmul_precision()``."""

THREADS = {"OpenVINOExecutionProvider": "num_of_threads"}
"""The option for the number of threads, of providers that do not use the session's threads."""


def is_own(provider: str, option: str, value: str) -> bool:
    """Whether this package may have set an option of a provider to this value by itself."""
    if THREADS.get(provider) == option:
        return value.isdecimal()
    return any((option, value) in options.items() for options in PRECISIONS.get(provider, {}).values())
