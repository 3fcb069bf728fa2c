"""Reading a dump: runs, graphs and regions by reference, and errors for folders that are no dumps."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from dumped import graph_entry, region_entry, write_manifest

from dynamo_backends.cli import main
from dynamo_backends.dumps.models import load_ir, load_model
from dynamo_backends.dumps.reading import SCHEMA_VERSION, DumpError, find_run
from dynamo_backends.pipeline import pipeline


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two graphs; the second trains, and its forward has two regions, since ``sort`` runs in PyTorch."""
    folder = tmp_path_factory.mktemp("dump")

    def plain(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) + 1

    layer = torch.nn.Linear(4, 4)

    def trained(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.sort(torch.tanh(layer(x)), stable=True).values)

    options = {"dump_dir": str(folder)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pipeline, "graph_numbers", itertools.count())  # whatever this process compiled before
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
    with pytest.raises(DumpError, match="region 7.* region_0, region_1"):
        run.regions_of("1/forward/region_7")


def test_a_graph_that_is_not_there_names_those_that_are(dump: Path) -> None:
    with pytest.raises(DumpError, match="'graph_001/foward'.* graph_001/forward"):
        find_run(dump).graphs_of("graph_001/foward")
    with pytest.raises(DumpError, match="'7'.* graph_000/inference, graph_001/forward"):
        find_run(dump).graphs_of("7")


def test_a_run_is_found_from_anything_in_it(dump: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = find_run(dump).folder
    for given in (run, run / "manifest.json", run / "graph_001" / "forward", dump / "latest"):
        assert find_run(given).folder.resolve() == run.resolve()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DumpError, match="onnx_debug.* -d "):
        find_run()
    shutil.copytree(dump, tmp_path / "mine", symlinks=True)
    assert find_run().folder.resolve() == (tmp_path / "mine" / run.name).resolve()
    shutil.copytree(dump, tmp_path / "yours", symlinks=True)
    with pytest.raises(DumpError, match="mine, yours.* -d$"):
        find_run()
    shutil.copytree(dump, tmp_path / "onnx_debug", symlinks=True)
    assert find_run().folder.parent.name == "onnx_debug"


@pytest.mark.parametrize(
    ("content", "datum"),
    [
        (None, "no manifest.json"),
        ("", "JSON"),
        ('{"schema_version": 1, "graphs": [', "JSON"),
        ("[1, 2]", "dynamo-backends"),
        ('{"name": "another tool", "version": 3}', "dynamo-backends"),
        (json.dumps({"schema_version": SCHEMA_VERSION - 1}), f"older.* {SCHEMA_VERSION - 1}, .* {SCHEMA_VERSION}"),
        (json.dumps({"schema_version": SCHEMA_VERSION + 1}), f"newer.* {SCHEMA_VERSION + 1}, .* {SCHEMA_VERSION}"),
    ],
)
def test_folders_that_are_no_dump(tmp_path: Path, content: str | None, datum: str) -> None:
    run = tmp_path / "run_20260101_000000_pid1"
    run.mkdir()
    if content is not None:
        (run / "manifest.json").write_text(content)
    with pytest.raises(DumpError, match=datum) as caught:
        find_run(run)
    assert str(run) in str(caught.value)


_STAGE = {"name": "onnx", "file": None, "nodes": 1, "same_as": 3}


@pytest.mark.parametrize(
    ("entry", "data"),
    [
        ({"index": 0}, ["graphs[0]:", "`direction`"]),
        (graph_entry(index="x"), ["`$.index`", "`str`"]),
        (graph_entry(direction="sideways"), ["`$.direction`", "'sideways'"]),
        (graph_entry(names=[]), ["`$.names`", "`array`"]),
        (graph_entry(names={"x": 3}), ["`$.names[...]`", "`int`"]),
        (graph_entry(runs=True), ["`$.runs`", "`bool`"]),
        (graph_entry(verdict=1), ["`$.verdict`", "`int`"]),
        (graph_entry(blame={"kind": "node", "name": ""}), ["`$.blame`", "`value`"]),
        (graph_entry(regions=[3]), ["`$.regions[0]`", "`int`"]),
        (graph_entry(regions=[region_entry(stages=[_STAGE])]), ["`$.regions[0].stages[0].same_as`", "`int`"]),
        (
            graph_entry(regions=[region_entry(session={**region_entry()["session"], "threads": 10**30})]),
            ["`$.regions[0].session.threads`", " 65535"],
        ),
        (graph_entry(regions=[region_entry(session="x")]), ["`$.regions[0].session`", "`str`"]),
        (graph_entry(folder="../.."), ["'../..'"]),
        (graph_entry(folder="/etc"), ["'/etc'"]),
        (graph_entry(folder="a\0b"), ["'a\\x00b'"]),
    ],
)
def test_damaged_entries_of_a_manifest(tmp_path: Path, entry: dict[str, object], data: list[str]) -> None:
    write_manifest(tmp_path, entry)
    with pytest.raises(DumpError, match=r"manifest\.json") as caught:
        _ = find_run(tmp_path).graphs
    assert [datum for datum in data if datum not in str(caught.value)] == []


def test_a_run_with_links_is_not_read(tmp_path: Path) -> None:
    """They may lead to files outside, which commands would read, or write over."""
    outside = tmp_path / "outside"
    outside.mkdir()
    for number, name in enumerate(("graph_000/inference/bisect", "graph_000/README.txt", ".report.html.tmp")):
        run = tmp_path / f"run_{number}"
        run.mkdir()
        write_manifest(run, graph_entry())
        find_run(run)
        link = run / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(outside)
        with pytest.raises(DumpError, match=link.name):
            find_run(run)


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
    with pytest.raises(DumpError, match=r"test_data_set_0\b.* compared"):
        region.recorded("input")
    region.model.unlink()
    with pytest.raises(DumpError, match="incomplete"):
        _ = region.model


@pytest.mark.parametrize("command", ["bisect", "compare", "show", "profile"])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_model_that_was_cut_is_named(
    dump: Path, tmp_path: Path, command: str, share: float, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where the verdict of the graph is ``ok``."""
    shutil.copytree(find_run(dump).folder, tmp_path / "run")
    region = find_run(tmp_path / "run").graphs[0].regions[0]
    path = region.model if command in ("compare", "show") else region.optimized_model
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    more = {"compare": ["0"], "show": ["--stage", "onnx"]}.get(command, [])
    assert main([command, "0", *more, "-d", str(tmp_path / "run")]) == 2
    assert str(path) in capsys.readouterr().err


@pytest.mark.parametrize(("size", "datum"), [(None, "No such file"), (7, r"\b7\b.* 8\b")])
def test_weights_in_a_file_that_is_not_whole(dump: Path, tmp_path: Path, size: int | None, datum: str) -> None:
    weight = onnx.TensorProto(name="w", dims=[2], data_type=1, data_location=onnx.TensorProto.EXTERNAL)
    weight.external_data.add(key="location", value="w.data")
    info = [onnx.helper.make_tensor_value_info(name, 1, [2]) for name in "xy"]
    graph = onnx.helper.make_graph([onnx.helper.make_node("Add", ["x", "w"], ["y"])], "g", info[:1], info[1:], [weight])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)])
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())
    if size is not None:
        (tmp_path / "w.data").write_bytes(bytes(size))
    for read in (load_model, load_ir):
        with pytest.raises(DumpError, match=f"model.onnx.*w.data.*{datum}"):
            read(tmp_path / "model.onnx")
