"""Captured calls: finds them in a folder, and runs them again.

Only tensors and plain values are read from files, and only PyTorch's functions and registered operators are run.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.utils import _pytree as pytree

from ..common.random_state import RandomState, unchanged_random_state
from ..numerics.function_runs import passed
from .call import CallText, named_arguments, named_results
from .names import function_of
from .value_files import FORMAT, NotStoredError, decode

_FILES = ("input", "output", "grad_inputs", "grad_outputs", "reference")


class CaptureError(ValueError):
    """A folder is not a capture, or cannot be read."""


@dataclasses.dataclass(kw_only=True)
class CapturedCall(CallText):
    """One captured call: the content of its ``call.json``, and what its folder has."""

    format: int
    torch: str = ""  # the version
    not_again: str = ""  # why the call cannot be run again; "" if no reason is known
    folder: Path = Path()
    bytes: int = 0  # the size of its files
    files: Sequence[str] = ()  # those of "input", "output", "grad_inputs", "grad_outputs", "reference" that exist

    def read(self, what: str) -> dict[str, Any]:
        """The values in a file; none if it does not exist, except in that of the arguments.

        Raises:
            CaptureError: it is missing, damaged or not of a capture.
        """
        path = self.folder / f"{what}.pth"
        if what != "input" and not path.exists():
            return {}
        try:
            found = torch.load(path, weights_only=True, map_location="cpu")
        except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError, OSError) as error:
            raise CaptureError(f"{path} is missing, damaged or not of a capture: {type(error).__name__}") from error
        if not isinstance(found, dict):
            raise CaptureError(f"{path} is not a file of a capture")
        return found


def find_calls(folder: str | os.PathLike[str]) -> list[CapturedCall]:
    """Finds the calls in a folder of ``OpCapture``, or in any folder of it; sorted by run, operator and number.

    Raises:
        CaptureError: the folder does not exist or has no calls, or a description cannot be read.
    """
    path = Path(folder)
    if not path.is_dir():
        raise CaptureError(f"there is no folder {str(path)!r}")
    calls = [_described(file) for file in path.rglob("call.json")]
    if not calls:
        raise CaptureError(f"no captured operator in {str(path)!r}: a call is a folder with a call.json")
    return sorted(calls, key=lambda call: (str(call.folder.parent), call.number))


def _described(file: Path) -> CapturedCall:
    try:
        found = msgspec.json.decode(file.read_bytes(), type=CapturedCall)
    except (msgspec.DecodeError, RecursionError) as error:
        raise CaptureError(f"{file} is damaged or not the description of a captured call: {error}") from error
    if found.format != FORMAT:
        raise CaptureError(f"{file} has format {found.format}; this version reads {FORMAT}")
    folder = file.parent
    files = [name for name in _FILES if (folder / f"{name}.pth").exists()]
    reason = "" if "input" in files else "its arguments are missing"
    if files == ["input"]:
        reason = "it raised an error or did not finish when it was captured"
    size = sum((folder / f"{name}.pth").stat().st_size for name in files)
    return dataclasses.replace(found, folder=folder, bytes=size, files=files, not_again=found.not_again or reason)


def run_call(
    captured: CapturedCall, tool: AbstractContextManager[object], *, forward_only: bool = False
) -> dict[str, torch.Tensor]:
    """Runs a captured call again with a tool, and its backward if gradients were captured.

    Returns:
        The results by name: ``output``, ``output[1]``, ``args[0] after it``.

    Raises:
        CaptureError: a file is missing or invalid, a value was not stored, or the operator does not exist.
        Whatever the operator raises.
    """
    given = captured.read("input")
    try:
        args, kwargs = decode(given.get("args")), decode(given.get("kwargs"))
        function = function_of(captured.name)
    except (NotStoredError, LookupError) as error:
        raise CaptureError(f"{captured.folder}: {error}") from error
    if not isinstance(args, tuple) or not isinstance(kwargs, dict):
        raise CaptureError(f"{captured.folder / 'input.pth'} does not hold arguments")
    tangents = {} if forward_only else captured.read("grad_outputs")
    states = captured.read("rng_state")
    with unchanged_random_state(), torch.set_grad_enabled(bool(tangents)):
        args, kwargs = pytree.tree_map_only(torch.Tensor, _passed, (args, kwargs))
        if states and all(isinstance(state, torch.Tensor) for state in states.values()):  # not beyond the size limit
            RandomState.from_dict(states).restore()
        with tool:
            returned = function(*args, **kwargs)
            results = named_results(returned, named_arguments(args, kwargs))
            outputs = {name: value for name, value in results.items() if name in tangents and value.requires_grad}
            if outputs:
                torch.autograd.backward(list(outputs.values()), [tangents[name] for name in outputs])
    return results


def _passed(leaf: torch.Tensor) -> torch.Tensor:
    return passed(leaf) if leaf.requires_grad else leaf  # a leaf of autograd may not be written to
