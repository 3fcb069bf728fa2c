"""What a case gives in eager and in float64, and whether another result of it is right."""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.func import functional_call
from torch.utils import _pytree as pytree

from ..errors import first_line
from ..numerics.program_execution import NotRepeatableError, ReferenceRuns
from ..numerics.verdicts import verdict
from .loading import SEED, Inputs
from .steps import Steps, generated, leaves_of, loss_of


@dataclasses.dataclass(frozen=True)
class Expected:
    """The results of one size, in eager and in float64."""

    eager: Sequence[object]
    exact: Sequence[object]


class Reference:
    """Judges the results of a case.

    Raises whatever the model raises in eager.

    Attributes:
        unchecked: why a result that is not eager's is not called wrong; ``""`` if it is.
    """

    def __init__(self, steps: Steps) -> None:
        self.unchecked = ""
        self._steps = steps
        steps.results(steps.loaded.model)  # what fails here fails without any backend
        steps.restore()
        try:
            self._expected = [self._expect(inputs) for inputs in steps.loaded.inputs]
        except Exception as error:  # a model may do in a copy, or in float64, whatever it cannot do
            traceback.print_exc()
            self.unchecked = f"it does not run in float64: {type(error).__name__}: {first_line(str(error))}"
            self._expected = []

    def difference(self, results: Sequence[Sequence[object]]) -> str:
        """In words, the first result that is not right; ``""`` if all are.

        Args:
            results: see ``Steps.results``.
        """
        if not self._expected:
            return "nothing to compare it with"
        for size, (expected, actual) in enumerate(zip(self._expected, results, strict=True)):
            if said := self._difference(expected, actual):
                return f"size {size + 1}: {said}" if len(self._expected) > 1 else said
        return ""

    def _difference(self, expected: Expected, actual: Sequence[object]) -> str:
        if len(actual) != len(expected.eager):
            return f"{len(actual)} results instead of {len(expected.eager)}"
        if self._steps.case.mode == "decode":
            text = text_difference if self._steps.case.beams == 1 else beams_difference
            return text(expected.eager, expected.exact, actual)
        for position, values in enumerate(zip(expected.eager, expected.exact, actual, strict=True)):
            if said := strict_difference(*values):
                return f"result {position}: {said}"
        return ""

    def _expect(self, inputs: Inputs) -> Expected:
        """Runs the model twice on copies of all it reads."""
        steps, model = self._steps, self._steps.loaded.model
        state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        leaves, tree = pytree.tree_flatten((inputs.args, inputs.kwargs))
        is_trained = steps.case.mode == "train"
        subject = _Generating(steps) if steps.case.mode == "decode" else model
        prefix = "model." if steps.case.mode == "decode" else ""

        def run(*values: object) -> list[object]:
            given = {prefix + name: value for name, value in zip(state, values, strict=False)}
            args, kwargs = pytree.tree_unflatten(list(values[len(state) :]), tree)
            output = functional_call(subject, given, args, kwargs)
            return [loss_of(output), *leaves_of(output)] if is_trained else leaves_of(output)

        torch.manual_seed(SEED)
        arguments = [*state.values(), *leaves]
        with torch.set_grad_enabled(is_trained):
            twice = ReferenceRuns(run, arguments, torch.get_rng_state())
        if twice.draws:
            self.unchecked = "the model draws random numbers"
        sides: Sequence[Mapping[object, Any]] = (twice.outputs.eager, twice.outputs.exact)
        eager, exact = ([side[key] for key in side if isinstance(key, int)] for side in sides)
        if not is_trained:
            return Expected(eager, exact)
        position = {id(value): i for i, value in enumerate(arguments)}
        of = [position[id(tensor)] for tensor in steps.trained if id(tensor) in position]
        try:
            found = twice.gradients({0: torch.ones_like(eager[0])}, of)
        except NotRepeatableError as error:
            self.unchecked = str(error)
            return Expected(eager[1:], exact[1:])
        return Expected([*eager[1:], *(found.eager[i] for i in of)], [*exact[1:], *(found.exact[i] for i in of)])


class _Generating(torch.nn.Module):
    """``generate`` as a ``forward``, for ``functional_call``; with the dynamic cache, as a static one outlives it."""

    def __init__(self, steps: Steps) -> None:
        super().__init__()
        self.model = steps.loaded.model
        self._steps = steps

    def forward(self, *args: object, **kwargs: object) -> list[object]:
        output = self._steps.generate(Inputs(args, kwargs), judged=True, cache="dynamic")
        return generated(output, self._steps.case.beams)


def strict_difference(eager: object, exact: object, actual: object) -> str:
    """In words, why a result is not eager's: in dtype, shape, or further from float64; ``""`` if it is."""
    if isinstance(eager, torch.Tensor) and isinstance(actual, torch.Tensor) and eager.dtype != actual.dtype:
        return f"dtype {actual.dtype} instead of {eager.dtype}"
    if (eager is None) != (actual is None):
        return "no gradient, and eager has one" if actual is None else "a gradient where eager has none"
    return str(verdict(actual, eager, exact))


def text_difference(eager: Sequence[Any], exact: Sequence[Any], actual: Sequence[Any]) -> str:
    """In words, why a text, with its logits, is not one that eager might as well have written; ``""`` if it is.

    Up to the first token that differs, both continued the same text, so that their logits are compared there. After it
    nothing is comparable: two tokens that are equally likely to rounding may go either way.

    Args:
        eager, exact, actual: the tokens (rows, steps) and the logits (steps, rows, vocabulary); ``exact`` are the
            float64 logits of eager's text.
    """
    tokens, logits = eager
    our_tokens, our_logits = actual
    exact_logits = exact[1]
    if tokens.shape != our_tokens.shape or logits.shape != our_logits.shape:
        return f"tokens {tuple(our_tokens.shape)} instead of {tuple(tokens.shape)}"
    for row, (theirs, ours) in enumerate(zip(tokens, our_tokens, strict=True)):
        differing = (theirs != ours).nonzero()
        steps = int(differing[0]) + 1 if len(differing) else len(theirs)
        said = strict_difference(logits[:steps, row], exact_logits[:steps, row], our_logits[:steps, row])
        if said:
            return f"logits of row {row}, up to token {steps}: {said}"
        chosen = our_logits[steps - 1, row]
        if len(differing) and chosen[ours[steps - 1]] < chosen.max():
            return f"token {steps} of row {row} is not the likeliest by its own logits"
    return ""


def beams_difference(eager: Sequence[object], exact: Sequence[object], actual: Sequence[object]) -> str:
    """In words, why the texts of a beam search are worse than eager's; ``""`` if they are as likely, to rounding.

    Args:
        eager, exact, actual: the tokens (rows, length) and the score of each row; ``exact`` has those of eager's texts.
    """
    said = strict_difference(eager[1], exact[1], actual[1])
    return f"score of the texts: {said}" if said else ""
