"""``dynamo-backends compare`` on hand-written models, exported models, and graphs of dumps."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from dumped import make_dump
from onnx import TensorProto, parser
from onnx.reference import ReferenceEvaluator

from dynamo_backends.cli import build_parser, main
from dynamo_backends.dumps.model_comparison import ModelComparison, compare, compare_targets, targets_of
from dynamo_backends.dumps.model_inputs import generated_inputs, match, read_feeds
from dynamo_backends.dumps.model_judging import difference
from dynamo_backends.dumps.model_values import Runtime, run_model
from dynamo_backends.dumps.models import OnnxModel, load_model
from dynamo_backends.dumps.reading import DumpError, find_run

HEAD = '<ir_version: 10, opset_import: ["": 21]>'
X = np.linspace(-2, 3, 6, dtype=np.float32).reshape(2, 3)


def model(text: str, tmp_path: Path, name: str = "model", head: str = HEAD, **initializers: np.ndarray) -> OnnxModel:
    """A model of onnx's text form, saved and loaded."""
    proto = parser.parse_model(head + text)
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(value, key) for key, value in initializers.items())
    path = tmp_path / f"{name}.onnx"
    onnx.save(proto, path)
    return load_model(path, name)


def compared(
    first: OnnxModel, second: OnnxModel, runtime: Runtime | None = None, **feeds: np.ndarray
) -> ModelComparison:
    return compare(first, second, feeds, runtime or Runtime())


def culprit(comparison: ModelComparison) -> str:
    """The name of the first value that differs."""
    assert not comparison.ok and comparison.first_different is not None
    return comparison.first_different.name


def marks(comparison: ModelComparison) -> list[tuple[str, str]]:
    return [(row.mark, row.name) for row in comparison.rows]


CHAIN = "g (float[2,3] x) => (float[2,3] y) { a = Relu(x) \n b = Exp(a) \n y = Sub(b, a) }"


@pytest.mark.parametrize("runtime", [Runtime(), Runtime("reference"), Runtime(optimize=True)])
def test_a_model_is_equal_to_itself(tmp_path: Path, runtime: Runtime) -> None:
    first = model(CHAIN, tmp_path)
    found = compared(first, first, runtime, x=X)
    assert found.ok and found.verdict == "ok"
    assert [mark for mark, _ in marks(found)] == ["="] * 5
    assert [(row.first.kind, row.first.operator) for row in found.rows if row.first] == [
        ("input", ""),
        ("result", "Relu"),
        ("result", "Exp"),
        ("result", "Sub"),
        ("output", "Sub"),
    ]


@pytest.mark.parametrize("runtime", [Runtime(), Runtime("reference")])
def test_the_first_row_that_diverges_is_named(tmp_path: Path, runtime: Runtime) -> None:
    swapped = CHAIN.replace("Exp(a)", "Exp(c)").replace("b =", "c = Neg(a) \n b =")
    found = compared(model(CHAIN, tmp_path, "first"), model(swapped, tmp_path, "second"), runtime, x=X)
    assert culprit(found) == "b" and "b (Exp)" in found.verdict
    assert ("+", "c") in marks(found)


def test_a_node_more_and_other_names(tmp_path: Path) -> None:
    """Behind the node nothing is equal: operators and shapes between the matches tell what is whose."""
    weights = {f"w{i}": np.random.default_rng(i).standard_normal((3, 3)).astype(np.float32) for i in range(2)}
    head = "g (float[2,3] x) => (float[2,3] out) { "
    first = model(
        head + "a = MatMul(x, w0) \n c = MatMul(a, w1) \n d = Sigmoid(c) \n out = Relu(d) }",
        tmp_path,
        "first",
        **weights,
    )
    second = model(
        head + "t_a = MatMul(x, w0) \n k = Constant <value = float {1.5}> () \n z = Mul(t_a, k) \n "
        "t_c = MatMul(z, w1) \n t_d = Sigmoid(t_c) \n out = Relu(t_d) }",
        tmp_path,
        "second",
        **weights,
    )
    found = compared(first, second, x=X)
    pairs = {row.first.name: row.second.name for row in found.rows if row.first and row.second}
    assert {name: pairs.get(name) for name in "acd"} == {"a": "t_a", "c": "t_c", "d": "t_d"}
    assert culprit(found) in ("c", "d")


def test_names_of_another_exporter(tmp_path: Path) -> None:
    """All names but the outputs' are others, the weight is an initializer here and an input there, operators differ."""
    weight = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
    first = model(
        "g (float[2,3] x, float[3,4] w) => (float[2,4] y) { p = MatMul(x, w) \n q = Relu(p) \n y = Add(q, q) }",
        tmp_path,
        "first",
    )
    second = model(
        "g (float[2,3] in) => (float[2,4] out) { val_1 = Gemm(in, weight) \n val_2 = Relu(val_1) \n "
        "val_3 = Identity(val_2) \n out = Add(val_2, val_3) }",
        tmp_path,
        "second",
        weight=weight,
    )
    found = compared(first, second, x=X)
    assert found.ok
    pairs = {row.first.name: row.second.name for row in found.rows if row.first and row.second}
    assert pairs == {"x": "in", "w": "weight", "p": "val_1", "q": "val_2", "y": "out"}
    assert ("+", "val_3") in marks(found)
    assert any(note.endswith(": w") for note in found.notes)
    back = compared(second, first, **{"in": X})
    assert back.ok and any(note.endswith(": w") for note in back.notes)


def test_weights_with_equal_types_are_matched_by_content(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    one, other = (generator.standard_normal((3, 3)).astype(np.float32) for _ in range(2))
    text = "g (float[2,3] x) => (float[2,3] y) { p = MatMul(x, FIRST) \n y = MatMul(p, SECOND) }"
    first = model(text.replace("FIRST", "a").replace("SECOND", "b"), tmp_path, "first", a=one, b=other)
    second = model(text.replace("FIRST", "c").replace("SECOND", "d"), tmp_path, "second", d=other, c=one)
    assert {(item.partner, item.name, item.how) for item in match(first, {}, second)} == {
        ("x", "x", "name"),
        ("a", "c", "content"),
        ("b", "d", "content"),
    }
    assert compared(first, second, x=X).ok


def test_a_stale_weight_is_what_is_named(tmp_path: Path) -> None:
    weight = np.eye(3, dtype=np.float32)
    text = "g (float[2,3] x) => (float[2,3] y) { p = MatMul(x, weight) \n y = Tanh(p) }"
    first = model(text, tmp_path, "first", weight=weight)
    found = compared(first, model(text, tmp_path, "second", weight=weight * 1.01), x=X)
    assert culprit(found) == "weight"


def test_what_is_computed_in_another_order_is_aligned(tmp_path: Path) -> None:
    branches = {name: f"{name}0 = {op}(x) \n {name}1 = Mul({name}0, x)" for name, op in (("a", "Sin"), ("b", "Exp"))}
    text = "g (float[2,3] x) => (float[2,3] y) {{ {} \n {} \n y = Add(a1, b1) }}"
    first = model(text.format(branches["a"], branches["b"]), tmp_path, "first")
    renamed = text.format(branches["b"], branches["a"]).replace("a0", "v1").replace("a1", "v2").replace("b0", "v3")
    found = compared(first, model(renamed.replace("b1", "v4"), tmp_path, "second"), x=X)
    pairs = {row.first.name: row.second.name for row in found.rows if row.first and row.second}
    assert pairs == {"x": "x", "a0": "v1", "a1": "v2", "b0": "v3", "b1": "v4", "y": "y"}


def test_one_operator_with_other_attributes_need_not_be_the_same(tmp_path: Path) -> None:
    text = (
        "g (float[4,3,2] x) => (float y) {{ {0} = Abs(x) \n {1} = Transpose<perm={2}>({0}) \n "
        "y = ReduceSum<keepdims=0>({1}) }}"
    )
    first = model(text.format("a", "b", [0, 2, 1]), tmp_path, "first")
    second = model(text.format("c", "d", [0, 1, 2]), tmp_path, "second")
    found = compared(first, second, x=np.random.default_rng(0).standard_normal((4, 3, 2)).astype(np.float32))
    assert found.ok and ("?", "b") in marks(found)


def test_accidental_names_are_not_believed(tmp_path: Path) -> None:
    """Exporters count values; here most names that both have are of other shapes."""
    first = model(
        "g (float[2,3] x) => (float[3] y) { val_1 = Exp(x) \n val_2 = Transpose(val_1) \n val_3 = Neg(x) \n "
        "val_4 = Add(val_1, val_3) \n y = ReduceSum<keepdims=0>(val_4, axis) }",
        tmp_path,
        "first",
        axis=np.array([0]),
    )
    second = model(
        "g (float[2,3] x) => (float[3] y) { val_0 = Neg(x) \n val_1 = Transpose(x) \n val_2 = Exp(x) \n "
        "val_3 = Sub(val_2, x) \n val_4 = Mul(x, x) \n y = ReduceMax<keepdims=0>(val_3, axis) }",
        tmp_path,
        "second",
        axis=np.array([0]),
    )
    found = compared(first, second, x=X)
    pairs = {row.first.name: row.second.name for row in found.rows if row.first and row.second}
    assert pairs["val_1"] == "val_2" and pairs["val_3"] == "val_0" and pairs["val_4"] == "val_3"
    assert culprit(found) == "y"


def test_an_input_that_the_other_model_computes(tmp_path: Path) -> None:
    """What ONNX Runtime folds of weights is an input of the model it writes."""
    text = "(float[2,3] x, float[3,4] w) => (float[2,4] y) { t = Mul(w, w) \n y = MatMul(x, t) }"
    first = model("g " + text, tmp_path, "first")
    second = model("g (float[2,3] x, float[3,4] t) => (float[2,4] y) { y = MatMul(x, t) }", tmp_path, "second")
    assert compared(first, second).ok
    back = compared(second, first, x=X, w=np.ones((3, 4), np.float32))
    assert back.ok and any(note.endswith(": t") for note in back.notes)
    foreign = model("g (float[2,3] x, float[9] u) => (float[2,3] y) { y = Identity(x) }", tmp_path, "foreign")
    with pytest.raises(DumpError, match=r"foreign.* first.* u \(float32 9\)"):
        compared(first, foreign)


def test_a_wrong_constant(tmp_path: Path) -> None:
    """Where names mean the same, a number of another value is what is wrong; else it is another number."""
    text = (
        "g (float[2,3] x) => (float[2,3] y) { k = Constant<value: tensor = float {VALUE}>() \n a = Mul(x, k) \n "
        "y = Tanh(a) }"
    )
    first = model(text.replace("VALUE", "2.0"), tmp_path, "first")
    second = model(text.replace("VALUE", "2.5"), tmp_path, "second")
    assert culprit(compared(first, second, x=X)) == "k"
    other = model(
        "g (float[2,3] x) => (float[2,3] y) { b = Add(x, x) \n y = Tanh(b) }", tmp_path, "other", k=np.array(7, "f")
    )
    found = compared(first, other, x=X)
    assert found.ok and ("-", "k") in marks(found) and ("+", "k") in marks(found)


@pytest.mark.parametrize(
    ("node", "shape"), [("Gemm(x, {w}, {b})", "2,4"), ("Conv({x4}, {w4}, {b})", "2,4"), ("Add(x, {b4})", "2,4")]
)
def test_a_weight_of_other_names_and_values(tmp_path: Path, node: str, shape: str) -> None:
    """The weight and the node that reads it are named, not the node after it."""
    generator = np.random.default_rng(0)
    weights = {
        "w": generator.standard_normal((4, 5)).astype("f"),
        "w4": generator.standard_normal((5, 4, 1, 1)).astype("f"),
        "b": generator.standard_normal(5).astype("f"),
        "b4": generator.standard_normal(4).astype("f"),
    }
    used = [name for name in weights if f"{{{name}}}" in node]
    text = "g (float[{shape}] x) => (float[n, m] y) {{ {a} = {node} \n {t} = Tanh({a}) \n y = Exp({t}) }}"
    if "x4" in node:
        text = text.replace("n, m", "n, m, o, p").replace("{{ ", "{{ {x4} = Unsqueeze(x, axes) \n ")
    models = []
    for prefix, change in (("k", 0.0), ("other_", 0.1)):
        names = {name: prefix + name for name in (*weights, "a", "t", "x4")}
        given = {names[name]: weights[name] + (change if name.startswith("b") else 0).__mul__(1) for name in used}
        given = {name: np.asarray(value, "f") for name, value in given.items()}
        stored = {**given, **({"axes": np.array([2, 3])} if "x4" in node else {})}
        filled = text.format(shape=shape, node=node.format(**names), **names)
        models.append(model(filled, tmp_path, prefix, **stored))
    found = compared(*models)
    bias = "kb4" if "b4" in used else "kb"
    assert culprit(found) == bias and "ka (" in found.verdict
    assert [row.name for row in found.rows if row.local is not None and row.local.is_wrong] == ["ka"]


def test_nodes_may_be_unsorted(tmp_path: Path) -> None:
    first = model(CHAIN, tmp_path, "first")
    proto = onnx.load(tmp_path / "first.onnx")
    nodes = list(proto.graph.node)
    del proto.graph.node[:]
    proto.graph.node.extend(reversed(nodes))
    onnx.save(proto, tmp_path / "reversed.onnx")
    assert compared(first, load_model(tmp_path / "reversed.onnx"), x=X).ok
    proto.graph.node[0].input[0] = "y"  # a cycle
    onnx.save(proto, tmp_path / "cycle.onnx")
    with pytest.raises(DumpError, match="cycle"):
        load_model(tmp_path / "cycle.onnx")


def test_a_size_that_is_part_of_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where a size is symbolic, a second one is run."""
    text = "g (float[batch, 6] x) => (float[n, 3] y) { y = Reshape(x, s) }"
    model(text, tmp_path, "first", s=np.array([-1, 3]))
    model(text, tmp_path, "second", s=np.array([6, 3]))
    one, other = tmp_path / "first.onnx", tmp_path / "second.onnx"
    assert command(capsys, "compare", one, other, "--dim", "batch=3")[0] == 0
    code, out, _ = command(capsys, "compare", one, other)
    assert code == 1 and "batch=5" in out
    assert command(capsys, "compare", one, one)[0] == 0


def test_a_file_with_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model("g (float[64] x) => (float[64] y) { a = Sin(x) \n y = Gelu(a) }", tmp_path, "one")
    one = tmp_path / "one.onnx"
    for switches in (
        ["--b-optimize"],
        ["--b-threads", "2"],
        ["--b-runtime", "reference"],
        ["--a-runtime", "reference"],
    ):
        assert command(capsys, "compare", one, *switches)[0] == 0
    assert command(capsys, "compare", one)[0] == 2


def layers(number: int, fault: float = 0.0) -> torch.nn.Module:
    """A residual network; one layer in the middle may be wrong by a factor."""

    class Layer(torch.nn.Module):
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.norm, self.inner = torch.nn.LayerNorm(16), torch.nn.Linear(16, 16)
            self.factor = factor

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.nn.functional.gelu(self.inner(self.norm(x)))
            return x + (y * self.factor if self.factor != 1 else y)

    torch.manual_seed(0)
    return torch.nn.Sequential(*(Layer(1 + fault * (i == number // 2)) for i in range(number)))


def export(module: torch.nn.Module, path: Path, **options: object) -> OnnxModel:
    torch.onnx.export(module.eval(), (torch.randn(4, 16),), path, dynamo=True, verbose=False, **options)
    return load_model(path, path.stem)


@pytest.mark.parametrize("fault", [1e-2, 1e-4])
def test_a_factor_in_the_middle_of_twelve_layers(tmp_path: Path, fault: float) -> None:
    first = export(layers(12), tmp_path / "first.onnx")
    second = export(layers(12, fault), tmp_path / "second.onnx")
    feeds = generated_inputs(first, sizes={}, seed=0)
    found = compare(first, second, feeds, Runtime())
    assert not found.ok and found.first_different is not None and found.first_different.first is not None
    # The first value behind the seventh GELU: its residual addition.
    gelus = [row.first.name for row in found.rows if row.first and row.first.operator == "Gelu"]
    after = [row for row in found.rows if row.first and row.first.operator == "Add"]
    assert len(gelus) == 12
    assert found.first_different.first.name == after[6].first.name  # type: ignore[union-attr]
    assert compare(first, first, feeds, Runtime(optimize=True)).ok


def test_opsets_local_functions_and_optimized_forms_agree(tmp_path: Path) -> None:
    first = export(layers(2), tmp_path / "first.onnx", opset_version=18)
    second = export(layers(2), tmp_path / "second.onnx", opset_version=23, optimize=False)
    assert first.model.opset_imports != second.model.opset_imports
    for runtime in (Runtime(), Runtime(optimize=True), Runtime("reference")):
        assert compare(first, second, {}, runtime).ok
    function = (
        HEAD.replace("]>", ', "my": 1]>')
        + "g (float[2,3] x) => (float[2,3] y) { y = my.f(x) } "
        + '<domain: "my", opset_import: ["": 21]> f (v) => (w) { a = Relu(v) \n b = Exp(a) \n w = Sub(b, a) }'
    )
    path = tmp_path / "function.onnx"
    onnx.save(parser.parse_model(function), path)
    found = compared(model(CHAIN, tmp_path), load_model(path), x=X)
    assert [mark for mark, _ in marks(found)] == ["="] * 5, "the values in the function are rows too"


def test_our_export_against_that_of_pytorch(tmp_path: Path) -> None:
    module = layers(3)
    options = {"dump_dir": str(tmp_path / "dump")}
    with torch.no_grad():
        torch.compile(module, backend="onnx_debug", options=options)(torch.randn(4, 16))
    export(module, tmp_path / "exported.onnx")
    [ours] = targets_of("0", str(tmp_path / "dump"))
    [exported] = targets_of(str(tmp_path / "exported.onnx"), None)
    for one, other in ((ours, exported), (exported, ours)):
        found = compare_targets(one, other, Runtime())
        assert found.verdict == "ok"
        aligned = [row for row in found.rows if row.first and row.second and row.first.kind == "result"]
        assert len(aligned) == 12, "layer norm, linear, GELU and addition of each layer"


def test_float16_against_float32(tmp_path: Path) -> None:
    first = model(CHAIN, tmp_path, "first")
    half = (
        "g (float[2,3] x) => (float[2,3] y) { h = Cast<to=10>(x) \n a = Relu(h) \n b = Exp(a) \n c = Sub(b, a) \n "
        "y = Cast<to=1>(c) }"
    )
    second = model(half, tmp_path, "second")
    for found in (compared(first, second, x=X), compared(second, first, x=X)):
        assert found.ok, "the rounding is float16's"
    wrong = model(half.replace("Sub(b, a)", "Add(b, a)"), tmp_path, "wrong")
    assert not compared(first, wrong, x=X).ok


def test_an_input_of_another_precision_is_the_same_input(tmp_path: Path) -> None:
    first = model(CHAIN, tmp_path, "first")
    second = model(CHAIN.replace("float[", "double["), tmp_path, "second")
    assert compared(first, second, x=X).ok and compared(second, first, x=X.astype(np.float64)).ok


def test_small_errors_in_ordinary_operators_are_not_rounding(tmp_path: Path) -> None:
    first = model("g (float[64] x) => (float[64] y) { y = Gelu(x) }", tmp_path, "first")
    second = model('g (float[64] x) => (float[64] y) { y = Gelu<approximate="tanh">(x) }', tmp_path, "second")
    x = np.random.default_rng(0).standard_normal(64).astype(np.float32)
    found = compared(first, second, x=x)
    assert culprit(found) == "y"


def test_cancellation_is_rounding(tmp_path: Path) -> None:
    """Large terms cancel: what is left is all rounding, and moves with it."""
    text = "g (float[64] x) => (float[64] y) {{ a = Add(x, c) \n b = {} \n y = Sub(b, c) }}"
    x = np.random.default_rng(0).standard_normal(64).astype(np.float32) * 1e-3
    big = np.full(64, 1234.567, np.float32)
    first = model(text.format("Mul(a, k)"), tmp_path, "first", c=big, k=np.array([1.0], np.float32))
    second = model(text.format("Exp(l)").replace("b =", "l = Log(a) \n b ="), tmp_path, "second", c=big)
    found = compared(first, second, x=x)
    assert found.ok
    row = found.outputs[0]
    assert row.total is not None and row.total.noise > 1e-3


def test_nan_in_one_only_diverges(tmp_path: Path) -> None:
    first = model("g (float[2,3] x) => (float[2,3] y) { a = Abs(x) \n y = Sqrt(a) }", tmp_path, "first")
    second = model("g (float[2,3] x) => (float[2,3] y) { a = Identity(x) \n y = Sqrt(a) }", tmp_path, "second")
    found = compared(first, second, x=X)
    assert culprit(found) == "a"
    nothing = model("g (float[2,3] x) => (float[2,3] y) { y = Sqrt(x) }", tmp_path, "nothing")
    assert compared(nothing, nothing, x=X).ok, "NaN is NaN"


EXOTIC = {
    "bfloat16": ("g (float[2,3] x) => (bfloat16[2,3] y) { y = Cast<to=16>(x) }", "bfloat16"),
    "float8": ("g (float[2,3] x) => (float8e4m3fn[2,3] y) { y = Cast<to=17>(x) }", "float8_e4m3fn"),
    "int4": ("g (float[2,3] x) => (int4[2,3] y) { y = Cast<to=22>(x) }", "int4"),
    "bool": ("g (float[2,3] x) => (bool[2,3] y) { y = Greater(x, x) }", "bool"),
    "string": ("g (float[2,3] x) => (string[2,3] y) { y = Cast<to=8>(x) }", "string"),
    "double": ("g (float[2,3] x) => (double[2,3] y) { y = Cast<to=11>(x) }", "float64"),
}


@pytest.mark.parametrize("runtime", [Runtime(), Runtime("reference")], ids=["ort", "reference"])
@pytest.mark.parametrize("name", EXOTIC)
def test_all_types_of_tensors(tmp_path: Path, name: str, runtime: Runtime) -> None:
    text, dtype = EXOTIC[name]
    first = model(text, tmp_path, "first")
    found = compared(first, first, runtime, x=X)
    assert found.ok and found.outputs[0].first is not None and found.outputs[0].first.type == dtype
    changed = (
        text.replace("{ y = ", "{ z = Mul(x, x) \n y = ").replace("(x) }", "(z) }").replace("(x, x) }", "(z, x) }")
    )
    assert not compared(first, model(changed, tmp_path, "second"), runtime, x=X).ok


def test_inputs_of_all_types(tmp_path: Path) -> None:
    numbers = np.array([1, -2, 0.5, 3], dtype=np.float32)
    for onnx_name, dtype in (
        ("bfloat16", ml_dtypes.bfloat16),
        ("float8e5m2", ml_dtypes.float8_e5m2),
        ("float16", "f2"),
    ):
        first = model(f"g ({onnx_name}[4] x) => (float[4] y) {{ y = Cast<to=1>(x) }}", tmp_path)
        run = run_model(first, {"x": numbers.astype(dtype)}, Runtime())
        np.testing.assert_array_equal(run.outputs["y"], numbers)  # type: ignore[arg-type]
        assert compared(first, first).ok, "made up"
    text = model("g (string[2] x) => (string[2] y) { y = Identity(x) }", tmp_path)
    assert compared(text, text, x=np.array(["a", "é"], dtype=object)).ok


def test_sequences_and_optionals(tmp_path: Path) -> None:
    text = "g (float[2,3] x) => (seq(float[2,3]) y) { a = Relu(x) \n y = SequenceConstruct(a, x) }"
    first = model(text, tmp_path, "first")
    found = compared(first, first, x=X)
    assert found.ok and found.outputs[0].first is not None and found.outputs[0].first.type == "sequence of 2"
    longer = model(text.replace("(a, x)", "(a, x, x)"), tmp_path, "longer")
    assert culprit(compared(first, longer, x=X)) == "y"
    given = model("g (seq(float[2,3]) x) => (int64 y) { y = SequenceLength(x) }", tmp_path, "given")
    with pytest.raises(DumpError, match=r" x \(sequence\)"):
        compared(given, given)


def test_shapes_that_differ(tmp_path: Path) -> None:
    first = model("g (float[2,3] x) => (float[2,3] y) { y = Relu(x) }", tmp_path, "first")
    second = model(
        "g (float[2,3] x) => (float[2,1] y) { y = ReduceMax(x, one) }", tmp_path, "second", one=np.array([1])
    )
    found = compared(first, second, x=X)
    assert culprit(found) == "y"


def test_symbolic_dimensions_and_indices(tmp_path: Path) -> None:
    text = (
        "g (int64[batch, n] ids, float[batch, k] x) => (float y) { low = Less(ids, zero) \n"
        " where = Where(low, zero, ids) \n e = Gather(table, where) \n s = ReduceSum<keepdims=0>(e) \n "
        "t = ReduceSum<keepdims=0>(x) \n y = Add(s, t) }"
    )
    first = model(text, tmp_path, table=np.ones((7, 2), np.float32), zero=np.array(0))
    feeds = generated_inputs(first, sizes={"batch": 5, "n": 40}, seed=0)
    assert {name: value.shape for name, value in feeds.items()} == {"ids": (5, 40), "x": (5, 3)}  # type: ignore[union-attr]
    ids = feeds["ids"]
    assert isinstance(ids, np.ndarray) and ids.min() == 0 and ids.max() == 6, "indices of a table of seven rows"
    shaped = model("g (float[2,3] x, int64[1] s) => (float[n] y) { y = Reshape(x, s) }", tmp_path)
    with pytest.raises(DumpError, match=r" s\b.*shape"):
        generated_inputs(shaped, sizes={}, seed=0)


def test_stored_inputs(tmp_path: Path) -> None:
    first = model("g (float[2,3] x, float[2,3] z) => (float[2,3] y) { y = Sub(x, z) }", tmp_path)
    folder = tmp_path / "test_data_set_0"
    folder.mkdir()
    for i, (name, value) in enumerate((("x", X), ("z", X + 1))):
        (folder / f"input_{i}.pb").write_bytes(onnx.numpy_helper.from_array(value, name).SerializeToString())
    np.savez(tmp_path / "named.npz", x=X, z=X + 1)
    np.savez(tmp_path / "numbered.npz", X, X + 1)
    pb = [folder / "input_0.pb", folder / "input_1.pb"]
    for paths in ([folder], [tmp_path], pb, [tmp_path / "named.npz"], [tmp_path / "numbered.npz"]):
        feeds = read_feeds(paths, first)
        np.testing.assert_array_equal(run_model(first, feeds, Runtime()).outputs["y"], np.full((2, 3), -1))  # type: ignore[arg-type]
    np.savez(tmp_path / "pickled.npz", x=np.array([{}], dtype=object))
    with pytest.raises(DumpError, match="pickled.npz cannot be read.*allow_pickle"):
        read_feeds([tmp_path / "pickled.npz"], first)
    with pytest.raises(DumpError, match="nothing.pb does not exist"):
        read_feeds([tmp_path / "nothing.pb"], first)
    with pytest.raises(DumpError, match=" z .*float32 2x3.* int64 2x3"):
        run_model(first, {"x": X, "z": np.ones((2, 3), np.int64)}, Runtime())
    with pytest.raises(DumpError, match=r" z \(float32 2x3\)"):
        run_model(first, {"x": X}, Runtime())


def external(name: str, sizes: list[int], location: str) -> TensorProto:
    """A float32 initializer in another file."""
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=sizes, data_location=TensorProto.EXTERNAL)
    for key, value in (("location", location), ("offset", "0"), ("length", str(int(np.prod(sizes)) * 4))):
        entry = tensor.external_data.add()
        entry.key, entry.value = key, value
    return tensor


def test_more_than_two_gigabytes(tmp_path: Path) -> None:
    """A sparse file: neither the disk nor the memory ever holds it."""
    rows, width = 600_000, 1024
    proto = parser.parse_model(HEAD + "g (int64[3] i) => (float[3,1024] y) { e = Gather(w, i) \n y = Exp(e) }")
    proto.graph.initializer.append(external("w", [rows, width], "w.data"))
    onnx.save(proto, tmp_path / "large.onnx")
    with open(tmp_path / "w.data", "wb") as file:
        file.truncate(rows * width * 4)
    assert (tmp_path / "w.data").stat().st_size > 2**31
    first = load_model(tmp_path / "large.onnx", "large")
    feeds = {"i": np.array([0, 7, rows - 1])}
    for name in ("ort", "reference"):
        run = run_model(first, feeds, Runtime(name))
        np.testing.assert_array_equal(run.outputs["y"], np.ones((3, width)))  # type: ignore[arg-type]
    with pytest.raises(DumpError, match="cannot be read"):
        (tmp_path / "w.data").unlink()
        load_model(tmp_path / "large.onnx")


def test_external_data_outside_of_the_folder_is_not_read(tmp_path: Path) -> None:
    proto = parser.parse_model(HEAD + "g (float[2] x) => (float[2] y) { y = Add(x, w) }")
    proto.graph.initializer.append(external("w", [2], "../secret"))
    inner = tmp_path / "inner"
    inner.mkdir()
    (tmp_path / "secret").write_bytes(b"12345678")
    onnx.save(proto, inner / "model.onnx")
    with pytest.raises(DumpError, match=str(tmp_path / "secret")):
        _ = load_model(inner / "model.onnx").initializers["w"]


def test_operators_that_the_reference_does_not_have(tmp_path: Path) -> None:
    head = HEAD.replace("]>", ', "com.microsoft": 1]>')
    known = model(
        "g (float[2,3] x) => (float[2,2] y) { y = com.microsoft.FusedMatMul<transB=1>(x, x) }", tmp_path, "known", head
    )
    plain = model("g (float[2,3] x) => (float[2,2] y) { t = Transpose(x) \n y = MatMul(x, t) }", tmp_path, "plain")
    assert compared(known, plain, Runtime("reference"), x=X).ok, "onnx-array-api has this one"
    unknown = model(
        "g (float[2,3] x) => (float[2,3] y) { y = com.microsoft.BiasGelu(x, b) }",
        tmp_path,
        "unknown",
        head,
        b=np.zeros(3, np.float32),
    )
    with pytest.raises(DumpError, match="BiasGelu"):
        compared(unknown, unknown, Runtime("reference"), x=X)
    assert compared(unknown, unknown, x=X).ok


def test_scatter_elements_of_onnx_array_api_is_still_wrong(tmp_path: Path) -> None:
    """It takes the reduction ``mul`` for none; when this fails, ``model_values.reference_evaluator`` can use it."""
    from onnx_array_api.reference import ExtendedReferenceEvaluator

    text = 'g (float[3] x, int64[1] i, float[1] u) => (float[3] y) { y = ScatterElements<reduction="mul">(x, i, u) }'
    scatter = model(text, tmp_path)
    feeds = {"x": np.full(3, 2, np.float32), "i": np.array([1]), "u": np.array([5], np.float32)}
    for name in ("ort", "reference"):
        np.testing.assert_array_equal(run_model(scatter, feeds, Runtime(name)).outputs["y"], [2, 10, 2])  # type: ignore[arg-type]
    theirs = ExtendedReferenceEvaluator(ir.to_proto(scatter.model)).run(None, feeds)
    np.testing.assert_array_equal(theirs[0], [2, 5, 2])


def test_sparse_initializers_and_maps(tmp_path: Path) -> None:
    """They are refused. When the last assertions fail, onnx-ir can represent them."""
    helper = onnx.helper
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 3]) for name in "xy")
    stored = helper.make_tensor("w", TensorProto.FLOAT, [1], [5.0]), helper.make_tensor("w_at", 7, [1, 2], [0, 1])
    weights = helper.make_sparse_tensor(*stored, [1, 3])
    add = helper.make_node("Add", ["x", "w"], ["y"])
    zipped = helper.make_node("ZipMap", ["x"], ["z"], domain="ai.onnx.ml", classlabels_int64s=[0, 1, 2])
    of_maps = helper.make_map_type_proto(TensorProto.INT64, helper.make_tensor_type_proto(TensorProto.FLOAT, []))
    z = helper.make_value_info("z", helper.make_sequence_type_proto(of_maps))
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("ai.onnx.ml", 3)]
    sparse, maps = (
        helper.make_model(
            helper.make_graph(nodes, "g", [x], [output], sparse_initializer=[weights] if output is y else []),
            opset_imports=opsets,
            ir_version=10,
        )
        for nodes, output in (([add], y), ([zipped], z))
    )
    for proto in (sparse, maps):
        onnx.save(proto, tmp_path / "model.onnx")
        with pytest.raises(DumpError, match="sparse|map"):
            load_model(tmp_path / "model.onnx")
    assert not ir.to_proto(ir.from_proto(sparse)).graph.sparse_initializer
    with pytest.raises(ir.serde.SerdeError):
        ir.from_proto(maps)


def test_gather_elements_of_onnx_is_still_wrong(tmp_path: Path) -> None:
    """Of more than 64 rows, or with fewer indices; when this fails, ``model_values.reference_evaluator`` can use it."""
    text = "g (float[100,2] x, int64[100,2] i) => (float[100,2] y) { y = GatherElements<axis=0>(x, i) }"
    gather = model(text, tmp_path)
    generator = np.random.default_rng(0)
    x = generator.standard_normal((100, 2)).astype(np.float32)
    i = generator.integers(-100, 100, (100, 2))
    for name in ("ort", "reference"):
        found = run_model(gather, {"x": x, "i": i}, Runtime(name)).outputs["y"]
        np.testing.assert_array_equal(found, np.take_along_axis(x, i, 0))  # type: ignore[arg-type]
    with pytest.raises((ValueError, IndexError)):
        ReferenceEvaluator(ir.to_proto(gather.model)).run(None, {"x": x, "i": i})
    text = text.replace("int64[100,2]", "int64[3,1]").replace("float[100,2] y", "float[3,1] y")
    smaller = model(text, tmp_path, "smaller")
    few = np.array([[5], [0], [39]])
    for name in ("ort", "reference"):
        found = run_model(smaller, {"x": x, "i": few}, Runtime(name)).outputs["y"]
        np.testing.assert_array_equal(found, x[few[:, 0], :1])  # type: ignore[arg-type]


def test_a_long_table_shows_where_it_diverges(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = [f"v{i + 1} = Sin(v{i})" for i in range(300)]
    text = "g (float[4] v0) => (float[4] v300) {{ {} }}"
    model(text.format("\n".join(steps)), tmp_path, "first")
    steps[150] = "v151 = Cos(v150)"
    model(text.format("\n".join(steps)), tmp_path, "second")
    one, other = tmp_path / "first.onnx", tmp_path / "second.onnx"
    code, out, _ = command(capsys, "compare", one, other)
    lines = [line for line in out.splitlines() if " result " in line]
    assert code == 1 and len(lines) == 1 and lines[0].startswith("!>") and "v151" in lines[0]
    code, out, _ = command(capsys, "compare", one, other, "--all")
    assert len([line for line in out.splitlines() if " result " in line]) == 300
    code, out, _ = command(capsys, "compare", one, one)
    assert code == 0 and not [line for line in out.splitlines() if " result " in line]


def test_optimized_forms_are_what_is_shown(tmp_path: Path) -> None:
    text = (
        "g (float[2,8] x) => (float[2,8] y) { d = Div(x, r) \n e = Erf(d) \n a = Add(e, one) \n m = Mul(x, a) \n "
        "y = Mul(m, half) }"
    )
    constants = {"r": np.array(2**0.5, "f"), "one": np.array(1, "f"), "half": np.array(0.5, "f")}
    gelu = model(text, tmp_path, **constants)
    x = np.random.default_rng(0).standard_normal((2, 8)).astype(np.float32)
    plain, optimized = compared(gelu, gelu, x=x), compared(gelu, gelu, Runtime(optimize=True), x=x)
    assert "Erf" in {row.first.operator for row in plain.rows if row.first}
    assert {row.first.operator for row in optimized.rows if row.first} >= {"Gelu"}
    assert "Erf" not in {row.first.operator for row in optimized.rows if row.first}


def test_random_numbers_are_said_to_differ(tmp_path: Path) -> None:
    text = "g (float[64] x) => (float[64] y) { r = RandomNormalLike(x) \n y = Add(x, r) }"
    first = model(text, tmp_path)
    assert any("RandomNormalLike" in note for note in compared(first, first).notes)


def test_thousands_of_nodes_are_aligned(tmp_path: Path) -> None:
    """5,000 against 2,500 of other names."""

    def chain(number: int, prefix: str, step: str) -> str:
        names = ["x", *(f"{prefix}{i}" for i in range(number))]
        nodes = [
            f"{b} = {step if i % 2 else 'Tanh'}({a})" for i, (a, b) in enumerate(zip(names, names[1:], strict=False))
        ]
        return f"g (float[4] x) => (float[4] y) {{ {chr(10).join(nodes)} \n y = Identity({names[-1]}) }}"

    first = model(chain(5000, "a", "Identity"), tmp_path, "first")
    second = model(chain(5000, "b", "Abs").replace("Abs", "Identity", 1000), tmp_path, "second")
    found = compared(first, second, x=np.full(4, 0.5, np.float32))
    assert found.ok
    assert sum(row.second is None for row in found.rows) < 2600


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (np.array([1.0, np.nan]), np.array([1.0, np.nan]), 0),
        (np.array([1.0, np.inf]), np.array([1.0, -np.inf]), np.inf),
        (np.array([1.0, -3e38], "f"), np.array([1.5, -3e38], "f"), 0.5),
        (np.array([], "f"), np.array([], "f"), 0),
        (np.array([True, False]), np.array([True, True]), np.inf),
        (np.array([2**62], "i8"), np.array([2**62 + 1], "i8"), np.inf),
        (np.array([1 + 2j], "c8"), np.array([1 + 3j], "c8"), 1),
        (np.array(["a"], object), np.array(["b"], object), np.inf),
    ],
)
def test_differences(first: np.ndarray, second: np.ndarray, expected: float) -> None:
    found = difference(first, second)
    assert found.is_equal == (not found.is_wrong) == (not expected)
    assert found.is_equal or found.error == expected


# The commands.


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of one module, each with a trained graph and one for inference; the second has another activation."""
    folder = tmp_path_factory.mktemp("dumps")
    script = """
import sys, torch
torch.manual_seed(0)
layer = torch.nn.Sequential(torch.nn.Embedding(20, 8), torch.nn.Linear(8, 16), torch.nn.LayerNorm(16))
activation = {"one": torch.exp, "two": torch.sigmoid}[sys.argv[1]]
def step(i, x): return torch.sort(activation(layer(i))).values * x
compiled = torch.compile(step, backend="onnx_debug", options={"dump_dir": sys.argv[1]})
inputs = torch.randint(0, 20, (2, 5)), torch.randn(16)
compiled(*inputs).sum().backward()
with torch.no_grad():
    compiled(*inputs)
"""
    for name in ("one", "two"):
        subprocess.run([sys.executable, "-c", script, name], cwd=folder, check=True, timeout=300)
    return folder


def command(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    try:
        code = main([str(item) for item in arguments])
    except SystemExit as caught:  # the parser's
        code = int(str(caught.code))
    printed = capsys.readouterr()
    return code, printed.out, printed.err


def test_compare_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model(CHAIN, tmp_path, "first")
    model(CHAIN.replace("Sub(b, a)", "Add(a, b)"), tmp_path, "second")
    one, other = tmp_path / "first.onnx", tmp_path / "second.onnx"
    code, out, _ = command(capsys, "compare", one, one)
    assert code == 0 and "(seed 0): x" in out and re.search(r"^ok: ", out, re.M)
    code, out, _ = command(capsys, "compare", one, other)
    assert code == 1 and " y (Sub)" in out
    assert any(line.startswith("!>") and "Sub" in line and "Add" in line for line in out.splitlines())
    assert "try: dynamo-backends compare" in out
    code, out, _ = command(capsys, "compare", one, other, "--json")
    [found] = json.loads(out)
    assert code == 1 and found["first_different"]["first"]["name"] == "y" and not found["ok"]


@pytest.mark.parametrize(
    ("arguments", "datum"),
    [
        (["nothing.onnx", "{one}"], "nothing.onnx"),
        (["{text}", "{one}"], "text.onnx"),
        (["{one}", "{one}", "--provider", "cudda"], "'cudda'.*CPUExecutionProvider"),
        (["{one}", "{one}", "--dim", "batch"], "NAME=VALUE"),
        (["{one}", "{one}", "--inputs", "feeds.npz"], "feeds.npz"),
        (["{one}", "{one}", "--runtime", "reference", "--provider", "cpu"], "--provider .*--runtime ort"),
        (["{one}", "{foreign}"], "foreign.onnx.*What"),
        (["{one}", "{one}", "--dim", "batch=0"], "integer >= 1, got '0'"),
        (["{one}", "{one}", "--dim", "C=4"], "'C'"),
        (["{one}", "--b-threads", "-1"], "integer >= 1, got '-1'"),
        (["mlp"], "ONNX file"),
        (["{one}", "mlp"], "compare mlp .*one.onnx"),
        (["mlp", "{one}", "--seed", "1"], "--seed"),
        (["mlp", "{one}", "--runs", "2"], "--runs"),
        (["{one}", "--runs", "0"], "--runs"),
        (["{one}"], "--b-optimize"),
    ],
)
def test_what_compare_cannot_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: Sequence[str], datum: str
) -> None:
    model(CHAIN, tmp_path, "one")
    model(
        "g (float[2,3] x) => (float[2,3] y) { y = my.What(x) }", tmp_path, "foreign", HEAD.replace("]>", ', "my": 1]>')
    )
    (tmp_path / "text.onnx").write_text("this is no model at all, but a text of some length")
    names = {name: str(tmp_path / f"{name}.onnx") for name in ("one", "text", "foreign")}
    code, out, err = command(capsys, "compare", *(item.format(**names) for item in arguments))
    assert code == 2 and re.search(datum, err), err
    assert "Traceback" not in err and not out


def test_compare_graphs_of_dumps(dumps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = (find_run(dumps / name).folder for name in ("one", "two"))
    code, out, _ = command(capsys, "compare", "0/forward", "0/forward", "-d", dumps / "one")
    assert code == 0 and re.search(r"^ok: ", out, re.M)
    code, out, _ = command(capsys, "compare", one / "graph_000/forward/region_0", two / "graph_000/forward/region_0")
    assert code == 1
    assert re.search(r"diverges at \w+ \((Exp|Sigmoid)\b", out)
    code, out, _ = command(
        capsys, "compare", one / "graph_001", two / "graph_001", "--inputs", two / "graph_001/inference/region_0"
    )
    assert code == 2, "the graphs have two regions each"
    names = [folder / "graph_001/inference/region_0" for folder in (one, two)]
    code, out, _ = command(capsys, "compare", *names, "--inputs", names[1])
    assert code == 1 and re.search(r"diverges at \w+ \(Exp\b", out), out
    code, out, _ = command(capsys, "compare", "1", "1", "-d", dumps / "one", "--stage", "onnx_optimized", "--optimize")
    assert code == 0
    code, _, err = command(capsys, "compare", "0/forward", "1/nothing", "-d", dumps / "one")
    assert code == 2 and "no graph '1/nothing'" in err
    code, _, err = command(capsys, "show", "1/backward", "-d", dumps / "one")
    assert code == 2 and "graph 1 has no backward, only inference" in err


@pytest.mark.parametrize("name", ["nan", "precision", "profile"])
def test_commands_that_take_no_file(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model(CHAIN, tmp_path, "one")
    code, _, err = command(capsys, name, tmp_path / "one.onnx")
    assert code == 2 and "compare, bisect" in err


@pytest.mark.parametrize("arguments", [["ls"], ["show", "0/forward"], ["compare", "--help"]])
def test_no_pytorch_is_imported(dumps: Path, arguments: list[str]) -> None:
    script = f"""
import sys
sys.modules["torch"] = None  # an import fails
from dynamo_backends.cli import build_parser, main
try:
    code = main({arguments!r} + (["-d", "one"] if "--help" not in {arguments!r} else []))
except SystemExit as end:
    code = end.code
sys.exit(code)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=dumps, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_all_switches_are_documented() -> None:
    name = "compare"
    page = (Path(__file__).parents[2] / "docs" / "command_line.md").read_text(encoding="utf-8")
    section = page[page.index(f"## {name}:") :].partition("\n## ")[0]
    [commands] = [item for item in build_parser([name])._actions if isinstance(item, argparse._SubParsersAction)]
    switches = {item for action in commands.choices[name]._actions for item in action.option_strings}
    of_all_commands = {"-h", "--help", "-d", "--dump", "--json"}
    assert not {item for item in switches - of_all_commands if f"`{item}" not in section}
    assert "`-d FOLDER`" in page and "`--json`" in page


def test_models_without_inputs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a data set beside them, which has no inputs, and without."""
    for name, number in (("a", 1.0), ("b", 1.0), ("c", 2.0)):
        folder = tmp_path / name
        folder.mkdir()
        constant = HEAD + f"g () => (float[1] y) {{ x = Constant <value_floats = [{number}]> () \n y = Exp(x) }}"
        onnx.save(parser.parse_model(constant), folder / "model.onnx")
    for i in range(2):
        paths = [tmp_path / name / "model.onnx" for name in "abc"]
        assert command(capsys, "compare", paths[0], paths[1])[0] == 0
        code, out, _ = command(capsys, "compare", paths[0], paths[2])
        assert code == 1 and "diverges at " in out
        if i == 0:
            (tmp_path / "a" / "test_data_set_0").mkdir()
            output = onnx.numpy_helper.from_array(np.exp(np.ones(1, np.float32)), "y")
            (tmp_path / "a" / "test_data_set_0" / "output_0.pb").write_bytes(output.SerializeToString())


SPLIT = """
import sys, torch
torch.manual_seed(0)
layer = torch.nn.Linear(4, 4).requires_grad_(False)
def function(x):
    y = layer(x).tanh()
    if "split" in sys.argv[0]:
        y = torch.sort(y, stable=True).values
    return layer(y).exp().sin()
torch.compile(function, backend="onnx_debug", options={"dump_dir": "split" if "split" in sys.argv[0] else "whole"})(
    torch.ones(3, 4))
"""


def test_graphs_with_other_numbers_of_regions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Their regions are named, to compare one of each."""
    make_dump(tmp_path, SPLIT)
    make_dump(tmp_path, SPLIT, "split.py")
    whole, split = (tmp_path / name / "latest" / "graph_000" for name in ("whole", "split"))
    code, _, err = command(capsys, "compare", whole, split)
    assert code == 2 and "graph_000/inference/region_1" in err
    code, out, err = command(capsys, "compare", *(folder / "inference" / "region_0" for folder in (whole, split)))
    assert code in (0, 1) and not err


def test_what_the_inputs_do_not_show_is_told(tmp_path: Path) -> None:
    """A constant whose values are all cut off, and results that are NaN in both."""
    text = """
        <ir_version: 9, opset_import: ["" : 18]>
        g (float[4, 8] x) => (float[4, 8] y) <float limit = {100.0}, float scale = {SCALE}, float least = {SHIFT}> {
            a = Sub (x, limit)
            b = Relu (a)
            c = Mul (b, scale)
            d = Sqrt (least)
            y = Add (c, d)
        }"""
    notes = []
    for i, (scale, least) in enumerate([("1", "2"), ("3", "2"), ("1", "-2")]):
        path = tmp_path / f"{i}.onnx"
        onnx.save(onnx.parser.parse_model(text.replace("SCALE", scale).replace("SHIFT", least)), path)
    for first, second in ((0, 0), (0, 1), (2, 2)):
        one, other = (load_model(tmp_path / f"{i}.onnx") for i in (first, second))
        found = compare(one, other, {"x": np.ones((4, 8), np.float32)}, Runtime())
        assert found.ok
        notes.append(" ".join(found.notes))
    assert not notes[0]
    assert "constants differ" in notes[1] and "scale" in notes[1]
    assert "32 of 32 elements of y" in notes[2]
