"""What a compiled graph depends on besides the graph and the options: versions, sources, the processor, settings.

``obstacle`` names what cannot be part of a key, so that nothing is cached.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import sys
import time
from importlib import metadata
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from torch._inductor.compiler_bisector import CompilerBisector

from passes.engine import registry

from ..exporter.registration import registered_targets
from ..graphs.graph_json import CannotStoreError
from ..options import Options
from ..runtime.providers import float32_matmul_precision

_LIBRARIES = ("onnx", "onnx_ir", "onnxscript", "sympy")
"""Libraries besides PyTorch, ONNX Runtime and NumPy; they may not be imported."""

_OURS = (Path(__file__).parent.parent, Path(registry.__file__).parent.parent)
"""Folders whose sources are part of the key."""

_SOURCES_CHANGED = "sources that cannot be read, or changed"

_STARTED = time.time()
"""When this module was imported, with the first of our backends."""

_CONVERTERS = "dynamo_backends.exporter.converters.registry"
_TORCHLIB = "onnxscript.function_libs.torch_lib.registration"


def obstacle(options: Options) -> str | None:
    """Why compiled graphs cannot be cached here, as the reason of a counter; ``None`` if they can."""
    if not registry.are_only_built_in():
        return "registered passes"
    if _has_registered_converters():
        return "registered converters"
    if options.custom_op_libraries:
        return "custom operator libraries"
    if CompilerBisector.get_backend() is not None:
        return "CompilerBisector is running"
    if is_any_editable():
        return "an editable install of a library"
    return None


@functools.cache
def is_any_editable() -> bool:
    """Whether a library is an editable install (``pip install -e``): its version does not identify its content. Ours
    may be, because its sources are part of the key."""
    return any(_is_editable(name) for name in ("torch", *_LIBRARIES))


def _is_editable(name: str) -> bool:
    try:
        origin = metadata.distribution(name).read_text("direct_url.json")  # PEP 610
    except metadata.PackageNotFoundError:  # imported from its source folder
        return True
    return bool(json.loads(origin or "{}").get("dir_info", {}).get("editable"))


def _has_registered_converters() -> bool:
    """Whether a converter is registered besides ours and torchlib's. A registry that is not imported has none."""
    if registered_targets():
        return True
    ours, torchlib = sys.modules.get(_CONVERTERS), sys.modules.get(_TORCHLIB)
    if ours is not None and not all(_is_from(function, "dynamo_backends") for function in ours.CONVERTERS.values()):
        return True
    if torchlib is None:
        return False
    registered = (item for functions in torchlib.default_registry.values() for item in functions.overloads)
    return not all(_is_from(function, "onnxscript") for function in registered)


def _is_from(function: object, package: str) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    function = getattr(function, "function", function)  # an onnxscript function wraps a Python function
    return str(getattr(function, "__module__", "")).split(".")[0] == package


def describe() -> dict[str, object]:
    """Settings that can change within a process."""
    return {
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "fill": torch.utils.deterministic.fill_uninitialized_memory,
        "dtype": str(torch.get_default_dtype()),
        "precision": float32_matmul_precision(),
    }


@functools.cache
def fixed() -> str:
    """The SHA-256 of what cannot change within a process: versions, sources, the processor."""
    parts = [
        *(f"{name} {version}" for name, version in sorted(versions().items())),
        *(f"{name} {digest}" for name, digest in sorted(sources().items())),
        processor(),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


@functools.cache
def versions() -> dict[str, str]:
    """The versions of Python and the libraries, by name."""
    return {
        "python": sys.version,
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "onnxruntime": f"{onnxruntime.__version__} {onnxruntime.get_build_info()}",
        "numpy": np.__version__,
        **{name: metadata.version(name) for name in _LIBRARIES},
    }


@functools.cache
def sources() -> dict[str, str]:
    """The SHA-256 of each of our source files, including passes, at the first call.

    Raises:
        CannotStoreError: one cannot be read, or is newer than this process, which may have imported an older one.
    """
    return _sources_now()


def _sources_now() -> dict[str, str]:
    digests = {}
    try:
        for folder in _OURS:
            for path in sorted([*folder.rglob("*.py"), *folder.rglob("*.json")]):
                if path.stat().st_mtime > _STARTED:
                    raise CannotStoreError(_SOURCES_CHANGED)
                digests[f"{folder.name}/{path.relative_to(folder)}"] = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise CannotStoreError(_SOURCES_CHANGED) from error
    return digests


def check_sources() -> None:
    """Checks that our source files did not change since ``sources``. The compiler is imported with the first compile,
    which may be long after.

    Raises:
        CannotStoreError: one changed, or cannot be read.
    """
    if _sources_now() != sources():
        raise CannotStoreError(_SOURCES_CHANGED)


@functools.cache
def processor() -> str:
    """The processor and its features, by which kernels are chosen."""
    parts = [platform.machine(), sys.byteorder, torch.backends.cpu.get_cpu_capability()]
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as lines:
            for line in lines:
                if not line.strip():  # the next processor
                    break
                if line.startswith(("vendor_id", "model name", "flags", "Features", "CPU part")):
                    parts.append(line.strip())
    else:
        parts.append(platform.processor())
    return "\n".join(parts)
