"""Libraries of custom operators: shared objects with kernels for other domains.

Once loaded, a library is registered with every session that this process makes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import onnxruntime

from ..common.fork_safety import Lock
from ..errors import first_line
from .messages import ORT_ERRORS

VARIABLE = "DYNAMO_BACKENDS_CUSTOM_OP_LIBRARIES"
"""The environment variable that sets the option ``custom_op_libraries``."""

_loaded: tuple[str, ...] = ()
"""Absolute paths. Replaced, never mutated."""

_loading = Lock()


def check_libraries(value: object) -> None:
    """Checks the option ``custom_op_libraries``.

    Raises:
        TypeError: not a list of paths.
        ValueError: a file does not exist.
    """
    if isinstance(value, (str, os.PathLike)) or not isinstance(value, (list, tuple)):
        raise TypeError(f"expected a list of paths of shared libraries, got {value!r}")
    for path in value:
        if not isinstance(path, str):
            raise TypeError(f"expected the path of a shared library, got {path!r} ({type(path).__name__})")
        if not os.path.isfile(path):
            raise ValueError(f"there is no file {path}")


def libraries_from_text(text: str) -> list[str]:
    """Paths separated as in ``PATH``."""
    return [path for path in text.split(os.pathsep) if path]


def libraries_of_environment() -> tuple[str, ...]:
    """The libraries in ``VARIABLE``, for commands that run a dump and have no options.

    Raises:
        ValueError: a file does not exist.
    """
    paths = libraries_from_text(os.environ.get(VARIABLE, ""))
    try:
        check_libraries(paths)
    except ValueError as error:
        raise ValueError(f"{VARIABLE}: {error}") from None
    return tuple(paths)


def load_libraries(paths: Sequence[str]) -> None:
    """Loads libraries for all sessions made from now on.

    Raises:
        ValueError: ONNX Runtime cannot load a file; the message says why.
    """
    global _loaded
    with _loading:
        for path in map(os.path.abspath, paths):
            if path in _loaded:
                continue
            try:
                onnxruntime.SessionOptions().register_custom_ops_library(path)
            except ORT_ERRORS as error:
                raise ValueError(f"option 'custom_op_libraries': {path}: {first_line(str(error))}") from error
            _loaded = (*_loaded, path)


def loaded_libraries() -> tuple[str, ...]:
    """The absolute paths of loaded libraries."""
    return _loaded


def register_libraries(options: onnxruntime.SessionOptions) -> None:
    """Registers all loaded libraries with a session that will be made with ``options``."""
    for path in _loaded:
        options.register_custom_ops_library(path)
