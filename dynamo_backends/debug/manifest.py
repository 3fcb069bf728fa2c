"""``manifest.json``: what was compiled and compared, for a person's first look and for programs.

The file is always whole and valid: it is written anew and then takes the old one's place. A small one is written at
each change. A large one, of a hundred graphs or more, waits so that no more than a twentieth of the time goes into it;
what waits is written with a later change, or at the end of the process. The first verdict that is not ``ok`` never
waits.
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

from ..aot import call_being_compiled, frame_being_compiled
from ..artifacts import CompiledGraph, CompiledRegion, GraphName, operator_name
from ..dumps.reading import MANIFEST, SCHEMA_VERSION
from ..dumps.schema import DIRECTIONS
from ..exporter.locations import is_user_file, place, short_file, user_name, where, working_folder
from ..forks import renew_in_children
from ..options import Options
from .choice import MOST_SIZES
from .dump_folder import DumpFolder, graph_folder
from .read_me import README, TEXT
from .repeat import RepeatedRegion
from .rows import GraphComparison
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
        self._working_folder = working_folder()
        self._graphs: dict[GraphName, dict[str, Any]] = {}
        self._options: dict[str, object] = {}
        self._failures: dict[GraphName, str] = {}
        self._dynamo_graphs: dict[int, dict[str, Any]] = {}
        self._stages: dict[GraphName, list[dict[str, object]]] = {}
        self._region_stages: dict[tuple[GraphName, int], list[dict[str, object]]] = {}
        self._begin()
        _manifests.add(self)
        renew_in_children(self)

    def _begin(self) -> None:
        """Of this process."""
        self._lock = threading.RLock()
        self._started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self._faulty: set[GraphName] = set()
        self._is_behind = False
        self._next_write = 0.0

    def renew_in_child(self) -> None:
        """See ``forks.Renewable``. The graphs that the parent compiled are the child's too; their runs are not."""
        self._begin()
        self._folder.renew_in_child()  # whichever is told of the fork first
        for compiled in (*self._graphs.values(), *self._dynamo_graphs.values()):
            compiled["files_in"] = compiled["files_in"] or self._folder.forked_from
        for entry in self._graphs.values():
            entry.update(_not_run())
            for of_a_run in ("cost", "repeated"):
                entry.pop(of_a_run, None)

    def add_stage(self, graph: GraphName, stage: dict[str, object]) -> None:
        """A stage's graph and file, from ``StageFiles.write``; it is in the file with the next write."""
        with self._lock:
            self._is_behind = True
            self._dynamo_graph(graph.index)
            _replace(self._stages.setdefault(graph, []), stage)

    def add_region_stage(self, compiled: CompiledRegion, stage: dict[str, object]) -> None:
        """The same for a model of a region; ``nodes`` are ONNX nodes."""
        with self._lock:
            self._is_behind = True
            _replace(self._region_stages.setdefault((compiled.graph, compiled.region.index), []), stage)

    def _dynamo_graph(self, index: int) -> dict[str, Any]:
        """The entry of a Dynamo graph, made if it is new, while Dynamo compiles it."""
        if index not in self._dynamo_graphs:
            frame = frame_being_compiled()
            begin = end = called_from = None
            call = call_being_compiled()
            if frame is not None:
                file, line = short_file(frame.file), frame.line
                here = f"{file}:{line}"
                said = place(str(call) if call is not None and not is_user_file(frame.file) else here, here)
                begin = {"function": frame.function, "file": file, "line": line, "place": said}
                end = {"reason": frame.reason, "file": short_file(frame.end_file), "line": frame.end_line}
                if frame.details:
                    end["details"] = frame.details
            if call is not None:
                called_from = {"function": call.function, "file": short_file(call.file), "line": call.line}
            self._dynamo_graphs[index] = {
                "index": index,
                "where": begin,
                "called_from": called_from,
                "end": end,
                "stages": self._stages.setdefault(GraphName(index), []),
                "given_up": False,
                "not_compiled": {},
                "files_in": None,
                "passes": [],
            }
        return self._dynamo_graphs[index]

    def add_given_up(self, graph: GraphName, why: str) -> None:
        """A Dynamo graph that is not used, and why."""
        with self._lock:
            self._dynamo_graph(graph.index)["given_up"] = why
            self._changed()

    def add_not_compiled(self, graph: GraphName, why: str) -> None:
        """A forward, backward or inference graph that PyTorch runs because its compile failed, and why."""
        with self._lock:
            self._dynamo_graph(graph.index)["not_compiled"][graph.direction] = why
            self._changed(at_once=True)

    def add_failure(self, name: GraphName, why: str) -> None:
        """What was to be dumped or compared of a graph, or without a direction of all directions, was not, and why."""
        with self._lock:
            self._failures.setdefault(name, why)
            for other, entry in self._graphs.items():
                self._apply_failure(other, entry)
            self._changed(at_once=True)

    def _apply_failure(self, name: GraphName, entry: dict[str, Any]) -> None:
        """The verdict on a graph of which something failed, unless a comparison finds it wrong."""
        why = self._failures.get(name) or self._failures.get(GraphName(name.index))
        if why is not None and name not in self._faulty:
            entry["verdict"] = f"not comparable: {why}"

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
        entry: dict[str, Any] = {
            "index": graph.name.index,
            "direction": graph.name.direction,
            "folder": folder,
            "files_in": None,
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
                    "constants": item.executable.constants,
                    "stages": self._region_stages.setdefault((graph.name, item.region.index), []),
                }
                for item in graph.regions
            ],
            "in_pytorch": [
                {"node": node.name, "operator": operator_name(node), "reason": str(reason), "source": where(node)}
                for node, reason in coverage.in_pytorch.items()
            ],
            "passes": [_pass_as_json(result) for result in graph.passes],
            "stages": self._stages.setdefault(graph.name, []),
            "names": {node.name: name for node in placeholders if (name := user_name(node))},
            "seconds": {stage: round(taken, 4) for stage, taken in seconds.items()},
            "reference": reference,
            **_not_run(),
        }
        with self._lock:
            self._options = dataclasses.asdict(options)
            self._graphs[graph.name] = entry
            self._faulty.discard(graph.name)
            self._apply_failure(graph.name, entry)
            self._changed()

    def count_run(self, name: GraphName, *, at_other_sizes: bool) -> None:
        """A run, before it is compared, if it is; it is in the file with the next write.

        ``at_other_sizes``: whether none at its sizes was compared, though one at others was.
        """
        with self._lock:
            self._is_behind = True
            entry = self._graphs[name]
            entry["runs"] += 1
            entry["runs_at_other_sizes"] += at_other_sizes
            if entry["verdict"] is None and self._options["compare"] != "never":
                entry["unchecked"] = ["its runs: none of them was compared"]

    def add_comparison(
        self, name: GraphName, comparison: GraphComparison, repeated: Mapping[int, RepeatedRegion], cost: Cost
    ) -> None:
        """A compared run and its cost. A verdict that is not ``ok`` stays: a later run does not hide it."""
        with self._lock:
            entry = self._graphs[name]
            entry["status"] = "compared"
            entry["compared_runs"] += 1
            sizes = entry["compared_sizes"]
            if comparison.sizes and comparison.sizes not in sizes and len(sizes) < MOST_SIZES:
                sizes.append(comparison.sizes)
            is_first_fault = not comparison.ok and not self._faulty
            if name not in self._faulty:
                worst = comparison.worst
                entry.update(
                    verdict=comparison.verdict,
                    note=comparison.note,
                    blame=comparison.blame.as_json() if comparison.blame is not None else None,
                    worst=worst.as_json() if worst is not None else None,
                    unchecked=comparison.unchecked,
                    rescued={str(index): why for index, why in comparison.rescued.items()},
                    sizes=comparison.sizes,
                    cost=dataclasses.asdict(cost),
                    repeated={
                        str(index): {"differing_outputs": len(item.unstable), "failure": item.failure}
                        for index, item in repeated.items()
                    },
                )
            if not comparison.ok:
                self._faulty.add(name)
            self._apply_failure(name, entry)
            self._changed(at_once=is_first_fault)

    def has_fault(self, name: GraphName) -> bool:
        """Whether a run of a graph was found wrong."""
        with self._lock:
            return name in self._faulty

    def flush(self) -> None:
        """Writes what the file does not have yet."""
        with self._lock:
            if self._is_behind:
                self._write()

    def _changed(self, *, at_once: bool = False) -> None:
        self._is_behind = True
        if at_once or time.monotonic() >= self._next_write:
            self._write()

    def _write(self) -> None:
        start = time.monotonic()
        text = self._text()
        location = self._folder.location
        if location is not None and not (location / README).exists():
            self._folder.write_text(README, TEXT.format(folder=location.name))
        self._folder.write_text(MANIFEST, text)
        self._is_behind = False
        end = time.monotonic()
        self._next_write = end + (end - start) * _TIMES_LONGER if len(text) > _SMALL else end

    def _text(self) -> str:
        content = {
            "schema_version": SCHEMA_VERSION,
            "started": self._started,
            "forked_from": self._folder.forked_from,
            "working_folder": self._working_folder,
            "versions": {"python": platform.python_version(), **_versions()},
            "options": self._options,
            "dynamo_graphs": [graph for _, graph in sorted(self._dynamo_graphs.items())],
            "graphs": [self._graphs[name] for name in sorted(self._graphs, key=lambda name: (name.index, _rank(name)))],
            "counters": dict(counters["dynamo_backends"]),
        }
        return json.dumps(content, indent=1)


_manifests: weakref.WeakSet[Manifest] = weakref.WeakSet()


@atexit.register
def flush_manifests() -> None:
    """Writes what the files of all runs of this process do not have yet."""
    for manifest in list(_manifests):
        manifest.flush()


def _not_run() -> dict[str, Any]:
    """The part of a graph's entry that its runs fill."""
    return {
        "status": "compiled",
        "runs": 0,
        "compared_runs": 0,
        "runs_at_other_sizes": 0,
        "compared_sizes": [],
        "sizes": {},
        "verdict": None,
        "note": "",
        "blame": None,
        "worst": None,
        "unchecked": [],
        "rescued": {},
    }


def _rank(name: GraphName) -> int:
    return ("", *DIRECTIONS).index(name.direction)


def _replace(stages: list[dict[str, object]], stage: dict[str, object]) -> None:
    """Adds a stage; what is compiled twice, such as a dynamic backward, has it already."""
    stages[:] = [other for other in stages if other["name"] != stage["name"]] + [stage]


def _pass_as_json(result: PassResult) -> dict[str, object]:
    return {**dataclasses.asdict(result), "milliseconds": round(result.milliseconds, 3)}


@functools.cache
def _versions() -> dict[str, str]:
    found = {"torch": torch.__version__}  # with the build, such as +cpu, which not every package's metadata has
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:  # transformers is optional, onnxruntime has other names
            continue
    return found
