"""Random programs equal eager: a sample of ``random_programs.py``, and programs that were wrong once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conftest import assert_same_as_eager, compiled
from onnxscript.onnx_opset import opset23 as op
from random_programs import DIFFERS, FAULTS, Argument, Program, Step, judge, make_program, shrink

from dynamo_backends.exporter.converters.registry import CONVERTERS


@pytest.mark.sampled(3)
@pytest.mark.parametrize("seed", range(12))
def test_a_random_program_equals_eager(seed: int) -> None:
    program = make_program(seed)
    verdict = judge(program)
    assert verdict.outcome not in FAULTS, f"{verdict.outcome}: {verdict.text}\n{program}"


def test_a_fault_is_found_and_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a program with an operator whose converter is wrong, that operator is left."""
    wrong = {torch.ops.aten.tanh.default: lambda x: op.Mul(op.Tanh(x), op.CastLike(1.01, x))}
    for target, converter in wrong.items():
        monkeypatch.setitem(CONVERTERS, target, converter)
    program = Program(
        arguments=(Argument(("a", "b"), stored=("a", "b")), Argument(("b",), stored=("b",))),
        steps=(
            Step("v2", "{name} = {0} + {1}", ("v0", "v1")),
            Step("v3", "{name} = torch.tanh({0})", ("v2",)),
            Step("v4", "{name} = {0} * 2", ("v3",)),
            Step("v5", "{name} = {0}.sum(0)", ("v1",)),
        ),
        results=("v4", "v5"),
        sizes=((("a", 2), ("b", 3)),),
    )
    verdict = judge(program)
    assert verdict.outcome == DIFFERS
    smaller = shrink(program, verdict, attempts=20)
    assert smaller.source().splitlines() == ["def program(v0):", "    v3 = torch.tanh(v0)", "    return (v3, )"]


FOUND: dict[str, tuple[Callable[..., object], Callable[[], list[torch.Tensor]]]] = {
    "a decomposition returned its argument": (
        lambda x: torch.nn.functional.channel_shuffle(x, 1).add_(1),
        lambda: [torch.randn(1, 4, 6)],
    ),
    "a fill of no elements at an index": (
        lambda x: x.clone().index_fill_(2, torch.tensor([0]), 7),
        lambda: [torch.ones(1, 0, 0)],
    ),
    "a decomposition refused complex numbers": (
        lambda x: torch.nan_to_num(x * 2),
        lambda: [torch.tensor([1 + 2j, complex("nan"), complex("inf")])],
    ),
    "a gradient that is infinite or NaN beyond the bounds of relu6": (
        lambda x: torch.hypot(torch.nn.functional.relu6(x), torch.nn.functional.relu6(x)),
        lambda: [torch.tensor([-1.0, 0.0, 0.5, 6.0, 7.0], requires_grad=True)],
    ),
    "an argument that changes between forward and backward": (
        lambda x, y: ((y * x.sin()).sum(), x.mul_(2))[0],
        lambda: [torch.randn(2, 3), torch.randn(2, 3, requires_grad=True)],
    ),
    "a small result of erfc": (lambda x: torch.erfc(x).log(), lambda: [torch.tensor([-2.0, 0.5, 3.0, 6.0])]),
}


@pytest.mark.parametrize("name", FOUND)
def test_a_program_that_differed_once_equals_eager(name: str) -> None:
    function, arguments = FOUND[name]
    assert_same_as_eager(function, *arguments())


def test_a_result_that_is_nearly_its_argument_has_memory_of_its_own() -> None:
    x = torch.randn(1, 4, 6)
    before = x.clone()
    compiled(lambda x: torch.nn.functional.channel_shuffle(x, 1))(x).zero_()
    assert torch.equal(x, before)
