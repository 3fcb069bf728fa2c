"""What ``explain`` found of a function: data, and its text. Needs no PyTorch."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..common.text_table import fit_table
from ..errors import Kind

_WIDTH = 100


@dataclasses.dataclass(frozen=True)
class Fallback:
    """Operators of a graph that would run in PyTorch, all for one reason.

    Attributes:
        operator: what they are, ``aten.sort.default``.
        number: how many.
        kind: the name of the reason's ``Kind``.
        reason: why, in words.
        remedy: what would change that.
        by_design: whether nothing is lacking: random numbers, views.
        lines: the user's lines that call them, ``model.py:17``.
    """

    operator: str
    number: int
    kind: str
    reason: str
    remedy: str
    by_design: bool
    lines: Sequence[str]


@dataclasses.dataclass(frozen=True)
class AtenGraph:
    """One of AOTAutograd's graphs, as it would be split.

    Attributes:
        name: ``0/forward``, ``0/backward`` or ``0/inference``.
        regions: models that ONNX Runtime would get.
        on_onnx: operators that would run there, by name, with how many.
        in_pytorch: those that would not.
    """

    name: str
    regions: int
    on_onnx: Mapping[str, int]
    in_pytorch: Sequence[Fallback]

    @property
    def share_on_onnx(self) -> float:
        """The share of the operators that would run on ONNX Runtime, 0 to 1."""
        on_onnx = sum(self.on_onnx.values())
        number = on_onnx + sum(item.number for item in self.in_pytorch)
        return on_onnx / number if number else 1.0


@dataclasses.dataclass(frozen=True)
class DynamoGraph:
    """One of Dynamo's graphs.

    Attributes:
        index: its number.
        function, line: the function it is a part of, and where: ``model.py:17``.
        ends: why it ends: ``the end of the function``, or ``graph break: …``.
        ends_at: where.
        details: all that Dynamo says of a graph break, with its hints; else empty.
        operators: the functions and methods it calls, with how often.
        graphs: what AOTAutograd made of it.
    """

    index: int
    function: str
    line: str
    ends: str
    ends_at: str
    details: str
    operators: Mapping[str, int]
    graphs: Sequence[AtenGraph]

    @property
    def breaks(self) -> bool:
        """Whether it ends with a graph break."""
        return bool(self.details)


@dataclasses.dataclass(frozen=True)
class Guard:
    """A condition under which a compiled graph is used again.

    Attributes:
        name: of what, as Dynamo writes it: ``L['x']``; empty for a state of PyTorch.
        kind: of the condition: ``TENSOR_MATCH``.
        conditions: in code; of a tensor's dtype, sizes and strides there is none.
        line: the user's line that made it necessary.
    """

    name: str
    kind: str
    conditions: Sequence[str]
    line: str


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What ``torch.compile`` and the backends make of a call.

    Attributes:
        graphs: Dynamo's.
        guards: in the order in which they are checked.
        unused: what Dynamo says of code that it left to Python, without a graph that ends there, with how often.
    """

    graphs: Sequence[DynamoGraph]
    guards: Sequence[Guard]
    unused: Mapping[str, int]

    def as_json(self) -> dict[str, Any]:
        """All of it as dicts, lists, texts and numbers; ``share_on_onnx`` beside each graph."""
        result = dataclasses.asdict(self)
        for graph, entry in zip(self.graphs, result["graphs"], strict=True):
            for item, part in zip(graph.graphs, entry["graphs"], strict=True):
                part["share_on_onnx"] = item.share_on_onnx
        return result

    def __str__(self) -> str:
        return "\n".join(_lines(self))


_REMEDIES = {
    Kind.NO_TRANSLATION: "write one: dynamo_backends.register_converter(torch.ops.{})",
    Kind.NOT_IN_ONNX: "real tensors in the place of complex or sparse ones, and no side effects, in the model",
    Kind.UPSTREAM_FAULT: "a version of the library without the fault, or a converter of one's own, which is trusted",
    Kind.REFUSED: "another dtype or execution provider that has a kernel for it",
    Kind.OUT_OF_MEMORY: "more memory",
    Kind.DEVICE: "tensors on one device, and an execution provider for it: options={'providers': [...]}",
    Kind.UNKNOWN_SHAPE: "sizes that do not depend on data; dynamic=False, if sizes do not change",
    Kind.RANDOM: "nothing needs to; model.eval() ends dropout",
    Kind.UNINITIALIZED: "nothing needs to",
    Kind.SHARED_MEMORY: "nothing needs to; a view costs nothing",
    Kind.FASTER_IN_PYTORCH: "nothing needs to; options={'placement': 'onnx'} runs it there all the same",
}


def remedy_of(kind: Kind, operator: str) -> str:
    """What would let an operator that runs in PyTorch for a reason of a kind run on ONNX Runtime."""
    return _REMEDIES[kind].replace("{}", operator)  # others have braces of their own


def _lines(explanation: Explanation) -> Iterator[str]:
    graphs, breaks = explanation.graphs, sum(graph.breaks for graph in explanation.graphs)
    number = sum(sum(graph.operators.values()) for graph in graphs)
    yield f"{_counted(len(graphs), 'graph')}, {_counted(breaks, 'graph break')}, {_counted(number, 'operator')}"
    for graph in graphs:
        yield f"\ngraph {graph.index}: {graph.function}, {graph.line}"
        yield _wrapped(f"  calls {_named(graph.operators)}")
        place = f" at {graph.ends_at}" if graph.ends_at else ""
        yield f"  ends with {'a graph break' if graph.breaks else graph.ends}{place}"
        if graph.breaks:
            yield textwrap.indent(_without_developers(graph.details), "    ")
        for part in graph.graphs:
            share = f"{100 * part.share_on_onnx:.0f} %"
            yield f"  {part.name}: {share} of the operators on ONNX Runtime, in {_counted(part.regions, 'region')}"
            if part.on_onnx:
                yield _wrapped(f"    there: {_named(part.on_onnx)}")
            if part.in_pytorch:
                yield textwrap.indent(_table_of(part.in_pytorch), "    ")
    for said, times in explanation.unused.items():
        yield f"\nleft to Python ({_counted(times, 'time')}), as Dynamo cannot trace it:"
        yield textwrap.indent(_without_developers(said), "    ")
    own = [guard for guard in explanation.guards if guard.name.startswith("L[")]
    yield f"\n{_counted(len(explanation.guards), 'guard')}, {len(own)} of them on arguments and local variables"
    if own:
        rows = dict.fromkeys((guard.name, guard.kind, _condition(guard), guard.line) for guard in own)
        yield textwrap.indent(fit_table(rows, ("guard", "kind", "condition", "where")), "  ")


def _table_of(fallbacks: Sequence[Fallback]) -> str:
    rows = []
    for item in fallbacks:
        places = ", ".join(item.lines[:3]) + ", …" * (len(item.lines) > 3)
        rows.append((item.operator, item.number, item.reason, item.remedy, places))
    return fit_table(rows, ("in PyTorch", "number", "why", "what would change that", "where"))


def _condition(guard: Guard) -> str:
    if guard.kind == "TENSOR_MATCH":
        return "the same dtype, device and requires_grad, and sizes and strides that are not symbolic"
    return guard.conditions[0] if guard.conditions else ""


def _without_developers(details: str) -> str:
    """What Dynamo says of a graph break, without what it says for its developers."""
    return details.split("Developer debug context:")[0].strip()


def _named(operators: Mapping[str, int]) -> str:
    return ", ".join(name if number == 1 else f"{name} x{number}" for name, number in operators.items()) or "nothing"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def _wrapped(text: str) -> str:
    indent = " " * (len(text) - len(text.lstrip()) + 2)
    return textwrap.fill(text, _WIDTH, subsequent_indent=indent, break_long_words=False)
