"""What ONNX Runtime says, read: the one module that knows its words. Seen in ONNX Runtime 1.31."""

from __future__ import annotations

import re

from ..errors import CompiledNodesError, Kind, Reason, SessionError, first_line


def _exceptions() -> tuple[type[BaseException], ...]:
    try:
        from onnxruntime.capi import _pybind_state as native
    except ImportError:
        return (Exception,)
    found = [item for item in vars(native).values() if isinstance(item, type) and issubclass(item, Exception)]
    return (*found, RuntimeError, MemoryError) if found else (Exception,)


ORT_ERRORS = _exceptions()
"""All that ONNX Runtime raises: its exceptions have no common base, its checks raise RuntimeError, and C++'s
``bad_alloc`` arrives as MemoryError. Where they cannot be found, any exception."""

_NODE_NAME = re.compile(r" node with name '[^']*'| in node \([^)]*\)|Node \([^)]*\) | parameter \([^)]*\)")
_INVALID_NODE = re.compile(r"In Node, \(\"[^\"]*\", (\w+), .* , Error ")
_PLACE = re.compile(r"^/\S+\.(?:cc|h):\d+ [^\n]*?\)(?: const)? (?=[A-Z])")
_ERROR_CODE = re.compile(r"^\[ONNXRuntimeError\] : \d+ : (\w+) : ")
_OUT_OF_MEMORY = re.compile(
    r"failed to allocate|allocation failed|bad.?alloc|out of memory|cannot allocate|available memory|"
    r"resource temporarily unavailable|pthread",
    re.IGNORECASE,
)
"""Memory and threads, which a thread's stack needs memory for, ran out."""

_COMPILED_NODES = "model as it contains compiled nodes"


def session_error(error: BaseException, model: bytes) -> SessionError:
    """What ONNX Runtime raised, as our error.

    Args:
        error: one of ``ORT_ERRORS``.
        model: the serialized model it was raised of.
    """
    text = str(error) or type(error).__name__
    if _COMPILED_NODES in text:
        return CompiledNodesError(text)
    if isinstance(error, MemoryError) or _OUT_OF_MEMORY.search(text):
        reason = Reason(Kind.OUT_OF_MEMORY, f"ONNX Runtime got no memory for it: {_without_names(text)}")
    else:
        reason = Reason(Kind.REFUSED, f"ONNX Runtime refuses it: {_without_names(text)}")
    return SessionError(text, reason, _fx_node_named(text, model))


def without_code(text: str) -> str:
    """The first line of what the runtime said, with the name of its kind of error and without its number and the place
    in its sources."""
    return first_line(_ERROR_CODE.sub(r"\1: ", _PLACE.sub("", text.strip())))


def _without_names(text: str) -> str:
    """What the runtime said, without the name of the node, so that alike refusals are one reason."""
    said = without_code(text)
    return _NODE_NAME.sub("", _INVALID_NODE.sub(r"\1: ", said))


def _fx_node_named(text: str, model: bytes) -> str | None:
    """The FX node of the ONNX node that a text names."""
    import onnx  # not before something fails: what runs a model from the cache needs none of it

    words = set(re.split(r"[\s()'\",:]+", text))
    for node in onnx.load_from_string(model).graph.node:
        if node.name in words:
            return next((item.value for item in node.metadata_props if item.key == "fx_node"), None)
    return None
