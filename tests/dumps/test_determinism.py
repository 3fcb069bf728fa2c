"""``dynamo-backends compare --runs``: what differs between runs of a dumped graph."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import onnx_ir as ir
import pytest
import torch
from conftest import compiled
from onnxscript import opset18 as op

from dynamo_backends.cli import main
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


def compared(graph: DumpedGraph, dump: Path, capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, str]:
    words = ["compare", graph.reference, "-d", str(dump), "--stage", "onnx_optimized", *more]
    code = main([*words, "--json"])
    (found,) = json.loads(capsys.readouterr().out)
    return code, found["verdict"]


def test_a_node_that_differs_each_time(noise: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What reads it only follows."""
    code, verdict = compared(only_graph(noise), noise, capsys, "--runs", "4", "--threads", "2")
    assert code == 1 and re.search(
        rf"diverges at \w+ \(RandomNormalLike, {line_of('# the line of the noise')}\)", verdict
    )


def test_the_verdict_not_deterministic_says_how(noise: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert only_graph(noise).entry.blame.cause == "not deterministic"
    assert main(["bisect", only_graph(noise).reference, "-d", str(noise)]) == 1
    hint = next(line for line in capsys.readouterr().out.splitlines() if "--runs" in line)
    assert main(shlex.split(hint.removeprefix("try: dynamo-backends "))) == 1
    assert "RandomNormalLike" in capsys.readouterr().out


def test_a_race(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of 4,096 rows, eight are written to each place: which is the last depends on the threads."""

    def written(table: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return torch.index_put(table * 2, (index,), rows.relu()) + 1  # the race

    index = torch.arange(4096) % 512
    graph = dumped(written, tmp_path, torch.zeros(512, 64), index, torch.randn(4096, 64), threads=4)
    for _ in range(20):  # where the cores are busy, threads do not meet in each run
        code, verdict = compared(graph, tmp_path, capsys, "--runs", "20", "--threads", "4")
        if code:
            break
    assert re.search(rf"diverges at \w+ \(ScatterND, {line_of('# the race')}\)", verdict)
    assert compared(graph, tmp_path, capsys, "--runs", "20", "--threads", "1")[0] == 0, (
        "rows are written in their order"
    )


def test_a_graph_that_is_deterministic(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph = dumped(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU()), tmp_path, torch.randn(4, 8))
    assert compared(graph, tmp_path, capsys, "--runs", "2", "--threads", "2") == (0, "ok")
