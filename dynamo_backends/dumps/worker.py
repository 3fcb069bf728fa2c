"""The process that runs candidates for ``candidates.Runner``, so that one that crashes ends only this process.

It reads a request a line, JSON, from standard input, and answers with a line of JSON: see ``Runner``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx

from ..python_process import answer_requests
from .candidates import read_arrays, write_arrays
from .execution import ExecutionError, Session, Settings
from .models import OnnxModel


def main() -> None:
    """Answers requests until there are no more."""
    answer_requests(_answer)


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    path = Path(request["model"])
    model: OnnxModel | Path = path
    if "external_data" in request:
        proto = onnx.load_model(path, load_external_data=False)
        model = OnnxModel(proto, Path(request["external_data"]), str(path))
    try:
        session = Session(model, Settings.of(request["settings"]))
        if request["feeds"] is None:
            return {"kind": "built", "message": ""}
        arrays = [array for stored in request["feeds"] for array in read_arrays(*stored)]
        outputs = session(dict(zip(request["names"], arrays, strict=True)))
    except ExecutionError as error:
        return {"kind": error.kind, "message": error.said}
    tensors = {name: value for name, value in outputs.items() if isinstance(value, np.ndarray)}
    stored = write_arrays(Path(request["outputs"]), tensors)
    return {"kind": "ran", "message": "", "names": list(tensors), "outputs": stored}
