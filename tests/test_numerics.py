"""Distances to float64, what explains one, and the two runs beside each other that they are taken of."""

from __future__ import annotations

import json
import math
import re

import pytest
import torch
from conftest import assert_same_values

from dynamo_backends.numerics.call_execution import as_float64
from dynamo_backends.numerics.differences import discrete_difference, is_discrete, largest, value_difference
from dynamo_backends.numerics.distance import EQUAL, Distance, distance, is_carried, is_explained, nearer
from dynamo_backends.numerics.exact import widen
from dynamo_backends.numerics.randomness import PrivateRandomness, is_random
from dynamo_backends.numerics.twice import NotRepeatableError, Twice, copies

aten = torch.ops.aten
NAN, INF = math.nan, math.inf


def off(max_abs: float = 0.0, *, scale: float = 1.0, nonfinite: int = 0, max_ulp: float = 0.0) -> Distance:
    return Distance(max_abs, 0.0, 0.0, max_ulp, nonfinite, scale)


def measured(value: list[float], exact: list[float], dtype: torch.dtype = torch.float32) -> Distance:
    return distance(torch.tensor(value, dtype=dtype), torch.tensor(exact, dtype=torch.float64))


# Distances


def test_each_measure() -> None:
    found = measured([1.0, -2.5, 0.25, 4.0], [1.0, -2.0, 0.0, 4.0])
    assert (found.max_abs, found.max_rel, found.scale, found.nonfinite) == (0.5, 0.25, 4.0, 0)
    assert found.rmse == pytest.approx(math.sqrt((0.5**2 + 0.25**2) / 4))
    eps = torch.finfo(torch.float32).eps
    assert found.max_ulp == 0.5 / (2 * eps)  # a unit in the last place of 2.0; that of zero is no measure


def test_the_unit_in_the_last_place_is_that_of_each_element() -> None:
    """The largest absolute error is not that of the most units."""
    eps = torch.finfo(torch.float32).eps
    found = measured([1.0 + 8 * eps, 1024.0 * (1 + 2 * eps)], [1.0, 1024.0])
    assert (found.max_ulp, found.max_abs) == (8.0, 2048 * eps)


def test_equal_values_have_no_distance_and_a_scale() -> None:
    assert measured([3.0, -5.0], [3.0, -5.0]) == Distance(0.0, 0.0, 0.0, 0.0, 0, 5.0)
    assert measured([], []) == EQUAL
    assert distance(torch.tensor([3, 4]), torch.tensor([3, 4])) == EQUAL


@pytest.mark.parametrize("position", [0, 2**14 - 1, 2**14, 40_000])
def test_each_element_of_a_large_tensor_counts(position: int) -> None:
    exact = torch.ones(200, 201, dtype=torch.float64)
    value = exact.float()
    value.view(-1)[position] = 1.5
    found = distance(value, exact)
    assert (found.max_abs, found.max_rel, found.scale) == (0.5, 0.5, 1.0)
    assert found.rmse == pytest.approx(0.5 / math.sqrt(exact.numel()))
    assert found.max_ulp == 0.5 / torch.finfo(torch.float32).eps
    value.view(-1)[position] = NAN
    assert distance(value, exact).nonfinite == 1
    value.view(-1)[position] = 1.0
    exact.view(-1)[position] = 7.0
    assert distance(value, exact).scale == 7.0


def test_strides_are_no_distance() -> None:
    exact = torch.arange(6.0, dtype=torch.float64).view(2, 3)
    assert distance(exact.float().t().contiguous().t(), exact).max_abs == 0.0


def test_what_is_finite_is_measured_beside_what_is_not() -> None:
    found = measured([NAN, 1.5, INF, 2.0], [NAN, 1.0, INF, 2.0])
    assert (found.nonfinite, found.max_abs, found.scale) == (0, 0.5, 2.0)
    assert measured([INF, 2.0], [-INF, 2.0]).nonfinite == 1
    assert measured([1.0, NAN], [INF, INF]).nonfinite == 2
    assert measured([NAN, NAN], [NAN, NAN]) == EQUAL
    assert measured([NAN], [INF]).nonfinite == 1


def test_an_infinity_is_the_rounding_of_what_the_dtype_does_not_hold() -> None:
    assert measured([INF, -INF, 1.0], [70000.0, -70000.0, 1.0], torch.float16).nonfinite == 0
    assert measured([INF, 1.0], [60000.0, 1.0], torch.float16).nonfinite == 1
    assert measured([INF, 1.0], [70000.0, 1.0]).nonfinite == 1  # float32 holds it


def test_masks_are_judged_by_their_relative_error() -> None:
    """The smallest float beside ordinary values would excuse every error of theirs."""
    lowest = torch.finfo(torch.float32).min
    found = measured([lowest, 1.5], [lowest, 1.0])
    assert (found.max_abs, found.scale) == (0.5, 1.0)
    found = measured([lowest, 1.0], [lowest / 2, 1.0])
    assert found.max_abs == pytest.approx(1.0) and found.scale == 1.0
    assert measured([lowest, lowest], [lowest, lowest]).max_abs == 0.0
    found = measured([lowest], [lowest / 2])
    assert (found.max_abs, found.max_rel) == (pytest.approx(1.0), pytest.approx(1.0))
    found = measured([lowest, 16.0], [lowest / 2, 16.0])
    assert found.max_abs == pytest.approx(16.0), "it counts as that share of the ordinary values"


def test_finite_values_whose_squares_are_not() -> None:
    exact = torch.tensor([1e200, -3e200], dtype=torch.float64)
    found = distance(exact * torch.tensor([1.5, 1.0], dtype=torch.float64), exact)
    assert (found.max_rel, found.nonfinite) == (pytest.approx(0.5), 0)
    assert not is_explained(found, EQUAL, torch.float64)
    assert measured([2.0**101, 2.0**102], [2.0**101, 2.0**102]).max_abs == 0.0


def test_complex_values_are_measured_by_their_parts() -> None:
    exact = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex128)
    found = distance(torch.tensor([1 + 2j, 3 - 4.5j]), exact)
    assert (found.max_abs, found.scale, found.max_rel) == (0.5, 4.0, 0.125)
    assert found.max_ulp == 0.5 / (4 * torch.finfo(torch.float32).eps)
    assert not is_explained(found, EQUAL, torch.complex64)
    assert is_explained(off(1e-7), EQUAL, torch.complex64)
    assert distance(torch.tensor([1.0]), torch.tensor([1 + 1j], dtype=torch.complex128)).max_abs == 1.0


def test_discrete_values_are_counted() -> None:
    found = distance(torch.tensor([3, 4, 9]), torch.tensor([3, 5, 5]))
    assert (found.max_ulp, found.max_abs) == (2.0, 4.0)
    assert distance(torch.tensor([True, False]), torch.tensor([True, True])).max_ulp == 1.0
    assert distance(torch.tensor([3]), torch.tensor([3.0], dtype=torch.float64)) == EQUAL


def test_json_has_no_infinity() -> None:
    fields = Distance(INF, NAN, 1.0, 2.0, 3, 4.0).as_json()
    assert fields == {"max_abs": None, "max_rel": None, "rmse": 1.0, "max_ulp": 2.0, "nonfinite": 3, "scale": 4.0}
    json.dumps(fields, allow_nan=False)


# What explains a distance


@pytest.mark.parametrize(
    ("ours", "eager", "dtype", "explained"),
    [
        (off(5e-2), off(1e-2), torch.float32, True),  # another order of summation
        (off(5e-1), off(1e-2), torch.float32, False),
        (off(4e-6), EQUAL, torch.float32, True),  # rounding
        (off(4e-5), EQUAL, torch.float32, False),
        (off(4e-3, scale=1e3), EQUAL, torch.float32, True),
        (off(4e-3), off(scale=1e3), torch.float32, True),
        (off(3e-3), EQUAL, torch.float16, True),
        (off(3e-2), EQUAL, torch.float16, False),
        (off(3e-2), EQUAL, torch.bfloat16, True),
        (off(1e-1), EQUAL, torch.bfloat16, False),
        (off(1e-12), EQUAL, torch.float64, False),
        (off(nonfinite=1), EQUAL, torch.float32, False),
        (off(nonfinite=1), off(nonfinite=1), torch.float32, True),
        (off(nonfinite=1), off(nonfinite=2), torch.float32, True),
        (off(max_ulp=1.0), EQUAL, torch.int64, False),
        (off(max_ulp=1.0), off(max_ulp=1.0), torch.bool, True),
        (off(3.0, max_ulp=1.0), off(max_ulp=2.0), torch.int64, True),
    ],
)
def test_what_eager_and_rounding_explain(ours: Distance, eager: Distance, dtype: torch.dtype, explained: bool) -> None:
    assert is_explained(ours, eager, dtype) == explained


def test_what_rounding_may_have_grown_to() -> None:
    assert is_carried(off(1e-4), torch.float32) and not is_carried(off(1e-3), torch.float32)
    assert is_carried(off(1e-1, scale=1e3), torch.float32) and not is_carried(off(1e-4, scale=1e-3), torch.float32)
    assert is_carried(off(1e-4, scale=0.0), torch.float32)
    assert is_carried(off(1e-2), torch.float16)
    assert not is_carried(off(0.0, nonfinite=1), torch.float32)
    assert not is_carried(off(1.0), torch.int64)


def test_terms_that_cancel_have_the_rounding_of_what_is_beside_them() -> None:
    """A gradient that is zero but for rounding, of an operator whose other gradients are around one."""
    vanishing = off(1e-13, scale=1e-13)
    assert is_explained(off(2e-7, scale=1e-13), vanishing, torch.float32, 1.0)
    assert not is_explained(off(2e-7, scale=1e-13), vanishing, torch.float32)
    assert not is_explained(off(2e-6, scale=1e-13), vanishing, torch.float32, 1.0)
    assert not is_explained(off(2e-7, scale=1e-9), vanishing, torch.float32, 1.0)
    assert (
        largest([torch.tensor([1.0, -3.0]), [torch.tensor([INF, 2j])], torch.tensor([9]), torch.ones(0), None]) == 3.0
    )
    assert largest([]) == 0.0


def test_how_many_comparisons_may_turn() -> None:
    old = torch.zeros(200, dtype=torch.bool)
    new = old.clone()
    new[:2] = True
    assert discrete_difference(old, new) == ""
    new[2] = True
    assert discrete_difference(old, new) == "3 of 200 elements differ"
    assert discrete_difference(old, new, 0.5) == "" and discrete_difference(old, old, 0) == ""


def test_which_is_nearer() -> None:
    assert [nearer(off(a), off(b)) for a, b in ((1, 2), (2, 1), (1, 1))] == ["runtime", "eager", "equal"]


def test_only_integers_and_booleans_are_discrete() -> None:
    assert [is_discrete(torch.zeros(1, dtype=dtype)) for dtype in (torch.int64, torch.bool)] == [True, True]
    assert not any(is_discrete(torch.zeros(1, dtype=dtype)) for dtype in (torch.float16, torch.complex64))
    assert is_discrete(3) and is_discrete(None)


@pytest.mark.parametrize(
    ("old", "new", "datum"),
    [
        (torch.ones(2), torch.ones(2), ""),
        (torch.ones(2), torch.ones(2) + 1e-6, ""),
        (torch.ones(2), torch.ones(2) * 1.01, r" 0\.01, 0 .* 1$"),
        (torch.ones(2), torch.tensor([1.0, NAN]), "^1 .*NaN"),
        (torch.ones(2), torch.ones(2, 1), r"\(2, 1\) .*\(2,\)"),
        (torch.ones(2), torch.ones(2, dtype=torch.int64), "torch.int64 .*torch.float32"),
        (torch.ones(2, dtype=torch.int64), torch.ones(2), "torch.float32 .*torch.int64"),
        (torch.ones(2, dtype=torch.int64), torch.ones(2, dtype=torch.int32), "torch.int32 .*torch.int64"),
        (torch.ones(2), torch.ones(2, dtype=torch.bfloat16), ""),
        (torch.ones(2), torch.full((2,), 1.01, dtype=torch.bfloat16), ""),  # no more than its rounding
        (torch.full((2,), 1.01, dtype=torch.bfloat16), torch.ones(2), ""),
        (torch.ones(2), torch.full((2,), 1.1, dtype=torch.bfloat16), " 0.102"),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), "^1 of 2 "),
        (3, 3, ""),
        (3, 4, "^4 .*3$"),
        (NAN, NAN, ""),
        (NAN, 1.0, r"^1\.0 .*nan$"),
        (None, None, ""),
        (torch.ones(2), None, r"^None .*\(2,\)$"),
        (None, torch.ones(2), r"\(2,\) .*None$"),
        (torch.ones(()), 1.0, ""),
    ],
)
def test_a_difference_in_words(old: object, new: object, datum: str) -> None:
    exact = torch.ones(2).double() if isinstance(old, torch.Tensor) and old.is_floating_point() else old
    found = value_difference(old, exact, new)
    assert re.search(datum, found) if datum else found == ""


# Random numbers

DRAWS = {
    "uniform": lambda x: torch.rand_like(x),
    "normal": lambda x: torch.randn(7),
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
    randomness = PrivateRandomness(state)
    with randomness:
        found = DRAWS[name](x), torch.rand(2)
    assert torch.equal(torch.get_rng_state(), expected_state), "the process's numbers are not drawn"
    assert randomness.draws == (4 if name == "several" else 2)
    torch.set_rng_state(state)
    assert_same_values(found, (DRAWS[name](x), torch.rand(2)))


def test_a_generator_of_the_users_own_draws_its_own_numbers() -> None:
    randomness, generators = PrivateRandomness(torch.get_rng_state()), [torch.Generator().manual_seed(3) for _ in "ab"]
    with randomness:
        found = torch.rand(3, generator=generators[0])
        torch.ones(3).sin()
        torch.rand(3, device="meta")
    assert_same_values(found, torch.rand(3, generator=generators[1]))
    assert randomness.draws == 0


def test_which_operators_draw() -> None:
    targets = [aten.rand.default, aten.bernoulli_.float, aten.normal.float_Tensor, aten.sin.default, torch.rand, "rand"]
    assert [is_random(target) for target in targets] == [True, True, True, False, False, False]


# Two runs


def run_twice(function: object, *args: object, leaves: list[bool] | None = None) -> Twice:
    return Twice(function, args, torch.get_rng_state(), leaves)  # type: ignore[arg-type]


def test_the_float64_run_is_of_the_same_values() -> None:
    x = torch.rand(5)
    twice = run_twice(lambda x: [x / 3, x > 0.5, 7], x)
    assert_same_values(twice.outputs.eager, {0: x / 3, 1: x > 0.5, 2: 7})
    assert_same_values(twice.outputs.exact, {0: x.double() / 3, 1: x > 0.5, 2: 7})
    assert not twice.inexact


DISCRETE = {
    "a comparison that float64 turns": lambda x: [torch.where((x + 1) - 1 == x, x, -x)],
    "a comparison of complex numbers": lambda x: [torch.where(((z := torch.complex(x, x)) + 1) - 1 == z, z, -z)],
    "an index": lambda x: [x[(((x + 1) - 1) - x).abs().argmax()]],
    "a number of the tensor": lambda x: [x * bool(((x[0] + 1) - 1 == x[0]).item())],
    "a rounded integer": lambda x: [(x * 16777217).long() * 1.0],
    "bits": lambda x: [x.view(torch.int32) & 7],
    "random numbers": lambda x: [torch.rand_like(x) + torch.randn(5)],
    "random numbers in place": lambda x: [torch.empty_like(x).uniform_() * x],
    "dropout": lambda x: [torch.nn.functional.dropout(x, 0.5)],
    "dropout of ATen": lambda x: [*aten.native_dropout.default(x, 0.5, True)],
    "dropout of all": lambda x: [*aten.native_dropout.default(x, 1.0, True)],
}


@pytest.mark.parametrize("name", DISCRETE)
def test_float64_does_not_decide_what_is_not_continuous(name: str) -> None:
    x = torch.tensor([0.1, 0.3, 0.7, 0.9, 0.33])
    twice = run_twice(DISCRETE[name], x)
    assert_same_values(
        {key: widen(value) for key, value in twice.outputs.exact.items()},
        {key: widen(value) for key, value in twice.outputs.eager.items()},
        rtol=1e-6,  # eager's rounding: another decision of float64 would change whole elements
        atol=1e-7,
    )
    state = torch.get_rng_state()
    run_twice(DISCRETE[name], x)
    assert torch.equal(torch.get_rng_state(), state), "random numbers leave no trace"


def test_dtypes_that_the_program_names_are_widened() -> None:
    twice = run_twice(lambda x: [x.to(torch.float16) / 3, torch.full((2,), 0.1, dtype=torch.float32)], torch.rand(3))
    assert [value.dtype for value in twice.outputs.exact.values()] == [torch.float64] * 2  # type: ignore[attr-defined]
    assert twice.outputs.exact[1].tolist() == [0.1, 0.1]  # type: ignore[attr-defined]


def test_what_is_made_in_the_default_dtype_is_widened() -> None:
    twice = run_twice(lambda x: [torch.arange(3) / 7, torch.ones(2) / 3], torch.rand(3))
    expected = {0: torch.arange(3).double() / 7, 1: torch.ones(2).double() / 3}
    assert_same_values(dict(twice.outputs.exact), expected, rtol=1e-15, atol=0.0)  # float32 is 1e-8 away


def test_a_comparison_that_eager_did_not_make() -> None:
    twice = run_twice(lambda x: [torch.where(x > 0.5, x, -x) if x.dtype is torch.float64 else x], torch.ones(2))
    assert twice.inexact.keys() == {"aten.gt.Scalar"}
    assert twice.outputs.exact[0].tolist() == [1.0, 1.0]  # type: ignore[attr-defined]


def test_arguments_that_the_program_changes_are_results() -> None:
    def change(x: torch.Tensor, y: torch.Tensor, count: int) -> list[torch.Tensor]:
        x.mul_(1 / 3)
        return [y + count]

    x, y = torch.tensor([1.0, NAN]), torch.tensor([NAN, 2.0])
    twice = run_twice(change, x, y, 3)
    assert set(twice.outputs.eager) == {0, ("input", 0)}
    assert_same_values(twice.outputs.exact["input", 0], x.double() * (1 / 3))
    assert_same_values([x, y], [torch.tensor([1.0, NAN]), torch.tensor([NAN, 2.0])])
    twice = run_twice(lambda x: [x.t_().sum()], torch.ones(2, 3))
    assert twice.outputs.eager["input", 0].shape == (3, 2), "another shape is a change"  # type: ignore[attr-defined]


def test_an_operator_that_float64_does_not_have() -> None:
    @torch.library.custom_op("test_numerics::single", mutates_args=())
    def single(x: torch.Tensor) -> torch.Tensor:
        if x.dtype is not torch.float32:
            raise RuntimeError("float32 only\nand more")
        return x * 2

    twice = run_twice(lambda x: [single(x) / 3], torch.rand(3))
    assert twice.inexact == {"test_numerics.single.default": "no float64: float32 only"}
    assert twice.outputs.exact[0].dtype is torch.float64  # type: ignore[attr-defined]


def test_gradients_of_both_runs() -> None:
    """Of an argument that is changed in place, of a view of a result, and ``None`` where there is none."""

    def function(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> list[torch.Tensor]:
        y.mul_(x)
        return [(x.sin() * 3)[1:], x * 2]

    x, y, z = (torch.rand(4, requires_grad=True) for _ in range(3))
    twice = run_twice(function, x, y * 1, z, leaves=[True, False, True])
    tangents = {("base", 0): torch.ones(4), 1: torch.ones(4), ("input", 1): torch.ones(4)}
    found = twice.gradients(tangents, [0, 1, 2])
    wide, other = x.detach().double(), y.detach().double()
    assert_same_values(found.exact[0], wide.cos() * 3 + 2 + other)
    assert_same_values(found.exact[1], wide)
    assert_same_values(found.eager[0], (wide.cos() * 3 + 2 + other).float())
    assert found.eager[2] is found.exact[2] is None


def test_a_backward_that_draws_random_numbers_is_not_compared() -> None:
    class Noisy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return grad * torch.rand_like(grad)

    x = torch.rand(3, requires_grad=True)
    twice = run_twice(lambda x: [Noisy.apply(x)], x)
    with pytest.raises(NotRepeatableError, match="backward .*random"):
        twice.gradients({0: torch.ones(3)}, [0])
    twice = run_twice(lambda x: [x * torch.rand_like(x)], x)  # its forward draws, and its backward does not
    assert_same_values(twice.gradients({0: torch.ones(3)}, [0]).eager[0], twice.outputs.eager[0] / x.detach())  # type: ignore[operator]


def test_copies_share_memory_as_the_originals_do() -> None:
    base = torch.arange(6.0)
    values = [base.view(2, 3).t(), base[2:], torch.ones(2), 5, base[:2].view(torch.int32)]
    first, second, third, number, _ = copies(values)
    assert number == 5
    assert isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor) and isinstance(third, torch.Tensor)
    assert (first.stride(), second.storage_offset()) == ((1, 3), 2)
    second.fill_(9.0)
    assert first.tolist() == [[0.0, 9.0], [1.0, 9.0], [9.0, 9.0]]
    assert_same_values([base, third], [torch.arange(6.0), torch.ones(2)])


def test_copies_of_unusual_tensors() -> None:
    conjugated, negative = torch.tensor([1 + 2j]).conj(), torch.tensor([1 + 2j]).conj().imag
    assert conjugated.is_conj() and negative.is_neg()
    sparse = torch.tensor([[0.0, 2.0]]).to_sparse()
    assert_same_values(copies([torch._efficientzerotensor(2)]), [torch.zeros(2)])
    for wide in (False, True):
        ours = copies([conjugated, negative, sparse, torch.tensor(3, dtype=torch.int32)], wide=wide)
        assert_same_values([item.to_dense().tolist() for item in ours], [[1 - 2j], [-2.0], [[0.0, 2.0]], 3])  # type: ignore[attr-defined]
        wider = [torch.complex128, torch.float64, torch.float64, torch.int32]
        narrow = [torch.complex64, torch.float32, torch.float32, torch.int32]
        assert [item.dtype for item in ours] == (wider if wide else narrow)  # type: ignore[attr-defined]


def test_copies_require_gradients_where_the_originals_do() -> None:
    values = [torch.nn.Parameter(torch.ones(2)), torch.ones(2), torch.ones(2, requires_grad=True).to_sparse()]
    ours = copies(values, wide=True)
    assert [item.requires_grad for item in ours] == [True, False, True]  # type: ignore[attr-defined]
    assert all(item.is_leaf for item in ours)  # type: ignore[attr-defined]


def test_one_operator_in_float64() -> None:
    x = torch.rand(3)
    assert_same_values(as_float64(aten.div.Tensor, (x, 3), {}), x.double() / 3)
    values, indices = as_float64(aten.sort.default, (x,), {})  # type: ignore[misc]
    assert values.dtype is torch.float64 and indices.dtype is torch.int64
