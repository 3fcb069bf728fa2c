"""Patterns on FX graphs: replaces what one function computes by what another one computes.

PyTorch's pattern matcher traces both functions, of the same arguments, and finds matches::

    PASS = pattern_pass(
        "post_grad.someone.silu",
        "Writes x * sigmoid(x) as SiLU.",
        lambda: [Pattern("silu", lambda x: x * torch.sigmoid(x), torch.nn.functional.silu, [torch.empty(2, 3)])],
    )

A check gets the match with its nodes, shapes and dtypes, and may reject it with a reason. An argument that is a number
is listed in ``scalars``, with a value that the tracer recognizes::

    def scaled(x, factor):
        return torch.relu(x) * factor

    def is_positive(match):
        return None if match.kwargs["factor"] > 0 else "the factor is not positive"

    Pattern("scaled", scaled, lambda x, factor: torch.relu(x * factor), [torch.empty(2, 3)], check=is_positive,
            scalars={"factor": 0.1234})

Nodes of a match, except for the last, must have no users outside it. Patterns are traced with the decompositions of
``Target``; with ``is_training``, forward and backward are traced and replaced together.

At the first graph, PyTorch's matcher is imported (0.6 s) and the patterns are traced, 20 to 80 ms each; the replacement
is traced again at each match.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from ..context import PassContext
from ..registry import Pass
from .editing import described, fake_result, same_value, storage_of, value_in, value_of

if TYPE_CHECKING:
    from torch._inductor.pattern_matcher import Match

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True)
class Pattern:
    """A search and its replacement.

    Attributes:
        name: the pattern's name within its pass.
        search: the function to search for.
        replacement: computes the same from the same arguments, by name.
        example_inputs: a tensor for each argument that is not in ``scalars``, in order. Sizes do not matter, ranks and
            dtypes may. With ``is_training``, tensors that have gradients require them.
        check: gets the match (``match.kwargs`` by argument, ``match.nodes``), and returns why it must not be replaced,
            or ``None``.
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
        patterns: the patterns, or a function that returns them, called at the first graph.
        default: see ``Pass``.

    Raises:
        ValueError: the name does not begin with a stage.
    """
    definition = patterns if callable(patterns) else list(map(_definition, patterns))

    @functools.cache
    def matcher(decompositions: frozenset[tuple[Any, Callable[..., Any]]]) -> Matcher:
        with unset_fake_temporarily():
            return Matcher(name, patterns() if callable(patterns) else patterns, dict(decompositions))

    def run(module: fx.GraphModule, context: PassContext) -> int:
        return matcher(frozenset(context.target.decompositions().items())).apply(module, context)

    return Pass(name, sentence, run, default, made_of=definition)


def _definition(pattern: Pattern) -> list[object]:
    """What makes a pattern the same as another one, its functions first."""
    settings = {
        **vars(pattern),
        "example_inputs": [(x.dtype, x.shape, x.requires_grad) for x in pattern.example_inputs],
    }
    return [pattern.search, list(settings.items())]


class Matcher:
    """Patterns registered with PyTorch's matcher, which calls ``_accepts`` at each match."""

    def __init__(self, name: str, patterns: Sequence[Pattern], decompositions: dict[Any, Callable[..., Any]]) -> None:
        from torch._inductor import pattern_matcher  # takes 0.6 s

        self._current = threading.local()
        self._matcher = pattern_matcher.PatternMatcherPass(pass_name=name)
        for pattern in patterns:
            with torch._guards.tracing(None), FakeTensorMode() as mode:  # not the mode of the current compile
                pattern_matcher.register_replacement(
                    pattern.search,
                    pattern.replacement,
                    [mode.from_tensor(tensor, static_shapes=True) for tensor in pattern.example_inputs],
                    _tracer(pattern.is_training),
                    self._matcher,
                    extra_check=functools.partial(self._accepts, pattern),
                    scalar_workaround=dict(pattern.scalars),
                    skip_duplicates=True,
                    pattern_name=pattern.name,
                    get_decomp_fn=lambda: decompositions,
                )

    def apply(self, module: fx.GraphModule, context: PassContext) -> int:
        """Replaces the matches in a graph; returns how many."""
        self._current.context = context
        before = set(module.graph.nodes)
        fired = self._matcher.apply(module)
        _inherit_source(module, before)
        return fired

    def _accepts(self, pattern: Pattern, match: Match) -> bool:
        context: PassContext = self._current.context
        node = match.output_nodes()[0]
        reason = pattern.check(match) if pattern.check is not None else None
        if reason is None and not pattern.is_training:  # a joint graph is checked by the manager
            reason = _reason_by_replacement(pattern, match)
        if reason is not None:
            size = len(match.nodes)
            context.record_near_miss(node, reason, matched=size, of=size, pattern=pattern.name)
            return False
        return context.allows(node)


def _reason_by_replacement(pattern: Pattern, match: Match) -> str | None:
    """Why the replacement's fake results are not those of the match, or ``None``."""
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
            return f"the replacement would share the memory of an argument, {node} has its own"
    return None


def _share_memory(one: object, other: object) -> bool:
    return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and storage_of(one) == storage_of(other)


def _tracer(is_training: bool) -> Callable[..., fx.GraphModule]:
    """PyTorch's tracer of patterns, without the no-ops that ``joint.remove_noops`` removes from graphs."""
    from torch._inductor import pattern_matcher

    trace = pattern_matcher.joint_fwd_bwd if is_training else pattern_matcher.fwd_only
    return lambda *args, **kwargs: _without_detach(trace(*args, **kwargs))


def _without_detach(module: fx.GraphModule) -> fx.GraphModule:
    for target in (aten.detach.default, aten.alias.default):
        for node in module.graph.find_nodes(op="call_function", target=target):
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
    module.recompile()
    return module


def _inherit_source(module: fx.GraphModule, before: set[fx.Node]) -> None:
    """Gives new nodes inside a replacement the source lines of the node that uses them."""
    for node in reversed(module.graph.nodes):
        if node in before or node.op != "call_function":
            continue
        for user in node.users:
            for key in ("stack_trace", "nn_module_stack", "source_fn_stack"):
                if key in user.meta:
                    node.meta.setdefault(key, user.meta[key])
