"""The result of ``explain``: dataclasses, and their text. Needs no PyTorch."""

from __future__ import annotations

import collections
import dataclasses
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ..common.text_table import fit_table
from ..errors import Kind

_WIDTH = 100

_LIMITS = {"graphs": 8, "breaks": 3, "hints": 2, "operators": 12, "rows": 6, "kinds": 6, "values": 4}
"""How many of each the text shows by default."""

_VALUE = re.compile(r"L\['\w+'\](\['\w+'\])? (==|is) .*")
"""The condition of a guard on the value of an argument."""


@dataclasses.dataclass(frozen=True)
class Fallback:
    """Calls of one operator in a graph that run in PyTorch for the same reason."""

    operator: str  # "aten.sort.default"
    number: int
    kind: str  # the name of the reason's ``Kind``
    reason: str
    remedy: str  # what would let the operator run on ONNX Runtime
    by_design: bool  # no capability is missing, as for random numbers and views
    lines: Sequence[str]  # the user's lines, "model.py:17"


@dataclasses.dataclass(frozen=True)
class Products:
    """Products of a graph that the same kernel of ONNX Runtime computes, with the same bits."""

    kernel: str  # the ONNX operator, "MatMulNBits"
    bits: str  # of both operands, "float32 x 4 bits"
    number: int
    why: str  # why a pass left a quantized operand in float32; empty if it did not, or considered none
    lines: Sequence[str]  # the lines that call the layers, "model.py:17"; the layers' names where no line is known


@dataclasses.dataclass(frozen=True)
class AtenGraph:
    """One of AOTAutograd's graphs, split for ONNX Runtime."""

    name: str  # "0/forward", "0/backward" or "0/inference"
    regions: int
    on_onnx: Mapping[str, int]  # the number of calls on ONNX Runtime, by operator
    in_pytorch: Sequence[Fallback]
    products: Sequence[Products]  # of a graph with quantized operands; else empty
    on_first_provider: int = 0  # of the calls on ONNX Runtime, those that the first provider runs

    @property
    def share_on_onnx(self) -> float:
        """The share of calls that run on ONNX Runtime, 0 to 1."""
        on_onnx = sum(self.on_onnx.values())
        number = on_onnx + sum(item.number for item in self.in_pytorch)
        return on_onnx / number if number else 1.0


@dataclasses.dataclass(frozen=True)
class DynamoGraph:
    """One of Dynamo's graphs."""

    index: int
    function: str  # the function that it is a part of
    line: str  # "model.py:17"
    ends: str  # why the graph ends: "the end of the function", or "graph break: ..."
    ends_at: str  # the line where it ends
    details: str  # Dynamo's message on a graph break, with its hints; else empty
    operators: Mapping[str, int]  # the number of calls, by function or method
    graphs: Sequence[AtenGraph]

    @property
    def breaks(self) -> bool:
        """Whether it ends with a graph break."""
        return bool(self.details)


@dataclasses.dataclass(frozen=True)
class Guard:
    """A condition that a call must meet to reuse a compiled graph."""

    name: str  # Dynamo's name of the checked value, "L['x']"; empty for a global state of PyTorch
    kind: str  # "TENSOR_MATCH"
    conditions: Sequence[str]  # as code; empty for a tensor's dtype, sizes and strides
    line: str  # the user's line that needs the guard


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The graphs and guards of a call."""

    graphs: Sequence[DynamoGraph]
    guards: Sequence[Guard]  # in the order in which they are checked
    unused: Mapping[str, int]  # Dynamo's messages on code outside of graphs that runs in Python, with their number
    notes: Sequence[str]  # which engine runs the graphs, and how the call could be better
    unused_extensions: Sequence[str] = ()  # your converters and passes that no graph uses, each with the reason

    def as_json(self) -> dict[str, Any]:
        """All fields as data for JSON, and ``share_on_onnx`` of each of AOTAutograd's graphs."""
        result = dataclasses.asdict(self)
        for graph, entry in zip(self.graphs, result["graphs"], strict=True):
            for item, part in zip(graph.graphs, entry["graphs"], strict=True):
                part["share_on_onnx"] = item.share_on_onnx
        return result

    def text(self, *, all_rows: bool = False) -> str:
        """A text of about one screen; ``str`` is the same.

        Args:
            all_rows: whether to show all graphs, operators and hints, and not only the most frequent.
        """
        return "\n".join([*_lines(self, all_rows), *_guard_lines(self.guards, all_rows)])

    def __str__(self) -> str:
        return self.text()


_REMEDIES = {
    Kind.NO_TRANSLATION: "write a converter: dynamo_backends.register_converter(torch.ops.{})",
    Kind.NOT_IN_ONNX: "in the model, use real instead of complex, dense instead of sparse tensors, and no side effects",
    Kind.UPSTREAM_FAULT: "use a version of the library without the fault, or write a converter",
    Kind.REJECTED: "use another dtype, or an execution provider that has a kernel for it",
    Kind.OUT_OF_MEMORY: "provide more memory",
    Kind.DEVICE: "use one device, and an execution provider for it: options={'providers': [...]}",
    Kind.UNKNOWN_SHAPE: "use sizes that do not depend on data; dynamic=False, if sizes do not change",
    Kind.RANDOM: "not needed",
    Kind.UNINITIALIZED: "not needed",
    Kind.SHARED_MEMORY: "not needed; a view costs nothing",
    Kind.FASTER_IN_PYTORCH: "not needed; options={'placement': 'onnx'} forces it",
}


def remedy_of(kind: Kind, operator: str) -> str:
    """What would let an operator run on ONNX Runtime."""
    return _REMEDIES[kind].replace("{}", operator)  # not ``format``: other remedies have braces


def _lines(explanation: Explanation, all_rows: bool) -> Iterator[str]:
    graphs, limits = explanation.graphs, _LIMITS if not all_rows else {}
    breaks, parts = [graph for graph in graphs if graph.breaks], [part for graph in graphs for part in graph.graphs]
    number = sum(sum(graph.operators.values()) for graph in graphs)
    yield f"{_count(len(graphs), 'graph')}, {_count(len(breaks), 'graph break')}, {_count(number, 'operator')}"
    yield from map(_wrapped, explanation.notes)
    if graphs:
        yield "\n" + _table(_graph_rows(graphs), _GRAPH_HEADERS, limits.get("graphs"))
    if all_rows:
        yield from (_wrapped(f"graph {graph.index} calls {_counts(graph.operators)}") for graph in graphs)
    places: dict[str, list[str]] = {}
    for graph in breaks:
        places.setdefault(_for_users(graph.details), []).append(graph.ends_at)
    messages = [(f"graph break at {_places(found, 3)}", text) for text, found in places.items()]
    messages += [
        ("runs in Python" + f" ({times} times)" * (times > 1), _for_users(text))
        for text, times in explanation.unused.items()
    ]
    for what, message in messages[: limits.get("breaks")]:
        yield from _break_lines(what, message, limits.get("hints"))
    yield from _rest(len(messages), limits.get("breaks"), "message")
    on_onnx: collections.Counter[str] = collections.Counter()
    for part in parts:
        on_onnx.update(part.on_onnx)
    if on_onnx:
        yield "\n" + _wrapped(f"on ONNX Runtime: {_counts(dict(on_onnx.most_common()), limits.get('operators'))}")
    fallbacks = _merged([item for part in parts for item in part.in_pytorch])
    fallbacks.sort(key=lambda item: (item.by_design, -item.number))
    if fallbacks:
        rows = [(item.operator, item.number, item.reason, item.remedy, _places(item.lines)) for item in fallbacks]
        yield "\n" + _table(rows, ("in PyTorch", "number", "why", "remedy", "where"), limits.get("rows"))
    products = _merged([item for part in parts for item in part.products])
    if products:
        cells = [(item.kernel, item.bits, item.number, item.why, _places(item.lines)) for item in products]
        headers = ("product", "operands", "number", "why in float32", "where")
        yield "\n" + _table(cells, headers, limits.get("rows"))
    if explanation.unused_extensions:
        yield "\n" + "\n  ".join(("registered, but not used by any graph:", *explanation.unused_extensions))


_GRAPH_HEADERS = ("graph", "on ONNX", "of", "regions", "function", "ends with")


def _graph_rows(graphs: Sequence[DynamoGraph]) -> Iterator[Sequence[object]]:
    for graph in graphs:
        what = [f"{graph.function}, {graph.line}", f"a graph break at {graph.ends_at}" if graph.breaks else graph.ends]
        for part in graph.graphs:
            on_onnx = sum(part.on_onnx.values())
            number = on_onnx + sum(item.number for item in part.in_pytorch)
            yield part.name, on_onnx, number, part.regions, *what
            what = ["", ""]  # of the forward; the backward has the same
        if not graph.graphs:
            yield graph.index, "", "", "", *what


def _break_lines(what: str, message: str, hints: int | None) -> Iterator[str]:
    title, *rest = message.splitlines()
    yield f"\n{what}: {title}"
    said = [line.strip() for line in rest if line.strip() and "report an issue" not in line]
    if hints is None:
        yield from (_wrapped(f"  {line}") for line in said)
        return
    explained = [line for line in said if line.startswith("Explanation:")][:1]
    yield from (
        "  " + textwrap.shorten(line, 2 * _WIDTH, placeholder=" …")
        for line in explained + [line for line in said if line.startswith("Hint:")][:hints]
    )


def _guard_lines(guards: Sequence[Guard], all_rows: bool) -> Iterator[str]:
    own = [guard for guard in guards if guard.name.startswith("L[")]
    text = f"{_count(len(guards), 'guard')}, {len(own)} of them on arguments and local variables"
    kinds = collections.Counter(guard.kind for guard in own)
    if kinds:
        text += f": {_counts(dict(kinds.most_common()), None if all_rows else _LIMITS['kinds'])}"
    yield "\n" + _wrapped(text)
    conditions = {item: 1 for guard in own for item in guard.conditions if _VALUE.fullmatch(item)}
    if conditions:
        values = _counts(conditions, None if all_rows else _LIMITS["values"])
        yield _wrapped(f"compiled again for other values than: {values}")


def _merged(items: Iterable[Any]) -> list[Any]:
    """``Fallback`` or ``Products`` of several graphs that differ in their numbers and lines alone, as one."""
    found: dict[Any, list[Any]] = {}
    for item in items:
        found.setdefault(dataclasses.replace(item, number=0, lines=()), []).append(item)
    return [
        dataclasses.replace(
            key,
            number=sum(item.number for item in same),
            lines=list(dict.fromkeys(line for item in same for line in item.lines)),
        )
        for key, same in found.items()
    ]


def _table(rows: Iterable[Sequence[object]], headers: Sequence[str], limit: int | None) -> str:
    cells = list(rows)
    return "\n".join([fit_table(cells[:limit], headers), *_rest(len(cells), limit, "row")])


def _rest(number: int, limit: int | None, what: str) -> Iterator[str]:
    if limit is not None and number > limit:
        yield f"… and {_count(number - limit, what)} more: --all, or text(all_rows=True)"


def _places(lines: Sequence[str], limit: int = 1) -> str:
    rest = f" and {len(lines) - limit} more" if len(lines) > limit else ""
    return ", ".join(lines[:limit]) + rest


def _for_users(details: str) -> str:
    """Dynamo's message on a graph break, without the part for its developers."""
    return details.split("Developer debug context:")[0].strip()


def _counts(numbers: Mapping[str, int], limit: int | None = None) -> str:
    texts = [name if number == 1 else f"{name} x{number}" for name, number in numbers.items()]
    rest = [] if limit is None or len(texts) <= limit else [f"{len(texts) - limit} more"]
    return ", ".join(texts[:limit] + rest) or "nothing"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def _wrapped(text: str) -> str:
    indent = " " * (len(text) - len(text.lstrip()) + 2)
    return textwrap.fill(text, _WIDTH, subsequent_indent=indent, break_long_words=False)
