"""What this package knows of execution providers: their packages, and the options that it sets by itself.

A dump's options are only trusted if ``is_own`` knows them: some options of some providers name libraries to load or
files to write, or are addresses of functions, and no list of these would be complete.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

OPENVINO = "OpenVINOExecutionProvider"

PACKAGES: Mapping[str, str] = {
    OPENVINO: "onnxruntime-ep-openvino",
    "WebGpuExecutionProvider": "onnxruntime-ep-webgpu",
    "NvTensorRTRTXExecutionProvider": "onnxruntime-ep-nv-tensorrt-rtx",
    "CUDAExecutionProvider": "onnxruntime-gpu, instead of onnxruntime",
    "TensorrtExecutionProvider": "onnxruntime-gpu, instead of onnxruntime",
    "QNNExecutionProvider": "onnxruntime-qnn, instead of onnxruntime",
}
"""The package to install for a provider."""

CUDA = "CUDAExecutionProvider"

DEVICE_TYPES: Mapping[str, str] = {
    CUDA: "cuda",
    "TensorrtExecutionProvider": "cuda",
    "NvTensorRTRTXExecutionProvider": "cuda",
}
"""PyTorch's type of the device whose memory a provider reads and writes; the CPU's for all others."""

PROBED_IN_PROCESS = frozenset({"CPUExecutionProvider", CUDA})
"""Providers whose sessions need no probe in a subprocess: they raise if they do not support a model, and follow their
options of precision."""

FORBIDDEN_CUDA_OPTIONS: Mapping[str, str] = {
    "enable_cuda_graph": "a CUDA graph reads its arguments at fixed addresses, which change with each call",
    "user_compute_stream": "each session runs on PyTorch's default stream",
}
"""Options of CUDA's provider that users cannot give, and why."""

PLUGIN_OPTIONS: Mapping[str, Mapping[str, str]] = {
    OPENVINO: {
        "load_config": "OpenVINO's properties by device, as JSON: INFERENCE_PRECISION_HINT, INFERENCE_NUM_THREADS, "
        "NUM_STREAMS, CACHE_DIR",
        "reshape_input": "sizes of the inputs",
        "enable_causallm": "true or false",
        "hint_enable_gqa": "true or false",
        "dump_subgraphs": "true or false",
    },
    "WebGpuExecutionProvider": dict.fromkeys(
        (
            *(
                "preferredLayout",
                "enableGraphCapture",
                "enableInt64",
                "forceCpuNodeNames",
                "deviceId",
                "validationMode",
            ),
            *("enableRobustness", "preserveDevice", "maxStorageBufferBindingSize", "maxNumPendingDispatches"),
            *("storageBufferCacheMode", "uniformBufferCacheMode", "queryResolveBufferCacheMode"),
            *("defaultBufferCacheMode", "powerPreference", "dawnBackendType", "sessionBufferPoolGenerations"),
            *("multiRotaryCacheConcatOffset", "kvCacheQuantizationBits", "enablePIXCapture"),
        ),
        "",
    ),
}
"""The options that a plugin reads, of plugins that ignore others without a word (OpenVINO's 1.8.1, WebGPU's 0.4.0)."""

_CONFIG = "load_config"
_HINT, _NUM_THREADS = "INFERENCE_PRECISION_HINT", "INFERENCE_NUM_THREADS"


def _openvino(hint: str) -> dict[str, str]:
    """OpenVINO rounds float32 to bfloat16 on a CPU that has it, and to float16 on a GPU. The plugin ignores the option
    ``precision``. No GPU is asked for bfloat16, which was never tried."""
    return {_CONFIG: json.dumps({"CPU": {_HINT: hint}, "GPU": {_HINT: "f32"}})}


PRECISIONS: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    OPENVINO: {"highest": _openvino("f32"), "high": _openvino("f32"), "medium": _openvino("bf16")},
    CUDA: {"highest": {"use_tf32": "0"}, "high": {"use_tf32": "1"}, "medium": {"use_tf32": "1"}},
    "QNNExecutionProvider": {"highest": {"enable_htp_fp16_precision": "0"}},
}
"""A provider's options for each value of ``torch.get_float32_matmul_precision()``."""

_DECIDED_BY_USER = {OPENVINO: {"precision", "device_type", "num_of_threads"}}
"""Options of builds of ONNX Runtime with OpenVINO; with one of them, we set none."""


def precision_options(provider: str, precision: str) -> Mapping[str, str]:
    """A provider's options for a value of ``torch.get_float32_matmul_precision()``; empty if not known."""
    return PRECISIONS.get(provider, {}).get(precision, {})


def thread_options(provider: str, threads: int) -> Mapping[str, str]:
    """The options for the number of threads, of a provider that does not use the session's threads."""
    return {_CONFIG: json.dumps({"CPU": {_NUM_THREADS: str(threads)}})} if provider == OPENVINO else {}


def with_defaults(provider: str, given: Mapping[str, str], defaults: Mapping[str, str]) -> dict[str, str]:
    """Options with defaults for those that are not given, also inside OpenVINO's ``load_config``."""
    if _DECIDED_BY_USER.get(provider, set()) & given.keys():
        return dict(given)
    both = {**defaults, **given}
    if _CONFIG in given and _CONFIG in defaults:
        config, ours = _by_device(given[_CONFIG]), _by_device(defaults[_CONFIG])
        if config is not None and ours is not None:  # builds of ONNX Runtime with OpenVINO also take a path
            both[_CONFIG] = json.dumps(
                {device: {**ours.get(device, {}), **config.get(device, {})} for device in {**ours, **config}}
            )
    return both


def _by_device(config: str) -> dict[str, dict[str, object]] | None:
    """OpenVINO's properties of each device; ``None`` if the text is no such JSON."""
    try:
        parsed = json.loads(config)
    except (TypeError, ValueError):
        return None
    return parsed if isinstance(parsed, dict) and all(isinstance(item, dict) for item in parsed.values()) else None


def is_own(provider: str, option: str, value: str) -> bool:
    """Whether this package may have set an option of a provider to this value by itself, or it chooses a device."""
    if option == "device":
        return True
    if provider == OPENVINO and option == _CONFIG:
        settings = [item for items in (_by_device(value) or {"": {"": ""}}).values() for item in items.items()]
        return all(
            (key == _HINT and text in ("f32", "bf16")) or (key == _NUM_THREADS and str(text).isdecimal())
            for key, text in settings
        )
    return any((option, value) in options.items() for options in PRECISIONS.get(provider, {}).values())
