"""``OpObserve``: what is called with what, once for each signature."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..report.table_page import TablePage
from .call import Call, describe, signature
from .tool import OpTool


@dataclasses.dataclass
class Signature:
    """Calls that are alike.

    Attributes:
        call: the operator and its arguments in words.
        result: in words.
        source: the user's line of the first of them.
        count: how many.
    """

    call: str
    result: str
    source: str
    count: int = 1


class OpObserve(OpTool):
    """Prints each operator with its arguments when it is first called so, and at the end how often.

    Takes the arguments of ``OpTool``.

    Attributes:
        signatures: what was seen, in the order of the first calls.
    """

    _computes = False

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._seen: dict[object, Signature] = {}

    @property
    def signatures(self) -> list[Signature]:
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
        """What was seen, for programs."""
        return [dataclasses.asdict(signature) for signature in self.signatures]
