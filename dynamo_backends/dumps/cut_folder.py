"""Writes the model that a bisection cut out as a folder for a bug report."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ..common.python_process import exit_code_text, worker_environment
from ..errors import writing
from ..numerics import rule
from ..runtime import provider_libraries
from ..runtime.custom_operators import libraries_of_environment
from .candidate_runs import LONGEST, CandidateOutcome, write_model
from .reading import DATA_SET, write_data_set
from .schema import Settings
from .submodels import Feeds

# The lines of ``repro.py`` that are replaced: by the settings, and by the sources of two modules.
_SETTINGS = "SETTINGS: dict = {}\n"
_INLINED = {
    "from dynamo_backends.numerics.rule import SPREAD, judge\n": rule,
    "from dynamo_backends.runtime.provider_libraries import add_providers, installed_plugins\n": provider_libraries,
}


@dataclasses.dataclass(frozen=True)
class CutModel:
    """A model that was cut out, with its data."""

    model: ir.Model
    settings: Settings  # of the session
    inputs: Feeds  # of the data set; empty if the session cannot be created
    expected: Feeds  # the outputs it should have
    outcome: str  # the expected outcome of ``repro.py``: ``differs``, ``rejected``, ``failed`` or ``crashed``
    text: str  # a description of the fault


def write_cut(folder: Path, piece: CutModel, versions: Mapping[str, str]) -> None:
    """Writes the folder: ``model.onnx``, ``test_data_set_0``, ``repro.py``, ``README.txt``.

    ``versions`` are those of the libraries of the dumped run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_model(piece.model, folder, whole=True)
    write_data_set(folder / DATA_SET, "input", piece.inputs)
    write_data_set(folder / DATA_SET, "output", piece.expected)
    libraries = [os.path.abspath(path) for path in libraries_of_environment()]  # never those that a dump names
    session = piece.settings.as_json() | {"custom_op_libraries": libraries}
    with writing(folder):
        (folder / "repro.py").write_text(repro_text({"session": session}), encoding="utf-8")
        (folder / "README.txt").write_text(_readme(piece, versions), encoding="utf-8")


def repro_text(settings: Mapping[str, Any]) -> str:
    """A ``repro.py`` that needs only onnxruntime and numpy: ``dumps/repro.py`` with the modules that it imports."""
    source = Path(__file__).with_name("repro.py").read_text(encoding="utf-8")
    texts = [inspect.getsource(module) for module in _INLINED.values()]
    text = "\n\n".join(text[text.index("import dataclasses\n") :] for text in texts)
    assert source.count(_SETTINGS) == 1 and all(source.count(line) == 1 for line in _INLINED)
    for line in (*_INLINED, "import numpy as np\n"):
        source = source.replace(line, "", 1)
    return source.replace(_SETTINGS, f"{text}\n\nSETTINGS: dict = json.loads({json.dumps(settings)!r})\n")


def run_repro(folder: Path) -> CandidateOutcome:
    """Runs ``repro.py`` in a fresh process.

    The kind is one of ``CutModel.outcome``; ``right`` if the fault does not show, ``not run`` if the script fails.
    """
    try:
        # -P: a file of the folder may have the name of a package
        command = [sys.executable, "-P", str(folder / "repro.py")]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST, env=worker_environment())
    except subprocess.TimeoutExpired:
        return CandidateOutcome("crashed", f"timeout after {LONGEST:g} seconds")
    lines = ended.stdout.strip().splitlines()
    for line in lines if ended.returncode == 1 else ():
        kind, _, said = line.partition(": ")
        if kind in ("differs", "rejected", "failed"):
            return CandidateOutcome(kind, said)
    if ended.returncode in (1, 2):  # an exception (onnxruntime is missing), or data that was not stored
        return CandidateOutcome("not run", ended.stderr.strip()[-300:])
    if ended.returncode:
        return CandidateOutcome("crashed", exit_code_text(ended.returncode))
    return CandidateOutcome("right", lines[-1] if lines else "")


def _readme(piece: CutModel, versions: Mapping[str, str]) -> str:
    known = ", ".join(f"{name} {version}" for name, version in versions.items())
    operators = ", ".join(f"{node.op_type} ({node.domain or 'ai.onnx'})" for node in piece.model.graph)
    return (
        f"{piece.text}\n\n"
        "python repro.py          reproduces it; needs only onnxruntime, onnx and numpy\n"
        "model.onnx               the smallest model that fails\n"
        "test_data_set_0          its inputs and expected outputs\n\n"
        f"operators: {operators}\n"
        f"made with: {known}\n"
    )
