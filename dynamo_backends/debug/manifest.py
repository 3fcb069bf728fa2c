"""``manifest.json``: what was compiled and compared, for a person's first look and for programs.

The file is always whole and valid: it is written anew and then takes the old one's place. A small one is written at
each change. A large one, of a hundred graphs or more, waits so that no more than a twentieth of the time goes into it;
a timer writes what waits, or the end of the process. The first verdict that is not ``ok`` never waits.
"""

from __future__ import annotations

import atexit
import dataclasses
import datetime
import functools
import json
import platform
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

import torch
from torch._dynamo.utils import counters

from passes.engine.manager import PassResult

from ..aot import frame_being_compiled
from ..artifacts import CompiledGraph, GraphName
from ..dumps.reading import DIRECTIONS, MANIFEST, SCHEMA_VERSION
from ..exporter.locations import source_line, user_name
from ..forks import renew_in_children
from ..options import Options
from .dump_folder import DumpFolder, graph_folder
from .repeat import RepeatedRegion
from .rows import OK, GraphComparison
from .watched import Cost

_PACKAGES = ("dynamo-backends", "onnx", "onnxruntime", "onnxscript", "onnx-ir", "numpy", "transformers")


_SMALL = 500_000
"""Characters of a manifest that is written at each change."""

_TIMES_LONGER = 20
"""How many times as long as a write took the next one waits."""


class Manifest:
    """The manifest of one dump folder. All methods may be called from several threads."""

    def __init__(self, folder: DumpFolder) -> None:
        self._folder = folder
        self._lock = threading.RLock()
        self._started = _now()
        self._graphs: dict[GraphName, dict[str, object]] = {}
        self._options: dict[str, object] = {}
        self._dynamo_graphs: dict[int, dict[str, Any]] = {}
        self._stages: dict[GraphName, list[dict[str, object]]] = {}
        self._is_behind = False
        self._next_write = 0.0
        self._timer: threading.Timer | None = None
        _manifests.add(self)
        renew_in_children(self)

    def renew_in_child(self) -> None:
        """See ``forks.Renewable``. The graphs that the parent compiled are the child's too; their runs are not."""
        self._lock = threading.RLock()
        self._started = _now()
        self._is_behind = False
        self._next_write = 0.0
        self._timer = None
        for entry in self._graphs.values():
            entry.update(status="compiled", runs=0, verdict=None, note="", worst=None)

    def add_stage(self, graph: GraphName, stage: dict[str, object]) -> None:
        """A stage's graph and file; it is in the file with the next write.

        Args:
            graph: which graph.
            stage: from ``StageFiles.write``.
        """
        with self._lock:
            self._is_behind = True
            self._dynamo_graph(graph.index)
            stages = self._stages.setdefault(graph, [])
            stages[:] = [other for other in stages if other["name"] != stage["name"]] + [stage]

    def _dynamo_graph(self, index: int) -> dict[str, Any]:
        """The entry of a Dynamo graph, made if it is new, while Dynamo compiles it."""
        if index not in self._dynamo_graphs:
            frame = frame_being_compiled()
            where = end = None
            if frame is not None:
                where = {"function": frame.function, "file": frame.file, "line": frame.line}
                end = {"reason": frame.reason, "file": frame.end_file, "line": frame.end_line}
                if frame.details:
                    end["details"] = frame.details
            self._dynamo_graphs[index] = {
                "index": index,
                "where": where,
                "end": end,
                "stages": self._stages.setdefault(GraphName(index), []),
                "given_up": False,
                "passes": [],
            }
        return self._dynamo_graphs[index]

    def add_given_up(self, graph: GraphName, why: str) -> None:
        """A Dynamo graph that is not used, and why."""
        with self._lock:
            self._dynamo_graph(graph.index)["given_up"] = why
            self._changed()

    def add_passes(self, graph: GraphName, results: Sequence[PassResult]) -> None:
        """What the passes of ``pre_grad`` or ``joint`` did to a Dynamo graph; it is in the file with the next write."""
        with self._lock:
            self._is_behind = True
            self._dynamo_graph(graph.index)["passes"].extend(map(_pass_as_json, results))

    def add_graph(self, graph: CompiledGraph, options: Options, *, reference: str) -> None:
        """A graph that compiled, not yet run; ``reference``: what its runs are compared with."""
        coverage = graph.split.coverage
        folder = graph_folder(graph.name)
        placeholders = graph.module.graph.find_nodes(op="placeholder")
        seconds = {"passes": sum(result.milliseconds for result in graph.passes) / 1e3, **graph.seconds}
        entry: dict[str, object] = {
            "index": graph.name.index,
            "direction": graph.name.direction,
            "folder": folder,
            "nodes": coverage.total,
            "nodes_on_onnx": coverage.on_onnx,
            "share_on_onnx": coverage.share,
            "regions": [
                {
                    "index": item.region.index,
                    "folder": f"{folder}/region_{item.region.index}",
                    "nodes": len(item.region.operators),
                    "onnx_nodes": len(item.model.graph),
                    "onnx_nodes_optimized": len(item.optimized_model.graph),
                    "passes": [_pass_as_json(result) for result in item.passes],
                    "session": item.executable.settings.as_json(),
                    "constants": [item.executable.inputs[i].name for i in item.executable.weights],
                }
                for item in graph.regions
            ],
            "in_pytorch": [
                {"node": node.name, "operator": str(node.target), "reason": str(reason), "source": source_line(node)}
                for node, reason in coverage.in_pytorch.items()
            ],
            "passes": [_pass_as_json(result) for result in graph.passes],
            "stages": self._stages.setdefault(graph.name, []),
            "names": {node.name: name for node in placeholders if (name := user_name(node))},
            "seconds": {stage: round(taken, 4) for stage, taken in seconds.items()},
            "runs": 0,
            "reference": reference,
            "status": "compiled",
            "verdict": None,
            "note": "",
            "worst": None,
            "unchecked": [],
        }
        with self._lock:
            self._options = _options_as_json(options)
            self._graphs[graph.name] = entry
            self._changed()

    def count_run(self, name: GraphName) -> None:
        """A run that was not compared; it is in the file with the next write."""
        with self._lock:
            self._is_behind = True
            entry = self._graphs[name]
            entry["runs"] = int(entry["runs"]) + 1  # type: ignore[call-overload]
            if entry["verdict"] is None and self._options["compare"] != "never":
                entry["unchecked"] = ["its runs: none of them was compared"]

    def add_comparison(
        self, name: GraphName, comparison: GraphComparison, repeated: Mapping[int, RepeatedRegion], cost: Cost
    ) -> None:
        """A compared run and its cost. A verdict that is not ``ok`` stays: a later run does not hide it."""
        with self._lock:
            entry = self._graphs[name]
            entry["status"] = "compared"
            entry["cost"] = dataclasses.asdict(cost)
            entry["repeated"] = {
                str(index): {"differing_outputs": len(item.unstable), "failure": item.failure}
                for index, item in repeated.items()
            }
            is_first_fault = comparison.verdict != OK and all(
                other["verdict"] in (None, OK) for other in self._graphs.values()
            )
            if entry["verdict"] in (None, OK):
                entry.update(
                    verdict=comparison.verdict,
                    note=comparison.note,
                    worst=comparison.worst_as_json(),
                    unchecked=comparison.unchecked,
                )
            self._changed(at_once=is_first_fault)

    def flush(self) -> None:
        """Writes what the file does not have yet."""
        with self._lock:
            if self._is_behind:
                self._write()

    def _changed(self, *, at_once: bool = False) -> None:
        self._is_behind = True
        wait = self._next_write - time.monotonic()
        if at_once or wait <= 0:
            self._write()
        elif self._timer is None:
            self._timer = threading.Timer(wait, self.flush)
            self._timer.daemon = True
            self._timer.start()

    def _write(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        start = time.monotonic()
        text = self._text()
        self._folder.write_text(MANIFEST, text)
        self._is_behind = False
        end = time.monotonic()
        self._next_write = end + (end - start) * _TIMES_LONGER if len(text) > _SMALL else end

    def _text(self) -> str:
        content = {
            "schema_version": SCHEMA_VERSION,
            "started": self._started,
            "forked_from": self._folder.forked_from,
            "versions": {"python": platform.python_version(), **_versions()},
            "options": self._options,
            "dynamo_graphs": [graph for _, graph in sorted(self._dynamo_graphs.items())],
            "graphs": [self._graphs[name] for name in sorted(self._graphs, key=lambda name: (name.index, _rank(name)))],
            "counters": dict(counters["dynamo_backends"]),
        }
        return json.dumps(content, indent=1)


_manifests: weakref.WeakSet[Manifest] = weakref.WeakSet()


@atexit.register
def _flush_all() -> None:
    for manifest in list(_manifests):
        manifest.flush()


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def _rank(name: GraphName) -> int:
    return ("", *DIRECTIONS).index(name.direction)


def _pass_as_json(result: PassResult) -> dict[str, object]:
    return {**dataclasses.asdict(result), "milliseconds": round(result.milliseconds, 3)}


def _options_as_json(options: Options) -> dict[str, object]:
    return dataclasses.asdict(options)


@functools.cache
def _versions() -> dict[str, str]:
    found = {"torch": torch.__version__}  # with the build, such as +cpu, which not every package's metadata has
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:  # transformers is optional, onnxruntime has other names
            continue
    return found
