"""Random numbers of runs that are made for a comparison."""

from __future__ import annotations

import pytest
import torch
from conftest import assert_same_values

from dynamo_backends.common.random_state import RandomState, unchanged_random_state
from dynamo_backends.numerics.randomness import PrivateRandomness, is_random

aten = torch.ops.aten

DRAWS = {
    "uniform": lambda x: torch.rand_like(x),
    "normal": lambda x: torch.randn(7),
    "of a device with an index": lambda x: torch.rand(3, device="cpu:0"),
    "integers": lambda x: torch.randint(5, (9,)),
    "a permutation": lambda x: torch.randperm(9),
    "in place": lambda x: x.clone().uniform_(1, 2),
    "coins": lambda x: torch.bernoulli(x),
    "coins of one chance": lambda x: aten.bernoulli.p(x, 0.5),
    "dropout": lambda x: aten.native_dropout.default(x, 0.3, True),
    "dropout of nothing": lambda x: aten.native_dropout.default(x, 0.3, False),
    "dropout of all": lambda x: aten.native_dropout.default(x, 1.0, True),
    "dropout of half precision": lambda x: aten.native_dropout.default(x.half(), 0.3, True),
    "dropout of an empty tensor": lambda x: aten.native_dropout.default(x[:0], 0.3, True),
    "a choice": lambda x: torch.multinomial(x, 3),
    "a leaky function": lambda x: torch.nn.functional.rrelu(x - 0.5, training=True),
    "several": lambda x: (torch.rand(3), torch.randn(3), torch.rand(3)),
}


@pytest.mark.parametrize("name", DRAWS)
def test_private_random_numbers_are_those_of_the_process(name: str) -> None:
    x = torch.rand(8)
    state = torch.get_rng_state()
    torch.rand(5)
    expected_state = torch.get_rng_state()
    randomness = PrivateRandomness(RandomState(state))
    with randomness:
        found = DRAWS[name](x), torch.rand(2)
    assert torch.equal(torch.get_rng_state(), expected_state), "the process's numbers are not drawn"
    assert randomness.draws == (4 if name == "several" else 2)
    torch.set_rng_state(state)
    assert_same_values(found, (DRAWS[name](x), torch.rand(2)))


def test_a_generator_of_the_users_own_draws_its_own_numbers() -> None:
    randomness, generators = PrivateRandomness(RandomState.now()), [torch.Generator().manual_seed(3) for _ in "ab"]
    with randomness:
        found = torch.rand(3, generator=generators[0])
        torch.ones(3).sin()
        torch.rand(3, device="meta")
    assert_same_values(found, torch.rand(3, generator=generators[1]))
    assert randomness.draws == 0


def test_which_operators_draw() -> None:
    targets = [aten.rand.default, aten.bernoulli_.float, aten.normal.float_Tensor, aten.sin.default, torch.rand, "rand"]
    assert [is_random(target) for target in targets] == [True, True, True, False, False, False]


def test_states_of_files(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, *gpus = (torch.Generator().manual_seed(i).get_state() for i in range(3))
    state = RandomState(cpu, tuple(gpus))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    read = RandomState.from_dict(state.to_dict())
    assert read.equals(RandomState(cpu, (gpus[0],))) and not read.equals(RandomState(cpu, (gpus[1],)))
    assert RandomState.now().gpus == (), "no GPU is used here"


def test_unchanged_random_state() -> None:
    before = RandomState.now()
    with pytest.raises(KeyError), unchanged_random_state():
        torch.rand(3)
        raise KeyError
    assert RandomState.now().equals(before)
    torch.rand(3)
    assert not RandomState.now().equals(before)
    assert RandomState.of_seed(3).equals(RandomState(torch.manual_seed(3).get_state()))
    before.restore()
