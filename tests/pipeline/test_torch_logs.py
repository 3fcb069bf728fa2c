"""The stages in PyTorch's own logs: ``TORCH_LOGS`` and ``TORCH_TRACE``."""

from __future__ import annotations

import configparser
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import compiled

from dynamo_backends.pipeline import stage_logging

ROOT = Path(__file__).parents[2]

SCRIPT = """
import sys
import torch

def model(x):
    return torch.exp(torch.sort(torch.relu(x), stable=True).values)

options = {"dump_dir": "dump"} if sys.argv[1] == "onnx_debug" else {"cache": True, "cache_dir": "cache"}
call = torch.compile(model, backend=sys.argv[1], options=options)
x = torch.randn(3, 4, requires_grad="train" in sys.argv)
result = call(x)
if "train" in sys.argv:
    result.sum().backward()
"""


@pytest.fixture
def installed(tmp_path: Path) -> dict[str, str]:
    """The environment of a process in which the package is installed with the entry points of ``setup.cfg``."""
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    info = tmp_path / "site" / "installed-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: installed\nVersion: 1.0\n")
    group = settings["options.entry_points"]["torch.backends"]
    (info / "entry_points.txt").write_text(f"[torch.backends]{group}\n")
    path = os.pathsep.join([str(ROOT), str(info.parent)])
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TORCH_")}
    return {**environment, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def _run(folder: Path, environment: dict[str, str], *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return re.sub(r"^\w\d+ \S+ +\d+ \S+\] (\[\S+\] )?", "", done.stderr, flags=re.MULTILINE)


def test_help_lists_ours(installed: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import torch"], env={**installed, "TORCH_LOGS": "help"}, capture_output=True, text=True
    )
    assert re.search(r"^  dynamo_backends$", done.stderr, re.MULTILINE)


def test_the_log_shows_the_pipeline(installed: dict[str, str], tmp_path: Path) -> None:
    environment = {**installed, "TORCH_LOGS": "+dynamo_backends"}
    said = _run(tmp_path, environment, "onnxrt")
    stages = re.findall(r"^graph 0(?: inference)?, stage (\w+)(?:, region \d)?: ", said, re.MULTILINE)
    regions = ["onnx", "onnx_optimized", "session"] * 2
    assert stages == ["dynamo", "pre_grad", "joint", "aten", "post_grad", "regions", *regions]
    assert "stage regions: 2 regions, 2 of 3 " in said
    assert "sort = aten.sort.stable: " in said
    assert re.search(r"^exp: f32\[3, 4\] = Exp\(getitem\)( *#|$)", said, re.MULTILINE)
    again = _run(tmp_path, environment, "onnxrt")
    assert re.search(r"cache, region 1:$", again, re.MULTILINE)
    assert "= Exp(getitem)" in again


def test_without_plus_there_is_a_line_for_each_stage(installed: dict[str, str], tmp_path: Path) -> None:
    environment = {**installed, "TORCH_LOGS": "dynamo_backends", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    said = _run(tmp_path, environment, "onnxrt")
    assert re.search(r"stage onnx, region 1: 1 node$", said, re.MULTILINE) and "= Exp(" not in said


def test_nothing_is_said_unasked(installed: dict[str, str], tmp_path: Path) -> None:
    assert "stage" not in _run(tmp_path, installed, "onnxrt")


BROKEN = """
import builtins, importlib.abc, importlib.util, sys

original, called = builtins.__import__, []

def planted(*args, **kwargs):
    called.append(args)
    raise {error}("planted")

def in_ours(name, globals=None, *rest, **more):
    if (globals or {{}}).get("__name__", "").startswith("dynamo_backends"):
        planted(name)
    return original(name, globals, *rest, **more)

class Patched(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "dynamo_backends":  # PyTorch loads the entry point
            internal = original("torch._logging._internal", fromlist=["register_log"])
            {plant}

sys.meta_path.insert(0, Patched())
import torch

assert called, "what is broken was used"
assert torch.ones(2).sum() == 2 and torch._logging is not None
ours = [name for name in sys.modules if name.split(".")[0] in ("dynamo_backends", "passes")]
assert ours == ["dynamo_backends", "dynamo_backends.common", "dynamo_backends.common.torch_logs"], "it stays cheap"
"""


@pytest.mark.parametrize(
    ("plant", "error"),
    [
        ("builtins.__import__ = in_ours", "ImportError"),
        ("internal.register_log = planted", "UserWarning"),
        ("internal.log_registry.register_log = planted", "KeyError"),
    ],
)
def test_pytorch_is_imported_whatever_fails_in_the_entry_point(
    plant: str, error: str, installed: dict[str, str], tmp_path: Path
) -> None:
    """Each import in what PyTorch runs of ours, and each private function that it calls: nothing is said."""
    code = BROKEN.format(plant=plant, error=error)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=installed, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def _artifacts(folder: Path) -> dict[str, tuple[dict[str, Any], str]]:
    """Our artifacts of a trace: what is said of each, and its text."""
    (log,) = folder.glob("*.log")
    found: dict[str, tuple[dict[str, Any], str]] = {}
    name = ""
    for line in log.read_text().splitlines():
        match = re.match(r"V\d.*?\] (\{.*\})$", line)
        if match is not None:
            entry = json.loads(match[1])
            name = entry.get("artifact", {}).get("name", "")
            if name.startswith("dynamo_backends"):
                found[name] = (entry, "")
        elif name in found and line.startswith("\t"):
            entry, text = found[name]
            found[name] = (entry, f"{text}{line[1:]}\n")
    return found


def test_the_trace_has_our_models_and_the_comparison(installed: dict[str, str], tmp_path: Path) -> None:
    _run(tmp_path, {**installed, "TORCH_TRACE": str(tmp_path / "trace")}, "onnx_debug", "train")
    found = _artifacts(tmp_path / "trace")
    names = [f"onnx_region_{i}" for i in range(2)] + [f"onnx_optimized_region_{i}" for i in range(2)]
    for direction, whats in (("forward", names), ("backward", [names[0], names[2]])):
        for what in ("post_grad", "regions", *whats, "side_by_side"):
            entry, text = found[f"dynamo_backends_graph_0_{direction}_{what}"]
            compile_ = [entry[key] for key in ("frame_id", "frame_compile_id", "attempt")]
            assert compile_ == [0, 0, 0], "beside the graphs of this compile"
            assert entry["artifact"]["encoding"] == "string" and entry["has_payload"]
            assert what != "side_by_side" or re.search(r"verdict .*: ok$", text, re.MULTILINE)
    assert "Exp(" in found["dynamo_backends_graph_0_forward_onnx_region_1"][1]
    assert "sort" in found["dynamo_backends_graph_0_forward_regions"][1]


def test_the_trace_has_the_models_of_the_cache(installed: dict[str, str], tmp_path: Path) -> None:
    _run(tmp_path, installed, "onnxrt")
    _run(tmp_path, {**installed, "TORCH_TRACE": str(tmp_path / "trace")}, "onnxrt")
    found = _artifacts(tmp_path / "trace")
    assert "Exp(" in found["dynamo_backends_graph_0_inference_onnx_optimized_region_1"][1]
    assert "dynamo_backends_graph_0_inference_onnx_region_1" not in found, "it was not translated anew"


def test_costs_nothing_when_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """No text is made where nobody reads it."""
    monkeypatch.setattr(torch._logging._internal.trace_log, "handlers", [])
    for name in ("_text", "_size", "_text_of_bytes"):
        monkeypatch.setattr(stage_logging, name, lambda *args: pytest.fail("made"))
    compiled(lambda x: torch.relu(x) + 1)(torch.randn(3))
