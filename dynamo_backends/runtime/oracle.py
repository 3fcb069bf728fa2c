"""What is known of the nodes that ONNX Runtime can run: asked of it once, and kept.

Lists of registered kernels are not the truth: function operators look unsupported and are not. So a session is made of
a model of the one node.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import types
from collections.abc import Callable, Hashable, Mapping
from typing import Generic, TypeVar

from passes.engine.locks import Lock

from ..reasons import Kind, Reason
from .custom_operators import loaded_libraries

_MOST_ANSWERS = 16_384
"""Answers that are kept, those that were asked for last. A model of a hundred layers has some two hundred questions."""


Answer = TypeVar("Answer")


class Oracle(Generic[Answer]):
    """Keeps what was found out of nodes, for all alike, in all threads.

    What was not about the node is not kept: a reason of the kind ``OUT_OF_MEMORY`` is asked for again.

    Args:
        most: how many answers are kept.
    """

    def __init__(self, most: int = _MOST_ANSWERS) -> None:
        self._most = most
        self._lock = Lock()
        self._known: collections.OrderedDict[Hashable, Answer] = collections.OrderedDict()
        self._told: dict[str, Answer] = {}
        self._found_out: dict[Hashable, Answer] = {}

    def ask(self, question: Hashable, find_out: Callable[[], Answer]) -> Answer | Reason:
        """What the runtime says of a node, or the reason why it could not be asked.

        Args:
            question: all that the answer depends on.
            find_out: asks the runtime. It runs without the lock: two threads may find out the same at once.
        """
        if libraries := loaded_libraries():
            question = (question, libraries)
        with self._lock:
            if question in self._known:
                self._known.move_to_end(question)
                return self._known[question]
            name = name_of(question) if self._told else ""
            if name in self._told:
                return self._keep(question, self._told[name])
        try:
            answer = find_out()
        except MemoryError as error:
            return Reason(Kind.OUT_OF_MEMORY, f"there was no memory to ask ONNX Runtime: {error}")
        if isinstance(answer, Reason) and answer.kind is Kind.OUT_OF_MEMORY:
            return answer
        with self._lock:
            self._found_out[question] = answer
            return self._keep(question, answer)

    def _keep(self, question: Hashable, answer: Answer) -> Answer:
        self._known[question] = answer
        for answers in (self._known, self._found_out):
            if len(answers) > self._most:
                del answers[next(iter(answers))]
        return answer

    def learn(self, answers: Mapping[str, Answer]) -> None:
        """Takes answers that another process found out, by name (``name_of``), and forgets which ones are new."""
        with self._lock:
            self._told = dict(answers)
            self._found_out = {}

    def found_out(self) -> dict[str, Answer]:
        """What was found out since ``learn``, by name."""
        with self._lock:
            return {name_of(question): answer for question, answer in self._found_out.items()}

    def __len__(self) -> int:
        return len(self._known)


def name_of(question: Hashable) -> str:
    """A name of a question that is the same in every process, where functions are told apart by their names, their
    places in the source and what they enclose."""
    return hashlib.sha256(repr(_named(question)).encode()).hexdigest()[:32]


def _named(part: object, within: tuple[object, ...] = ()) -> object:
    if isinstance(part, tuple):
        return tuple(_named(item, within) for item in part)
    if isinstance(part, functools.partial):
        return _named((part.func, part.args, *sorted(part.keywords.items())), within)
    name = getattr(part, "__qualname__", None)
    if name is None or part in within:  # a function may enclose itself
        return name or part
    named: list[object] = [f"{getattr(part, '__module__', '')}.{name}"]
    if isinstance(part, types.FunctionType):
        named += [part.__code__.co_firstlineno, part.__code__.co_linetable]
        named += [_named(cell.cell_contents, (*within, part)) for cell in part.__closure__ or ()]
    return tuple(named)


ORACLE: Oracle[Reason | None] = Oracle()
"""Why nodes cannot run, ``None`` for those that can: the answers of this process."""
