"""Finds captured calls in a folder, and reads their descriptions. Needs no PyTorch."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FORMAT = 1
"""The version of ``call.json``."""

_FILES = ("input", "output", "grad_inputs", "grad_outputs", "reference")


class CaptureError(ValueError):
    """A folder is not a capture, or cannot be read."""


@dataclasses.dataclass(frozen=True)
class CapturedCall:
    """The description of one captured call."""

    folder: Path
    operator: str
    number: int  # counted for each operator
    level: str  # "torch" or "aten"
    source: str  # the user's line and the library's, or ""
    args: Sequence[Any]  # dtypes, shapes and numbers, without the elements of tensors
    kwargs: Mapping[str, Any]
    bytes: int  # the size of its files
    files: Sequence[str]  # those of "input", "output", "grad_inputs", "grad_outputs", "reference" that exist
    module_path: str = ""  # of the ``nn.Module`` that made the call
    module: str = ""  # the module that registers the operator, if it must be imported first
    not_again: str = ""  # why the call cannot be run again; "" if no reason is known

    @property
    def call(self) -> str:
        """The call as text: ``torch.Tensor.add(float32[2, 3], 1)``."""
        named = [f"{key}={_as_text(item)}" for key, item in self.kwargs.items()]
        return f"{self.operator}({', '.join([*map(_as_text, self.args), *named])})"


def as_argument(path: str | os.PathLike[str]) -> str:
    """A path as an argument of a command: ``./-a`` for ``-a``, which would be an option."""
    text = os.fspath(path)
    return os.path.join(os.curdir, text) if text.startswith("-") else text


def find_calls(folder: str | os.PathLike[str]) -> list[CapturedCall]:
    """Finds the calls in a folder of ``OpCapture``, or in any folder of it; sorted by run, operator and number.

    Raises:
        CaptureError: the folder does not exist or has no calls, or a description cannot be read.
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
        raise CaptureError(f"{file} is not the description of a captured call, or has another version")

    def field(key: str, kind: type) -> Any:
        if not isinstance(found.get(key), kind):
            raise CaptureError(f"{file}: {key!r} is missing or not of type {kind.__name__}")
        return found[key]

    folder = file.parent
    files = [name for name in _FILES if (folder / f"{name}.pth").exists()]
    not_again = str(found.get("not_again", ""))
    if "input" not in files:
        not_again = not_again or "its arguments are missing"
    elif files == ["input"]:
        not_again = not_again or "it raised an error or did not finish when it was captured"
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
        module_path=str(found.get("module_path", "")),
        module=str(found.get("module", "")),
        not_again=not_again,
    )


def _as_text(value: Any) -> str:
    if isinstance(value, dict) and "dtype" in value and "shape" in value:
        return f"{value['dtype']}{value['shape']}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_as_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_as_text, value)) + "]"
    return str(value)
