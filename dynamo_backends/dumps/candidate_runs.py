"""Runs models that may be wrong, be rejected, or crash: each in a subprocess.

::

    with CandidateRunner() as runner:
        outcome = runner.run(model, {"x": x}, settings)
        outcome.kind         # "ran", "rejected", "failed" or "crashed"

The subprocess runs ``main()`` of this module. A request is a line of JSON; tensors go through files of ONNX's.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import onnx_ir as ir

from ..common.python_process import Worker, WorkerExit, WorkerStartError, answer_requests, exit_code_text
from ..errors import writing
from .model_sessions import ExecutionError, ModelSession
from .models import OnnxModel, external_folder
from .reading import DATA_SET, PROTOBUF_LIMIT, DumpError, read_data_set, write_data_set
from .schema import Settings
from .submodels import Feeds

LONGEST = 600.0  # timeout of a candidate, in seconds


@dataclasses.dataclass(frozen=True)
class CandidateOutcome:
    """The result of a candidate."""

    kind: str  # ``built`` (session only), ``ran``, ``rejected`` (no session), ``failed`` (run error), ``crashed``
    message: str = ""  # ONNX Runtime's error, or the signal or exit code of the process
    outputs: Feeds = dataclasses.field(default_factory=dict)  # by name, in the model's order, if it ran


class CandidateRunner:
    """Runs candidates in one worker process, which is restarted after a crash. ``count`` is how many sessions it made:
    a model that runs again on other inputs has the same session."""

    def __init__(self) -> None:
        self._worker = Worker(f"{__package__}.candidate_runs")
        self.count = 0

    def __enter__(self) -> CandidateRunner:
        return self

    def __exit__(self, *error: object) -> None:
        self._worker.stop()

    def run(self, model: ir.Model | Path, feeds: Feeds | None, settings: Settings) -> CandidateOutcome:
        """Creates a session of a model, or of a file, and runs it.

        ``feeds`` are the inputs, and may hold other values; with ``None`` the session is created but not run.

        Raises:
            DumpError: the worker does not start.
        """
        with tempfile.TemporaryDirectory(prefix="dynamo_backends_bisect_") as name:
            folder = Path(name)
            path = model if isinstance(model, Path) else write_model(model, folder)
            request: dict[str, Any] = {"model": str(path), "settings": settings.as_json(), "data": ""}
            if isinstance(model, ir.Model):
                request["external_data"] = external_folder(model) or name
                feeds = None if feeds is None else {str(v.name): feeds[str(v.name)] for v in model.graph.inputs}
            if feeds is not None:
                write_data_set(folder / DATA_SET, "input", feeds)
                request["data"] = str(folder / DATA_SET)
            try:
                answer = self._worker.ask(request, LONGEST)
            except WorkerStartError as error:  # not the model's fault
                raise DumpError(str(error)) from error
            if isinstance(answer, WorkerExit):
                self.count += 1
                timeout = f"timeout after {LONGEST:g} seconds"
                return CandidateOutcome("crashed", timeout if answer.timed_out else exit_code_text(answer.code))
            self.count += not answer["again"]
            return CandidateOutcome(answer["kind"], answer["message"], dict(read_data_set(folder / DATA_SET, "output")))


def main() -> None:
    """Entry point of the worker: answers the requests of a ``CandidateRunner``."""
    last: dict[object, ModelSession | ExecutionError] = {}  # the session of the last model, or why it has none

    def answer(request: Mapping[str, Any]) -> dict[str, object]:
        path = Path(request["model"])
        content = path.read_bytes() if "external_data" in request else b""
        key = content, str(request["settings"])
        is_again = bool(content) and key in last
        if not is_again:
            last.clear()
            model: OnnxModel | Path = path
            if content:
                parsed = ir.from_proto(onnx.load_model_from_string(content))
                ir.external_data.set_base_dir(parsed.graph, request["external_data"])
                model = OnnxModel(parsed, str(path))
            try:
                last[key] = ModelSession(model, msgspec.convert(request["settings"], Settings))
            except ExecutionError as error:
                last[key] = error
        session = last[key]
        try:
            if isinstance(session, ExecutionError):
                raise session
            if not request["data"]:
                return {"kind": "built", "message": "", "again": is_again}
            outputs = session(dict(read_data_set(Path(request["data"]), "input")))
        except ExecutionError as error:
            return {"kind": error.kind, "message": error.said, "again": is_again}
        tensors = {name: value for name, value in outputs.items() if isinstance(value, np.ndarray)}
        write_data_set(Path(request["data"]), "output", tensors)
        return {"kind": "ran", "message": "", "again": is_again}

    answer_requests(answer)


def write_model(model: ir.Model, folder: Path, name: str = "model.onnx", *, whole: bool = False) -> Path:
    """Writes a model; weights go to a second file if protobuf's 2 GB limit requires it.

    Weights that are in a file already stay there, unless ``whole`` is set.
    """
    path = folder / name
    values = [value.const_value for value in model.graph.initializers.values() if value.const_value is not None]
    external = [value for value in values if isinstance(value, ir.ExternalTensor)]
    size = sum(value.nbytes for value in values if whole or not isinstance(value, ir.ExternalTensor))
    if size > PROTOBUF_LIMIT:
        with writing(path):
            ir.save(model, path, external_data=f"{name}.data")
        return path
    if whole and external:
        model = model.clone()
        ir.external_data.load_to_model(model)
    data = ir.to_proto(model).SerializeToString()
    with writing(path):
        path.write_bytes(data)
    return path
