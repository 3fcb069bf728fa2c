"""The machine and the library versions of a measurement; the memory of this process (Linux only, else ``None``)."""

from __future__ import annotations

import contextlib
import os
import platform
import re
from importlib import metadata
from pathlib import Path

LIBRARIES = ("torch", "onnxruntime", "onnxscript", "onnx-ir", "transformers", "torchao")


def machine() -> dict[str, object]:
    """Processor, cores, system and versions, without the machine's name."""
    versions = {"Python": platform.python_version()}
    for name in LIBRARIES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {
        "processor": _processor(),
        "architecture": platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": platform.system(),
        "versions": versions,
    }


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    lines = information.read_text(encoding="utf-8").splitlines() if information.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "processor of unknown make"


def resident() -> int | None:
    """The resident memory in bytes."""
    return _field("VmRSS")


def peak() -> int | None:
    """The peak of the resident memory since ``reset_peak``, in bytes."""
    return _field("VmHWM")


def reset_peak() -> bool:
    """Resets the peak; returns whether the system can."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # see proc(5)
    except OSError:
        return False
    return True


def used_on(device: str) -> int | None:
    """Bytes of a GPU's memory that all processes use, after its work is done; ``None`` for the CPU."""
    if not device.startswith("cuda"):
        return None
    import torch

    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def _field(name: str) -> int | None:
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    match = re.search(rf"^{name}:\s*(\d+) kB", status, re.MULTILINE)
    return int(match[1]) * 1024 if match else None
