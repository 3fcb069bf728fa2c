"""Translations of ours that torchlib has not, or has wrong, at special values: as eager, and on ONNX Runtime."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from conftest import assert_same_values, compiled, counted
from operators import difference
from torch.utils import _pytree as pytree

from dynamo_backends.layout import layout_of

nan, inf = math.nan, math.inf
SPECIAL = torch.tensor(
    [nan, inf, -inf, 0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 0.5, -0.5, 1e-45, 1e-38, -1e-38, 3e38, -3e38, 1e-10, 8.0, 10.0]
)
PAIRS = (SPECIAL.repeat_interleave(len(SPECIAL)), SPECIAL.repeat(len(SPECIAL)))
RANGE = torch.cat([SPECIAL, torch.linspace(-20, 20, 401), torch.linspace(-1, 1, 101), torch.linspace(0, 150, 201)])
MIXED = SPECIAL[torch.arange(120).mul(7).remainder(len(SPECIAL))].view(6, 20)
LARGE = torch.tensor([[2**31, -(2**31) - 1, 2**53 + 1], [2**62, 2**53, -(2**63)]])
SHIFTS = torch.tensor([0, 1, 7, 15, 16, 31, 32, 62, 63, 64, 100, -1])

FUNCTIONS = {
    function.__name__.removeprefix("special_"): function
    for function in (
        torch.digamma,
        torch.erfc,
        torch.erfinv,
        torch.i0,
        torch.lgamma,
        torch.special.airy_ai,
        torch.special.bessel_j0,
        torch.special.bessel_j1,
        torch.special.bessel_y0,
        torch.special.bessel_y1,
        torch.special.erfcx,
        torch.special.i0e,
        torch.special.i1,
        torch.special.i1e,
        torch.special.log_ndtr,
        torch.special.modified_bessel_k0,
        torch.special.modified_bessel_k1,
        torch.special.ndtri,
        torch.special.scaled_modified_bessel_k0,
        torch.special.scaled_modified_bessel_k1,
        torch.special.spherical_bessel_j0,
    )
}

CASES: dict[str, tuple[Callable[..., object], Sequence[torch.Tensor]]] = {
    **{name: (function, [RANGE]) for name, function in FUNCTIONS.items()},
    "polygamma": (lambda x: [torch.polygamma(n, x) for n in range(4)], [RANGE]),
    "zeta": (torch.special.zeta, PAIRS),
    "copysign and signbit": (lambda x, y: (torch.copysign(x, y).reciprocal(), torch.signbit(x)), PAIRS),
    "heaviside and angle": (lambda x, y: (torch.heaviside(x, y), torch.angle(x)), PAIRS),
    "hypot and atan2": (lambda x, y: (torch.hypot(x, y), torch.atan2(x, y), torch.atan2(x, y).reciprocal()), PAIRS),
    "fmax and fmin": (lambda x, y: (torch.fmax(x, y), torch.fmin(x, y)), PAIRS),
    "frexp": (lambda x: torch.frexp(x), [SPECIAL[SPECIAL.isfinite()]]),
    "sums of exponentials": (lambda x, y: (torch.logaddexp(x, y), torch.logaddexp2(x, y)), PAIRS),
    "celu": (lambda x: torch.nn.functional.celu(x, 0.7), [SPECIAL]),
    "division rounded down": (lambda x, y: (torch.floor_divide(x, y), x // 0.3), PAIRS),
    "shifts": (lambda x: (x << SHIFTS, x >> SHIFTS), [torch.tensor([[5], [-5], [2**62 + 3], [-(2**63)]])]),
    "shifts of small integers": (
        lambda x: (x << SHIFTS[:8].short(), x >> SHIFTS[:5].short().repeat(2)[:8]),
        [torch.tensor([[5], [-5], [32767], [-32768]], dtype=torch.int16)],
    ),
    "divisors": (torch.gcd, [torch.tensor([0, 12, -12, 2**40, 6765]), torch.tensor([0, 18, 8, 2**20, 10946])]),
    "medians": (lambda x: (x.median(), x.nanmedian(), x[1::2, 3].median(), x[0, :1].nanmedian()), [MIXED]),
    "median of integers": (torch.median, [LARGE]),
    "extrema so far": (lambda x: (x.cummax(0), x.cummin(-1)), [MIXED.t()]),
    "extrema so far of integers": (lambda x: (x.cummax(0), x.cummin(-1)), [LARGE]),
    "sums of exponentials so far": (lambda x: (x.logcumsumexp(0), x.logcumsumexp(1)), [MIXED]),
    "products so far": (lambda x: (x.cumprod(0), x.long().cumprod(1)), [MIXED.clamp(-3, 3).nan_to_num(2)]),
    "products so far of large numbers": (lambda x: x.cumprod(0), [torch.tensor([0.0] + [1e38] * 20 + [inf])]),
    "extrema of large integers": (lambda x: (x.amax(1), x.max(), x.min(0), x.argmin(), x.argmax(1)), [LARGE]),
    "distances": (lambda x: [torch.cdist(x, x[:3], p=p) for p in (0.0, 1.0, 2.0, 3.5)], [MIXED]),
    "distances of pairs": (lambda x: torch.pdist(x), [MIXED.nan_to_num(0.0, 1.0, -1.0).clamp(-9, 9)]),
    "reductions at indices": (
        lambda x: [
            torch.index_reduce(x, 1, torch.tensor([0, 0, 5]), x[:, 3:6], how, include_self=itself)
            for how in ("amax", "amin")
            for itself in (True, False)
        ],
        [MIXED],
    ),
    "windows of several sizes": (
        lambda x: torch.nn.functional.adaptive_max_pool2d(x, (4, 3), return_indices=True),
        [MIXED.view(1, 6, 20)],
    ),
    "matrix by vector": (
        lambda x, a, b: (torch.addmv(x, a.t(), b), torch.addmv(x * nan, a.t(), b, beta=0)),
        [torch.ones(3), torch.randn(4, 3), torch.randn(4)],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_as_eager_on_onnx_runtime(name: str) -> None:
    function, arguments = CASES[name]
    with torch.no_grad():
        found = difference(compiled(function)(*arguments), function(*arguments))
    assert found is None
    assert counted("nodes_on_onnx") > 0
    assert counted("nodes_in_pytorch") == 0


def test_the_tail_of_the_error_function_keeps_its_digits() -> None:
    x = torch.linspace(1, 9, 100)
    with torch.no_grad():
        found = compiled(torch.erfc)(x)
    torch.testing.assert_close(found, torch.erfc(x), rtol=1e-6, atol=0.0)


def test_numbers_next_to_zero_and_beside_the_largest() -> None:
    """ONNX Runtime's ``Tanh`` makes 0 of the former, its ``HardSwish`` does not overflow."""
    x = torch.tensor([1e-45, -1e-45, 1e-42, -1e-39, 1e-30, -1e-10, 1e-5, 2.4e-4, 0.0, -0.0, 3e38, -3e38, inf, nan])
    with torch.no_grad():
        found, gone = compiled(lambda x: (torch.tanh(x), torch.nn.functional.tanhshrink(x)))(x)
        assert not gone[:7].any()
        torch.testing.assert_close(found, x.double().tanh().float(), rtol=3e-7, atol=0.0, equal_nan=True)
        assert torch.equal(found.signbit()[:-1], x.signbit()[:-1])
        large = torch.tensor([3e38, -3e38, 6e37, inf, 1.0, -3.0] * 6)
        assert_same_values(compiled(torch.nn.functional.hardswish)(large), torch.nn.functional.hardswish(large))
    assert counted("nodes_in_pytorch") == 0


def test_layouts_that_fake_tensors_foretell_otherwise() -> None:
    """The kernels', of values and gradients: contiguous or channels last, whatever else the input was."""
    for x in (
        torch.randn(5, 4, 3, 2).permute(3, 2, 1, 0),
        torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.randn(3, 5, 2).permute(2, 0, 1),
    ):
        for trained in (True, False):
            x, w = x.requires_grad_(), torch.rand(3, requires_grad=True)
            y = torch.nn.functional.batch_norm(x, w.detach() * 1, w.detach().exp(), w, w, trained)
            ours = compiled(
                lambda x, w, trained=trained: torch.nn.functional.batch_norm(
                    x, w.detach() * 1, w.detach().exp(), w, w, trained
                )
            )(x, w)
            assert_same_values(ours, y)
            assert ours.stride() == y.stride()
            gradients = [torch.autograd.grad(value.sin().sum(), (x, w)) for value in (ours, y)]
            assert_same_values(*gradients)
            assert [g.stride() for g in gradients[0]] == [g.stride() for g in gradients[1]]

    x, target = torch.randn(2, 3, 4, 5), torch.randint(0, 3, (5, 4, 2)).permute(2, 1, 0)
    losses = compiled(lambda x, y: torch.nn.functional.nll_loss(x, y, reduction="none"))(x, target)
    assert_same_values(losses, torch.nn.functional.nll_loss(x, target, reduction="none"))
    assert losses.is_contiguous()

    x = torch.randn(2, 3, 4, 6).contiguous(memory_format=torch.channels_last)
    pooled, places = torch.nn.functional.max_pool2d(x, 2, return_indices=True)
    for values in (pooled, pooled.contiguous()):
        y = torch.nn.functional.max_unpool2d(values, places, 2)
        ours = compiled(lambda x, i: torch.nn.functional.max_unpool2d(x, i, 2))(values, places)
        assert_same_values(ours, y)
        assert ours.stride() == y.stride()


def test_places_among_no_boundaries_are_integers() -> None:
    for x, boundaries in (
        (torch.ones(3), torch.ones(0)),
        (torch.ones(0), torch.ones(2)),
        (torch.ones(0), torch.ones(0)),
    ):
        for int32 in (False, True):
            found = compiled(lambda x, b, i=int32: torch.bucketize(x, b, out_int32=i))(x, boundaries)
            assert_same_values(found, torch.bucketize(x, boundaries, out_int32=int32))


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: (x // y, x // 2, torch.div(x, y, rounding_mode="floor"), torch.div(x, 2, rounding_mode="trunc")),
        lambda x, y: (torch.copysign(x, y), torch.copysign(x, -1.0), torch.heaviside(x, y)),
        lambda x, y: (torch.logaddexp(x, y), torch.logaddexp2(x, y), torch.xlogy(x, y), torch.special.xlog1py(x, y)),
        lambda x, y: (2**x, 2.5**y, torch.float_power(2.0, x), torch.ldexp(x, y)),
        lambda x, y: (torch.logical_and(x, y), torch.logical_or(x, y), torch.logical_xor(x > 1, y)),
        lambda x, y: torch.nn.functional.binary_cross_entropy(*torch.broadcast_tensors(x / 9, y / 9), reduction="none"),
    ],
)
def test_results_of_two_tensors_lie_in_memory_as_eagers(function: Callable[..., object]) -> None:
    rows = torch.arange(1.0, 6.0)
    first = torch.arange(1.0, 1.0 + 3 * 4 * 5).remainder(7) + 1
    for x, y in (
        (first.view(5, 4, 3).permute(2, 1, 0), rows),
        (first.view(4, 3, 5).permute(1, 0, 2), first[:20].view(5, 4).T),
        (first.view(3, 4, 5), first.view(5, 4, 3).permute(2, 1, 0)),
        (first[:50].view(5, 1, 10).permute(2, 1, 0), first[:50].view(5, 10).T),
        (first.view(12, 5)[:, :3].T, torch.tensor(2.0)),
        (rows[:4].view(1, 4).expand(3, 4), first[:12].view(4, 3).T),
    ):
        ours, eagers = pytree.tree_leaves(compiled(function)(x, y)), pytree.tree_leaves(function(x, y))
        for found, eager in zip(ours, eagers, strict=True):
            assert_same_values(found, eager)
            assert layout_of(found) == layout_of(eager), (found.stride(), eager.stride())


def test_what_is_slower_of_many_numbers_runs_in_pytorch() -> None:
    with torch.no_grad():
        compiled(lambda x: torch.lgamma(x) + 1)(torch.rand(1025))
        assert counted("fallback aten.lgamma.default") == 1
