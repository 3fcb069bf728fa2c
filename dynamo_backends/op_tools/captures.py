"""Finds captured calls in a folder, and reads their descriptions. Needs no PyTorch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

FORMAT = 2
"""The version of ``call.json``."""

_FILES = ("input", "output", "grad_inputs", "grad_outputs", "reference")


class CaptureError(ValueError):
    """A folder is not a capture, or cannot be read."""


class Description(msgspec.Struct, kw_only=True):
    """The content of ``call.json``."""

    format: int = FORMAT
    operator: str
    number: int  # counted for each operator
    level: str  # "torch" or "aten"
    call: str  # the operator and its arguments, as text: ``torch.Tensor.add(f32[2, 3], 1)``
    source: str  # the user's line and the library's, or ""
    module_path: str = ""  # of the ``nn.Module`` that made the call
    args: list[Any]  # dtypes, shapes and numbers, without the elements of tensors
    kwargs: dict[str, Any]
    torch: str = ""  # the version
    module: str = ""  # the module that registers the operator, if it must be imported first
    not_again: str = ""  # why the call cannot be run again; "" if no reason is known


class CapturedCall(Description, kw_only=True):
    """One captured call."""

    folder: Path
    bytes: int  # the size of its files
    files: list[str]  # those of "input", "output", "grad_inputs", "grad_outputs", "reference" that exist


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
        found = msgspec.json.decode(file.read_bytes(), type=Description)
    except (msgspec.DecodeError, RecursionError) as error:
        raise CaptureError(f"{file} is damaged or not the description of a captured call: {error}") from error
    if found.format != FORMAT:
        raise CaptureError(f"{file} has format {found.format}; this version reads {FORMAT}")
    folder = file.parent
    files = [name for name in _FILES if (folder / f"{name}.pth").exists()]
    if "input" not in files:
        found.not_again = found.not_again or "its arguments are missing"
    elif files == ["input"]:
        found.not_again = found.not_again or "it raised an error or did not finish when it was captured"
    size = sum((folder / f"{name}.pth").stat().st_size for name in files)
    return CapturedCall(**msgspec.structs.asdict(found), folder=folder, bytes=size, files=files)
