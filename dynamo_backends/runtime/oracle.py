"""What is known of the nodes that ONNX Runtime can run: asked of it once, and kept.

Lists of registered kernels are not the truth: function operators look unsupported and are not. So a session is made of
a model of the one node.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from passes.engine.locks import Lock

from ..reasons import Kind, Reason

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

    def ask(self, question: Hashable, find_out: Callable[[], Answer]) -> Answer | Reason:
        """What the runtime says of a node, or the reason why it could not be asked.

        Args:
            question: all that the answer depends on.
            find_out: asks the runtime. It runs without the lock: two threads may find out the same at once.
        """
        with self._lock:
            if question in self._known:
                self._known.move_to_end(question)
                return self._known[question]
        try:
            answer = find_out()
        except MemoryError as error:
            return Reason(Kind.OUT_OF_MEMORY, f"there was no memory to ask ONNX Runtime: {error}")
        if isinstance(answer, Reason) and answer.kind is Kind.OUT_OF_MEMORY:
            return answer
        with self._lock:
            self._known[question] = answer
            if len(self._known) > self._most:
                self._known.popitem(last=False)
        return answer

    def __len__(self) -> int:
        return len(self._known)


ORACLE: Oracle[Reason | None] = Oracle()
"""Why nodes cannot run, ``None`` for those that can: the answers of this process."""
