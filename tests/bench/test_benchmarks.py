"""``benchmarks/passes.py`` on a small model: its measurements are consistent."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # ``benchmarks`` is not installed

from benchmarks import measure, models, report  # noqa: E402
from benchmarks.counting import count_attentions, count_operators  # noqa: E402
from dynamo_backends.bench import timing  # noqa: E402
from passes.engine.manager import Pass, all_passes  # noqa: E402


class Tiny(torch.nn.Module):
    """A module with a common subexpression, so that a pass fires."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.linear(x)
        return {"y": torch.cos(hidden * 3) + torch.cos(hidden * 3).softmax(-1)}


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        entry = models.Entry(Tiny, lambda: {"x": torch.randn(2, 3, 16)}, trains=True)
        patch.setitem(models.MODELS, "tiny", entry)
        found = measure.Measurement("tiny", measure.Settings(rounds=2, compiles=1)).run()
    return json.loads(json.dumps(found))


def test_sizes_of_the_models(measured: dict[str, Any]) -> None:
    operators = measured["without_passes"]["operators"]
    assert operators["Softmax"] == 1
    assert measured["without_passes"]["nodes"] == sum(operators.values())
    assert measured["ours"]["nodes"] <= measured["without_passes"]["nodes"]
    assert measured["export"]["operators"]["Softmax"] == 1
    assert measured["attentions"] == 1, "a softmax over three dimensions counts as one"
    assert measured["ours"]["share_on_onnx"] == 1
    assert measured["training"]["ours"]["regions"] == 2, "forward and backward"


def test_results_are_compared_with_eager(measured: dict[str, Any]) -> None:
    for variant in ("ours", "without_passes", "export"):
        assert 0 <= measured[variant]["error"] < 1e-5


def test_every_pass_that_fired_is_timed(measured: dict[str, Any]) -> None:
    fired = {name: found for name, found in measured["passes"].items() if found["fired"]}
    assert fired, "no pass fired on a model with common subexpressions"
    for found in fired.values():
        assert {"gained_milliseconds", "standard_error", "saved_nodes"} <= set(found)
        assert found["compile_milliseconds"] > 0
    assert {"gained_milliseconds", "standard_error"} == set(measured["noise"])


def test_every_pass_that_fired_is_timed_in_training(measured: dict[str, Any]) -> None:
    found = {name: item for name, item in measured["training"]["passes"].items() if item["fired"]}
    assert found, "no pass fired in the training step"
    for item in found.values():
        assert {"gained_milliseconds", "standard_error", "saved_nodes"} <= set(item)
    assert {"gained_milliseconds", "standard_error"} == set(measured["training"]["noise"])
    names = {item.name: {"default": item.default} for item in all_passes()}
    table = report.passes_table({"passes": names, "models": {"tiny": measured}})
    heading, _, *rows = table.splitlines()
    column = [cell.strip() for cell in heading.split("|")].index("ms gained a training step")
    shown = {row.split("`")[1]: row.split("|")[column].strip() for row in rows}
    assert {name for name, text in shown.items() if "±" in text} == set(found)


def test_latencies_and_compile_times(measured: dict[str, Any]) -> None:
    assert set(measured["latency"]["times_as_fast_as"]) == {"eager", "without_passes", "export"}
    assert all(measured["latency"][name]["milliseconds"] > 0 for name in ("eager", "ours", "without_passes", "export"))
    assert 0 < measured["compile"]["share_of_passes"] < 1


def test_report_has_a_row_for_each_pass_and_model(measured: dict[str, Any]) -> None:
    names = {item.name: {"default": item.default} for item in all_passes()}
    results = {"passes": names, "models": {"tiny": measured, "broken": {"failed": "exit code -11: fault"}}}
    text = report.report(results)
    assert "- broken: exit code -11: fault" in text
    assert "| tiny, training |" in text
    assert report.NOT_MEASURED not in text
    new = Pass("onnx.new_pass", "Does something.", lambda model, context: 0)
    assert report.passes_table(results, [new]).count(report.NOT_MEASURED) == 7


def test_functions_are_timed_in_turns() -> None:
    calls = []
    rounds = measure.milliseconds_by_round({name: lambda name=name: calls.append(name) for name in "ab"}, rounds=8)
    assert [len(values) for values in rounds.values()] == [8, 8]
    turns = [name for name, before in zip(calls[1:], calls, strict=False) if name != before]
    assert len(turns) > 8, "not all rounds of one come before those of the other"


def test_comparisons_are_within_rounds() -> None:
    slow, fast = [2.0, 20.0, 4.0], [1.0, 10.0, 2.0]  # the machine was busy in the second round
    assert timing.median_ratio(slow, fast) == 2
    assert measure.median_difference([3.0, 13.0, 5.0], [1.0, 11.0, 3.0]) == (2, 0)


def test_constants_are_not_counted_and_nodes_of_inner_graphs_are() -> None:
    model = ir.from_onnx_text(
        """
        <ir_version: 10, opset_import: ["" : 20, "com.microsoft" : 1]>
        agraph (bool c, float[2] x) => (float[2] y)
        {
            k = Constant <value = float[2] {1.0, 2.0}> ()
            y = If (c) <
                then_branch = yes () => (float[2] a) { a = Add(x, k) },
                else_branch = no () => (float[2] b) { b = com.microsoft.MultiHeadAttention(x) }
            >
        }
        """
    )
    found = count_operators([model])
    assert found == {"If": 1, "Add": 1, "MultiHeadAttention": 1}
    assert count_attentions(found) == 1


def test_the_script_runs_from_its_own_folder() -> None:
    """There it would find itself as the package ``passes``, if it did not mind."""
    script = ROOT / "benchmarks" / "passes.py"
    finished = subprocess.run(
        [sys.executable, str(script), "--help"], cwd=script.parent, capture_output=True, text=True
    )
    assert finished.returncode == 0, finished.stderr
    assert "--per-pass" in finished.stdout
