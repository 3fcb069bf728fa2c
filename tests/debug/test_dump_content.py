"""The dump names the user's code: parameters, inputs, lines, and where Dynamo's graphs begin and end."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime.backend
import pytest
import torch
from onnx import numpy_helper
from onnx.backend.test.case.test_case import TestCase
from onnx.backend.test.runner import Runner
from onnxscript import opset18 as op
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from dynamo_backends import decomposition_table, onnx_compiler
from dynamo_backends.dumps.reading import DumpedGraph, DumpedRegion, DumpedRun, find_run
from dynamo_backends.dumps.schema import DynamoGraphEntry, LineEntry
from dynamo_backends.exporter.converters import CONVERTERS
from dynamo_backends.graphs.locations import is_user_file, short_file


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(4, 4)
        self.register_buffer("scale", torch.full((4,), 0.5))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.dense(hidden)) * self.scale


class Encoder(nn.Module):
    """Blocks in a list, and a head whose weight is tied to the first block's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.layers[0].dense.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            input_ids = layer(input_ids)
        return self.head(input_ids)


PARAMETERS = {"layers.0.dense.weight", "layers.0.dense.bias", "layers.1.dense.weight", "layers.1.dense.bias"}
BUFFERS = {"layers.0.scale", "layers.1.scale"}


@pytest.fixture
def compiled(tmp_path: Path) -> Callable[..., Any]:
    def compile_it(model: Any) -> Any:
        return torch.compile(model, backend="onnx_debug", options={"dump_dir": str(tmp_path)})

    return compile_it


def graph_of(folder: Path, direction: str) -> DumpedGraph:
    [graph] = [graph for graph in find_run(folder).graphs if graph.direction == direction]
    return graph


def names_of(graph: DumpedGraph) -> set[str]:
    return set(graph.entry.names.values())


def rows_of(graph: DumpedGraph) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((graph.folder / "side_by_side.json").read_text())["rows"]
    return rows


def inputs_of(graph: DumpedGraph) -> set[str]:
    return {value.name for region in graph.regions for value in onnx.load(region.model).graph.input}


def test_parameters_bear_the_users_names_in_training(compiled: Callable[..., Any], tmp_path: Path) -> None:
    compiled(Encoder())(torch.randn(2, 4)).sum().backward()
    forward, backward = graph_of(tmp_path, "forward"), graph_of(tmp_path, "backward")
    assert names_of(forward) == {*PARAMETERS, *BUFFERS, "input_ids"}
    assert inputs_of(forward) > PARAMETERS | BUFFERS
    assert names_of(backward) >= {"layers.1.dense.weight", "input_ids", "grad of result 0"}
    assert "layers.1.dense.weight" in inputs_of(backward)
    gradients = {row["user_name"] for row in rows_of(backward) if row["user_name"].startswith("grad of layers")}
    assert gradients == {f"grad of {name}" for name in PARAMETERS}
    code = (backward.folder / "aten.py").read_text()
    assert "# grad of layers.1.dense.weight" in code and '",  # layers.1.dense.weight' in code
    assert "AOTInput" not in code and "AOTOutput" not in code
    joint = (backward.folder.parent / "joint.py").read_text()
    assert "# layers.0.scale" in joint and "# grad of layers.0.dense.bias" in joint
    assert "# layers.0.dense.weight" in (backward.folder.parent / "dynamo.py").read_text()


def test_frozen_weights_bear_the_users_names(compiled: Callable[..., Any], tmp_path: Path) -> None:
    with torch.no_grad():
        compiled(Encoder())(torch.randn(2, 4))
    graph = graph_of(tmp_path, "inference")
    assert inputs_of(graph) >= PARAMETERS | BUFFERS
    recorded = graph.regions[0].recorded("input")
    assert recorded.keys() >= PARAMETERS | BUFFERS
    session = onnxruntime.InferenceSession(graph.regions[0].model)
    [result] = session.run(None, recorded)
    np.testing.assert_allclose(result, next(iter(graph.regions[0].recorded("output").values())), rtol=1e-5, atol=1e-6)
    rows = {row["user_name"] for row in rows_of(graph)}
    assert rows >= PARAMETERS | BUFFERS | {"input_ids"}


def test_names_of_what_a_function_closes_over(compiled: Callable[..., Any], tmp_path: Path) -> None:
    first, pair = Encoder(), [Block(), nn.Linear(4, 4)]

    def step(batch: dict[str, torch.Tensor], *more: torch.Tensor) -> torch.Tensor:
        return pair[1](first(batch["ids"])) + more[0]

    compiled(step)({"ids": torch.randn(2, 4)}, torch.ones(4)).sum().backward()
    names = names_of(graph_of(tmp_path, "forward"))
    assert names >= {"first.layers.0.dense.weight", "pair[1].weight", "batch['ids']", "more[0]"}


class Ambiguous(nn.Module):
    """An input has the name of a parameter, a parameter that of a node of the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))
        self.tanh = nn.Parameter(torch.randn(4))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return torch.tanh(weight * self.weight) + self.tanh


def test_names_that_two_values_have(compiled: Callable[..., Any], tmp_path: Path) -> None:
    model, x = Ambiguous(), torch.randn(2, 4)
    result = compiled(model)(x)
    torch.testing.assert_close(result, model(x))
    graph = graph_of(tmp_path, "forward")
    assert graph.verdict == "ok"
    assert {"weight", "self.weight", "tanh"} == names_of(graph)
    model_proto = onnx.load(graph.regions[0].model)
    onnx.checker.check_model(model_proto)
    values = [item.name for item in model_proto.graph.input] + [o for n in model_proto.graph.node for o in n.output]
    assert len(set(values)) == len(values) and "tanh" in values


def test_names_under_plain_aot_autograd(tmp_path: Path) -> None:
    compiler = onnx_compiler(debug=True, dump_dir=str(tmp_path))
    backend = aot_autograd(
        fw_compiler=compiler, partition_fn=compiler.partition_fn, decompositions=decomposition_table()
    )
    torch.compile(Encoder(), backend=backend)(torch.randn(2, 4)).sum().backward()
    forward, backward = graph_of(tmp_path, "forward"), graph_of(tmp_path, "backward")
    assert names_of(forward) == {*PARAMETERS, *BUFFERS, "input_ids"}
    assert {row["user_name"] for row in rows_of(backward)} >= {f"grad of {name}" for name in PARAMETERS}
    [entry] = find_run(tmp_path).dynamo_graphs
    assert entry.where.function == "forward" and not entry.end.reason.startswith("graph break")


def dynamo_graphs(folder: Path) -> list[DynamoGraphEntry]:
    return find_run(folder).dynamo_graphs


def line_with(text: str) -> int:
    lines = Path(__file__).read_text().splitlines()
    return 1 + next(i for i, line in enumerate(lines) if text in line)


def broken(x: torch.Tensor) -> torch.Tensor:
    y = torch.sin(x)
    print("in the middle")  # the graph ends here
    return torch.cos(y) * 2  # what goes on


def test_where_graphs_begin_and_end(compiled: Callable[..., Any], tmp_path: Path) -> None:
    compiled(broken)(torch.randn(3))
    first, second = dynamo_graphs(tmp_path)
    here, begins, ends = short_file(__file__), line_with("def broken"), line_with("# the graph ends here")
    assert first.where == LineEntry("broken", here, begins, f"{here}:{begins}")
    assert first.called_from.file == here
    assert first.end.file == here and first.end.line == ends
    assert first.end.reason.startswith("graph break: ") and "`print`" in first.end.reason
    assert "\n" not in first.end.reason and "Hint" in first.end.details
    assert second.where == LineEntry("broken", here, ends, f"{here}:{ends}")
    assert (second.end.file, second.end.line) == (here, line_with("# what goes on"))
    assert not second.end.reason.startswith("graph break") and not second.end.details
    assert first.given_up is False is second.given_up


def test_an_attempt_that_dynamo_gave_up_says_so(compiled: Callable[..., Any], tmp_path: Path) -> None:
    function = compiled(lambda x, factor: torch.sin(x) * round(factor))
    for factor in (1.5, 2.5, 3.75):
        function(torch.randn(3), factor)
    graphs = dynamo_graphs(tmp_path)
    given_up = [graph for graph in graphs if graph.given_up]
    assert given_up
    used = {graph.index for graph in find_run(tmp_path).graphs}
    assert {graph.index for graph in graphs if not graph.given_up} == used


def test_a_stage_that_changed_nothing_has_no_file(compiled: Callable[..., Any], tmp_path: Path) -> None:
    with torch.no_grad():
        compiled(Encoder())(torch.randn(2, 4))
    run = find_run(tmp_path)
    [dynamo], [graph] = dynamo_graphs(tmp_path), run.graphs
    stages = {stage.name: stage for stage in [*dynamo.stages, *graph.entry.stages]}
    assert list(stages) == ["dynamo", "pre_grad", "joint", "aten", "post_grad"]
    assert stages["pre_grad"].file is None and stages["pre_grad"].same_as == "dynamo"
    assert stages["aten"].file is None and stages["aten"].same_as == "joint"
    assert stages["joint"].nodes == graph.entry.nodes
    files = [stage.file for stage in stages.values() if stage.file is not None]
    assert sorted(files) == sorted(code_of(run))
    texts = [(run.folder / file).read_text() for file in files]
    assert len(set(texts)) == len(texts)


def code_of(run: DumpedRun) -> Iterator[str]:
    names = ("dynamo.py", "pre_grad.py", "joint.py", "aten.py", "post_grad.py")
    return (path.relative_to(run.folder).as_posix() for path in run.folder.rglob("*.py") if path.name in names)


def test_the_time_of_compiling_by_stage(compiled: Callable[..., Any], tmp_path: Path) -> None:
    compiled(Encoder())(torch.randn(2, 4))
    seconds = graph_of(tmp_path, "forward").entry.seconds
    assert set(seconds) == {"passes", "split", "export", "onnx_passes", "session"}
    assert seconds["export"] > 0 and seconds["session"] > 0


def test_a_session_can_be_made_again_from_the_manifest(compiled: Callable[..., Any], tmp_path: Path) -> None:
    compiled(Encoder())(torch.randn(2, 4))
    region = graph_of(tmp_path, "forward").regions[0]
    session = region.entry.session
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = session.threads
    options.graph_optimization_level = getattr(onnxruntime.GraphOptimizationLevel, session.graph_optimization_level)
    for key, value in session.config.items():
        options.add_session_config_entry(key, value)
    made = onnxruntime.InferenceSession(
        region.optimized_model,
        options,
        providers=session.providers,
        provider_options=session.provider_options,
        disabled_optimizers=session.disabled_optimizers or None,
    )
    for result, expected in zip(
        made.run(None, region.recorded("input")), region.recorded("output").values(), strict=True
    ):
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)


LIBRARY = """
import torch

def activate(x):
    return torch.tanh(x)
"""


def test_a_node_has_the_users_line_and_the_whole_stack(
    compiled: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site-packages" / "a_library_of_others.py"
    package.parent.mkdir()
    package.write_text(LIBRARY)
    monkeypatch.syspath_prepend(str(package.parent))
    from a_library_of_others import activate  # type: ignore[import-not-found]

    def function(x: torch.Tensor) -> torch.Tensor:
        return activate(x) + 1  # the user's own line

    compiled(function)(torch.randn(3))
    graph = graph_of(tmp_path, "inference")
    [row] = [row for row in rows_of(graph) if row["name"] == "tanh"]
    own = f"{short_file(__file__)}:{line_with('# the user' + chr(39) + 's own line')}"
    assert row["source"] == own
    outer, inner = row["stack"]
    assert (outer["user"], inner["user"]) == (True, False)
    assert outer["function"] == "function" and outer["code"].startswith("return activate(x)")
    assert inner["file"] == str(package) and inner["code"] == "return torch.tanh(x)"
    code = (graph.folder.parent / "dynamo.py").read_text()
    assert re.search(rf"^ *# .*{own} .*: return activate\(x\) \+ 1", code, re.M)
    assert f"{package.name}:5, called from {own}" in "\n".join(table_of(graph)[1])
    [node] = [node for node in onnx.load(graph.regions[0].model).graph.node if node.op_type == "Tanh"]
    assert {item.key: item.value for item in node.metadata_props}["source"] == own


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        (__file__, True),
        ("<stdin>", True),
        ("/tmp/ipykernel_12/3.py", True),
        (torch.nn.modules.linear.__file__, False),
        (json.__file__, False),
        ("/env/lib/python3.11/site-packages/transformers/models/bert.py", False),
        ("<frozen importlib._bootstrap>", False),
        ("<eval_with_key>.0", False),
    ],
)
def test_which_files_are_the_users(file: str, expected: bool) -> None:
    assert is_user_file(file) is expected


def test_code_of_exec_has_the_line_of_its_function(compiled: Callable[..., Any], tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    exec("\ndef function(x):\n    return (x + 1).sin()", names)
    compiled(names["function"])(torch.randn(2))
    assert {row["source"] for row in rows_of(graph_of(tmp_path, "inference")) if row["region"] is not None} == {
        "<string>:2"
    }


def test_a_weight_is_on_the_disk_once(compiled: Callable[..., Any], tmp_path: Path) -> None:
    model = compiled(Encoder())
    model(torch.randn(2, 4)).sum().backward()
    with torch.no_grad():
        model(torch.randn(2, 4))
    found: dict[bytes, set[int]] = {}
    for path in find_run(tmp_path).folder.rglob("*.pb"):
        found.setdefault(path.read_bytes(), set()).add(path.stat().st_ino)
    assert all(len(files) == 1 for files in found.values())
    weights = [graph.regions[0].recorded("input")["layers.1.dense.weight"] for graph in find_run(tmp_path).graphs]
    assert len(weights) == 3 and all(np.array_equal(weights[0], other) for other in weights)


def sorted_in_between(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(torch.sort(torch.tanh(x), stable=True).values)


def test_what_pytorch_ran_is_compared_and_in_the_table(compiled: Callable[..., Any], tmp_path: Path) -> None:
    compiled(sorted_in_between)(torch.randn(3, 4))
    graph = graph_of(tmp_path, "inference")
    rows = {row["name"]: row for row in rows_of(graph)}
    assert [rows[name]["region"] for name in ("tanh", "sort__0", "tanh_1")] == [0, None, 1]
    assert rows["sort__0"]["error"] is not None and rows["sort__0"]["mark"] in "=~"
    text = (graph.folder / "side_by_side.txt").read_text()
    [line] = [line for line in text.splitlines() if " sort__0 " in line]
    assert " PyTorch " in line


def table_of(graph: DumpedGraph) -> tuple[str, list[str]]:
    """The legend of a graph's table, and the lines below the head."""
    legend, _, table = (graph.folder / "side_by_side.txt").read_text().partition("\n\n")
    return legend, table.splitlines()[2:]


def test_a_table_starts_with_what_was_computed_and_explains_its_marks(
    compiled: Callable[..., Any], tmp_path: Path
) -> None:
    compiled(Encoder())(torch.randn(2, 4)).sum().backward()
    forward, backward = graph_of(tmp_path, "forward"), graph_of(tmp_path, "backward")
    legend, lines = table_of(forward)
    assert lines[0].split()[0] == "0" and "primals" not in lines[0]
    assert any(line.split()[:2] == ["primals_1", "layers.0.dense.weight"] for line in lines)
    for explained in (
        "'='",
        "'~'",
        "'!'",
        "'?'",
        "' '",
        "'>'",
        "PyTorch",
        "NaN/Inf",
        "limit",
        "share",
        "step",
        "region",
    ):
        assert explained in legend
    assert any("> (grad of layers.0.dense.bias)" in line for line in table_of(backward)[1])


def test_a_wrong_gradient_is_called_as_the_user_calls_the_parameter(
    compiled: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CONVERTERS, torch.ops.aten.mul.Tensor, wrong_product)
    compiled(Exponential())(torch.randn(4)).sum().backward()
    entry = graph_of(tmp_path, "backward").entry
    assert (entry.blame.value, entry.blame.user_name) == ("mul", "grad of rate")


class Exponential(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.exp(self.rate) + x


def wrong_product(first: Any, second: Any) -> Any:
    return op.Mul(op.Mul(first, second), 1.01)


WITHOUT_LIBRARIES = """
import runpy, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "onnx_ir", "onnxscript", "dynamo_backends"):
            raise ImportError(f"{name} is not to be imported")

sys.meta_path.insert(0, Refuse())
path, *sys.argv[1:] = sys.argv[1:]
runpy.run_path(path, run_name="__main__")
"""


def run_repro(region: DumpedRegion, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the ``repro.py`` of a region where there are no other libraries than onnxruntime, onnx and numpy."""
    command = [sys.executable, "-c", WITHOUT_LIBRARIES, str(region.folder / "repro.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


class Mixed(nn.Module):
    """Weights as constants of the session, an embedding table, bfloat16, booleans and numbers."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4, dtype=dtype)
        self.dense = nn.Linear(4, 4, dtype=dtype)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        hidden = self.dense(self.table(ids))
        return hidden, hidden > 0, hidden.argmax(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_repro_runs_the_model_without_pytorch(compiled: Callable[..., Any], tmp_path: Path, dtype: torch.dtype) -> None:
    with torch.no_grad():
        compiled(Mixed(dtype))(torch.tensor([[1, 2], [3, 4]]))
    region = graph_of(tmp_path, "inference").regions[0]
    assert region.entry.constants
    done = run_repro(region)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert done.stdout.splitlines()[-1] == "right"
    assert run_repro(region, str(region.model)).returncode == 0


def test_repro_tells_of_other_results(compiled: Callable[..., Any], tmp_path: Path) -> None:
    compiled(Encoder())(torch.randn(2, 4)).sum().backward()
    for direction in ("forward", "backward"):
        region = graph_of(tmp_path, direction).regions[0]
        assert run_repro(region).returncode == 0
        path = region.folder / "test_data_set_0" / "output_0.pb"
        tensor = onnx.load_tensor(path)
        changed = numpy_helper.from_array(numpy_helper.to_array(tensor) + np.float32(0.5), tensor.name)
        path.unlink()
        path.write_bytes(changed.SerializeToString())
        done = run_repro(region)
        assert done.returncode == 1
        assert f": 0.5 at {tensor.name}" in done.stdout
        assert done.stdout.splitlines()[-1] == f"differs: {tensor.name}"


@pytest.mark.parametrize("switches", ["--no-optimize", "--threads 1", "--runs 3", "--provider cpu"])
def test_switches_of_repro(compiled: Callable[..., Any], tmp_path: Path, switches: str) -> None:
    compiled(Encoder())(torch.randn(2, 4)).sum().backward()
    for direction in ("forward", "backward"):
        region = graph_of(tmp_path, direction).regions[0]
        done = run_repro(region, *switches.split())
        assert done.returncode == 0 and done.stdout.splitlines()[-1] == "right", done
        assert run_repro(region, "--provider", "no such").returncode == 2


def test_repro_tells_of_inputs_that_were_not_stored(tmp_path: Path) -> None:
    options = {"dump_dir": str(tmp_path), "tensor_limit": 30}
    torch.compile(broken, backend="onnx_debug", options=options)(torch.randn(30))
    done = run_repro(find_run(tmp_path).graphs[0].regions[0])
    assert done.returncode == 2 and "tensor_limit" in done.stdout


def test_onnx_own_tools_run_the_data_set(
    compiled: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checker, and the runner of ``onnx.backend.test``, which takes ``input_<i>.pb`` for the i-th input."""
    # ONNX Runtime's backend for it skips models with domains of their own otherwise.
    monkeypatch.setattr(onnxruntime.backend.backend.OnnxRuntimeBackend, "allowReleasedOpsetsOnly", False)
    model = compiled(Encoder())
    model(torch.randn(2, 4)).sum().backward()
    folders = []
    for graph in find_run(tmp_path).graphs:
        region = graph.regions[0]
        for path in (region.model, region.optimized_model):
            onnx.checker.check_model(path, full_check=True)
            proto = onnx.load(path)
            for kind, values in (("input", proto.graph.input), ("output", proto.graph.output)):
                files = [region.folder / "test_data_set_0" / f"{kind}_{i}.pb" for i in range(len(values))]
                assert [onnx.load_tensor(file).name for file in files] == [value.name for value in values]
            folder = tmp_path / f"case_{len(folders)}"  # the runner looks for model.onnx
            folder.mkdir()
            shutil.copy(path, folder / "model.onnx")
            shutil.copytree(region.folder / "test_data_set_0", folder / "test_data_set_0")
            folders.append(folder)
    suite = Runner(onnxruntime.backend, __name__)
    for folder in folders:
        case = TestCase(f"test_{folder.name}", folder.name, None, str(folder), None, None, "simple", 1e-5, 1e-6)
        suite._add_model_test(case, "Simple")
    suite.include("^test_case_.*_cpu$")
    result = unittest.TestResult()
    suite.test_suite.run(result)
    skipped = {str(test).split()[0]: why for test, why in result.skipped}
    assert [skipped.get(f"test_{folder.name}_cpu", "") for folder in folders] == [""] * 4
    assert not result.errors and not result.failures, (result.errors, result.failures)


def test_a_model_that_no_pass_changed_is_written_once(compiled: Callable[..., Any], tmp_path: Path) -> None:
    compiled(lambda x: torch.sin(x))(torch.randn(3))
    region = graph_of(tmp_path, "inference").regions[0]
    stages = {stage.name: stage for stage in region.entry.stages}
    assert stages["onnx_optimized"].file is None and stages["onnx_optimized"].same_as == "onnx"
    assert region.optimized_model == region.model
    assert not (region.folder / "model.optimized.onnx").exists()
    assert stages["session"].file is not None and stages["session"].nodes > 0
    assert run_repro(region).returncode == 0


class Wrapped(nn.Module):
    """A model with a decorated ``forward``, as in transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(4, 4)

    def forward(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
        return self.dense(args[0]) + kwargs["bias"]


def test_names_of_what_comes_by_position_and_by_keyword(compiled: Callable[..., Any], tmp_path: Path) -> None:
    compiled(Wrapped())(torch.randn(2, 4), bias=torch.ones(4))
    assert names_of(graph_of(tmp_path, "forward")) == {"dense.weight", "dense.bias", "args[0]", "bias"}


def test_a_module_of_pytorch_by_itself(compiled: Callable[..., Any], tmp_path: Path) -> None:
    compiled(nn.Linear(4, 4))(torch.randn(2, 4))
    assert names_of(graph_of(tmp_path, "forward")) == {"weight", "bias", "input"}
    [entry] = dynamo_graphs(tmp_path)
    assert entry.where.function == "forward" and entry.where.file == "torch/nn/modules/linear.py"


def test_names_of_a_list_of_modules(compiled: Callable[..., Any], tmp_path: Path) -> None:
    compiled(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)))(torch.randn(2, 4))
    names = names_of(graph_of(tmp_path, "forward"))
    assert names == {"0.weight", "0.bias", "2.weight", "2.bias", "input"}


def test_a_read_me_says_what_is_where(compiled: Callable[..., Any], tmp_path: Path) -> None:
    compiled(Encoder())(torch.randn(2, 4)).sum().backward()
    run = find_run(tmp_path)
    text = (run.folder / "README.txt").read_text()
    assert len(text.splitlines()) <= 45 and max(map(len, text.splitlines())) <= 120
    assert run.folder.name in text
    for path in (path for path in run.folder.rglob("*") if path.is_file()):
        name = path.relative_to(run.folder).as_posix()
        is_named = path.name in text or path.suffix in (".pb", ".diff") or path.name == "README.txt"
        assert is_named, f"{name} is not explained"


def test_names_of_a_compiled_optimizer_step(tmp_path: Path) -> None:
    """Dynamo lifts the parameters, which come before what the step is called with."""
    layer = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=torch.tensor(0.1))
    for parameter in layer.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.compile(optimizer.step, backend="onnx_debug", options={"dump_dir": str(tmp_path)})()
    [graph] = json.loads((tmp_path / "latest" / "manifest.json").read_text())["graphs"]
    names = list(graph["names"].values())
    assert graph["verdict"] == "ok"
    assert names[2:] == ["param_groups[0]['lr']", *(f"param_groups[0]['params'][{i}].grad" for i in range(2))]
