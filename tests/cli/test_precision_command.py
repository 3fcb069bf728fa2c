"""``dynamo-backends precision``: which nodes of a low-precision graph must compute in float32."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import compiled
from torch import nn

from dynamo_backends.cli import main
from dynamo_backends.dumps.precision import PrecisionSearch, find_precision
from dynamo_backends.dumps.reading import DumpedGraph, DumpError, find_run
from dynamo_backends.graphs.locations import short_file


def line_of(text: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return 1 + next(i for i, line in enumerate(lines) if text in line)


class Attention(nn.Module):
    """Attention as it is written out."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.project = nn.Linear(size, 3 * size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.project(x).chunk(3, -1)  # the projection
        query, key, value = (item.unflatten(-1, (4, 4)).transpose(1, 2) for item in (query, key, value))  # the heads
        scores = query @ key.transpose(-1, -2)  # the scores
        weights = (scores - scores.amax(-1, keepdim=True)).exp()  # the weights
        return x + ((weights / weights.sum(-1, keepdim=True)) @ value).transpose(1, 2).flatten(2)


class Model(nn.Module):
    """The keys of the second attention are ``offset`` plus small numbers, which float16 loses at 1000."""

    def __init__(self, offset: float) -> None:
        super().__init__()
        self.first, self.second, self.third = Attention(16), Attention(16), Attention(16)
        with torch.no_grad():
            self.second.project.bias[16:32] += offset

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(self.second(self.first(x)))


def dumped(model: Callable[..., object], dump: Path, dtype: torch.dtype, x: torch.Tensor | None = None) -> DumpedGraph:
    torch.manual_seed(0)
    x = torch.randn(2, 8, 16) if x is None else x
    model = model.to(dtype) if isinstance(model, nn.Module) else model
    with torch.no_grad():
        compiled(model, backend="onnx_debug", options={"dump_dir": str(dump)})(x.to(dtype))
    (graph,) = find_run(dump).graphs
    return graph


def test_attention_with_large_keys(tmp_path: Path) -> None:
    """Each value is right on the numbers it was computed from, so the verdict is ok; float64 has other results."""
    torch.manual_seed(1)
    graph = dumped(Model(1000.0), tmp_path, torch.float16)
    assert graph.verdict == "ok"
    found = find_precision(graph)
    assert found.outcome == "found"
    assert {node.module.split(".")[0] for node in found.nodes} == {"second"}, "the others are right in float16"
    lines = {int(node.source.split(":")[-1]) for node in found.nodes}
    assert lines <= {line_of(what) for what in ("# the projection", "# the heads", "# the scores", "# the weights")}
    assert 1 <= len(found.nodes) < found.candidates / 3
    assert not all(error.is_right for error in found.before) and all(error.is_right for error in found.after)


def test_no_node_of_the_set_can_be_left_out(tmp_path: Path) -> None:
    """Each smaller set is wrong when it is tried by itself."""
    torch.manual_seed(1)
    graph = dumped(Model(1000.0), tmp_path, torch.float16)
    names = [node.name for node in find_precision(graph).nodes]
    assert names
    search = PrecisionSearch(graph)
    assert all(item.is_right for item in search.errors(names))
    for left_out in names:
        assert not all(item.is_right for item in search.errors([name for name in names if name != left_out]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_graph_that_is_right(dtype: torch.dtype, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph = dumped(Model(0.0), tmp_path, dtype)
    assert graph.verdict == "ok"
    assert find_precision(graph).outcome == "ok"
    assert main(["precision", graph.reference, "-d", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith(graph.name)


def test_a_graph_in_float32(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph = dumped(Model(0.0), tmp_path, torch.float32)
    assert find_precision(graph).outcome == "not low"
    assert main(["precision", graph.reference, "-d", str(tmp_path)]) == 0
    assert "float16 or bfloat16" in capsys.readouterr().out


def test_infinities_in_eager(tmp_path: Path) -> None:
    """ONNX Runtime computes the product in float32, so its result is right."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return ((x * 1000) / 1000).cos()  # too large

    graph = dumped(function, tmp_path, torch.float16, torch.tensor([100.0, 1, 2]))
    assert graph.verdict == "ok"
    found = find_precision(graph)
    assert found.outcome == "found" and {node.name for node in found.nodes} == {"mul", "div"}
    assert found.before[0].error is None and found.after[0].is_right


def test_nodes_that_ran_in_pytorch(tmp_path: Path) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        difference = x.cumsum(0) - 2000  # cancels
        return torch.sort(difference, stable=True).values

    graph = dumped(function, tmp_path, torch.float16, torch.cat([torch.tensor([2000.0]), torch.rand(500) / 100]))
    found = find_precision(graph)
    assert found.in_pytorch and found.outcome == "found"
    assert {int(node.source.split(":")[-1]) for node in found.nodes} >= {line_of("# cancels")}


def test_random_numbers_are_the_same_in_each_run(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.5)).half()
    compiled(model, backend="onnx_debug", options={"dump_dir": str(tmp_path)})(
        torch.randn(3, 8).half()
    ).sum().backward()
    assert [find_precision(graph).outcome for graph in find_run(tmp_path).graphs] == ["ok", "ok"]


def test_sizes_and_several_results(tmp_path: Path) -> None:
    """Under autocast, with symbolic sizes; pooling in PyTorch returns two results."""
    model = nn.Sequential(nn.Conv1d(2, 4, 3), nn.GroupNorm(2, 4), nn.MaxPool1d(2), nn.Flatten(), nn.Linear(12, 2))
    function = compiled(model, backend="onnx_debug", options={"dump_dir": str(tmp_path)}, dynamic=True)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        function(torch.randn(3, 2, 8))
    found = find_precision(find_run(tmp_path).graphs[0])
    assert found.outcome in ("ok", "found") and found.candidates > 3


def test_a_reference_that_is_not_finite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph = dumped(lambda x: x.log() + 1, tmp_path, torch.float16, torch.tensor([-1.0, 2.0]))
    assert find_precision(graph).outcome == "not finite"
    assert main(["precision", graph.reference, "-d", str(tmp_path)]) == 1
    assert "dynamo-backends nan" in capsys.readouterr().out


@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_numbers_whose_squares_float64_does_not_have(tmp_path: Path) -> None:
    graph = dumped(lambda x: (x * 250).exp() + x, tmp_path, torch.bfloat16, torch.ones(2, 4) * 2)
    assert find_precision(graph).outcome == "ok", "bfloat16 has no such number"


def test_a_dump_cannot_name_code(tmp_path: Path) -> None:
    graph = dumped(lambda x: x.cos() + 1, tmp_path, torch.float16, torch.ones(2))
    (path,) = tmp_path.rglob("*/joint.json")
    text = path.read_text()
    for planted in ('"aten.cos.default"', '"aten.from_file.default"'), ('["arg0_1"]', "[\"__import__('os')\"]"):
        path.write_text(text.replace(*planted))
        with pytest.raises(DumpError, match=r"from_file|__import__"):
            find_precision(graph)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(1)
    graph = dumped(Model(1000.0), tmp_path, torch.float16)
    assert main(["precision", graph.reference, "-d", str(tmp_path)]) == 1
    shown, progress = capsys.readouterr()
    assert "torch.autocast" in shown and "in float32, in second" in shown and f"{short_file(__file__)}:" in shown
    assert "nodes in float32: right" in progress
    assert main(["precision", graph.reference, "-d", str(tmp_path), "--json"]) == 1
    (said,) = json.loads(capsys.readouterr().out)
    assert said["outcome"] == "found" and said["nodes"][0]["module"].startswith("second")
