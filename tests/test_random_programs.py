"""Small random programs equal eager: broadcasting, in-place operators on copies and on views of them, expanded and 0-d
tensors, sizes 0 and 1, several dtypes; in inference, in training and with symbolic sizes.

Run as a script it tries more of them, and prints those that differ::

    python tests/test_random_programs.py 0 200
"""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import TypeAlias

import pytest
import torch
from conftest import assert_same_as_eager

Step: TypeAlias = "tuple[str, Callable[..., torch.Tensor | None], tuple[int, ...]]"
"""How it reads, what it computes, and which of the program's values it takes."""

SHAPES = [(), (1,), (3,), (2, 3), (2, 1), (1, 3), (2, 2, 3), (0, 3), (2, 0), (1, 1), (4, 2, 1)]
DTYPES = [torch.float32, torch.float32, torch.float32, torch.float64, torch.int64, torch.int32, torch.bool]

BINARY = {
    "{0} + {1}": lambda x, y: x + y,
    "{0} * {1}": lambda x, y: x * y,
    "maximum({0}, {1})": torch.maximum,
    "where({0} > 0, {0}, {1})": lambda x, y: torch.where(x > 0, x, y),
    "where({0} > {1}, {1}, 2)": lambda x, y: torch.where(x > y, y, 2),
    "({0} < {1}).to({0})": lambda x, y: (x < y).to(x),
    "{0}.masked_fill({1} > 0, 1.5)": lambda x, y: x.masked_fill(y > 0, 1.5),
    "{0}.expand_as({1})": lambda x, y: x.expand_as(y),
    "cat([{0}, {1}])": lambda x, y: torch.cat([x, y]),
    "stack([{0}, {1}], -1)": lambda x, y: torch.stack([x, y], -1),
    "broadcast_tensors({0}, {1})[0]": lambda x, y: torch.broadcast_tensors(x, y)[0],
}
UNARY = {
    "{0} * 2.5": lambda x: x * 2.5,
    "{0} - 1": lambda x: x - 1,
    "{0}.abs().sqrt()": lambda x: (x.abs() + 1).sqrt(),
    "{0}.relu()": lambda x: x.relu(),
    "{0}.sum(0)": lambda x: x.sum(0),
    "{0}.sum(-1, keepdim=True)": lambda x: x.sum(-1, keepdim=True),
    "{0}.sum()": lambda x: x.sum(),
    "{0}.double().mean()": lambda x: x.double().mean(),
    "{0}.amax(-1)": lambda x: x.amax(-1),
    "{0}.reshape(-1)": lambda x: x.reshape(-1),
    "{0}.mT": lambda x: x.mT,
    "{0}.transpose(0, -1)": lambda x: x.transpose(0, -1),
    "{0}.unsqueeze(0)": lambda x: x.unsqueeze(0),
    "{0}.unsqueeze(-1)": lambda x: x.unsqueeze(-1),
    "{0}.squeeze()": lambda x: x.squeeze(),
    "{0}[0]": lambda x: x[0],
    "{0}[..., -1:]": lambda x: x[..., -1:],
    "{0}[1:]": lambda x: x[1:],
    "{0}[None].expand(2, ...)": lambda x: x[None].expand(2, *x.shape),
    "{0}.flip(0)": lambda x: x.flip(0),
    "{0}.clone()": lambda x: x.clone(),
    "zeros_like({0})": torch.zeros_like,
    "{0}.long()": lambda x: x.long(),
    "{0} > 0": lambda x: x > 0,
}
VIEWS = {
    "": lambda x: x,
    "[0]": lambda x: x[0],
    "[1:]": lambda x: x[1:],
    "[..., :1]": lambda x: x[..., :1],
    "[..., -1]": lambda x: x[..., -1],
    "[:, None]": lambda x: x[:, None],
    ".mT[..., :1]": lambda x: x.mT[..., :1],  # PyTorch 2.13: a change of all of x.mT gives x the strides of x.mT
    ".view(-1)": lambda x: x.view(-1),
    ".diagonal()": lambda x: x.diagonal(),
    "[::2]": lambda x: x[::2],
}
IN_PLACE = {
    ".copy_({1})": lambda x, y: x.copy_(y),
    ".add_({1})": lambda x, y: x.add_(y),
    ".mul_({1})": lambda x, y: x.mul_(y),
    ".sub_({1}, alpha=2)": lambda x, y: x.sub_(y, alpha=2),
    ".addcmul_({1}, {1}, value=2)": lambda x, y: x.addcmul_(y, y, value=2),  # PyTorch 2.13: Dynamo's 0.5 of an integer
    ".masked_fill_({1} > 0, 3)": lambda x, y: x.masked_fill_(y > 0, 3),
    ".masked_fill_({1} > 0, {1}.sum())": lambda x, y: x.masked_fill_(y > 0, y.sum().to(x.dtype)),
    ".clamp_(-0.5, 0.5)": lambda x, y: x.clamp_(-0.5, 0.5),
    ".clamp_(min={1})": lambda x, y: x.clamp_(min=y),
    ".lerp_({1}, 0.3)": lambda x, y: x.lerp_(y, 0.3),
    ".relu_()": lambda x, y: x.relu_(),
    ".fill_({1}.sum())": lambda x, y: x.fill_(y.sum().to(x.dtype)),
    ".zero_()": lambda x, y: x.zero_(),
    ".index_put_(0, {1})": lambda x, y: x.index_put_((torch.tensor([0]),), y.to(x.dtype)),
    ".index_put_([0, -1], {1})": lambda x, y: x.index_put_((torch.tensor([0, x.shape[0] - 1]),), y[:1].to(x.dtype)),
    "[{1} > 0] = 2": lambda x, y: x.__setitem__(y > 0, 2),
    ".transpose_(0, -1)": lambda x, y: x.transpose_(0, -1),
    ".unsqueeze_(0)": lambda x, y: x.unsqueeze_(0),
    ".index_fill_(0, 0, 7)": lambda x, y: x.index_fill_(0, torch.tensor([0]), 7),
    ".index_copy_(0, [0], {1})": lambda x, y: x.index_copy_(0, torch.tensor([0]), y.to(x.dtype)),
}


class Program:
    """A random program of a few steps, and arguments for it.

    Args:
        seed: of its choices.
        training: whether its floating-point arguments require gradients.
    """

    def __init__(self, seed: int, *, training: bool = False) -> None:
        self._choices = random.Random(seed)
        torch.manual_seed(seed)
        self.arguments = [self._argument() for _ in range(3)]
        if training:
            self.arguments = [x.requires_grad_() if x.is_floating_point() else x for x in self.arguments]
        self.steps: list[Step] = []
        number = self._choices.randint(8, 14)
        for _ in range(200):
            step = self._choices.choice([self._unary, self._binary, self._in_place, self._in_place])()
            if self._runs([*self.steps, step]):
                self.steps.append(step)
            if len(self.steps) == number:
                break

    def _argument(self) -> torch.Tensor:
        shape, dtype = self._choices.choice(SHAPES), self._choices.choice(DTYPES)
        return (torch.randn(shape) * 3).to(dtype)

    def _value(self) -> int:
        return self._choices.randrange(len(self.arguments) + len(self.steps))

    def _unary(self) -> Step:
        text, function = self._choices.choice(list(UNARY.items()))
        return text, function, (self._value(),)

    def _binary(self) -> Step:
        text, function = self._choices.choice(list(BINARY.items()))
        return text, function, (self._value(), self._value())

    def _in_place(self) -> Step:
        """A change of a copy of a value, of a view of it, or of what the program computed before."""
        view_text, view = self._choices.choice(list(VIEWS.items()))
        text, change = self._choices.choice(list(IN_PLACE.items()))
        copies = self._choices.random() < 0.6

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            base = x.clone() if copies else x
            change(view(base), y)
            return base

        return f"{{0}}{'.clone()' if copies else ''}{view_text}{text}", step, (self._value(), self._value())

    def _runs(self, steps: Sequence[Step]) -> bool:
        """Whether eager runs these steps without a warning, arguments keep their shapes, and no value overflows."""
        arguments = [x.detach().clone().requires_grad_(x.requires_grad) for x in self.arguments]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # eager warns of changes in memory that overlaps itself
                results = run(steps, arguments)
                torch.autograd.backward([x.sum() for x in results if x.requires_grad])
        except (RuntimeError, IndexError, TypeError, ValueError, UserWarning):
            return False
        same = all(x.shape == y.shape for x, y in zip(self.arguments, arguments, strict=True))
        return same and all(x.double().abs().nan_to_num(0).lt(1e6).all() for x in results)

    def __str__(self) -> str:
        lines = [f"v{i} = {tuple(x.shape)} {x.dtype}" for i, x in enumerate(self.arguments)]
        for i, (text, _, taken) in enumerate(self.steps):
            lines.append(f"v{i + len(self.arguments)} = {text.format(*(f'v{j}' for j in taken))}")
        return "\n".join(lines)


def run(steps: Sequence[Step], arguments: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The values of all steps."""
    values: list[torch.Tensor] = list(arguments)
    for _, function, taken in steps:
        result = function(*[values[i] for i in taken])
        assert isinstance(result, torch.Tensor)
        values.append(result)
    return values[len(arguments) :]


def check(seed: int, *, training: bool, dynamic: bool | None) -> None:
    program = Program(seed, training=training)
    try:
        assert_same_as_eager(run_of(program), *program.arguments, settings={"dynamic": dynamic})
    except Exception as error:
        raise AssertionError(f"seed {seed}, training {training}, dynamic {dynamic}:\n{program}") from error


def run_of(program: Program) -> Callable[..., list[torch.Tensor]]:
    steps = program.steps
    return lambda *arguments: run(steps, arguments)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_random_program_equals_eager(seed: int, training: bool, dynamic: bool) -> None:
    check(seed, training=training, dynamic=dynamic)


def main() -> None:
    warnings.simplefilter("ignore")
    first, last = map(int, sys.argv[1:3])
    failures = 0
    for seed in range(first, last):
        for training in (False, True):
            for dynamic in (False, True):
                torch._dynamo.reset()
                try:
                    check(seed, training=training, dynamic=dynamic)
                except AssertionError as error:
                    failures += 1
                    print(f"{error}\n{type(error.__cause__).__name__}: {error.__cause__}\n", flush=True)
    print(f"{(last - first) * 4 - failures} programs equal eager, {failures} do not")


if __name__ == "__main__":
    main()
