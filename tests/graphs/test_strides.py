"""Results have the strides of eager's kernels, also where PyTorch's fake tensors have others."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import strides_sweep
import torch
from conftest import assert_on_onnx, assert_same_as_eager, compiled, counted
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import dynamo_backends
from dynamo_backends.graphs import fake_tensors
from dynamo_backends.graphs.fake_tensors import fake_tensors_as_kernels, strides_of_kernel

LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "channels last": lambda: torch.randn(2, 8, 8, 8).to(memory_format=torch.channels_last),
    "one image, channels last": lambda: torch.randn(1, 8, 8, 8).to(memory_format=torch.channels_last),
    "a view that could be either": lambda: torch.randn(1, 64, 8).permute(0, 2, 1).reshape(1, 8, 8, 8),
    "one image, permuted": lambda: torch.randn(8, 8, 8).permute(2, 0, 1).unsqueeze(0),
    "batch last": lambda: torch.randn(8, 8, 8, 2).permute(3, 2, 1, 0),
    "sliced": lambda: torch.randn(2, 16, 8, 8)[:, ::2],
    "expanded": lambda: torch.randn(1, 8, 8, 8).expand(2, 8, 8, 8),
    "one pixel": lambda: torch.randn(8, 2).t()[:, :, None, None].expand(2, 8, 1, 1),
}

_CONV, _NORM = torch.nn.Conv2d(8, 4, 1), torch.nn.BatchNorm2d(8).eval()

FUNCTIONS: dict[str, Callable[[torch.Tensor], object]] = {
    "roll": lambda x: (x.roll(1, 1), x.roll((1, 1), (1, 3)), x.flip(1)),
    "cat, stack": lambda x: (torch.cat([x, x * 2], 1), torch.stack([x, x]), x.repeat(1, 2, 1, 1)),
    "convolution": lambda x: (_CONV(x), F.conv_transpose2d(x, _CONV.weight.transpose(0, 1).contiguous())),
    "normalization": lambda x: (_NORM(x), F.group_norm(x, 2), F.layer_norm(x, x.shape[1:])),
    "pooling": lambda x: (F.adaptive_avg_pool2d(x, 1), F.max_pool2d(x, 3, 1, 1), F.avg_pool2d(x, 1)),
    "shuffle": lambda x: (F.pixel_shuffle(x, 2), F.channel_shuffle(x, 2), F.pad(x, (1, 1))),
    "decomposed": lambda x: (x.nan_to_num(), F.normalize(x, dim=1), F.local_response_norm(x, 3), F.hardswish(x)),
    "elementwise": lambda x: (
        x + 1,
        x.relu(),
        x.div(2, rounding_mode="floor"),
        2**x,
        torch.xlogy(x, x.abs()),
        x.lerp(x * 2, 0.3),
        -x,
    ),
    "reductions": lambda x: (x.sum(1, keepdim=True), x.softmax(1), x.amax((2, 3), keepdim=True), x.cumsum(1)),
    "copies": lambda x: (x.clone(), torch.zeros_like(x), x.to(torch.float64), x.contiguous(), x * torch.ones(8, 1, 1)),
    "views": lambda x: ((x + 1).flatten(2).transpose(1, 2), x.movedim(1, -1) * 2, (x * 2).reshape(-1)),
}


def all_strides(results: object) -> list[tuple[int, ...]]:
    """All strides, including those of dimensions of size one."""
    leaves = torch.utils._pytree.tree_leaves(results)
    return [leaf.stride() for leaf in leaves if isinstance(leaf, torch.Tensor)]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_are_those_of_eager(layout: str, dynamic: bool) -> None:
    def function(x: torch.Tensor) -> dict[str, object]:
        return {name: function(x) for name, function in FUNCTIONS.items()}

    x = LAYOUTS[layout]()
    with torch.no_grad():
        expected = {name: all_strides(results) for name, results in function(x).items()}
        results = compiled(function, dynamic=dynamic, options={"fallback": "pytorch"})(x)
        assert {name: all_strides(leaves) for name, leaves in results.items()} == expected


@pytest.mark.parametrize("dynamic", [False, True])
def test_strides_of_one_channel(dynamic: bool) -> None:
    """Channels last and row-major differ by a stride that addresses nothing."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.clone(), x.roll(1, 2), F.avg_pool2d(x, 1), F.pad(x, (1, 1)), x.nan_to_num(), torch.where(x > 0, x, 1)

    for x in (torch.randn(2, 1, 8, 8), torch.randn(2, 1, 8, 8).to(memory_format=torch.channels_last)):
        torch._dynamo.reset()
        assert all_strides(compiled(function, dynamic=dynamic)(x)) == all_strides(function(x))


def test_strides_of_nothing() -> None:
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x[:, :0]
        return (x + 1)[:, :0], x.diff(dim=1), y + 1, (x + 1)[:0].exp(), y @ y.mT, torch.cat([y, y], 1), y > 0

    x = torch.randn(1, 1, 4, 5)
    for dynamic in (False, True):
        torch._dynamo.reset()
        assert all_strides(compiled(function, dynamic=dynamic)(x)) == all_strides(function(x))
    x = torch.randn(1, 4, 5, 1).permute(0, 3, 1, 2)
    assert all_strides(compiled(function, dynamic=False)(x)) == all_strides(function(x))


@pytest.mark.parametrize("layout", ["channels last", "a view that could be either", "batch last", "expanded"])
def test_strides_of_a_graph_that_is_trained(layout: str) -> None:
    for name in ("convolution", "roll", "elementwise", "shuffle"):
        torch._dynamo.reset()
        assert_same_as_eager(FUNCTIONS[name], LAYOUTS[layout]().detach().requires_grad_())


def test_strides_of_gradients_in_dimensions_of_size_one() -> None:
    for sizes, strides in (((2, 1, 4, 6), (6, 1, 12, 1)), ((2, 1, 8, 8), (64, 1, 8, 1))):
        torch._dynamo.reset()
        x = torch.empty_strided(sizes, strides).normal_().requires_grad_()
        compiled(lambda x: x * 2)(x).backward(torch.ones(sizes))
        assert x.grad is not None and x.grad.stride() == strides


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_view_of_a_result_is_possible_where_it_is_in_eager(dynamic: bool) -> None:
    """Neither the compiled graph's own view, which would share memory that eager's does not, nor the user's raises."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rolled = x.permute(0, 3, 1, 2).roll(1, 2)
        return rolled, rolled.reshape(-1)

    x = torch.randn(2, 8, 6, 4)
    results = compiled(function, dynamic=dynamic)(x)
    assert all_strides(results) == all_strides(function(x))
    results[0].permute(0, 2, 3, 1).view(-1)
    torch.testing.assert_close(results, function(x))
    assert_on_onnx()


def test_the_compiler_for_aot_autograd_returns_eagers_strides() -> None:
    function = FUNCTIONS["roll"]
    x = LAYOUTS["one image, channels last"]()
    for tables in ({}, {"decompositions": dynamo_backends.decomposition_table()}):
        torch._dynamo.reset()
        backend = aot_autograd(fw_compiler=dynamo_backends.onnx_compiler(cache=False), **tables)
        assert all_strides(torch.compile(function, backend=backend)(x)) == all_strides(function(x))


def test_the_kernel_is_asked_once_and_draws_no_random_numbers() -> None:
    x = LAYOUTS["channels last"]()
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    strides_of_kernel(torch.ops.aten.bernoulli.p, (x, 0.5), {})
    function = compiled(lambda x: x.roll(1, 1))
    function(x)
    asked = counted("strides_probed")
    assert torch.equal(torch.rand(3), expected)
    torch._dynamo.reset()
    function(x)
    assert counted("strides_probed") == asked


def test_a_kernel_that_cannot_run_leaves_the_fake_tensor_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    mode = FakeTensorMode()
    with mode:
        huge = torch.empty_strided((2**40, 2), (1, 2**40))
    assert strides_of_kernel(torch.ops.aten.flip.default, (huge, [0]), {}) is None
    with fake_tensors_as_kernels(mode):
        assert huge.flip(0).shape == huge.shape
    assert "dispatch" not in vars(mode)


def test_dummy_data_that_cannot_be_made_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeTensorMode():
        x = torch.empty(2, 1, 13)
    made = fake_tensors._zeros

    def fails_first(*args: object) -> object:
        monkeypatch.setattr(fake_tensors, "_zeros", made)
        raise RuntimeError("no memory")

    monkeypatch.setattr(fake_tensors, "_zeros", fails_first)
    assert strides_of_kernel(torch.ops.aten.roll.default, (x, [1]), {}) is None
    assert counted("strides_not_known") == 1


@pytest.fixture
def run() -> Iterator[list[list[int]]]:
    """Defines operators of ATen whose kernels note the integers that they are run on."""
    run: list[list[int]] = []

    def kernel(x: torch.Tensor, integers: torch.Tensor) -> torch.Tensor:
        run.append(integers.tolist())
        return x.clone()

    with torch.library._scoped_library("aten", "FRAGMENT") as library:
        for name in ("indices", "pivots", "other", "workspace"):
            library.define(f"_test_{name}(Tensor self, Tensor {name}) -> Tensor")
            library.impl(f"_test_{name}", kernel, "CPU")
        yield run


@pytest.mark.parametrize(
    ("name", "expected"), [("indices", [0, 0]), ("pivots", [1, 1]), ("other", [0, 0]), ("workspace", None)]
)
def test_a_kernel_is_run_on_valid_integers_only(run: list[list[int]], name: str, expected: list[int] | None) -> None:
    operator = getattr(torch.ops.aten, f"_test_{name}").default
    with FakeTensorMode():
        x, empty, integers = torch.empty(3), torch.empty(0), torch.empty(2, dtype=torch.int64)
    known = strides_of_kernel(operator, (x, integers), {})
    assert run == ([] if expected is None else [expected])
    assert known == (None if expected is None else ((1,),))
    run.clear()
    strides_of_kernel(operator, (empty, integers), {})
    assert bool(run) is (name == "other"), "nothing is an index into an empty tensor"
    run.clear()
    strides_of_kernel(operator, (x, integers), {"generator": torch.Generator()})
    assert not run, "it would draw from the user's generator"


def test_the_workspace_of_a_recurrent_layer_is_not_made_up() -> None:
    operator = torch.ops.aten.mkldnn_rnn_layer_backward.default
    with FakeTensorMode():
        x, h, y = torch.empty(5, 3, 8), torch.empty(3, 16), torch.empty(5, 3, 16)
        weights = torch.empty(64, 8), torch.empty(64, 16), torch.empty(64), torch.empty(64)
        workspace = torch.empty(0, dtype=torch.uint8)
        gradients = (y, None, None, False, 2, 16, 1, True, True, False, [], False, workspace)
        assert strides_of_kernel(operator, (x, *weights, h, h, y, h, h, *gradients), {}) is None


def test_onnx_debug_names_a_result_with_other_strides(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("dynamo_backends.graphs.fake_tensors.may_differ", lambda target: False)
    options = {"dump_dir": tmp_path}
    compiled(lambda x: x.permute(0, 3, 1, 2).roll(1, 2), backend="onnx_debug", options=options)(torch.randn(2, 3, 4, 5))
    torch._dynamo.reset()
    [path] = tmp_path.glob("run_*/manifest.json")
    [graph] = json.loads(path.read_text())["graphs"]
    assert "strides" in graph["verdict"]


def test_a_sample_of_the_list_of_operators_that_agree() -> None:
    names = ["roll"]
    found = strides_sweep.outcomes(strides_sweep.recorded(names)[0], processes=2)
    assert found["aten::roll"].differed, "the list would be of everything"
    assert strides_sweep.wrongly_listed(found) == []
