"""Replaces what one function computes by what another computes, on FX graphs, with PyTorch's pattern matcher.

Two functions of the same arguments say what to look for and what to put there. They are traced into graphs, so they are
written as one writes a model::

    def search(x):
        return x * torch.sigmoid(x)

    def replacement(x):
        return torch.nn.functional.silu(x)

    PASS = pattern_pass(
        "post_grad.someone.silu",
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
again at each match, with the shapes of the match. PyTorch's matcher takes 0.6 s to import, which happens then too; our
own passes have no such patterns.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from ..context import PassContext, Refusal
from ..registry import Pass
from .editing import described, fake_result, same_value, storage_of, value_in, value_of

if TYPE_CHECKING:
    from torch._inductor.pattern_matcher import Match, PatternExpr

aten = torch.ops.aten

_NEAR = 0.5
"""Share of a pattern's nodes, of two at least, that must have matched for a near miss to be worth telling."""

_MOST_MATCHERS = 4
"""Tables of decompositions for which a pass keeps its patterns traced."""


def _pattern_matcher() -> ModuleType:
    """PyTorch's matcher, which takes 0.6 s to import, so that only who has patterns pays for it."""
    from torch._inductor import pattern_matcher

    return pattern_matcher


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
    """

    name: str
    search: Callable[..., Any]
    replacement: Callable[..., Any]
    example_inputs: Sequence[torch.Tensor]
    check: Callable[[Match], str | None] | None = None
    scalars: Mapping[str, float | int] = dataclasses.field(default_factory=dict)
    is_training: bool = False


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
    functions = patterns if callable(patterns) else [(item.search, item.replacement, item.check) for item in patterns]
    return Pass(name, sentence, PatternPass(name, patterns), default, made_of=functions)


class PatternPass:
    """The function of a pattern pass; its patterns are made, traced and registered at the first call."""

    def __init__(self, name: str, patterns: Sequence[Pattern] | Callable[[], Sequence[Pattern]]) -> None:
        self._name = name
        self._patterns = patterns
        self._matchers: dict[object, Matcher] = {}

    @functools.cached_property
    def patterns(self) -> Sequence[Pattern]:
        """The patterns, made now if they were not."""
        with unset_fake_temporarily():
            return tuple(self._patterns() if callable(self._patterns) else self._patterns)

    def __call__(self, module: fx.GraphModule, context: PassContext) -> int:
        """Replaces all matches; returns how many."""
        decompositions = dict(context.target.decompositions())
        key = frozenset(decompositions.items())  # what the patterns are traced with
        matcher = self._matchers.get(key)
        if matcher is None:
            if len(self._matchers) >= _MOST_MATCHERS:
                self._matchers.pop(next(iter(list(self._matchers)), None), None)  # another thread may do the same
            matcher = self._matchers[key] = Matcher(self._name, self.patterns, decompositions)
        return matcher.apply(module, context)


class Matcher:
    """Patterns registered with PyTorch's matcher. It knows no context; that of the current call is set aside for it."""

    def __init__(
        self, name: str, patterns: Sequence[Pattern], decompositions: Mapping[Any, Callable[..., Any]]
    ) -> None:
        pattern_matcher = _pattern_matcher()
        self._current = threading.local()
        self._name_of: dict[PatternExpr, Pattern] = {}
        self._matcher = pattern_matcher.PatternMatcherPass(pass_name=name)
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
                    get_decomp_fn=lambda: dict(decompositions),
                )
            if isinstance(expression, pattern_matcher.PatternExpr):
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
        if reason is None and not pattern.is_training:  # of a joint graph the manager compares the results
            reason = _reason_by_replacement(pattern, match)
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


def _reason_by_replacement(pattern: Pattern, match: Match) -> str | None:
    """Why what a pattern puts there is not what it replaces, by fake tensors; ``None`` if it is."""
    arguments = tuple(match.kwargs[name] for name in inspect.signature(pattern.search).parameters)
    try:
        with torch.no_grad():
            results = fake_result(pattern.replacement, arguments, {})
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        return f"the replacement cannot be computed: {str(error).splitlines()[0]}"
    replaced = match.output_nodes()
    news = list(results) if isinstance(results, (list, tuple)) else [results]
    for node, new in zip(replaced, news, strict=False):
        old = None if node is None else value_in(node.meta)
        if old is not None and not same_value(old, new):
            return f"the replacement would be {described(new)}, {node} is {described(old)}"
        if any(_share_memory(new, item) and not _share_memory(old, item) for item in map(value_of, arguments)):
            return f"the replacement would be the memory of an argument, {node} has its own"
    return None


def _share_memory(one: object, other: object) -> bool:
    return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and storage_of(one) == storage_of(other)


class _Tracer:
    """Traces a function as ``fwd_only`` or ``joint_fwd_bwd``, once for each function and kind of arguments.

    A pattern that matches once in each layer of a model is replaced by copies of one graph.
    """

    def __init__(self, is_training: bool) -> None:
        pattern_matcher = _pattern_matcher()
        self._trace = pattern_matcher.joint_fwd_bwd if is_training else pattern_matcher.fwd_only
        self._known: dict[object, fx.GraphModule] = {}

    def __call__(self, function: Callable[..., Any], args: Sequence[Any], **kwargs: Any) -> fx.GraphModule:
        key = (function, tuple(map(_kind, args)))
        if any(isinstance(item, torch.SymInt) for arg in args for item in _sizes(arg)):
            return _without_ends(self._trace(function, args, **kwargs))  # its symbols belong to one compile
        if key not in self._known:
            self._known[key] = _without_ends(self._trace(function, args, **kwargs))
        return _pattern_matcher().clone_graph(self._known[key])


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
    pattern_matcher = _pattern_matcher()
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
    pattern_matcher = _pattern_matcher()
    if id(pattern) in seen or not isinstance(pattern, pattern_matcher.PatternExpr):
        return 0
    seen.add(id(pattern))
    if isinstance(pattern, pattern_matcher.MultiOutputPattern):
        return sum(_count_calls(item, seen) for item in pattern.outputs)
    if not isinstance(pattern, pattern_matcher._TargetArgsExpr):
        return 0
    return 1 + sum(_count_calls(item, seen) for item in pattern.flat_args_kwargs[0])


def _explanation(failed: Any, anchor: fx.Node) -> tuple[fx.Node, str, bool]:
    """Where a match stopped, PyTorch's condition in words, and whether the operator there was the right one."""
    pattern_matcher = _pattern_matcher()
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
