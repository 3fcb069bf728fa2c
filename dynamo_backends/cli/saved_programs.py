"""What is in a file of saved graphs, for ``dynamo-backends show FILE``; nothing in the file is executed.

PyTorch's files are pickles in pickles, whose loading calls whatever they name. Here each class and function is replaced
by a placeholder that keeps what it gets.
"""

from __future__ import annotations

import dataclasses
import io
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..cache.program_record import from_record
from ..graphs.artifacts import GraphName
from ..options import Options
from ..partition.program import Program
from ..pipeline.program_payload import read_content


@dataclasses.dataclass(frozen=True)
class SavedProgram:
    """A graph of a file.

    Attributes:
        name: of the graph in the process that saved it.
        program: what runs; its options are the defaults.
        weights: the names of the arguments that become constants of sessions, as in ``state_dict``.
        versions: of the libraries that compiled it.
    """

    name: GraphName
    program: Program
    weights: list[str]
    versions: Mapping[str, str]


def saved_programs(path: Path) -> list[SavedProgram]:
    """The graphs in a file that ``save_compiled_function`` or ``save_cache_artifacts`` made.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no such file, is damaged, or has no graph of ours.
    """
    content = path.read_bytes()
    if content.startswith(_MARK):
        content = content[len(_MARK) + 1 :]
    try:
        roots = [_load(content)] if content[:1] == _PICKLE else _artifacts(content)
        items = _items(roots, _MOST_BYTES * len(content))
        states = [item.state for item in items if type(item).__name__ == "ProgramPayload"]
        found = [_program(state) for state in {(_name(state), state["content"]): state for state in states}.values()]
    except _DAMAGED as error:
        message = f"{path} is damaged, or not a file of save_compiled_function or save_cache_artifacts"
        raise ValueError(f"{message}: {type(error).__name__}: {error}") from error
    if not found:
        raise ValueError(f"{path} has no graphs of onnxrt")
    return sorted(found, key=lambda saved: (saved.name.index, _DIRECTIONS.index(saved.name.direction)))


_DIRECTIONS = ("inference", "forward", "backward")

_MARK = b"PT2AOT"
"""With it, and a byte for the version, begins a file that ``save_compiled_function`` of PyTorch 2.15 made."""

_PICKLE = b"\x80"
"""The first byte of a pickle."""

_DAMAGED = (
    *(pickle.UnpicklingError, EOFError, AssertionError, ValueError, LookupError, TypeError, AttributeError),
    *(RuntimeError, OverflowError, MemoryError),
)
"""What a damaged pickle or record may raise."""

_MOST_BYTES = 20
"""How many times the file's size all its pickles in pickles may have: an honest file has some four."""


def _artifacts(content: bytes) -> list[bytes]:
    from ..graphs.aot_serialization import artifact_contents  # imported lazily: it imports Inductor

    return artifact_contents(content)


def _name(state: Mapping[str, Any]) -> GraphName:
    named = state["name"].state
    return GraphName(int(named["index"]), str(named["direction"]))


def _program(state: Mapping[str, Any]) -> SavedProgram:
    content = read_content(state["content"])
    name = _name(state)
    if name.direction not in _DIRECTIONS:
        raise ValueError(f"{name.direction!r} is no direction of a graph")
    weights = [weight for weight, _ in content.weights.values()]
    return SavedProgram(name, from_record(content.record, None, Options()), weights, content.versions)


class _Placeholder:
    """In place of an object of a class, or of the result of a function."""

    state: Any
    added: list[object]

    def __new__(cls, *arguments: object, **named: object) -> _Placeholder:
        self = super().__new__(cls)
        self.state = [arguments, named]
        self.added = []
        return self

    def __init__(self, *arguments: object, **named: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        self.state = state

    def append(self, item: object) -> None:
        self.added.append(item)

    def __setitem__(self, key: object, value: object) -> None:
        self.added.append((key, value))


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        return type(name, (_Placeholder,), {})

    def persistent_load(self, key: object) -> object:
        return key


def _load(content: bytes) -> object:
    return _Unpickler(io.BytesIO(content)).load()


def _items(roots: list[Any], limit: int) -> Iterator[Any]:
    """All objects that can be reached, also in pickles in pickles, which have at most ``limit`` bytes in all."""
    waiting, seen, read = list(reversed(roots)), dict[int, object](), 0
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen[id(item)] = item  # keeps it alive, so that no other has its address
        yield item
        if isinstance(item, bytes) and item[:1] == _PICKLE:
            read += len(item)
            if read > limit:
                raise ValueError("it has too many pickles in pickles")
            try:
                waiting.append(_load(item))
            except _DAMAGED:
                continue  # bytes that are no pickle
        elif isinstance(item, Mapping):
            waiting += [*item.values()]
        elif isinstance(item, (list, tuple, set, frozenset)):
            waiting += item
        elif isinstance(item, _Placeholder):
            waiting += [item.state, item.added]
