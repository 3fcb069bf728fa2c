"""``dynamo-backends determinism``: values of a dumped graph that differ between runs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import onnx_ir as ir
import pytest
import torch
from conftest import compiled
from onnxscript import opset18 as op

from dynamo_backends.cli import main
from dynamo_backends.dumps.determinism import find_unstable
from dynamo_backends.dumps.reading import DumpedGraph, find_run
from dynamo_backends.exporter.converters import CONVERTERS
from dynamo_backends.graphs.locations import short_file

aten = torch.ops.aten


def line_of(text: str) -> str:
    lines = Path(__file__).read_text().splitlines()
    return f"{short_file(__file__)}:{1 + next(i for i, line in enumerate(lines) if text in line)}"


def only_graph(dump: Path) -> DumpedGraph:
    (graph,) = find_run(dump).graphs
    return graph


def dumped(function: object, dump: Path, *arguments: object, **options: object) -> DumpedGraph:
    with torch.no_grad():
        compiled(function, backend="onnx_debug", options={"dump_dir": str(dump), **options})(*arguments)  # type: ignore[arg-type]
    return only_graph(dump)


def noisy(x: ir.Value) -> object:
    """The hyperbolic sine, and each time other noise."""
    return op.Add(op.Sinh(x), op.Mul(op.RandomNormalLike(x), 0.01))


def sinh_in_the_middle(x: torch.Tensor) -> torch.Tensor:
    y = torch.tanh(x)
    return torch.sinh(y).cos()  # the line of the noise


@pytest.fixture
def noise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(CONVERTERS, aten.sinh.default, noisy)
    dumped(sinh_in_the_middle, tmp_path, torch.randn(50), opset=21)  # ORT 1.31 has no random kernels for newer ones
    return tmp_path


def test_a_node_that_differs_each_time(noise: Path) -> None:
    (found,) = find_unstable(only_graph(noise), runs=4, threads=2)
    assert (found.is_stable, found.threads, found.runs) == (False, [2, 1], 4)
    (value,) = found.values
    assert (value.fx_node, value.aten_operator) == ("sinh", "aten.sinh.default")
    assert value.source == line_of("# the line of the noise")
    assert value.operator == "RandomNormalLike", "what reads it only follows"
    assert value.differing_runs == 4 and value.differs_alone and not value.is_rounding
    assert {item.fx_node for item in found.results} == {"cos"} and found.results[0].differing_runs == 4


def test_a_race(tmp_path: Path) -> None:
    """Of 4,096 rows, eight are written to each place: which is the last depends on the threads."""

    def written(table: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return torch.index_put(table * 2, (index,), rows.relu()) + 1  # the race

    index = torch.arange(4096) % 512
    graph = dumped(written, tmp_path, torch.zeros(512, 64), index, torch.randn(4096, 64), threads=4)
    for _ in range(20):  # where the cores are busy, threads do not meet in each run
        (found,) = find_unstable(graph, runs=20)
        if found.values:
            break
    assert [value.operator for value in found.values] == ["ScatterND"]
    assert found.values[0].source == line_of("# the race") and not found.is_stable
    (alone,) = find_unstable(graph, runs=20, threads=1)
    assert alone.values == [], "with one thread, rows are written in their order"


def test_a_graph_that_is_deterministic(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph = dumped(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()), tmp_path, torch.randn(4, 8))
    (found,) = find_unstable(graph, runs=3, threads=2)
    assert (found.is_stable, found.results, found.values) == (True, [], [])
    assert main(["determinism", graph.reference, "-d", str(tmp_path), "--runs", "2"]) == 0
    assert re.search(r"\b3 runs\b", capsys.readouterr().out)


def test_the_command(noise: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph = only_graph(noise)
    assert main(["determinism", graph.reference, "-d", str(noise), "--runs", "3"]) == 1
    shown = capsys.readouterr().out
    where = line_of("# the line of the noise")
    assert f"sinh ({where}), RandomNormalLike" in shown
    assert "3 of 3" in shown
    assert main(["determinism", graph.reference, "-d", str(noise), "--runs", "1", "--json"]) == 1
    (said,) = json.loads(capsys.readouterr().out)
    assert said["regions"][0]["values"][0]["fx_node"] == "sinh" and not said["regions"][0]["is_stable"]
    assert main(["determinism", graph.reference, "-d", str(noise), "--runs", "0"]) == 2
    assert re.search("--runs|one run", capsys.readouterr().err)
