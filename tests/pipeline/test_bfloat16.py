"""bfloat16 on a provider without kernels for it: computed in float32, rounded after each operator as in eager."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_on_onnx, assert_same_as_eager, compiled, counted
from test_models import without_dropout
from torch import fx, nn
from zoo import ZOO, scalar

from dynamo_backends.pipeline import pass_target
from passes.engine.manager import PassManager

FIRED = "pass post_grad.bfloat16_in_float32"

ROUNDING = {"rtol": 2**-7, "atol": 1e-2}
"""Sums in another order: one or two roundings of values of about 1."""


Function: TypeAlias = "Callable[..., object]"


def beside_a_product(function: Function) -> Function:
    """The function in a graph that also multiplies matrices."""

    def call(x: torch.Tensor, *args: torch.Tensor) -> object:
        return function(x, *args), x.detach()[..., None] @ torch.ones(1, 1, dtype=torch.bfloat16)

    return call


def bf16(*shape: int, requires_grad: bool = False) -> torch.Tensor:
    return torch.randn(*shape).bfloat16().requires_grad_(requires_grad)


def test_a_matrix_product_runs_on_onnx() -> None:
    assert_same_as_eager(lambda x, w: (x @ w).relu(), bf16(4, 8), bf16(8, 3), tolerance=ROUNDING)
    assert_on_onnx()
    assert counted(FIRED) > 0


def test_every_operator_rounds_as_in_eager() -> None:
    """Without the rounding between them 256 + 1 + 1 + 1 would be 259."""
    function = beside_a_product(lambda x: x + 1 + 1 + 1)
    assert_same_as_eager(function, torch.full((3,), 256.0).bfloat16(), tolerance={"rtol": 0, "atol": 0})
    assert counted(FIRED) >= 4
    assert_on_onnx()


def test_a_value_is_cast_once() -> None:
    """x is read by three operators."""

    @beside_a_product
    def function(x: torch.Tensor) -> torch.Tensor:
        return (x + 1) * x - x

    graphs: list[fx.GraphModule] = []
    original = PassManager.run

    def spy(self, stage, graph, **settings):  # type: ignore[no-untyped-def]
        result = original(self, stage, graph, **settings)
        if stage == "post_grad":
            graphs.append(graph)
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PassManager, "run", spy)
        assert_same_as_eager(function, bf16(5))
    (module,) = graphs
    (x,) = module.graph.find_nodes(op="placeholder")
    casts = [user.name for user in x.users if user.target is torch.ops.aten._to_copy.default]
    assert casts == [f"{x.name}_in_float32"]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("number", [0.1, 0.3, 1001, 3])
@pytest.mark.parametrize("name", ["gt", "ge", "lt", "le", "eq", "ne"])
def test_numbers_are_rounded_before_they_are_compared(name: str, number: float) -> None:
    """Eager rounds the number: the bfloat16 next to 0.1 is not greater than 0.1."""
    x = torch.tensor([number, number * 1.01, number * 0.99, -number, float("nan"), float("inf")]).bfloat16()
    assert_same_as_eager(beside_a_product(lambda x: getattr(torch, name)(x, number)), x)


def test_numbers_that_an_operator_jumps_at() -> None:
    x = torch.tensor([0.1, -0.1, 0.3, 1.7, 5.0]).bfloat16()
    function = beside_a_product(lambda x: (F.threshold(x, 0.1, 7.0), F.hardshrink(x, 0.3), torch.fmod(x, 0.1)))
    assert_same_as_eager(function, x)


def test_operators_that_see_the_dtype_are_left_alone() -> None:
    x = torch.tensor([float("inf"), 1.0, float("nan"), 3e38]).bfloat16()
    function = beside_a_product(lambda x, y: (torch.nextafter(x, y), x.view(torch.int16) + 1))
    assert_same_as_eager(function, x, x.flip(0))
    assert counted("nodes_in_pytorch") > 0
    assert_same_as_eager(beside_a_product(torch.nan_to_num), x)


def test_several_results_and_mixed_dtypes() -> None:
    """Layer norm's mean is bfloat16 if its weight is, else float32: then it is decomposed into one of float32."""
    for dtype in (torch.bfloat16, torch.float32):
        norm = nn.LayerNorm(16).to(dtype)
        assert_same_as_eager(beside_a_product(norm), bf16(4, 16, requires_grad=True), tolerance=ROUNDING)
    assert counted("fallback aten.native_layer_norm.default") == 0
    assert_same_as_eager(beside_a_product(lambda x: x.max(1)), bf16(4, 16))
    assert counted("runtime_failures") == 0
    assert_on_onnx()


def test_dtype_arguments_and_lists() -> None:
    @beside_a_product
    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            torch.cat([x, y]) * 2,
            torch.stack([x, y]).sum(0),
            x.float().sum(dtype=torch.bfloat16),
            torch.softmax(x, -1, dtype=torch.float32).to(torch.bfloat16),
            torch.full((3,), 1.5, dtype=torch.bfloat16) * x[0, :3],
            (x > y, torch.where(x > 0, x, y)),
        )

    assert_same_as_eager(function, bf16(4, 6), bf16(4, 6), tolerance=ROUNDING)
    assert_on_onnx()


def test_returned_views_stay_views() -> None:
    @beside_a_product
    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x + 1
        return y, y.t(), y[1:], x.t(), (y * 2).view(-1)

    assert_same_as_eager(function, bf16(4, 6))
    assert_same_as_eager(function, bf16(4, 6, requires_grad=True))


def test_an_argument_changed_in_place() -> None:
    @beside_a_product
    def function(x: torch.Tensor) -> torch.Tensor:
        x.mul_(1.5)
        return x.exp()

    assert_same_as_eager(function, bf16(4), calls=2, tolerance=ROUNDING)
    assert counted(FIRED) > 0


def test_dynamic_shapes() -> None:
    function = compiled(lambda x, w: (x @ w).softmax(-1), dynamic=True)
    for rows in (3, 5, 8):
        x, w = bf16(rows, 4), bf16(4, 6)
        torch.testing.assert_close(function(x, w), (x @ w).softmax(-1), **ROUNDING)
    assert_on_onnx()


def test_random_operators_draw_what_eager_draws() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x @ x, 0.3) + torch.randn_like(x) * torch.rand_like(x)

    assert_same_as_eager(function, bf16(8, 8, requires_grad=True), tolerance={"rtol": 2**-6, "atol": 0.1})


def test_float32_models_are_not_touched() -> None:
    assert_same_as_eager(nn.Linear(4, 4), torch.randn(2, 4, requires_grad=True))
    assert counted(FIRED) == 0


def model_and_inputs(name: str, full: bool) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model, inputs = ZOO[name].build(), ZOO[name].inputs()
    if full:
        model = model.bfloat16()
        inputs = {key: item.bfloat16() if item.is_floating_point() else item for key, item in inputs.items()}
    return model, inputs


def autocast(full: bool) -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16, enabled=not full)


def error(actual: torch.Tensor, exact: torch.Tensor) -> float:
    return float((actual.double() - exact).abs().max())


def assert_as_exact(actual: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor, what: str) -> None:
    """Asserts that the error against float64 is at most a few times eager's: both are sums of many roundings."""
    scale = float(exact.abs().max())
    assert actual.dtype == eager.dtype
    assert error(actual, exact) <= 4 * error(eager, exact) + 2**-7 * scale, what


@pytest.mark.parametrize("full", [True, False], ids=["full", "autocast"])
@pytest.mark.parametrize("name", ["bert", "llama"])
def test_inference_of_models(name: str, full: bool) -> None:
    model, inputs = model_and_inputs(name, full)
    model.eval()
    exact_model = copy.deepcopy(model).double()
    exact_inputs = {key: item.double() if item.is_floating_point() else item for key, item in inputs.items()}
    with torch.no_grad():
        exact = exact_model(**exact_inputs).logits
        with autocast(full):
            eager = model(**inputs).logits
            actual = compiled(model)(**inputs).logits
    assert_as_exact(actual, eager, exact, "logits")
    assert_on_onnx()
    assert counted("regions") == 1


@pytest.mark.parametrize("full", [True, False], ids=["full", "autocast"])
@pytest.mark.parametrize("name", ["llama", "vit"])
def test_training_step_of_models(name: str, full: bool) -> None:
    model, inputs = model_and_inputs(name, full)
    without_dropout(model)
    exact_model, compiled_model = copy.deepcopy(model).double(), copy.deepcopy(model)
    exact_inputs = {key: item.double() if item.is_floating_point() else item for key, item in inputs.items()}
    scalar(exact_model(**exact_inputs)).backward()
    for run, owner in ((model, model), (compiled(compiled_model), compiled_model)):
        with autocast(full):
            loss = scalar(run(**inputs))  # type: ignore[operator]
        loss.backward()
        assert owner is not None
    exact = dict(exact_model.named_parameters())
    eager = dict(model.named_parameters())
    for path, parameter in compiled_model.named_parameters():
        if eager[path].grad is not None:
            assert_as_exact(parameter.grad, eager[path].grad, exact[path].grad, path)  # type: ignore[arg-type]
    assert_on_onnx()


@pytest.mark.parametrize("full", [True, False], ids=["full", "autocast"])
def test_the_debug_backend_finds_no_fault(full: bool, tmp_path: Path) -> None:
    model, inputs = model_and_inputs("llama", full)
    model.eval()
    with torch.no_grad(), autocast(full):
        torch.compile(model, backend="onnx_debug", options={"dump_dir": str(tmp_path)})(**inputs)
    manifest = json.loads((tmp_path / "latest" / "manifest.json").read_text())
    (graph,) = manifest["graphs"]
    assert graph["verdict"] == "ok", graph["verdict"]


@pytest.mark.parametrize("full", [True, False], ids=["full", "autocast"])
def test_the_debug_backend_finds_no_fault_in_training(full: bool, tmp_path: Path) -> None:
    model, inputs = model_and_inputs("vit", full)
    without_dropout(model)
    with autocast(full):
        loss = scalar(torch.compile(model, backend="onnx_debug", options={"dump_dir": str(tmp_path)})(**inputs))
    loss.backward()
    manifest = json.loads((tmp_path / "latest" / "manifest.json").read_text())
    assert {graph["direction"]: graph["verdict"] for graph in manifest["graphs"]} == {"forward": "ok", "backward": "ok"}


def test_it_can_be_turned_off() -> None:
    settings = {"options": {"passes": {"disable": ["post_grad.bfloat16_in_float32"]}}}
    assert_same_as_eager(lambda x, w: x @ w, bf16(4, 8), bf16(8, 3), settings=settings)
    assert counted(FIRED) == 0
    assert counted("fallback aten.mm.default") == 1


def test_pytorch_keeps_what_it_is_faster_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph without products, as of an optimizer's step; and all of bfloat16 on a processor with units for it."""
    assert_same_as_eager(lambda x: (x * 2).exp() + 1, bf16(4, 8))
    assert counted(FIRED) == 0
    monkeypatch.setattr(pass_target, "has_units_for_bfloat16", lambda: True)
    assert_same_as_eager(lambda x, w: (x @ w).relu(), bf16(4, 8), bf16(8, 3), tolerance={"rtol": 0, "atol": 0})
    assert counted(FIRED) == 0
