"""Planted faults: the manifest, the command line and the report each name the right node and the user's line.

``test_planted_faults.py`` has more kinds of faults, and checks the verdict only.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from conftest import compiled
from onnxscript import opset18 as op
from torch import fx, nn

from dynamo_backends.cli import main
from dynamo_backends.dumps.reading import find_run
from dynamo_backends.exporter.converters import CONVERTERS
from dynamo_backends.graphs.locations import short_file, stack
from dynamo_backends.weights import changes
from passes import Pass, PassContext

aten = torch.ops.aten


class Layered(nn.Module):
    """Twelve equal layers; the seventh has its own lines."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(12))

    def seventh(self, y: torch.Tensor) -> torch.Tensor:
        activated = F.silu(y)  # seventh: activated
        centered = activated - y  # seventh: centered
        scaled = centered * 0.75  # seventh: scaled
        return torch.where(scaled > -1e9, scaled.sinh(), y)  # seventh: returned

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x)  # the layer
            x = self.seventh(x) if i == 6 else F.silu(x) - x
        return x


def line_of(text: str) -> str:
    lines = Path(__file__).read_text().splitlines()
    return f"{Path(__file__).name}:{1 + next(i for i, line in enumerate(lines) if text in line)}"


def run(model: Callable[..., torch.Tensor], dump: Path, *inputs: torch.Tensor, **settings: object) -> None:
    function = compiled(model, backend="onnx_debug", options={"dump_dir": str(dump)}, **settings)
    torch.manual_seed(0)
    with torch.no_grad():
        for x in inputs or (torch.randn(4, 8),):
            function(x)


def gradients_of(dump: Path) -> list[str]:
    """The gradients that depend on the fault."""
    (wrong,) = [graph for graph in find_run(dump).graphs if graph.verdict != "ok"]
    gradients: list[str] = wrong.entry.blame.gradients
    return gradients


def assert_seen(dump: Path, node: str, line: str, capsys: pytest.CaptureFixture[str], said: str = "") -> None:
    """Asserts that the manifest, ``ls`` and the report name the fault.

    Args:
        dump: the dump folder.
        node: a pattern of the node's name.
        line: the user's ``file:line``.
        capsys: pytest's.
        said: further text of the verdict.
    """
    manifest = json.loads((dump / "latest" / "manifest.json").read_text())
    (wrong,) = [graph for graph in manifest["graphs"] if graph["verdict"] != "ok"]
    assert re.search(rf"\bat {node} \(\S*{re.escape(line)}\)", wrong["verdict"]) and said in wrong["verdict"], wrong
    capsys.readouterr()
    assert main(["ls", str(dump)]) == 1
    listed = " ".join(capsys.readouterr().out.split())
    assert re.search(rf"\b{node}\b", listed) and line in listed
    assert main(["report", str(dump)]) == 1
    page = (dump / "latest" / "report.html").read_text()
    assert re.search(rf"\b{node}\b", page) and line in page and wrong["verdict"].split(" at ")[0] in page


def test_a_translation_is_off_in_one_of_twelve_layers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(CONVERTERS, aten.sinh.default, lambda x: op.Mul(op.Sinh(x), 1.01))
    run(Layered(), tmp_path)
    assert_seen(tmp_path, "sinh", line_of("seventh: returned"), capsys)


def test_a_pass_swaps_operands(
    planted: Callable[[Pass], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def swap(module: fx.GraphModule, context: PassContext) -> int:
        node = module.graph.find_nodes(op="call_function", target=aten.sub.Tensor)[6]
        node.args = (node.args[1], node.args[0])
        context.matches.append(node.name)
        return 1

    planted(Pass("post_grad.swap", "Planted by a test.", swap))
    run(Layered(), tmp_path)
    assert_seen(tmp_path, "sub_6", line_of("seventh: centered"), capsys, "pass post_grad.swap")


def test_a_wrong_pass_is_warned_of_once(
    planted: Callable[[Pass], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def swap(module: fx.GraphModule, context: PassContext) -> int:
        (node,) = module.graph.find_nodes(op="call_function", target=aten.sub.Tensor)
        node.args = (node.args[1], node.args[0])
        return 1

    planted(Pass("post_grad.swap", "Planted by a test.", swap))
    run(lambda x: x.sin() - x, tmp_path, *(torch.randn(n, 8) for n in (2, 3, 4)), dynamic=False)
    graphs = find_run(tmp_path).graphs
    assert len(graphs) == 3 and all(graph.diverges for graph in graphs)
    warned = [item for item in caplog.records if item.levelno >= logging.WARNING and "diverges" in item.getMessage()]
    assert len(warned) == 1


@pytest.mark.parametrize("stage", ["joint", "post_grad"])
def test_a_pass_changes_only_what_is_written_into_an_argument(
    planted: Callable[[Pass], None], tmp_path: Path, capsys: pytest.CaptureFixture[str], stage: str
) -> None:
    def write(x: torch.Tensor) -> torch.Tensor:
        result = x.cos()
        x.add_(x.sin())  # the write
        return result

    def double(module: fx.GraphModule, context: PassContext) -> int:
        (node,) = module.graph.find_nodes(op="call_function", target=aten.sin.default)
        with module.graph.inserting_before(node):
            new = module.graph.call_function(aten.mul.Tensor, (node.args[0], 2))
        new.meta = dict(node.meta)
        node.replace_input_with(node.args[0], new)
        context.matches.append(node.name)
        return 1

    planted(Pass(f"{stage}.double", "Planted by a test.", double))
    run(write, tmp_path)
    assert_seen(tmp_path, "mul_tensor", line_of("# the write"), capsys, f"pass {stage}.double")


def test_a_constant_is_folded_wrongly(
    planted: Callable[[Pass], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fold(model: ir.Model, context: PassContext) -> int:
        for node in model.graph:
            if any(value.name == "mul" for value in node.outputs):
                wrong = ir.node("Constant", [], {"value": ir.tensor(np.float32(0.76))})
                model.graph.insert_before(node, [wrong])
                node.replace_input_with(1, wrong.outputs[0])
                return 1
        return 0

    planted(Pass("onnx.fold_wrongly", "Planted by a test.", fold))
    run(Layered(), tmp_path)
    assert_seen(tmp_path, "mul", line_of("seventh: scaled"), capsys, "pass onnx.fold_wrongly")


def test_a_weight_is_stale(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(changes.Watch, "changed", lambda self, tensors: ([], []))  # nothing is noticed any more
    model = Layered()
    function = compiled(model, backend="onnx_debug", options={"dump_dir": str(tmp_path), "compare": "every"})
    with torch.no_grad():
        function(torch.randn(4, 8))
        model.layers[6].weight.mul_(1.1)
        function(torch.randn(4, 8))
    assert_seen(tmp_path, "t_6", line_of("the layer"), capsys, "layers.6.weight")


def test_an_operator_is_wrong_only_in_the_optimized_session(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    create = onnxruntime.InferenceSession

    def optimize_badly(model: bytes, options: onnxruntime.SessionOptions, **kwargs: object) -> object:
        if options.graph_optimization_level != onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL:
            changed = onnx.load_model_from_string(model)
            for node in changed.graph.node:
                if "sinh" in node.output:
                    node.op_type = "Tan"
            model = changed.SerializeToString()
        return create(model, options, **kwargs)

    monkeypatch.setattr(onnxruntime, "InferenceSession", optimize_badly)
    run(Layered(), tmp_path)
    assert_seen(tmp_path, "sinh", line_of("seventh: returned"), capsys, "ONNX Runtime's optimizers")


def test_a_pass_is_wrong_in_another_region(
    planted: Callable[[Pass], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A later region is judged on what the session before it returned."""

    class Parted(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            less = x.exp() - 0.5 * x  # the difference
            return torch.sort(less, stable=True).values.exp() + less  # its reader

    def swap(model: ir.Model, context: PassContext) -> int:
        for node in model.graph:
            if node.op_type == "Sub":
                first, second = node.inputs
                node.replace_input_with(0, second)
                node.replace_input_with(1, first)
                return 1
        return 0

    planted(Pass("onnx.test.swap", "A test's.", swap))
    run(Parted(), tmp_path)
    assert_seen(tmp_path, "sub", line_of("# the difference"), capsys, "onnx.test.swap")


def test_a_nan_is_born_and_masked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Masked(Layered):
        def seventh(self, y: torch.Tensor) -> torch.Tensor:
            root = torch.expm1(y)  # seventh: root
            return torch.nan_to_num(root, nan=0.0) * 0.0

    monkeypatch.setitem(CONVERTERS, aten.expm1.default, lambda x: op.Sqrt(op.Neg(op.Abs(op.Add(x, 10.0)))))
    run(Masked(), tmp_path)
    assert_seen(tmp_path, "expm1", line_of("seventh: root"), capsys)


def test_a_dtype_is_wrong(planted: Callable[[Pass], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def narrow(module: fx.GraphModule, context: PassContext) -> int:
        (node,) = module.graph.find_nodes(op="call_function", target=aten.sinh.default)
        value = node.meta["val"]
        with module.graph.inserting_after(node):
            whole = module.graph.call_function(aten._to_copy.default, (node,), {"dtype": torch.int32})
        with module.graph.inserting_after(whole):
            back = module.graph.call_function(aten._to_copy.default, (whole,), {"dtype": torch.float32})
        node.replace_all_uses_with(back, lambda user: user is not whole)
        whole.meta, back.meta = {**node.meta, "val": value.int()}, dict(node.meta)
        context.matches.append(node.name)
        return 1

    planted(Pass("post_grad.narrow", "Planted by a test.", narrow))
    run(Layered(), tmp_path)
    assert_seen(tmp_path, r"\w*", line_of("seventh: returned"), capsys, "pass post_grad.narrow")


def test_a_gradient_is_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(CONVERTERS, aten.cosh.default, lambda x: op.Mul(op.Cosh(x), 1.01))
    function = compiled(Layered(), backend="onnx_debug", options={"dump_dir": str(tmp_path)})
    function(torch.randn(4, 8)).sum().backward()
    assert_seen(tmp_path, "cosh", line_of("seventh: returned"), capsys)
    assert set(gradients_of(tmp_path)) >= {"grad of layers.6.bias", "grad of layers.6.weight"}


def twice_the_last(operator: object) -> Callable[[fx.GraphModule, PassContext], int]:
    """A pass that doubles the result of the last node of an operator, by a node without a source line."""

    def double(module: fx.GraphModule, context: PassContext) -> int:
        node = list(module.graph.find_nodes(op="call_function", target=operator))[-1]
        with module.graph.inserting_after(node):
            doubled = module.graph.call_function(aten.mul.Scalar, (node, 2.0))
        node.replace_all_uses_with(doubled, lambda user: user is not doubled)
        doubled.meta = {"val": node.meta["val"]}
        return 1

    return double


def test_a_gradient_is_wrong_after_a_joint_pass(
    planted: Callable[[Pass], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planted(Pass("joint.double", "Planted by a test.", twice_the_last(aten.mm.default)))
    function = compiled(Layered(), backend="onnx_debug", options={"dump_dir": str(tmp_path)})
    function(torch.randn(4, 8)).sum().backward()
    assert_seen(tmp_path, r"\w*", line_of("the layer"), capsys, "pass joint.double")
    assert gradients_of(tmp_path) == ["grad of layers.0.weight"]


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.sinh().asinh() * 2  # the backward of their own


def test_a_gradient_is_wrong_in_a_function_of_the_users(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(CONVERTERS, aten.asinh.default, lambda x: op.Mul(op.Asinh(x), 1.01))
    layer = nn.Linear(8, 8)
    function = compiled(lambda x: Doubled.apply(layer(x)), backend="onnx_debug", options={"dump_dir": str(tmp_path)})
    function(torch.randn(4, 8)).sum().backward()
    assert_seen(tmp_path, "asinh", line_of("the backward of their own"), capsys, "grad of layer.bias")


def test_a_model_of_pytorch_has_the_line_that_calls_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(CONVERTERS, aten.tanh.default, lambda x: op.Mul(op.Tanh(x), 1.01))
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    function = compiled(model, backend="onnx_debug", options={"dump_dir": str(tmp_path)})
    with torch.no_grad():
        function(torch.randn(4, 8))  # the model is called
    assert_seen(tmp_path, "tanh", line_of("the model is called"), capsys)
    (graph,) = find_run(tmp_path).dynamo_graphs
    assert graph.where.file == "torch/nn/modules/container.py"
    called = graph.called_from
    assert graph.where.place.endswith(f", called from {called.file}:{called.line}")
    assert f"{Path(called.file).name}:{called.line}" == line_of("the model is called")


def test_a_model_of_a_library_has_its_line_and_the_line_that_calls_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "site-packages" / "a_model_of_others.py"
    package.parent.mkdir()
    package.write_text(
        "import torch\n\nclass Model(torch.nn.Module):\n    def forward(self, x):\n        return torch.sinh(x)\n"
    )
    monkeypatch.syspath_prepend(str(package.parent))
    from a_model_of_others import Model  # type: ignore[import-not-found]

    monkeypatch.setitem(CONVERTERS, aten.sinh.default, lambda x: op.Mul(op.Sinh(x), 1.01))  # the wrong converter
    function = compiled(Model(), backend="onnx_debug", options={"dump_dir": str(tmp_path)})
    function(torch.randn(4, 8))  # the library is called
    (graph,) = find_run(tmp_path).graphs
    own = f"{short_file(str(Path(__file__).parent))}/{line_of('the library is called')}"
    place = f"a_model_of_others.py:5, called from {own}"
    converter = f"{short_file(str(Path(__file__).parent))}/{line_of('# the wrong converter')}"
    assert graph.verdict == f"diverges at sinh ({place}): converter ({converter}) or kernel"
    assert graph.entry.blame.source == place
    assert place in (graph.folder / "side_by_side.txt").read_text()
    assert "a_model_of_others.py:5 in forward" in (graph.folder.parent / "dynamo.py").read_text()


def test_an_error_shows_only_for_the_second_shape(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong_for_many_rows(x: ir.Value) -> object:
        rows = op.Cast(op.Gather(op.Shape(x), 0), to=1)
        return op.Add(op.Sinh(x), op.Mul(op.Relu(op.Sub(rows, 5.0)), 0.01))

    monkeypatch.setitem(CONVERTERS, aten.sinh.default, wrong_for_many_rows)
    run(Layered(), tmp_path, torch.randn(4, 8), torch.randn(7, 8), dynamic=True)
    assert_seen(tmp_path, "sinh", line_of("seventh: returned"), capsys)


def test_what_is_inaccurate_in_eager_too_is_not_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def cancelling(x: torch.Tensor) -> torch.Tensor:
        return ((x + 1e5) - 1e5).exp() * torch.logsumexp(x * 1e4, 0)

    run(cancelling, tmp_path)
    assert main(["ls", str(tmp_path)]) == 0
    assert "ok" in capsys.readouterr().out


def test_a_node_without_a_line_has_that_of_the_nearest() -> None:
    """Of what it is computed of, however far that is, else of what reads it."""
    graph = fx.Graph()

    def call(target: Callable[..., object], source: fx.Node, trace: str = "") -> fx.Node:
        node = graph.call_function(target, (source,))
        if trace:
            node.meta["stack_trace"] = trace
        return node

    before = call(aten.sin.default, graph.placeholder("x"))
    behind = call(aten.cos.default, before)
    named = call(aten.exp.default, behind, 'File "a.py", line 3, in torch_dynamo_resume_in_forward_at_2\n    y.exp()')
    after = call(aten.neg.default, named)
    far = call(aten.abs.default, after)
    last = call(aten.tan.default, far, 'File "b.py", line 5')  # without its text
    graph.output(last)
    for node in (before, behind, named, after, far):
        (frame,) = stack(node)
        assert (frame.file, frame.line, frame.function, frame.code) == ("a.py", 3, "forward", "y.exp()")
    (frame,) = stack(last)
    assert (frame.file, frame.line, frame.function, frame.code) == ("b.py", 5, "", "")
