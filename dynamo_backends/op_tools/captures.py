"""Folders of captured operators, read without PyTorch: which calls there are, of what, and from where."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FORMAT = 1
"""Of ``call.json``."""

_FILES = ("input", "output", "grad_inputs", "grad_outputs", "reference")


class CaptureError(ValueError):
    """A folder is no capture, or one that cannot be read."""


@dataclasses.dataclass(frozen=True)
class CapturedCall:
    """One captured call.

    Attributes:
        folder: of its files.
        operator: ``torch.Tensor.add``.
        number: of the call, among those of the operator.
        level: ``torch`` or ``aten``.
        source: the user's line, or ``""``.
        args, kwargs: without values: dtypes, shapes, numbers.
        bytes: of its files.
        files: which of ``input``, ``output``, ``grad_inputs``, ``grad_outputs``, ``reference`` are there.
        module: the module that registers the operator, if one is to be imported for it; else ``""``.
        not_again: why the call cannot be made again; ``""`` if nothing is known against it.
    """

    folder: Path
    operator: str
    number: int
    level: str
    source: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    bytes: int
    files: Sequence[str]
    module: str = ""
    not_again: str = ""

    @property
    def call(self) -> str:
        """The call in words: ``torch.Tensor.add(float32[2, 3], 1)``."""
        named = [f"{key}={_in_words(item)}" for key, item in self.kwargs.items()]
        return f"{self.operator}({', '.join([*map(_in_words, self.args), *named])})"


def as_argument(path: str | os.PathLike[str]) -> str:
    """A path as an argument of a command: one that begins with ``-`` would be an option."""
    text = os.fspath(path)
    return os.path.join(os.curdir, text) if text.startswith("-") else text


def find_calls(folder: str | os.PathLike[str]) -> list[CapturedCall]:
    """The calls in a folder, at any depth: of one call, an operator, a run, a rank or all.

    Args:
        folder: as ``OpCapture`` wrote it.

    Returns:
        In the order of operators and numbers.

    Raises:
        CaptureError: there is no such folder, no call in it, or a description that cannot be read.
    """
    path = Path(folder)
    if not path.is_dir():
        raise CaptureError(f"there is no folder {str(path)!r}")
    calls = [_read(file) for file in path.rglob("call.json")]
    if not calls:
        raise CaptureError(f"no captured operator in {str(path)!r}: a call is a folder with a call.json")
    return sorted(calls, key=lambda call: (str(call.folder.parent), call.number))


def _read(file: Path) -> CapturedCall:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CaptureError(f"{file} is damaged: {error}") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise CaptureError(f"{file} is no description of a captured call, or of another version")

    def field(key: str, kind: type) -> Any:
        if not isinstance(found.get(key), kind):
            raise CaptureError(f"{file}: {key!r} is missing or no {kind.__name__}")
        return found[key]

    folder = file.parent
    files = [name for name in _FILES if (folder / f"{name}.pth").exists()]
    not_again = str(found.get("not_again", ""))
    if "input" not in files:
        not_again = not_again or "its arguments are not there"
    elif files == ["input"]:
        not_again = not_again or "it raised an error when it was captured, or was not finished"
    return CapturedCall(
        folder=folder,
        operator=field("operator", str),
        number=field("number", int),
        level=field("level", str),
        source=field("source", str),
        args=field("args", list),
        kwargs=field("kwargs", dict),
        bytes=sum((folder / f"{name}.pth").stat().st_size for name in files),
        files=files,
        module=str(found.get("module", "")),
        not_again=not_again,
    )


def _in_words(value: Any) -> str:
    if isinstance(value, dict) and "dtype" in value and "shape" in value:
        return f"{value['dtype']}{value['shape']}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_in_words(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_in_words, value)) + "]"
    return str(value)
