"""What is in a file of saved graphs, for ``dynamo-backends show FILE``; nothing in the file is executed.

PyTorch's files are pickles in pickles, whose loading calls whatever they name. Here each class and function is replaced
by a placeholder that keeps what it gets, except for ``GraphName``, which holds only data.
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
from .graph_content import read_content


@dataclasses.dataclass(frozen=True)
class SavedProgram:
    """A graph of a file.

    Attributes:
        name: of the graph in the process that saved it.
        program: what runs; its options are the defaults.
        weights: the user's names of the arguments that become constants of sessions.
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
    try:
        roots = [_load(content)] if content[:1] == _PICKLE else _artifacts(content)
        found = [_program(item.state) for item in _items(roots) if type(item).__name__ == "GraphContent"]
    except _DAMAGED as error:
        raise ValueError(f"{path} is damaged, or no file of saved graphs: {error}") from error
    if not found:
        raise ValueError(f"{path} has no graphs of onnxrt")
    return found


_PICKLE = b"\x80"
"""The first byte of a pickle."""

_DAMAGED = (pickle.UnpicklingError, EOFError, ValueError, LookupError, TypeError, AttributeError, RuntimeError)
"""What a damaged pickle or record may raise."""


def _artifacts(content: bytes) -> list[bytes]:
    from ..graphs.saving import artifact_contents  # imported lazily: it imports Inductor

    return artifact_contents(content)


def _program(state: Mapping[str, Any]) -> SavedProgram:
    content = read_content(state["content"])
    weights = [name for name, _ in content.weights.values()]
    return SavedProgram(state["name"], from_record(content.record, None, Options()), weights, content.versions)


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
        is_name = (module, name) == (GraphName.__module__, GraphName.__name__)
        return GraphName if is_name else type(name, (_Placeholder,), {})

    def persistent_load(self, key: object) -> object:
        return key


def _load(content: bytes) -> object:
    return _Unpickler(io.BytesIO(content)).load()


def _items(roots: list[Any]) -> Iterator[Any]:
    """All objects that can be reached, also in pickles in pickles."""
    waiting, seen = list(reversed(roots)), {}
    while waiting:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen[id(item)] = item  # keeps it alive, so that no other has its address
        yield item
        if isinstance(item, bytes) and item[:1] == _PICKLE:
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
