"""``bisect GRAPH``: the place of a planted fault, and the smallest model that shows it, also in a fresh process."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
import torch.ao.quantization.fx._decomposed
from conftest import compiled
from dumped import graph_entry, region_entry, write_manifest
from onnx import TensorProto, helper
from onnxscript import opset18 as op
from test_planted_faults import Damped, Perceptron, line_of, scale, scale_onnx, silu_lines
from torch import nn

from dynamo_backends import operator_set, register_converter, unregister_converter
from dynamo_backends.cli import main
from dynamo_backends.common import python_process
from dynamo_backends.dumps import bisection, candidate_runs
from dynamo_backends.dumps.bisect_graph import bisect, bisect_file
from dynamo_backends.dumps.bisection import Bisection, delta_debug
from dynamo_backends.dumps.candidate_runs import CandidateOutcome, CandidateRunner
from dynamo_backends.dumps.cut_folder import CutModel, run_repro, write_cut
from dynamo_backends.dumps.model_judging import Part
from dynamo_backends.dumps.model_sessions import PLAIN, ModelSession
from dynamo_backends.dumps.models import load_ir, load_model
from dynamo_backends.dumps.optimizers import OPTIMIZERS
from dynamo_backends.dumps.reading import DumpedRun, DumpError, find_run, read_data_set, read_tensor
from dynamo_backends.dumps.schema import Settings
from dynamo_backends.dumps.submodels import Parts
from dynamo_backends.exporter import decompositions, translate
from dynamo_backends.exporter.converters import CONVERTERS
from dynamo_backends.graphs.locations import short_file
from dynamo_backends.runtime import kernel_faults, settings
from passes import Pass, PassContext

aten = torch.ops.aten

WEIGHTS = (torch.arange(32 * 32) * 37 % 255 - 127).to(torch.int8).reshape(32, 32)
dequantize = torch.ops.quantized_decomposed.dequantize_per_tensor.default


def dumped(function: Callable[..., object], *args: torch.Tensor, dump: Path, train: bool = False) -> Path:
    """A dump of one compared run."""
    options = {"dump_dir": str(dump)}
    with torch.set_grad_enabled(train):
        result = compiled(function, backend="onnx_debug", options=options)(*args)
        if train:
            result.square().sum().backward()  # type: ignore[attr-defined]
    return dump


def bisected(dump: Path, graph: str = "0", **settings: object) -> Bisection:
    run = find_run(dump)
    index = run.graphs[0].index  # graphs are numbered through the process
    return bisect(run, graph.replace("0", str(index), 1), **settings)  # type: ignore[arg-type]


def fails_without_our_libraries(folder: Path) -> str:
    """The output of ``repro.py`` in a process without PyTorch; it must exit with 1."""
    script = (
        "import runpy, sys\n"
        "for name in ('torch', 'onnx_ir', 'dynamo_backends', 'passes'): sys.modules[name] = None\n"
        "runpy.run_path('repro.py', run_name='__main__')\n"
    )
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    ended = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 1, ended
    return ended.stdout


def assert_cut(found: Bisection, *operators: str) -> None:
    """The cut has these operators, and fails in a fresh process, also without our libraries."""
    assert found.cut is not None, found
    assert tuple(found.cut.operators) == operators
    assert found.cut.confirmed, found.cut
    fails_without_our_libraries(found.cut.folder)


def test_a_translation_that_is_wrong_in_the_middle_of_twelve_layers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls = 0

    def wrong_once(x: ir.Value) -> object:
        nonlocal calls
        calls += 1
        result = op.Mul(x, op.Sigmoid(x))
        return op.Mul(result, 1.01) if calls == 8 else result  # the first call asks whether it can be translated

    monkeypatch.setitem(CONVERTERS, aten.silu.default, wrong_once)
    dump = dumped(Damped(), torch.randn(4, 8), dump=tmp_path)
    entry = find_run(dump).graphs[0].entry
    blame = entry.blame
    assert re.search(r"error 0\.\d+ at element \[\d, \d\], tolerance \S+e-0\d", entry.note), entry.note
    assert blame.elements is not None and blame.elements.elements == 32
    assert blame.code == f"tests/dumps/test_bisect_graph.py:{wrong_once.__code__.co_firstlineno}"
    fields = {name: value for name, value in dataclasses.asdict(blame).items() if name not in ("elements", "code")}
    assert fields == {
        "value": "silu_6",
        "user_name": "",
        "gradients": [],
        "region": 0,
        "source": silu_lines(),
        "module": "",
        "more": 0,
        "kind": "node",
        "name": "",
        "stage": "onnx",
        "cause": "",
    }
    found = bisected(dump)
    assert (found.place, found.value, found.cause, found.source) == (
        "translation",
        "silu_6",
        "aten.silu.default",
        silu_lines(),
    )
    assert_cut(found, "Sigmoid", "Mul", "Constant", "Mul")
    assert found.trials[-1].error == pytest.approx(0.005, rel=0.5)


def test_a_weight_above_the_limit_of_tensors(converters: Callable[..., None], tmp_path: Path) -> None:
    """The commands that run a dumped model have its weights, whatever their size."""
    converters(aten.silu, lambda x: op.Mul(op.Mul(x, op.Sigmoid(x)), 1.1))
    model = nn.Sequential(nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 64))
    options = {"dump_dir": str(tmp_path), "tensor_limit": 64 * 64}
    compiled(model, backend="onnx_debug", options=options)(torch.randn(2, 64)).sum().backward()
    found = bisected(tmp_path)
    assert (found.place, found.cause) == ("translation", "aten.silu.default")
    assert main(["profile", found.graph, "-d", str(tmp_path), "--runs", "1"]) == 0
    for graph in find_run(tmp_path).graphs:
        for item in graph.regions:
            done = subprocess.run([sys.executable, item.folder / "repro.py"], capture_output=True, text=True)
            assert done.returncode in (0, 1), done


def test_the_reference_of_a_node_is_written_only_where_it_is_to_blame(tmp_path: Path) -> None:
    dump = dumped(Damped(), torch.randn(4, 8), dump=tmp_path)
    (graph,) = find_run(dump).graphs
    assert graph.entry.blame is None
    assert not list(dump.rglob("culprit"))


def test_a_wrong_constant_that_was_folded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No ONNX node is left of it."""
    fold = translate.fold_constants

    def fold_wrongly(model: ir.Model) -> ir.Model:
        fold(model)
        for value in model.graph.initializers.values():
            if value.name == "arange":
                value.const_value = ir.tensor(value.const_value.numpy() + 1.0, name="arange")
        return model

    monkeypatch.setattr("dynamo_backends.pipeline.emission.fold_constants", fold_wrongly)

    def function(x: torch.Tensor) -> torch.Tensor:
        return (x + torch.arange(8.0)).sin()  # the range is folded

    found = bisected(dumped(function, torch.randn(4, 8), dump=tmp_path))
    assert (found.place, found.value) == ("translation", "arange")
    assert found.source == line_of_here("the range is folded")
    assert_cut(found, "Identity")


def line_of_here(text: str) -> str:
    lines = Path(__file__).read_text().splitlines()
    return f"{short_file(__file__)}:{1 + next(i for i, line in enumerate(lines) if text in line)}"


def test_operands_that_an_onnx_pass_swaps(planted: Callable[[Pass], None], tmp_path: Path) -> None:
    def swap(model: ir.Model, context: PassContext) -> int:
        nodes = [node for node in model.graph if node.op_type == "Sub"]
        for node in nodes:
            first, second = node.inputs
            node.replace_input_with(0, second)
            node.replace_input_with(1, first)
        return len(nodes)

    planted(Pass("onnx.wrong", "Planted by a test.", swap))
    found = bisected(dumped(lambda x, y: (x.sin() - y.cos()).tanh(), torch.randn(3), torch.randn(3), dump=tmp_path))
    assert (found.place, found.value, found.cause) == ("ONNX pass", "sub", "pass onnx.wrong")
    assert_cut(found, "Sub")
    assert found.cut is not None
    before = onnx.load(found.cut.folder / "before.onnx")
    after = onnx.load(found.cut.folder / "model.onnx")
    assert list(before.graph.node[0].input) == list(after.graph.node[0].input)[::-1]


def test_a_comparison_that_an_onnx_pass_turns(planted: Callable[[Pass], None], tmp_path: Path) -> None:
    """The verdict names the comparison, not the first floating-point value that follows from it."""

    def turn(model: ir.Model, context: PassContext) -> int:
        nodes = [node for node in model.graph if node.op_type == "Greater"]
        for node in nodes:
            node.op_type = "Less"
        return len(nodes)

    planted(Pass("onnx.wrong", "Planted by a test.", turn))

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        turned = x.sin() > y.cos()  # it is turned
        return torch.where(turned, x, y)

    dump = dumped(function, torch.randn(3, 4), torch.randn(3, 4), dump=tmp_path)
    (graph,) = find_run(dump).graphs
    blame = graph.entry.blame
    assert (blame.value, blame.kind, blame.name) == ("gt", "pass", "onnx.wrong")
    assert blame.source == line_of_here("it is turned")
    found = bisected(dump)
    assert (found.place, found.value) == ("ONNX pass", "gt")
    assert_cut(found, "Less")


def test_an_onnx_pass_whose_fault_the_model_damps(planted: Callable[[Pass], None], tmp_path: Path) -> None:
    planted(Pass("onnx.wrong", "Planted by a test.", lambda graph, context: scale_onnx(graph, context, "silu_6")))
    found = bisected(dumped(Damped(), torch.randn(4, 8), dump=tmp_path))
    assert (found.place, found.value, found.source) == ("ONNX pass", "silu_6", silu_lines())
    assert_cut(found, "QuickGelu", "Constant", "Mul")


@pytest.mark.parametrize("stage", ["pre_grad", "joint", "post_grad"])
def test_a_pass_in_pytorch(
    stage: str,
    planted: Callable[[Pass], None],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The run named it; without PyTorch it cannot be cut, but it is said how to confirm it, and shown what it did."""
    planted(Pass(f"{stage}.wrong", "Planted by a test.", scale(stage)))  # type: ignore[arg-type]
    found = bisected(dumped(Perceptron(), torch.randn(5, 8), dump=tmp_path))
    assert (found.place, found.cause, found.cut) == ("FX pass", f"pass {stage}.wrong", None)
    assert found.trials[-1].error > 1e-3
    assert found.source == line_of("silu of the perceptron")
    assert f"options={{'passes': {{'disable': ['{stage}.wrong']}}}}" in found.advice[0]
    assert main(["bisect", "0", "-d", str(tmp_path)]) == 1
    hint = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("try: dynamo-backends passes"))
    assert main(shlex.split(hint.removeprefix("try: dynamo-backends "))) == 0
    printed = capsys.readouterr().out
    assert "No near misses" not in printed and f"{{'disable': ['{stage}.wrong']}}" in printed
    assert "\n  graph 0" in printed and f"/passes/{stage}.wrong.diff" in printed and "\n+" in printed
    assert main(["passes", "--why", f"{stage}.wrong", "-d", str(tmp_path), "--json"]) == 0
    (fired,) = [item for item in json.loads(capsys.readouterr().out) if item["result"]["fired"]]
    assert (
        fired["result"]["fired"] == 1 and Path(fired["diff"]).read_text().splitlines()[0] == f"--- before {stage}.wrong"
    )


def test_a_wrong_decomposition_of_a_gradient(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def wrong(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        sigmoid = torch.sigmoid(x)
        return grad * sigmoid * (1 + x * (1 - sigmoid)) * 1.01

    right = decompositions.whole_table
    table = {aten.silu_backward.default: wrong}
    monkeypatch.setattr(decompositions, "whole_table", lambda opset: {**right(opset), **table})
    found = bisected(dumped(Perceptron(), torch.randn(5, 8), dump=tmp_path, train=True))
    assert found.graph.endswith("backward")
    assert (found.place, found.cause) == ("decomposition", "decomposition of aten.silu_backward.default")


def test_a_kernel_of_onnx_runtime(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A fault of ONNX Runtime itself (docs/upstream.md), without what we do against it."""
    monkeypatch.setattr(kernel_faults, "FAULTS", ())

    @register_converter(aten.logsumexp)
    def plainly(x: ir.Value, dim: list[int], keepdim: bool = False) -> object:
        return op.ReduceLogSumExp(x, op.Constant(value_ints=dim), keepdims=0)

    def function(x: torch.Tensor) -> torch.Tensor:
        return (torch.logsumexp(x.sin() * 2 - x * x, 1) + 1).sin()  # a sum of exponentials

    try:
        found = bisected(dumped(function, torch.tensor([[1e20, 12.0], [1.0, 2.0]]), dump=tmp_path))
    finally:
        unregister_converter(aten.logsumexp)
    assert (found.place, found.value, found.cause) == ("kernel", "logsumexp", "ReduceLogSumExp")
    assert found.source == line_of_here("a sum of exponentials")
    assert_cut(found, "ReduceLogSumExp")


@pytest.fixture
def converters() -> Iterator[Callable[..., None]]:
    """Registers converters, by operator, until the test ends."""
    registered = []

    def register(target: object, converter: Callable[..., object]) -> None:
        registered.append(target)
        register_converter(target)(converter)

    yield register
    for target in registered:
        unregister_converter(target)


def test_a_node_that_cannot_be_computed_in_float64(converters: Callable[..., None], tmp_path: Path) -> None:
    """Neither the reference evaluator nor a float64 kernel has the operator; the verdict is right all the same."""

    def biased(x: ir.Value, approximate: str = "none") -> object:
        return operator_set("com.microsoft").BiasGelu(x, op.Constant(value_floats=[0.01] * 8))

    converters(aten.gelu, biased)
    dump = dumped(lambda x: nn.functional.gelu(x.sin()).tanh(), torch.randn(4, 8), dump=tmp_path)
    found = bisected(dump)
    assert (found.place, found.value, found.cause) == ("translation or kernel", "gelu", "aten.gelu.default")
    assert_cut(found, "Constant", "BiasGelu")
    assert found.trials[-1].error == pytest.approx(0.01, rel=0.5)


def test_a_wrong_node_whose_onnx_nodes_another_node_has_too(converters: Callable[..., None], tmp_path: Path) -> None:
    """The mean and the variance share a ``ReduceMean``, which has the mean's name in its metadata."""

    def biased(x: ir.Value, dim: object = None, correction: object = 1, keepdim: bool = False) -> object:
        difference = op.Sub(x, op.ReduceMean(x, [-1], keepdims=1))
        return op.ReduceMean(op.Mul(difference, difference), [-1], keepdims=1)

    converters(aten.var.correction, biased)

    def function(x: torch.Tensor) -> torch.Tensor:
        return x.mean(-1, keepdim=True) + x.var(-1, keepdim=True)

    found = bisected(dumped(function, torch.randn(4, 8), dump=tmp_path))
    assert (found.place, found.value, found.cause) == ("translation", "var", "aten.var.correction")


def test_a_nan_that_is_masked_later(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(CONVERTERS, aten.relu.default, lambda x: op.Mul(op.Sqrt(x), op.Sqrt(x)))

    def function(x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x.sin())  # a NaN is born
        return torch.where(x.sin() > 0, y, 0.0).cos()

    found = bisected(dumped(function, torch.tensor([[-1.0, 0.5], [1.0, 2.0]]), dump=tmp_path))
    assert (found.place, found.value, found.source) == ("translation", "relu", line_of_here("a NaN is born"))
    assert found.trials[-1].error == float("inf")
    assert found.cut is not None and found.cut.confirmed
    assert re.search(r"relu.*NaN.*\b1$", fails_without_our_libraries(found.cut.folder), re.M)


def int8_product(dump: Path, layers: int = 4) -> Path:
    """A dump whose session is wrong by an optimizer of ONNX Runtime that our backends disable."""
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(layers)))
    model.register_buffer("weights", WEIGHTS)

    def function(x: torch.Tensor) -> torch.Tensor:
        return model(x).tanh() @ dequantize(model.weights, 0.01, 3, -128, 127, torch.int8) + 1  # dequantized

    return dumped(function, torch.randn(4, 32), dump=dump)


@pytest.fixture
def with_faulty_optimizers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_faults, "OPTIMIZER_FAULTS", ())
    monkeypatch.setattr(settings, "_DEQUANTIZED_ONCE", {})


def test_an_optimizer_of_onnx_runtime(with_faulty_optimizers: None, tmp_path: Path) -> None:
    found = bisected(int8_product(tmp_path))
    assert (found.place, found.cause) == ("ONNX Runtime optimizer", "the optimizer QDQSelectorActionTransformer")
    assert found.source == line_of_here("# dequantized")
    assert_cut(found, "DequantizeLinear", "MatMul")
    assert "QDQSelectorActionTransformer" in OPTIMIZERS


def test_an_optimizer_whose_fault_the_model_damps(with_faulty_optimizers: None, tmp_path: Path) -> None:
    """The results are right; what is wrong is a value inside the session."""
    layer = nn.Linear(8, 32)
    layer.register_buffer("weights", WEIGHTS)

    def function(x: torch.Tensor) -> torch.Tensor:
        y = layer(x).tanh() @ dequantize(layer.weights, 0.01, 3, -128, 127, torch.int8)  # damped
        return 1 + 1e-6 * y.sin()

    dump = dumped(function, torch.randn(4, 8), dump=tmp_path)
    assert find_run(dump).graphs[0].entry.blame.cause == "ONNX Runtime optimizer QDQSelectorActionTransformer"
    found = bisected(dump)
    assert (found.place, found.source) == ("ONNX Runtime optimizer", line_of_here("# damped"))
    assert_cut(found, "DequantizeLinear", "MatMul")


def test_five_thousand_nodes_take_a_hundred_sessions(tmp_path: Path) -> None:
    """A chain of which two neighbours, far from its ends, fuse to something wrong."""
    names = [f"v{i}" for i in range(5_001)]
    nodes = [
        helper.make_node("Tanh" if i % 2 else "Sin", [before], [after], name=f"node_{after}")
        for i, (before, after) in enumerate(zip(names, names[1:], strict=False))
    ]
    at = 3_333
    nodes[at] = helper.make_node("MatMul", [names[at], "dequantized"], [names[at + 1]], name="product")
    nodes.insert(at, helper.make_node("DequantizeLinear", ["weights", "scale"], ["dequantized"], name="dequantized"))
    info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, 32]) for name in (names[0], names[-1])]
    constants = [
        onnx.numpy_helper.from_array(WEIGHTS.numpy(), "weights"),
        onnx.numpy_helper.from_array(np.array(0.01, np.float32), "scale"),
    ]
    graph = helper.make_graph(nodes, "chain", info[:1], info[1:], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    region = tmp_path / "graph_000" / "inference" / "region_0"
    (region / "test_data_set_0").mkdir(parents=True)
    for name in ("model.onnx", "model.optimized.onnx"):
        onnx.save(model, region / name)
    given = onnx.numpy_helper.from_array(np.random.default_rng(0).normal(size=(4, 32)).astype("f4"), names[0])
    (region / "test_data_set_0" / "input_0.pb").write_bytes(given.SerializeToString())
    blame = {"value": names[at + 1], "region": 0, "kind": "optimizer", "name": "", "source": ""}
    write_manifest(tmp_path, graph_entry(regions=[region_entry()], verdict="diverges", blame=blame))
    found = bisect(find_run(tmp_path), "0")
    assert found.cause == "the optimizer QDQSelectorActionTransformer"
    assert_cut(found, "DequantizeLinear", "MatMul")
    assert found.sessions < 120


def external_dump(folder: Path) -> Path:
    """A dump with external weights, as for more than 2 GB; a pass used a wrong one."""
    region = folder / "graph_000" / "inference" / "region_0"
    (region / "test_data_set_0").mkdir(parents=True)
    (region / "w.data").write_bytes(np.random.default_rng(0).normal(size=(2, 4, 4)).astype("f4").tobytes())
    weights = []
    for i in range(2):
        weight = onnx.TensorProto(name=f"w{i}", dims=[4, 4], data_type=1, data_location=TensorProto.EXTERNAL)
        for key, value in (("location", "w.data"), ("offset", str(64 * i)), ("length", "64")):
            weight.external_data.add(key=key, value=value)
        weights.append(weight)
    info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 4]) for name in ("x", "c")]
    for name, taken in (("model.onnx", "w1"), ("model.optimized.onnx", "w0")):
        nodes = [
            helper.make_node("MatMul", ["x", "w0"], ["a"]),
            helper.make_node("MatMul", ["a", taken], ["b"]),
            helper.make_node("Tanh", ["b"], ["c"]),
        ]
        graph = helper.make_graph(nodes, "external", info[:1], info[1:], weights)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
        (region / name).write_bytes(model.SerializeToString())
    given = onnx.numpy_helper.from_array(np.ones((2, 4), np.float32), "x")
    (region / "test_data_set_0" / "input_0.pb").write_bytes(given.SerializeToString())
    blame = {"value": "b", "region": 0, "kind": "pass", "name": "onnx.wrong", "source": ""}
    write_manifest(folder, graph_entry(regions=[region_entry()], verdict="diverges at b", blame=blame))
    return folder


def test_the_cut_holds_its_weights(tmp_path: Path) -> None:
    found = bisect(find_run(external_dump(tmp_path)), "0")
    assert (found.place, found.value) == ("ONNX pass", "b")
    assert_cut(found, "MatMul")
    assert found.cut is not None
    for name in ("model.onnx", "before.onnx"):
        assert not onnx.load(found.cut.folder / name, load_external_data=False).graph.initializer[0].external_data


def test_nothing_in_the_cut_can_be_spared(with_faulty_optimizers: None, tmp_path: Path) -> None:
    found = bisected(int8_product(tmp_path))
    assert found.cut is not None
    path = found.cut.folder / "model.onnx"
    parts, feeds = Parts(ir.load(path)), dict(read_data_set(found.cut.folder / "test_data_set_0", "input"))
    with CandidateRunner() as runner:
        values = runner.run(parts.exposed(), feeds, PLAIN)
        search = bisection.BisectionSearch(found, tmp_path, runner, print, {})
        check = bisection.RanModel(parts, {**feeds, **values.outputs}, Settings(), search)
        assert check([0, 1])
        assert not check([0]) and not check([1])
    again = bisect_file(path, feeds)
    assert (again.place, again.cause) == (found.place, found.cause)
    assert_cut(again, "DequantizeLinear", "MatMul")


FILE = """<ir_version: 10, opset_import: ["" : 18]>
    file (float[2, N] x) => (float[2] y) {
        a = Sin (x)
        axes = Constant <value_ints: ints = [1]> ()
        b = ReduceLogSumExp <keepdims: int = 0> (a, axes)
        y = Tanh (b)
    }"""


def test_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A fault of a kernel (docs/upstream.md) that only some inputs show."""
    path = tmp_path / "model.onnx"
    onnx.save(onnx.parser.parse_model(FILE.replace("Sin", "Neg")), path)
    assert main(["bisect", str(path), "--dim", "N=4"]) == 0
    np.savez(tmp_path / "inputs.npz", x=np.array([[np.inf, 145], [1, 2]], np.float32))
    capsys.readouterr()
    assert main(["bisect", "--json", str(path), "--inputs", str(tmp_path / "inputs.npz")]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["place"], found["value"], found["cause"]) == ("kernel", "b", "ReduceLogSumExp")
    assert found["cut"]["operators"] == ["ReduceLogSumExp"] and found["cut"]["confirmed"]
    assert Path(found["cut"]["folder"]) == tmp_path / "model.bisect"


@pytest.mark.parametrize("operator", ["Gelu", "Elu", "Celu", "Selu"])
def test_kernels_that_round_inside(operator: str, tmp_path: Path) -> None:
    """Small results of these are computed from numbers near one."""
    text = FILE[: FILE.index("file")] + f"file (float[3, 200] x) => (float[3, 200] y) {{ y = {operator} (x) }}"
    onnx.save(onnx.parser.parse_model(text.replace("18]", "20]")), tmp_path / "model.onnx")
    assert main(["bisect", str(tmp_path / "model.onnx")]) == 0
    for side in "ab":
        assert main(["compare", str(tmp_path / "model.onnx"), f"--{side}-runtime", "reference"]) == 0


def test_scales_are_not_perturbed(tmp_path: Path) -> None:
    text = """<ir_version: 10, opset_import: ["" : 20]> file (float[2, 6, 10, 14] x) => (float[2, 6, 20, 28] y)
        <float[4] s = {1, 1, 2, 2}> {
            y = Resize <coordinate_transformation_mode = "half_pixel", mode = "linear"> (x, , s)
        }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    assert main(["bisect", str(tmp_path / "model.onnx")]) == 0


def test_a_file_whose_optimizers_change_roundings(tmp_path: Path) -> None:
    """Without the casts, the sum is not rounded to float16."""
    text = """<ir_version: 10, opset_import: ["" : 18]>
        file (float16[4, 64] x, float16[4, 64] y) => (float[4] z)
            <float two = {2}, int64[1] axes = {1}> {
            a = Add (x, y)
            b = Cast <to: int = 1> (a)
            c = Pow (b, two)
            z = ReduceMean <keepdims: int = 0> (c, axes)
        }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "model.onnx")
    chance = np.random.default_rng(0)
    feeds = {name: chance.standard_normal((4, 64)).astype(np.float16) for name in "xy"}
    found = bisect_file(tmp_path / "model.onnx", feeds)
    assert found.place == "nothing" and [trial.outcome for trial in found.trials] == ["right", "right"], found


def test_a_file_that_cannot_run(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    onnx.save(onnx.parser.parse_model(FILE.replace("Sin", "Sinc")), path)
    found = bisect_file(path, {"x": np.ones((2, 3), np.float32)})
    assert found.place == "session" and found.cut is not None and found.cut.operators == ["Sinc"]
    assert found.cut.confirmed
    text = FILE.replace("a = Sin (x)", "k = Constant <value_ints: ints = [2]> () \n a = Mul (x, k)")
    onnx.save(onnx.parser.parse_model(text), path)
    found = bisect_file(path, {"x": np.ones((2, 3), np.float32)})
    assert found.cut is not None and found.cut.operators == ["Mul"] and found.cut.confirmed


_OF_RANK_4 = [
    ("InstanceNormalization", (np.ones(8, np.float32), np.zeros(8, np.float32)), {}),
    ("Resize", (None, np.array([1, 1, 1.5, 1.5], np.float32)), {"mode": "linear"}),
    ("ReduceSum", (), {"keepdims": 0}),
    ("LogSoftmax", (), {"axis": 1}),
    ("Conv", (np.random.default_rng(1).standard_normal((8, 8, 3, 3)).astype(np.float32),), {}),
]


@pytest.mark.parametrize(("operator", "constants", "attributes"), _OF_RANK_4, ids=[item[0] for item in _OF_RANK_4])
def test_rounding_of_a_kernel_is_not_a_fault(
    operator: str, constants: tuple, attributes: dict[str, object], tmp_path: Path
) -> None:
    """Of a sum whose terms cancel, or of a result that is small beside what it is computed from."""
    names = ["x", *("" if item is None else f"c{i}" for i, item in enumerate(constants))]
    stored = [onnx.numpy_helper.from_array(item, f"c{i}") for i, item in enumerate(constants) if item is not None]
    node = onnx.helper.make_node(operator, names, ["y"], **attributes)
    x = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [2, 8, 100, 100])
    graph = onnx.helper.make_graph([node], "g", [x], [onnx.ValueInfoProto(name="y")], stored)
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=9)
    onnx.save(model, tmp_path / "model.onnx")
    for seed in range(2):
        array = np.random.default_rng(seed).standard_normal((2, 8, 100, 100)).astype(np.float32)
        found = bisect_file(tmp_path / "model.onnx", {"x": array})
        assert found.place == "nothing", found.trials
    session = ModelSession(load_model(tmp_path / "model.onnx"), PLAIN)
    right = np.asarray(session({"x": array})["y"])
    wrong = right + np.float32(0.01) * np.abs(right).max()
    part = Part(lambda: load_ir(tmp_path / "model.onnx"), {"x": array}, "y", lambda model, feeds: None)
    judged = part.judge(right), part.judge(wrong)
    assert [item is not None and item.is_wrong for item in judged] == [False, True]


@pytest.mark.parametrize("culprits", [{3}, {3, 90}, {0, 50, 99}, set(range(40, 44))])
def test_delta_debugging(culprits: set[int]) -> None:
    asked = 0

    def fails(items: list[int]) -> bool:
        nonlocal asked
        asked += 1
        return culprits <= set(items)

    assert set(delta_debug(range(100), fails)) == culprits  # type: ignore[arg-type]
    assert asked < 200


def test_a_backward_whose_forward_is_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(CONVERTERS, aten.silu.default, lambda x: op.Mul(op.Mul(x, op.Sigmoid(x)), 1.1))
    dump = dumped(Perceptron(), torch.randn(5, 8), dump=tmp_path, train=True)
    forward, backward = find_run(dump).graphs
    assert backward.verdict == "ok", "it is right on what the forward saved for it"
    assert bisected(dump, "0/backward").cut is None
    found = bisected(dump)  # the first that diverges
    assert (found.graph, found.place, found.value) == (forward.reference, "translation", "silu")
    assert_cut(found, "Sigmoid", "Mul", "Constant", "Mul")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """numpy has no bfloat16: what goes in and out are its bits."""

    def wrong(x: ir.Value) -> object:
        return op.Mul(op.Mul(x, op.Sigmoid(x)), op.CastLike(op.Constant(value_float=1.1), x))

    monkeypatch.setitem(CONVERTERS, aten.silu.default, wrong)
    found = bisected(dumped(Perceptron().to(dtype), torch.randn(5, 8).to(dtype), dump=tmp_path))
    assert found.place == "translation" and found.value.startswith("silu")
    assert_cut(found, "Sigmoid", "Mul", "Mul")


def test_two_regions_and_symbolic_shapes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """``sort`` runs in PyTorch; the second region is wrong."""
    monkeypatch.setitem(CONVERTERS, aten.silu.default, lambda x: op.Mul(op.Mul(x, op.Sigmoid(x)), 1.1))
    layer = nn.Linear(8, 8)

    def function(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.silu(torch.sort(layer(x), stable=True).values).cos()

    with torch.no_grad():
        options = {"dump_dir": str(tmp_path)}
        compiled(function, backend="onnx_debug", dynamic=True, options=options)(torch.randn(5, 8))
    (graph,) = find_run(tmp_path).graphs
    assert len(graph.regions) == 2 and graph.entry.blame.region == 1
    found = bisected(tmp_path)
    assert (found.place, found.value) == ("translation", "silu")
    assert_cut(found, "Sigmoid", "Mul", "Constant", "Mul")


# What ends without a result


def rejected_dump(folder: Path) -> Path:
    """A dump of ``onnx_debug`` in which ONNX Runtime rejected a model: a kernel is missing."""
    info = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 3]) for name in ("x", "y")]
    names = ["x", "a", "b", "c", "d", "y"]
    operators = ["Sin", "Cast", "Tan", "Cast", "Cos"]
    attributes = [{}, {"to": TensorProto.BFLOAT16}, {}, {"to": TensorProto.FLOAT}, {}]
    nodes = [
        helper.make_node(operator, [before], [after], name=f"node_{after}", **more)
        for operator, before, after, more in zip(operators, names, names[1:], attributes, strict=False)
    ]
    graph = helper.make_graph(nodes, "rejected", info[:1], info[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10)
    run = folder / "run_1"
    (run / "graph_000" / "inference" / "rejected").mkdir(parents=True)
    path = run / "graph_000" / "inference" / "rejected" / "001_region_0.onnx"
    onnx.save(model, path)
    path.with_suffix(".txt").write_text("NOT_IMPLEMENTED\n")
    write_manifest(run, graph_entry(verdict="ok"))
    return run


def test_a_session_that_cannot_be_made(tmp_path: Path) -> None:
    found = bisect(find_run(rejected_dump(tmp_path)), "0")
    assert found.place == "session" and "Tan" in found.cause
    assert_cut(found, "Tan")
    assert found.cut is not None and "rejected: " in fails_without_our_libraries(found.cut.folder)


def dividing_dump(folder: Path, dividend: int, divisor: int) -> Path:
    """A dump of a model that divides integers, whose run ended without a result."""
    info = [helper.make_tensor_value_info(name, TensorProto.INT64, [2]) for name in ("x", "y", "z")]
    nodes = [
        helper.make_node("Neg", ["x"], ["a"]),
        helper.make_node("Neg", ["a"], ["b"]),
        helper.make_node("Neg", ["y"], ["c"]),
        helper.make_node("Div", ["b", "c"], ["d"], name="divides"),
        helper.make_node("Neg", ["d"], ["z"]),
    ]
    graph = helper.make_graph(nodes, "divides", info[:2], info[2:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
    run = folder / "run_1"
    write_region(run, 0, model, x=np.array([6, dividend]), y=np.array([6, -divisor]))
    write_manifest(run, graph_entry(regions=[region_entry()], verdict="not comparable", rescued={"0": "failed"}))
    return run


def write_region(run: Path, index: int, model: onnx.ModelProto, **inputs: np.ndarray) -> dict[str, object]:
    """The files of a region of graph 0; returns its entry."""
    folder = f"graph_000/inference/region_{index}"
    (run / folder / "test_data_set_0").mkdir(parents=True)
    for name in ("model.onnx", "model.optimized.onnx"):
        onnx.save(model, run / folder / name)
    for i, (name, array) in enumerate(inputs.items()):
        tensor = onnx.numpy_helper.from_array(array, name)
        (run / folder / "test_data_set_0" / f"input_{i}.pb").write_bytes(tensor.SerializeToString())
    return region_entry(index=index, folder=folder)


@pytest.fixture
def two_regions(tmp_path: Path) -> Callable[..., DumpedRun]:
    """Makes a dump of two regions, of which the second divides by zero."""

    def make(**entry: object) -> DumpedRun:
        regions = []
        for index, operator in enumerate(("Add", "Div")):
            model = onnx.parser.parse_model(
                f'<ir_version: 10, opset_import: ["" : 18]> '
                f"region (int64[2] x, int64[2] y) => (int64[2] z_{index}) {{ z_{index} = {operator} (x, y) }}"
            )
            regions.append(write_region(tmp_path, index, model, x=np.array([6, 7]), y=np.array([1, 0])))
        write_manifest(tmp_path, graph_entry(regions=regions, verdict="not comparable", **entry))
        return find_run(tmp_path)

    return make


def blame_of(value: str, region: int | None) -> dict[str, object]:
    return {"value": value, "region": region, "kind": "result", "name": "", "source": ""}


@pytest.mark.parametrize(
    "entry", [{"rescued": {"1": "failed"}}, {"blame": blame_of("z_1", 1)}, {"blame": blame_of("sorted", None)}]
)
def test_the_region_that_is_to_blame_is_bisected(
    entry: dict[str, object], two_regions: Callable[..., DumpedRun]
) -> None:
    """The one whose session failed, that of the value that the verdict names, or the nearest before that."""
    run = two_regions(**entry)
    inputs = {"z_0": ("x",), "z_1": ("z_0",), "sorted": ("z_1", "unknown")}
    rows = [row_entry(name, region, names) for (name, names), region in zip(inputs.items(), (0, 1, None), strict=True)]
    (run.graphs[0].folder / "side_by_side.json").write_text(json.dumps({"rows": rows}))
    found = bisect(run, "0")
    assert found.place == "run" and found.cut is not None and found.cut.operators == ["Div"]


def row_entry(name: str, region: int | None, inputs: Sequence[str]) -> dict[str, object]:
    return {
        **dict.fromkeys(("operator", "module", "source", "user_name", "dtype"), ""),
        **dict.fromkeys(("is_output", "has_infinite_argument", "is_uninitialized"), False),
        **dict.fromkeys(("error", "eager", "eager_extent", "extent")),
        "name": name,
        "region": region,
        "inputs": list(inputs),
        "shape": [2],
        "nonfinite_elements": [],
    }


def test_the_region_that_is_named_is_bisected(two_regions: Callable[..., DumpedRun], tmp_path: Path) -> None:
    run = two_regions(blame=blame_of("z_0", 0))
    assert bisect(run, "0/inference/region_0").place == "unknown"
    assert bisect(run, "0/inference/region_1").place == "run"
    (tmp_path / "check.py").write_text(CHECK.replace("Tanh", "Div"))
    check = f"{sys.executable} {tmp_path / 'check.py'} {{model}}"
    assert bisect(run, "0/region_1", check=check).place == "check"
    assert bisect(run, "0", check=check).place == "nothing"


def test_a_region_that_is_not_there_names_those_that_are(
    two_regions: Callable[..., DumpedRun], capsys: pytest.CaptureFixture[str]
) -> None:
    run = two_regions()
    for more in ((), ("--check", "false {model}"), ("--rejected",)):
        assert main(["bisect", "-d", str(run.folder), *more, "0/inference/region_7"]) == 2
        printed = capsys.readouterr().err
        assert "region 7" in printed and "region_0, region_1" in printed


def test_the_region_whose_session_failed_is_in_the_manifest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def failing(x: ir.Value) -> object:
        place = op.Constant(value_ints=[1_000_000])
        return op.ScatterElements(op.Sinh(x), place, op.Constant(value_floats=[0.0]), axis=0)

    monkeypatch.setitem(CONVERTERS, aten.sinh.default, failing)
    dump = dumped(lambda x: torch.sort(x.sin(), stable=True).values.sinh().cos(), torch.randn(50), dump=tmp_path)
    (graph,) = find_run(dump).graphs
    assert len(graph.regions) == 2 and graph.entry.rescued.keys() == {1} and graph.entry.blame is None
    found = bisected(dump)
    assert found.place == "run" and found.cut is not None and "ScatterElements" in found.cut.operators


@pytest.mark.parametrize(("dividend", "divisor", "datum"), [(7, 0, "division by zero"), (-(2**63), -1, "SIGFPE")])
def test_a_model_that_ends_without_a_result(dividend: int, divisor: int, datum: str, tmp_path: Path) -> None:
    """An error of ONNX Runtime's, and a fault of it (docs/upstream.md) that ends the process."""
    found = bisect(find_run(dividing_dump(tmp_path, dividend, divisor)), "0")
    assert found.place == "run" and datum in found.cause
    assert found.cut is not None and found.cut.operators == ["Div"]
    assert found.cut.confirmed
    name, array = read_tensor(found.cut.folder / "test_data_set_0" / "input_1.pb")
    assert (name, array.tolist()) == ("c", [-6, divisor])


def test_a_custom_operator_whose_fake_has_another_dtype(tmp_path: Path) -> None:
    """The region gets another dtype than it was compiled for: the fault is not in its model."""
    with torch.library._scoped_library("dynamo_backends_bisect", "FRAGMENT") as library:
        library.define("lies(Tensor x) -> Tensor")
        library.impl("lies", lambda x: x * 2, "CPU")
        torch.library.register_fake(
            "dynamo_backends_bisect::lies", lambda x: torch.empty(x.shape, dtype=torch.int64), lib=library
        )
        lies = torch.ops.dynamo_backends_bisect.lies
        found = bisected(dumped(lambda x: lies(x.sin()) + 1, torch.randn(4), dump=tmp_path))
    assert found.place == "PyTorch" and found.cut is None
    assert "register_fake" in found.cause and "float32" in found.cause and "int64" in found.cause


# A check of the user's own

CHECK = """
import sys, onnx
sys.exit(any(node.op_type == "Tanh" for node in onnx.load(sys.argv[1]).graph.node))
"""


def test_a_check_of_the_users_own(tmp_path: Path) -> None:
    dump = dumped(Damped(), torch.randn(4, 8), dump=tmp_path / "dump")
    (tmp_path / "check.py").write_text(CHECK)
    found = bisected(dump, check=f"{sys.executable} {tmp_path / 'check.py'} {{model}}")
    assert found.place == "check"
    assert found.cut is not None and found.cut.operators == ["Tanh"] and found.cut.confirmed


@pytest.mark.parametrize(
    ("command", "datum"),
    [
        ("/no/such/program {model}", "--check: /no/such/program"),
        (f"{sys.executable} -c pass", "--check .*{model}"),
        (f"{sys.executable} -c 'raise SystemExit(1)' {{model}}", "--check .*Identity"),
    ],
)
def test_a_check_that_says_nothing(command: str, datum: str, tmp_path: Path) -> None:
    dump = dumped(lambda x: x.sin().cos(), torch.randn(3), dump=tmp_path)
    with pytest.raises(DumpError, match=datum):
        bisected(dump, check=command)


# The command line


def bisect_command(dump: Path, *more: str) -> int:
    return main(["bisect", "-d", str(dump), *more, str(find_run(dump).graphs[0].index)])


def test_the_command(with_faulty_optimizers: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dump = int8_product(tmp_path)
    assert bisect_command(dump) == 1
    printed = capsys.readouterr()
    assert "ONNX Runtime optimizer at " in printed.out
    assert "extracted: 2 of " in printed.out and re.search(r"^2 nodes", printed.err, re.M)
    assert bisect_command(dump, "--json") == 1
    found = json.loads(capsys.readouterr().out)
    assert found["place"] == "ONNX Runtime optimizer" and found["cut"]["confirmed"]


def test_the_command_where_nothing_diverges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dump = dumped(lambda x: x.sin(), torch.randn(3), dump=tmp_path)
    assert bisect_command(dump) == 0
    assert "--check" in capsys.readouterr().out
    assert main(["bisect", "-d", str(dump), "4711"]) == 2
    assert "'4711'" in capsys.readouterr().err


def test_the_command_without_a_graph(
    converters: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """All graphs that are not ok are bisected; the scripts of their regions do not call them right."""
    converters(aten.silu, lambda x: op.Mul(op.Mul(x, op.Sigmoid(x)), 1.01))

    def function(x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.silu(x.sin())
        torch._dynamo.graph_break()
        return nn.functional.silu(y.cos()) * 1e-6 + 1

    dump = dumped(function, torch.randn(4, 8), dump=tmp_path)
    assert main(["bisect", "-d", str(dump)]) == 1
    assert capsys.readouterr().out.count("fault: translation at silu") == 2
    for graph in find_run(dump).graphs:
        command = [sys.executable, str(graph.regions[0].folder / "repro.py")]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert "diverges at silu" in printed and "right" not in printed.splitlines()


def test_options_behind_the_graph(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dump = dumped(lambda x: x.sin(), torch.randn(3), dump=tmp_path)
    assert main(["bisect", str(find_run(dump).graphs[0].index), "-d", str(dump), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["place"] == "nothing"
    with pytest.raises(SystemExit, match="2"):
        main(["bisect", "0", "--chek", "x"])
    assert re.search("--chek x.*'--check'", capsys.readouterr().err)
    assert main(["bisect", "grahp_000"]) == 2
    assert "grahp_000" in capsys.readouterr().err


def test_a_session_that_held_old_weights(tmp_path: Path) -> None:
    """The recorded outputs are not what the recorded inputs give."""
    dump = dumped(lambda x: x.sin(), torch.randn(3), dump=tmp_path)
    run = find_run(dump)
    content = json.loads((run.folder / "manifest.json").read_text())
    blame = {"value": "sin", "region": 0, "kind": "stale weight", "name": "", "source": ""}
    content["graphs"][0].update(verdict="diverges at sin", blame=blame)
    (run.folder / "manifest.json").write_text(json.dumps(content))
    path = run.graphs[0].regions[0].folder / "test_data_set_0" / "output_0.pb"
    name, array = read_tensor(path)
    path.write_bytes(onnx.numpy_helper.from_array(array + 1, name).SerializeToString())
    found = bisected(dump)
    assert found.place == "unknown" and found.trials[-1].outcome == "right" and found.trials[-1].value == "sin"
    assert any("stale weight" in line for line in found.advice)


def test_a_candidate_that_takes_too_long_is_said_to_and_not_to_have_crashed_by_a_signal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "model.onnx")  # nobody writes to it: it is read for ever
    monkeypatch.setattr(candidate_runs, "LONGEST", 5.0)
    with CandidateRunner() as runner:
        outcome = runner.run(tmp_path / "model.onnx", None, PLAIN)
    assert outcome.kind == "crashed" and "5 seconds" in outcome.message and "signal" not in outcome.message


def test_a_crash_is_confirmed_by_the_same_signal_only(tmp_path: Path) -> None:
    segmentation_fault = CandidateOutcome("crashed", "the process ended by signal 11 (SIGSEGV)")
    repro = tmp_path / "repro.py"
    for code, is_same in (
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", True),
        ("import os; os.abort()", False),
        ("raise SystemExit(3)", False),
        ("raise ValueError", False),
    ):
        repro.write_text(code)
        assert bisection.is_same_failure(run_repro(tmp_path), segmentation_fault) == is_same, code


NAMES = ("argparse", "dataclasses", "json", "numpy", "onnx", "onnxruntime", "tempfile", "typing")


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder has files with the names of packages."""
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('planted {name}')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    return tmp_path


def test_the_current_folder_is_no_package_of_a_subprocess(hostile: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with CandidateRunner() as runner, monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(["", ".", os.environ["PYTHONPATH"]]))
        outcome = runner.run(trivial_model(), {"x": np.ones(1, np.float32)}, PLAIN)
    assert outcome.kind == "ran", outcome
    settings = dataclasses.replace(PLAIN, custom_op_libraries=("/planted.so",))
    one = {"x": np.ones(1, np.float32)}
    write_cut(hostile, CutModel(trivial_model(), settings, one, {"y": one["x"]}, "differs", ""), {})
    assert run_repro(hostile).kind == "right", "neither of the folder's files nor of a library that the dump names"
    command = [sys.executable, "-m", "dynamo_backends", "ls", "-d", "nothing"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2 and done.stderr.startswith("dynamo-backends ls: nothing "), done


def test_a_process_that_does_not_start_is_no_fault_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_process, "worker_command", lambda module: [sys.executable, "-c", "import no_package"])
    with CandidateRunner() as runner, pytest.raises(DumpError, match="no_package"):
        runner.run(trivial_model(), None, PLAIN)


def trivial_model() -> ir.Model:
    return ir.from_onnx_text("""<ir_version: 10, opset_import: ["" : 18]>
        trivial (float[1] x) => (float[1] y) { y = Identity(x) }""")


def test_a_repro_that_python_cannot_run_confirms_no_crash(tmp_path: Path) -> None:
    (tmp_path / "repro.py").write_text("import there_is_no_such_module\n")
    fresh = run_repro(tmp_path)
    assert fresh.kind == "not run" and "there_is_no_such_module" in fresh.message
    (tmp_path / "repro.py").write_text("import os; os.abort()\n")
    assert run_repro(tmp_path).kind == "crashed"
