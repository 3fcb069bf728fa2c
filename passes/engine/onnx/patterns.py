"""Passes of the stage ``onnx`` written as two functions: what to search for, and what to put there.

The pattern language is that of onnxscript's rewriter; the search and the replacement are traced, so they are read
like the ONNX they stand for. A pass is a list of patterns::

    from passes import register
    from passes import OnnxPattern, onnx_pattern_pass

    def silu(op, x):
        return op.Mul(x, op.Sigmoid(x))

    def quick_gelu(op, x):
        return op.QuickGelu(x, alpha=1.0, _domain="com.microsoft")

    def patterns():
        return [OnnxPattern("silu", silu, quick_gelu)]

    register(onnx_pattern_pass("onnx.my_silu", "Computes x * sigmoid(x) by one operator.", patterns))

Before, in the graph, and after (either order of the operands of ``Mul`` matches)::

    s = Sigmoid(x)                           y = com.microsoft.QuickGelu <alpha=1.0> (x)
    y = Mul(s, x)

A condition that the form alone does not show is a third function: it is given the ``PassContext`` and what the
search's parameters stand for, and returns why the match must be left alone, or ``None``::

    def twice(op, x, first, second):
        return op.Transpose(op.Transpose(x, perm=first), perm=second)

    def nothing(op, x):
        return op.Identity(x)

    def check(context, first, second):
        if [first.as_ints()[i] for i in second.as_ints()] != sorted(second.as_ints()):
            return "the second Transpose does not take back the first"
        return None

    OnnxPattern("transposed back", twice, nothing, check)

What a parameter stands for follows from its use: an input is an ``onnx_ir.Value``, with ``dtype``, ``shape`` and
``constant(value)``; an attribute is an ``onnx_ir.Attr``. A function takes those it needs, by name.

The pass does the rest for each match:

1. Values inside the match must have no other use, nor be outputs of the graph (``allow_other_uses=True`` leaves
   them computed instead).
2. ``check`` may refuse.
3. ``context.target.refuses`` must know a kernel for each new node.
4. ``context.allows`` is asked.
5. The replacement's results take the names, types, shapes and metadata of those they replace; opset imports of new
   domains are added; what nothing uses any more is removed.

Whatever stops a match after its first node is a near miss, listed with how far it got (``context.refuse``).

Where the nodes to search for are a family with many variants, a pass that walks the graph itself is easier to read
than a list of patterns; see ``passes/onnx/attention.py``.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx_ir as ir

from ..context import PassContext
from ..registry import Pass

if TYPE_CHECKING:
    from onnxscript._internal.tape_builder import TapeBuilder
    from onnxscript.rewriter import MatchResult
    from onnxscript.rewriter._pattern_ir import GraphPattern
    from onnxscript.rewriter.pattern import Pattern

__all__ = ["OnnxPattern", "apply_patterns", "constant", "infer_types", "onnx_pattern_pass"]

_MOST_ORDERS = 64
"""Orders of commutative operands of one pattern that are searched for: of six Adds and Muls."""


@dataclasses.dataclass(frozen=True)
class OnnxPattern:
    """What to search for in an ONNX graph and what to put there; the module's docstring has examples.

    Attributes:
        name: what the pattern is called in the list of near misses.
        search: ``search(op, x, ...)`` builds the pattern: ``op.Add(x, 1.0)`` is a node, a parameter stands for any
            value or attribute, a number for a constant within a relative 1e-5. Further arguments of a node are
            onnxscript's: ``_domain``, ``_outputs`` (names, or how many), ``_allow_other_attributes`` (default yes),
            ``_allow_other_inputs`` (default no), ``_check``; ``onnxscript.rewriter.pattern`` has ``OrValue`` for
            alternatives. It returns one value or several, all but one of which lie on the way to that one.
        replacement: ``replacement(op, x, ...)`` builds as many values, of the same dtype and shape. ``op`` makes nodes:
            ``op.Gelu(x, approximate="tanh")``, with ``_domain`` (version 1 unless ``_version`` says otherwise) and
            ``_outputs``; numbers and lists become constants of the dtype the operator needs.
        check: ``check(context, x, ...)`` says why a match must be left alone, or ``None``.
        commute: whether operands of Add, Mul, And, Or, Max, Min... match in either order.
        allow_other_uses: whether values inside the match may be used elsewhere; they then stay computed.
    """

    name: str
    search: Callable[..., Any]
    replacement: Callable[..., Any]
    check: Callable[..., str | None] | None = None
    commute: bool = True
    allow_other_uses: bool = False


def onnx_pattern_pass(
    name: str,
    sentence: str,
    patterns: Sequence[OnnxPattern] | Callable[[], Iterable[OnnxPattern]],
    *,
    default: bool = True,
) -> Pass:
    """A pass that replaces what its patterns find.

    Args:
        name: ``onnx.`` and what the pass is called.
        sentence: what it does, for the list of passes.
        patterns: in the order they are tried at a node; the first that matches is taken. A function is called once,
            when a graph first needs them.
        default: whether the pass is on unless the option ``passes`` says otherwise.

    Raises:
        ValueError: the name is not one of the stage ``onnx``.
    """

    @functools.cache
    def rules() -> _Rules:
        return _Rules(patterns() if callable(patterns) else patterns)

    def run(model: ir.Model, context: PassContext) -> int:
        return _apply(model, context, rules())

    run.__module__, run.__qualname__ = _origin(patterns)
    item = Pass(name, sentence, run, default)
    if item.stage != "onnx":
        raise ValueError(f"pass name {name!r}: patterns on ONNX graphs are passes of the stage 'onnx'")
    return item


def apply_patterns(model: ir.Model, context: PassContext, patterns: Iterable[OnnxPattern]) -> int:
    """Replaces what the patterns find in a model, in place, subgraphs included; returns how often.

    For a pass that does more than that; it is quicker to make the patterns once, with ``onnx_pattern_pass``.
    """
    return _apply(model, context, _Rules(patterns))


def constant(value: ir.Value | None) -> np.ndarray | None:
    """The number or array a value always has, or ``None``: of an initializer or a ``Constant`` node."""
    if value is None or value.is_graph_input():
        return None
    tensor = ir.convenience.get_const_tensor(value)
    return None if tensor is None else tensor.numpy()


def infer_types(nodes: Iterable[ir.Node], opset: int) -> None:
    """Gives results of nodes the dtype and shape they lack, as far as ONNX's schemas tell; in place.

    Results of operators of other domains get the dtype of the first input, as nearly all have it.

    Args:
        nodes: in execution order.
        opset: the version of ONNX's own operators.
    """
    for node in nodes:
        if any(output.type is None or output.shape is None for output in node.outputs):
            _infer_types(node, opset)


def _infer_types(node: ir.Node, opset: int) -> None:
    known = _inferred(node, opset) if node.domain in ("", "ai.onnx") else {}
    first = next((value.type for value in node.inputs if value is not None and value.type is not None), None)
    for i, output in enumerate(node.outputs):
        if f"output_{i}" in known:
            proto = known[f"output_{i}"]
            output.type = output.type or ir.serde.deserialize_type_proto_for_type(proto)
            output.shape = output.shape or ir.serde.deserialize_type_proto_for_shape(proto)
        elif output.type is None and node.domain not in ("", "ai.onnx"):
            output.type = first


def _inferred(node: ir.Node, opset: int) -> Mapping[str, onnx.TypeProto]:
    names = ["" if value is None else f"input_{i}" for i, value in enumerate(node.inputs)]
    proto = onnx.helper.make_node(node.op_type, names, [f"output_{i}" for i in range(len(node.outputs))])
    proto.attribute.extend(ir.serde.serialize_attribute(attribute) for attribute in node.attributes.values())
    types, data = {}, {}
    for name, value in zip(names, node.inputs, strict=True):
        if value is None or value.type is None:
            continue
        types[name] = ir.serde.serialize_type(value.type)
        if value.shape is not None:
            ir.serde.serialize_shape_into(types[name], value.shape)
        tensor = ir.convenience.get_const_tensor(value)
        if tensor is not None and tensor.size <= 16:
            data[name] = ir.serde.serialize_tensor(tensor)
    try:
        schema = onnx.defs.get_schema(node.op_type, opset, "")
        inferred: Mapping[str, onnx.TypeProto] = onnx.shape_inference.infer_node_outputs(schema, proto, types, data)
    except (onnx.defs.SchemaError, onnx.shape_inference.InferenceError):
        return {}  # the kernel check says what is wrong with it
    return inferred


class _Rules:
    """Patterns made ready for matching, by the operator they end in."""

    def __init__(self, patterns: Iterable[OnnxPattern]) -> None:
        self._by_operator: dict[ir.OperatorIdentifier, list[_Rule]] = {}
        self._any_operator: list[_Rule] = []
        for rank, pattern in enumerate(patterns):
            rule = _Rule(pattern, rank)
            if rule.operator is None:
                self._any_operator.append(rule)
            else:
                self._by_operator.setdefault(rule.operator, []).append(rule)

    def at(self, node: ir.Node, present: set[str] | None) -> Sequence[_Rule]:
        """Those that may match at a node, in their order.

        Args:
            node: the last node of a match.
            present: all operators of the model, if rules of which one is missing are not wanted.
        """
        rules = self._by_operator.get((node.domain, node.op_type, node.overload), [])
        if present is not None:
            rules = [rule for rule in rules if rule.operators <= present]
        if not self._any_operator:
            return rules
        return sorted([*rules, *self._any_operator], key=lambda rule: rule.rank)


class _Rule:
    """One pattern made ready: a matcher for each order of its commutative operands."""

    def __init__(self, pattern: OnnxPattern, rank: int) -> None:
        from onnxscript.rewriter import _pattern_ir
        from onnxscript.rewriter.pattern import Pattern

        self.pattern = pattern
        self.rank = rank
        graph = _pattern_ir._to_graph_pattern(pattern.search)
        if not graph.has_single_output_node:
            ends = ", ".join(node.op_type for node in graph.output_nodes)
            raise ValueError(
                f"pattern {pattern.name!r} ends in several nodes ({ends}); all nodes must lead to one, which has to be "
                "among the results"
            )
        self.size: int = graph.num_nodes()
        self.operator: ir.OperatorIdentifier | None = graph.output_node.op_identifier()
        self.results: int = graph.num_outputs
        self.operators = _operators_of(graph)
        orders = graph.commute() if pattern.commute else [graph]
        if len(orders) > _MOST_ORDERS:
            raise ValueError(
                f"pattern {pattern.name!r} has {len(orders)} orders of commutative operands, more than {_MOST_ORDERS}; "
                "give it commute=False and list the orders that occur"
            )
        self._orders = [_Order(Pattern(order, name=pattern.name), _operators_above(order)) for order in orders]

    def match(self, model: ir.Model, graph: ir.Graph, node: ir.Node, *, explain: bool) -> MatchResult | None:
        """The match that ends in ``node``; of several failed ones, if someone asks, the one that got furthest."""
        removable = not self.pattern.allow_other_uses
        furthest: MatchResult | None = None
        for order in self._orders:
            if not explain and not _reads(node, order.operators):
                continue
            seen = _Seen()
            order.matcher.match(model, graph, node, check_nodes_are_removable=removable, tracer=seen)
            if seen.match:
                return seen.match
            if furthest is None or seen.match.num_matched_nodes() > furthest.num_matched_nodes():
                furthest = seen.match
        return furthest


@dataclasses.dataclass(frozen=True)
class _Order:
    """A pattern with the operands of its commutative operators in one order."""

    matcher: Pattern
    operators: Sequence[tuple[int, str]]
    """The operators its last node reads directly, by the number of the input."""


def _operators_of(graph: GraphPattern) -> frozenset[str]:
    """The operators of a pattern, none if it leaves a choice among them."""
    from onnxscript.rewriter import _pattern_ir

    choices = (_pattern_ir.BacktrackingOr, _pattern_ir.OpIdDispatchOr)
    if any(isinstance(value, choices) for node in graph for value in node.inputs):
        return frozenset()
    identifiers = [node.op_identifier() for node in graph]
    return frozenset(identifier[1] for identifier in identifiers if identifier is not None)


def _operators_above(graph: GraphPattern) -> Sequence[tuple[int, str]]:
    above = [(i, value.producer()) for i, value in enumerate(graph.output_node.inputs) if value is not None]
    known = [(i, producer.op_identifier()) for i, producer in above if producer is not None]
    return [(i, identifier[1]) for i, identifier in known if identifier is not None]


def _reads(node: ir.Node, operators: Sequence[tuple[int, str]]) -> bool:
    inputs = node.inputs
    for i, operator in operators:
        producer = inputs[i].producer() if i < len(inputs) and inputs[i] is not None else None
        if producer is None or producer.op_type != operator:
            return False
    return True


class _Seen:
    """Takes the place of onnxscript's ``MatchingTracer``: ``Pattern.match`` returns nothing if a condition fails."""

    match: MatchResult

    def log(self, pattern: Pattern, graph: ir.Graph, node: ir.Node, match: MatchResult, status: object) -> None:
        self.match = match


def _apply(model: ir.Model, context: PassContext, rules: _Rules) -> int:
    fired = 0
    graphs = (model.graph, *model.graph.subgraphs())
    present = None if context.explain else {node.op_type for graph in graphs for node in graph}
    for graph in graphs:
        for node in [node for node in graph if rules.at(node, present)]:
            if node.graph is graph:  # not removed by a match before
                fired += any(_apply_rule(rule, model, graph, node, context) for rule in rules.at(node, present))
    return fired


def _apply_rule(rule: _Rule, model: ir.Model, graph: ir.Graph, node: ir.Node, context: PassContext) -> bool:
    pattern = rule.pattern

    def refuse(reason: str, matched: int = rule.size, at: object = node) -> bool:
        context.refuse(at, reason, matched=matched, of=rule.size, pattern=pattern.name)
        return False

    match = rule.match(model, graph, node, explain=context.explain)
    if not match:
        matched = 0 if match is None else match.num_matched_nodes()
        if match is not None and (matched > 1 or rule.size == 1):
            refuse(_reason(match), matched)
        return False
    if pattern.check is not None:
        said = _call(pattern.check, context, match.bindings)
        if said is not None and not isinstance(said, str):
            raise TypeError(f"the check of pattern {pattern.name!r} returned {said!r}, not a reason or None")
        if said is not None:
            return refuse(said)
    builder: TapeBuilder = _builder(model.opset_imports.get("", 1))()
    results = _call(pattern.replacement, builder, match.bindings)
    results = list(results) if isinstance(results, (list, tuple)) else [results]
    if len(results) != rule.results or not all(isinstance(result, ir.Value) for result in results):
        raise TypeError(
            f"the replacement of pattern {pattern.name!r} returned {results!r}; the search returns {rule.results} "
            "value(s)"
        )
    against = _reason_against(model, builder, results, match.outputs, context)
    if against is not None or not context.allows(node):
        for new in builder.nodes:  # they are listed as uses of the values they read
            for i in range(len(new.inputs)):
                new.replace_input_with(i, None)
        return False if against is None else refuse(against)
    _replace(model, graph, node, match, builder, results)
    return True


def _reason(match: MatchResult) -> str:
    """Why the matcher gave up, and where."""
    where = [str(item.name) if isinstance(item, ir.Value) else _label(item) for item in match.failure_nodes_and_values]
    reason = str(match.reason or "it does not match").strip().rstrip(".")
    return f"{reason} (at {', '.join(where)})" if where else reason


def _label(node: ir.Node) -> str:
    return f"{node.op_type} {node.outputs[0].name}" if node.outputs else node.op_type


def _reason_against(
    model: ir.Model, builder: TapeBuilder, results: list[ir.Value], old: Sequence[ir.Value], context: PassContext
) -> str | None:
    """Why the new nodes cannot take the place of the old, or ``None``."""
    for domain, version in builder.used_opsets:
        imported = model.opset_imports.get(domain)
        if version is not None and imported is not None and version != imported:
            return f"the replacement needs opset {version} of {domain or 'ai.onnx'}, the model has {imported}"
    for result, replaced in zip(results, old, strict=True):
        producer = result.producer()
        if producer in builder.nodes and producer.domain:  # no schema tells its type
            result.type, result.shape = replaced.type, replaced.shape
    infer_types(builder.nodes, model.opset_imports.get("", 1))
    for result, replaced in zip(results, old, strict=True):
        if result.dtype is not None and replaced.dtype is not None and result.dtype != replaced.dtype:
            return f"the replacement gives {result.dtype}, {replaced.name} is {replaced.dtype}"
    for new in builder.nodes:
        why = None if new.op_type == "Constant" else context.target.refuses(new)
        if why is not None:
            return f"{new.op_type}: {why}"
    if len(old) > 1 and _depends_on([value for new in builder.nodes for value in new.inputs], set(old)):
        return "what it replaces depends on itself through a node outside"
    return None


def _depends_on(values: Iterable[ir.Value | None], wanted: set[ir.Value]) -> bool:
    """Whether one of ``wanted`` is among ``values`` or leads to them."""
    waiting, seen = list(values), set()
    while waiting:
        value = waiting.pop()
        if value is None or value in seen:
            continue
        if value in wanted:
            return True
        seen.add(value)
        producer = value.producer()
        if producer is not None:
            waiting.extend(producer.inputs)
    return False


def _replace(
    model: ir.Model,
    graph: ir.Graph,
    node: ir.Node,
    match: MatchResult,
    builder: TapeBuilder,
    results: list[ir.Value],
) -> None:
    """Puts the new nodes behind ``node``, gives their results the old names, and removes what is no longer used."""
    nodes: list[ir.Node] = list(builder.nodes)
    for domain, version in builder.used_opsets:
        model.opset_imports.setdefault(domain, version or 1)
    for initializer in builder.initializers:
        _add_initializer(graph, initializer)
    made = {value for new in nodes for value in new.outputs}
    for i, old in enumerate(match.outputs):
        if results[i] in made:
            made.remove(results[i])
        elif old.is_graph_output():  # the result is another value of the graph, which has its own name
            nodes.append(ir.Node("", "Identity", [results[i]]))
            results[i] = nodes[-1].outputs[0]
        else:
            ir.convenience.replace_all_uses_with(old, results[i])
            continue
        _take_place(old, results[i])
    for new in nodes:
        new.metadata_props.update(node.metadata_props)
    graph.insert_after(node, nodes)
    _remove_unused(graph, match.nodes)
    if len(match.outputs) > 1:  # one of them may be used before ``node``
        graph.sort()


def _take_place(old: ir.Value, new: ir.Value) -> None:
    producer, old_producer = new.producer(), old.producer()
    assert producer is not None and old_producer is not None
    new.name, producer.name = old.name, old_producer.name
    new.type = old.type or new.type
    new.shape = old.shape or new.shape
    new.metadata_props.update(old.metadata_props)
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)


def _remove_unused(graph: ir.Graph, nodes: Iterable[ir.Node]) -> None:
    waiting = [node for node in nodes if node.graph is graph]
    while unused := [node for node in waiting if not any(out.uses() or out.is_graph_output() for out in node.outputs)]:
        graph.remove(unused, safe=True)
        waiting = [node for node in waiting if node.graph is graph]


def _add_initializer(graph: ir.Graph, value: ir.Value) -> None:
    name, number = value.name, 0
    while value.name in graph.initializers:
        number += 1
        value.name = f"{name}_{number}"
    graph.register_initializer(value)


def _call(function: Callable[..., Any], first: object, bindings: Mapping[str, Any]) -> Any:
    """Calls a user's function with those bindings it has parameters for."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return function(first, **bindings)
    wanted = {parameter.name for parameter in parameters}
    return function(first, **{name: bound for name, bound in bindings.items() if name in wanted})


@functools.cache
def _builder(opset: int) -> type[TapeBuilder]:
    """onnxscript's builder of replacements, that also turns numbers into constants of the dtype an operator needs."""
    from onnxscript._internal.tape_builder import BuilderFeature, TapeBuilder

    class Builder(TapeBuilder):
        def __init__(self) -> None:
            super().__init__(features=BuilderFeature.CAST_INPUTS | BuilderFeature.CONSTANT_PROPAGATION)

        def _get_schema(self, op_type: str, domain: str, version: int | None) -> onnx.defs.OpSchema | None:
            return super()._get_schema(op_type, domain, version or (opset if domain == "" else None))

    return Builder


def _origin(patterns: object) -> tuple[str, str]:
    """Where the patterns were written, by which ``register`` knows a module that is imported again."""
    first = patterns if callable(patterns) else next(iter(patterns)).search  # type: ignore[call-overload]
    return getattr(first, "__module__", ""), getattr(first, "__qualname__", "")
