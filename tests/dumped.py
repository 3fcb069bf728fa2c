"""Dumps for the tests of commands that read dumps, written by a separate process: its graphs are numbered from 0."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from dynamo_backends.dumps.reading import SCHEMA_VERSION
from dynamo_backends.dumps.schema import Settings

MODEL = """\
import torch

def forward(layer, x):
    x = torch.nn.functional.gelu(layer(x))
    torch._dynamo.graph_break()
    return torch.exp(torch.sort(torch.exp(x), stable=True).values)

compiled = torch.compile(forward, backend="onnx_debug", options={"dump_dir": "dump"})
compiled(torch.nn.Linear(4, 4), torch.randn(3, 4)).sum().backward()
"""
"""Two graphs that train: a Linear and GELU; after a graph break two regions with ``sort`` in PyTorch between them."""


def dump_of_two_graphs(folder: Path) -> Path:
    """Runs ``MODEL`` in a folder; returns the dump folder."""
    make_dump(folder, MODEL)
    return folder / "dump"


def make_dump(folder: Path, code: str, name: str = "model.py") -> None:
    """Runs a script, by default as ``model.py``, in a folder."""
    (folder / name).write_text(code)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run(
        [sys.executable, name], cwd=folder, capture_output=True, text=True, env=environment, timeout=600
    )
    assert done.returncode == 0, done.stderr


def region_entry(**more: object) -> dict[str, object]:
    """The manifest's entry of a region, the only one of graph 0."""
    return {
        "index": 0,
        "folder": "graph_000/inference/region_0",
        **dict.fromkeys(("nodes", "onnx_nodes", "onnx_nodes_optimized"), 1),
        "session": Settings(threads=1).as_json(),
        **{name: [] for name in ("constants", "passes", "stages")},
        **more,
    }


def graph_entry(**more: object) -> dict[str, object]:
    """The manifest's entry of a graph without regions."""
    return {
        "index": 0,
        "direction": "inference",
        "folder": "graph_000/inference",
        **dict.fromkeys(("nodes", "nodes_on_onnx", "runs", "compared_runs"), 1),
        "runs_at_other_sizes": 0,
        "share_on_onnx": 1.0,
        **{name: [] for name in ("regions", "in_pytorch", "passes", "stages", "unchecked", "compared_sizes")},
        **{name: {} for name in ("names", "seconds", "sizes")},
        **dict.fromkeys(("reference", "note"), ""),
        "status": "compared",
        **dict.fromkeys(("verdict", "blame", "worst")),
        **more,
    }


def manifest_of(graphs: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """A manifest with these graphs."""
    content: dict[str, object] = {"schema_version": SCHEMA_VERSION, "graphs": list(graphs), "dynamo_graphs": []}
    return {**content, "versions": {}, "options": {}, "counters": {}}


def write_manifest(run: Path, *graphs: Mapping[str, object]) -> None:
    """Writes it into a run folder."""
    (run / "manifest.json").write_text(json.dumps(manifest_of(graphs)))
