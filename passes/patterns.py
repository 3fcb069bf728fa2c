"""Replaces what one function computes by what another computes, on FX graphs, with PyTorch's pattern matcher.

Two functions of the same arguments say what to look for and what to put there. They are traced into graphs, so they are
written as one writes a model::

    def search(x):
        return x * torch.sigmoid(x)

    def replacement(x):
        return torch.nn.functional.silu(x)

    PASS = pattern_pass(
        "post_grad.find_silu",
        "Writes x * sigmoid(x) as SiLU.",
        lambda: [Pattern("silu", search, replacement, example_inputs=[torch.empty(2, 3)])],
    )

A check on the match sees the real nodes, shapes and dtypes, and may refuse with a reason; a number is an argument if
the pattern names it among ``scalars``, with a value by which the tracer knows it again::

    def scaled(x, factor):
        return torch.relu(x) * factor

    def is_positive(match):
        return None if match.kwargs["factor"] > 0 else "the factor is not positive"

    Pattern("scaled", scaled, lambda x, factor: torch.relu(x * factor), [torch.empty(2, 3)], check=is_positive,
            scalars={"factor": 0.1234})

What holds for all patterns: every node of a match but the last has no user outside it; a pattern is traced with the
decompositions the graphs are made with, as ``Target`` gives them. With ``is_training`` the traced graph is the joint
one, forward and backward, and the match replaces both.

Nothing is traced before the first graph arrives. Tracing takes 20 to 80 ms for each pattern, and a pattern is traced
again at each match, with the shapes of the match. Ours are traced ahead instead and kept in ``stored_patterns.py``,
which ``python -m passes.patterns`` writes anew. A stored pattern is matched as it is: its numbers are part of it, so
it must not hold sizes; sums and products in it match whichever way round they are written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import inspect
import textwrap
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._inductor import pattern_matcher
from torch._inductor.pattern_matcher import Match, PatternExpr, PatternMatcherPass
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from .context import PassContext, Refusal
from .registry import Pass, all_passes

__all__ = ["Match", "Pattern", "pattern_pass"]

aten = torch.ops.aten

_COMMUTATIVE = {aten.add.Tensor, aten.mul.Tensor, aten.maximum.default, aten.minimum.default}

_NEAR = 0.5
"""Share of a pattern's nodes, of two at least, that must have matched for a near miss to be worth telling."""


@dataclasses.dataclass(frozen=True)
class Pattern:
    """What to look for and what to put there.

    Attributes:
        name: names the pattern among those of its pass.
        search: computes what to look for.
        replacement: computes the same otherwise, of the same arguments by name.
        example_inputs: a tensor for each argument that is not in ``scalars``, in order; their shapes do not matter, but
            their number of dimensions and their dtypes may. With ``is_training`` those that have gradients require
            them.
        check: is given the match (``match.kwargs`` by argument, ``match.nodes``), and returns why it must not be
            replaced, or ``None``.
        scalars: arguments that are numbers, each with a value that occurs nowhere else in the pattern.
        is_training: whether ``search`` is traced forward and backward.
        is_stored: whether the traced pattern is in ``stored_patterns.py``.
    """

    name: str
    search: Callable[..., Any]
    replacement: Callable[..., Any]
    example_inputs: Sequence[torch.Tensor]
    check: Callable[[Match], str | None] | None = None
    scalars: Mapping[str, float | int] = dataclasses.field(default_factory=dict)
    is_training: bool = False
    is_stored: bool = False


def pattern_pass(
    name: str,
    sentence: str,
    patterns: Sequence[Pattern] | Callable[[], Sequence[Pattern]],
    *,
    default: bool = True,
) -> Pass:
    """A pass that replaces the matches of patterns.

    Args:
        name: see ``Pass``; the stage is ``joint`` or ``post_grad``.
        sentence: see ``Pass``.
        patterns: the patterns, or a function that makes them when the first graph arrives.
        default: see ``Pass``.

    Raises:
        ValueError: the name has no stage in front.
    """
    return Pass(name, sentence, _PatternPass(name, patterns), default)


class _PatternPass:
    """The function of a pattern pass; its patterns are made, traced and registered at the first call."""

    def __init__(self, name: str, patterns: Sequence[Pattern] | Callable[[], Sequence[Pattern]]) -> None:
        self._name = name
        self._patterns = patterns
        self._matchers: dict[int, _Matcher] = {}

    @functools.cached_property
    def patterns(self) -> Sequence[Pattern]:
        """The patterns, made now if they were not."""
        with unset_fake_temporarily():
            return tuple(self._patterns() if callable(self._patterns) else self._patterns)

    def __call__(self, module: fx.GraphModule, context: PassContext) -> int:
        """Replaces all matches; returns how many."""
        opset = context.target.opset  # the decompositions depend on it
        if opset not in self._matchers:
            self._matchers[opset] = _Matcher(self._name, self.patterns, context)
        return self._matchers[opset].apply(module, context)


class _Matcher:
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
                    search_fn_pattern=stored_pattern(name, pattern) if pattern.is_stored else None,
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


class CommutativeCall(pattern_matcher.CallFunction):
    """A call of two tensors that matches whichever way round they are."""

    args: tuple[Any, ...]
    flat_args_kwargs: Any

    def _match(self, node: fx.Node, ctx: pattern_matcher.MatchContext) -> Match | pattern_matcher.FailedMatch:
        before = dict(ctx.pattern_to_node)
        result = super()._match(node, ctx)
        if pattern_matcher.is_match(result) or len(self.args) != 2:
            return result
        if not self._match_fns(node) or not self._match_users(node, ctx):
            return result
        got = ctx.pattern_to_node
        ctx.pattern_to_node = before
        straight = self.args, self.flat_args_kwargs
        self.args = tuple(reversed(self.args))
        self.flat_args_kwargs = self.flatten(self.args, self.kwargs)
        try:
            swapped = super()._match(node, ctx)
        finally:
            self.args, self.flat_args_kwargs = straight
        if pattern_matcher.is_match(swapped) or len(ctx.pattern_to_node) > len(got):
            return swapped
        ctx.pattern_to_node = got
        return result


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


# Stored patterns

_STORED = "stored_patterns"

_HEADER = '''"""Patterns of our passes, traced ahead: ``python -m passes.patterns`` writes this file; do not edit it.

Traced with the decompositions of dynamo-backends and PyTorch's pattern matcher.
"""

# ruff: noqa
# mypy: ignore-errors

from __future__ import annotations

import operator

import torch
from torch._inductor.pattern_matcher import CallFunction, Ignored, KeywordArg, MultiOutputPattern

from .patterns import CommutativeCall

aten = torch.ops.aten
prims = torch.ops.prims
device = torch.device
'''


def stored_pattern(pass_name: str, pattern: Pattern) -> PatternExpr:
    """The pattern as ``stored_patterns.py`` has it.

    Raises:
        AttributeError: it is not there; the file must be written anew.
    """
    stored = importlib.import_module(f".{_STORED}", __package__)
    expression: PatternExpr = getattr(stored, _function_name(pass_name, pattern))()
    return expression


def stored_text(passes: Sequence[Pass], decompositions: Callable[[], Mapping[Any, Callable[..., Any]]] = dict) -> str:
    """What ``stored_patterns.py`` must hold: a function for each stored pattern of these passes.

    Args:
        passes: those without stored patterns add nothing.
        decompositions: none by default: stored patterns are of operators that no table takes apart.
    """
    parts = [_HEADER]
    for item in passes:
        if isinstance(item.run, _PatternPass):
            parts += [_traced_text(item.name, each, decompositions) for each in item.run.patterns if each.is_stored]
    return "\n\n".join(parts)


def _traced_text(
    pass_name: str, pattern: Pattern, decompositions: Callable[[], Mapping[Any, Callable[..., Any]]]
) -> str:
    with _tracing_apart():
        _, graph = pattern_matcher.gen_pattern_and_search_gm(
            pattern.search,
            _arguments(pattern),
            _Tracer(pattern.is_training),
            dict(pattern.scalars),
            get_decomp_fn=lambda: dict(decompositions()),
        )
    arguments = list(inspect.signature(pattern.search).parameters)
    expression = pattern_matcher.fx_to_pattern(graph, argnames=arguments, scalar_workaround=dict(pattern.scalars))
    text = pattern_matcher.PatternPrettyPrinter.run(expression, output_name="result")
    for target in _COMMUTATIVE:
        text = text.replace(f"CallFunction({target},", f"CommutativeCall({target},")
    return f"def {_function_name(pass_name, pattern)}():\n{textwrap.indent(text.strip(), '    ')}\n    return result\n"


def _function_name(pass_name: str, pattern: Pattern) -> str:
    return f"{pass_name}__{pattern.name}".replace(".", "_").replace("-", "_")


def main() -> None:
    """Writes ``stored_patterns.py`` anew."""
    path = Path(__file__).with_name(f"{_STORED}.py")
    path.write_text(stored_text(all_passes()))


if __name__ == "__main__":
    from passes import patterns  # under its own name: the passes are made of its classes, not of __main__'s

    patterns.main()
