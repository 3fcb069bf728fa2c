"""``dynamo-backends trace``: each of PyTorch's four ways to trace a model, each precision, and the export to ONNX."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch

from dynamo_backends.bench.case import Case
from dynamo_backends.bench.loading import load
from dynamo_backends.cli import main

BRANCHES = """
import torch

class Branches(torch.nn.Module):
    def forward(self, x):
        if x.sum() > 0:
            return x + 1
        return x - 1

class HasASet(torch.nn.Module):
    def forward(self, x):
        return torch.stack([x * i for i in sorted({1, 2})])

class Draws(torch.nn.Module):
    def forward(self, x):
        return x + torch.rand_like(x)

def branches():
    return Branches(), torch.ones(3)

def has_a_set():
    return HasASet(), {"x": torch.ones(3)}

def draws():
    return Draws(), torch.ones(3)
"""


@pytest.mark.parametrize(
    "method, said",
    [
        ("trace", 'prim::CallMethod[name="forward"]'),
        ("script", "return (%input"),
        ("export", "aten.linear.default"),
        ("compile", "torch._C._nn.linear"),
    ],
)
def test_each_way_shows_its_graph_and_the_dtype(method: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "mlp", "--method", method, "--precision", "bfloat16"]) == 0
    text = capsys.readouterr().out
    assert said in text
    assert text.rstrip().endswith("output dtype: torch.bfloat16")


def test_a_way_that_does_not_lead_there_says_what_pytorch_says_and_which_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "models.py").write_text(BRANCHES)
    assert main(["trace", f"{tmp_path}/models.py:branches", "--method", "export", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert "data-dependent" in found["error"].lower()
    assert found["methods_that_can"] == ["trace", "script", "compile"]
    assert main(["trace", f"{tmp_path}/models.py:has_a_set", "--method", "script"]) == 1
    text = capsys.readouterr().out
    assert "--method trace, --method export, --method compile" in text
    assert main(["trace", f"{tmp_path}/models.py:branches"]) == 0
    assert "graph 1" in capsys.readouterr().out


def test_the_onnx_file_computes_what_the_model_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bert.onnx"
    assert main(["trace", "bert", "--method", "export", "--onnx", str(path)]) == 0
    assert f"wrote {path}" in capsys.readouterr().out
    loaded = load(Case("bert"))
    feeds = {name: value.numpy() for name, value in loaded.inputs[0].kwargs.items()}
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert {item.name for item in session.get_inputs()} == set(feeds)
    with torch.no_grad():
        expected = loaded.model(**loaded.inputs[0].kwargs).logits.numpy()
    np.testing.assert_allclose(session.run(None, feeds)[0], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "name, said", [("branches", "torch.export cannot capture"), ("draws", "rand_like (aten.rand_like.default) at")]
)
def test_what_is_no_onnx_model_is_said(
    name: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "models.py").write_text(BRANCHES)
    assert main(["trace", f"{tmp_path}/models.py:{name}", "--onnx", f"{tmp_path}/m.onnx"]) == 1
    text = capsys.readouterr().out
    assert said in text
    assert not (tmp_path / "m.onnx").exists()


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["nothing"], "unknown model 'nothing'"),
        (["mlp", "--device", "cuda:7"], "cuda:7"),
        (["mlp", "--device", "gpu"], "gpu"),
        (["mlp", "--onnx", "/no/where/m.onnx"], "/no/where"),
    ],
)
def test_wrong_arguments(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    if "cuda:7" in arguments and torch.cuda.device_count() > 7:
        pytest.skip("there is such a device")
    assert main(["trace", *arguments]) == 2
    assert said in capsys.readouterr().err
