"""Runs candidates: models that may be wrong, be refused, or crash, each in a process that is not this one.

::

    with Runner() as runner:
        outcome = runner.run(model, {"x": x}, settings)
        outcome.kind         # "ran", "refused", "failed" or "crashed"
"""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir

from ..python_process import Ended, Worker, WorkerStartError, how_it_ended
from .execution import Settings, array_of, bits_of
from .reading import DumpError

Feeds: TypeAlias = "Mapping[str, np.ndarray]"
"""Tensors by name, of any dtype that ONNX has."""

_PROTOBUF_LIMIT = 2**31 - 2**24
LONGEST = 600.0
"""Seconds that a candidate may take."""

_LARGE = 2**20
"""Bytes of an array that is written once, however many candidates take it."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a candidate.

    Attributes:
        kind: ``built`` (it was not to run), ``ran``, ``refused`` (no session), ``failed`` (no results), ``crashed``.
        message: what ONNX Runtime said, or how the process ended.
        outputs: by name, in the model's order, if it ran.
    """

    kind: str
    message: str = ""
    outputs: Feeds = dataclasses.field(default_factory=dict)


class Runner:
    """Runs candidates one after the other in a process that is started anew after a crash.

    Attributes:
        count: of candidates that ran.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="dynamo_backends_bisect_")
        self._worker = Worker(f"{__package__}.worker")
        self._numbers = itertools.count()
        self._written: dict[int, tuple[np.ndarray, Path]] = {}
        self.count = 0

    def __enter__(self) -> Runner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._worker.stop()
        self._folder.cleanup()

    def run(self, model: ir.Model | Path, feeds: Feeds | None, settings: Settings) -> Outcome:
        """Makes a session of a model, and runs it.

        Args:
            model: the model, or its path.
            feeds: its inputs, more than it has is no matter; ``None``: the session is made, and not run.
            settings: of the session.

        Raises:
            DumpError: the process that runs models does not start.
        """
        self.count += 1
        folder = Path(self._folder.name) / str(next(self._numbers))
        folder.mkdir()
        path = model if isinstance(model, Path) else write_model(model, folder)
        request: dict[str, Any] = {"model": str(path), "settings": settings.as_json(), "feeds": None}
        if isinstance(model, ir.Model):
            request["external_data"] = _external_data(model) or str(folder)
            taken = {str(value.name) for value in model.graph.inputs}
            feeds = None if feeds is None else {name: feeds[name] for name in feeds if name in taken}
        if feeds is not None:
            large = {name: self._once(array) for name, array in feeds.items() if array.nbytes >= _LARGE}
            small = {name: array for name, array in feeds.items() if name not in large}
            request["feeds"] = [write_arrays(folder / "feeds.npz", small), *large.values()]
            request["names"] = [*small, *large]
            request["outputs"] = str(folder / "outputs.npz")
        outcome = self._ask(request)
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
        return outcome

    def _once(self, array: np.ndarray) -> Stored:
        """Where a large array is."""
        if id(array) not in self._written:
            path = Path(self._folder.name) / f"array_{len(self._written)}.npy"
            np.save(path, bits_of(array)[0])
            self._written[id(array)] = array, path  # while it is held, no other has its number
        return str(self._written[id(array)][1]), [bits_of(array)[1]]

    def _ask(self, request: dict[str, Any]) -> Outcome:
        try:
            answer = self._worker.ask(request, LONGEST)
        except WorkerStartError as error:  # nothing that a model could be blamed for
            raise DumpError(str(error)) from error
        if isinstance(answer, Ended):
            return Outcome("crashed", did_not_end() if answer.timed_out else how_it_ended(answer.code))
        if answer["kind"] != "ran":
            return Outcome(answer["kind"], answer["message"])
        return Outcome("ran", "", dict(zip(answer["names"], read_arrays(*answer["outputs"]), strict=True)))


def did_not_end() -> str:
    """How a process ended that was stopped."""
    return f"it did not end in {LONGEST:g} seconds"


def write_model(model: ir.Model, folder: Path, name: str = "model.onnx", *, whole: bool = False) -> Path:
    """Writes a model; what does not fit into one file has its weights in another beside it.

    Args:
        model: the model; weights that are in a file already stay there.
        folder: where.
        name: of the file.
        whole: whether these are written too, so that the folder has all.
    """
    path = folder / name
    values = [value.const_value for value in model.graph.initializers.values() if value.const_value is not None]
    external = [value for value in values if isinstance(value, ir.ExternalTensor)]
    size = sum(value.nbytes for value in values if whole or not isinstance(value, ir.ExternalTensor))
    if size >= _PROTOBUF_LIMIT:
        ir.save(model, path, external_data=f"{name}.data")
        return path
    if whole and external:
        model = model.clone()
        ir.external_data.load_to_model(model)
    path.write_bytes(ir.to_proto(model).SerializeToString())
    return path


def _external_data(model: ir.Model) -> str:
    """The folder that has weights of a model, or ``""``."""
    values = (value.const_value for value in model.graph.initializers.values())
    return next((str(value.base_dir) for value in values if isinstance(value, ir.ExternalTensor)), "")


Stored: TypeAlias = "tuple[str, list[int]]"
"""A file of arrays, and ONNX's numbers of their dtypes."""


def write_arrays(path: Path, arrays: Feeds) -> Stored:
    """Writes arrays in a form that needs no pickle."""
    stored = [(array.astype(str), _STRING) if array.dtype.kind == "O" else bits_of(array) for array in arrays.values()]
    by_position: dict[str, Any] = {str(i): array for i, (array, _) in enumerate(stored)}
    np.savez(path, **by_position)
    return str(path), [number for _, number in stored]


def read_arrays(path: str, numbers: Sequence[int]) -> list[np.ndarray]:
    """What ``write_arrays`` wrote, or a ``.npy`` file, whose array stays there."""
    if path.endswith(".npy"):
        return [array_of(np.asarray(np.load(path, mmap_mode="r")), numbers[0])]
    with np.load(path) as arrays:
        found = [(arrays[str(i)], number) for i, number in enumerate(numbers)]
    return [array.astype(object) if number == _STRING else array_of(array, number) for array, number in found]


_STRING = 8
"""ONNX's number of the dtype."""
