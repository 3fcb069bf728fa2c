"""``onnx_debug``: the dump folder, the verdict, and the verdicts on planted faults."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from conftest import assert_same_as_eager, compiled, counted
from onnx import numpy_helper
from onnxscript import opset18 as op
from torch._dynamo.backends.common import aot_autograd

import dynamo_backends
from dynamo_backends.dumps import reading
from dynamo_backends.dumps.reading import SCHEMA_VERSION
from dynamo_backends.exporter.converters import CONVERTERS
from dynamo_backends.graphs.locations import short_file
from passes import Pass, PassContext


class Classifier(torch.nn.Module):
    """Linear, GELU, layer norm, sigmoid, linear: a culprit has nodes before and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(8, 16)
        self.norm = torch.nn.LayerNorm(16)
        self.down = torch.nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.gelu(self.up(x))
        y = torch.sigmoid(self.norm(y))
        return self.down(y)


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    return tmp_path / "dump"


def debug(function: Callable[..., object], dump: Path, **options: object) -> Callable[..., object]:
    return compiled(function, backend="onnx_debug", options={"dump_dir": str(dump), **options})


def manifest(dump: Path) -> dict:
    return json.loads((dump / "latest" / "manifest.json").read_text())


def graphs(dump: Path) -> list[dict]:
    return manifest(dump)["graphs"]


def test_same_result_as_eager(dump: Path) -> None:
    settings = {"backend": "onnx_debug", "options": {"dump_dir": str(dump)}}
    assert_same_as_eager(Classifier(), torch.randn(3, 8, requires_grad=True), settings=settings)


def test_every_file_of_the_dump_is_there(dump: Path) -> None:
    debug(Classifier(), dump)(torch.randn(3, 8)).sum().backward()
    files = {str(path.relative_to(dump / "latest")) for path in (dump / "latest").rglob("*") if path.is_file()}
    (graph,) = {path.split("/")[0] for path in files if path.startswith("graph_")}
    expected = {
        "manifest.json",
        *(f"{graph}/{name}" for name in ("dynamo.py", "dynamo.json", "joint.py", "joint.json")),
    }
    for direction in ("forward", "backward"):
        region = f"{graph}/{direction}/region_0"
        expected |= {f"{graph}/{direction}/{name}" for name in ("aten.py", "aten.json")}
        expected |= {f"{region}/{name}" for name in ("model.onnx", "model.optimized.onnx", "model.session.onnx")}
        expected |= {f"{graph}/{direction}/{name}" for name in ("side_by_side.txt", "side_by_side.json")}
        expected |= {f"{region}/test_data_set_0/{name}" for name in ("input_0.pb", "output_0.pb")}
    assert expected <= files
    assert not [path for path in files if path.endswith(".tmp")]


def test_the_manifest_says_what_happened(dump: Path) -> None:
    debug(Classifier(), dump)(torch.randn(3, 8)).sum().backward()
    content = manifest(dump)
    assert content["schema_version"] == SCHEMA_VERSION
    assert content["versions"]["torch"] == torch.__version__
    assert content["options"]["dump_dir"] == str(dump)
    forward, backward = content["graphs"]
    assert (forward["direction"], backward["direction"]) == ("forward", "backward")
    assert forward["index"] == backward["index"]
    for graph in (forward, backward):
        assert graph["status"] == "compared" and graph["verdict"] == "ok"
        assert graph["share_on_onnx"] == 1.0 and graph["nodes"] == graph["nodes_on_onnx"] > 0
        assert graph["worst"]["onnx"]["max_abs"] < 1e-5
    assert content["counters"]["graphs"] == 1


def test_test_data_replays_with_onnxruntime_alone(dump: Path) -> None:
    with torch.no_grad():
        debug(Classifier().eval(), dump)(torch.randn(3, 8))
    (folder,) = (dump / "latest").glob("graph_*/*/region_0")
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
    feeds = {}
    for path in (folder / "test_data_set_0").glob("input_*.pb"):
        tensor = onnx.load_tensor(str(path))
        feeds[tensor.name] = numpy_helper.to_array(tensor)
    for i, result in enumerate(session.run(None, feeds)):
        expected = numpy_helper.to_array(onnx.load_tensor(str(folder / "test_data_set_0" / f"output_{i}.pb")))
        torch.testing.assert_close(torch.from_numpy(result), torch.from_numpy(expected.copy()))


def test_onnx_values_bear_the_names_of_fx_nodes_and_say_where_they_come_from(dump: Path) -> None:
    debug(Classifier(), dump)(torch.randn(3, 8))
    (path,) = (dump / "latest").glob("graph_*/forward/region_0/model.onnx")
    nodes = {node.output[0]: node for node in onnx.load(str(path)).graph.node}
    metadata = {item.key: item.value for item in nodes["sigmoid"].metadata_props}
    assert metadata["fx_node"] == "sigmoid" and metadata["aten_op"] == "aten.sigmoid.default"
    assert metadata["source"].startswith(short_file(__file__))
    linear = {item.key: item.value for item in nodes["addmm_1"].metadata_props}
    assert linear["module"] == "down"


def line_of(text: str) -> str:
    """``file:line`` of the first line of this file that has ``text``."""
    lines = Path(__file__).read_text().splitlines()
    return f"{short_file(__file__)}:{1 + next(i for i, line in enumerate(lines) if text in line)}"


def wrong_sigmoid(x: object) -> object:
    return op.Mul(op.Sigmoid(x), 1.001)


def test_a_wrong_operator_is_named_with_its_line(
    dump: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(CONVERTERS, torch.ops.aten.sigmoid.default, wrong_sigmoid)
    with caplog.at_level(logging.INFO, "dynamo_backends"), torch.no_grad():
        debug(Classifier(), dump)(torch.randn(3, 8))
    (forward,) = graphs(dump)
    converter = line_of("def wrong_sigmoid")
    assert (
        forward["verdict"]
        == f"diverges at sigmoid ({line_of('torch.sigmoid(self')}): converter ({converter}) or kernel"
    )
    assert forward["verdict"] in caplog.text


def test_only_the_wrong_operator_is_marked_though_the_error_goes_on(
    dump: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CONVERTERS, torch.ops.aten.sigmoid.default, wrong_sigmoid)
    debug(Classifier(), dump)(torch.randn(3, 8))
    (path,) = (dump / "latest").glob("graph_*/forward/side_by_side.json")
    rows = {row["name"]: row for row in json.loads(path.read_text())["rows"]}
    assert [name for name, row in rows.items() if row["mark"] == "!"] == ["sigmoid"]
    assert rows["sigmoid"]["error"]["max_abs"] > 1e-5 > rows["addmm_1"]["error"]["max_abs"]


def test_a_wrong_operator_in_the_backward_is_named(dump: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong_mm(a: object, b: object) -> object:
        return op.Mul(op.MatMul(a, b), 1.01)

    monkeypatch.setitem(CONVERTERS, torch.ops.aten.mm.default, wrong_mm)
    debug(Classifier(), dump)(torch.randn(3, 8)).sum().backward()
    forward, backward = graphs(dump)
    assert forward["verdict"] == "ok"
    assert backward["verdict"].startswith("diverges at mm (")


def test_a_translation_of_a_wrong_shape_is_not_used_and_listed(dump: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong_shape(x: object) -> object:
        return op.Unsqueeze(op.Sigmoid(x), op.Constant(value_ints=[0]))

    monkeypatch.setitem(CONVERTERS, torch.ops.aten.sigmoid.default, wrong_shape)
    debug(lambda x: torch.sigmoid(x.exp()), dump)(torch.randn(3, 8))
    (graph,) = graphs(dump)
    assert graph["verdict"] == "ok"
    (entry,) = graph["in_pytorch"]
    assert "sigmoid" in entry["operator"] and re.search(r"\(1, 3, 8\) .*\(3, 8\)", entry["reason"])


def test_what_a_session_computes_from_a_wrong_value_is_not_wrong(dump: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In half precision it reads the value before it is rounded, which only the wrong node has."""
    monkeypatch.setitem(CONVERTERS, torch.ops.aten.elu.default, lambda x, *_: op.Elu(x, alpha=0.97))
    torch.manual_seed(0)
    layers = torch.nn.Linear(6, 8), torch.nn.ELU(), torch.nn.LayerNorm(8), torch.nn.Linear(8, 2)
    with torch.no_grad():
        debug(torch.nn.Sequential(*layers).half(), dump)(torch.randn(4, 6).half())
    (forward,) = graphs(dump)
    assert forward["verdict"].startswith("diverges at elu ") and forward["blame"]["more"] == 0


def test_a_wrong_pass_is_told_from_a_wrong_operator(dump: Path, planted: Callable[[Pass], None]) -> None:
    """The exported model is right, the model after the pass is not: no node is to blame."""

    def blunt_the_sigmoid(model: ir.Model, context: PassContext) -> int:
        for node in model.graph:
            if node.op_type == "Reciprocal":
                node.op_type = "Sqrt"
                return 1
        return 0

    planted(Pass("onnx.wrong", "Wrong.", blunt_the_sigmoid))
    with torch.no_grad():
        debug(Classifier().eval(), dump)(torch.randn(3, 8))
    (graph,) = graphs(dump)
    blame = graph["blame"]
    assert (blame["value"], blame["source"]) == ("sigmoid", line_of("torch.sigmoid(self"))
    assert (blame["kind"], blame["name"]) == ("pass", "onnx.wrong")


@pytest.mark.parametrize(("compare", "expected"), [("first", 1), ("every", 3), ("never", 0)])
def test_the_option_compare(dump: Path, compare: str, expected: int) -> None:
    function = debug(Classifier().eval(), dump, compare=compare)
    with torch.no_grad():
        for _ in range(3):
            function(torch.randn(3, 8))
    assert counted("compared_runs") == expected


def test_progress_of_a_comparison_ends_with_its_last_node(dump: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if nodes have no tensor or several."""
    steps = []

    @contextlib.contextmanager
    def progress(title: str, total: int) -> Iterator[Callable[[], None]]:
        left = list(range(total))
        yield lambda: steps.append(left.pop())
        assert not left

    monkeypatch.setattr("dynamo_backends.debug.node_comparison.progress", progress)
    debug(lambda x: sum(part * x.shape[0] for part in x.split(2, -1)), dump)(torch.randn(3, 4))
    assert steps and steps[-1] == 0


def test_recompiles_are_counted() -> None:
    function = compiled(lambda x, flag: x + 1 if flag else x - 1)
    function(torch.randn(3), True)
    assert counted("recompiles") == 0
    function(torch.randn(3), False)
    assert counted("recompiles") == 1


def test_a_later_run_does_not_hide_a_fault(dump: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def right_for_small_values(x: object) -> object:
        return op.Min(op.Relu(x), 10.0)

    monkeypatch.setitem(CONVERTERS, torch.ops.aten.relu.default, right_for_small_values)
    function = debug(lambda x: torch.relu(x) + 1, dump, compare="every")
    for scale in (1.0, 100.0, 1.0):
        function(torch.full((4,), scale))
    (graph,) = graphs(dump)
    assert graph["verdict"].startswith("diverges at relu")


def test_dropout_is_compared_with_the_numbers_that_were_drawn(dump: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 8))
    torch.manual_seed(3)
    debug(model, dump)(torch.randn(4, 8)).sum().backward()
    after = torch.get_rng_state()
    torch.manual_seed(3)
    model(torch.randn(4, 8)).sum().backward()
    assert torch.equal(after, torch.get_rng_state()), "the comparison moved the random state"
    assert [graph["verdict"] for graph in graphs(dump)] == ["ok", "ok"]


def test_a_comparison_that_flips_is_no_error(dump: Path) -> None:
    """Where rounding decides, float64 decides otherwise; booleans and indices are taken from eager."""

    def function(x: torch.Tensor) -> torch.Tensor:
        third = x / 3
        return torch.where(third * 3 >= x, third, third + 1)

    debug(function, dump)(torch.rand(1000))
    assert graphs(dump)[0]["verdict"] == "ok"


def test_autocast_is_judged_by_its_own_precision(dump: Path) -> None:
    model = Classifier()
    function = debug(model, dump)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = function(torch.randn(3, 8)).float().sum()
    loss.backward()
    assert [graph["verdict"] for graph in graphs(dump)] == ["ok", "ok"]


def test_nodes_in_pytorch_are_listed_with_their_reason(dump: Path) -> None:
    debug(lambda x: torch.linalg.svdvals(x) + 1, dump)(torch.randn(4, 4))
    (graph,) = graphs(dump)
    entries = {entry["operator"]: entry for entry in graph["in_pytorch"]}
    assert entries["aten._linalg_svd.default"]["reason"] == "no translation to ONNX"
    assert entries["aten._linalg_svd.default"]["source"].startswith(short_file(__file__))
    assert graph["verdict"] == "ok"


def test_what_crosses_between_onnx_runtime_and_pytorch(dump: Path) -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = (x @ w).sin()
        z = torch.fft.rfft(y).real  # ONNX Runtime has no complex tensors
        return z.cos() + 1

    with torch.no_grad():
        debug(function, dump)(torch.randn(3, 8), torch.randn(8, 8))
    (graph,) = graphs(dump)
    cost = graph["cost"]
    assert cost["crossing_tensors"] == 2
    assert cost["crossing_bytes"] == 4 * (3 * 8 + 3 * 5 * 2)  # the sine, and the parts of its complex transform
    assert set(cost["region_milliseconds"]) == {"0", "1"}
    assert all(item > 0 for item in (cost["pytorch_milliseconds"], *cost["region_milliseconds"].values()))


def test_large_tensors_are_summarized_unless_asked_for(dump: Path) -> None:
    debug(lambda x: x + 1, dump, tensor_limit=100)(torch.arange(1000.0))
    (folder,) = (dump / "latest").glob("graph_*/inference/region_0/test_data_set_0")
    summary = json.loads((folder / "input_0.json").read_text())
    assert summary["shape"] == [1000] and summary["max"] == 999.0 and summary["nan"] == 0
    assert not list(folder.glob("*.pb"))


def test_a_large_weight_is_stored_for_all_regions(dump: Path) -> None:
    """The commands that run the models need it. The second region reads the transposed weight."""
    layer = torch.nn.Linear(16, 16)

    def twice(x: torch.Tensor) -> torch.Tensor:
        return layer(torch.sort(layer(x), stable=True).values)

    debug(twice, dump, tensor_limit=600)(torch.randn(4, 16))
    for region in reading.find_run(dump).graphs[0].regions:
        weight = next(array for array in region.recorded("input").values() if array.shape == (16, 16))
        torch.testing.assert_close(torch.from_numpy(weight.copy()), layer.weight.detach())


def test_a_tensor_too_large_for_protobuf_goes_to_a_file_of_its_own(dump: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "PROTOBUF_LIMIT", 1000)
    debug(lambda x: x + 1, dump, tensor_limit=-1)(torch.arange(1000.0))
    (folder,) = (dump / "latest").glob("graph_*/inference/region_0/test_data_set_0")
    proto = onnx.load_tensor(str(folder / "input_0.pb"))
    assert proto.data_location == onnx.TensorProto.EXTERNAL
    stored = numpy_helper.to_array(proto, base_dir=str(folder))
    torch.testing.assert_close(torch.from_numpy(stored.copy()), torch.arange(1000.0))
    (region,) = reading.find_run(dump).graphs[0].regions
    reading.write_data_set(dump / "copy", "input", region.recorded("input"))
    assert onnx.load_tensor(str(dump / "copy" / "input_0.pb")).data_location == onnx.TensorProto.EXTERNAL
    (copied,) = dict(reading.read_data_set(dump / "copy", "input")).values()
    np.testing.assert_array_equal(copied, stored)


def test_a_full_disk_does_not_change_the_result(
    dump: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    replace = os.replace
    written = []

    def replace_until_full(source: object, target: object) -> None:
        written.append(target)
        if len(written) > 4:
            raise OSError(28, "disk full")
        replace(source, target)

    monkeypatch.setattr(os, "replace", replace_until_full)
    settings = {"backend": "onnx_debug", "options": {"dump_dir": str(dump)}}
    assert_same_as_eager(Classifier(), torch.randn(3, 8), settings=settings)
    assert caplog.text.count("disk full") == 1
    assert not list(dump.rglob("*.tmp"))


def test_an_unwritable_folder_is_a_warning_with_the_remedy(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("")
    settings = {"backend": "onnx_debug", "options": {"dump_dir": str(in_the_way / "dump")}}
    assert_same_as_eager(Classifier(), torch.randn(3, 8), settings=settings)
    assert str(in_the_way) in caplog.text and "dump_dir" in caplog.text


def test_records_of_the_aot_autograd_compiler(dump: Path) -> None:
    records: list = []
    backend = aot_autograd(
        fw_compiler=dynamo_backends.onnx_compiler(debug=True, dump_dir=str(dump), opset=18, record=records),
        decompositions=dynamo_backends.decomposition_table(),
    )
    model = Classifier()
    x = torch.randn(3, 8)
    expected = model(x)
    actual = torch.compile(model, backend=backend, fullgraph=True)(x)
    torch.testing.assert_close(actual, expected)
    actual.sum().backward()
    assert [record.direction for record in records] == ["forward", "backward"]
    assert records[0].index == records[1].index
    for record in records:
        assert record.comparison.verdict == "ok"
        assert record.onnx_model.opset_import[0].version == 18
        (run,) = record.runs
        assert len(run.inputs) == len(list(record.graph_module.graph.find_nodes(op="placeholder")))
    torch.testing.assert_close(records[0].runs[0].outputs[0], expected.detach())


def test_records_without_debug_keep_the_runs_and_do_not_compare() -> None:
    records: list = []
    compiler = dynamo_backends.onnx_compiler(record=records)
    backend = aot_autograd(
        fw_compiler=compiler,
        partition_fn=compiler.partition_fn,
        decompositions=dynamo_backends.decomposition_table(),
    )
    function = torch.compile(Classifier(), backend=backend)
    function(torch.randn(3, 8)).sum().backward()
    function(torch.randn(3, 8)).sum().backward()
    assert [len(record.runs) for record in records] == [2, 2]
    assert all(record.comparison is None for record in records)


@pytest.mark.parametrize("debug", [False, True])
def test_a_copy_of_a_model_records_to_the_same_list(debug: bool, dump: Path) -> None:
    records: list = []
    compiler = dynamo_backends.onnx_compiler(debug=debug, dump_dir=str(dump), record=records)
    backend = aot_autograd(
        fw_compiler=compiler,
        partition_fn=compiler.partition_fn,
        decompositions=dynamo_backends.decomposition_table(),
    )
    model, x = Classifier(), torch.randn(3, 8)
    untouched = copy.deepcopy(torch.compile(model, backend=backend))
    first = torch.compile(model, backend=backend)
    first(x).sum().backward()
    assert [(record.direction, len(record.runs)) for record in records] == [("forward", 1), ("backward", 1)]
    twin = copy.deepcopy(first)
    with torch.no_grad():
        next(twin.parameters()).zero_()
    for function in (twin, untouched):
        before = len(records)
        expected = copy.deepcopy(function._orig_mod)(x)
        torch.testing.assert_close(function(x), expected)
        runs = [run for record in records for run in record.runs]
        torch.testing.assert_close(runs[-1].outputs[0], expected.detach())
        assert len(records) == before + 1  # the copy is a module of its own to Dynamo


def test_two_models_share_the_run_folder(dump: Path) -> None:
    for model in (Classifier(), torch.nn.Linear(8, 8)):
        with torch.no_grad():
            debug(model, dump)(torch.randn(3, 8))
    first, second = graphs(dump)
    assert first["index"] < second["index"]
    assert len([path for path in dump.iterdir() if path.name.startswith("run_")]) == 1


def test_a_model_that_onnx_runtime_refuses_is_dumped_with_what_it_said(
    dump: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each node by itself is taken; the region's model is not."""
    create = onnxruntime.InferenceSession

    def picky(model: bytes, options: object, **kwargs: object) -> object:
        operators = [node.op_type for node in onnx.load_model_from_string(model).graph.node]
        if {"Sinh", "Cosh"} <= set(operators):
            raise RuntimeError("no sinh")
        return create(model, options, **kwargs)

    monkeypatch.setattr(onnxruntime, "InferenceSession", picky)
    with torch.no_grad():
        x = torch.randn(4)
        torch.testing.assert_close(debug(lambda x: x.sinh().cosh(), dump)(x), x.sinh().cosh())
    (said,) = (dump / "latest").glob("graph_*/inference/rejected/*.txt")
    assert "no sinh" in said.read_text()
    model = onnx.load(str(said.with_suffix(".onnx")))
    assert [node.op_type for node in model.graph.node] == ["Sinh", "Cosh"]
