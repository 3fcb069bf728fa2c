"""``dynamo-backends nan``: where NaN and infinities of a dumped graph come from."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path

import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from conftest import compiled
from onnxscript import opset18 as op
from torch import nn

from dynamo_backends.cli import main
from dynamo_backends.dumps.nonfinite import Nonfinite, find_nonfinite
from dynamo_backends.dumps.reading import DumpedGraph, DumpError, find_run
from dynamo_backends.exporter.converters import CONVERTERS
from dynamo_backends.graphs.locations import short_file
from dynamo_backends.numerics.element_records import Extent, NonfiniteElement
from dynamo_backends.numerics.value_range import extent, nonfinite_elements

aten = torch.ops.aten


def line_of(text: str) -> str:
    lines = Path(__file__).read_text().splitlines()
    return f"{short_file(__file__)}:{1 + next(i for i, line in enumerate(lines) if text in line)}"


def dumped(function: Callable[..., object], dump: Path, *arguments: object) -> Nonfinite:
    """The NaN and infinities found in the run of a function without gradients."""
    with torch.no_grad():
        compiled(function, backend="onnx_debug", options={"dump_dir": str(dump)})(*arguments)
    return find_nonfinite(only_graph(dump))


def only_graph(dump: Path) -> DumpedGraph:
    (graph,) = find_run(dump).graphs
    return graph


class Masked(nn.Module):
    """A NaN that a ``where`` masks, in the middle of a model."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.before(x))
        share = y / y  # 0 divided by 0
        return self.after(torch.where(y > 0, share, 0.0))  # masks it


def test_a_nan_that_is_masked_later(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Masked(), torch.randn(4, 8)
    found = dumped(model, tmp_path, x)
    (origin,) = found.origins
    assert (origin.kind, origin.row.operator, origin.row.source) == (
        "NaN",
        "aten.div.Tensor",
        line_of("# 0 divided by 0"),
    )
    zeros = int((torch.relu(model.before(x)) == 0).sum())
    assert 0 < zeros < 32
    assert (origin.eager, origin.onnx, origin.side) == (zeros, zeros, "both")
    assert not origin.used_by and [row.source for row in origin.ends_at] == [line_of("# masks it")]
    assert origin.examples[0].value == "nan" and set(origin.examples[0].inputs.values()) == {0.0}
    (read,) = origin.inputs.values()
    assert read is not None and read.smallest == 0 and read.nan == 0


@pytest.mark.parametrize(
    ("function", "x", "kind"),
    [
        (lambda x: torch.log(x) + 1, [1.0, 0.0], "infinity"),
        (lambda x: torch.log(x) + 1, [1.0, -1.0], "NaN"),
        (lambda x: torch.exp(x) + 1, [1.0, 100.0], "infinity"),
        (lambda x: x * 1e3 + 1, torch.tensor([1.0, 100.0]).half(), "infinity"),
        (lambda x: x - x, [1.0, float("inf")], "NaN"),
    ],
    ids=["log of 0", "log", "exp", "float16", "of infinities"],
)
def test_kinds(function: Callable[[torch.Tensor], torch.Tensor], x: object, kind: str, tmp_path: Path) -> None:
    x = x if isinstance(x, torch.Tensor) else torch.tensor(x)
    first = dumped(function, tmp_path, x).origins[0]
    assert first.kind == kind and first.examples[0].inputs
    assert first.reaches, "it is returned"


def test_a_mask_is_meant_and_what_it_makes_is_not(tmp_path: Path) -> None:
    def attention(scores: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        masked = scores.masked_fill(~keep, float("-inf")).cos()  # the mask
        return masked.nan_to_num() + scores.masked_fill(~keep, float("-inf")).softmax(-1)

    keep = torch.ones(4, 4).tril().bool()
    found = dumped(attention, tmp_path, torch.randn(4, 4), keep)
    assert [origin.row.operator for origin in found.origins] == ["aten.cos.default"], "the cosine of an infinity is NaN"
    assert {origin.row.source.split(":")[-1] for origin in found.intended} >= {line_of("# the mask").split(":")[-1]}
    assert all(origin.kind == "infinity" for origin in found.intended)


def test_what_is_given_is_not_born(tmp_path: Path) -> None:
    def masked(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (scores + mask).softmax(-1)

    mask = torch.full((4, 4), float("-inf")).triu(1)
    found = dumped(masked, tmp_path, torch.randn(4, 4), mask)
    assert (found.origins, found.intended) == ([], [])
    assert len(found.graph_inputs) == 1 and "mask" in found.graph_inputs[0]
    assert main(["nan", only_graph(tmp_path).reference, "-d", str(tmp_path)]) == 0


def test_a_row_that_is_masked_altogether(tmp_path: Path) -> None:
    """The mask is intended, the NaN that softmax makes of it is not."""

    def masked(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (scores + mask).softmax(-1)

    found = dumped(masked, tmp_path, torch.randn(2, 4), torch.full((2, 4), float("-inf")))
    (origin,) = found.origins
    assert origin.kind == "NaN" and origin.row.operator == "aten._softmax.default"


def test_a_node_that_pytorch_runs(tmp_path: Path) -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.det(x * 1e30).nan_to_num() + 1  # in PyTorch

    found = dumped(function, tmp_path, torch.eye(8))
    (origin,) = found.origins
    assert "linalg" in origin.row.operator and origin.row.region is None
    assert origin.row.source == line_of("# in PyTorch") and origin.side == "both" and not origin.reaches


def test_the_gradient_of_a_root_at_zero(tmp_path: Path) -> None:
    """In the backward graph, where the user's line is that of the forward."""

    def norm(x: torch.Tensor) -> torch.Tensor:
        return x.square().sum(-1).sqrt()  # its gradient at 0

    x = torch.randn(3, 4)
    x[1] = 0
    compiled(norm, backend="onnx_debug", options={"dump_dir": str(tmp_path)})(x.requires_grad_()).sum().backward()
    forward, backward = find_run(tmp_path).graphs
    assert find_nonfinite(forward).origins == []
    origins = find_nonfinite(backward).origins
    assert origins[0].kind == "infinity" and origins[0].row.source == line_of("# its gradient at 0")
    assert origins[1].kind == "NaN" and origins[1].reaches, "infinity times 0, in the user's gradient"


class Tail(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.silu(x.abs().neg())  # silu of the tail
        return torch.where(y > -1000, y, 0.0) + 1


class RootMeanSquare(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        square = x * x  # too large for float16
        return x * torch.rsqrt(square.sum(-1, keepdim=True))


def test_a_finite_number_that_is_made_of_an_infinity(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """1 / sqrt(infinity) is 0, which makes eager wrong. The session computes it in float32, and has no infinity."""
    (origin,) = dumped(RootMeanSquare(), tmp_path, torch.tensor([[300.0, 1, 2]]).half()).origins
    assert origin.row.source == line_of("# too large for float16")
    assert (origin.side, origin.eager, origin.onnx) == ("eager", 1, None)
    assert [row.name for row in origin.ends_at] == [row.name for row in origin.used_by] == ["rsqrt"]
    assert main(["nan", only_graph(tmp_path).reference, "-d", str(tmp_path)]) == 1
    assert re.search(r"rsqrt .* computes finite numbers from it", capsys.readouterr().out)


def test_only_onnx_runtime_has_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A wrong translation: the logarithm of a negative number."""
    monkeypatch.setitem(CONVERTERS, aten.silu.default, op.Log)
    (origin,) = dumped(Tail(), tmp_path, torch.randn(16)).origins
    assert (origin.row.name, origin.kind, origin.row.source) == ("silu", "NaN", line_of("# silu of the tail"))
    assert (origin.side, origin.onnx, origin.eager) == ("onnx", 16, 0)
    assert origin.examples[0].value == "nan", "of ONNX Runtime's own values"


def test_only_the_session_that_ran_has_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """ONNX Runtime's optimizers are made to write a logarithm in the place of the SiLU's product."""
    create = onnxruntime.InferenceSession

    def optimize_badly(model: bytes, options: onnxruntime.SessionOptions, **kwargs: object) -> object:
        if options.graph_optimization_level != onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL:
            changed = ir.from_proto(onnx.load_model_from_string(model))
            for node in list(changed.graph):  # without what is added
                if node.outputs[0].name == "silu":
                    wrong = ir.node("Log", [node.inputs[0]])
                    node.outputs[0].name, wrong.outputs[0].name = "before", "silu"
                    node.outputs[0].replace_all_uses_with(wrong.outputs[0])
                    changed.graph.insert_after(node, wrong)
            model = ir.to_proto(changed).SerializeToString()
        return create(model, options, **kwargs)

    monkeypatch.setattr(onnxruntime, "InferenceSession", optimize_badly)
    (origin,) = dumped(Tail(), tmp_path, torch.randn(16)).origins
    assert (origin.row.name, origin.side, origin.onnx, origin.eager) == ("silu", "onnx", 16, 0)
    assert origin.row.source == line_of("# silu of the tail")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    dumped(Masked(), tmp_path, torch.randn(4, 8))
    capsys.readouterr()
    assert main(["nan", only_graph(tmp_path).reference, "-d", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert f" div ({line_of('# 0 divided by 0')})" in shown
    assert re.search(rf"left out by where \({line_of('# masks it')}\)", shown)
    assert main(["nan", only_graph(tmp_path).reference, "-d", str(tmp_path), "--json"]) == 1
    (graph,) = json.loads(capsys.readouterr().out)
    assert graph["origins"][0]["row"]["name"] == "div" and graph["origins"][0]["side"] == "both"


def test_rows_in_another_order(tmp_path: Path) -> None:
    """A row that is added for a verdict stands after its readers."""
    run = dumped(lambda x: (x.log() + 1).cos() * 2, tmp_path, torch.tensor([0.0, 1.0]))
    (first, _) = run.origins
    path = only_graph(tmp_path).folder / "side_by_side.json"
    content = json.loads(path.read_text())
    content["rows"].reverse()
    path.write_text(json.dumps(content))
    (again,) = (item for item in find_nonfinite(only_graph(tmp_path)).origins if item.row.name == first.row.name)
    assert [row.name for row in again.reaches] == [row.name for row in first.reaches] != []


def test_a_graph_that_is_finite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dumped(torch.tanh, tmp_path, torch.randn(4)).origins == []
    assert main(["nan", only_graph(tmp_path).reference, "-d", str(tmp_path)]) == 0
    assert "produced by" not in capsys.readouterr().out


def test_what_was_not_compared_or_is_damaged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = {"dump_dir": str(tmp_path), "compare": "never"}
    with torch.no_grad():
        compiled(torch.tanh, backend="onnx_debug", options=options)(torch.randn(4))
    assert main(["nan", only_graph(tmp_path).reference, "-d", str(tmp_path)]) == 2
    assert "was compared" in capsys.readouterr().err
    graph = find_run(tmp_path).graphs[0]
    for content in ("{", '{"rows": [{"name": "x"}]}', '{"rows": 1}'):
        (graph.folder / "side_by_side.json").write_text(content)
        with pytest.raises(DumpError, match="is damaged"):
            find_nonfinite(graph)


def test_extent() -> None:
    infinity, nan = float("inf"), float("nan")
    assert extent(torch.tensor([1.0, -2.0])) == Extent(-2, 1)
    assert extent(torch.tensor([1.0, -2.0, nan, infinity, -infinity])) == Extent(-2, 1, nan=1, infinite=2)
    assert extent(torch.tensor([nan])) == Extent(None, None, nan=1)
    assert extent(torch.empty(0, 3)) == Extent(None, None)
    assert extent(torch.tensor([complex(1, nan)])) == Extent(1, 1, nan=1)
    assert extent(torch.tensor([3.0, 4.0]).to_sparse()) == Extent(3, 4)
    assert extent(torch.tensor([1, 2])) is None and extent(3.0) is None


def test_elements_with_what_they_are_made_of() -> None:
    result = torch.tensor([[float("inf"), 1.0], [float("nan"), 2.0]])
    inputs = [
        ("column", torch.tensor([[5.0], [6.0]])),
        ("other", torch.randn(7)),
        ("flags", torch.tensor([True, False])),
    ]
    found = nonfinite_elements(result, inputs)
    assert found == [
        NonfiniteElement((1, 0), "nan", {"column": 6.0, "flags": 1.0}),
        NonfiniteElement((0, 0), "inf", {"column": 5.0, "flags": 1.0}),
    ]


def test_the_extent_of_float8() -> None:
    value = torch.tensor([1.5, -2.0, math.nan]).to(torch.float8_e4m3fn)
    assert extent(value) == Extent(-2.0, 1.5, nan=1)
    assert extent(torch.zeros(0, dtype=torch.float8_e5m2)) == Extent(None, None)
