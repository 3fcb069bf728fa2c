"""What ONNX Runtime raises. Without PyTorch, as what reads dumps asks for it too."""

from __future__ import annotations


def exceptions() -> tuple[type[BaseException], ...]:
    """All that ONNX Runtime raises: its exceptions have no common base, its checks raise RuntimeError, and C++'s
    ``bad_alloc`` arrives as MemoryError. Where they cannot be found, any exception."""
    try:
        from onnxruntime.capi import _pybind_state as native
    except ImportError:
        return (Exception,)
    found = [item for item in vars(native).values() if isinstance(item, type) and issubclass(item, Exception)]
    return (*found, RuntimeError, MemoryError) if found else (Exception,)
