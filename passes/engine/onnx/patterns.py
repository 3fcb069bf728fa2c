"""Passes of the stage ``onnx`` written as two functions: what to search for, and what to put there.

The pattern language and the matching are those of onnxscript's rewriter. A pass is a list of patterns::

    def silu(op, x):
        return op.Mul(x, op.Sigmoid(x))          # in either order

    def quick_gelu(op, x):
        return op.QuickGelu(x, alpha=1.0, _domain="com.microsoft")

    PASS = onnx_pattern_pass(
        "onnx.my_silu", "Computes x * sigmoid(x) by one operator.", lambda: [OnnxPattern("silu", silu, quick_gelu)]
    )

A condition that the form does not show is a third function of the ``PassContext`` and of what the search's parameters
stand for. It returns why the match must be left alone, or ``None``::

    def twice(op, x, first, second):
        return op.Transpose(op.Transpose(x, perm=first), perm=second)

    def check(context, first, second):
        is_back = [first.as_ints()[i] for i in second.as_ints()] == sorted(second.as_ints())
        return None if is_back else "the second Transpose does not take back the first"

    OnnxPattern("transposed back", twice, lambda op, x: op.Identity(x), check)

A parameter used as an input is an ``onnx_ir.Value``, one used as an attribute an ``onnx_ir.Attr``. A function takes
those it needs, by name.

A match is replaced by ``substitute``, which refuses other dtypes and shapes, and nodes without a kernel. Whatever stops
a match after its first node is a near miss (``context.refuse``). A ``RewriteRule`` of onnxscript, or a set of them, is
a pattern as it is. Its ``RewriteRuleSet`` has no place for the veto, the near misses of each node, the names that
values keep, and the check of what is put there.
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

    lock = Lock()  # onnxscript's matchers keep the match they are at

    @functools.cache
    def ready() -> list[_Ready]:
        items = patterns() if callable(patterns) else patterns
        return [_ready(rule) for item in items for rule in (item if isinstance(item, RewriteRuleSet) else [item])]

    def run(model: ir.Model, context: PassContext) -> int:
        with lock:
            return sum(_apply(model, graph, context, ready()) for graph in (model.graph, *model.graph.subgraphs()))

    definition = patterns if callable(patterns) else list(map(_definition, patterns))
    item = Pass(name, sentence, run, default, before=before, after=after, made_of=definition)
    if item.stage != "onnx":
        raise ValueError(f"pass name {name!r}: patterns on ONNX graphs are passes of the stage 'onnx'")
    return item


@dataclasses.dataclass(frozen=True)
class _Ready:
    """A pattern made ready for matching.

    Attributes:
        orders: a rule for each order of commutative operands; tried one after the other.
        pattern: what they were made of, ``None`` if of a rule of onnxscript.
        name: what it is called in the list of near misses.
        size: how many nodes it has.
        last: the operator it ends in, ``None`` if any.
    """

    orders: Sequence[RewriteRule]
    pattern: OnnxPattern | None
    name: str
    size: int
    last: ir.OperatorIdentifier | None


def _ready(item: OnnxPattern | RewriteRule) -> _Ready:
    pattern = item if isinstance(item, OnnxPattern) else None
    orders = [item] if isinstance(item, RewriteRule) else _orders(item)
    if orders[0].as_function:
        raise ValueError(f"rule {item}: functions of a model are not supported, it makes one of what it matches")
    graph = orders[0]._target_pattern
    last = graph.output_nodes[0].op_identifier()  # the matcher looks for the others, where a rule ends in several
    return _Ready(orders, pattern, item.name or "", graph.num_nodes(), last)


def _orders(pattern: OnnxPattern) -> Sequence[RewriteRule]:
    rule = RewriteRule(
        pattern.search, pattern.replacement, name=pattern.name, remove_nodes=not pattern.allow_other_uses
    )
    graph = rule._target_pattern
    _compare_closely(graph)
    if not graph.has_single_output_node:
        ends = ", ".join(node.op_type for node in graph.output_nodes)
        raise ValueError(
            f"pattern {pattern.name!r} ends in several nodes ({ends}); all nodes must lead to one, which has to be "
            "among the results"
        )
    return rule.commute() if pattern.commute else [rule]


def _compare_closely(graph: _pattern_ir.GraphPattern) -> None:
    """Makes the numbers of a pattern match themselves, and what float32 rounds them to; onnxscript's tolerance is
    1e-5, and what is put in the place of a formula has the pattern's number."""
    for node in graph:
        for value in node.inputs:
            for choice in value._values if isinstance(value, _pattern_ir.BacktrackingOr) else [value]:
                if isinstance(choice, _pattern_ir.Constant):
                    choice._rel_tol, choice._abs_tol = _FLOAT32_EPSILON, 0.0


class _Furthest(MatchingTracer):
    """Keeps how far the best of the failed matches of a pattern got at a node, and why not further."""

    matched = 0
    reason = ""

    def log(self, rule: object, container: object, node: object, match_result: MatchResult, status: object) -> None:
        matched = match_result.num_matched_nodes()
        if not match_result and (not self.reason or matched > self.matched):
            self.matched, self.reason = matched, _reason(match_result)


def _reason(match: MatchResult) -> str:
    """Why the matcher gave up, and where."""
    where = [
        str(item.name) if isinstance(item, ir.Value) else f"{item.op_type} {item.outputs[0].name}"
        for item in match.failure_nodes_and_values
    ]
    reason = str(match.reason or "it does not match").strip().rstrip(".")
    return f"{reason} (at {', '.join(where)})" if where else reason


def _apply(model: ir.Model, graph: ir.Graph, context: PassContext, patterns: Sequence[_Ready]) -> int:
    rules = [item.orders[0] for item in patterns]
    for visit in (rule.graph_pre_visitor for rule in rules if rule.graph_pre_visitor is not None):
        visit()
    fired = 0
    for node in list(graph):
        here = (node.op_identifier(), None)
        if node.graph is graph:  # else a match before removed it
            fired += any(_rewrite(model, graph, node, item, context) for item in patterns if item.last in here)
    if fired and any(rule._target_pattern.num_outputs > 1 for rule in rules):
        graph.sort()  # one of several results may be used before the last node of a match
    for visit in (rule.graph_post_visitor for rule in rules if rule.graph_post_visitor is not None):
        visit()
    return fired


def _rewrite(model: ir.Model, graph: ir.Graph, node: ir.Node, item: _Ready, context: PassContext) -> bool:
    """Replaces what ends at a node by what the first order that matches puts there; returns whether one did."""
    furthest = _Furthest() if context.explain else None
    for rule in item.orders:
        match = rule.match(model, graph, node, check_nodes_are_removable=rule.remove_nodes, tracer=furthest)
        if not match:
            continue
        made = _replacement(rule, item.pattern, match, context)
        if made is not None and _put(model, graph, node, made, item, context):
            return True
        if made is None and furthest is not None:
            furthest.log(rule, graph, node, match.fail(match.reason), MatchStatus.REPLACEMENT_FAILED)
    if furthest is not None and furthest.reason and (furthest.matched > 1 or item.size == 1):
        context.refuse(node, furthest.reason, matched=furthest.matched, of=item.size, pattern=item.name)
    return False


def _replacement(
    rule: RewriteRule, pattern: OnnxPattern | None, match: MatchResult, context: PassContext
) -> ReplacementSubgraph | None:
    """What to put there; ``None`` if the check or the rule refuses, for a reason that is then the match's."""
    if pattern is None:
        made = rule._replacement_pattern.get_replacement(match)
        if made is None:
            return None
    else:
        said = None if pattern.check is None else _call(pattern.check, context, match.bindings)
        if said is not None:
            if not isinstance(said, str):
                raise TypeError(f"the check of pattern {pattern.name!r} returned {said!r}, not a reason or None")
            match.fail(said)
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


def _put(
    model: ir.Model, graph: ir.Graph, node: ir.Node, made: ReplacementSubgraph, item: _Ready, context: PassContext
) -> bool:
    """Lets the new nodes, behind ``node``, compute what matched, if ``substitute`` does; returns whether it did."""
    old, new, nodes = made.match.outputs, list(made.new_outputs), list(made.new_nodes)
    free = {value for new_node in nodes for value in new_node.outputs}
    for i, value in enumerate(new):
        if value not in free:  # it has a name of its own
            nodes.append(ir.Node("", "Identity", [value]))
            new[i] = nodes[-1].outputs[0]
        free.discard(value)
    if len(old) > 1 and _depends_on([value for new_node in nodes for value in new_node.inputs], set(old)):
        reason = "what it replaces depends on itself through a node outside"
        context.refuse(node, reason, matched=item.size, of=item.size, pattern=item.name)
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
    """Calls a user's function with those bindings it has parameters for."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return function(first, **bindings)
    wanted = {parameter.name for parameter in parameters}
    return function(first, **{name: bound for name, bound in bindings.items() if name in wanted})


class _Builder(TapeBuilder):
    """onnxscript's builder of replacements, that also turns numbers into constants of the dtype an operator needs."""

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
