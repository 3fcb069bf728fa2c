"""ONNX Runtime's exceptions and messages: the only module that parses them. Tested with ONNX Runtime 1.31 and 1.32."""

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
"""All that ONNX Runtime raises. Its exceptions have no common base, its checks raise RuntimeError, and C++'s
``bad_alloc`` becomes MemoryError. Any exception, if its exceptions cannot be listed."""

_NODE_NAME = re.compile(r" node with name '[^']*'| in node \([^)]*\)|Node \([^)]*\) | parameter \([^)]*\)")
_INVALID_NODE = re.compile(r"In Node, \(\"[^\"]*\", (\w+), .* , Error ")
_SOURCE_LINE = re.compile(r"^/\S+\.(?:cc|h):\d+ [^\n]*?\)(?: const)? (?=[A-Z])")
_ERROR_CODE = re.compile(r"^\[ONNXRuntimeError\] : \d+ : (\w+) : ")
_LAST_CODE = re.compile(r"^.*\[ONNXRuntimeError\] : \d+ : (\w+) : ", re.DOTALL)
_OUT_OF_MEMORY = re.compile(
    r"failed to allocate|allocation failed|bad.?alloc|out of memory|cannot allocate|available memory|"
    r"resource temporarily unavailable|pthread",
    re.IGNORECASE,
)
"""Out of memory, or of threads: a thread's stack needs memory."""

_LINES_OF_SIZES = re.compile(r"(?:\n\s*index: \d+ Got: .*)+")

_COMPILED_NODES = "model as it contains compiled nodes"


def session_error(error: BaseException, model: bytes) -> SessionError:
    """Converts one of ``ORT_ERRORS``, raised for a serialized model, to a SessionError."""
    text = str(error) or type(error).__name__
    if _COMPILED_NODES in text:
        return CompiledNodesError(text)
    if isinstance(error, MemoryError) or _OUT_OF_MEMORY.search(text):
        reason = Reason(Kind.OUT_OF_MEMORY, f"ONNX Runtime ran out of memory: {_without_names(text)}")
    else:
        reason = Reason(Kind.REJECTED, f"ONNX Runtime rejects it: {_without_names(text)}")
    return SessionError(text, reason, _fx_node_named(text, model))


def without_code(text: str) -> str:
    """The first line of a message, with its kind of error, without the error number and the line of source code.

    The sizes that ONNX Runtime did not get are in further lines.
    """
    text = _LINES_OF_SIZES.sub(lambda found: " " + "; ".join(map(str.strip, found[0].strip().split("\n"))), text)
    return first_line(_ERROR_CODE.sub(r"\1: ", _SOURCE_LINE.sub("", text.strip())))


def of_library(text: str) -> str:
    """The message of a provider's library, in one line: ONNX Runtime writes its own function and error code before it,
    and OpenVINO has what is wrong in the last of several lines."""
    return " ".join(_LAST_CODE.sub(r"\1: ", text).split())


def _without_names(text: str) -> str:
    """A message without the name of the node, so that equal errors have equal reasons."""
    return _NODE_NAME.sub("", _INVALID_NODE.sub(r"\1: ", without_code(text)))


def _fx_node_named(text: str, model: bytes) -> str | None:
    """The FX node of the ONNX node that a message names."""
    import onnx  # only after an error: a model from the cache runs without it

    words = set(re.split(r"[\s()'\",:]+", text))
    for node in onnx.load_from_string(model).graph.node:
        if node.name in words:
            return next((item.value for item in node.metadata_props if item.key == "fx_node"), None)
    return None
