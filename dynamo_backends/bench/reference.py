"""The expected results of a case, from eager and float64, and the judgement of a backend's results."""

from __future__ import annotations

import logging
import math
import traceback
from collections.abc import Sequence
from typing import Any

import torch
from torch.func import functional_call
from torch.utils import _pytree as pytree

from ..common.random_state import RandomState
from ..errors import first_line
from ..numerics.exact import KERNEL_ERRORS
from ..numerics.function_runs import FunctionRun, NotRepeatableError, UnstableError, is_strided
from ..numerics.verdicts import difference_in_kind
from ..numerics.whole_graph import FunctionCheck, ResultCheck
from .loading import SEED, Inputs, errors_of_user
from .steps import Steps, leaves_of, loss_of

logger = logging.getLogger(__name__)


class CaseJudge:
    """Judges the results of a case. The constructor raises ``ModelError`` if the model fails in eager.

    Attributes:
        unchecked: why the results that ``difference`` got last are not called wrong, although they differ, else ``""``.
    """

    def __init__(self, steps: Steps) -> None:
        self._undecided = self.unchecked = ""
        self._steps = steps
        with errors_of_user(f"MODEL {steps.case.model!r} raised"):
            steps.results(steps.loaded.model)
        steps.restore()
        try:
            self._expected = [self._expect(inputs) for inputs in steps.loaded.inputs]
        except Exception as error:  # whatever the model raises as a function of its state
            traceback.print_exc()
            self._undecided = f"it does not run again: {type(error).__name__}: {first_line(str(error))}"
            self._expected = []

    def difference(self, results: Sequence[Sequence[Any]]) -> str:
        """A message about the first wrong result, ``""`` if all are right.

        Args:
            results: see ``Steps.results``.
        """
        self.unchecked = self._undecided
        if not self._expected:
            return "there is no reference to compare with"
        for size, (expected, actual) in enumerate(zip(self._expected, results, strict=True)):
            judge = text_difference if self._steps.case.mode == "decode" else _difference
            prefix = f"size {size + 1}: " if len(self._expected) > 1 else ""
            try:
                message = judge(expected, actual)
            except UnstableError as error:
                self.unchecked = self._undecided or str(error)
                return f"{prefix}a result differs from eager's"
            if message:
                return f"{prefix}{message}"
        return ""

    def _expect(self, inputs: Inputs) -> ResultCheck:
        """Runs the model in eager and in float64 on copies of its state and inputs."""
        steps, model = self._steps, self._steps.loaded.model
        state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        state = {name: tensor for name, tensor in state.items() if is_strided(tensor)}  # torchao's stay in the model
        leaves, tree = pytree.tree_flatten((inputs.args, inputs.kwargs))
        is_trained, is_decoding = steps.case.mode == "train", steps.case.mode == "decode"
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
            if is_decoding:
                tokens, logits = values
                texts.append(tokens)
                values[1] = logits.masked_fill(~_comparable(texts[0], tokens), math.nan)
            return dict(enumerate(values))

        seeded = RandomState.now()
        with torch.set_grad_enabled(is_trained):
            check = FunctionCheck(run, arguments, seeded, values_of=values_of)
            try:
                _ = check.exact
            except NotRepeatableError:
                raise
            except KERNEL_ERRORS as error:  # it ran in eager: the model, or torchao, has no float64
                logger.info("eager is the reference of %s: in float64, %s", steps.case.model, error)
                check = FunctionCheck(run, arguments, seeded, values_of=values_of, is_wide=False)
        if check.draws:
            self._undecided = "the model draws random numbers"
        return check


class _Generating(torch.nn.Module):
    """``generate`` as a ``forward``, for ``functional_call``. A static cache would keep values between the runs."""

    def __init__(self, steps: Steps) -> None:
        super().__init__()
        self.model = steps.loaded.model
        self._steps = steps

    def forward(self, *args: object, **kwargs: Any) -> list[torch.Tensor]:
        return self._steps.generate(Inputs(args, kwargs), cache="dynamic")


def _difference(check: ResultCheck, actual: Sequence[object]) -> str:
    """A message about the first wrong result of a size, ``""`` if all are right.

    Raises:
        UnstableError: one is not the same in each run, and no other is wrong.
    """
    if len(actual) != len(check.eager):
        return f"{len(actual)} results instead of {len(check.eager)}"
    for position, found in check.judge_all(dict(enumerate(actual))):
        if found.is_wrong:
            return f"result {position}: {found}"
    return ""


def text_difference(check: ResultCheck, actual: Sequence[torch.Tensor]) -> str:
    """A message if a generated text is wrong, else ``""``.

    Logits are compared up to and including the first token that differs, since until there both texts are the same.
    That token may differ if rounding decides between equally likely ones; later tokens are not comparable.

    Args:
        check: of tokens (rows, steps), and of logits (steps, rows, vocabulary) of eager's text.
        actual: tokens and logits.
    """
    for name, ours, theirs in zip(("tokens", "logits"), actual, check.eager.values(), strict=True):
        if complaint := difference_in_kind(ours, theirs):
            return f"{name}: {complaint}"
    (tokens, logits), expected = actual, check.eager[0]
    assert isinstance(expected, torch.Tensor)
    comparable = _comparable(expected, tokens)
    if message := str(check.judge(1, torch.where(comparable, logits, check.eager[1]))):
        return f"logits (step, row, token): {message}"
    chosen = tokens.T[:, :, None]
    parted = comparable & (chosen != expected.T[:, :, None])
    for step, row, _ in (parted & (logits.gather(2, chosen) < logits.amax(2, keepdim=True))).nonzero().tolist():
        return f"token {step + 1} of row {row} is not the likeliest by its own logits"
    return ""


def _comparable(expected: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Whether the logits (steps, rows, 1) of two texts follow the same tokens (rows, steps)."""
    is_same = (expected == tokens).T.cumprod(0).bool()
    return torch.cat([torch.ones_like(is_same[:1]), is_same[:-1]])[:, :, None]
