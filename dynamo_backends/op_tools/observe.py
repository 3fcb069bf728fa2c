"""``OpObserve``: prints each operator with its arguments, once for each signature."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from .call import Call, describe
from .tool import OpTool


@dataclasses.dataclass
class Signature:
    """Calls of one operator with the same dtypes, shapes and plain values."""

    call: str  # the operator and its arguments, as text
    result: str  # as text
    source: str  # of the first call, see ``Place.source``
    module: str  # of the first call, see ``Place.module``
    count: int = 1


class OpObserve(OpTool):
    """Prints each signature at its first call, and a table of counts at the end.

    Takes the arguments of ``OpTool``.
    """

    _computes = False

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._seen: dict[str, Signature] = {}

    @property
    def signatures(self) -> list[Signature]:
        """The signatures, in the order of their first calls."""
        return list(self._seen.values())

    def _after(self, call: Call, before: object, result: object) -> None:
        text = str(call)
        seen = self._seen.get(text)
        if seen is not None:
            seen.count += 1
            return
        seen = self._seen[text] = Signature(text, describe(result), call.source, call.place.module)
        self._print(f"{seen.call} -> {seen.result}  {seen.source}  {seen.module}".rstrip())

    def _summary(self) -> tuple[Sequence[str], Sequence[Sequence[object]]]:
        seen = sorted(self._seen.values(), key=lambda seen: -seen.count)
        rows = [(item.call, item.result, item.count, item.source, item.module) for item in seen]
        return ["call", "result", "calls", "line", "module"], rows
