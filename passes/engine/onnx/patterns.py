"""Patterns on ONNX models: replaces what one function builds by what another one builds.

onnxscript's rewriter defines the pattern language and finds matches. A pass is a list of patterns::

    def silu(op, x):
        return op.Mul(x, op.Sigmoid(x))          # operands in either order

    def quick_gelu(op, x):
        return op.QuickGelu(x, alpha=1.0, _domain="com.microsoft")

    PASS = onnx_pattern_pass(
        "onnx.my_silu", "Computes x * sigmoid(x) by one operator.", lambda: [OnnxPattern("silu", silu, quick_gelu)]
    )

A check gets the ``PassContext`` and the parameters of the search by name, and returns why the match must not be
replaced, or ``None``::

    def two_transposes(op, x, first, second):
        return op.Transpose(op.Transpose(x, perm=first), perm=second)

    def check(context, first, second):
        is_inverse = [first.as_ints()[i] for i in second.as_ints()] == sorted(second.as_ints())
        return None if is_inverse else "the second Transpose does not invert the first"

    OnnxPattern("inverse transposes", two_transposes, lambda op, x: op.Identity(x), check)

A parameter used as an input is an ``onnx_ir.Value``, one used as an attribute an ``onnx_ir.Attr``. A ``RewriteRule`` of
onnxscript, or a ``RewriteRuleSet``, is a pattern too.

``substitute`` replaces a match, and rejects other dtypes, shapes and nodes without a kernel. A match that fails after
its first node is a near miss. onnxscript's own ``RewriteRuleSet.apply_to_model`` has no bisection, no near misses, and
keeps neither names nor checks.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import onnx
import onnx_ir as ir
from onnxscript._internal.tape_builder import BuilderFeature, TapeBuilder
from onnxscript.rewriter import MatchingTracer, MatchResult, MatchStatus, _pattern_ir
from onnxscript.rewriter._rewrite_rule import ReplacementSubgraph
from onnxscript.rewriter.pattern import RewriteRule, RewriteRuleSet

from ..context import PassContext
from ..locks import Lock
from ..registry import Pass
from .editing import drop, erase_unused, substitute

_FLOAT32_EPSILON = 2.0**-23


@dataclasses.dataclass(frozen=True)
class OnnxPattern:
    """A search and its replacement; see the module's examples.

    Attributes:
        name: the pattern's name, for near misses.
        search: ``search(op, x, ...)`` builds the pattern: ``op.Add(x, 1.0)`` is a node, a parameter is any value or
            attribute, a number is a constant equal to it up to float32's rounding. Other arguments of a node are
            onnxscript's: ``_domain``, ``_outputs`` (names, or how many), ``_allow_other_attributes`` (default: true),
            ``_allow_other_inputs`` (default: false), ``_check``; ``onnxscript.rewriter.pattern.OrValue`` is a choice.
            It returns one value, or several, of which one depends on all nodes.
        replacement: ``replacement(op, x, ...)`` builds as many values, of the same dtypes and shapes:
            ``op.Gelu(x, approximate="tanh")``, with ``_domain``, ``_version`` (default: 1) and ``_outputs``. Numbers
            and lists become constants of the dtype that the operator needs.
        check: ``check(context, x, ...)`` returns why a match must not be replaced, or ``None``.
        commute: whether operands of Add, Mul, And, Or, Max, Min... match in either order.
        allow_other_uses: whether inner values of the match may have other users; they are then still computed.
    """

    name: str
    search: Callable[..., Any]
    replacement: Callable[..., Any]
    check: Callable[..., str | None] | None = None
    commute: bool = True
    allow_other_uses: bool = False


AnyPattern: TypeAlias = OnnxPattern | RewriteRule | RewriteRuleSet
"""What ``onnx_pattern_pass`` takes."""


def onnx_pattern_pass(
    name: str,
    sentence: str,
    patterns: Sequence[AnyPattern] | Callable[[], Iterable[AnyPattern]],
    *,
    default: bool = True,
    before: Sequence[str] = (),
    after: Sequence[str] = (),
) -> Pass:
    """A pass that replaces the matches of patterns.

    Args:
        name: see ``Pass``; the stage is ``onnx``.
        sentence: see ``Pass``.
        patterns: the patterns in the order they are tried at a node, or a function that returns them, called at the
            first graph.
        default, before, after: see ``Pass``.

    Raises:
        ValueError: the name is not one of the stage ``onnx``.
    """
    lock = Lock()  # onnxscript's matchers hold the state of the current match

    @functools.cache
    def rules() -> list[_Rules]:
        items = patterns() if callable(patterns) else patterns
        return [_rules_of(rule) for item in items for rule in (item if isinstance(item, RewriteRuleSet) else [item])]

    def run(model: ir.Model, context: PassContext) -> int:
        with lock:
            return sum(_apply(model, graph, context, rules()) for graph in (model.graph, *model.graph.subgraphs()))

    definition = patterns if callable(patterns) else list(map(_definition, patterns))
    item = Pass(name, sentence, run, default, before=before, after=after, made_of=definition)
    if item.stage != "onnx":
        raise ValueError(f"pass name {name!r}: patterns on ONNX graphs are passes of the stage 'onnx'")
    return item


@dataclasses.dataclass(frozen=True)
class _Rules:
    """The rules of onnxscript for one pattern.

    Attributes:
        orders: a rule for each order of commutative operands, in the order they are tried.
        pattern: the pattern, ``None`` if it is a rule of onnxscript.
        name: the pattern's name.
        size: how many nodes it has.
        last: the operator of its last node, ``None`` if any.
    """

    orders: Sequence[RewriteRule]
    pattern: OnnxPattern | None
    name: str
    size: int
    last: ir.OperatorIdentifier | None


def _rules_of(item: OnnxPattern | RewriteRule) -> _Rules:
    pattern = item if isinstance(item, OnnxPattern) else None
    orders = [item] if isinstance(item, RewriteRule) else _orders(item)
    if orders[0].as_function:
        raise ValueError(f"rule {item}: rules that make functions of a model are not supported")
    graph = orders[0]._target_pattern
    last = graph.output_nodes[0].op_identifier()  # the matcher finds the other output nodes
    return _Rules(orders, pattern, item.name or "", graph.num_nodes(), last)


def _orders(pattern: OnnxPattern) -> Sequence[RewriteRule]:
    rule = RewriteRule(
        pattern.search, pattern.replacement, name=pattern.name, remove_nodes=not pattern.allow_other_uses
    )
    graph = rule._target_pattern
    _compare_closely(graph)
    if not graph.has_single_output_node:
        ends = ", ".join(node.op_type for node in graph.output_nodes)
        raise ValueError(
            f"pattern {pattern.name!r} ends in several nodes ({ends}); one of its results must depend on all nodes"
        )
    return rule.commute() if pattern.commute else [rule]


def _compare_closely(graph: _pattern_ir.GraphPattern) -> None:
    """Sets the tolerance of numbers to float32's rounding; onnxscript's 1e-5 would accept other formulas."""
    for node in graph:
        for value in node.inputs:
            for choice in value._values if isinstance(value, _pattern_ir.BacktrackingOr) else [value]:
                if isinstance(choice, _pattern_ir.Constant):
                    choice._rel_tol, choice._abs_tol = _FLOAT32_EPSILON, 0.0


class _Furthest(MatchingTracer):
    """The failed match of a pattern at a node with the most matched nodes, and why it failed."""

    matched = 0
    reason = ""

    def log(self, rule: object, container: object, node: object, match_result: MatchResult, status: object) -> None:
        matched = match_result.num_matched_nodes()
        if not match_result and (not self.reason or matched > self.matched):
            self.matched, self.reason = matched, _reason(match_result)


def _reason(match: MatchResult) -> str:
    """Why a match failed, and where."""
    where = [
        str(item.name) if isinstance(item, ir.Value) else f"{item.op_type} {item.outputs[0].name}"
        for item in match.failure_nodes_and_values
    ]
    reason = str(match.reason or "it does not match").strip().rstrip(".")
    return f"{reason} (at {', '.join(where)})" if where else reason


def _apply(model: ir.Model, graph: ir.Graph, context: PassContext, patterns: Sequence[_Rules]) -> int:
    rules = [item.orders[0] for item in patterns]
    for visit in (rule.graph_pre_visitor for rule in rules if rule.graph_pre_visitor is not None):
        visit()
    fired = 0
    for node in list(graph):
        last = (node.op_identifier(), None)
        if node.graph is graph:  # else an earlier match removed it
            fired += any(_rewrite(model, graph, node, item, context) for item in patterns if item.last in last)
    if fired and any(rule._target_pattern.num_outputs > 1 for rule in rules):
        graph.sort()  # a result may be used before the last node of the match
    for visit in (rule.graph_post_visitor for rule in rules if rule.graph_post_visitor is not None):
        visit()
    return fired


def _rewrite(model: ir.Model, graph: ir.Graph, node: ir.Node, item: _Rules, context: PassContext) -> bool:
    """Replaces the match that ends at a node, by the first order that matches; returns whether it did."""
    furthest = _Furthest() if context.explain else None
    for rule in item.orders:
        match = rule.match(model, graph, node, check_nodes_are_removable=rule.remove_nodes, tracer=furthest)
        if not match:
            continue
        made = _replacement(rule, item.pattern, match, context)
        if made is not None and _insert(model, graph, node, made, item, context):
            return True
        if made is None and furthest is not None:
            furthest.log(rule, graph, node, match.fail(match.reason), MatchStatus.REPLACEMENT_FAILED)
    if furthest is not None and furthest.reason and (furthest.matched > 1 or item.size == 1):
        context.record_near_miss(node, furthest.reason, matched=furthest.matched, of=item.size, pattern=item.name)
    return False


def _replacement(
    rule: RewriteRule, pattern: OnnxPattern | None, match: MatchResult, context: PassContext
) -> ReplacementSubgraph | None:
    """The replacement of a match; ``None`` if the check or the rule rejects it, with the reason in ``match``."""
    if pattern is None:
        made = rule._replacement_pattern.get_replacement(match)
        if made is None:
            return None
    else:
        reason = None if pattern.check is None else _call(pattern.check, context, match.bindings)
        if reason is not None:
            if not isinstance(reason, str):
                raise TypeError(f"the check of pattern {pattern.name!r} returned {reason!r}, not a reason or None")
            match.fail(reason)
            return None
        builder = _Builder(context.target.opset)
        results = _call(pattern.replacement, builder, match.bindings)
        results = results if isinstance(results, (list, tuple)) else [results]
        made = ReplacementSubgraph(match, results, builder.nodes, builder.initializers, builder.used_opsets)
    if len(made.new_outputs) != len(match.outputs) or not all(isinstance(item, ir.Value) for item in made.new_outputs):
        raise TypeError(
            f"the replacement of pattern {rule.name!r} returned {made.new_outputs!r}; the search returns "
            f"{len(match.outputs)} value(s)"
        )
    return made


def _insert(
    model: ir.Model, graph: ir.Graph, node: ir.Node, made: ReplacementSubgraph, item: _Rules, context: PassContext
) -> bool:
    """Inserts the replacement after ``node`` by ``substitute``; returns whether it did."""
    old, new, nodes = made.match.outputs, list(made.new_outputs), list(made.new_nodes)
    free = {value for new_node in nodes for value in new_node.outputs}
    for i, value in enumerate(new):
        if value not in free:  # an existing value, or one returned twice
            nodes.append(ir.Node("", "Identity", [value]))
            new[i] = nodes[-1].outputs[0]
        free.discard(value)
    if len(old) > 1 and _depends_on([value for new_node in nodes for value in new_node.inputs], set(old)):
        reason = "a result depends on another one through a node outside the match"
        context.record_near_miss(node, reason, matched=item.size, of=item.size, pattern=item.name)
        return drop(nodes)
    if not substitute(model, context, old, nodes, new=new, after=node, pattern=item.name, size=item.size):
        return False
    for identity in nodes[len(made.new_nodes) :]:
        (result,), (value,) = identity.outputs, identity.inputs
        if value is not None and not result.is_graph_output():
            result.replace_all_uses_with(value)
            erase_unused([result])
    for initializer in made.new_initializers:
        while initializer.name in graph.initializers:
            initializer.name = f"{initializer.name}_"
        graph.register_initializer(initializer)
    return True


def _depends_on(values: Iterable[ir.Value | None], wanted: set[ir.Value]) -> bool:
    """Whether one of ``wanted`` is among ``values`` or leads to them."""
    waiting, seen = list(values), set()
    while waiting:
        value = waiting.pop()
        producer = None if value is None or value in seen else value.producer()
        seen.add(value)
        if value in wanted:
            return True
        waiting.extend(() if producer is None else producer.inputs)
    return False


def _call(function: Callable[..., Any], first: object, bindings: Mapping[str, Any]) -> Any:
    """Calls a user's function with the bindings that it has parameters for."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return function(first, **bindings)
    wanted = {parameter.name for parameter in parameters}
    return function(first, **{name: bound for name, bound in bindings.items() if name in wanted})


class _Builder(TapeBuilder):
    """onnxscript's builder of replacements, which turns numbers into constants of the dtype an operator needs."""

    def __init__(self, opset: int) -> None:
        super().__init__(features=BuilderFeature.CAST_INPUTS | BuilderFeature.CONSTANT_PROPAGATION)
        self._opset = opset

    def _get_schema(self, op_type: str, domain: str, version: int | None) -> onnx.defs.OpSchema | None:
        return super()._get_schema(op_type, domain, version or (self._opset if domain == "" else None))


def _definition(pattern: AnyPattern) -> list[object]:
    """What makes a pattern the same as another one, its functions first."""
    if isinstance(pattern, RewriteRuleSet):
        return list(map(_definition, pattern.rules))
    if isinstance(pattern, RewriteRule):
        return [pattern._replacement_pattern._function, pattern._condition_function, str(pattern), pattern.remove_nodes]
    return [pattern.search, vars(pattern)]
