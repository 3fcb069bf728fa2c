"""Writes what a bisection cut out: a folder that can be attached to a bug report, and is a dump of its own."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir

from ..numerics.rounding import rounding_units
from ..python_process import how_it_ended, worker_environment
from ..runtime.custom_operators import libraries_of_environment
from .candidates import LONGEST, Feeds, Outcome, did_not_end, write_model
from .differences import epsilon, smallest_normal
from .execution import Settings
from .reading import MANIFEST, SCHEMA_VERSION

_SETTINGS = "SETTINGS: dict = {}\n"
"""The line of ``repro.py`` that the settings take the place of."""

_ROUNDED = (1, 10, 11, 14, 15, 16)
"""ONNX's numbers of the floating-point and complex dtypes that ``repro.py`` computes with."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """What is written.

    Attributes:
        model: the model.
        settings: of the session.
        inputs: of the data set; empty where the session is not made.
        right: the right outputs.
        allowed: by output, the error that needs no explanation.
        ends: how ``repro.py`` ends: ``differs``, ``refused``, ``failed`` or ``crashed``.
        text: what is wrong, for a person.
    """

    model: ir.Model
    settings: Settings
    inputs: Feeds
    right: Feeds
    allowed: Mapping[str, float]
    ends: str
    text: str


def write_piece(folder: Path, piece: Piece, versions: Mapping[str, Any]) -> None:
    """Writes the folder: ``model.onnx``, ``test_data_set_0``, ``repro.py``, ``README.txt``, ``manifest.json``.

    Args:
        folder: where.
        piece: what.
        versions: of the libraries of the run it comes from.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_model(piece.model, folder, whole=True)
    write_data(folder, piece.inputs, piece.right)
    libraries = [os.path.abspath(path) for path in libraries_of_environment()]  # not what the dump names: see ``trust``
    session = piece.settings.as_json() | {"custom_op_libraries": libraries}
    settings = {"session": session, "allowed": dict(piece.allowed)}
    (folder / "repro.py").write_text(repro_text(settings), encoding="utf-8")
    (folder / "README.txt").write_text(_readme(piece, versions), encoding="utf-8")
    manifest = _manifest(piece, versions)
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")


def repro_text(settings: Mapping[str, Any]) -> str:
    """``repro.py`` with these settings: the module ``dumps/repro.py`` itself, which imports nothing of ours."""
    source = Path(__file__).with_name("repro.py").read_text(encoding="utf-8")
    assert source.count(_SETTINGS) == 1
    dtypes = {number: onnx.helper.tensor_dtype_to_np_dtype(number) for number in _ROUNDED}
    rounding = {str(number): rounding_units(dtype.name) * epsilon(dtype) for number, dtype in dtypes.items()}
    smallest = {str(number): smallest_normal(dtype) for number, dtype in dtypes.items()}
    text = json.dumps({**settings, "rounding": rounding, "smallest_normal": smallest})
    return source.replace(_SETTINGS, f"SETTINGS: dict = json.loads({text!r})\n")


def write_data(folder: Path, inputs: Feeds, outputs: Feeds) -> None:
    """Writes ``test_data_set_0``, in ONNX's layout."""
    data = folder / "test_data_set_0"
    data.mkdir(exist_ok=True)
    for kind, feeds in (("input", inputs), ("output", outputs)):
        for i, (name, array) in enumerate(feeds.items()):
            proto = onnx.numpy_helper.from_array(array, name)
            (data / f"{kind}_{i}.pb").write_bytes(proto.SerializeToString())


@dataclasses.dataclass(frozen=True)
class Fresh:
    """What ``repro.py`` said in a process of its own.

    Attributes:
        ends: as ``Piece.ends``; ``right`` if it does not show the fault,
            ``not run`` if Python ends it before that.
        said: the last line, or how the process ended.
    """

    ends: str
    said: str

    @property
    def outcome(self) -> Outcome:
        """The same as that of a candidate."""
        return Outcome(self.ends, self.said.removeprefix(f"{self.ends}: "))


def run_repro(folder: Path) -> Fresh:
    """Runs ``repro.py`` in a fresh process."""
    try:
        # -P: the folder may have been there before, with a file that is called like a package
        command = [sys.executable, "-P", str(folder / "repro.py")]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST, env=worker_environment())
    except subprocess.TimeoutExpired:
        return Fresh("crashed", did_not_end())
    lines = ended.stdout.strip().splitlines()
    if ended.returncode < 0:
        return Fresh("crashed", how_it_ended(ended.returncode))
    for end in ("differs", "refused", "failed"):
        for line in lines:
            if ended.returncode == 1 and line.startswith(f"{end}:"):
                return Fresh(end, line)
    if ended.returncode in (1, 2):  # an uncaught exception, onnxruntime is not there for instance; or no model or data
        return Fresh("not run", ended.stderr.strip()[-300:])
    if ended.returncode:
        return Fresh("crashed", how_it_ended(ended.returncode))
    return Fresh("right", lines[-1] if lines else "")


def _readme(piece: Piece, versions: Mapping[str, Any]) -> str:
    known = ", ".join(f"{name} {version}" for name, version in versions.items())
    operators = ", ".join(f"{node.op_type} ({node.domain or 'ai.onnx'})" for node in piece.model.graph)
    return (
        f"{piece.text}\n\n"
        "python repro.py          shows it; it needs onnxruntime and numpy, nothing else\n"
        "model.onnx               the smallest model that was found to fail\n"
        "test_data_set_0          its inputs, and the right outputs\n\n"
        f"operators: {operators}\n"
        f"made with: {known}\n"
    )


def _manifest(piece: Piece, versions: Mapping[str, Any]) -> dict[str, Any]:
    """The folder as a run of one graph and one region, for the commands that read dumps."""
    nodes = len(piece.model.graph)
    region = {
        "index": 0,
        "folder": ".",
        **dict.fromkeys(("nodes", "onnx_nodes", "onnx_nodes_optimized"), nodes),
        "session": piece.settings.as_json(),
        "constants": [],
        "stages": [
            {"name": "onnx", "file": "model.onnx", "nodes": nodes, "same_as": None},
            {"name": "onnx_optimized", "file": None, "nodes": nodes, "same_as": "onnx"},
        ],
        "passes": [],
    }
    graph: dict[str, Any] = {
        "index": 0,
        "direction": "inference",
        "folder": ".",
        "nodes": nodes,
        "nodes_on_onnx": nodes,
        "share_on_onnx": 1.0,
        "regions": [region],
        **{name: [] for name in ("in_pytorch", "passes", "stages", "unchecked")},
        **{name: {} for name in ("names", "seconds")},
        "runs": 1,
        "reference": "",
        "compared_runs": 0,
        "runs_at_other_sizes": 0,
        "compared_sizes": [],
        "sizes": {},
        "status": "bisected",
        "verdict": piece.text,
        "note": "",
        "blame": None,
        "worst": None,
    }
    return {
        "schema_version": SCHEMA_VERSION,
        "versions": dict(versions),
        "options": {},
        "dynamo_graphs": [],
        "graphs": [graph],
        "counters": {},
    }
