"""``export``: the file runs in plain ONNX Runtime under the user's names, and is right; or the model is refused."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import sympy
import torch
from conftest import assert_same_as_eager
from onnxruntime import InferenceSession
from torch import nn
from torch.nn import functional as F
from torch.utils._sympy.functions import Min
from zoo import ZOO

import dynamo_backends
from dynamo_backends import ExportError, export
from dynamo_backends.cli import main
from dynamo_backends.onnx_files import export as export_module
from dynamo_backends.onnx_files.sizes import Size, narrowed
from dynamo_backends.runtime.messages import ORT_ERRORS

CPU = ["CPUExecutionProvider"]


def test_a_language_model_has_the_users_names_and_dynamic_sizes(tmp_path: Path) -> None:
    """Tied weights, a ``ModelOutput``, arguments by keyword, and the user's line at each node."""
    torch.manual_seed(0)
    model = ZOO["bert"].build().eval()
    inputs = {name: value for name, value in ZOO["bert"].inputs().items() if name != "labels"}
    batch, sequence = torch.export.Dim("batch"), torch.export.Dim("sequence", max=64)
    shapes = {name: {0: batch, 1: sequence} for name in inputs}
    path = tmp_path / "bert.onnx"
    exported = export(model, path=path, kwargs=inputs, dynamic_shapes=shapes, check=True)
    assert exported.inputs == {"input_ids": "INT64[batch, sequence]", "attention_mask": "INT64[batch, sequence]"}
    assert exported.outputs == {"logits": "FLOAT[batch, sequence, 99]"}
    assert list(tmp_path.iterdir()) == [path]
    feeds = {"input_ids": np.arange(15).reshape(3, 5), "attention_mask": np.ones((3, 5), np.int64)}
    assert exported.difference(**{name: torch.from_numpy(value) for name, value in feeds.items()}) == ""
    session = InferenceSession(path, providers=CPU)
    with torch.no_grad():
        expected = model(**{name: torch.from_numpy(value) for name, value in feeds.items()}).logits
    torch.testing.assert_close(torch.from_numpy(session.run(["logits"], feeds)[0]), expected)
    proto = onnx.load(path)
    names = [item.name for item in proto.graph.initializer]
    assert "bert.embeddings.word_embeddings.weight" in names and "cls.predictions.decoder.weight" not in names
    assert all("source" in {item.key for item in node.metadata_props} for node in proto.graph.node)
    assert {item.domain for item in proto.opset_import} <= {"", "com.microsoft"}


class Names(nn.Module):
    """Names that ONNX nodes, parameters and results would have too; nested arguments and results; constants."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(
        self, add: torch.Tensor, weight: tuple[Any, ...], times: int = 1, flag: bool = False, mask: object = None
    ) -> dict[str, Any]:
        total = torch.add(add, weight[0]["a"]) * self.weight * times
        moved = torch.add(total, weight[1])
        return {
            "mul": total,
            "add": moved if flag else total,
            "parts": [moved, moved, add, self.weight, torch.ones(2)],
            "numbers": (add.shape[0], 2.5, True, mask),
        }


def test_names_nested_values_and_results_that_no_node_computes(tmp_path: Path) -> None:
    x = torch.randn(3, 4)
    kwargs = {"weight": ({"a": x + 1}, x + 2), "times": 2, "flag": True}
    exported = export(Names(), x, path=tmp_path / "m.onnx", kwargs=kwargs, check=True)
    assert list(exported.inputs) == ["add", "weight_0_a", "weight_1"]
    numbers = {"numbers_0": "INT64[]", "numbers_1": "DOUBLE[]", "numbers_2": "BOOL[]"}
    assert list(exported.outputs) == ["mul", "output_add", *(f"parts_{i}" for i in range(5)), *numbers]
    assert exported.outputs.items() >= numbers.items()
    named = export(
        Names(), x, path=tmp_path / "m.onnx", kwargs=kwargs, input_names=["in"], output_names=["weight", "out"]
    )
    assert list(named.inputs)[0] == "in" and list(named.outputs)[:2] == ["weight", "out"]
    assert named.difference(x, **kwargs) == ""
    for wrong in (["a", "a"], list("abcd")):
        with pytest.raises(ValueError, match="name"):
            export(Names(), x, path=tmp_path / "m.onnx", kwargs=kwargs, input_names=wrong)


class Function(nn.Module):
    """Calls a function with itself and an argument."""

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("state", torch.zeros(4))
        self.dropout, self.norm = nn.Dropout(0.5), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> object:
        return self.function(self, x)


def _adds_to_state(self: Function, x: torch.Tensor) -> torch.Tensor:
    return x + self.state.add_(1)


X = torch.linspace(-1, 1, 12).reshape(3, 4)


@pytest.mark.parametrize(
    ("function", "x"),
    [
        (lambda self, x: x, X),
        (lambda self, x: x.t(), X),  # only a view
        (lambda self, x: x[0, :2].expand(3, 2), X.t()),
        (lambda self, x: torch.empty_like(x).copy_(x) + 1, X),
        (lambda self, x: torch.cat([x, x.new_zeros(0, 4)])[:0], X),
        (lambda self, x: ~x, X > 0),
        (lambda self, x: self.norm(self.dropout(x)), X),
        (lambda self, x: F.gelu(x @ x.t()), X.bfloat16()),
        (lambda self, x: x.softmax(-1), X.half()),
        (lambda self, x: x.std(-1), X.double()),
        (lambda self, x: (torch._check_tensor_all(x < 2), x + 1)[1], X),  # a check that nothing reads
        (lambda self, x: (x @ x.t()).diagonal(1) + torch.trace(x @ x.t()), X),
        (lambda self, x: F.adaptive_max_pool2d(x[None, None], 1), X),
        (lambda self, x: F.adaptive_max_pool2d(x.t()[None, None].relu(), (2, 1)), X),  # not row-major
    ],
)
def test_small_functions_are_right(function: Callable[..., object], x: torch.Tensor, tmp_path: Path) -> None:
    exported = export(Function(function).eval(), x, path=tmp_path / "m.onnx", dynamic_shapes=({0: "rows"},), check=True)
    assert exported.inputs["x"].partition("[")[2].startswith("rows")


@pytest.mark.parametrize(
    ("function", "difference"),
    [
        (lambda self, x: x.topk(2).indices, "equal values"),
        (lambda self, x: x.sort(descending=True), "equal values"),
        (lambda self, x: x.unique(), "NaN"),
        (lambda self, x: x.new_zeros(2, 4).index_add(0, torch.tensor([1, 0, 1]), x, alpha=3), ""),
        (lambda self, x: F.max_unpool2d(*F.max_pool2d(x[None, None, :2], 2, return_indices=True), 2), ""),
    ],
)
def test_what_runs_in_pytorch_elsewhere_is_in_the_file_and_told(
    function: Callable[..., object], difference: str, tmp_path: Path
) -> None:
    """The order of equal values is not defined in PyTorch either; a sum of the same numbers is only slower."""
    exported = export(Function(function), X, path=tmp_path / "m.onnx", check=True)
    assert ["test_export.py:" in text for text in exported.unchecked] == [True] * bool(difference)
    assert all(difference in text for text in exported.unchecked)
    torch._dynamo.reset()
    assert_same_as_eager(lambda x: function(None, x), X.round())


def test_indices_that_eager_rejects_are_errors_in_a_file(tmp_path: Path) -> None:
    maxima = X[:2, None, :1, None]  # in two planes of four places
    index = torch.tensor([3, 1]).reshape(maxima.shape)
    export(Function(lambda self, x: F.max_unpool2d(maxima, x, 2)), index, path=tmp_path / "m.onnx", check=True)
    session = InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    for outside in (-1, 4):
        with pytest.raises(ORT_ERRORS):
            session.run(None, {"x": torch.where(index == 1, index, outside).numpy()})


def test_values_in_no_order_are_told_with_a_difference(tmp_path: Path) -> None:
    unordered = Function(lambda self, x: x.topk(3, sorted=False).values)
    told = export(unordered, X, path=tmp_path / "m.onnx").unchecked
    assert any("sorted=False" in text for text in told)
    export(Function(lambda self, x: x.topk(3, sorted=False).values.sum(-1)), X, path=tmp_path / "m.onnx", check=True)
    with pytest.raises(ExportError, match="sorted=False"):
        export(unordered, X, path=tmp_path / "m.onnx", check=True)


def test_an_example_without_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="size of input is 0"):
        export(nn.Linear(4, 2), X[:0], path=tmp_path / "m.onnx", dynamic_shapes={"input": {0: "rows"}})
    assert export(nn.Linear(4, 2), X[:0], path=tmp_path / "m.onnx", check=True).outputs == {"output": "FLOAT[0, 2]"}


def test_a_model_that_eager_cannot_run_cannot_be_compared(tmp_path: Path) -> None:
    doubled = Function(lambda self, x: x + x)
    with pytest.raises(ExportError, match=r"compared: NotImplementedError: [^\n]*UInt16[^\n]*$"):
        export(doubled, X.to(torch.uint16), path=tmp_path / "m.onnx", check=True)


def test_a_size_without_a_name(tmp_path: Path) -> None:
    shapes = ({0: "rows"},)
    exported = export(Function(lambda self, x: x.t().diagonal()), X, path=tmp_path / "m.onnx", dynamic_shapes=shapes)
    assert exported.outputs == {"output": "FLOAT[?]"}


class MeanPooling(nn.Module):
    """The mean of the tokens that an integer mask selects, as in sentence encoders."""

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return (tokens * mask[..., None]).sum(1) / mask.sum(1, keepdim=True).clamp(min=1)


def test_mean_pooling_counts_tokens_of_any_number(tmp_path: Path) -> None:
    arguments = torch.randn(2, 3, 4), torch.tensor([[1, 1, 0], [0, 0, 0]])
    shapes = ({0: "batch", 1: "length"},) * 2
    exported = export(MeanPooling(), *arguments, path=tmp_path / "m.onnx", dynamic_shapes=shapes, check=True)
    assert exported.inputs["mask"] == "INT64[batch, length]"
    assert exported.difference(torch.randn(5, 7, 4), torch.ones(5, 7, dtype=torch.int64)) == ""


def test_rms_normalization_is_in_onnx_at_each_opset(tmp_path: Path) -> None:
    model = Function(lambda self, x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)).eval()
    for opset, operator in ((18, "Pow"), (23, "RMSNormalization")):
        export(model, X, path=tmp_path / "m.onnx", opset_version=opset, check=True)
        proto = onnx.load(tmp_path / "m.onnx")
        assert proto.opset_import[0].version == opset
        assert operator in {node.op_type for node in proto.graph.node}


class Recurrent(nn.Module):
    """A recurrent layer that is called with its states, and again with its results."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> object:
        _, states = self.layer(x)
        return self.layer(x * 2, states)


@pytest.mark.parametrize(
    ("layer", "length", "nodes"),
    [
        (nn.LSTM(4, 3, 2, bias=False, bidirectional=True, batch_first=True, dropout=0.5).eval(), "length", 4),
        (nn.GRU(4, 3), "length", 2),
        (nn.LSTM(4, 3, proj_size=2), None, 0),  # ONNX has no projections
        (nn.GRU(4, 3).double(), None, 0),  # ONNX Runtime has none in float64
    ],
)
def test_a_recurrent_layer_is_one_node(layer: nn.RNNBase, length: str | None, nodes: int, tmp_path: Path) -> None:
    model, x = Recurrent(layer), torch.randn(2, 3, 4, dtype=layer.weight_ih_l0.dtype)
    batch = int(not layer.batch_first)
    exported = export(
        model, x, path=tmp_path / "m.onnx", dynamic_shapes=({batch: "batch", 1 - batch: length},), check=True
    )
    assert [node.op_type for node in onnx.load(tmp_path / "m.onnx").graph.node].count(layer.mode) == nodes
    assert len(exported.checked) == 3 and len(exported.sizes) == 1 + bool(length)
    assert any("closed" in text for text in exported.unchecked) == bool(nodes)
    if not length:
        with pytest.raises(ExportError, match="its length is dynamic"):
            export(model, x, path=tmp_path / "m.onnx", dynamic_shapes=({1 - batch: "length"},))


@pytest.mark.parametrize(
    "layer",
    [
        nn.LSTM(4, 3),
        nn.LSTM(4, 3, 2, bidirectional=True),
        nn.LSTM(4, 3, bias=False, batch_first=True),
        nn.GRU(4, 3, bias=False),
        nn.GRU(4, 3),
    ],
    ids=str,
)
def test_a_recurrent_layer_keeps_nan_or_tells(layer: nn.RNNBase, tmp_path: Path) -> None:
    x = torch.randn(3, 3, 4)
    exported = export(layer, x, path=tmp_path / "m.onnx", check=True)
    for special in (torch.nan, torch.inf):
        x[1, 1, 2] = special
        loses = isinstance(layer, nn.GRU) and layer.bias
        assert loses or exported.difference(x) == ""
        assert any("NaN" in text for text in exported.unchecked) == loses


@pytest.mark.parametrize("layer", [nn.LSTM(4, 3), nn.GRU(4, 3), nn.RNN(4, 3)], ids=str)
def test_a_recurrent_layer_under_autocast_is_refused(layer: nn.RNNBase, tmp_path: Path) -> None:
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ExportError, match="autocast"):
        export(layer, torch.randn(3, 2, 4), path=tmp_path / "m.onnx")


@pytest.mark.parametrize(
    ("mode", "padding", "offsets"),
    [("sum", None, [0, 3, 3, 6]), ("mean", 2, [0, 3, 3, 8]), ("max", 2, None), ("max", None, [0, 3, 3, 8])],
)
def test_embedding_bags(mode: str, padding: int | None, offsets: list[int] | None, tmp_path: Path) -> None:
    bag, ids = nn.EmbeddingBag(10, 3, mode=mode, padding_idx=padding), torch.tensor([1, 2, 4, 5, 4, 3, 2, 9])
    args = (ids.view(4, 2),) if offsets is None else (ids, torch.tensor(offsets))
    weights = {"per_sample_weights": torch.randn(8)} if mode == "sum" else {}
    export(bag, *args, path=tmp_path / "m.onnx", kwargs=weights, check=True)
    if not weights:
        with pytest.raises(ExportError, match="rounds to float32"):
            export(bag.double(), *args, path=tmp_path / "m.onnx")


class Named(nn.Module):
    def forward(self, x: torch.Tensor, *, b: torch.Tensor, c: torch.Tensor, factor: float = 2.0) -> torch.Tensor:
        return x - 2 * b + c * c * factor


def test_arguments_go_to_their_inputs_however_they_are_passed(tmp_path: Path) -> None:
    x, b, c = torch.randn(3, 2, 4)
    exported = export(Named(), x, path=tmp_path / "m.onnx", kwargs={"c": c, "b": b}, check=[((x,), {"b": c, "c": b})])
    assert list(exported.inputs) == ["x", "b", "c"] and len(exported.checked) == 2
    for kwargs in ({"b": b, "c": c}, {"c": c, "b": b}, {"c": c, "factor": 2.0, "b": b}):
        torch.testing.assert_close(exported.run(x, **kwargs)["output"], Named()(x, **kwargs))
        assert exported.difference(x, **kwargs) == ""
    for missing_or_constant in ({"b": b}, {"b": b, "c": c, "factor": 3.0}):
        with pytest.raises(TypeError, match="'c'|factor"):
            exported.run(x, **missing_or_constant)
    with_factor = export(Named(), x, path=tmp_path / "m.onnx", kwargs={"c": c, "b": b, "factor": 3.0})
    with pytest.raises(ValueError, match="constant of the file"):
        with_factor.run(x, b=b, c=c)


class Scaled(nn.Module):
    def forward(self, x: torch.Tensor, scale: object = None, shift: float = 1.5) -> torch.Tensor:
        return x + shift if scale is None else x * scale + shift


@pytest.mark.parametrize(
    ("constant", "other"),
    [(2, 2.0), (1, True), (0.0, -0.0), (2.0, torch.tensor(5.0)), (None, torch.tensor(5.0)), (2.0, None)],
)
def test_a_constant_has_the_same_type_and_value(constant: object, other: object, tmp_path: Path) -> None:
    x = torch.ones(2)
    exported = export(Scaled(), x, path=tmp_path / "m.onnx", kwargs={"scale": constant})
    for call in (exported.run, exported.difference):
        with pytest.raises(ValueError, match="argument scale is .* constant of the file"):
            call(x, scale=other)
    assert exported.difference(x, constant, float("1.5")) == ""  # the default, and another object


def test_nan_is_the_same_constant(tmp_path: Path) -> None:
    exported = export(Scaled(), X, path=tmp_path / "m.onnx", kwargs={"scale": float("nan")})
    assert exported.difference(X, scale=float("nan")) == ""


def test_a_number_that_is_an_input_keeps_its_type(tmp_path: Path) -> None:
    shapes = {"x": None, "scale": torch.export.Dim.DYNAMIC}
    exported = export(Scaled(), X, path=tmp_path / "m.onnx", kwargs={"scale": 3}, dynamic_shapes=shapes)
    assert exported.difference(X, scale=5) == ""
    for wrong in (2.5, True, torch.tensor(5)):
        with pytest.raises(TypeError, match="argument scale is a"):
            exported.run(X, scale=wrong)


def test_a_tensor_that_is_passed_twice_is_two_inputs(tmp_path: Path) -> None:
    model = Function(lambda self, parts: parts[0] - parts[1] * self.weight)
    model.weight = nn.Parameter(torch.randn(4))
    exported = export(model, [X, X], path=tmp_path / "m.onnx", check=True)
    torch.testing.assert_close(exported.run([X, X + 1])["output"], model([X, X + 1]))
    exported = export(model, [X, model.weight], path=tmp_path / "m.onnx", check=True)
    torch.testing.assert_close(exported.run([X, X[0]])["output"], model([X, X[0]]))


@pytest.mark.parametrize(
    ("function", "limits", "rows"),
    [
        (lambda self, x: x[-4:].sum(0), "from 2", 17),  # longer than in the example; PyTorch assumes that it is not 1
        (lambda self, x: x[:8] + 1, "from 2", 17),
        (lambda self, x: x.flip(0).cumsum(0), "from 2", 1),
        (lambda self, x: x + 1 if x.shape[0] < 5 else x * 2, "2 to 4", 4),
    ],
)
def test_files_are_right_for_the_sizes_that_they_name(
    function: Callable[..., Any], limits: str, rows: int, tmp_path: Path
) -> None:
    model = Function(function)
    exported = export(model, X, path=tmp_path / "m.onnx", dynamic_shapes=({0: "rows"},), check=True)
    assert exported.sizes == {"rows": limits}
    assert exported.checked == ["x[3, 4]", "x[4, 4]", "x[2, 4]"] and not exported.unchecked
    assert exported.difference(torch.randn(rows, 4)) == ""
    assert [item.value for item in onnx.load(tmp_path / "m.onnx").metadata_props if item.key == "sizes"] == [
        f"rows {limits}"
    ]


def test_conditions_on_sizes_that_are_no_limits_are_told(tmp_path: Path) -> None:
    model = Function(lambda self, x: x[: int(x.shape[0] * 0.5)] + (1 if x.shape[0] % 3 == 0 else 2) + x.shape[0])
    shapes = ({0: "rows", 1: "columns"},)
    exported = export(model, torch.randn(6, 4), path=tmp_path / "m.onnx", dynamic_shapes=shapes, check=True)
    half, third = exported.conditions
    assert "rows" in half and third == "(rows % 3) == 0" and exported.difference(torch.randn(9, 4))
    told = {item.key: item.value for item in onnx.load(tmp_path / "m.onnx").metadata_props}
    assert told["conditions"] == ", ".join(exported.conditions)


def test_the_largest_size_as_the_example_is_checked_with_smaller_ones(tmp_path: Path) -> None:
    shapes = ({0: torch.export.Dim("rows", max=3)},)
    exported = export(Function(lambda self, x: x * 2), X, path=tmp_path / "m.onnx", dynamic_shapes=shapes, check=True)
    assert exported.checked == ["x[3, 4]", "x[1, 4]"]


def test_sizes_of_nested_arguments_have_their_own_names(tmp_path: Path) -> None:
    model = Function(lambda self, parts: parts[0][0].sum(0) + parts[0][1].sum(0) + parts[1]["c"].sum(0))
    parts = ((torch.randn(3, 2), torch.randn(4, 2)), {"c": torch.randn(5, 2)})

    def inputs_with(*names: str) -> list[str]:
        shapes = ((({0: names[0]}, {0: names[1]}), {"c": {0: names[2]}}),)
        return list(export(model, parts, path=tmp_path / "m.onnx", dynamic_shapes=shapes, check=True).inputs.values())

    assert inputs_with("a", "b", "c") == ["FLOAT[a, 2]", "FLOAT[b, 2]", "FLOAT[c, 2]"]
    assert len(set(inputs_with("n", "n", "n"))) == 3, "sizes that may differ have one name"
    assert len(set(inputs_with("parts_0_1_dim_0", "n", "n"))) == 3
    with pytest.raises(ValueError, match="identifier"):
        inputs_with("a-1", "b", "c")


def test_a_branch_on_the_dtype_excuses_nothing(tmp_path: Path) -> None:
    def halves(self: Function, x: torch.Tensor) -> torch.Tensor:
        return twice(x) if x.dtype is torch.float32 else x

    with planted_converter(3.0), pytest.raises(ExportError, match="the file is wrong"):
        export(Function(halves), X, path=tmp_path / "m.onnx", check=True)


def test_a_dynamic_number_and_dicts_in_another_order(tmp_path: Path) -> None:
    class Model(nn.Module):
        def forward(self, x: dict[str, torch.Tensor], n: int, scale: float = 2.0) -> torch.Tensor:
            return x["a"][:, :n] - scale * x["b"][:, :n]

    a, b = torch.randn(3, 6), torch.randn(3, 6)
    shapes = {"x": {"a": None, "b": None}, "n": torch.export.Dim.DYNAMIC, "scale": None}
    path = tmp_path / "model.onnx"
    exported = export(Model(), {"a": a, "b": b}, 4, path=path, kwargs={"scale": 2.0}, dynamic_shapes=shapes, check=True)
    for n in (1, 3, 6):
        assert exported.difference({"b": b, "a": a}, n) == ""
    with pytest.raises(ValueError, match="argument scale is 3.0"):
        exported.run({"a": a, "b": b}, 4, scale=3.0)
    with pytest.raises(TypeError, match=r"argument x\['b'\] is a int"):
        exported.run({"a": a, "b": 1}, 4)


def test_the_users_tensors_keep_no_marks_of_a_refused_export(tmp_path: Path) -> None:
    model, x = nn.Linear(4, 4), torch.randn(3, 4)
    with pytest.raises(ExportError):
        export(model, x, path=tmp_path / "model.onnx", dynamic_shapes={"input": {1: "features"}})
    torch.compile(model, backend="eager")(x)
    export(torch.compile(model), x, path=tmp_path / "model.onnx", check=True)


def test_attention_and_a_view_of_its_result_are_checked(tmp_path: Path) -> None:
    """PyTorch's decompositions change the strides of the result, of which the captured program has a view."""

    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.view(2, 7, 2, 4).transpose(1, 2)
            return F.scaled_dot_product_attention(x, x, x).transpose(1, 2).reshape(2, 7, 8).contiguous().view(-1, 8)

    assert export(Model(), torch.randn(2, 7, 8), path=tmp_path / "model.onnx", check=True).checked


@pytest.mark.parametrize(
    "arguments, error, said",
    [
        ({"path": "."}, OSError, "no file"),
        ({"path": "missing/model.onnx"}, FileNotFoundError, "no folder"),
        ({"dynamic_shapes": {"input": {-2: "batch"}}}, ValueError, "no dimension -2"),
        ({"dynamic_shapes": {"input": {7: "batch"}}}, ValueError, "no dimension 7"),
        ({"check": [(torch.ones(3, 4), torch.ones(3, 4))]}, TypeError, "pairs"),
        ({"check": None}, TypeError, "check"),
        ({"input_names": [1]}, TypeError, "input_names"),
        ({"output_names": [None]}, TypeError, "output_names"),
        ({"output_names": "logits"}, TypeError, "output_names"),
        ({"model": torch.jit.trace(nn.Linear(4, 4), torch.ones(3, 4))}, TypeError, "Python"),
    ],
)  # fmt: skip
def test_wrong_arguments(
    arguments: dict[str, Any], error: type[Exception], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=said):
        model = arguments.pop("model", nn.Linear(4, 4))
        export(model, torch.ones(3, 4), **{"path": "model.onnx", **arguments})
    assert not list(tmp_path.iterdir())


def test_sizes_that_the_file_does_not_have_are_in_the_message(tmp_path: Path) -> None:
    exported = export(nn.Linear(4, 4), torch.ones(3, 4), path=tmp_path / "model.onnx")
    with pytest.raises(ExportError, match=r"index: 0 Got: 2 Expected: 3$"):
        exported.run(torch.ones(2, 4))


def test_a_model_that_computes_something_else_in_each_call_is_refused(tmp_path: Path) -> None:
    calls = itertools.count()
    with pytest.raises(ExportError, match="something else"):
        export(Function(lambda self, x: x + next(calls)), X, path=tmp_path / "m.onnx", check=True)


def test_export_under_autocast_and_of_a_result_that_is_returned_twice(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def twice_returned(self: Function, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = F.linear(x, x).mean(0)
        return y, y, x

    with torch.autocast("cpu", torch.bfloat16):
        exported = export(Function(twice_returned), X, path=tmp_path / "m.onnx", check=True)
    assert list(exported.outputs.values()) == ["BFLOAT16[3]", "BFLOAT16[3]", "FLOAT[3, 4]"]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    graph = onnx.load(tmp_path / "m.onnx").graph
    assert {item.name for item in graph.initializer} <= {name for node in graph.node for name in node.input}


class Unknown:
    """A result that PyTorch does not know."""


@pytest.mark.parametrize(
    ("function", "x", "reason"),
    [
        (_adds_to_state, X, r"its buffer 'state' at .*test_export.py:\d+"),
        (lambda self, x: x.mul_(2) + 1, X, r"its user input 'x' at .*test_export.py:\d+"),
        (lambda self, x: self.dropout(x), X, r"bernoulli.*test_export.py:\d+.*model\.eval\(\)"),
        (lambda self, x: self.norm(x), X, r"norm\.running_mean.*model\.eval\(\)"),
        (
            lambda self, x: torch.linalg.svdvals(x),
            X,
            r"_linalg_svd \(aten._linalg_svd.default\) at .*test_export.py:\d+",
        ),
        (lambda self, x: x if x.sum() > 0 else -x, X, r"torch.export cannot capture the model.*test_export.py:\d+"),
        (lambda self, x: {}["weights"], X, r"the model raises KeyError: 'weights' .*test_export.py:\d+"),
        (lambda self, x: x * 2, X.to(torch.complex64), "complex"),
        (lambda self, x: (x, "text"), X, "'text' as output_1"),
        (lambda self, x: None, X, "no tensor"),
        (lambda self, x: Unknown(), X, "Unknown"),
    ],
)
def test_a_model_is_refused_in_one_line(
    function: Callable[..., object], x: torch.Tensor, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ExportError, match=reason) as raised:
        export(Function(function), x, path=tmp_path / "m.onnx")
    assert "\n" not in str(raised.value)
    assert not list(tmp_path.iterdir())


@torch.library.custom_op("test_export::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@twice.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@contextlib.contextmanager
def planted_converter(factor: float | str, operator: Any = None) -> Iterator[None]:
    """``twice`` is translated with another factor, or so that it is right for three rows only."""
    from onnxscript import opset18 as op

    def converter(x: Any) -> Any:
        if factor != "rows":
            return op.Mul(x, op.CastLike(factor, x))
        rows = op.CastLike(op.Gather(op.Shape(x), 0), x)
        return op.Mul(x, op.Sub(rows, op.CastLike(1.0, x)))

    operator = operator or torch.ops.test_export.twice.default
    dynamo_backends.register_converter(operator)(converter)
    try:
        yield
    finally:
        dynamo_backends.unregister_converter(operator)


@pytest.mark.parametrize(
    "factor, said", [(3.0, "the file is wrong: at twice .*test_export.py"), ("rows", r"for x\[4, 4\]: at twice")]
)
def test_a_wrong_file_is_not_written(factor: float | str, said: str, tmp_path: Path) -> None:
    model = Function(lambda self, x: twice(x) + 1)
    with planted_converter(factor), pytest.raises(ExportError, match=said):
        export(model, X, path=tmp_path / "m.onnx", dynamic_shapes=({0: "rows"},), check=True)
    assert not list(tmp_path.iterdir())


_drawn = random.Random(0)


@torch.library.custom_op("test_export::drawn", mutates_args=())
def drawn(x: torch.Tensor) -> torch.Tensor:
    return x * (1 + _drawn.random())  # by Python: no state of PyTorch's repeats it


drawn.register_fake(torch.empty_like)


def test_what_an_operator_returns_otherwise_each_time_is_said_to_be_unchecked(tmp_path: Path) -> None:
    with planted_converter(1.5, torch.ops.test_export.drawn.default):
        exported = export(Function(lambda self, x: (drawn(x), x + 1)), X, path=tmp_path / "m.onnx", check=True)
    (text,) = exported.unchecked
    assert "test_export.drawn" in text
    assert "test_export.drawn" in exported.difference(X)


def test_the_order_of_equal_values_is_nobodys_fault(tmp_path: Path) -> None:
    def sums(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        keys = (x[:, 0] > 0).long()
        keys, order = keys.sort()
        return torch.zeros(2, 4).index_add(0, keys, x[order // 1])

    exported = export(Function(sums), torch.randn(64, 4), path=tmp_path / "m.onnx", check=True)
    assert any("equal values" in text for text in exported.unchecked)
    assert not any("inside" in text for text in exported.unchecked)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_right_file_in_half_precision(dtype: torch.dtype, tmp_path: Path) -> None:
    """ONNX Runtime leaves out casts between its nodes."""
    model = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).to(dtype).eval()
    exported = export(model, torch.randn(2, 5, 32).to(dtype), path=tmp_path / "m.onnx", check=True)
    assert any("half precision" in text for text in exported.unchecked)


def test_a_wrong_node_that_the_results_hide_is_named(tmp_path: Path) -> None:
    model = Function(lambda self, x: twice(x) * 1e-9 + 1)
    with planted_converter(3.0), pytest.raises(ExportError, match=r"at twice .*test_export\.py"):
        export(model, X, path=tmp_path / "m.onnx", check=True)


def test_weights_beyond_protobufs_limit_are_beside_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_module, "LARGEST_FILE", 1000)
    export(nn.Linear(64, 64), torch.randn(2, 64), path=tmp_path / "m.onnx", check=True)
    [old] = tmp_path.glob("m.onnx.*.data")
    export(nn.Linear(64, 64), torch.randn(2, 64), path=tmp_path / "m.onnx")
    [new] = tmp_path.glob("m.onnx.*.data")
    assert new != old, "a process that is killed in between must not leave weights of another model"
    (tmp_path / "elsewhere").mkdir()
    for file in ("m.onnx", new.name):
        (tmp_path / file).rename(tmp_path / "elsewhere" / file)
    InferenceSession(tmp_path / "elsewhere" / "m.onnx", providers=CPU)
    assert [file.name for file in tmp_path.iterdir()] == ["elsewhere"]


def test_integer_products_do_not_depend_on_the_processor(tmp_path: Path) -> None:
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    model = nn.Sequential(nn.Linear(64, 32)).eval()
    quantize_(model, Int8DynamicActivationInt8WeightConfig())
    export(model, torch.randn(5, 64), path=tmp_path / "m.onnx", check=True)
    session = onnx.shape_inference.infer_shapes(onnx.load(tmp_path / "m.onnx"))
    types = {item.name: item.type.tensor_type.elem_type for item in session.graph.value_info}
    [product] = [node for node in session.graph.node if node.op_type == "MatMulInteger"]
    assert [types[name] for name in product.input[:2]] == [onnx.TensorProto.UINT8] * 2


MODEL = """
import torch

def make():
    return torch.nn.Linear(4, 2), torch.ones(3, 4), torch.ones(5, 4)

def draws():
    return torch.nn.Dropout(0.5), torch.ones(3, 4)
"""


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "models.py").write_text(MODEL)
    model, file = f"{tmp_path}/models.py:make", str(tmp_path / "m.onnx")
    assert main(["export", model, file, "--dynamic", "--check", "--opset", "20"]) == 0
    text = capsys.readouterr().out
    assert "FLOAT[input_dim_0, 4]" in text and "right for 2 calls" in text
    assert onnx.load(file).opset_import[0].version == 20
    assert main(["export", model, file, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["outputs"] == {"output": "FLOAT[3, 2]"}
    assert main(["export", model, str(tmp_path / "none" / "m.onnx")]) == 2
    assert main(["export", "nothing", file]) == 2


H, N = torch.export.Dim("h", max=64), torch.export.Dim("n")


@pytest.mark.parametrize(
    ("function", "arguments", "dims", "inputs", "sizes"),
    [
        (
            lambda x: F.max_pool2d(x, 2),
            [torch.randn(1, 3, 6, 8)],
            {"x": {2: 2 * H}},
            {"x": "FLOAT[1, 3, 2*h, 8]"},
            {"h": "2 to 64"},
        ),
        (
            lambda x, y: x[:, 1:] + y,
            [torch.randn(3, 5), torch.randn(3, 4)],
            {"x": {1: N + 1}, "y": {1: N}},
            {"x": "FLOAT[3, 1 + n]", "y": "FLOAT[3, n]"},
            {"n": "from 1"},
        ),
        (
            lambda x, y: x[:, 1:] + y,
            [torch.randn(3, 5), torch.randn(3, 4)],
            {"x": {1: torch.export.Dim.AUTO}, "y": {1: torch.export.Dim.AUTO}},
            {"x": "FLOAT[3, 1 + y_dim_1]", "y": "FLOAT[3, y_dim_1]"},
            {"y_dim_1": "from 2"},
        ),
    ],
    ids=["2 * h", "n + 1", "derived by PyTorch"],
)
def test_derived_sizes_have_names_and_limits_and_are_varied(
    function: Callable[..., object],
    arguments: list[torch.Tensor],
    dims: dict[str, Any],
    inputs: dict[str, str],
    sizes: dict[str, str],
    tmp_path: Path,
) -> None:
    class Two(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> object:
            return function(x, y)

    class One(nn.Module):
        def forward(self, x: torch.Tensor) -> object:
            return function(x)

    path = tmp_path / "m.onnx"
    exported = export((One, Two)[len(arguments) - 1](), *arguments, path=path, dynamic_shapes=dims, check=True)
    assert (exported.inputs, exported.sizes, exported.unchecked) == (inputs, sizes, [])
    assert len(exported.checked) == 3
    written = {item.key: item.value for item in onnx.load(path).metadata_props}
    assert written == {"sizes": ", ".join(f"{name} {limits}" for name, limits in sizes.items())}


def test_a_condition_that_is_a_limit_is_told_once(tmp_path: Path) -> None:
    """A model that does something else for one row, and something else for five."""

    class Rows(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x[:8]
            return x * 2 if x.shape[0] == 1 else x.sin() if x.shape[0] != 5 else x

    path = tmp_path / "m.onnx"
    exported = export(Rows(), torch.randn(3, 2), path=path, dynamic_shapes={"x": {0: "rows"}}, check=True)
    assert exported.sizes["rows"].startswith("from 2") and not any(" != 1" in item for item in exported.conditions)
    assert any(item.endswith(" != 5") for item in exported.conditions)
    written = {item.key: item.value for item in onnx.load(path).metadata_props}
    assert written == {"sizes": f"rows {exported.sizes['rows']}", "conditions": ", ".join(exported.conditions)}


S, T = sympy.symbols("s t", integer=True, positive=True)


@pytest.mark.parametrize(
    ("conditions", "limits", "others"),
    [
        ([sympy.Ne(S, 1)], "from 2", []),
        ([sympy.Eq(Min(S, 512), S), sympy.Or(sympy.Eq(S, Min(512, S)), sympy.Eq(Min(512, S), 1))], "1 to 512", []),
        ([sympy.Ne(S, 2), sympy.Ne(S, 1), S < 10], "3 to 9", []),
        ([2 * S >= 7, sympy.Ne(S, 9)], "from 4", ["s != 9"]),
        ([sympy.Ne(S, 9), S <= 9], "1 to 8", []),
        ([3 - S > -7, sympy.Ne(S, T)], "1 to 9", ["s != t"]),
        ([sympy.Eq(S % 2, 0)], "from 1", ["(s % 2) == 0"]),
    ],
)
def test_limits_of_sizes_and_conditions(conditions: list[sympy.Basic], limits: str, others: list[str]) -> None:
    sizes, rest = narrowed({S: Size("s", 1, None, 6), T: Size("t", 1, 20, 3)}, conditions)
    assert (sizes[S].limits, rest) == (limits, others)


@pytest.mark.parametrize("dynamic", [False, True])
def test_numbers_that_eager_converts_to_the_dtype_of_a_full_tensor(dynamic: bool, tmp_path: Path) -> None:
    def filled(self: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
        return [
            x + torch.full(x.shape, 2.5, dtype=torch.int64),
            x + torch.full_like(x, -1, dtype=torch.uint8),
            x.new_full((2, 4), -2.5) + 1,
            x > torch.full(x.shape, 2, dtype=torch.bool),
        ]

    sizes = ({0: "rows"},) if dynamic else None
    exported = export(Function(filled), torch.arange(8).view(2, 4), path=tmp_path / "m.onnx", dynamic_shapes=sizes)
    x = torch.arange(-4, 4).view(2, 4)
    results = InferenceSession(exported.path, providers=CPU).run(None, {"x": x.numpy()})
    for actual, expected in zip(results, filled(exported, x), strict=True):
        torch.testing.assert_close(torch.from_numpy(actual), expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    "function",
    [
        lambda self, x: F.instance_norm(x[None]),
        lambda self, x: torch.cat(torch.var_mean(x, 0)),
        lambda self, x: x.std(0) * (x.shape[0] / 3) * x.shape[0] ** -0.5,
        lambda self, x: F.interpolate(x[None, None], scale_factor=0.5, mode="bilinear"),
    ],
)
def test_floats_computed_from_sizes(function: Callable[..., object], tmp_path: Path) -> None:
    x = torch.randn(6, 4)
    exported = export(Function(function), x, path=tmp_path / "m.onnx", dynamic_shapes=({0: "rows"},), check=True)
    assert len(exported.checked) == 3
