"""Libraries of custom operators of ONNX Runtime: shared objects that bring kernels for other domains.

A library that was loaded once is known to every session that this process makes from then on, as its operators are to
the process's converters.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import onnxruntime

from ..errors import first_line
from .messages import ORT_ERRORS

VARIABLE = "DYNAMO_BACKENDS_CUSTOM_OP_LIBRARIES"
"""The variable of the environment that sets the option ``custom_op_libraries``."""

_loaded: tuple[str, ...] = ()
"""Absolute paths. Replaced, never changed."""


def check_libraries(value: object) -> None:
    """Checks the option ``custom_op_libraries``.

    Raises:
        TypeError: not a list of paths.
        ValueError: there is no such file.
    """
    if isinstance(value, (str, os.PathLike)) or not isinstance(value, (list, tuple)):
        raise TypeError(f"expected a list of paths of shared libraries, got {value!r}")
    for path in value:
        if not isinstance(path, str):
            raise TypeError(f"expected the path of a shared library, got {path!r} ({type(path).__name__})")
        if not os.path.isfile(path):
            raise ValueError(f"there is no file {path}")


def libraries_from_text(text: str) -> list[str]:
    """Paths that are separated as in ``PATH``."""
    return [path for path in text.split(os.pathsep) if path]


def libraries_of_environment() -> tuple[str, ...]:
    """The libraries that ``VARIABLE`` names, for what has no options: the commands that run a dump.

    Raises:
        ValueError: a path is wrong.
    """
    paths = libraries_from_text(os.environ.get(VARIABLE, ""))
    try:
        check_libraries(paths)
    except ValueError as error:
        raise ValueError(f"{VARIABLE}: {error}") from None
    return tuple(paths)


def load_libraries(paths: Sequence[str]) -> None:
    """Makes the operators of libraries known to the sessions that are made from now on.

    Raises:
        ValueError: a file is no library of custom operators for the installed ONNX Runtime, with what it said.
    """
    global _loaded
    for path in map(os.path.abspath, paths):
        if path in _loaded:
            continue
        try:
            onnxruntime.SessionOptions().register_custom_ops_library(path)
        except ORT_ERRORS as error:
            raise ValueError(f"option 'custom_op_libraries': {path}: {first_line(str(error))}") from error
        _loaded = (*_loaded, path)


def loaded_libraries() -> tuple[str, ...]:
    """The libraries that were loaded, by absolute path."""
    return _loaded


def register_libraries(options: onnxruntime.SessionOptions) -> None:
    """Makes the operators of all loaded libraries known to a session that is made with these options."""
    for path in _loaded:
        options.register_custom_ops_library(path)
