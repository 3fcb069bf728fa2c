"""``OpObserve``: prints each operator with its arguments, once for each signature."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..report.table_page import TablePage
from .call import Call, describe, signature
from .tool import OpTool


@dataclasses.dataclass
class Signature:
    """Calls of one operator with the same dtypes, shapes and plain values."""

    call: str  # the operator and its arguments, as text
    result: str  # as text
    source: str  # the user's line of the first call
    count: int = 1


class OpObserve(OpTool):
    """Prints each signature at its first call, and a table of counts at the end.

    Takes the arguments of ``OpTool``.
    """

    _computes = False

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._seen: dict[object, Signature] = {}

    @property
    def signatures(self) -> list[Signature]:
        """The signatures, in the order of their first calls."""
        return list(self._seen.values())

    def _after(self, call: Call, before: object, result: object) -> None:
        key = (call.name, signature(call.args), signature(call.kwargs) if call.kwargs else None)
        seen = self._seen.get(key)
        if seen is not None:
            seen.count += 1
            return
        seen = Signature(str(call), describe(result), call.source)
        self._seen[key] = seen
        self._print(f"{seen.call} -> {seen.result}  {seen.source}".rstrip())

    def _page(self) -> TablePage:
        rows = []
        for seen in sorted(self._seen.values(), key=lambda seen: -seen.count):
            name, _, arguments = seen.call.partition("(")
            rows.append((name, f"({arguments}", seen.result, seen.count, seen.source))
        headers = ["operator", "called with", "result", "calls", "line"]
        return TablePage(f"OpObserve: {len(rows)} signatures", headers, rows)

    def as_json(self) -> list[dict[str, object]]:
        """The signatures, for JSON."""
        return [dataclasses.asdict(signature) for signature in self.signatures]
