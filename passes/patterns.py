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

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from .context import PassContext
from .registry import Pass

if TYPE_CHECKING:
    from torch._inductor.pattern_matcher import Match

    from .matching import Matcher


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
    return Pass(name, sentence, PatternPass(name, patterns), default)


class PatternPass:
    """The function of a pattern pass; its patterns are made, traced and registered at the first call."""

    def __init__(self, name: str, patterns: Sequence[Pattern] | Callable[[], Sequence[Pattern]]) -> None:
        self._name = name
        self._patterns = patterns
        self._matchers: dict[int, Matcher] = {}

    @functools.cached_property
    def patterns(self) -> Sequence[Pattern]:
        """The patterns, made now if they were not."""
        with unset_fake_temporarily():
            return tuple(self._patterns() if callable(self._patterns) else self._patterns)

    def __call__(self, module: fx.GraphModule, context: PassContext) -> int:
        """Replaces all matches; returns how many."""
        opset = context.target.opset  # the decompositions depend on it
        if opset not in self._matchers:
            from .matching import Matcher

            self._matchers[opset] = Matcher(self._name, self.patterns, context)
        return self._matchers[opset].apply(module, context)
