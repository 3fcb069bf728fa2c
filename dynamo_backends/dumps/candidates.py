"""Runs candidates: models that may be wrong, be refused, or crash, each in a process that is not this one.

::

    with Runner() as runner:
        outcome = runner.run(model, {"x": (array, 1)}, settings)
        outcome.kind         # "ran", "refused", "failed" or "crashed"
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir

Feeds: TypeAlias = "Mapping[str, tuple[np.ndarray, int]]"
"""Values by name: an array, and ONNX's number of its dtype; what numpy does not have, such as bfloat16, is its bits."""

PLAIN: dict[str, Any] = {"graph_optimization_level": "ORT_DISABLE_ALL", "threads": 1}
"""Settings of a session that changes nothing."""

_PROTOBUF_LIMIT = 2**31 - 2**24
_LONGEST = 600.0
"""Seconds that a candidate may take."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a candidate.

    Attributes:
        kind: ``built`` (it was not to run), ``ran``, ``refused`` (no session), ``failed`` (no results), ``crashed``.
        message: what ONNX Runtime said, or how the process ended.
        outputs: by name, in the model's order, if it ran.
    """

    kind: str
    message: str = ""
    outputs: Feeds = dataclasses.field(default_factory=dict)


class Runner:
    """Runs candidates one after the other in a process that is started anew after a crash.

    Attributes:
        count: of candidates that ran.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="dynamo_backends_bisect_")
        self._process: subprocess.Popen[str] | None = None
        self._numbers = itertools.count()
        self.count = 0

    def __enter__(self) -> Runner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop()
        self._folder.cleanup()

    def run(self, model: ir.Model | Path, feeds: Feeds | None, settings: Mapping[str, Any]) -> Outcome:
        """Makes a session of a model, and runs it.

        Args:
            model: the model, or its path.
            feeds: its inputs, more than it has is no matter; ``None``: the session is made, and not run.
            settings: of the session, see ``repro.session_of``.
        """
        self.count += 1
        folder = Path(self._folder.name) / str(next(self._numbers))
        folder.mkdir()
        path = model if isinstance(model, Path) else write_model(model, folder)
        request: dict[str, Any] = {"model": str(path), "settings": dict(settings), "feeds": None}
        if feeds is not None:
            request |= {"feeds": str(folder / "feeds.npz"), "outputs": str(folder / "outputs.npz")}
            request["types"] = [(name, number) for name, (_, number) in feeds.items()]
            by_position: dict[str, Any] = {str(i): array for i, (array, _) in enumerate(feeds.values())}
            np.savez(request["feeds"], **by_position)
        outcome = self._ask(request)
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()
        return outcome

    def _ask(self, request: dict[str, Any]) -> Outcome:
        process = self._started()
        assert process.stdin is not None and process.stdout is not None
        took_too_long = threading.Event()

        def end() -> None:
            took_too_long.set()
            process.kill()

        timer = threading.Timer(_LONGEST, end)
        timer.start()
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if not line:
            code = process.wait()
            self._stop()
            if took_too_long.is_set():
                return Outcome("crashed", f"it did not end in {_LONGEST:g} seconds")
            return Outcome("crashed", f"the process ended by signal {-code}" if code < 0 else f"exit code {code}")
        answer = json.loads(line)
        if answer["kind"] != "ran":
            return Outcome(answer["kind"], answer["message"])
        with np.load(request["outputs"]) as arrays:
            outputs = {name: (arrays[str(i)], number) for i, (name, number) in enumerate(answer["types"])}
        return Outcome("ran", "", outputs)

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            ours = str(Path(__file__).parents[2])
            path = os.pathsep.join(filter(None, [ours, os.environ.get("PYTHONPATH", "")]))
            self._process = subprocess.Popen(
                [sys.executable, "-m", f"{__package__}.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env={**os.environ, "PYTHONPATH": path},
            )
        return self._process

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:
                    continue
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def write_model(model: ir.Model, folder: Path, name: str = "model.onnx") -> Path:
    """Writes a model; what does not fit into one file has its weights in another beside it."""
    path = folder / name
    size = sum(value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value is not None)
    if size < _PROTOBUF_LIMIT:
        path.write_bytes(ir.to_proto(model).SerializeToString())
    else:
        ir.save(model, path, external_data=f"{name}.data")
    return path
