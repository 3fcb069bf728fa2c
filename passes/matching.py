"""Patterns on PyTorch's pattern matcher: registering, applying, explaining near misses. See ``passes.patterns``.

The one module that touches ``torch._inductor.pattern_matcher``; written against PyTorch 2.13. Importing it takes 0.6 s,
so it is imported when a graph needs it.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._inductor import pattern_matcher
from torch._inductor.pattern_matcher import Match, PatternExpr, PatternMatcherPass
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from .context import PassContext, Refusal
from .patterns import Pattern

aten = torch.ops.aten

_NEAR = 0.5
"""Share of a pattern's nodes, of two at least, that must have matched for a near miss to be worth telling."""


class Matcher:
    """Patterns registered with PyTorch's matcher. It knows no context; that of the current call is set aside for it."""

    def __init__(self, name: str, patterns: Sequence[Pattern], context: PassContext) -> None:
        self._current = threading.local()
        self._name_of: dict[PatternExpr, Pattern] = {}
        self._matcher = PatternMatcherPass(pass_name=name)
        decompositions = context.target.decompositions
        for pattern in patterns:
            with _tracing_apart():
                expression = pattern_matcher.register_replacement(
                    pattern.search,
                    pattern.replacement,
                    _arguments(pattern),
                    _Tracer(pattern.is_training),
                    self._matcher,
                    extra_check=functools.partial(self._accepts, pattern),
                    scalar_workaround=dict(pattern.scalars),
                    skip_duplicates=True,
                    get_decomp_fn=lambda: dict(decompositions()),
                )
            if isinstance(expression, PatternExpr):
                self._name_of[expression] = pattern

    def apply(self, module: fx.GraphModule, context: PassContext) -> int:
        """Replaces the matches in a graph; returns how many."""
        self._current.context = context
        before = set(module.graph.nodes)
        fired = self._matcher.apply(module)
        if fired:
            module.graph.eliminate_dead_code()
            _inherit_source(module, before)
            module.recompile()
        if context.explain:
            self._explain(module, context)
        return fired

    def _accepts(self, pattern: Pattern, match: Match) -> bool:
        context: PassContext = self._current.context
        node = match.output_nodes()[0]
        reason = pattern.check(match) if pattern.check is not None else None
        if reason is not None:
            size = len(match.nodes)
            context.refuse(node, reason, matched=size, of=size, pattern=pattern.name)
            return False
        return context.allows(node)

    def _explain(self, module: fx.GraphModule, context: PassContext) -> None:
        """Matches once more what did not match, to note how far each pattern got and where it stopped."""
        for (op, target), entries in self._matcher.patterns.items():
            for node in module.graph.find_nodes(op=op, target=target):
                misses = [
                    miss
                    for entry in entries
                    if (pattern := self._name_of.get(entry.pattern)) is not None
                    and (miss := _near_miss(pattern.name, entry.pattern, node)) is not None
                ]
                if misses:
                    best = max(misses, key=lambda miss: miss.matched / miss.of)
                    context.refuse(best.node, best.reason, matched=best.matched, of=best.of, pattern=best.pattern)


class _Tracer:
    """Traces a function as ``fwd_only`` or ``joint_fwd_bwd``, once for each function and kind of arguments.

    A pattern that matches once in each layer of a model is replaced by copies of one graph.
    """

    def __init__(self, is_training: bool) -> None:
        self._trace = pattern_matcher.joint_fwd_bwd if is_training else pattern_matcher.fwd_only
        self._known: dict[object, fx.GraphModule] = {}

    def __call__(self, function: Callable[..., Any], args: Sequence[Any], **kwargs: Any) -> fx.GraphModule:
        key = (function, tuple(map(_kind, args)))
        if any(isinstance(item, torch.SymInt) for arg in args for item in _sizes(arg)):
            return _without_ends(self._trace(function, args, **kwargs))  # its symbols belong to one compile
        if key not in self._known:
            self._known[key] = _without_ends(self._trace(function, args, **kwargs))
        return pattern_matcher.clone_graph(self._known[key])


def _without_ends(module: fx.GraphModule) -> fx.GraphModule:
    """Takes away the marks autograd leaves in a traced backward; ``joint.remove_noops`` takes them from the graphs."""
    for target in (aten.detach.default, aten.alias.default):
        for node in module.graph.find_nodes(op="call_function", target=target):
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
    module.recompile()
    return module


def _sizes(value: object) -> Sequence[object]:
    if isinstance(value, torch.Tensor):
        return (*value.shape, *value.stride())
    return (value,)


def _kind(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.device, tuple(value.shape), tuple(value.stride()), value.requires_grad
    return type(value), value


@contextlib.contextmanager
def _tracing_apart() -> Iterator[None]:
    """A fake mode of its own for a pattern, while a compile has its own."""
    with torch._guards.tracing(None), unset_fake_temporarily(), FakeTensorMode():
        yield


def _arguments(pattern: Pattern) -> list[Any]:
    """Tensors like the example inputs, of the fake mode that is on."""
    return [
        torch.empty_strided(
            tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device, requires_grad=tensor.requires_grad
        )
        for tensor in pattern.example_inputs
    ]


def _inherit_source(module: fx.GraphModule, before: set[fx.Node]) -> None:
    """Gives the nodes that came in, inner ones of a replacement, the source lines of the node that uses them."""
    for node in reversed(module.graph.nodes):
        if node in before or node.op != "call_function":
            continue
        for user in node.users:
            for key in ("stack_trace", "nn_module_stack", "source_fn_stack"):
                if key in user.meta:
                    node.meta.setdefault(key, user.meta[key])


def _near_miss(name: str, pattern: PatternExpr, node: fx.Node) -> Refusal | None:
    """How far a pattern gets at a node, if it gets far and does not match."""
    outputs = getattr(pattern, "outputs", None) or [pattern]
    attempt = pattern_matcher.MatchContext(outputs, graph=node.graph)
    try:
        failed = attempt.match(pattern, node)
    except pattern_matcher.FailedMatch as error:
        failed = error
    if pattern_matcher.is_match(failed):
        return None
    where, reason, is_right_operator = _explanation(failed, node)
    visited = sum(isinstance(item, pattern_matcher._TargetExpr) for item in attempt.pattern_to_node)
    matched, total = visited - (not is_right_operator), _count_calls(pattern, set())
    if matched < 2 or matched < _NEAR * total:
        return None
    return Refusal(where.name, reason, matched, total, name)


def _count_calls(pattern: object, seen: set[int]) -> int:
    if id(pattern) in seen or not isinstance(pattern, PatternExpr):
        return 0
    seen.add(id(pattern))
    if isinstance(pattern, pattern_matcher.MultiOutputPattern):
        return sum(_count_calls(item, seen) for item in pattern.outputs)
    if not isinstance(pattern, pattern_matcher._TargetArgsExpr):
        return 0
    return 1 + sum(_count_calls(item, seen) for item in pattern.flat_args_kwargs[0])


def _explanation(failed: Any, anchor: fx.Node) -> tuple[fx.Node, str, bool]:
    """Where a match stopped, PyTorch's condition in words, and whether the operator there was the right one."""
    kind = failed.format_string.split(":")[0].split(" ")[0]
    node = next((item for item in failed.args if isinstance(item, fx.Node)), anchor)
    wanted = next((item for item in failed.args if isinstance(item, pattern_matcher._TargetExpr)), None)
    operator = str(wanted.fns[0]) if wanted is not None else "?"
    if kind == "function_mismatch":
        found = failed.args[0]
        if not isinstance(found, fx.Node):
            return node, f"{found!r} stands where the pattern has {operator}", False
        is_call = found.op == "call_function"
        return (
            node,
            f"{found.name} is {found.target if is_call else 'an input'} where the pattern has {operator}",
            False,
        )
    if kind == "multiple_users":
        return node, f"the result of {operator} has users outside the pattern", True
    if kind == "constant_args":
        expected = failed.kwargs["pattern"]
        return node, f"{node.name} has the argument {failed.args[1]!r} where the pattern has {expected!r}", True
    return node, str(failed), False
