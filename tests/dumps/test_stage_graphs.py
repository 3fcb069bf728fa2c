"""The graphs of stages in a dump: their nodes, and the differences of two stages."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import onnx_ir as ir
import pytest
import torch
from dumped import dump_of_two_graphs
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from dynamo_backends.debug.stage_files import stage_json
from dynamo_backends.dumps.reading import DumpedRun, DumpError, find_run, runs_in
from dynamo_backends.dumps.schema import RunEntry
from dynamo_backends.dumps.stage_diff import Change, StageDiff, diff_nodes, diff_stages
from dynamo_backends.dumps.stage_graphs import STAGES, StageGraph, stage_graphs, stages_of
from dynamo_backends.graphs.graph_text import GraphNode, model_text, onnx_nodes
from dynamo_backends.graphs.locations import short_file
from dynamo_backends.pipeline.observer import STAGES as OBSERVED


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> DumpedRun:
    return find_run(dump_of_two_graphs(tmp_path_factory.mktemp("dump")))


class Everything(torch.nn.Module):
    """A graph with all forms that FX does not print as ``name = function(arguments)``."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        z = self.fc(x) + y * self.scale - x[0] @ y.T.sum(-1)
        z = z.view(-1).unsqueeze(0).clamp(min=0.5)
        values, indices = torch.topk(z, k=2)
        z = torch.where(indices.bool(), values, float("-inf"))
        z = z.to(torch.float16).to(dtype=torch.float32, device=torch.device("cpu"))
        return z, values, x.shape[0] ** 2


def _branches(x: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda x: torch.sin(x) + 1, lambda x: torch.cos(x), (x,))


def _captured(function: object, *args: torch.Tensor, dynamic: bool = False) -> fx.GraphModule:
    found: list[fx.GraphModule] = []

    def backend(module: fx.GraphModule, _: object) -> object:
        found.append(module)
        return module.forward

    torch.compile(function, backend=backend, dynamic=dynamic)(*args)  # type: ignore[call-overload]
    return found[0]


def _in_place(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x = x + 1
    x += y
    x[0] = 2
    return x.mul_(y)


@pytest.fixture
def read(tmp_path: Path) -> Callable[[fx.GraphModule], list[GraphNode]]:
    """The nodes of a graph that was written and read again."""

    def written(module: fx.GraphModule) -> list[GraphNode]:
        (tmp_path / "aten.json").write_text(stage_json(module))
        return StageGraph(tmp_path / "aten.py", "aten.py", "").nodes

    return written


@pytest.mark.parametrize("made", ["captured", "dynamic", "in place", "aten"])
def test_nodes_of_an_fx_graph_are_those_that_were_written(
    read: Callable[[fx.GraphModule], list[GraphNode]], made: str
) -> None:
    args = torch.randn(4, 4), torch.randn(4, 4)
    if made == "aten":
        module = make_fx(Everything())(*args)
    else:
        module = _captured(_in_place if made == "in place" else Everything(), *args, dynamic=made == "dynamic")
    nodes = read(module)
    assert [node.name for node in nodes[:-1]] == [node.name for node in module.graph.nodes][:-1]
    assert nodes[-1].kind == "output"
    for fx_node, node in zip(module.graph.nodes, nodes, strict=True):
        assert node.kind == {"placeholder": "input", "output": "output"}.get(fx_node.op, "node")
        assert bool(node.operator) == (node.kind == "node")
        used = set(re.findall(r"\w+", " ".join(node.arguments)))
        assert {str(item) for item in fx_node.all_input_nodes} <= used


def test_nodes_of_subgraphs_bear_their_name(read: Callable[[fx.GraphModule], list[GraphNode]]) -> None:
    names = [node.name for node in read(_captured(_branches, torch.randn(3)))]
    assert {"cond_true_0.sin", "cond_false_0.cos"} <= set(names)
    assert len(set(names)) == len(names)


def test_an_operator_and_its_arguments(read: Callable[[fx.GraphModule], list[GraphNode]]) -> None:
    def taken(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        both = torch.cat([x, y], dim=0).view(2, -1)
        return both[0], torch.nn.functional.gelu(y, approximate="none") + 1

    x, y, cat, view, getitem, gelu, add, output = read(_captured(taken, torch.randn(3, 4), torch.randn(3, 4)))
    assert y.types == ("f32[3, 4][4, 1]",)
    assert cat.call == f"torch.cat([{x.name}, {y.name}], dim=0)"
    assert (cat.code, cat.source.split(":")[0]) == ("both = torch.cat([x, y], dim=0).view(2, -1)", short_file(__file__))
    assert view.call == f".view({cat.name}, 2, -1)"
    assert getitem.call == f"getitem({view.name}, 0)"
    assert gelu.arguments == (y.name, "approximate='none'")
    assert add.call == f"add({gelu.name}, 1)"
    assert output.arguments == (getitem.name, add.name)


def test_an_onnx_model_as_text() -> None:
    model = ir.from_onnx_text(
        """<ir_version: 10, opset_import: ["" : 20, "mine" : 1]>
        main (float[2, N] x) => (float[2, N] z)
        <float[1] half = {0.5}> {
            y = Mul(x, half)
            z = mine.Twice <alpha = 0.00001> (y)
        }
        <opset_import: ["" : 20], domain: "mine">
        Twice (a) => (b) { b = Add(a, a) }"""
    )
    assert model_text(model).splitlines() == [
        "input x: f32[2, N]",
        "y = Mul(x, half)",
        "z: f32[2, N] = mine.Twice(y, alpha=1e-05)",
        "return z",
        "initializer half: f32[1] = [0.5]",
        "",
        "function mine.Twice:",
        "    input a",
        "    b = Add(a, a)",
        "    return b",
    ]
    assert [node.kind for node in onnx_nodes(model)] == ["input", "node", "node", "output", "initializer"]


def test_stages_are_those_that_the_pipeline_tells() -> None:
    assert [stage for stage in OBSERVED if stage in STAGES] == list(STAGES)


def test_stages_of_a_graph(run: DumpedRun) -> None:
    graph = run.graphs_of("1/forward")[0]
    stages = {stage.name: stage for stage in stages_of(run, graph)}
    assert list(stages) == list(STAGES)
    assert stages["pre_grad"].file is None and stages["pre_grad"].same_as == "dynamo"
    for name, stage in stages.items():
        graphs = stage_graphs(run, graph, name)
        assert sum(item.operators for item in graphs) == stage.nodes
        assert [item.region for item in graphs] == ([0, 1] if "onnx" in name or name == "session" else [None])
    assert stage_graphs(run, graph, "pre_grad") == stage_graphs(run, graph, "dynamo")


def test_a_stage_that_is_not_there(run: DumpedRun, tmp_path: Path) -> None:
    shutil.copytree(run.folder, tmp_path / "run")
    copy = find_run(tmp_path / "run")
    graph = copy.graphs_of("0/forward")[0]
    with pytest.raises(DumpError, match="'onx'.*'onnx'"):
        stage_graphs(copy, graph, "onx")
    model = graph.regions[0].model
    model.write_bytes(model.read_bytes()[:-9])
    with pytest.raises(DumpError, match="damaged"):
        stage_graphs(copy, graph, "onnx")
    model.unlink()
    with pytest.raises(DumpError, match="incomplete"):
        stage_graphs(copy, graph, "onnx")
    (graph.folder / "aten.json").unlink()
    (aten,) = stage_graphs(copy, graph, "aten")
    with pytest.raises(DumpError, match=r"aten\.json"):
        assert aten.nodes
    (graph.folder / "aten.py").unlink()
    with pytest.raises(DumpError, match=r"aten\.py"):
        stage_graphs(copy, graph, "aten")
    manifest = json.loads((copy.folder / "manifest.json").read_text())
    manifest["graphs"][0]["stages"] = [{"name": "aten"}]
    with pytest.raises(DumpError, match="damaged"):
        _ = DumpedRun(copy.folder, msgspec.convert(manifest, RunEntry)).graphs


def _diff(run: DumpedRun, reference: str, before: str, after: str) -> StageDiff:
    (found,) = diff_stages(run, run.graphs_of(reference)[0], before, after)
    return found


def _change(diff: StageDiff, name: str) -> Change:
    (found,) = [
        item for item in diff.changes if any(node and name in node.results for node in (item.before, item.after))
    ]
    return found


def test_what_the_partitioner_did(run: DumpedRun) -> None:
    diff = _diff(run, "0/backward", "joint", "aten")
    assert _change(diff, "gelu").kind == "removed", "the forward's"
    addmm = _change(diff, "addmm")
    assert (addmm.kind, addmm.what) == ("changed", ("kind",)), "computed in the forward, handed to the backward"
    assert diff.count("added") == 0 and diff.same > 10


def test_a_translation_shows_each_operator_and_what_stays_in_pytorch(run: DumpedRun) -> None:
    diff = _diff(run, "1/forward", "post_grad", "onnx")
    exp = _change(diff, "exp")
    assert exp.kind == "translated" and exp.before is not None and exp.after is not None
    assert (exp.before.operator, exp.after.operator) == ("aten.exp.default", "Exp")
    assert exp.source.endswith("model.py:6")
    assert _change(diff, "sort").note.startswith("runs in PyTorch")
    assert _change(diff, "getitem").what == ("kind",), "an input of the second region"
    back = _diff(run, "1/forward", "onnx", "post_grad")
    assert back.count("translated") == diff.count("translated") and back.same == diff.same
    assert _change(back, "sort").kind == "added"


def test_weights_are_matched_by_what_the_user_calls_them(run: DumpedRun) -> None:
    diff = _diff(run, "0/forward", "dynamo", "session")
    inputs = [change for change in diff.changes if change.node.kind == "input"]
    assert inputs == []


def test_onnx_stages_are_compared_region_by_region(run: DumpedRun) -> None:
    diffs = diff_stages(run, run.graphs_of("1/forward")[0], "onnx", "onnx_optimized")
    assert [diff.region for diff in diffs] == [0, 1]
    assert _diff(run, "0/forward", "onnx", "onnx").changes == []
    optimized = _diff(run, "0/forward", "onnx", "onnx_optimized")
    assert _change(optimized, "addmm").what == ("arguments",), "the transposition of the weight is in the product"


def _node(name: str, operator: str, *arguments: str, source: str = "", type_: str = "f32[2]") -> GraphNode:
    return GraphNode("node", (name,), operator, arguments, (type_,), source)


def test_what_is_renamed_is_not_new() -> None:
    before = [_node("a", "relu", "x"), _node("b", "tanh", "a"), _node("c", "add", "[a, b]")]
    after = [_node("relu", "relu", "x"), _node("tanh", "tanh", "relu"), _node("c", "add", "[relu, tanh]")]
    same, changes = diff_nodes(before, after)
    assert same == 1 and [change.kind for change in changes] == ["renamed", "renamed"]


def test_a_name_that_another_line_uses_again_is_another_node() -> None:
    before = [_node("mul", "mul", "x", "2", source="model.py:1")]
    after = [_node("mul", "mul", "x", "3", source="model.py:2")]
    assert [change.kind for change in diff_nodes(before, after)[1]] == ["added", "removed"]


@pytest.mark.parametrize(
    ("after", "what"),
    [
        (_node("y", "tanh", "x"), ("operator",)),
        (_node("y", "relu", "z"), ("arguments",)),
        (_node("y", "relu", "x", type_="f16[2]"), ("type",)),
        (_node("y", "tanh", "x", type_="f16[2]"), ("operator", "type")),
        (_node("y", "relu", "x", type_=""), None),
    ],
)
def test_what_changed_of_a_node(after: GraphNode, what: tuple[str, ...] | None) -> None:
    same, changes = diff_nodes([_node("y", "relu", "x")], [after])
    assert same == (what is None)
    assert [change.what for change in changes] == ([what] if what else [])


def test_removed_nodes_are_where_they_were() -> None:
    before = [_node(name, "relu", name + "_in") for name in "abcd"]
    _, changes = diff_nodes(before, [before[1], _node("e", "tanh", "b"), before[3]])
    assert [(change.kind, change.node.name) for change in changes] == [
        ("removed", "a"),
        ("added", "e"),
        ("removed", "c"),
    ]


def test_summaries(run: DumpedRun, tmp_path: Path) -> None:
    first, second = run.dynamo_graphs
    assert first.begins.function == "forward" and first.ends.reason.startswith("graph break")
    assert not second.ends.reason.startswith("graph break") and not second.given_up
    assert first.begins.place.endswith("model.py:3") and first.ends.place.endswith("model.py:5")
    graphs = run.graphs
    assert [graph.short_reference for graph in graphs] == ["0/forward", "0/backward", "1/forward", "1/backward"]
    assert [graph.verdict for graph in graphs] == ["ok"] * 4 and not any(graph.diverges for graph in graphs)
    forward = graphs[2].entry
    assert 0 < forward.share_on_onnx < 1 and len(forward.regions) == 2 and forward.runs == 1
    assert {"passes", "export", "onnx_passes", "session"} <= set(forward.seconds)
    worst = forward.worst.onnx
    assert worst.share <= 1 and worst.max_abs < 1e-6 * worst.scale

    shutil.copytree(run.folder, tmp_path / "run_1_good")
    (tmp_path / "run_2_empty").mkdir()
    (tmp_path / "run_3_damaged").mkdir()
    (tmp_path / "run_3_damaged" / "manifest.json").write_text('{"schema_version"')
    good, empty, damaged = (item for _, item in runs_in(tmp_path))
    assert isinstance(good, DumpedRun) and len(good.graphs) == 4
    assert "no manifest.json" in str(empty) and "damaged" in str(damaged)


def test_a_damaged_manifest_is_said(run: DumpedRun) -> None:
    manifest = json.loads((run.folder / "manifest.json").read_text())
    del manifest["graphs"][1]["seconds"]
    manifest["dynamo_graphs"] = [{"index": "one"}]
    damaged = DumpedRun(run.folder, msgspec.convert(manifest, RunEntry))
    for part in ("graphs", "dynamo_graphs"):
        with pytest.raises(DumpError, match="is damaged"):
            getattr(damaged, part)
