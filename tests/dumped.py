"""A dump for tests of what reads dumps, made by a process of its own: its graphs are numbered from 0."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

MODEL = """\
import torch

def forward(layer, x):
    x = torch.nn.functional.gelu(layer(x))
    torch._dynamo.graph_break()
    return torch.tanh(torch.sort(torch.tanh(x), stable=True).values)

compiled = torch.compile(forward, backend="onnx_debug", options={"dump_dir": "dump"})
compiled(torch.nn.Linear(4, 4), torch.randn(3, 4)).sum().backward()
"""
"""Two graphs that train: a Linear and GELU; after a graph break two regions with ``sort`` in PyTorch between them."""


def dump_of_two_graphs(folder: Path) -> Path:
    """Runs ``MODEL`` as ``model.py`` in a folder; returns the dump folder."""
    (folder / "model.py").write_text(MODEL)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run(
        [sys.executable, "model.py"], cwd=folder, capture_output=True, text=True, env=environment, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return folder / "dump"
