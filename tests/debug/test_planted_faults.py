"""A fault planted in each stage: the verdict of ``onnx_debug`` names the pass, the node and its line."""

from __future__ import annotations

import functools
import json
import operator
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
import zoo
from conftest import assert_same_as_eager, compiled, counted
from onnxscript import opset18 as op
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd

from dynamo_backends import onnx_compiler
from dynamo_backends.bench.models import MODELS as OF_BENCH
from dynamo_backends.debug import call_runs, manifest, node_comparison, session_values
from dynamo_backends.debug.session_values import SessionValues
from dynamo_backends.dumps.reading import find_run, read_run
from dynamo_backends.errors import SessionError
from dynamo_backends.exporter import decompositions
from dynamo_backends.exporter.converters import CONVERTERS
from dynamo_backends.graphs.locations import short_file
from dynamo_backends.weights import changes
from passes import Pass, PassContext

aten = torch.ops.aten


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.silu(self.up(x)))  # silu of the perceptron


class Convolutional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.silu(self.norm(self.first(x)))  # silu of the convolutional network
        return self.second(y).mean((2, 3))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, activation=F.gelu, batch_first=True, dropout=0.0)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.encoder(x)
        return self.head(F.silu(y))  # silu of the transformer


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "perceptron": (Perceptron, (5, 8)),
    "convolutional network": (Convolutional, (2, 3, 10, 10)),
    "transformer": (Transformer, (2, 6, 16)),
}


def line_of(text: str) -> str:
    lines = Path(__file__).read_text().splitlines()
    return f"{short_file(__file__)}:{1 + next(i for i, line in enumerate(lines) if text in line)}"


def verdicts(
    model: nn.Module, shape: tuple[int, ...], mode: str, dump: Path, dtype: torch.dtype = torch.float32
) -> dict[str, str]:
    """By direction, the verdicts of one compared run."""
    torch.manual_seed(0)
    model, x = model.to(dtype), torch.randn(*shape).to(dtype)
    function = compiled(model, backend="onnx_debug", dynamic=mode == "dynamic", options={"dump_dir": str(dump)})
    if mode == "training":
        function(x).square().sum().backward()
    else:
        with torch.no_grad():
            function(x)
    graphs = json.loads((dump / "latest" / "manifest.json").read_text())["graphs"]
    for graph in graphs:
        if graph["verdict"].startswith("diverges"):
            # the faults are of one percent, and no smaller error is shown beside them
            worst = graph["worst"] and graph["worst"]["onnx"]
            has_size = "instead of" not in f"{graph['verdict']} {graph['note']}"
            assert worst["max_abs"] > 1e-3 * worst["scale"] if has_size else worst is None, graph
    return {graph["direction"]: graph["verdict"] for graph in graphs}


def scale(stage: str) -> Callable[[fx.GraphModule, PassContext], int]:
    """A pass that makes SiLU 1 % too large."""
    targets = {F.silu} if stage == "pre_grad" else {aten.silu.default}
    multiply: Callable[..., object] = torch.mul if stage == "pre_grad" else aten.mul.Tensor

    def run(module: fx.GraphModule, context: PassContext) -> int:
        fired = 0
        for node in list(module.graph.nodes):
            if node.op == "call_function" and node.target in targets:
                with module.graph.inserting_after(node):
                    scaled = module.graph.call_function(multiply, (node, 1.01))
                scaled.meta.update({key: node.meta[key] for key in ("val", "example_value") if key in node.meta})
                node.replace_all_uses_with(scaled, lambda user, new=scaled: user is not new)
                fired += 1
        module.recompile()
        return fired

    return run


def scale_onnx(model: ir.Model, context: PassContext, name: str = "silu") -> int:
    """The same in the ONNX model; the value keeps its name."""
    fired = 0
    for node in list(model.graph):
        if any(value.name == name for value in node.outputs):
            value = node.outputs[0]
            factor = ir.node("Constant", [], {"value": ir.tensor(np.float32(1.01))})
            scaled = ir.node("Mul", [value, factor.outputs[0]])
            for user, index in list(value.uses()):
                if user is not scaled:
                    user.replace_input_with(index, scaled.outputs[0])
            value.name, scaled.outputs[0].name = "before_scaling", name
            model.graph.insert_after(node, [factor, scaled])
            model.graph.outputs[:] = [scaled.outputs[0] if item is value else item for item in model.graph.outputs]
            fired += 1
    return fired


@pytest.mark.sampled(6)
@pytest.mark.parametrize("mode", ["inference", "training", "dynamic"])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("stage", ["pre_grad", "joint", "post_grad", "onnx"])
def test_a_wrong_pass(stage: str, name: str, mode: str, planted: Callable[[Pass], None], tmp_path: Path) -> None:
    run = scale_onnx if stage == "onnx" else scale(stage)
    planted(Pass(f"{stage}.wrong", "Planted by a test.", run))  # type: ignore[arg-type]
    make, shape = MODELS[name]
    found = verdicts(make(), shape, mode, tmp_path)
    direction = "forward" if mode == "training" else "inference"
    assert found[direction].startswith("diverges at "), found
    assert f"pass {stage}.wrong" in found[direction]
    assert line_of(f"silu of the {name}") in found[direction]


def test_a_wrong_pass_that_is_needed(planted: Callable[[Pass], None], tmp_path: Path) -> None:
    """All models that the debugger runs go through it, and eager's values tell."""
    planted(Pass("onnx.wrong", "Planted by a test.", scale_onnx, is_needed=True))  # type: ignore[arg-type]
    make, shape = MODELS["perceptron"]
    verdict = verdicts(make(), shape, "inference", tmp_path)["inference"]
    assert "pass onnx.wrong" in verdict and line_of("silu of the perceptron") in verdict
    torch._dynamo.reset()
    assert_same_as_eager(make(), torch.randn(*shape), settings={"options": {"verify_passes": True, "cache": False}})
    assert counted("internal_failures") > 0


@pytest.mark.parametrize("is_spoiled", [False, True])
def test_a_needed_pass_that_fails(is_spoiled: bool, planted: Callable[[Pass], None]) -> None:
    """It cannot be left out: PyTorch runs the graph."""

    def fails(model: ir.Model, context: PassContext) -> int:
        if not is_spoiled:
            raise KeyError("planted")
        model.graph[0].outputs[0].name = "another"
        model.graph.outputs.clear()
        return 1

    planted(Pass("onnx.fails", "Planted by a test.", fails, is_needed=True))  # type: ignore[arg-type]
    make, shape = MODELS["perceptron"]
    with torch.no_grad():
        assert_same_as_eager(make(), torch.randn(*shape))
    assert counted("internal_failures") == 1 and counted("nodes_on_onnx") == 0


@pytest.mark.sampled(6)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("stage", ["pre_grad", "joint", "post_grad"])
def test_a_wrong_pass_in_half_precision(
    stage: str, name: str, dtype: torch.dtype, planted: Callable[[Pass], None], tmp_path: Path
) -> None:
    """One percent is less than eager's own rounding of bfloat16: there float64 before the pass and after it decide."""
    planted(Pass(f"{stage}.wrong", "Planted by a test.", scale(stage)))  # type: ignore[arg-type]
    make, shape = MODELS[name]
    found = verdicts(make(), shape, "inference" if name == "transformer" else "training", tmp_path, dtype)
    verdict = next(iter(found.values()))
    assert verdict.startswith("diverges at ") and f"pass {stage}.wrong" in verdict, found


class Counting(torch.autograd.Function):
    """Adds up something of the gradients in a buffer."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.seen = seen
        return x.sinh()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.seen.add_(F.silu(gradient).sum(0))  # silu of the gradient
        return gradient * ctx.saved_tensors[0].cosh(), None


class Hiding(Perceptron):
    """Hides a wrong SiLU from one way of comparing; ``how`` says by what."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.register_buffer("seen", torch.zeros(16))
        self.register_buffer("table", torch.randn(2, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "buffer":
            return self.down(Counting.apply(self.up(x), self.seen))
        if self.how == "checkpoint":
            dropped = lambda x: F.dropout(F.silu(self.up(x)), 0.3)  # noqa: E731
            return self.down(torch.utils.checkpoint.checkpoint(dropped, x, use_reentrant=False))
        if self.how == "index":  # 0.3 + 0.7 is more than 1 in float64
            rows = (torch.ceil((x[:, 0] * 0 + 0.3 + 0.7) * 2) - 1).long()
            return F.silu(self.table[rows])
        y = F.silu(self.up(x))
        return torch.cat([y, torch.full_like(y, torch.finfo(x.dtype).min)], 1) if self.how == "large" else self.down(y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stage", ["joint", "post_grad"])
@pytest.mark.parametrize("how", ["large", "index", "buffer", "checkpoint"])
def test_a_wrong_pass_is_not_hidden(
    how: str, stage: str, dtype: torch.dtype, planted: Callable[[Pass], None], tmp_path: Path
) -> None:
    """By a large number beside it, an index that float64 does not have, as it changes a buffer in the backward, and
    where results have no names."""
    planted(Pass(f"{stage}.wrong", "Planted by a test.", scale(stage)))  # type: ignore[arg-type]
    mode = "training" if how in ("buffer", "checkpoint") else "inference"
    with torch.random.fork_rng(devices=[]):
        found = verdicts(Hiding(how), (5, 8), mode, tmp_path, dtype)
    verdict = found["backward" if how == "buffer" else "forward" if mode == "training" else "inference"]
    assert f"pass {stage}.wrong" in verdict, found


@pytest.mark.parametrize("stage", ["pre_grad", "joint", "post_grad"])
def test_a_pass_that_lowers_the_precision(stage: str, planted: Callable[[Pass], None], tmp_path: Path) -> None:
    """Float64 has no casts."""

    def lower(module: fx.GraphModule, context: PassContext) -> int:
        (node,) = (node for node in module.graph.nodes if node.target in (F.silu, aten.silu.default))
        cast: Callable[..., object] = torch.Tensor.to if stage == "pre_grad" else aten._to_copy.default
        with module.graph.inserting_before(node.next):
            lowered = module.graph.call_function(cast, (node,), {"dtype": torch.bfloat16})
            raised = module.graph.call_function(cast, (lowered,), {"dtype": torch.float32})
        node.replace_all_uses_with(raised, lambda user: user is not lowered)
        return 1

    planted(Pass(f"{stage}.wrong", "Planted by a test.", lower))
    assert f"pass {stage}.wrong" in verdicts(Perceptron(), (5, 8), "inference", tmp_path)["inference"]


def test_what_each_run_makes_anew_is_not_compared(planted: Callable[[Pass], None], tmp_path: Path) -> None:
    """The context of autocast, where a right pass rounds a number otherwise."""

    def almost(module: fx.GraphModule, context: PassContext) -> int:
        (node,) = (node for node in module.graph.nodes if node.target is F.silu)
        with module.graph.inserting_before(node.next):
            scaled = module.graph.call_function(torch.mul, (node, 1 + 2**-26))
        node.replace_all_uses_with(scaled, lambda user: user is not scaled)
        return 1

    class Mixed(Perceptron):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(x)

    planted(Pass("pre_grad.almost", "Planted by a test.", almost))
    assert verdicts(Mixed(), (5, 8), "inference", tmp_path)["inference"] == "ok"


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_a_wrong_joint_pass_under_aot_autograd(mode: str, planted: Callable[[Pass], None], tmp_path: Path) -> None:
    """Without Dynamo's graph, the one that AOTAutograd hands over is the reference."""
    planted(Pass("joint.wrong", "Planted by a test.", scale("joint")))  # type: ignore[arg-type]
    compiler = onnx_compiler(debug=True, dump_dir=str(tmp_path))
    backend = aot_autograd(
        fw_compiler=compiler, partition_fn=compiler.partition_fn, decompositions=decompositions.decomposition_table()
    )
    with torch.set_grad_enabled(mode == "training"):
        torch.compile(Perceptron(), backend=backend)(torch.randn(5, 8))
    (graph,) = json.loads((tmp_path / "latest" / "manifest.json").read_text())["graphs"]
    assert graph["verdict"].startswith("diverges at ") and "pass joint.wrong" in graph["verdict"]
    assert line_of("silu of the perceptron") in graph["verdict"]


def test_a_wrong_gradient_of_a_pass(planted: Callable[[Pass], None], tmp_path: Path) -> None:
    """The results are right; only what flows back is not."""

    def detach(module: fx.GraphModule, context: PassContext) -> int:
        (node,) = module.graph.find_nodes(op="call_function", target=F.silu)
        with module.graph.inserting_before(node.next):
            detached = module.graph.call_method("detach", (node,))
            half = module.graph.call_function(torch.mul, (node, 0.5))
            rest = module.graph.call_function(torch.mul, (detached, 0.5))
            total = module.graph.call_function(torch.add, (half, rest))
        node.replace_all_uses_with(total, lambda user: user not in (detached, half))
        module.recompile()
        context.matches.append(node.name)
        return 1

    planted(Pass("pre_grad.wrong", "Planted by a test.", detach))
    found = verdicts(Perceptron(), (5, 8), "training", tmp_path)
    assert found["forward"] == "ok"
    assert found["backward"].startswith("diverges at ") and "pass pre_grad.wrong" in found["backward"]
    assert line_of("silu of the perceptron") in found["backward"]


@pytest.mark.parametrize("stage", ["pre_grad", "joint", "post_grad"])
def test_a_pass_that_changes_a_number(stage: str, planted: Callable[[Pass], None], tmp_path: Path) -> None:
    """A size that the graph returns; the tensors are right."""

    def one_more(module: fx.GraphModule, context: PassContext) -> int:
        nodes = list(module.graph.find_nodes(op="call_function", target=operator.add))
        for node in nodes:
            node.args = (node.args[0], 8)
        return len(nodes)

    def function(x: torch.Tensor) -> tuple[torch.Tensor, int]:
        return x.sin(), x.shape[0] + 7  # a size that is returned

    planted(Pass(f"{stage}.wrong", "Planted by a test.", one_more))
    options = {"dump_dir": str(tmp_path)}
    with torch.no_grad():
        compiled(function, backend="onnx_debug", dynamic=True, options=options)(torch.randn(3, 4))
    (graph,) = json.loads((tmp_path / "latest" / "manifest.json").read_text())["graphs"]
    assert graph["blame"]["source"] == line_of("a size that is") and graph["sizes"] == {"x": [3, 4]}
    assert (graph["blame"]["kind"], graph["blame"]["name"]) == ("pass", f"{stage}.wrong")
    assert graph["note"] == "11 instead of 10"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_a_wrong_decomposition(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of a forward operator in inference, of a backward operator in training."""

    def wrong_silu(x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(x) * 1.01

    def wrong_silu_backward(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        sigmoid = torch.sigmoid(x)
        return grad * sigmoid * (1 + x * (1 - sigmoid)) * 1.01

    make, shape = MODELS[name]
    line = line_of(f"silu of the {name}")
    right = decompositions.whole_table
    table = {aten.silu.default: wrong_silu}
    monkeypatch.setattr(decompositions, "whole_table", lambda opset: {**right(opset), **table})
    found = verdicts(make(), shape, "inference", tmp_path / "inference", dtype)
    assert found["inference"].startswith("diverges at ") and line in found["inference"]
    assert "decomposition of aten.silu.default" in found["inference"]
    table = {aten.silu_backward.default: wrong_silu_backward}
    found = verdicts(make(), shape, "training", tmp_path / "training", dtype)
    assert found["forward"] == "ok"
    assert found["backward"].startswith("diverges at ") and line in found["backward"]
    assert "decomposition of aten.silu_backward.default" in found["backward"]


def test_a_wrong_constant_beside_half_precision(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The rounding of one result says nothing about another."""

    def wrong_eye(size: int, **options: object) -> torch.Tensor:
        return 1.03 * (torch.arange(size)[:, None] == torch.arange(size)).float()

    right = decompositions.whole_table
    monkeypatch.setattr(decompositions, "whole_table", lambda opset: {**right(opset), aten.eye.default: wrong_eye})
    options = {"dump_dir": str(tmp_path)}
    with torch.no_grad():
        model = compiled(lambda x: (x.bfloat16().sin(), torch.eye(4) * 2), backend="onnx_debug", options=options)
        model(torch.randn(3, 4))
    (graph,) = json.loads((tmp_path / "latest" / "manifest.json").read_text())["graphs"]
    assert graph["verdict"].startswith("diverges at ") and "error 0.06 " in graph["note"]


class Damped(nn.Module):
    """Twelve equal layers; the end of the model reduces the error of one to the size of rounding."""

    def seventh(self, y: torch.Tensor) -> torch.Tensor:
        return F.silu(y)  # silu in the seventh layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for i in range(12):
            y = torch.tanh(y + 0.1 * i)
            y = self.seventh(y) if i == 6 else F.silu(y)
        return 1.0 + 1e-7 * y


def silu_lines() -> str:
    return line_of("silu in the seventh layer")


@pytest.mark.parametrize("stage", ["pre_grad", "joint", "post_grad", "onnx"])
def test_a_wrong_pass_that_the_model_damps(stage: str, planted: Callable[[Pass], None], tmp_path: Path) -> None:
    """The same operator is right in eleven other places, and the results show nothing."""

    def only_the_seventh(graph: object, context: PassContext) -> int:
        if isinstance(graph, fx.GraphModule):
            nodes = [
                n for n in graph.graph.nodes if n.op == "call_function" and n.target in (F.silu, aten.silu.default)
            ]
            others = [node for i, node in enumerate(nodes) if i != 6]
            targets = [node.target for node in others]
            for node in others:
                node.target = torch.neg  # hidden from the pass
            fired = scale(stage)(graph, context)
            for node, target in zip(others, targets, strict=True):
                node.target = target
            graph.recompile()
            return fired
        assert isinstance(graph, ir.Model)
        for node in graph.graph:
            if any(value.name == "silu_6" for value in node.outputs):
                return scale_onnx(graph, context, "silu_6")
        return 0

    planted(Pass(f"{stage}.wrong", "Planted by a test.", only_the_seventh))
    found = verdicts(Damped(), (4, 8), "inference", tmp_path)
    assert f"pass {stage}.wrong" in found["inference"]
    assert silu_lines() in found["inference"]


def test_a_wrong_operator_that_the_model_damps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its translation is right but for one of twelve calls."""
    calls = 0

    def wrong_once(x: ir.Value) -> object:  # once of twelve
        nonlocal calls
        calls += 1
        result = op.Mul(x, op.Sigmoid(x))
        return op.Mul(result, 1.01) if calls == 8 else result  # the first call asks whether it can be translated

    monkeypatch.setitem(CONVERTERS, aten.silu.default, wrong_once)
    found = verdicts(Damped(), (4, 8), "inference", tmp_path)
    converter = line_of("# once of twelve")
    assert found["inference"] == f"diverges at silu_6 ({silu_lines()}): converter ({converter}) or kernel"


def test_values_that_are_computed_in_parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The values of a large model are not all in memory at once; the tables are the same."""
    monkeypatch.setitem(CONVERTERS, aten.tanh.default, lambda x: op.Mul(op.Tanh(x), op.Constant(value_float=1.01)))

    def function(x: torch.Tensor) -> torch.Tensor:
        largest, where = F.layer_norm(x.exp(), (8,)).tanh().max(1)
        return torch.cat([largest, where * 0.5, x[:, 0].sinh()]).cos()

    tables = []
    for name, size in (("whole", session_values.MOST_BYTES), ("parts", 400)):
        monkeypatch.setattr(session_values, "MOST_BYTES", size)
        debug = compiled(function, backend="onnx_debug", options={"dump_dir": str(tmp_path / name)})
        debug(torch.linspace(-1, 1, 32).reshape(4, 8))
        (table,) = (tmp_path / name / "latest").rglob("side_by_side.json")
        tables.append(json.loads(table.read_text()))
        torch._dynamo.reset()
    assert tables[0] == tables[1] and "tanh" in json.dumps(tables[0])


def test_parts_of_models_that_onnxruntime_changed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A part reads values that ONNX Runtime made and gave no type, and results whose memory is permuted."""
    monkeypatch.setattr(session_values, "MOST_BYTES", 2000)
    options = {"dump_dir": str(tmp_path), "placement": "onnx"}
    model = compiled(OF_BENCH["llama-seed"].build(), backend="onnx_debug", options=options)
    model(**OF_BENCH["llama-seed"].inputs((1, 8)), use_cache=False)[0].square().sum().backward()

    def attention(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        heads = (x @ weight).reshape(2, 4, 2, 4).transpose(1, 2)
        mixed = torch.softmax(heads @ heads.transpose(-1, -2) / 2 + 1, -1) @ heads
        return F.silu(mixed.transpose(1, 2).reshape(2, 4, 8) @ weight).square().sum()

    torch._dynamo.reset()
    arguments = torch.randn(2, 4, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)
    compiled(attention, backend="onnx_debug", options=options)(*arguments).backward()
    assert [graph.verdict for run in tmp_path.glob("run_*") for graph in read_run(run).graphs] == ["ok"] * 4


def test_parts_follow_the_sizes_of_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sizes = []

    def watched(self: SessionValues, args: Sequence[object]) -> Iterator[dict[str, object]]:
        for values in original(self, args):
            sizes.append(sum(value.nbytes for value in values.values() if isinstance(value, torch.Tensor)))
            yield values

    original = SessionValues.parts
    monkeypatch.setattr(SessionValues, "parts", watched)
    monkeypatch.setattr(session_values, "MOST_BYTES", 2**16)
    options = {"dump_dir": str(tmp_path)}
    debug = compiled(lambda x: x.sinh().cos().sin().exp(), backend="onnx_debug", dynamic=True, options=options)
    with torch.no_grad():
        debug(torch.rand(8, 8))
        debug(torch.rand(1024, 8))
    assert len(sizes) == 1 + 2 and max(sizes) == 2**16


@pytest.mark.parametrize("method", ["__init__", "parts"])
def test_a_node_inside_a_region_that_is_rejected(method: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With its values as outputs; the region is judged as a whole, and its nodes alone if it is wrong."""

    def rejected(*args: object) -> None:
        raise SessionError("planted")

    def rejected_later(*args: object) -> Iterator[dict[str, object]]:
        rejected()
        yield {}

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x
        for _ in range(10):  # so that eager's numbers are others than the session's
            y = torch.softmax(y @ x.T @ x, -1).exp()
        return y.sin().sinh().exp().sigmoid()

    monkeypatch.setattr(SessionValues, method, rejected if method == "__init__" else rejected_later)
    x = torch.rand(64, 32)
    with torch.no_grad():
        compiled(function, backend="onnx_debug", options={"dump_dir": str(tmp_path / "right")})(x)
        monkeypatch.setitem(CONVERTERS, aten.sinh.default, lambda x: op.Mul(op.Sinh(x), op.Constant(value_float=1.01)))
        torch._dynamo.reset()
        compiled(function, backend="onnx_debug", options={"dump_dir": str(tmp_path / "wrong")})(x)
    assert only_graph(tmp_path / "right")["verdict"] == "ok"
    assert "planted" in " ".join(only_graph(tmp_path / "right")["unchecked"])
    verdict = only_verdict(tmp_path / "wrong")
    assert verdict.startswith("diverges at sinh ") and "converter" in verdict


def test_a_wrong_symbolic_integer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(CONVERTERS, operator.floordiv, lambda x, divisor: op.Div(x, divisor))  # which truncates
    function = compiled(
        lambda x: x * ((x.shape[0] - 7) // 2),  # the size
        backend="onnx_debug", dynamic=True, options={"dump_dir": str(tmp_path)},
    )  # fmt: skip
    function(torch.ones(4, 2))
    where, converter = line_of("# the size"), line_of("# which truncates")
    assert f"floordiv ({where}): converter ({converter}) or kernel: -1 instead of -2" in only_verdict(tmp_path)


def test_a_kernel_that_is_wrong_only_in_the_session_that_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """ONNX Runtime's optimizers are made to change a value inside; the model hides it from the results."""
    create = onnxruntime.InferenceSession

    def optimize_badly(model: bytes, options: onnxruntime.SessionOptions, **kwargs: object) -> object:
        if options.graph_optimization_level != onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL:
            changed = ir.from_proto(onnx.load_model_from_string(model))
            scale_onnx(changed, PassContext("onnx.none"), "silu_6")
            model = ir.to_proto(changed).SerializeToString()
        return create(model, options, **kwargs)

    monkeypatch.setattr(onnxruntime, "InferenceSession", optimize_badly)
    verdicts(Damped(), (4, 8), "inference", tmp_path)
    (graph,) = find_run(tmp_path).graphs
    blame = graph.entry.blame
    assert (blame.value, blame.source, blame.kind, blame.name) == ("silu_6", silu_lines(), "optimizer", "")


@pytest.mark.parametrize("keep", [True, False])
def test_inputs_that_are_changed_in_place(keep: bool, tmp_path: Path) -> None:
    def running(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        half = total[:2]
        result = (half * x).sin()
        total.add_(1.0)
        return result + half

    compiler = onnx_compiler(debug=True, dump_dir=str(tmp_path), compare="every")
    kept = aot_autograd(fw_compiler=compiler, keep_inference_input_mutations=True)
    options = {"dump_dir": str(tmp_path), "compare": "every"}
    with torch.no_grad():
        function = compiled(running, backend=kept) if keep else compiled(running, backend="onnx_debug", options=options)
        total = torch.zeros(4, 3)
        for _ in range(3):
            function(torch.randn(2, 3), total)
    assert torch.equal(total, torch.full((4, 3), 3.0))
    (graph,) = json.loads((tmp_path / "latest" / "manifest.json").read_text())["graphs"]
    assert (graph["verdict"], graph["unchecked"]) == ("ok", [])


@pytest.mark.parametrize("error", [RuntimeError, AssertionError, ValueError])
def test_a_reference_that_is_not_float64_is_said(error: type[Exception], tmp_path: Path) -> None:
    """An operator of one's own that float64 does not have."""

    @torch.library.custom_op("planted::single_only", mutates_args=())
    def single_only(x: torch.Tensor) -> torch.Tensor:
        if x.dtype is not torch.float32:
            raise error("float32 only")
        return x * 2

    single_only.register_fake(torch.empty_like)
    with torch.no_grad():
        function = compiled(lambda x: single_only(x).sin(), backend="onnx_debug", options={"dump_dir": str(tmp_path)})
        function(torch.randn(4))
    (graph,) = json.loads((tmp_path / "latest" / "manifest.json").read_text())["graphs"]
    assert graph["verdict"] == "ok"
    assert any("single_only" in item and "float32 only" in item for item in graph["unchecked"])
    assert "not checked: " in graph["note"]
    assert counted("internal_failures") == 0
    assert counted("unchecked_values") > 0


def test_a_pass_beside_what_float64_does_not_have(planted: Callable[[Pass], None], tmp_path: Path) -> None:
    """An operator of one's own, which is told; what does not depend on it is compared in float64 all the same."""

    @torch.library.custom_op("planted::float32_only", mutates_args=())
    def float32_only(x: torch.Tensor) -> torch.Tensor:
        if x.dtype is not torch.float32:
            raise RuntimeError("float32 only")
        return x * 2

    float32_only.register_fake(torch.empty_like)

    def scaled_by(factor: float) -> Callable[[fx.GraphModule, PassContext], int]:
        def run(module: fx.GraphModule, context: PassContext) -> int:
            (node,) = module.graph.find_nodes(op="call_function", target=aten.sin.default)
            with module.graph.inserting_after(node):
                scaled = module.graph.call_function(aten.mul.Tensor, (node, factor))
            node.replace_all_uses_with(scaled, lambda user: user is not scaled)
            return 1

        return run

    for name, factor in (("rounded", 1 + 1e-9), ("wrong", 1 + 1e-4)):
        planted(Pass(f"joint.{name}", "Planted by a test.", scaled_by(factor)))
        with torch.no_grad():
            options = {"dump_dir": str(tmp_path / name)}
            function = compiled(lambda x: (float32_only(x.cos()), x.sin()), backend="onnx_debug", options=options)
            function(torch.randn(4))
        (graph,) = json.loads((tmp_path / name / "latest" / "manifest.json").read_text())["graphs"]
        assert any("float32 only" in said for said in graph["unchecked"]), graph["unchecked"]
        assert graph["verdict"] == "ok" if name == "rounded" else "pass joint.wrong" in graph["verdict"], graph
        torch._dynamo.reset()


@pytest.mark.parametrize("name", ["llama", "resnet", "whisper"])
def test_no_false_alarm(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, inputs = zoo.ZOO[name].build(), zoo.ZOO[name].inputs()
    function = compiled(model, backend="onnx_debug", options={"dump_dir": str(tmp_path), "tensor_limit": 0})
    result = function(**inputs)
    loss = result.loss if getattr(result, "loss", None) is not None else result[0].square().mean()
    loss.backward()
    graphs = json.loads((tmp_path / "latest" / "manifest.json").read_text())["graphs"]
    found = {(graph["index"], graph["direction"]): (graph["verdict"], graph["unchecked"]) for graph in graphs}
    assert all(item == ("ok", []) for item in found.values()), found


def test_no_false_alarm_where_sizes_and_numbers_are_symbols(tmp_path: Path) -> None:
    """In training; the backward of a call comes after the next call's forward."""

    def function(x: torch.Tensor, w: torch.Tensor, n: int) -> tuple[torch.Tensor, int]:
        return (x @ w * n).sin(), x.shape[0] + n

    options = {"dump_dir": str(tmp_path), "compare": "every"}
    run = compiled(function, backend="onnx_debug", dynamic=True, options=options)
    w = torch.randn(4, 4, requires_grad=True)
    for n in (3, 5):
        x = torch.randn(2, n, 4, requires_grad=True)
        (first, _), (second, number) = (run(item, w, n) for item in x)
        assert number == 2 * n
        second.sum().backward()
        first.sum().backward()
        expected = torch.autograd.grad(function(x, w, n)[0].sum(), x)[0]
        torch.testing.assert_close(x.grad, expected)
    graphs = json.loads((tmp_path / "latest" / "manifest.json").read_text())["graphs"]
    found = [(graph["direction"], graph["verdict"], graph["unchecked"]) for graph in graphs]
    assert found == [("forward", "ok", []), ("backward", "ok", [])]


@pytest.mark.parametrize("training", [False, True])
def test_no_false_alarm_where_results_are_no_outputs(training: bool, tmp_path: Path) -> None:
    """A view of an argument, an argument, one tensor twice, a number, nothing: AOTAutograd makes these itself."""

    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[object, ...]:
        z = (x * 2).sin()
        y.add_(1)
        return x.t(), z, y, None, z, 3, z[1:], x.argmax()

    options = {"dump_dir": str(tmp_path)}
    x, y = torch.randn(3, 4, requires_grad=training), torch.randn(2)
    results = compiled(function, backend="onnx_debug", options=options)(x, y)
    if training:
        results[1].sum().backward()
    graphs = json.loads((tmp_path / "latest" / "manifest.json").read_text())["graphs"]
    assert len(graphs) == 1 + training
    assert all((graph["verdict"], graph["unchecked"]) == ("ok", []) for graph in graphs), graphs


def test_attributes_that_are_changed_in_place(tmp_path: Path) -> None:
    """An optimizer's step: its parameters are no arguments of Dynamo's graph, and are changed once."""

    def train(debug: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(8, 4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        options = {"dump_dir": str(tmp_path), "compare": "every"}
        step = compiled(lambda: optimizer.step(), backend="onnx_debug", options=options) if debug else optimizer.step
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(5, 8)).square().sum().backward()
            step()
        return [item.detach() for item in model.parameters()]

    expected, actual = train(False), train(True)
    for value, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(value, wanted)
    graphs = json.loads((tmp_path / "latest" / "manifest.json").read_text())["graphs"]
    assert graphs and all((graph["verdict"], graph["unchecked"]) == ("ok", []) for graph in graphs), graphs


def test_random_numbers_that_checkpointing_draws_again(tmp_path: Path) -> None:
    """The forward hands the state of the random numbers to its backward, which the partitioner does not describe.

    Run by PyTorch, the captured graph draws others in its backward: the gradients have no reference, which is said.
    """
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.5), nn.Linear(16, 8))

    def checkpointed(x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(model, F.dropout(x, 0.3), use_reentrant=False).sin()

    function = compiled(checkpointed, backend="onnx_debug", options={"dump_dir": str(tmp_path)})
    function(torch.randn(4, 8)).sum().backward()
    graphs = json.loads((tmp_path / "latest" / "manifest.json").read_text())["graphs"]
    found = {graph["direction"]: (graph["verdict"], graph["unchecked"]) for graph in graphs}
    (said,) = found["backward"][1]
    assert "gradients" in said and found == {"forward": ("ok", []), "backward": ("ok", [said])}


def test_a_comparison_is_not_seen_by_a_compile_in_another_thread(tmp_path: Path) -> None:
    """PyTorch keeps the node that is being traced for the process, not for the thread."""
    seen = []

    @torch.library.custom_op("planted::watching", mutates_args=())
    def watching(x: torch.Tensor) -> torch.Tensor:
        seen.append(fx.traceback.get_current_meta().get("of_another_thread"))
        return x * 2

    watching.register_fake(torch.empty_like)
    options = {"dump_dir": str(tmp_path), "compare": "every"}
    function = compiled(lambda x: watching(x).sin(), backend="onnx_debug", options=options)
    with torch.no_grad():
        function(torch.randn(4))
        seen.clear()
        with fx.traceback.preserve_node_meta():
            fx.traceback.current_meta["of_another_thread"] = "kept"
            function(torch.randn(4))
    assert seen and set(seen) == {"kept"}


@pytest.mark.parametrize("shape", [(), (8,)])
def test_a_pass_that_loses_a_gradient(shape: tuple[int, ...], planted: Callable[[Pass], None], tmp_path: Path) -> None:
    """The results are right, and one of two parameters learns nothing."""

    def detach(module: fx.GraphModule, context: PassContext) -> int:
        (node,) = module.graph.find_nodes(op="call_function", target=F.silu)
        with module.graph.inserting_before(node):
            detached = module.graph.call_method("detach", (node.args[0],))
            detached.meta.update(node.args[0].meta)
        node.args = (detached,)
        context.matches.append(node.name)
        return 1

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.weight = nn.Parameter(torch.randn(shape)), nn.Parameter(torch.randn(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight + F.silu(self.gate)  # silu of the gate

    planted(Pass("pre_grad.wrong", "Planted by a test.", detach))
    found = verdicts(Gated(), (5, 8), "training", tmp_path)
    assert "pass pre_grad.wrong" in found["backward"] and line_of("silu of the gate") in found["backward"], found


def turned(old: object, new: object) -> Callable[[fx.GraphModule, PassContext], int]:
    """A pass that replaces one operator by another."""

    def run(module: fx.GraphModule, context: PassContext) -> int:
        nodes = [node for node in module.graph.nodes if node.target is old]
        for node in nodes:
            node.target = new
        return len(nodes)

    return run


def only_graph(dump: Path) -> dict[str, Any]:
    (graph,) = json.loads((dump / "latest" / "manifest.json").read_text())["graphs"]
    return graph


def only_verdict(dump: Path) -> str:
    return str(only_graph(dump)["verdict"])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("stage", "function", "old", "new"),
    [
        ("joint", lambda x: (x * 2).argmax(-1), aten.argmax.default, aten.argmin.default),
        ("post_grad", lambda x: (x * 2).argmax(-1), aten.argmax.default, aten.argmin.default),
        ("pre_grad", lambda x: x.sin() > 0, operator.gt, operator.lt),
        ("joint", lambda x: x.sin() > 0, aten.gt.Scalar, aten.lt.Scalar),
    ],
)
def test_a_pass_that_turns_a_comparison(
    stage: str,
    function: Callable[[torch.Tensor], torch.Tensor],
    old: object,
    new: object,
    dtype: torch.dtype,
    planted: Callable[[Pass], None],
    tmp_path: Path,
) -> None:
    """Rounding may turn a few comparisons and indices, not all of them."""
    planted(Pass(f"{stage}.wrong", "Planted by a test.", turned(old, new)))
    with torch.no_grad():
        compiled(function, backend="onnx_debug", options={"dump_dir": str(tmp_path)})(torch.randn(5, 100).to(dtype))
    assert f": pass {stage}.wrong (test_planted_faults.py:" in only_verdict(tmp_path)


@pytest.mark.parametrize("number", [5, 1_700_000_000_000_000_000])
def test_a_pass_that_is_wrong_by_one(number: int, planted: Callable[[Pass], None], tmp_path: Path) -> None:
    """Integers have no rounding, however large."""

    def add_two(module: fx.GraphModule, context: PassContext) -> int:
        nodes = [node for node in module.graph.nodes if node.target is aten.add.Tensor]
        for node in nodes:
            node.args = (node.args[0], 2)
        return len(nodes)

    planted(Pass("joint.wrong", "Planted by a test.", add_two))
    function = compiled(lambda t: t + 1, backend="onnx_debug", options={"dump_dir": str(tmp_path)})
    function(torch.full((3,), number))
    assert ": pass joint.wrong (test_planted_faults.py:" in only_verdict(tmp_path)


def test_a_fault_that_a_layer_norm_damps_at_once(planted: Callable[[Pass], None], tmp_path: Path) -> None:
    """In ``pre_grad`` the layer norm is one node: its result is off by no more than eager's rounding."""

    def run(module: fx.GraphModule, context: PassContext) -> int:
        (node,) = (node for node in module.graph.nodes if node.target is torch.tanh)
        with module.graph.inserting_after(node):
            scaled = module.graph.call_function(torch.mul, (node, 1.01))
        node.replace_all_uses_with(scaled, lambda user: user is not scaled)
        return 1

    planted(Pass("pre_grad.wrong", "Planted by a test.", run))
    norm = nn.LayerNorm(32)
    with torch.no_grad():
        function = compiled(lambda x: norm(torch.tanh(x)), backend="onnx_debug", options={"dump_dir": str(tmp_path)})
        function(torch.randn(4, 32) / 20)
    assert only_verdict(tmp_path).startswith("diverges at mul") and "pass pre_grad.wrong" in only_verdict(tmp_path)


def test_the_fault_of_a_forward_explains_the_gradients(planted: Callable[[Pass], None], tmp_path: Path) -> None:
    planted(Pass("post_grad.wrong", "Planted by a test.", scale("post_grad")))
    verdicts(Convolutional(), MODELS["convolutional network"][1], "training", tmp_path)
    graphs = json.loads((tmp_path / "latest" / "manifest.json").read_text())["graphs"]
    found = {graph["direction"]: graph["verdict"] for graph in graphs}
    assert "pass post_grad.wrong" in found["forward"]
    assert found["backward"] == "ok" or f"its forward {found['forward']}" in found["backward"], found


def test_a_backward_belongs_to_its_forward(tmp_path: Path) -> None:
    """The next batch may lie where the batch of a forward lay that never had a backward."""
    weight, x = torch.randn(64, 64, requires_grad=True), torch.randn(32, 64)
    function = compiled(lambda x: x @ weight, backend="onnx_debug", options={"dump_dir": str(tmp_path)})
    function(x)
    x.copy_(torch.randn(32, 64))
    function(x).sum().backward()
    graphs = json.loads((tmp_path / "latest" / "manifest.json").read_text())["graphs"]
    found = {graph["direction"]: (graph["verdict"], graph["unchecked"]) for graph in graphs}
    assert found == {"forward": ("ok", []), "backward": ("ok", [])}


def test_what_never_was_compared_is_said(tmp_path: Path) -> None:
    """The backward that the comparison of the stages compiled, if the user's never runs."""
    layer = nn.Linear(4, 4)
    function = compiled(layer, backend="onnx_debug", options={"dump_dir": str(tmp_path)})
    for _ in range(6):
        function(torch.randn(2, 4))
    assert counted("compared_runs") == 1
    manifest.flush_manifests()
    graphs = json.loads((tmp_path / "latest" / "manifest.json").read_text())["graphs"]
    (backward,) = (graph for graph in graphs if graph["direction"] == "backward")
    assert (backward["verdict"], backward["runs"], backward["compared_runs"]) == (None, 0, 0)


def test_a_call_that_raises_is_not_the_first_one(tmp_path: Path) -> None:
    function = compiled(nn.Embedding(4, 2), backend="onnx_debug", options={"dump_dir": str(tmp_path)})
    with torch.no_grad():
        with pytest.raises(IndexError) as raised:
            function(torch.tensor([7]))
        with pytest.raises(IndexError) as expected:
            nn.Embedding(4, 2)(torch.tensor([7]))
        assert raised.value.args == expected.value.args
        function(torch.tensor([3]))
    assert only_verdict(tmp_path) == "ok"


@pytest.mark.parametrize("length", [1, 5])
def test_attention_to_a_single_key(length: int, tmp_path: Path) -> None:
    """Its query's gradient is 0 but for rounding, which nothing about it tells the size of."""
    queries, keys, values = (nn.Linear(32, 32) for _ in range(3))

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        heads = [layer(z).view(2, -1, 4, 8).transpose(1, 2) for layer, z in ((queries, x), (keys, y), (values, y))]
        return x + F.scaled_dot_product_attention(*heads).transpose(1, 2).reshape(x.shape)

    call = compiled(function, backend="onnx_debug", options={"dump_dir": str(tmp_path)})
    call(torch.randn(2, length, 32), torch.randn(2, 1, 32)).square().mean().backward()
    graphs = json.loads((tmp_path / "latest" / "manifest.json").read_text())["graphs"]
    assert [graph["verdict"] for graph in graphs] == ["ok", "ok"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_no_false_alarm_in_half_precision(dtype: torch.dtype, tmp_path: Path) -> None:
    """The new running statistics of a batch norm are float32 by the fake tensor, and half by the kernel."""
    found = verdicts(Convolutional(), MODELS["convolutional network"][1], "training", tmp_path, dtype)
    assert set(found.values()) == {"ok"}, found


def test_sparse_and_jagged_tensors_are_compared(tmp_path: Path) -> None:
    options = {"dump_dir": str(tmp_path)}
    table = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 4))
    compiled(table, backend="onnx_debug", options=options)(torch.tensor([1, 2, 1])).square().sum().backward()
    assert table[0].weight.grad.is_sparse
    rows = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], layout=torch.jagged)
    with torch.no_grad():
        compiled(lambda x: x.sin(), backend="onnx_debug", options=options)(rows)
    graphs = json.loads((tmp_path / "latest" / "manifest.json").read_text())["graphs"]
    assert [(graph["verdict"], graph["unchecked"]) for graph in graphs] == [("ok", [])] * 3


def test_arguments_in_overlapping_memory(tmp_path: Path) -> None:
    memory = np.arange(6, dtype=np.float32)
    function = compiled(lambda x, y: x.sum() + y, backend="onnx_debug", options={"dump_dir": str(tmp_path)})
    with torch.no_grad():
        result = function(torch.from_numpy(memory[:3]), torch.from_numpy(memory))
    assert torch.equal(result, torch.arange(3.0, 9.0))
    assert only_verdict(tmp_path) == "ok"


def test_a_call_that_cannot_be_copied_runs_all_the_same(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*args: object, **kwargs: object) -> object:
        raise NotImplementedError("no copies")

    monkeypatch.setattr(call_runs.CallRuns, "run", refuse)
    function = compiled(lambda x: x.sin(), backend="onnx_debug", options={"dump_dir": str(tmp_path)})
    with torch.no_grad():
        torch.testing.assert_close(function(torch.ones(3)), torch.ones(3).sin())
    (graph,) = json.loads((tmp_path / "latest" / "manifest.json").read_text())["graphs"]
    assert graph["verdict"] == "ok" and "the captured graph: NotImplementedError: no copies" in graph["unchecked"]


def test_a_stale_weight(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(changes.Watch, "changed", lambda self, tensors: ([], []))  # nothing is noticed any more
    model = Perceptron()
    function = compiled(model, backend="onnx_debug", options={"dump_dir": str(tmp_path), "compare": "every"})
    with torch.no_grad():
        function(torch.randn(5, 8))
        model.down.weight.mul_(1.1)
        function(torch.randn(5, 8))
    (graph,) = find_run(tmp_path).graphs
    assert graph.entry.blame.kind == "stale weight" and "down.weight" in graph.verdict


def test_a_wrong_node_reads_what_its_translation_does_not_need(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The gradient of a layer norm is given the bias, which the ONNX model computes nowhere."""
    target = aten.native_layer_norm_backward.default
    right = CONVERTERS[target]

    @functools.wraps(right)
    def wrong(*args: object, **kwargs: object) -> object:
        results = right(*args, **kwargs)
        assert isinstance(results, tuple)
        return tuple(op.Mul(item, 1.02) if item is not None else None for item in results)

    class Normalized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.affine, self.weight = nn.Parameter(torch.randn(2, 8)), nn.Parameter(torch.randn(8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            normal = F.layer_norm(x @ self.weight, (8,), self.affine[0], self.affine[1])  # a view as bias
            return torch.cos(normal @ self.weight)

    monkeypatch.setitem(CONVERTERS, target, wrong)
    found = verdicts(Normalized(), (4, 8), "training", tmp_path)
    assert found["forward"] == "ok"
    assert found["backward"].startswith("diverges at native_layer_norm_backward")
    assert line_of("a view as bias") in found["backward"]


def test_a_reference_that_cannot_be_made_does_not_end_the_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    def fail(*args: object) -> object:
        raise KeyError("select")

    monkeypatch.setattr(node_comparison, "wrong_needed_pass", fail)
    monkeypatch.setitem(CONVERTERS, aten.sinh.default, lambda x: op.Mul(op.Sinh(x), 1.01))
    function = compiled(lambda x: x.sinh(), backend="onnx_debug", options={"dump_dir": str(tmp_path)})
    with torch.no_grad():
        function(torch.ones(3))
    assert counted("internal_failures") == 1 and "KeyError" in caplog.text
    assert only_verdict(tmp_path).startswith("diverges at sinh")


class _TanhGelu(torch.autograd.Function):
    """As in the model Bloom: GELU written out, in a function of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 0.5 * (1.0 + torch.tanh(0.79788456 * x * (1 + 0.044715 * x * x)))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return grad * x.sigmoid()


def test_a_right_pass_in_the_graph_of_a_higher_order_operator_is_not_accused(tmp_path: Path) -> None:
    class Activated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = _TanhGelu.apply(self.up(x))
            return result

    assert verdicts(Activated(), (4, 8), "training", tmp_path) == {"forward": "ok", "backward": "ok"}
    assert list(tmp_path.rglob("pre_grad.activations.diff")), "the pass fired"
