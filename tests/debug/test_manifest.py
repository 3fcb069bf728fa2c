"""``manifest.json`` of many graphs: it is not rewritten for each graph, and is complete at a fault and at exit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch import fx

from dynamo_backends.debug import manifest as manifests
from dynamo_backends.debug.dump_folder import DumpFolder
from dynamo_backends.debug.manifest import Manifest
from dynamo_backends.debug.recorded_run import RecordedRun
from dynamo_backends.debug.rows import OK, Blame, GraphComparison
from dynamo_backends.dumps.blame import Cause, CauseKind
from dynamo_backends.graphs.artifacts import GraphName, Split
from dynamo_backends.options import parse_options
from dynamo_backends.pipeline.stage_data import CompiledGraph
from passes.engine.results import PassResult


class Clock:
    """A clock that advances only by the time of writing."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class SlowFolder(DumpFolder):
    """A folder on a disk that writes ten million characters a second."""

    def __init__(self, root: Path, clock: Clock) -> None:
        super().__init__(root)
        self.written: list[int] = []
        self._clock = clock

    def write_text(self, relative: str, text: str) -> bool:
        self.written.append(len(text))
        self._clock.now += len(text) / 1e7
        return super().write_text(relative, text)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(manifests.time, "monotonic", clock)
    return clock


def graph_of(index: int) -> CompiledGraph:
    """A compiled graph without regions, with the results of forty passes."""
    empty = fx.GraphModule({}, fx.Graph())
    results = [PassResult(f"pass_{i}", 0, 100, 100, 0.1) for i in range(40)]
    return CompiledGraph(GraphName(index, "forward"), empty, Split([], {}), [], empty, results)


def content(folder: DumpFolder) -> dict:
    return json.loads(folder.path("manifest.json").read_text())


def add(manifest: Manifest, index: int, blame: Blame | None = None) -> None:
    """A graph compiles and runs."""
    manifest.add_graph(graph_of(index), parse_options(), reference="Dynamo's graph")
    manifest.add_comparison(GraphName(index, "forward"), GraphComparison(blame), RecordedRun(), {})


def test_a_manifest_of_500_graphs_is_not_written_in_full_for_each(tmp_path: Path, clock: Clock) -> None:
    folder = SlowFolder(tmp_path, clock)
    manifest = Manifest(folder)
    for index in range(500):
        add(manifest, index)
        clock.now += 0.1  # what compiling and comparing it takes
    assert clock.now < 500 * 0.1 * 1.2, "writing takes more than a fifth of the time"
    assert len(folder.written) < 300
    manifest.flush()
    assert [graph["verdict"] for graph in content(folder)["graphs"]] == [OK] * 500


def test_a_small_manifest_is_the_truth_after_each_run(tmp_path: Path) -> None:
    folder = DumpFolder(tmp_path)
    manifest = Manifest(folder)
    for index in range(5):
        add(manifest, index)
        assert [graph["verdict"] for graph in content(folder)["graphs"]] == [OK] * (index + 1)


def test_a_dump_folder_whose_name_is_no_utf8(tmp_path: Path) -> None:
    folder = DumpFolder(tmp_path)
    manifest = Manifest(folder)
    manifest.add_graph(graph_of(0), parse_options({"dump_dir": "na\udcefve"}), reference="Dynamo's graph")
    assert content(folder)["options"]["dump_dir"] == "na\\udcefve"


def test_the_first_fault_is_written_at_once(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifests, "_SMALL", 0)
    folder = SlowFolder(tmp_path, clock)
    manifest = Manifest(folder)
    for index in range(20):
        add(manifest, index)
    add(manifest, 20, Blame("mm", Cause(CauseKind.NODE)))
    assert content(folder)["graphs"][-1]["blame"]["value"] == "mm"
    written = len(folder.written)
    add(manifest, 21, Blame("add", Cause(CauseKind.NODE)))
    assert len(folder.written) == written


PROGRAM = """
import os, sys, torch
from dynamo_backends.debug import manifest
manifest._SMALL = 0
manifest._TIMES_LONGER = 1e9
function = torch.compile(lambda x: x.sin() + x.shape[0], backend="onnx_debug", dynamic=False,
                         options={"dump_dir": sys.argv[1]})
for size in range(2, 6):
    function(torch.ones(size))
function(torch.ones(2))
if sys.argv[2] == "crash":
    os._exit(1)
"""


@pytest.mark.parametrize("end", ["exit", "crash"])
def test_the_rest_is_written_at_exit_and_a_crash_leaves_a_valid_manifest(end: str, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path), end], env=environment, check=end == "exit")
    graphs = json.loads((tmp_path / "latest" / "manifest.json").read_text())["graphs"]
    if end == "exit":
        assert [(graph["verdict"], graph["runs"]) for graph in graphs] == [(OK, 2), (OK, 1), (OK, 1), (OK, 1)]
    else:
        assert 1 <= len(graphs) <= 4
