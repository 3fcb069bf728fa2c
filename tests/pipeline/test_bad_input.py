"""Mistakes of the user: the error names the cause and the fix."""

from __future__ import annotations

import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import torch
from conftest import compiled

from dynamo_backends import onnx_compiler
from dynamo_backends.options import parse_options
from dynamo_backends.runtime.opsets import maximum_opset

BACKENDS = ["onnxrt", "onnx_debug", "fx_debug"]

WRONG_OPTIONS = {
    "misspelt": ({"opsett": 18}, ["'opsett'", "'opset'?", ": fallback, "]),
    "unknown": ({"zzz": 1}, ["'zzz'", ": fallback, "]),
    "not a string": ({3: 1}, ["option 3", ": fallback, "]),
    "opset type": ({"opset": "18"}, ["'opset'", "integer", "'18' (str)"]),
    "opset bool": ({"opset": True}, ["'opset'", "integer", "bool"]),
    "opset too old": ({"opset": 9}, ["got 9", f"18 to {maximum_opset()}"]),
    "opset too new": ({"opset": 999}, ["got 999", f"18 to {maximum_opset()}"]),
    "threads": ({"threads": 0}, ["'threads'", "None or", "from 1 to", "got 0"]),
    "threads type": ({"threads": 1.5}, ["'threads'", "integer", "1.5 (float)"]),
    "fallback": ({"fallback": "eager"}, ["'fallback'", "'pytorch', 'error'", "'eager'"]),
    "provider": (
        {"providers": ["CPUExecutionProvder"]},
        ["'CPUExecutionProvder'", "'CPUExecutionProvider'", "Available:"],
    ),
    "provider of another build": (
        {"providers": ["CUDAExecutionProvider"]},
        ["CUDAExecutionProvider", "onnxruntime-gpu"],
    ),
    "providers as a string": (
        {"providers": "CPUExecutionProvider"},
        ["['CPUExecutionProvider']", "list"],
    ),
    "no providers": ({"providers": []}, ["at least one"]),
    "provider of wrong type": ({"providers": [3]}, ["(name, options)", "got 3"]),
    "dump_dir": ({"dump_dir": 7}, ["'dump_dir'", "path", "7 (int)"]),
    "compare": ({"compare": "always"}, ["'compare'", "'first', 'every', 'never'"]),
    "idle_seconds": ({"idle_seconds": 0}, ["'idle_seconds'", "from 1 to 86,400", "got 0"]),
    "autotune_budget": ({"autotune_budget": 0}, ["'autotune_budget'", "percentage", "from 1 to 100", "got 0"]),
    "tensor_limit": ({"tensor_limit": -5}, ["'tensor_limit'", "-1", "-5"]),
    "list": ([("opset", 18)], ["dict", "list"]),
}


@pytest.mark.parametrize("case", WRONG_OPTIONS)
def test_wrong_option(case: str) -> None:
    options, parts = WRONG_OPTIONS[case]
    with pytest.raises(ValueError) as caught:
        parse_options(options)  # type: ignore[arg-type]
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend_checks_its_options(backend: str) -> None:
    function = torch.compile(lambda x: x + 1, backend=backend, options={"opsett": 18})
    with pytest.raises(ValueError, match="'opsett'.*'opset'") as caught:
        function(torch.ones(3))
    assert len(traceback.extract_tb(caught.value.__traceback__)) == 2, "the caller's line, and Dynamo's that raises it"
    assert "TORCHDYNAMO" not in str(caught.value)


def test_the_compiler_for_aot_autograd_checks_its_options_at_once() -> None:
    with pytest.raises(ValueError, match="'opsett'.*'opset'"):
        onnx_compiler(opsett=18)


def test_unknown_mode() -> None:
    with pytest.raises(ValueError, match="'fast'.* default, reduce-overhead"):
        parse_options(mode="fast")


WRONG_ENVIRONMENT = {
    "OPSET": ("new", "DYNAMO_BACKENDS_OPSET='new': "),
    "THREADS": ("", "DYNAMO_BACKENDS_THREADS='': "),
    "PROVIDERS": ('["CPU', "DYNAMO_BACKENDS_PROVIDERS"),
    "FALLBACK": ("no", "DYNAMO_BACKENDS_FALLBACK='no': "),
    "COMPARE": ("", "DYNAMO_BACKENDS_COMPARE='': "),
    "CACHE": ("maybe", "DYNAMO_BACKENDS_CACHE='maybe': "),
}


@pytest.mark.parametrize("option", WRONG_ENVIRONMENT)
def test_wrong_environment(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    value, message = WRONG_ENVIRONMENT[option]
    monkeypatch.setenv(f"DYNAMO_BACKENDS_{option}", value)
    with pytest.raises(ValueError) as caught:
        parse_options()
    assert message in str(caught.value)


def test_misspelt_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNAMO_BACKENDS_OPSETT", "18")
    with pytest.raises(ValueError, match="DYNAMO_BACKENDS_OPSETT.*Did you mean 'DYNAMO_BACKENDS_OPSET'"):
        parse_options()


def test_providers_in_the_environment_must_be_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNAMO_BACKENDS_PROVIDERS", "[3]")
    with pytest.raises(ValueError, match="DYNAMO_BACKENDS_PROVIDERS"):
        parse_options()


@pytest.mark.parametrize("kind", ["module", "package"])
def test_another_module_called_passes(kind: str, tmp_path: Path) -> None:
    file = tmp_path / ("passes.py" if kind == "module" else "passes/__init__.py")
    file.parent.mkdir(exist_ok=True)
    file.write_text("")
    result = subprocess.run(
        [sys.executable, "-c", "import dynamo_backends.backends"],  # as torch.compile does
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert result.returncode != 0
    message = result.stderr.strip().splitlines()[-1]
    assert message.startswith("ImportError: ") and "'passes'" in message
    assert str(file) in message


@pytest.mark.parametrize("wrong", [torch.randn(3, 5), "text", None], ids=["shape", "str", "None"])
def test_wrong_arguments_fail_as_in_eager(wrong: object) -> None:
    def multiply(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x @ y

    with pytest.raises(Exception) as eager:  # noqa: B017, PT011  its type is what we compare
        multiply(torch.randn(4, 4), wrong)  # type: ignore[arg-type]
    with pytest.raises(Exception) as actual:  # noqa: B017, PT011
        torch.compile(multiply, backend="onnxrt")(torch.randn(4, 4), wrong)
    assert isinstance(actual.value, (type(eager.value), torch._dynamo.exc.TorchDynamoException))


@pytest.mark.parametrize("wrong", [-1, 4, 100])
def test_a_class_that_is_not_there(wrong: int) -> None:
    """PyTorch's own error names it, on whatever runtime the loss is."""
    x, classes = torch.randn(3, 4), torch.tensor([1, 2, wrong])
    for training in (False, True):
        function = compiled(torch.nn.functional.cross_entropy, options={"placement": "onnx"})
        with pytest.raises(IndexError, match=rf"Target {wrong} "):
            function(x.requires_grad_(training), classes)
