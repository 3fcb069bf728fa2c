"""The expected results of a case, from eager and float64, and the judgement of a backend's results."""

from __future__ import annotations

import dataclasses
import math
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.func import functional_call
from torch.utils import _pytree as pytree

from ..errors import first_line
from ..numerics.exact import is_floating
from ..numerics.randomness import CHECK_AFTER
from ..numerics.reference_runs import NotRepeatableError, ReferenceRuns, Results, SharedCopies, is_strided
from ..numerics.verdicts import verdict
from .loading import SEED, Inputs, errors_of_user
from .random_rounding import RandomRoundingRuns
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

    def perturbed(self, times: int) -> Sequence[Sequence[Any]]:
        """The results of an inference with random rounding, so many times."""
        keys = [key for _, key in self.values]
        runs = self.values[0][0].perturbed(times, keys) if self.values else ()
        return [[run[key] for key in keys] for run in runs if run]


class CaseJudge:
    """Judges the results of a case. The constructor raises ``ModelError`` if the model fails in eager.

    Attributes:
        unchecked: why a result that differs from eager's is not called wrong, else ``""``.
    """

    def __init__(self, steps: Steps) -> None:
        self.unchecked = ""
        self._steps = steps
        with errors_of_user(f"MODEL {steps.case.model!r} raised"):
            steps.results(steps.loaded.model)
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
        if self._steps.case.quantize:
            for times in CHECK_AFTER:
                if not (message := self._differs(expected, actual, expected.perturbed(times))):
                    break
            return message
        return self._differs(expected, actual)

    def _differs(self, expected: Expected, actual: Sequence[object], others: Sequence[Sequence[Any]] = ()) -> str:
        """``others`` are the results with random rounding by which those of a quantized model are judged."""
        if self._steps.case.mode == "decode":
            compare = text_difference if self._steps.case.beams == 1 else beams_difference
            return compare(expected.eager, expected.exact, actual, others)
        for position, ((results, key), value) in enumerate(zip(expected.values, actual, strict=True)):
            if others:
                values = [item[position] for item in others]
                message = value_difference(results.eager[key], results.exact[key], value, values)
            else:
                message = _other_kind(results.eager[key], value) or str(results.verdict(value, key))
            if message:
                return f"result {position}: {message}"
        return ""

    def relative_error(self, results: Sequence[Sequence[Any]]) -> float | None:
        """The root mean square error of a result against eager's, divided by the root mean square of that.

        The largest of all floating-point results; of generated text, of the logits that ``text_difference`` compares.
        ``None`` if there is none, or a result is NaN or infinite and eager's is not.
        """
        errors = []
        for expected, actual in zip(self._expected, results, strict=False):
            pairs = list(zip(expected.eager, actual, strict=False))
            if self._steps.case.mode == "decode" and self._steps.case.beams == 1:
                (tokens, logits), (actual_tokens, actual_logits) = expected.eager, actual
                steps = map(_comparable_steps, tokens, actual_tokens)
                pairs = [(logits[:count, row], actual_logits[:count, row]) for row, count in enumerate(steps)]
            errors += [_relative(ours, theirs) for theirs, ours in pairs if is_floating(theirs) and is_floating(ours)]
        return max(errors) if errors and all(map(math.isfinite, errors)) else None

    def _expect(self, inputs: Inputs) -> Expected:
        """Runs the model in eager and in float64 on copies of its state and inputs."""
        steps, model = self._steps, self._steps.loaded.model
        state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        if steps.case.quantize:  # torchao's tensors have no copy in float64; they stay in the model
            state = {name: tensor for name, tensor in state.items() if is_strided(tensor)}
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
            twice = self._twice(run, arguments)
        if twice.draws:
            self.unchecked = "the model draws random numbers"
        outputs = [(twice.outputs, key) for key in twice.outputs.eager if isinstance(key, int)]
        if not is_trained or isinstance(twice, RandomRoundingRuns):
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

    def _twice(
        self, run: Callable[..., list[object]], arguments: Sequence[object]
    ) -> ReferenceRuns | RandomRoundingRuns:
        """The reference runs; of a quantized model that has no float64, eager with random rounding."""
        state = torch.get_rng_state()
        try:
            runs = ReferenceRuns(run, SharedCopies(arguments), state, keeps_runs=bool(self._steps.case.quantize))
            _ = runs.outputs  # float64 runs
            return runs
        except Exception:  # whatever torchao raises for float64
            if not self._steps.case.quantize:
                raise
            traceback.print_exc()
            return RandomRoundingRuns(run, arguments, state)


class _Generating(torch.nn.Module):
    """``generate`` as a ``forward``, for ``functional_call``. A static cache would keep values between the runs."""

    def __init__(self, steps: Steps) -> None:
        super().__init__()
        self.model = steps.loaded.model
        self._steps = steps

    def forward(self, *args: object, **kwargs: object) -> list[object]:
        output = self._steps.generate(Inputs(args, kwargs), with_scores=True, cache="dynamic")
        return generated(output, self._steps.case.beams)


def value_difference(eager: object, exact: object, actual: object, others: Sequence[object] = ()) -> str:
    """A message if a result has another dtype or shape than eager's or a larger error against float64, else ``""``.

    Args:
        eager, exact, actual: the results; without a float64 run, ``exact`` is eager's in float64.
        others: results of a quantized model with random rounding. Where rounding decides between two integers, an
            element may have the tenfold error of these, and all elements together twice their root mean square error.
    """
    message = _other_kind(eager, actual) or str(verdict(actual, eager, exact, others))
    if message or not others or not is_floating(actual) or not is_floating(exact):
        return message
    error, limit = _relative(actual, exact), 2 * max(_relative(other, exact) for other in others) + _ROUNDING
    return f"relative error {error:.3g}, tolerance {limit:.3g}" if error > limit else ""


_ROUNDING = 2.0**-16
"""A relative error of a whole result in float32 that the tolerance of each element judges better."""


def _relative(value: Any, reference: Any) -> float:
    """The relative error of a tensor: the root mean square of the difference by that of the reference."""
    if value.shape != reference.shape:
        return math.inf
    ours, right = value.double(), reference.double()
    difference = torch.where(ours == right, 0.0, ours - right)  # infinities are equal, too
    return float(difference.norm() / right.nan_to_num(0.0, 0.0, 0.0).norm().clamp(min=torch.finfo(right.dtype).tiny))


def _other_kind(eager: object, actual: object) -> str:
    """A message if a result has another dtype than eager's, or only one of them is a tensor, else ``""``."""
    if isinstance(eager, torch.Tensor) and isinstance(actual, torch.Tensor) and eager.dtype != actual.dtype:
        return f"dtype {actual.dtype} instead of {eager.dtype}"
    if (eager is None) != (actual is None):
        return "no gradient, but eager has one" if actual is None else "a gradient, but eager has none"
    return ""


def _comparable_steps(expected: torch.Tensor, actual: torch.Tensor) -> int:
    """How many steps of two texts have comparable logits: until and including the first token that differs."""
    differing = (expected != actual).nonzero()
    return int(differing[0]) + 1 if len(differing) else len(expected)


def text_difference(
    eager: Sequence[Any], exact: Sequence[Any], actual: Sequence[Any], others: Sequence[Sequence[Any]] = ()
) -> str:
    """A message if a generated text is wrong, else ``""``.

    Logits are compared up to and including the first token that differs, since until there both texts are the same.
    That token may differ if rounding decides between equally likely ones; later tokens are not comparable.

    Args:
        eager, exact, actual: tokens (rows, steps) and logits (steps, rows, vocabulary); ``exact`` has the float64
            logits of eager's text.
        others: see ``value_difference``; those count whose text is eager's so far.
    """
    tokens, logits = eager
    actual_tokens, actual_logits = actual
    exact_logits = exact[1]
    if tokens.shape != actual_tokens.shape or logits.shape != actual_logits.shape:
        return f"tokens {tuple(actual_tokens.shape)} instead of {tuple(tokens.shape)}"
    for row, (theirs, ours) in enumerate(zip(tokens, actual_tokens, strict=True)):
        steps = _comparable_steps(theirs, ours)
        alike = [item[:steps, row] for text, item in others if _comparable_steps(theirs, text[row]) >= steps]
        message = value_difference(logits[:steps, row], exact_logits[:steps, row], actual_logits[:steps, row], alike)
        if message:
            return f"logits of row {row}, up to token {steps}: {message}"
        chosen = actual_logits[steps - 1, row]
        if theirs[steps - 1] != ours[steps - 1] and chosen[ours[steps - 1]] < chosen.max():
            return f"token {steps} of row {row} is not the likeliest by its own logits"
    return ""


def beams_difference(
    eager: Sequence[object], exact: Sequence[object], actual: Sequence[object], others: Sequence[Sequence[Any]] = ()
) -> str:
    """A message if the score of each text of a beam search is not eager's up to rounding, else ``""``.

    Args:
        eager, exact, actual: tokens (rows, length) and the score of each row; ``exact`` has those of eager's texts.
    """
    message = value_difference(eager[1], exact[1], actual[1], [scores for _, scores in others])
    return f"score of the texts: {message}" if message else ""
