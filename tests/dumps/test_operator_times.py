"""``dynamo-backends profile``: the time of each operator, attributed to FX nodes, modules and lines."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import onnx
import pytest
import torch

from dynamo_backends.cli import main
from dynamo_backends.dumps.operator_times import operator_times
from dynamo_backends.dumps.reading import DumpedGraph, find_run
from dynamo_backends.graphs.locations import short_file


class Block(torch.nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(size)
        self.wide = torch.nn.Linear(size, 16 * size)
        self.back = torch.nn.Linear(16 * size, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.back(torch.nn.functional.gelu(self.wide(self.norm(x))))


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Block(64)
        self.second = Block(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sort(self.second(self.first(x)[..., :8]), stable=True).values * 2


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A graph in training, and in inference, where ONNX Runtime has the weights as constants and fuses."""
    folder = tmp_path_factory.mktemp("dump")
    torch.manual_seed(0)
    compiled = torch.compile(Model(), backend="onnx_debug", options={"dump_dir": str(folder)})
    x = torch.randn(4, 64, 64)
    compiled(x).sum().backward()
    with torch.no_grad():
        compiled(x)
    return folder


def graph_of(dump: Path, direction: str) -> DumpedGraph:
    return next(graph for graph in find_run(dump).graphs if graph.direction == direction)


@pytest.mark.parametrize("direction", ["forward", "backward", "inference"])
def test_every_node_of_the_session_has_its_time_and_what_it_stands_for(dump: Path, direction: str) -> None:
    graph = graph_of(dump, direction)
    times = operator_times(graph, runs=4)
    assert 0 < sum(row.milliseconds for row in times.rows) <= times.milliseconds
    for region in graph.regions:
        rows = [row for row in times.rows if row.region == region.index]
        ran = [node for node in onnx.load(region.session_model).graph.node if node.op_type != "Constant"]
        assert sorted(row.node for row in rows) == sorted(node.name for node in ran)
        known = {
            entry.value for node in onnx.load(region.model).graph.node for entry in node.metadata_props
            if entry.key == "fx_node"
        }  # fmt: skip
        assert all(row.fx_node in known for row in rows)


def test_a_fused_node_belongs_to_the_node_whose_result_it_computes(dump: Path) -> None:
    rows = operator_times(graph_of(dump, "inference"), runs=4).rows
    gelus = sorted((row for row in rows if row.operator == "com.microsoft.BiasGelu"), key=lambda row: row.module)
    assert [row.module for row in gelus] == ["first", "second"], "of two nodes with the same name in ONNX Runtime"
    assert [row.fx_node for row in gelus] == ["gelu", "gelu_1"]
    line = inspect.getsourcelines(Block.forward)[1] + 1
    assert gelus[0].source == f"{short_file(__file__)}:{line}"
    assert next(row.module for row in rows if row.fx_node == "addmm") == "first.wide"


def test_the_command_shows_operators_modules_and_nodes(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph = graph_of(dump, "inference")
    assert main(["profile", graph.reference, "-d", str(dump), "--runs", "2", "--top", "3"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"{graph.name}: ") and "2 runs" in shown
    assert "3 slowest" in shown
    assert "not measured: 1\n" in shown, "sort"
    assert f"try: dynamo-backends show {graph.reference}" in shown
    assert main(["profile", graph.reference, "-d", str(dump), "--runs", "2", "--top", "1000"]) == 0
    shown = capsys.readouterr().out
    assert "com.microsoft.FusedMatMul" in shown and "first.wide" in shown and f"{short_file(__file__)}:" in shown
    assert "(the model)" in shown and "(not attributed)" not in shown


def test_the_command_in_json(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of both directions of a graph."""
    forward, backward = graph_of(dump, "forward"), graph_of(dump, "backward")
    assert main(["profile", str(forward.index), "-d", str(dump), "--runs", "1", "--json", "--threads", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [graph["graph"] for graph in found] == [forward.reference, backward.reference]
    assert found[1]["threads"] == 2
    assert {"node", "operator", "milliseconds", "fx_node", "module", "source"} <= found[1]["rows"][0].keys()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["987"], "'987'"),
        (["GRAPH", "-d", "/nowhere"], "/nowhere"),
    ],
)
def test_the_command_on_what_is_not_there(
    dump: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    given = [graph_of(dump, "inference").reference if word == "GRAPH" else word for word in arguments]
    assert main(["profile", "-d", str(dump), *given]) == 2
    complaint = capsys.readouterr().err
    assert complaint.startswith("dynamo-backends profile: ") and message in complaint
