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
3. The results must have the dtypes and shapes of those they replace, as inferred, and ``context.target.refuses`` must
   know a kernel for each new node.
4. ``context.allows`` is asked.
5. The replacement's results take the names, types, shapes and metadata of those they replace; opset imports of new
   domains are added; what nothing uses any more is removed.

Whatever stops a match after its first node is a near miss, listed with how far it got (``context.refuse``).

A rewrite rule of onnxscript, or a set of them, is a pattern as it is::

    from onnxscript.rewriter.rules.common import transpose_transpose_rule

    register(onnx_pattern_pass("onnx.my_transposes", "Makes one of two transposes.", [transpose_transpose_rule]))

Inside, each pattern is such a rule (``Rule``, a ``RewriteRule`` that asks before it rewrites). The matching is
onnxscript's. Not onnxscript's, as its ``RewriteRuleSet`` has no place for them: the veto, the reasons, the names that
values keep, and the choice of the patterns that can match at a node at all.

Where the nodes to search for are a family with many variants, a pass that walks the graph itself is easier to read
than a list of patterns; see ``passes/onnx/attention``.
"""

from __future__ import annotations

import contextvars
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import onnx
import onnx_ir as ir
from onnxscript._internal.tape_builder import BuilderFeature, TapeBuilder
from onnxscript.rewriter import MatchResult, _pattern_ir, _rewrite_rule
from onnxscript.rewriter.pattern import RewriteRule, RewriteRuleSet

from ..context import PassContext
from ..locks import Lock
from ..registry import Pass
from .editing import drop, reason_against_substituting

__all__ = ["OnnxPattern", "apply_patterns", "onnx_pattern_pass"]

_MOST_ORDERS = 64
"""Orders of commutative operands of one pattern that are searched for: of six Adds and Muls."""

_FLOAT32_EPSILON = 2.0**-23

_current: contextvars.ContextVar[PassContext] = contextvars.ContextVar("the context of the pass that is running")


@dataclasses.dataclass(frozen=True)
class OnnxPattern:
    """What to search for in an ONNX graph and what to put there; the module's docstring has examples.

    Attributes:
        name: what the pattern is called in the list of near misses.
        search: ``search(op, x, ...)`` builds the pattern: ``op.Add(x, 1.0)`` is a node, a parameter stands for any
            value or attribute, a number for a constant that is it, or what float32 rounds it to. Further arguments of a
            node are onnxscript's: ``_domain``, ``_outputs`` (names, or how many), ``_allow_other_attributes`` (default
            yes), ``_allow_other_inputs`` (default no), ``_check``; ``onnxscript.rewriter.pattern`` has ``OrValue`` for
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


AnyPattern: TypeAlias = OnnxPattern | RewriteRule | RewriteRuleSet
"""What a pass of patterns is made of."""


def onnx_pattern_pass(
    name: str,
    sentence: str,
    patterns: Sequence[AnyPattern] | Callable[[], Iterable[AnyPattern]],
    *,
    default: bool = True,
    before: Sequence[str] = (),
    after: Sequence[str] = (),
) -> Pass:
    """A pass that replaces what its patterns find.

    Args:
        name: ``onnx.`` and what the pass is called.
        sentence: what it does, for the list of passes.
        patterns: in the order they are tried at a node; the first that matches is taken. A function is called once,
            when a graph first needs them.
        default: whether the pass is on unless the option ``passes`` says otherwise.
        before, after: see ``Pass``.

    Raises:
        ValueError: the name is not one of the stage ``onnx``.
    """

    @functools.cache
    def ready() -> _Patterns:
        return _Patterns(patterns() if callable(patterns) else patterns)

    def run(model: ir.Model, context: PassContext) -> int:
        return _apply(model, context, ready())

    functions = patterns if callable(patterns) else list(map(_functions, patterns))
    item = Pass(name, sentence, run, default, before=before, after=after, made_of=functions)
    if item.stage != "onnx":
        raise ValueError(f"pass name {name!r}: patterns on ONNX graphs are passes of the stage 'onnx'")
    return item


def apply_patterns(model: ir.Model, context: PassContext, patterns: Iterable[AnyPattern]) -> int:
    """Replaces what the patterns find in a model, in place, subgraphs included; returns how often.

    For a pass that does more than that; it is quicker to make the patterns once, with ``onnx_pattern_pass``.
    """
    return _apply(model, context, _Patterns(patterns))


class Rule(RewriteRule):
    """A rewrite rule of onnxscript that asks the running pass before it rewrites, and tells it why it does not."""

    def __init__(self, rule: RewriteRule) -> None:
        super().__init__(
            rule._target_pattern,
            rule._replacement_pattern,
            rule._condition_function,
            rule._matcher,
            rule._verbose,
            rule.name,
            rule.remove_nodes,
            rule.graph_pre_visitor,
            rule.graph_post_visitor,
            rule.as_function,
        )
        graph = self._target_pattern
        if rule.as_function:
            raise ValueError(f"rule {rule}: functions of a model are not supported, it makes one of what it matches")
        first = graph.output_nodes[0]  # the matcher looks for the others, where a rule ends in several
        self.size: int = graph.num_nodes()
        self.operator: ir.OperatorIdentifier | None = first.op_identifier()
        self.operators = _operators_of(graph)
        self.reads = _operators_above(first)

    def try_rewrite(
        self,
        model: ir.Model,
        graph_or_function: ir.Graph | ir.Function,
        node: ir.Node,
        *,
        verbose: int | None = None,
        tracer: Any = None,
    ) -> _rewrite_rule.ReplacementSubgraph | None:
        """What to put where the rule matches, if the running pass may; ``tracer`` hears of what did not match."""
        context = _current.get()
        match = self.match(
            model, graph_or_function, node, verbose=verbose, check_nodes_are_removable=self.remove_nodes, tracer=tracer
        )
        if not match:
            return None
        delta = self._replacement_pattern.get_replacement(match)
        if delta is None:
            self._refuse(node, _reason(match))
            return None
        expected = self._target_pattern.num_outputs
        if len(delta.new_outputs) != expected or not all(isinstance(value, ir.Value) for value in delta.new_outputs):
            raise TypeError(
                f"the replacement of pattern {self.name!r} returned {delta.new_outputs!r}; the search returns "
                f"{expected} value(s)"
            )
        against = _reason_against(model, delta, context)
        if against is None and context.allows(node):
            return delta
        drop(delta.new_nodes)  # they are listed as uses of the values they read
        if against is not None:
            self._refuse(node, against)
        return None

    def _refuse(self, node: ir.Node, reason: str) -> None:
        _current.get().refuse(node, reason, matched=self.size, of=self.size, pattern=self.name or "")


class _Replacement(_rewrite_rule.ReplacementPatternFunction):
    """The replacement of an ``OnnxPattern``: numbers become constants of the dtype an operator needs."""

    def __init__(self, pattern: OnnxPattern) -> None:
        super().__init__(functools.partial(_call, pattern.replacement))

    def get_replacement(self, match: MatchResult) -> _rewrite_rule.ReplacementSubgraph:
        builder: TapeBuilder = _builder(_current.get().target.opset)()
        results = self._function(builder, match.bindings)
        results = list(results) if isinstance(results, (list, tuple)) else [results]
        return _rewrite_rule.ReplacementSubgraph(
            match, results, builder.nodes, builder.initializers, builder.used_opsets
        )


def _rules_of(pattern: AnyPattern) -> list[list[Rule]]:
    """What is tried at a node, one after the other: of each pattern a rule for each order of commutative operands."""
    if isinstance(pattern, RewriteRuleSet):
        return [[Rule(rule)] for rule in pattern]
    if isinstance(pattern, RewriteRule):
        return [[Rule(pattern)]]
    check = pattern.check

    def condition(_: object, **bindings: Any) -> bool | MatchResult:
        said = None if check is None else _call(check, _current.get(), bindings)
        if said is None:
            return True
        if not isinstance(said, str):
            raise TypeError(f"the check of pattern {pattern.name!r} returned {said!r}, not a reason or None")
        result = MatchResult()
        result.fail(said)
        return result

    rule = RewriteRule(
        pattern.search,
        _Replacement(pattern),
        condition,
        name=pattern.name,
        remove_nodes=not pattern.allow_other_uses,
    )
    _compare_closely(rule._target_pattern)
    straight, graph = Rule(rule), rule._target_pattern
    if not graph.has_single_output_node:
        ends = ", ".join(node.op_type for node in graph.output_nodes)
        raise ValueError(
            f"pattern {pattern.name!r} ends in several nodes ({ends}); all nodes must lead to one, which has to be "
            "among the results"
        )
    if not pattern.commute:
        return [[straight]]
    orders = rule.commute()
    if len(orders) > _MOST_ORDERS:
        raise ValueError(
            f"pattern {pattern.name!r} has {len(orders)} orders of commutative operands, more than {_MOST_ORDERS}; "
            "give it commute=False and list the orders that occur"
        )
    return [[Rule(order) for order in orders]]


def _compare_closely(graph: _pattern_ir.GraphPattern) -> None:
    """Makes the numbers of a pattern match themselves, and what float32 rounds them to; onnxscript's tolerance is
    1e-5, and what is put in the place of a formula has the pattern's number."""
    for node in graph:
        for value in node.inputs:
            choices = value._values if isinstance(value, _pattern_ir.BacktrackingOr) else [value]
            for choice in choices:
                if isinstance(choice, _pattern_ir.Constant):
                    choice._rel_tol, choice._abs_tol = _FLOAT32_EPSILON, 0.0


class _Patterns:
    """Patterns made ready for matching, by the operator they end in."""

    def __init__(self, patterns: Iterable[AnyPattern]) -> None:
        self.lock = Lock()  # onnxscript's matchers keep the match they are at
        self.all = [orders for pattern in patterns for orders in _rules_of(pattern)]
        self._by_operator: dict[ir.OperatorIdentifier | None, list[int]] = {}
        for rank, orders in enumerate(self.all):
            self._by_operator.setdefault(orders[0].operator, []).append(rank)

    def at(self, node: ir.Node, present: set[str] | None) -> Sequence[list[Rule]]:
        """Those that may match at a node, in their order.

        Args:
            node: the last node of a match.
            present: all operators of the model, if patterns of which one is missing are not wanted.
        """
        ranks = self._by_operator.get((node.domain, node.op_type, node.overload), [])
        if None in self._by_operator:
            ranks = sorted([*ranks, *self._by_operator[None]])
        found = [self.all[rank] for rank in ranks]
        return found if present is None else [orders for orders in found if orders[0].operators <= present]


def _operators_of(graph: _pattern_ir.GraphPattern) -> frozenset[str]:
    """The operators of a pattern, none if it leaves a choice among them."""
    choices = (_pattern_ir.BacktrackingOr, _pattern_ir.OpIdDispatchOr)
    if any(isinstance(value, choices) for node in graph for value in node.inputs):
        return frozenset()
    identifiers = [node.op_identifier() for node in graph]
    return frozenset(identifier[1] for identifier in identifiers if identifier is not None)


def _operators_above(node: _pattern_ir.NodePattern) -> Sequence[tuple[int, str]]:
    """The operators that the last node of a pattern reads directly, by the number of the input."""
    above = [(i, value.producer()) for i, value in enumerate(node.inputs) if value is not None]
    known = [(i, producer.op_identifier()) for i, producer in above if producer is not None]
    return [(i, identifier[1]) for i, identifier in known if identifier is not None]


def _reads(node: ir.Node, operators: Sequence[tuple[int, str]]) -> bool:
    inputs = node.inputs
    for i, operator in operators:
        value = inputs[i] if i < len(inputs) else None
        producer = None if value is None else value.producer()
        if producer is None or producer.op_type != operator:
            return False
    return True


class _Furthest:
    """Takes the place of onnxscript's ``MatchingTracer``: keeps the failed match that got furthest, and its rule."""

    def __init__(self) -> None:
        self.match: MatchResult | None = None
        self.rule: Rule | None = None

    def log(self, rule: Rule, graph: ir.Graph, node: ir.Node, match: MatchResult, status: object) -> None:
        if not match and (self.match is None or match.num_matched_nodes() > self.match.num_matched_nodes()):
            self.match, self.rule = match, rule


def _apply(model: ir.Model, context: PassContext, patterns: _Patterns) -> int:
    token = _current.set(context)
    try:
        with patterns.lock:
            return _apply_to_graphs(model, context, patterns)
    finally:
        _current.reset(token)


def _apply_to_graphs(model: ir.Model, context: PassContext, patterns: _Patterns) -> int:
    visitors = [orders[0] for orders in patterns.all]
    graphs = (model.graph, *model.graph.subgraphs())
    present = None if context.explain else {node.op_type for graph in graphs for node in graph}
    fired = 0
    for graph in graphs:
        for rule in visitors:
            if rule.graph_pre_visitor is not None:
                rule.graph_pre_visitor()
        fired += _apply_to_graph(model, graph, context, patterns, present)
        for rule in visitors:
            if rule.graph_post_visitor is not None:
                rule.graph_post_visitor()
    return fired


def _apply_to_graph(
    model: ir.Model, graph: ir.Graph, context: PassContext, patterns: _Patterns, present: set[str] | None
) -> int:
    fired, has_several = 0, False
    for node in [node for node in graph if patterns.at(node, present)]:
        for orders in patterns.at(node, present):
            if node.graph is not graph:  # removed by a match before
                break
            delta, rule = _rewritten(orders, model, graph, node, context)
            if delta is not None and rule is not None:
                _replace(model, graph, node, delta, rule)
                has_several |= len(delta.new_outputs) > 1
                fired += 1
                break
    if has_several:  # one of several results may be used before the last node of a match
        graph.sort()
    return fired


def _rewritten(
    orders: Sequence[Rule], model: ir.Model, graph: ir.Graph, node: ir.Node, context: PassContext
) -> tuple[_rewrite_rule.ReplacementSubgraph | None, Rule | None]:
    """What the first order that matches puts there, and that order; near misses are told if someone wants to know."""
    furthest = _Furthest() if context.explain else None
    for rule in orders:
        if furthest is None and not _reads(node, rule.reads):
            continue
        delta = rule.try_rewrite(model, graph, node, tracer=furthest)
        if delta is not None:
            return delta, rule
    if furthest is not None and furthest.match is not None and furthest.rule is not None:
        rule, matched = furthest.rule, furthest.match.num_matched_nodes()
        if matched > 1 or rule.size == 1:
            context.refuse(node, _reason(furthest.match), matched=matched, of=rule.size, pattern=rule.name or "")
    return None, None


def _reason(match: MatchResult) -> str:
    """Why the matcher gave up, and where."""
    where = [str(item.name) if isinstance(item, ir.Value) else _label(item) for item in match.failure_nodes_and_values]
    reason = str(match.reason or "it does not match").strip().rstrip(".")
    return f"{reason} (at {', '.join(where)})" if where else reason


def _label(node: ir.Node) -> str:
    return f"{node.op_type} {node.outputs[0].name}" if node.outputs else node.op_type


def _reason_against(model: ir.Model, delta: _rewrite_rule.ReplacementSubgraph, context: PassContext) -> str | None:
    """Why the new nodes cannot take the place of the old, or ``None``."""
    for domain, version in delta.used_opsets:
        imported = model.opset_imports.get(domain)
        if version is not None and imported is not None and version != imported:
            return f"the replacement needs opset {version} of {domain or 'ai.onnx'}, the model has {imported}"
    old = delta.match.outputs
    against = reason_against_substituting(model, old, delta.new_outputs, delta.new_nodes, context.target)
    if against is not None:
        return against
    if len(old) > 1 and _depends_on([value for new in delta.new_nodes for value in new.inputs], set(old)):
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
    model: ir.Model, graph: ir.Graph, node: ir.Node, delta: _rewrite_rule.ReplacementSubgraph, rule: Rule
) -> None:
    """Puts the new nodes behind ``node``, gives their results the old names, and removes what is no longer used."""
    nodes: list[ir.Node] = list(delta.new_nodes)
    results = list(delta.new_outputs)
    for domain, version in delta.used_opsets:
        model.opset_imports.setdefault(domain, version or 1)
    for initializer in delta.new_initializers:
        _add_initializer(graph, initializer)
    made = {value for new in nodes for value in new.outputs}
    for i, old in enumerate(delta.match.outputs):
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
    _remove_unused(graph, delta.match.nodes)


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

    class Builder(TapeBuilder):
        def __init__(self) -> None:
            super().__init__(features=BuilderFeature.CAST_INPUTS | BuilderFeature.CONSTANT_PROPAGATION)

        def _get_schema(self, op_type: str, domain: str, version: int | None) -> onnx.defs.OpSchema | None:
            return super()._get_schema(op_type, domain, version or (opset if domain == "" else None))

    return Builder


def _functions(pattern: AnyPattern) -> list[object]:
    """The functions that a pattern is made of, by which ``register`` knows a pass that is defined again."""
    if isinstance(pattern, RewriteRuleSet):
        return list(map(_functions, pattern.rules))
    if isinstance(pattern, RewriteRule):
        return [pattern._replacement_pattern._function, pattern._condition_function, str(pattern)]
    return [pattern.search, pattern.replacement, pattern.check]
