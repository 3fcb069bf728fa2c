"""Reading dumps: the runs, graphs and regions that a user names, and folders that are none."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch

from dynamo_backends import pipeline
from dynamo_backends.dumps.reading import SCHEMA_VERSION, DumpError, Run, find_run


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two graphs, of which the second trains and has two regions forward: ``sort`` stays in PyTorch."""
    folder = tmp_path_factory.mktemp("dump")

    def plain(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) + 1

    layer = torch.nn.Linear(4, 4)

    def trained(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.sort(torch.tanh(layer(x)), stable=True).values)

    options = {"dump_dir": str(folder)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "_graph_numbers", itertools.count())  # whatever this process compiled before
        torch.compile(plain, backend="onnx_debug", options=options)(torch.randn(3, 4))
        torch.compile(trained, backend="onnx_debug", options=options)(torch.randn(3, 4)).sum().backward()
    return folder


def test_what_is_in_a_run(dump: Path) -> None:
    run = find_run(dump)
    assert [graph.reference for graph in run.graphs] == [
        "graph_000/inference",
        "graph_001/forward",
        "graph_001/backward",
    ]
    assert [graph.verdict for graph in run.graphs] == ["ok"] * 3
    region = run.graphs[0].regions[0]
    session = onnxruntime.InferenceSession(region.model)
    (computed,) = session.run(None, region.recorded("input"))
    (recorded,) = region.recorded("output").values()
    np.testing.assert_array_equal(computed, recorded)
    assert region.optimized_model.exists() and region.session_model.exists()


@pytest.mark.parametrize(
    ("reference", "found"),
    [
        ("0", ["graph 0 inference"]),
        ("graph_000", ["graph 0 inference"]),
        ("1", ["graph 1 forward", "graph 1 backward"]),
        ("1/backward", ["graph 1 backward"]),
        ("graph_001/forward", ["graph 1 forward"]),
        ("graph_001/forward/region_1", ["graph 1 forward"]),
        ("graph_001/forward/", ["graph 1 forward"]),
    ],
)
def test_a_graph_is_a_number_or_its_folder(dump: Path, reference: str, found: list[str]) -> None:
    run = find_run(dump)
    assert [graph.name for graph in run.graphs_of(reference)] == found
    path = run.folder / reference
    if path.exists():
        assert [graph.name for graph in run.graphs_of(str(path))] == found


def test_regions_of_a_reference(dump: Path) -> None:
    run = find_run(dump)
    assert [region.index for _, region in run.regions_of("1/forward")] == [0, 1]
    assert [region.index for _, region in run.regions_of("1/forward/region_1")] == [1]
    with pytest.raises(DumpError, match="has no region 7"):
        run.regions_of("1/forward/region_7")


def test_a_graph_that_is_not_there_names_those_that_are(dump: Path) -> None:
    with pytest.raises(DumpError, match="no graph 'graph_001/foward'.* there are graph_001/forward"):
        find_run(dump).graphs_of("graph_001/foward")
    with pytest.raises(DumpError, match="no graph '7'.* graph_000/inference, graph_001/forward"):
        find_run(dump).graphs_of("7")


def test_a_run_is_found_from_anything_in_it(dump: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = find_run(dump).folder
    for given in (run, run / "manifest.json", run / "graph_001" / "forward", dump / "latest"):
        assert find_run(given).folder.resolve() == run.resolve()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DumpError, match="no dump here"):
        find_run()
    shutil.copytree(dump, tmp_path / "mine", symlinks=True)
    assert find_run().folder.resolve() == (tmp_path / "mine" / run.name).resolve()
    shutil.copytree(dump, tmp_path / "yours", symlinks=True)
    with pytest.raises(DumpError, match="which dump\\? There are mine, yours"):
        find_run()
    shutil.copytree(dump, tmp_path / "onnx_debug", symlinks=True)
    assert find_run().folder.parent.name == "onnx_debug"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no manifest.json"),
        ("", "damaged"),
        ('{"schema_version": 1, "graphs": [', "damaged"),
        ("[1, 2]", "was not written by dynamo-backends"),
        ('{"name": "another tool", "version": 3}', "was not written by dynamo-backends"),
        (json.dumps({"schema_version": SCHEMA_VERSION - 1}), "by an older version"),
        (json.dumps({"schema_version": SCHEMA_VERSION + 1}), "by a newer version"),
    ],
)
def test_folders_that_are_no_dump(tmp_path: Path, content: str | None, message: str) -> None:
    run = tmp_path / "run_20260101_000000_pid1"
    run.mkdir()
    if content is not None:
        (run / "manifest.json").write_text(content)
    with pytest.raises(DumpError, match=message):
        find_run(run)


@pytest.mark.parametrize(
    "entry",
    [
        {},
        {"index": "x", "direction": "forward", "folder": "a", "regions": [], "verdict": None},
        {"index": 0, "direction": "forward", "folder": "../..", "regions": [], "verdict": None},
        {"index": 0, "direction": "forward", "folder": "/etc", "regions": [], "verdict": None},
    ],
    ids=["empty", "no number", "above the run", "elsewhere"],
)
def test_damaged_entries_of_a_manifest(tmp_path: Path, entry: dict[str, object]) -> None:
    with pytest.raises(DumpError, match="damaged"):
        _ = Run(tmp_path, {"schema_version": SCHEMA_VERSION, "graphs": [entry]}).graphs


def test_damaged_and_missing_tensors(dump: Path, tmp_path: Path) -> None:
    shutil.copytree(find_run(dump).folder, tmp_path / "run")
    region = find_run(tmp_path / "run").graphs[0].regions[0]
    stored = region.folder / "test_data_set_0" / "input_0.pb"
    stored.write_bytes(stored.read_bytes()[:-7])
    with pytest.raises(DumpError, match=r"input_0\.pb is damaged"):
        region.recorded("input")
    stored.rename(stored.with_suffix(".json"))
    with pytest.raises(DumpError, match="tensor_limit"):
        region.recorded("input")
    shutil.rmtree(stored.parent)
    with pytest.raises(DumpError, match="no run of this graph was compared"):
        region.recorded("input")
    region.model.unlink()
    with pytest.raises(DumpError, match="incomplete"):
        _ = region.model
