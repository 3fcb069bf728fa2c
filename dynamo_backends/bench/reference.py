"""The expected results of a case, from eager and float64, and the judgement of a backend's results."""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Sequence
from typing import Any

import torch
from torch.func import functional_call
from torch.utils import _pytree as pytree

from ..errors import first_line
from ..numerics.reference_runs import NotRepeatableError, ReferenceRuns, Results, SharedCopies
from ..numerics.verdicts import verdict
from .loading import SEED, Inputs
from .steps import Steps, generated, leaves_of, loss_of


@dataclasses.dataclass(frozen=True)
class Expected:
    """The results of one size in eager and in float64: for each value, the reference runs and its key there."""

    values: Sequence[tuple[Results, object]]

    @property
    def eager(self) -> Sequence[Any]:
        return [results.eager[key] for results, key in self.values]

    @property
    def exact(self) -> Sequence[Any]:
        return [results.exact[key] for results, key in self.values]


class CaseJudge:
    """Judges the results of a case. The constructor raises what the model raises in eager.

    Attributes:
        unchecked: why a result that differs from eager's is not called wrong, else ``""``.
    """

    def __init__(self, steps: Steps) -> None:
        self.unchecked = ""
        self._steps = steps
        steps.results(steps.loaded.model)  # raises if the model fails without any backend
        steps.restore()
        try:
            self._expected = [self._expect(inputs) for inputs in steps.loaded.inputs]
        except Exception as error:  # whatever the model raises in float64, or as a function of its state
            traceback.print_exc()
            self.unchecked = f"it does not run in float64: {type(error).__name__}: {first_line(str(error))}"
            self._expected = []

    def difference(self, results: Sequence[Sequence[object]]) -> str:
        """A message about the first wrong result, ``""`` if all are right.

        Args:
            results: see ``Steps.results``.
        """
        if not self._expected:
            return "there is no reference to compare with"
        for size, (expected, actual) in enumerate(zip(self._expected, results, strict=True)):
            if message := self._difference(expected, actual):
                return f"size {size + 1}: {message}" if len(self._expected) > 1 else message
        return ""

    def _difference(self, expected: Expected, actual: Sequence[object]) -> str:
        if len(actual) != len(expected.values):
            return f"{len(actual)} results instead of {len(expected.values)}"
        if self._steps.case.mode == "decode":
            compare = text_difference if self._steps.case.beams == 1 else beams_difference
            return compare(expected.eager, expected.exact, actual)
        for position, ((results, key), value) in enumerate(zip(expected.values, actual, strict=True)):
            message = _other_kind(results.eager[key], value) or str(results.verdict(value, key))
            if message:
                return f"result {position}: {message}"
        return ""

    def _expect(self, inputs: Inputs) -> Expected:
        """Runs the model in eager and in float64 on copies of its state and inputs."""
        steps, model = self._steps, self._steps.loaded.model
        state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        leaves, tree = pytree.tree_flatten((inputs.args, inputs.kwargs))
        is_trained = steps.case.mode == "train"
        is_decoding = steps.case.mode == "decode"
        subject = _Generating(steps) if is_decoding else model
        prefix = "model." if is_decoding else ""

        def run(*values: object) -> list[object]:
            given = {prefix + name: value for name, value in zip(state, values, strict=False)}
            args, kwargs = pytree.tree_unflatten(list(values[len(state) :]), tree)
            output = functional_call(subject, given, args, kwargs)
            return [loss_of(output), *leaves_of(output)] if is_trained else leaves_of(output)

        torch.manual_seed(SEED)
        arguments = [*state.values(), *leaves]
        with torch.set_grad_enabled(is_trained):
            twice = ReferenceRuns(run, SharedCopies(arguments), torch.get_rng_state())
        if twice.draws:
            self.unchecked = "the model draws random numbers"
        outputs = [(twice.outputs, key) for key in twice.outputs.eager if isinstance(key, int)]
        if not is_trained:
            return Expected(outputs)
        loss, outputs = twice.outputs.eager[0], outputs[1:]
        position = {id(value): i for i, value in enumerate(arguments)}
        trained = [position[id(tensor)] for tensor in steps.trained if id(tensor) in position]
        try:
            gradients = twice.gradients({0: torch.ones_like(loss)}, trained)
        except NotRepeatableError as error:
            self.unchecked = str(error)
            return Expected(outputs)
        return Expected([*outputs, *((gradients, i) for i in trained)])


class _Generating(torch.nn.Module):
    """``generate`` as a ``forward``, for ``functional_call``. A static cache would keep values between the runs."""

    def __init__(self, steps: Steps) -> None:
        super().__init__()
        self.model = steps.loaded.model
        self._steps = steps

    def forward(self, *args: object, **kwargs: object) -> list[object]:
        output = self._steps.generate(Inputs(args, kwargs), with_scores=True, cache="dynamic")
        return generated(output, self._steps.case.beams)


def value_difference(eager: object, exact: object, actual: object) -> str:
    """A message if a result has another dtype or shape than eager's or a larger error against float64, else ``""``."""
    return _other_kind(eager, actual) or str(verdict(actual, eager, exact))


def _other_kind(eager: object, actual: object) -> str:
    """A message if a result has another dtype than eager's, or only one of them is a tensor, else ``""``."""
    if isinstance(eager, torch.Tensor) and isinstance(actual, torch.Tensor) and eager.dtype != actual.dtype:
        return f"dtype {actual.dtype} instead of {eager.dtype}"
    if (eager is None) != (actual is None):
        return "no gradient, but eager has one" if actual is None else "a gradient, but eager has none"
    return ""


def text_difference(eager: Sequence[Any], exact: Sequence[Any], actual: Sequence[Any]) -> str:
    """A message if a generated text is wrong, else ``""``.

    Logits are compared up to and including the first token that differs, since until there both texts are the same.
    That token may differ if rounding decides between equally likely ones; later tokens are not comparable.

    Args:
        eager, exact, actual: tokens (rows, steps) and logits (steps, rows, vocabulary); ``exact`` has the float64
            logits of eager's text.
    """
    tokens, logits = eager
    actual_tokens, actual_logits = actual
    exact_logits = exact[1]
    if tokens.shape != actual_tokens.shape or logits.shape != actual_logits.shape:
        return f"tokens {tuple(actual_tokens.shape)} instead of {tuple(tokens.shape)}"
    for row, (theirs, ours) in enumerate(zip(tokens, actual_tokens, strict=True)):
        differing = (theirs != ours).nonzero()
        steps = int(differing[0]) + 1 if len(differing) else len(theirs)
        message = value_difference(logits[:steps, row], exact_logits[:steps, row], actual_logits[:steps, row])
        if message:
            return f"logits of row {row}, up to token {steps}: {message}"
        chosen = actual_logits[steps - 1, row]
        if len(differing) and chosen[ours[steps - 1]] < chosen.max():
            return f"token {steps} of row {row} is not the likeliest by its own logits"
    return ""


def beams_difference(eager: Sequence[object], exact: Sequence[object], actual: Sequence[object]) -> str:
    """A message if the score of each text of a beam search is not eager's up to rounding, else ``""``.

    Args:
        eager, exact, actual: tokens (rows, length) and the score of each row; ``exact`` has those of eager's texts.
    """
    message = value_difference(eager[1], exact[1], actual[1])
    return f"score of the texts: {message}" if message else ""
