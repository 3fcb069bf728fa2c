"""Operators that torchlib lacks or has wrong, at special values: eager's results, on ONNX Runtime."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from conftest import assert_on_onnx, assert_same_values, compiled, counted
from operators import difference
from torch._dynamo.exc import BackendCompilerFailed
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from dynamo_backends.graphs.layout import layout_of

nan, inf = math.nan, math.inf
SPECIAL = torch.tensor(
    [nan, inf, -inf, 0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 0.5, -0.5, 1e-45, 1e-38, -1e-38, 3e38, -3e38, 1e-10, 8.0, 10.0]
)
PAIRS = (SPECIAL.repeat_interleave(len(SPECIAL)), SPECIAL.repeat(len(SPECIAL)))
RANGE = torch.cat([SPECIAL, torch.linspace(-20, 20, 401), torch.linspace(-1, 1, 101), torch.linspace(0, 150, 201)])
MIXED = SPECIAL[torch.arange(120).mul(7).remainder(len(SPECIAL))].view(6, 20)
LARGE = torch.tensor([[2**31, -(2**31) - 1, 2**53 + 1], [2**62, 2**53, -(2**63)]])
SHIFTS = torch.tensor([0, 1, 7, 15, 16, 30, 31, 32, 33, 63, 64, 100, -1, -(2**31)], dtype=torch.int32)

CASES: dict[str, tuple[Callable[..., object], Sequence[torch.Tensor]]] = {
    "sums of exponentials": (lambda x, y: (torch.logaddexp(x, y), torch.logaddexp2(x, y)), PAIRS),
    "celu": (lambda x: torch.nn.functional.celu(x, 0.7), [SPECIAL]),
    "logit": (lambda x: (torch.logit(x), torch.logit(x, 0.1)), [SPECIAL]),
    "entropy and sinc": (lambda x: (torch.special.entr(x), torch.sinc(x)), [SPECIAL]),
    "products with a logarithm": (lambda x, y: (torch.xlogy(x, y), torch.xlogy(x, 3.0), torch.xlogy(2.0, y)), PAIRS),
    "sums of exponentials of rows": (lambda x: (x.logsumexp(0), x.logsumexp((0, 1), keepdim=True)), [MIXED.exp()]),
    "shifts": (
        lambda x: (x << SHIFTS, x >> SHIFTS, x >> 3),
        [torch.tensor([[5], [-5], [2**30 + 3], [-(2**31)]], dtype=torch.int32)],
    ),
    "shifts of small integers": (
        lambda x: (x << SHIFTS[:8].short(), x >> SHIFTS[:5].short().repeat(2)[:8]),
        [torch.tensor([[5], [-5], [32767], [-32768]], dtype=torch.int16)],
    ),
    "extrema of large integers": (lambda x: (x.amax(1), x.max(), x.min(0), x.argmin(), x.argmax(1)), [LARGE]),
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


RARE: dict[str, tuple[Callable[..., object], Sequence[torch.Tensor]]] = {
    **{
        f"aten.{function.__name__}.default": (function, [RANGE])
        for function in (
            torch.digamma,
            torch.erfc,
            torch.erfinv,
            torch.i0,
            torch.lgamma,
            torch.special.airy_ai,
            torch.special.bessel_j0,
            torch.special.bessel_y1,
            torch.special.erfcx,
            torch.special.i0e,
            torch.special.i1,
            torch.special.modified_bessel_i0,
            torch.special.modified_bessel_k0,
            torch.special.ndtri,
            torch.special.scaled_modified_bessel_k1,
            torch.special.spherical_bessel_j0,
        )
    },
    "aten.polygamma.default": (lambda x: [torch.polygamma(n, x) for n in range(4)], [RANGE]),
    "aten.special_zeta.default": (torch.special.zeta, PAIRS),
    "aten.copysign.Tensor": (torch.copysign, PAIRS),
    "aten.signbit.default": (torch.signbit, [SPECIAL]),
    "aten.angle.default": (torch.angle, [SPECIAL]),
    "aten.heaviside.default": (torch.heaviside, PAIRS),
    "aten.hypot.default": (torch.hypot, PAIRS),
    "aten.atan2.default": (torch.atan2, PAIRS),
    "aten.fmax.default": (torch.fmax, PAIRS),
    "aten.fmin.default": (torch.fmin, PAIRS),
    "aten.trunc.default": (torch.trunc, [SPECIAL]),
    "aten.frac.default": (torch.frac, [SPECIAL]),
    "aten.log2.default": (torch.log2, [SPECIAL]),
    "aten.log10.default": (torch.log10, [SPECIAL]),
    "aten.fmod.Tensor": (torch.fmod, [LARGE, LARGE.flip(0)]),
    "aten.bitwise_left_shift.Tensor": (
        lambda x: torch.bitwise_left_shift(x, SHIFTS),
        [torch.tensor([[5], [-5], [2**62 + 3], [-(2**63)]])],
    ),
    "aten.frexp.Tensor": (torch.frexp, [SPECIAL[SPECIAL.isfinite()]]),
    "aten.gcd.default": (torch.gcd, [torch.tensor([0, 12, -12, 2**40, 6765]), torch.tensor([0, 18, 8, 2**20, 10946])]),
    "aten.median.default": (lambda x: x.median(), [MIXED]),
    "aten.nanmedian.default": (lambda x: x.nanmedian(), [MIXED]),
    "aten.cummax.default": (lambda x: x.cummax(0), [MIXED]),
    "aten.cummin.default": (lambda x: x.cummin(-1), [LARGE]),
    "aten.logcumsumexp.default": (lambda x: x.logcumsumexp(0), [MIXED]),
    "aten.cumprod.default": (lambda x: x.cumprod(0), [MIXED]),
    "aten._cdist_forward.default": (lambda x: [torch.cdist(x, x[:3], p=p) for p in (0.0, 1.0, 2.0, 3.5)], [MIXED]),
    "aten._pdist_forward.default": (lambda x: torch.pdist(x), [MIXED.nan_to_num(0.0, 1.0, -1.0).clamp(-9, 9)]),
    "aten._trilinear.default": (
        torch.nn.functional.bilinear,
        [torch.randn(4, 3), torch.randn(4, 2), torch.randn(5, 3, 2)],
    ),
    "aten.index_reduce.default": (
        lambda x: torch.index_reduce(x, 1, torch.tensor([0, 0, 5]), x[:, 3:6], "amax"),
        [MIXED],
    ),
    "aten.adaptive_max_pool2d.default": (
        lambda x: [torch.nn.functional.adaptive_max_pool2d(x, size, True) for size in ((4, 3), (3, 4), 1)],
        [MIXED.view(1, 6, 20)],
    ),
    "aten.diagonal_scatter.default": (lambda x: x.diagonal_scatter(torch.ones(6)), [MIXED]),
    "aten._embedding_bag.default": (
        lambda w: torch.ops.aten._embedding_bag(w, torch.arange(6), torch.tensor([0, 4]), False, 2),
        [MIXED],
    ),
}
"""Operators that models hardly use, by name."""


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", RARE)
def test_an_operator_that_models_hardly_use_runs_in_pytorch(name: str) -> None:
    function, arguments = RARE[name]
    with torch.no_grad():
        found = difference(compiled(function)(*arguments), function(*arguments))
        assert found is None
        assert counted(f"fallback {name}") > 0
        with pytest.raises(BackendCompilerFailed, match=re.escape(name)):
            compiled(function, options={"fallback": "error"})(*arguments)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: [torch.diagonal_copy(x, i, *dims) for i in (-7, -2, 0, 3, 99) for dims in ((0, 1), (1, 0))],
        lambda x: torch.nn.functional.adaptive_max_pool2d(x[None], 1, return_indices=True),
    ],
)
def test_what_only_moves_elements(function: Callable[..., Any], dynamic: bool) -> None:
    with torch.no_grad():
        assert_same_values(compiled(function, dynamic=dynamic)(MIXED), function(MIXED))
    assert_on_onnx()


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


OUT_OF_RANGE: dict[str, Callable[[torch.Tensor, float], object]] = {
    "alpha": lambda x, number: torch.add(x, x, alpha=number),
    "alpha of sub": lambda x, number: torch.sub(x, x, alpha=-number),
    "bound": lambda x, number: x.clamp(max=number),
    "exponent": lambda x, number: x.pow(number),
    "value": lambda x, number: torch.addcmul(x, x, x, value=number),
    "threshold": lambda x, number: F.threshold(x, 0, number),
    "hardtanh": lambda x, number: F.hardtanh(x, -abs(number), abs(number)),
    "index_fill": lambda x, number: x.index_fill(0, torch.tensor([0]), number),
    "pad": lambda x, number: F.pad(x, (1, 1), value=number),
    "masked_fill": lambda x, number: x.masked_fill(x > 0, number),
    "where": lambda x, number: torch.where(x > 0, x, number),
    "full_like": lambda x, number: torch.full_like(x, number),
    "plus": lambda x, number: x + number,
    "compared": lambda x, number: x < number,
}


@pytest.mark.parametrize(("dtype", "number"), [(torch.int8, 1000), (torch.uint8, -300), (torch.float16, 1e6)])
def test_a_number_that_the_dtype_cannot_hold_is_eagers(dtype: torch.dtype, number: float) -> None:
    x = torch.tensor([1, 2, 3]).to(dtype)
    raised = 0
    for function in OUT_OF_RANGE.values():
        torch._dynamo.reset()
        ours = compiled(lambda x, function=function: function(x, number))
        try:
            expected = function(x, number)
        except RuntimeError as error:
            raised += 1
            with pytest.raises(RuntimeError, match="(?i)" + re.escape(str(error).splitlines()[0])):
                ours(x)
        else:
            assert_same_values(ours(x), expected)
    assert raised > 6
