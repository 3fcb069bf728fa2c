"""``options={"verify_passes": True}``: a pass that changes the results is undone, and named with node and error."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import onnx_ir as ir
import pytest
import torch
from conftest import assert_same_as_eager, compiled, counted
from torch import fx
from torch.utils.checkpoint import checkpoint

from dynamo_backends.debug.dump_folder import latest_run
from passes import PassContext, register_pass, unregister

aten = torch.ops.aten
VERIFY = {"options": {"verify_passes": True}}


@pytest.fixture
def plant() -> Iterator[Callable[..., None]]:
    """Registers a pass for the length of a test."""
    names: list[str] = []

    def register(name: str, function: Callable[..., int]) -> None:
        names.append(name)
        register_pass(name, "Planted by a test.")(function)

    yield register
    for name in names:
        unregister(name)


def sine_becomes_cosine(module: fx.GraphModule, context: PassContext) -> int:
    fired = 0
    for node in module.graph.nodes:
        if node.target in (torch.sin, aten.sin.default) and context.allows(node):
            node.target = {torch.sin: torch.cos, aten.sin.default: aten.cos.default}[node.target]
            fired += 1
    module.recompile()
    return fired


def sine_becomes_cosine_in_onnx(model: ir.Model, context: PassContext) -> int:
    fired = 0
    for node in model.graph:
        if node.op_type == "Sin" and context.allows(node):
            node.op_type = "Cos"
            fired += 1
    return fired


def double_negation(module: fx.GraphModule, context: PassContext) -> int:
    """Right: x becomes -(-x), another graph with the same results."""
    fired = 0
    for node in module.graph.find_nodes(op="call_function", target=aten.sin.default):
        with module.graph.inserting_after(node):
            inner = module.graph.call_function(aten.neg.default, (node,))
            inner.meta.update(node.meta)
        with module.graph.inserting_after(inner):
            outer = module.graph.call_function(aten.neg.default, (inner,))
            outer.meta.update(node.meta)
        node.replace_all_uses_with(outer, delete_user_cb=lambda user, inner=inner: user is not inner)
        fired += 1
    module.recompile()
    return fired


class Wave(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(self.linear(x).relu()) * 2 + 1


PLANTED = {
    "pre_grad": sine_becomes_cosine,
    "joint": sine_becomes_cosine,
    "post_grad": sine_becomes_cosine,
    "onnx": sine_becomes_cosine_in_onnx,
}


@pytest.mark.parametrize("stage", PLANTED)
def test_a_bad_pass_changes_the_result_without_the_check(stage: str, plant: Callable[..., None]) -> None:
    plant(f"{stage}.bad", PLANTED[stage])
    wave, x = Wave().eval(), torch.randn(3, 8)
    with torch.no_grad():
        assert not torch.allclose(compiled(wave)(x), wave(x))


@pytest.mark.parametrize("stage", PLANTED)
@pytest.mark.parametrize("trains", [False, True])
def test_a_bad_pass_is_undone(
    stage: str, trains: bool, plant: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    plant(f"{stage}.bad", PLANTED[stage])
    with caplog.at_level(logging.WARNING), torch.set_grad_enabled(trains):
        assert_same_as_eager(Wave().train(trains), torch.randn(3, 8), settings=VERIFY)
    assert counted(f"undone pass {stage}.bad") == 1
    assert counted(f"pass {stage}.bad") == 0
    (said,) = [record.getMessage() for record in caplog.records if record.name == "passes.engine.manager"]
    assert f"pass {stage}.bad" in said
    assert "sin" in said and "test_verify_passes.py" in said, "it names the node and its line"
    assert "off float64 by" in said


def test_a_right_pass_stays(plant: Callable[..., None]) -> None:
    plant("post_grad.negate_twice", double_negation)
    assert_same_as_eager(Wave(), torch.randn(3, 8), settings=VERIFY)
    assert counted("pass post_grad.negate_twice") == 1
    assert counted("undone pass post_grad.negate_twice") == 0


def test_a_pass_that_breaks_the_graph_is_undone(plant: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    def swap_arguments(module: fx.GraphModule, context: PassContext) -> int:
        (node,) = module.graph.find_nodes(op="call_function", target=aten.mm.default)
        node.args = (node.args[1], node.args[0])
        module.recompile()
        return 1

    plant("post_grad.bad", swap_arguments)
    with torch.no_grad():
        assert_same_as_eager(torch.mm, torch.randn(2, 3), torch.randn(3, 4), settings=VERIFY)
    assert "mm cannot be computed any more" in caplog.text, "before anything is run"


def test_a_change_of_dtype_is_a_change(plant: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    def narrow(module: fx.GraphModule, context: PassContext) -> int:
        (result,) = module.graph.output_node().all_input_nodes
        with module.graph.inserting_after(result):
            half = module.graph.call_function(aten._to_copy.default, (result,), {"dtype": torch.float16})
            half.meta["val"] = result.meta["val"].to(torch.float16)
        result.replace_all_uses_with(half, delete_user_cb=lambda user: user is not half)
        module.recompile()
        return 1

    plant("post_grad.narrow", narrow)
    with torch.no_grad():
        assert_same_as_eager(torch.exp, torch.randn(3), settings=VERIFY)
    assert "is float16 [3], it was float32 [3]" in caplog.text, "before anything is run"


def test_gradients_alone_may_be_wrong(plant: Callable[..., None]) -> None:
    """The joint graph's results are the forward's and the gradients; a fault in the gradients is found too."""

    def forget_a_factor(module: fx.GraphModule, context: PassContext) -> int:
        for node in module.graph.find_nodes(op="call_function", target=aten.cos.default):  # the derivative of sin
            node.replace_all_uses_with(node.args[0])
            module.graph.erase_node(node)
        module.recompile()
        return 1

    plant("joint.bad", forget_a_factor)
    assert_same_as_eager(lambda x: torch.sin(x), torch.randn(5, requires_grad=True), settings=VERIFY)
    assert counted("undone pass joint.bad") == 1


def test_random_numbers_and_state_are_not_disturbed() -> None:
    def noisy(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        count += 1
        return torch.nn.functional.dropout(torch.relu(x), 0.3) + torch.rand_like(x)

    assert_same_as_eager(noisy, torch.randn(64), torch.tensor(0), calls=2, settings=VERIFY)


def test_dynamic_shapes_and_several_calls() -> None:
    function = compiled(lambda x: (x @ x.T).softmax(-1).detach() * 2, dynamic=True, **VERIFY)
    for size in (3, 5):
        x = torch.randn(size, 4)
        torch.testing.assert_close(function(x), (x @ x.T).softmax(-1) * 2)


def test_checkpointing() -> None:
    wave = Wave()
    assert_same_as_eager(lambda x: checkpoint(wave, x, use_reentrant=False), torch.randn(3, 8), settings=VERIFY)


def test_the_manifest_and_the_diff_say_what_was_undone(plant: Callable[..., None], tmp_path: Path) -> None:
    plant("post_grad.bad", sine_becomes_cosine)
    options = {"verify_passes": True, "dump_dir": str(tmp_path)}
    with torch.no_grad():
        torch.compile(Wave(), backend="onnx_debug", options=options)(torch.randn(3, 8))
    run = latest_run(tmp_path)
    manifest = json.loads((run / "manifest.json").read_text())
    (graph,) = manifest["graphs"]
    assert graph["verdict"] == "ok"
    (undone,) = [result["undone"] for result in graph["passes"] if result["name"] == "post_grad.bad"]
    assert undone.startswith("sin (") and "off float64 by" in undone
    (file,) = run.glob("graph_*/inference/passes/post_grad.bad.diff")
    diff = file.read_text()
    assert "undone: sin (" in diff and "-        sin" in diff
