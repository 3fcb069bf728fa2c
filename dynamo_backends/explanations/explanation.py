"""The result of ``explain``: dataclasses, and their text. Needs no PyTorch."""

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
    why: str  # why no kernel for integers computes them, if one operand is quantized; else empty
    lines: Sequence[str]  # the user's lines, "model.py:17"


@dataclasses.dataclass(frozen=True)
class AtenGraph:
    """One of AOTAutograd's graphs, split for ONNX Runtime."""

    name: str  # "0/forward", "0/backward" or "0/inference"
    regions: int
    on_onnx: Mapping[str, int]  # the number of calls on ONNX Runtime, by operator
    in_pytorch: Sequence[Fallback]
    products: Sequence[Products]  # of a graph with quantized operands; else empty

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
    unused_extensions: Sequence[str] = ()  # your converters and passes that no graph uses, each with the reason

    def as_json(self) -> dict[str, Any]:
        """All fields as data for JSON, and ``share_on_onnx`` of each of AOTAutograd's graphs."""
        result = dataclasses.asdict(self)
        for graph, entry in zip(self.graphs, result["graphs"], strict=True):
            for item, part in zip(graph.graphs, entry["graphs"], strict=True):
                part["share_on_onnx"] = item.share_on_onnx
        return result

    def __str__(self) -> str:
        return "\n".join(_lines(self))


_REMEDIES = {
    Kind.NO_TRANSLATION: "write a converter: dynamo_backends.register_converter(torch.ops.{})",
    Kind.NOT_IN_ONNX: "in the model, use real instead of complex, dense instead of sparse tensors, and no side effects",
    Kind.UPSTREAM_FAULT: "use a version of the library without the fault, or write a converter",
    Kind.REJECTED: "use another dtype, or an execution provider that has a kernel for it",
    Kind.OUT_OF_MEMORY: "provide more memory",
    Kind.DEVICE: "use one device, and an execution provider for it: options={'providers': [...]}",
    Kind.UNKNOWN_SHAPE: "use sizes that do not depend on data; dynamic=False, if sizes do not change",
    Kind.RANDOM: "not needed; model.eval() disables dropout",
    Kind.UNINITIALIZED: "not needed",
    Kind.SHARED_MEMORY: "not needed; a view costs nothing",
    Kind.FASTER_IN_PYTORCH: "not needed; options={'placement': 'onnx'} forces it",
}


def remedy_of(kind: Kind, operator: str) -> str:
    """What would let an operator run on ONNX Runtime."""
    return _REMEDIES[kind].replace("{}", operator)  # not ``format``: other remedies have braces


def _lines(explanation: Explanation) -> Iterator[str]:
    graphs, breaks = explanation.graphs, sum(graph.breaks for graph in explanation.graphs)
    number = sum(sum(graph.operators.values()) for graph in graphs)
    yield f"{_count(len(graphs), 'graph')}, {_count(breaks, 'graph break')}, {_count(number, 'operator')}"
    for graph in graphs:
        yield f"\ngraph {graph.index}: {graph.function}, {graph.line}"
        yield _wrapped(f"  calls {_counts(graph.operators)}")
        place = f" at {graph.ends_at}" if graph.ends_at else ""
        yield f"  ends with {'a graph break' if graph.breaks else graph.ends}{place}"
        if graph.breaks:
            yield textwrap.indent(_for_users(graph.details), "    ")
        for part in graph.graphs:
            share = f"{100 * part.share_on_onnx:.0f} %"
            yield f"  {part.name}: {share} of the operators on ONNX Runtime, in {_count(part.regions, 'region')}"
            if part.on_onnx:
                yield _wrapped(f"    there: {_counts(part.on_onnx)}")
            if part.in_pytorch:
                yield textwrap.indent(_fallback_table(part.in_pytorch), "    ")
            if part.products:
                yield textwrap.indent(_product_table(part.products), "    ")
    for message, times in explanation.unused.items():
        yield f"\nruns in Python ({_count(times, 'time')}), because Dynamo cannot trace it:"
        yield textwrap.indent(_for_users(message), "    ")
    if explanation.unused_extensions:
        yield "\n" + "\n  ".join(("registered, and not used by any graph:", *explanation.unused_extensions))
    own = [guard for guard in explanation.guards if guard.name.startswith("L[")]
    yield f"\n{_count(len(explanation.guards), 'guard')}, {len(own)} of them on arguments and local variables"
    if own:
        rows = dict.fromkeys((guard.name, guard.kind, _condition(guard), guard.line) for guard in own)
        yield textwrap.indent(fit_table(rows, ("guard", "kind", "condition", "where")), "  ")


def _fallback_table(fallbacks: Sequence[Fallback]) -> str:
    rows = []
    for item in fallbacks:
        rows.append((item.operator, item.number, item.reason, item.remedy, _places(item.lines)))
    return fit_table(rows, ("in PyTorch", "number", "why", "remedy", "where"))


def _product_table(products: Sequence[Products]) -> str:
    rows = [(item.kernel, item.bits, item.number, item.why, _places(item.lines)) for item in products]
    return fit_table(rows, ("product", "operands", "number", "why not in integers", "where"))


def _places(lines: Sequence[str]) -> str:
    return ", ".join(lines[:3]) + ", …" * (len(lines) > 3)


def _condition(guard: Guard) -> str:
    if guard.kind == "TENSOR_MATCH":
        return "the same dtype, device and requires_grad, and sizes and strides that are not symbolic"
    return guard.conditions[0] if guard.conditions else ""


def _for_users(details: str) -> str:
    """Dynamo's message on a graph break, without the part for its developers."""
    return details.split("Developer debug context:")[0].strip()


def _counts(operators: Mapping[str, int]) -> str:
    return ", ".join(name if number == 1 else f"{name} x{number}" for name, number in operators.items()) or "nothing"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def _wrapped(text: str) -> str:
    indent = " " * (len(text) - len(text.lstrip()) + 2)
    return textwrap.fill(text, _WIDTH, subsequent_indent=indent, break_long_words=False)
