"""``onnx_debug`` repeats each session: results that differ between runs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from conftest import assert_same_as_eager, compiled
from onnxscript import opset18 as op

from dynamo_backends.debug import recorded_run
from dynamo_backends.debug.session_values import SessionValues
from dynamo_backends.exporter import decompositions, upstream_faults
from dynamo_backends.exporter.converters import CONVERTERS
from dynamo_backends.graphs.locations import short_file
from dynamo_backends.runtime import kernel_faults, node_support
from dynamo_backends.runtime.session import Session

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions with two threads, and empty caches after a test that plants a fault."""
    torch.set_num_threads(2)


def comparison_of(function: Callable[..., object], dump: Path, *args: object, **options: object) -> list[dict]:
    """The manifest's graphs after one compared run, a training step if the result requires gradients.

    At opset 21, since the planted fault is noise and ONNX Runtime 1.31 has no random kernels for newer opsets.
    """
    debug = compiled(function, backend="onnx_debug", options={"dump_dir": str(dump), "opset": 21, **options})
    result = debug(*args)
    if isinstance(result, torch.Tensor) and result.requires_grad:
        result.sum().backward()
    return json.loads((dump / "latest" / "manifest.json").read_text())["graphs"]


def line_of(text: str) -> str:
    """``file:line`` of the first line of this file that has ``text``."""
    lines = Path(__file__).read_text().splitlines()
    return f"{short_file(__file__)}:{1 + next(i for i, line in enumerate(lines) if text in line)}"


def noisy_sinh(x: ir.Value) -> object:
    return op.Add(op.Sinh(x), op.RandomNormalLike(x, scale=0.01))


def sinh_in_the_middle(x: torch.Tensor) -> torch.Tensor:
    y = x.exp() * 0.1
    return torch.sinh(y).cos()  # the line of the plant


def test_an_operator_that_differs_each_time_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONVERTERS, aten.sinh.default, noisy_sinh)
    (graph,) = comparison_of(sinh_in_the_middle, tmp_path, torch.randn(50))
    blame = graph["blame"]
    assert (blame["kind"], blame["name"], blame["value"]) == ("unstable", "runs", "sinh")
    assert blame["source"] == line_of("the line of the plant") and "2 threads" in graph["verdict"]
    assert graph["repeated"] == {"0": {"differing_outputs": 1, "failure": ""}}
    (path,) = (tmp_path / "latest").rglob("side_by_side.json")
    rows = {row["name"]: row for row in json.loads(path.read_text())["rows"]}
    assert rows["sinh"]["mark"] == "?" and rows["exp"]["instability"] is None
    assert rows["sinh"]["instability"]["threads"] == 2
    assert 1e-3 < rows["sinh"]["instability"]["difference"]["max_abs"] < 0.2


def test_the_verdict_says_the_option_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONVERTERS, aten.sinh.default, noisy_sinh)
    (graph,) = comparison_of(sinh_in_the_middle, tmp_path, torch.randn(50), threads=3)
    assert (graph["blame"]["kind"], graph["blame"]["name"]) == ("unstable", "runs")
    assert "aten.sinh.default" in graph["verdict"] and "3 threads" in graph["verdict"]


def test_a_race_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ScatterND's, with the guards against it taken away: all gradients go to one row, so that each run loses some."""

    def racing(grad: ir.Value, indices: ir.Value, rows: int, padding: int, by_frequency: bool) -> object:
        table = op.Expand(op.Constant(value_float=0.0), op.Constant(value_ints=[rows, 64]))
        return op.ScatterND(table, op.Unsqueeze(indices, [-1]), grad, reduction="add")

    monkeypatch.setattr(recorded_run, "REPEATS", 30)  # where the cores are busy, threads do not meet in each run
    monkeypatch.setattr(kernel_faults, "FAULTS", ())
    monkeypatch.setattr(upstream_faults, "FAULTS", ())
    monkeypatch.setattr(node_support.ANSWERS, "known", {})
    monkeypatch.setitem(CONVERTERS, aten.embedding_dense_backward.default, racing)
    table, index = torch.randn(16, 64, requires_grad=True), torch.full((100_000,), 3)
    grad = torch.randn(100_000, 64)  # of both signs: the sum is small, as is its rounding, and a lost one is seen
    assert aten.embedding_dense_backward.default not in decompositions.decomposition_table()
    options = {"dump_dir": str(tmp_path), "compare": "every"}
    debug = compiled(lambda i: F.embedding(i, table).sin(), backend="onnx_debug", options=options)
    for _ in range(20):
        debug(index).backward(grad)
        _, backward = json.loads((tmp_path / "latest" / "manifest.json").read_text())["graphs"]
        if backward["verdict"] != "ok":
            break
    blame = backward["blame"]
    assert (blame["kind"], blame["name"], blame["value"]) == ("unstable", "runs", "embedding_dense_backward")
    assert blame["source"].startswith(f"{short_file(__file__)}:") and "2 threads" in backward["verdict"]


def test_a_wrong_value_of_one_run_is_unstable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The value was wrong once, and is right in further runs: the node is not wrong by itself."""
    original, wrong_once = SessionValues.parts, iter([0.1])

    def parts(self: SessionValues, args: Sequence[object]) -> Iterator[dict[str, object]]:
        for values in original(self, args):
            yield values | {"sinh": values["sinh"] + next(wrong_once, 0.0)}  # type: ignore[operator]

    monkeypatch.setattr(SessionValues, "parts", parts)
    (graph,) = comparison_of(sinh_in_the_middle, tmp_path, torch.randn(50))
    assert (graph["blame"]["kind"], graph["blame"]["name"], graph["blame"]["value"]) == ("unstable", "runs", "sinh")
    assert graph["repeated"] == {"0": {"differing_outputs": 0, "failure": ""}}


def test_rounding_that_differs_is_no_instability(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slightly_noisy = lambda x: op.Mul(op.Sinh(x), op.RandomUniformLike(x, low=1 - 1e-7, high=1 + 1e-7))  # noqa: E731
    monkeypatch.setitem(CONVERTERS, aten.sinh.default, slightly_noisy)
    (graph,) = comparison_of(sinh_in_the_middle, tmp_path, torch.randn(50))
    assert (graph["verdict"], graph["repeated"]["0"]["differing_outputs"]) == ("ok", 1)


@pytest.fixture
def other_model(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Creates some sessions from another model: the session is wrong, and no dumped model is."""
    original = Session.create

    def plant(applies: Callable[[Session, int], bool], change: Callable[[ir.Model], None]) -> None:
        def create(self: Session, threads: int) -> onnxruntime.InferenceSession:
            kept = self.model
            if applies(self, threads):
                model = ir.from_proto(onnx.load_model_from_string(kept))
                change(model)
                self.model = ir.to_proto(model).SerializeToString()
            try:
                return original(self, threads)
            finally:
                self.model = kept

        monkeypatch.setattr(Session, "create", create)

    return plant


def sinh_gets_noise(model: ir.Model) -> None:
    for node in list(model.graph):
        if node.op_type == "Sinh":
            (quiet,), users = node.outputs, list(node.outputs[0].uses())
            noise = ir.node("RandomNormalLike", [quiet], {"scale": 0.01})
            noisy = ir.node("Add", [quiet, noise.outputs[0]])
            for user, index in users:
                user.replace_input_with(index, noisy.outputs[0])
            model.graph.insert_after(node, [noise, noisy])


def test_a_session_that_differs_where_no_node_does(tmp_path: Path, other_model: Callable[..., None]) -> None:
    """The kernel is one that only ONNX Runtime's optimized model has: the region's result is named."""
    other_model(lambda session, threads: session.settings.optimize, sinh_gets_noise)
    (graph,) = comparison_of(sinh_in_the_middle, tmp_path, torch.randn(50))
    blame = graph["blame"]
    assert (blame["kind"], blame["name"], blame["value"]) == ("unstable", "runs", "cos")
    assert blame["source"].startswith(f"{short_file(__file__)}:") and "2 threads" in graph["verdict"]


def test_a_wrong_operator_that_is_always_wrong_is_no_instability(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(CONVERTERS, aten.sinh.default, lambda x: op.Mul(op.Sinh(x), 1.01))
    (graph,) = comparison_of(sinh_in_the_middle, tmp_path, torch.randn(50))
    blame = graph["blame"]
    assert (blame["kind"], blame["value"], blame["source"]) == ("node", "sinh", line_of("the line of the plant"))
    assert graph["repeated"] == {"0": {"differing_outputs": 0, "failure": ""}}


def test_inputs_that_the_graph_writes_into_are_no_instability(tmp_path: Path) -> None:
    """The session runs again before the graph writes."""

    def running_sum(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        result = (total * x).sin()
        total.add_(x.exp())
        return result

    with torch.no_grad():
        (graph,) = comparison_of(running_sum, tmp_path, torch.randn(50), torch.randn(50))
    assert graph["repeated"] == {"0": {"differing_outputs": 0, "failure": ""}}


def test_a_session_that_cannot_run_again_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It could not run the first time either: PyTorch ran the region."""

    def failing(x: ir.Value) -> object:
        place = op.Constant(value_ints=[1_000_000])
        return op.ScatterElements(op.Sinh(x), place, op.Constant(value_floats=[0.0]), axis=0)

    monkeypatch.setitem(CONVERTERS, aten.sinh.default, failing)
    (graph,) = comparison_of(sinh_in_the_middle, tmp_path, torch.randn(50))
    assert graph["blame"] is None and graph["verdict"] != "ok"
    (failure,) = graph["rescued"].values()
    assert "1000000" in failure and failure in graph["verdict"]
    assert "1000000" in graph["repeated"]["0"]["failure"]
    assert any("region_0" in item for item in graph["unchecked"])


def test_an_error_while_running_again_is_not_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(*args: object) -> object:
        raise MemoryError("no memory")

    monkeypatch.setattr(recorded_run, "bitwise_differing", no_memory)
    with torch.no_grad():
        (graph,) = comparison_of(sinh_in_the_middle, tmp_path, torch.randn(50))
    assert graph["verdict"] == "ok"
    assert any("region_0" in item and "MemoryError: no memory" in item for item in graph["unchecked"])


def test_nan_is_the_same_result(tmp_path: Path) -> None:
    x = torch.tensor([1.0, float("nan"), float("inf"), -1.0])
    with torch.no_grad():
        (graph,) = comparison_of(lambda x: (x - x).sqrt() + x.sinh(), tmp_path, x)
    assert (graph["verdict"], graph["repeated"]["0"]["differing_outputs"]) == ("ok", 0)


def test_repeating_changes_nothing_for_the_user(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5))
    settings = {"backend": "onnx_debug", "options": {"dump_dir": str(tmp_path), "compare": "every"}}
    assert_same_as_eager(model, torch.randn(4, 8), settings=settings, calls=2)


@pytest.mark.parametrize("results", [[1.0, 1.0], [2.0, 3.0], [math.nan, 1.0]])
def test_further_runs_are_kept_where_bits_differ(results: list[float]) -> None:
    given = iter(results)
    session: Any = lambda args: [torch.tensor([next(given)]), torch.zeros(2), 3]  # noqa: E731
    found = recorded_run.repeat_region(session, [], [torch.ones(1), torch.zeros(2), 3])
    assert list(given) == [] and not found.failure
    different = [value for value in results if value != 1.0]
    torch.testing.assert_close(
        found.others, {0: [torch.tensor([value]) for value in different]} if different else {}, equal_nan=True
    )


def test_a_run_that_fails_is_told_and_the_others_are_kept() -> None:
    given = iter([2.0])
    session: Any = lambda args: [torch.tensor([next(given)])]  # noqa: E731
    found = recorded_run.repeat_region(session, [], [torch.ones(1)])
    assert found.others.keys() == {0} and found.failure.startswith("StopIteration")
