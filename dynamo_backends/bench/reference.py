"""The expected results of a case, from eager and float64, and the judgement of a backend's results."""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.func import functional_call
from torch.utils import _pytree as pytree

from ..errors import first_line
from ..numerics.exact import is_floating
from ..numerics.function_runs import FunctionRun, is_strided
from ..numerics.whole_graph import FunctionCheck, ResultCheck
from .loading import SEED, Inputs, errors_of_user
from .steps import Steps, generated, leaves_of, loss_of


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

    def _difference(self, check: ResultCheck, actual: Sequence[object]) -> str:
        if len(actual) != len(check.eager):
            return f"{len(actual)} results instead of {len(check.eager)}"
        is_quantized = bool(self._steps.case.quantize)
        if self._steps.case.mode == "decode":
            compare = text_difference if self._steps.case.beams == 1 else beams_difference
            return compare(check, actual, is_quantized=is_quantized)
        for position, value in enumerate(actual):
            if message := value_difference(check, position, value, is_quantized=is_quantized):
                return f"result {position}: {message}"
        return ""

    def relative_error(self, results: Sequence[Sequence[Any]]) -> float | None:
        """The root mean square error of a result against eager's, divided by the root mean square of that.

        The largest of all floating-point results; of generated text, of the logits that ``text_difference`` compares.
        ``None`` if there is none, or a result is NaN or infinite and eager's is not.
        """
        errors = []
        for check, actual in zip(self._expected, results, strict=False):
            eager: list[Any] = list(check.eager.values())
            pairs = list(zip(eager, actual, strict=False))
            if self._steps.case.mode == "decode" and self._steps.case.beams == 1:
                (tokens, logits), (actual_tokens, actual_logits) = eager, actual
                steps = map(_comparable_steps, tokens, actual_tokens)
                pairs = [(logits[:count, row], actual_logits[:count, row]) for row, count in enumerate(steps)]
            errors += [_relative(ours, theirs) for theirs, ours in pairs if is_floating(theirs) and is_floating(ours)]
        return max(errors) if errors and all(map(math.isfinite, errors)) else None

    def _expect(self, inputs: Inputs) -> ResultCheck:
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
        position = {id(value): i for i, value in enumerate(arguments)}
        trained = [position[id(tensor)] for tensor in steps.trained if id(tensor) in position] if is_trained else []
        texts: list[torch.Tensor] = []  # eager's

        def values_of(once: FunctionRun) -> dict[object, object]:
            values = [value.detach() if isinstance(value, torch.Tensor) else value for value in once.returned]
            if is_trained:
                loss, weights = once.returned[0], [once.leaves[i] for i in trained]
                found = once.gradients([loss], [torch.ones_like(loss)], weights)
                return dict(enumerate([*values[1:], *found]))
            if is_decoding and steps.case.beams == 1:
                tokens, logits = values
                texts.append(tokens)
                values[1] = _comparable(texts[0], tokens, logits)
            return dict(enumerate(values))

        with torch.set_grad_enabled(is_trained):
            check = self._check(run, arguments, values_of)
        if check.draws:
            self.unchecked = "the model draws random numbers"
        return check

    def _check(
        self,
        run: Callable[..., list[object]],
        arguments: Sequence[object],
        values_of: Callable[[FunctionRun], dict[object, object]],
    ) -> FunctionCheck:
        """The check of a step; of a quantized model that has no float64, by eager alone."""
        state = torch.get_rng_state()
        try:
            check = FunctionCheck(run, arguments, state, values_of=values_of)
            _ = check.exact  # float64 runs
            return check
        except Exception:  # whatever torchao raises for float64
            if not self._steps.case.quantize:
                raise
            traceback.print_exc()
            return FunctionCheck(run, arguments, state, values_of=values_of, is_wide=False)


class _Generating(torch.nn.Module):
    """``generate`` as a ``forward``, for ``functional_call``. A static cache would keep values between the runs."""

    def __init__(self, steps: Steps) -> None:
        super().__init__()
        self.model = steps.loaded.model
        self._steps = steps

    def forward(self, *args: object, **kwargs: object) -> list[object]:
        output = self._steps.generate(Inputs(args, kwargs), with_scores=True, cache="dynamic")
        return generated(output, self._steps.case.beams)


def value_difference(check: ResultCheck, key: object, actual: object, *, is_quantized: bool = False) -> str:
    """A message if a result is not right, else ``""``.

    Where rounding decides between two integers, an element of a quantized model may be far from eager's; all elements
    together may have twice the root mean square change of a perturbed run.
    """
    eager = check.eager[key]
    if (eager is None) != (actual is None):
        return "no gradient, but eager has one" if actual is None else "a gradient, but eager has none"
    message = str(check.judge(key, actual))
    if message or not is_quantized or not is_floating(actual):
        return message
    error, limit = _relative(actual, check.exact[key]), 2 * check.largest_change[key] + _ROUNDING
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


def _comparable_steps(expected: torch.Tensor, actual: torch.Tensor) -> int:
    """How many steps of two texts have comparable logits: until and including the first token that differs."""
    differing = (expected != actual).nonzero()
    return int(differing[0]) + 1 if len(differing) else len(expected)


def _comparable(expected: torch.Tensor, tokens: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """The logits of texts with NaN where they follow another token than eager's."""
    for row, (theirs, ours) in enumerate(zip(expected, tokens, strict=True)):
        logits[_comparable_steps(theirs, ours) :, row] = math.nan
    return logits


def text_difference(check: ResultCheck, actual: Sequence[Any], *, is_quantized: bool = False) -> str:
    """A message if a generated text is wrong, else ``""``.

    Logits are compared up to and including the first token that differs, since until there both texts are the same.
    That token may differ if rounding decides between equally likely ones; later tokens are not comparable.

    Args:
        check: of tokens (rows, steps), and of logits (steps, rows, vocabulary) of eager's text.
        actual: tokens and logits.
        is_quantized: see ``value_difference``.
    """
    tokens, logits = check.eager[0], check.eager[1]
    actual_tokens, actual_logits = actual
    assert isinstance(tokens, torch.Tensor) and isinstance(logits, torch.Tensor)
    if tokens.shape != actual_tokens.shape or logits.shape != actual_logits.shape:
        return f"tokens {tuple(actual_tokens.shape)} instead of {tuple(tokens.shape)}"
    if logits.dtype != actual_logits.dtype:
        return f"dtype {actual_logits.dtype} instead of {logits.dtype}"
    for row, (theirs, ours) in enumerate(zip(tokens, actual_tokens, strict=True)):
        steps = _comparable_steps(theirs, ours)
        compared = logits.clone()
        compared[:steps, row] = actual_logits[:steps, row]
        if message := value_difference(check, 1, compared, is_quantized=is_quantized):
            return f"logits of row {row}, up to token {steps}: {message}"
        chosen = actual_logits[steps - 1, row]
        if theirs[steps - 1] != ours[steps - 1] and chosen[ours[steps - 1]] < chosen.max():
            return f"token {steps} of row {row} is not the likeliest by its own logits"
    return ""


def beams_difference(check: ResultCheck, actual: Sequence[object], *, is_quantized: bool = False) -> str:
    """A message if the score of each text of a beam search is not eager's up to rounding, else ``""``; of tokens
    (rows, length) and the score of each row."""
    message = value_difference(check, 1, actual[1], is_quantized=is_quantized)
    return f"score of the texts: {message}" if message else ""
