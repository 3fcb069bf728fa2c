"""Errors against float64, tolerances, and the reference runs."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable

import pytest
import torch
from conftest import assert_same_values

from dynamo_backends.numerics.call_execution import as_float64
from dynamo_backends.numerics.exact import widen
from dynamo_backends.numerics.measure import Measure
from dynamo_backends.numerics.randomness import PrivateRandomness, is_random
from dynamo_backends.numerics.reference_runs import NotRepeatableError, ReferenceRuns, Results, SharedCopies, copies
from dynamo_backends.numerics.same_results import difference_of_results
from dynamo_backends.numerics.tensor_measure import measure_tensor, nearer, ordinary
from dynamo_backends.numerics.verdicts import is_changed, is_discrete, largest, verdict

aten = torch.ops.aten
NAN, INF = math.nan, math.inf
EPS = torch.finfo(torch.float32).eps
LOWEST = torch.finfo(torch.float32).min


def measured(
    value: object, exact: object, dtype: torch.dtype = torch.float32, *others: object, **how: object
) -> Measure:
    wide = [torch.tensor(item, dtype=torch.float64) for item in (exact, *others)]
    return measure_tensor(torch.tensor(value, dtype=torch.float64).to(dtype), *wide, **how)  # type: ignore[arg-type]


# Distances


def test_each_measure() -> None:
    found = measured([1.0, -2.5, 0.25, 4.0], [1.0, -2.0, 0.0, 4.0])
    assert (found.max_abs, found.max_rel, found.scale, found.nonfinite) == (0.5, 0.25, 4.0, 0)
    assert found.rmse == pytest.approx(math.sqrt((0.5**2 + 0.25**2) / 4))
    assert found.max_ulp == 0.5 / (2 * EPS)  # a unit in the last place of 2.0; that of zero is no measure
    assert (found.position, found.error, found.relative) == (2, 0.25, 0.125), "0 has the smallest tolerance"
    assert found.share == pytest.approx(found.error / found.limit)
    found = measured([1.0 + 8 * EPS, 1024.0 * (1 + 2 * EPS)], [1.0, 1024.0])
    assert (found.max_ulp, found.max_abs, found.position) == (8.0, 2048 * EPS, 0), "the unit is that of the element"


def test_equal_values_have_no_distance_and_a_scale() -> None:
    exact = torch.arange(6.0, dtype=torch.float64).view(2, 3)
    assert measure_tensor(exact.float().t().contiguous().t(), exact) == Measure(scale=5.0)
    assert measured([3.0, -5.0], [3.0, -5.0]) == Measure(scale=5.0)
    assert measured([], []) == Measure()
    assert measure_tensor(torch.tensor([3, 4]), torch.tensor([3, 4])) == Measure()


@pytest.mark.parametrize("group", [1, 301, 300 * 301])
@pytest.mark.parametrize("position", [0, 2**16 - 1, 2**16, 90_000])
def test_each_element_of_a_large_tensor_counts(position: int, group: int) -> None:
    exact = torch.ones(300, 301, dtype=torch.float64)
    value, eager = exact.float(), exact.float()
    value.view(-1)[position] = 1.5
    found = measure_tensor(value, exact, eager, group_size=group)
    assert (found.max_abs, found.max_rel, found.scale, found.position) == (0.5, 0.5, 1.0, position)
    assert found.rmse == pytest.approx(0.5 / math.sqrt(exact.numel()))
    assert found.max_ulp == 0.5 / EPS and not found.is_rounding
    eager.view(-1)[position] = 1.1
    assert measure_tensor(value, exact, eager, group_size=group).is_rounding
    value.view(-1)[position] = NAN
    found = measure_tensor(value, exact, eager, group_size=group)
    assert (found.nonfinite, found.position, found.relative) == (1, position, INF) and not found.is_rounding
    value.view(-1)[position] = 1.0
    exact.view(-1)[position] = 7.0
    assert measure_tensor(value, exact).scale == 7.0


def test_what_is_finite_is_measured_beside_what_is_not() -> None:
    found = measured([NAN, 1.5, INF, 2.0], [NAN, 1.0, INF, 2.0])
    assert (found.nonfinite, found.max_abs, found.scale, found.position) == (0, 0.5, 2.0, 1)
    assert measured([INF, 2.0], [-INF, 2.0]).nonfinite == 1
    found = measured([1.0, 2.0, NAN], [1.0, INF, INF])
    assert (found.nonfinite, found.position) == (2, 1)
    assert measured([NAN, NAN], [NAN, NAN]) == Measure()
    assert measured([NAN], [INF]).nonfinite == 1


def test_an_infinity_is_the_rounding_of_what_the_dtype_does_not_hold() -> None:
    assert measured([INF, -INF, 1.0], [70000.0, -70000.0, 1.0], torch.float16).nonfinite == 0
    assert measured([INF, 1.0], [60000.0, 1.0], torch.float16).nonfinite == 1
    assert measured([INF, 1.0], [70000.0, 1.0]).nonfinite == 1  # float32 holds it
    one = [1.0, 1.0]  # what another computation does not represent at the same element, which excuses no finite error
    assert measured([INF, 1.0], one, torch.float32, [INF, 1.0]).is_rounding
    assert measured([INF, 1.0], one, torch.float32, [1.0, INF], group_size=2).nonfinite == 1
    assert not measured([1.5, 1.0], one, torch.float32, [INF, NAN], group_size=2).is_rounding


def test_complex_values_are_measured_by_their_parts() -> None:
    exact = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex128)
    value = torch.tensor([1 + 2j, 3 - 4.5j])
    found = measure_tensor(value, exact)
    assert (found.max_abs, found.scale, found.max_rel) == (0.5, 4.0, 0.125)
    assert found.max_ulp == 0.5 / (4 * EPS) and not found.is_rounding
    assert measure_tensor(value, exact, torch.tensor([1 + 2j, 3 - 4.4j])).is_rounding
    assert measure_tensor(value, exact, torch.tensor([1 + 2j, 3.4 - 4j])).is_rounding, (
        "the other part is of the same number"
    )
    assert not measure_tensor(value, exact, torch.tensor([1.5 + 2j, 3 - 4j])).is_rounding
    assert measure_tensor(value, exact, inner_size=torch.tensor([0.0, 1e7])).is_rounding
    assert verdict(value, exact.to(torch.complex64), exact).index == (1,)
    assert measure_tensor((exact * (1 + 4 * EPS)).to(torch.complex64), exact).is_rounding
    assert measure_tensor(torch.tensor([1.0]), torch.tensor([1 + 1j], dtype=torch.complex128)).max_abs == 1.0


def test_discrete_values_are_counted() -> None:
    found = measure_tensor(torch.tensor([3, 4, 9]), torch.tensor([3, 5, 5]))
    assert (found.max_ulp, found.max_abs, found.position) == (2.0, 4.0, 1) and not found.is_rounding
    assert measure_tensor(torch.tensor([3]), torch.tensor([3.0], dtype=torch.float64)) == Measure()
    right, one, two, three = (torch.arange(200) < count for count in (0, 1, 2, 3))
    assert [measure_tensor(value, right, right, one).is_rounding for value in (one, two, three)] == [True, True, False]
    assert not measure_tensor(one, right).is_rounding


def test_json_has_no_infinity() -> None:
    fields = Measure(INF, NAN, 1.0, 2.0, 3, 4.0, INF, 5).as_json()
    assert fields | {"max_abs": None, "max_rel": None, "rmse": 1.0, "max_ulp": 2.0, "nonfinite": 3} == fields
    assert (fields["share"], fields["position"]) == (None, 5)
    json.dumps(fields, allow_nan=False)


# What rounding explains


@pytest.mark.parametrize(
    ("dtype", "units"),
    [(torch.float64, 8), (torch.float32, 8), (torch.float16, 2), (torch.bfloat16, 2), (torch.float8_e4m3fn, 1)],
    ids=str,
)
def test_some_units_in_the_last_place(dtype: torch.dtype, units: int) -> None:
    info = torch.finfo(dtype)
    for count, is_rounding in ((units, True), (units + 1, False)):
        value = [1.0, -8 * (1 + count * info.eps)]
        assert measured(value, [1.0, -8.0], dtype).is_rounding == is_rounding
        wide = torch.tensor(value, dtype=torch.float64)
        assert measure_tensor(wide, torch.tensor([1.0, -8.0]).double(), dtype=dtype).is_rounding == is_rounding


def test_what_may_become_nothing() -> None:
    """Numbers next to it, and those that are as large inside of the computation."""
    for dtype in (torch.float32, torch.bfloat16):
        assert measured([0.0], [1e-38], dtype).is_rounding and not measured([0.0], [1e-37], dtype).is_rounding
    assert measured([0.0], [2.0**-24], torch.float16).is_rounding
    assert not measured([0.0], [2.0**-15], torch.float16).is_rounding, "float32 computes with it"
    inner = torch.tensor([1.0, 100.0])
    assert measured([4 * EPS, 400 * EPS], [0.0, 0.0], inner_size=inner).is_rounding
    assert not measured([5 * EPS, 0.0], [0.0, 0.0], inner_size=inner).is_rounding


@pytest.mark.parametrize("outlier", [-1e9, LOWEST, 1e30, INF])
def test_nothing_is_excused_by_another_element(outlier: float) -> None:
    """Neither by its size, nor by its error in another computation."""
    wrong, exact = [outlier, 1.0 + 20 * EPS, *[1.0] * 6], [outlier, *[1.0] * 7]
    others = [[outlier * (1 + 20 * EPS), *[1.0] * 7]]
    for group in (1, 2, 8):
        assert not measured(wrong, exact, torch.float32, *others, group_size=group).is_rounding
        assert measured(others[0], exact, torch.float32, *others, group_size=group).is_rounding
    assert not measured([1.0, 1.0], [outlier, 1.0]).is_rounding


def test_what_another_computation_explains() -> None:
    """A unit in the last place is no more than any rounding."""
    for others, most in ([1], 8), ([100], 1008), ([-100], 1008), ([0, 100, 50], 1008):
        exact, *near = ([1.0 + count * EPS] for count in (0, *others))
        found = [measured([1.0 + count * EPS], exact, torch.float32, *near).is_rounding for count in (most, most + 1)]
        assert found == [True, False]


@pytest.mark.parametrize(
    ("group", "known", "first", "end"),
    # the largest one of the row, the smallest of a row, of another row; of all; of the smallest quarter
    [(1, 3, 3, 4), (4, 3, 3, 4), (4, 0, 0, 4), (4, 4, 4, 8), (8, 3, 3, 8), (8, 2, 2, 8), (8, 1, 0, 8), (8, 0, 0, 8)],
)
def test_errors_have_one_size_in_a_group(group: int, known: int, first: int, end: int) -> None:
    exact, zeros = [2.0**i for i in range(8)], [0.0] * 8  # which are no quarter

    def off(position: int) -> list[float]:
        return [item + 0.01 * (i == position) for i, item in enumerate(exact)]

    found = [i for i in range(8) if measured(off(i), exact, torch.float32, off(known), group_size=group).is_rounding]
    assert found == list(range(first, end))
    right = measured([0.01] * 8 + exact, zeros + exact, torch.float32, zeros + off(known), group_size=16)
    assert right.is_rounding == (known < 2)


def test_what_excuses_nothing() -> None:
    """One error of a thousand elements, an infinity that both have, a NaN in ``inner``, NaN for what overflows."""
    ones = [1.0] * 1000
    assert not measured([1.4] * 500 + ones[500:], [1.05] + ones[1:], torch.float32, ones, group_size=1000).is_rounding
    for wrong in (3.0, NAN, -INF):
        assert not measured([1.0, wrong], [1.0, INF], torch.float32, [1.0, INF], group_size=2).is_rounding
    assert not measured([NAN, 1.5], [NAN, 1.0], torch.float32, inner_size=torch.tensor([NAN, 1.0])).is_rounding
    assert [measured([item], [1e39], torch.float32).is_rounding for item in (INF, NAN, -INF)] == [True, False, False]
    assert not is_changed(torch.tensor([INF, 1.0]), torch.tensor([INF, 1.0]))
    assert is_changed(torch.tensor([3.0, 1.0]), torch.tensor([INF, 1.0]))
    mask, x = (torch.arange(16) < 4).float(), torch.randn(8, 16)
    found = run_twice(lambda x, m: [torch.softmax(x.masked_fill(m == 0, -1e9), -1)], x, mask).outputs
    assert found.verdict(found.eager[0] * 1.3, 0).is_wrong, "zeros of a mask are not moved"  # type: ignore[operator]
    stored, w = torch.randn(4, 4).to(torch.float8_e4m3fn), torch.randn(3, 4)
    found = run_twice(lambda x, w: [x @ w.float()], w, stored).outputs
    assert found.verdict(found.eager[0] * 1.05, 0).is_wrong  # type: ignore[operator]
    rows, x = torch.randn(8, 64), torch.randn(64, 64)
    exact = rows.double() + torch.tensor([0.0] * 7 + [1.0]).view(8, 1).double()  # eager's last row is far off
    assert verdict(rows * torch.tensor([2.0] + [1.0] * 7).view(8, 1), rows, exact).is_wrong, "of another row"
    mask, zeros = torch.full((8, 8), LOWEST), torch.relu(x)
    zeros[0, 0] = 1e6
    for expected, actual in (
        ([mask, x], [mask, x * 0]),
        ([zeros], [torch.where(zeros < 50, zeros * 10, zeros)]),
        ([x.bfloat16()], [x.bfloat16() * 1.1]),
    ):
        assert difference_of_results(expected, actual) and not difference_of_results(expected, expected)
    number = Results({0: torch.tensor(3)}, {0: torch.tensor(3)}, lambda times, keys: [{0: torch.tensor(5)}])
    assert not number.verdict(torch.tensor(5), 0).is_wrong


def test_magnitudes_and_kinds() -> None:
    values = [torch.tensor([1.0, -3.0]), [torch.tensor([INF, 2j])], torch.tensor([9]), torch.ones(0), None]
    assert largest(values) == 3.0 and largest([]) == 0.0
    assert ordinary(torch.tensor([1.0, 1.0, -1.0, LOWEST, INF, NAN])) == 1.0
    assert [ordinary(torch.zeros(n)) for n in (0, 3)] == [0.0, 0.0] and ordinary(torch.tensor([0.0, 0, 0, 2])) == 2.0
    assert [nearer(Measure(1), Measure(b)) for b in (2, 0, 1)] == ["runtime", "eager", "equal"]
    dtypes = (torch.int64, torch.bool, torch.float16, torch.complex64)
    assert [is_discrete(torch.zeros(1, dtype=dtype)) for dtype in dtypes] == [True, True, False, False]
    assert is_discrete(3) and is_discrete(None)


@pytest.mark.parametrize(
    ("old", "new", "datum"),
    [
        (torch.ones(2), torch.ones(2) + 8 * EPS, ""),
        (torch.ones(2), torch.tensor([1.0, 1.01]), r" 0\.01 .*\[1\].* 9\.54e-07$"),
        (torch.ones(2), torch.tensor([1.0, NAN]), r"^1 element is wrongly NaN or infinite, at element \[1\]$"),
        (torch.tensor([NAN, 1.0]), torch.ones(2), r"^1 element is finite and should be NaN .*\[0\]$"),
        (
            torch.tensor([NAN, NAN, 1]),
            torch.tensor([1, 1, -INF]),
            r"^1 element is w.* and 2 elements are finite .*\[0\]$",
        ),
        (torch.ones(2), torch.ones(2, 1), r"\(2, 1\) .*\(2,\)"),
        (torch.ones(2), torch.ones(2, dtype=torch.int64), "torch.int64 .*torch.float32"),
        (torch.ones(2, dtype=torch.int64), torch.ones(2, dtype=torch.int32), "torch.int32 .*torch.int64"),
        (torch.ones(2), torch.full((2,), 1.01, dtype=torch.bfloat16), ""),  # no more than its rounding
        (torch.ones(2), torch.full((2,), 1.1, dtype=torch.bfloat16), " 0.102"),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), "^1 of 2 "),
        (3, 4, "^4 .*3$"),
        (NAN, NAN, ""),
        (NAN, 1.0, r"^1\.0 .*nan$"),
        (None, None, ""),
        (torch.ones(2), None, r"^None .*\(2,\)$"),
        (None, torch.ones(2), r"\(2,\) .*None$"),
        (torch.ones(()), 1.0, ""),
    ],
)
def test_a_verdict_in_words(old: object, new: object, datum: str) -> None:
    exact = old.double() if isinstance(old, torch.Tensor) and old.is_floating_point() else old
    found = verdict(new, old, exact)
    assert found.is_wrong == bool(datum)
    assert re.search(datum, str(found)) if datum else str(found) == ""


def test_what_a_verdict_goes_by() -> None:
    eager = torch.tensor([1.0, 2.0, 4.0, 8.0])
    exact, wrong = eager.double(), eager * torch.tensor([1, 1, 1.001, 1])
    found = verdict(wrong, eager, exact)
    assert found.is_of_size and found.index == (2,) and found.ours is not None and found.ours.error > found.ours.limit
    assert not verdict(wrong, eager, exact, rounded_to=torch.bfloat16).is_wrong
    assert not verdict(wrong, exact.mul(1.001).float(), exact).is_wrong, "eager's own error"
    assert verdict(wrong, eager, exact, [torch.tensor(9.0), 3]).is_wrong, "of another shape, or none"
    assert not verdict(eager > 4, eager > 2, eager > 2, [eager > 4]).is_wrong


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


def run_twice(function: object, *args: object, leaves: list[bool] | None = None) -> ReferenceRuns:
    return ReferenceRuns(function, SharedCopies(args), torch.get_rng_state(), leaves)  # type: ignore[arg-type]


def test_the_float64_run_is_of_the_same_values() -> None:
    x = torch.rand(5)
    twice = run_twice(lambda x: [x / 3, x > 0.5, 7], x)
    assert_same_values(twice.outputs.eager, {0: x / 3, 1: x > 0.5, 2: 7})
    assert_same_values(twice.outputs.exact, {0: x.double() / 3, 1: x > 0.5, 2: 7})
    assert not twice.inexact


@pytest.mark.parametrize("returned", [lambda x: [x.view(-1)], lambda x: [x], lambda x: [x * 2]])
def test_a_run_that_writes_leaves_the_results_of_earlier_runs(returned: Callable[..., list[torch.Tensor]]) -> None:
    x = torch.rand(5)
    arguments, state = SharedCopies([x]), torch.get_rng_state()
    first = ReferenceRuns(returned, arguments, state).outputs
    second = ReferenceRuns(lambda x: [x.mul_(3)], arguments, state).outputs
    third = ReferenceRuns(returned, arguments, state).outputs
    for found in (first, third):
        assert_same_values(found.eager, dict(enumerate(returned(x))))
        assert_same_values(found.exact, dict(enumerate(returned(x.double()))))
    assert_same_values(second.exact, {0: x.double() * 3, ("input", 0): x.double() * 3})


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
    assert twice.outputs.exact[0].tolist() == [1.0, 1.0]  # type: ignore[attr-defined]
    assert twice.inexact.keys() == {"aten.gt.Scalar"}


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
    assert twice.outputs.exact[0].dtype is torch.float64  # type: ignore[attr-defined]
    assert twice.inexact == {"test_numerics.single.default": "no float64: float32 only"}


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


def test_float64_with_rounding_at_random() -> None:
    """Comparisons turn in it that are near a tie, random numbers do not, and no infinity becomes a number."""
    x = torch.cat([torch.full((50,), 1 / 3), torch.tensor([INF, -INF])])

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        return [x.sin() * 3, x * 3 > 1, x.view(2, 26), torch.rand_like(x), x.abs() * 2 > 1]

    outputs = run_twice(function, x).outputs
    named = outputs.under({i: str(i) for i in range(5)})
    furthest, first, second, *_ = named.perturbed(4, "01234")
    again, *_ = named.perturbed(8, "01234")
    assert ((again["0"] - x.double().sin() * 3).abs()[:50] >= (furthest["0"] - x.double().sin() * 3).abs()[:50]).all()
    assert not torch.equal(first["1"], second["1"]), "each at random of its own"  # type: ignore[arg-type]
    for found in ({**furthest, **first}, {**furthest, **second}):
        torch.testing.assert_close(found["0"], x.double().sin() * 3, rtol=4 * EPS, atol=0, equal_nan=True)
        assert 5 < (found["1"] != outputs.eager[1]).sum() < 45  # type: ignore[attr-defined, union-attr]
        expected = [x.double().view(2, 26), widen(outputs.eager[3]), outputs.eager[4]]
        assert_same_values([found[key] for key in "234"], expected)


def test_random_numbers_that_are_changed_in_place_are_the_same_in_each_run() -> None:
    def function(x: torch.Tensor) -> list[torch.Tensor]:
        return [torch.rand(3, dtype=torch.float64).mul_(2), torch.randint(9, (3,)).add_(1) + 0]

    results = run_twice(function, torch.ones(3)).outputs
    furthest, *others = results.perturbed(2, [0, 1])
    for found in (results.exact, *({**furthest, **other} for other in others)):
        assert_same_values(found, dict(results.eager), rtol=1e-12, atol=0.0)


def test_what_rounding_at_random_explains() -> None:
    """Where terms cancel, an error that eager, by chance, does not make; of gradients too."""
    x = torch.ones(4, requires_grad=True)
    twice = run_twice(lambda x, y: [((x + 1e4) - 1e4).detach(), y * 2, (x * 1e4 - x * 1e4 + x).sum() + y.sum()], x, x)
    for results in (twice.outputs, twice.gradients({2: torch.ones(())}, [0, 1])):
        right = [results.eager[i].detach() for i in (0, 1)]  # type: ignore[attr-defined]
        errors = {error: [results.verdict(right[i] + error, i).is_wrong for i in (0, 1)] for error in (0, 1e-3, 0.1)}
        assert errors == {0: [False, False], 1e-3: [False, True], 0.1: [True, True]}
        assert results.verdict(right[0][:2], 0).is_wrong


def test_a_gradient_may_pass_where_a_value_is_within_the_tolerance_of_zero() -> None:
    """Its value is some units off in its last place, as a single operator may be; no larger error is excused."""
    x = torch.full((8,), 1 + 4 * EPS).requires_grad_()
    found = run_twice(lambda x: [((x.exp() - math.e) * torch.ones(8)).relu()], x).gradients({0: torch.ones(8)}, [0])
    assert not found.verdict(torch.zeros(8), 0).is_wrong and found.verdict(torch.full((8,), 9.0), 0).is_wrong


def test_rounding_at_random_may_have_no_result() -> None:
    """Where it decides a shape that the next operator does not take."""
    results = run_twice(lambda x: [x * 2, x[x * 3 > 1].view(0, 7)], torch.ones(50) / 3).outputs
    assert results.verdict(torch.ones(50), 0).is_wrong and not any(results.perturbed(4, [0]))


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
    outputs = twice.outputs
    assert_same_values(twice.gradients({0: torch.ones(3)}, [0]).eager[0], outputs.eager[0] / x.detach())  # type: ignore[operator]


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
    many = [torch.full((4,), complex(i, 1)).conj() for i in range(50)]
    assert_same_values(copies(many), many)
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
