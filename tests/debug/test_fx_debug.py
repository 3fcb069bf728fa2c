"""``fx_debug`` prints the graphs, writes the stages, and otherwise behaves as PyTorch."""

from __future__ import annotations

import copy
import json
import logging
from pathlib import Path

import pytest
import torch

from dynamo_backends.cli import main
from dynamo_backends.dumps.reading import find_run, latest_run


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 3)
        self.norm = torch.nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.linear(x)))


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def _written(root: Path) -> dict[str, set[str]]:
    """File names by folder, graph folders without their number."""
    found: dict[str, set[str]] = {}
    for path in latest_run(root).rglob("*.py"):
        folder = path.parent.name
        found.setdefault("graph" if folder.startswith("graph_") else folder, set()).add(path.name)
    return found


def test_training_equals_eager_and_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, x = Model(), torch.randn(5, 4)
    expected_model = copy.deepcopy(model)
    expected = expected_model(x)
    expected.sum().backward()
    got = torch.compile(model, backend="fx_debug", options={"dump_dir": str(tmp_path)})(x)
    got.sum().backward()

    torch.testing.assert_close(got, expected)
    torch.testing.assert_close(model.linear.weight.grad, expected_model.linear.weight.grad)
    torch.testing.assert_close(model.norm.running_mean, expected_model.norm.running_mean)
    assert _written(tmp_path) == {
        "graph": {"dynamo.py", "joint.py"},
        "forward": {"aten.py"},
        "backward": {"aten.py"},
    }, "stages that change something"
    printed = capsys.readouterr().out
    for expected_text in ("stage dynamo", "forward, stage post_grad", "backward, stage post_grad"):
        assert expected_text in printed
    assert str(latest_run(tmp_path)) in printed


def test_the_commands_show_the_dump(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with torch.no_grad():
        torch.compile(Model().eval(), backend="fx_debug", options={"dump_dir": str(tmp_path)})(torch.randn(5, 4))
    capsys.readouterr()
    (graph,) = find_run(tmp_path).graphs
    for command in (["ls"], ["show", str(graph.index)], ["report"]):
        assert main([*command, "-d", str(tmp_path), "--json"]) == 0
        assert "error" not in json.loads(capsys.readouterr().out)
    assert main(["show", graph.short_reference, "-d", str(tmp_path)]) == 0
    assert "aten.addmm.default" in capsys.readouterr().out
    assert graph.entry.nodes == len(graph.entry.in_pytorch) > 0


def test_table_names_operator_and_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    @torch.compile(backend="fx_debug", options={"dump_dir": str(tmp_path)})
    def shifted(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.softmax(x, dim=1)

    shifted(torch.zeros(2, 3, dtype=torch.float64))
    printed = capsys.readouterr().out.splitlines()
    assert printed[1].split() == ["opcode", "name", "target", "args", "value", "source"]
    [line] = [line for line in printed if "aten._softmax.default" in line or "aten.softmax" in line]
    for expected in ("call_function", "1, False", "f64[2, 3]", "test_fx_debug.py:"):
        assert expected in line


def test_dynamic_shapes_are_shown_as_symbols(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compiled = torch.compile(
        lambda x: (x + 1, x.shape[0]), backend="fx_debug", dynamic=True, options={"dump_dir": str(tmp_path)}
    )
    result, size = compiled(torch.ones(5, 2))
    assert size == 5 and result.shape == (5, 2)
    assert "f32[s" in capsys.readouterr().out
    compiled(torch.ones(7, 2))
    assert capsys.readouterr().out == "", "another size is not compiled again"


def test_unknown_option_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Did you mean 'dump_dir'"):
        torch.compile(torch.sin, backend="fx_debug", options={"dump_dri": str(tmp_path)})(torch.ones(2))


def test_unwritable_folder_warns_and_the_model_runs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "occupied").write_text("a file where the folder should be")
    options = {"dump_dir": str(tmp_path / "occupied" / "dump")}
    result = torch.compile(lambda x: x * 2, backend="fx_debug", options=options)(torch.ones(2))
    torch.testing.assert_close(result, torch.full((2,), 2.0))
    [record] = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "dump_dir" in record.getMessage()
    assert "stage post_grad" in capsys.readouterr().out
