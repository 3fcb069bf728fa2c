"""Selection of the runs to compare: the first of a graph, and of a dynamic graph the first at each set of sizes."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch
from conftest import compiled
from onnxscript import opset18 as op
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters

from dynamo_backends import decomposition_table, onnx_compiler
from dynamo_backends.cli import main
from dynamo_backends.debug import run_comparison
from dynamo_backends.debug.chosen_runs import MOST_SIZES
from dynamo_backends.debug.manifest import flush_manifests
from dynamo_backends.dumps.bisect_graph import bisect
from dynamo_backends.dumps.reading import DumpedGraph, find_run
from dynamo_backends.exporter.converters import CONVERTERS

aten = torch.ops.aten


def wrong_above_five_rows(right: Callable[..., Any]) -> Callable[..., object]:
    """A translation that is off by 0.01 for each row beyond the fifth."""

    def translate(x: ir.Value) -> object:
        rows = op.Cast(op.Gather(op.Shape(x), 0), to=1)
        return op.Add(right(x), op.Mul(op.Relu(op.Sub(rows, 5.0)), 0.01))

    return translate


def debugged(model: Callable[..., Any], dump: Path, **options: object) -> Callable[..., Any]:
    return compiled(model, backend="onnx_debug", options={"dump_dir": str(dump), **options}, dynamic=True)


def graphs(dump: Path) -> dict[str, DumpedGraph]:
    """The graphs of a dump that are written so far, by direction."""
    flush_manifests()
    return {graph.direction: graph for graph in find_run(dump).graphs}


def test_the_first_run_at_each_set_of_sizes_is_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    function = debugged(lambda x, length: (x.sin() * 2)[:length], tmp_path)
    with torch.no_grad():
        for rows, length in [(4, 3), (4, 3), (7, 3), (4, 3), (7, 5), (7, 3)]:
            function(torch.randn(rows, 8), length)
    assert counters["dynamo_backends"]["compared_runs"] == 3
    entry = graphs(tmp_path)["inference"].entry
    assert (entry.runs, entry.compared_runs, entry.runs_at_other_sizes) == (6, 3, 0)
    assert entry.compared_sizes == [
        {"x": [4, 8], "length": 3},
        {"x": [7, 8], "length": 3},
        {"x": [7, 8], "length": 5},
    ]
    assert main(["ls", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert " 3 of 6 " in printed and "'compare': 'every'" in printed


def test_a_counter_does_not_have_each_run_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    function = debugged(lambda x, step: x.sin() * step, tmp_path)
    with torch.no_grad():
        for step in range(2, 2 + MOST_SIZES + 5):
            function(torch.ones(3), step)
    entry = graphs(tmp_path)["inference"].entry
    assert (entry.runs, entry.compared_runs) == (MOST_SIZES + 5, MOST_SIZES)
    assert entry.runs_at_other_sizes == 5 and len(entry.compared_sizes) == MOST_SIZES
    assert main(["ls", str(tmp_path)]) == 0
    assert "5 of 0/inference" in capsys.readouterr().out


def test_a_static_graph_is_compared_once(tmp_path: Path) -> None:
    function = compiled(torch.sin, backend="onnx_debug", options={"dump_dir": str(tmp_path)}, dynamic=False)
    for _ in range(3):
        function(torch.ones(3))
    entry = graphs(tmp_path)["inference"].entry
    assert (entry.runs, entry.compared_runs, entry.sizes) == (3, 1, {})


def test_the_dump_has_the_run_that_is_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The forward has two regions, with ``sort`` between them in PyTorch; the second is wrong for more rows."""
    monkeypatch.setitem(CONVERTERS, aten.sinh.default, wrong_above_five_rows(op.Sinh))

    def model(x: torch.Tensor) -> torch.Tensor:
        return torch.sort(x.tanh() * 2, stable=True).values.sinh().exp()

    function = debugged(model, tmp_path)
    with torch.no_grad():
        for rows in (4, 7, 3, 9):
            function(torch.randn(rows, 8))
    graph = graphs(tmp_path)["inference"]
    assert graph.verdict is not None and graph.verdict.endswith(", with x 7x8")
    assert graph.entry.sizes == {"x": [7, 8]} and graph.entry.compared_runs == 4
    shapes = [[value.shape for value in region.recorded("input").values()] for region in graph.regions]
    assert all((7, 8) in region for region in shapes), shapes
    assert json.loads((graph.folder / "side_by_side.json").read_text())["verdict"] == graph.verdict
    found = bisect(find_run(tmp_path), graph.reference, output=tmp_path / "cut")
    assert (found.place, found.value) == ("translation", "sinh") and found.cut is not None and found.cut.confirmed
    for region in graph.regions:
        command = [sys.executable, str(region.folder / "repro.py")]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert graph.verdict in done.stdout, "it computes the same wrong results again"


def test_a_backward_is_compared_at_each_set_of_sizes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The gradient of ``sinh`` is ``cosh``, which is wrong for more rows."""
    monkeypatch.setitem(CONVERTERS, aten.cosh.default, wrong_above_five_rows(op.Cosh))
    function = debugged(lambda x: torch.sort(x.sinh(), stable=True).values.tanh(), tmp_path)
    for rows in (4, 7, 4, 7):
        function(torch.randn(rows, 8, requires_grad=True)).sum().backward()
    found = graphs(tmp_path)
    assert found["forward"].verdict == "ok" and found["forward"].entry.compared_runs == 2
    backward = found["backward"]
    assert backward.verdict is not None and ", with x 7x8" in backward.verdict, backward.verdict
    assert "diverges at cosh" in backward.verdict and backward.entry.compared_runs == 2
    assert bisect(find_run(tmp_path), "0/backward", output=tmp_path / "cut").place == "translation"


def test_a_backward_is_selected_by_itself(tmp_path: Path) -> None:
    """The first of each set of sizes, whichever of the forwards it belongs to."""
    function = debugged(lambda x: x.sin() * 2, tmp_path)
    for rows in (4, 4, 7):
        function(torch.randn(rows, 8, requires_grad=True))
    function(torch.randn(7, 8, requires_grad=True)).sum().backward()
    found = graphs(tmp_path)
    assert found["forward"].entry.compared_runs == 2
    assert [list(sizes.values())[0] for sizes in found["backward"].entry.compared_sizes] == [[7, 8]]


def live_bytes() -> int:
    """The memory of all tensors."""
    gc.collect()
    tensors = [item for item in gc.get_objects() if type(item) in (torch.Tensor, torch.nn.Parameter)]
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.layout is torch.strided]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def test_a_comparison_keeps_no_memory(tmp_path: Path) -> None:
    """Nothing waits for the user's backward."""
    model = torch.nn.Sequential(*[torch.nn.Linear(128, 128) for _ in range(4)]).eval()
    size = sum(parameter.nbytes for parameter in model.parameters())
    x = torch.randn(4, 128)
    options = {"dump_dir": str(tmp_path), "cache": False, "compare": "every"}
    function = torch.compile(model, backend="onnx_debug", options=options)
    torch.compile(torch.nn.Linear(2, 2), backend="eager")(torch.randn(1, 2))  # what PyTorch keeps of a first compile
    before = live_bytes()
    for _ in range(3):  # without ``no_grad``, and no backward follows
        result = function(x)
    del result
    assert live_bytes() - before < size / 4
    results = [function(x) for _ in range(3)]
    assert live_bytes() - before < size / 4, "what the user's own graphs hold"
    for result in (results[2], results[0]):
        result.sum().backward()
    found = graphs(tmp_path)
    assert found["backward"].verdict == "ok" and found["backward"].entry.compared_runs >= 1


@pytest.mark.parametrize("gradients", [False, True])
def test_the_compiler_alone_compares_at_each_set_of_sizes(gradients: bool, tmp_path: Path) -> None:
    records: list[Any] = []
    compiler = onnx_compiler(debug=True, dump_dir=str(tmp_path), record=records)
    backend = aot_autograd(fw_compiler=compiler, decompositions=decomposition_table())
    function = torch.compile(lambda x: (x.sin() * 2).exp(), backend=backend, dynamic=True)
    for rows in (4, 4, 7):
        y = function(torch.randn(rows, 8, requires_grad=gradients))
        if gradients:
            y.sum().backward()
    found = graphs(tmp_path)
    assert sorted(found) == (["backward", "forward"] if gradients else ["inference"])
    assert all(graph.entry.compared_runs == 2 and graph.verdict == "ok" for graph in found.values())
    assert all(record.comparison.ok for record in records)


def test_what_comparisons_need_is_let_go_when_all_are_made(tmp_path: Path) -> None:
    dropped: list[str] = []
    drop = run_comparison.Judge.drop
    function = debugged(lambda x: x.sin() * 2, tmp_path)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(run_comparison.Judge, "drop", lambda self: (dropped.append(str(self.name)), drop(self)))
        for rows in range(2, 2 + MOST_SIZES):
            assert not dropped
            function(torch.randn(rows, 8))
        assert len(dropped) == 1
        function(torch.randn(100, 8))
    assert graphs(tmp_path)["inference"].entry.runs_at_other_sizes == 1


@pytest.mark.parametrize("gradients", [False, True])
def test_runs_at_more_sizes_than_are_kept_are_all_compared(gradients: bool, tmp_path: Path) -> None:
    function = debugged(lambda x: x.sin() * 2, tmp_path, compare="every")
    for rows in range(2, 4 + MOST_SIZES):
        y = function(torch.randn(rows, 8, requires_grad=gradients))
        if gradients:
            y.sum().backward()
    for graph in graphs(tmp_path).values():
        assert (graph.entry.compared_runs, graph.entry.runs_at_other_sizes) == (2 + MOST_SIZES, 0)
