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
import platform
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import TypeVar, cast

import msgspec
import torch
from torch._dynamo.utils import counters

from passes.engine.results import PassResult

from ..common.fork_safety import renew_in_children
from ..dumps import schema
from ..dumps.reading import MANIFEST, SCHEMA_VERSION
from ..dumps.schema import DIRECTIONS, Cost, Direction
from ..graphs.aot import call_being_compiled, frame_being_compiled
from ..graphs.artifacts import CompiledGraph, CompiledRegion, GraphName, operator_name
from ..graphs.locations import is_user_file, place, short_file, user_name, where, working_folder
from ..options import Options
from .chosen_runs import MOST_SIZES
from .dump_folder import DumpFolder, graph_folder
from .read_me import README, TEXT
from .repeated_runs import RepeatedRegion
from .rows import GraphComparison

T = TypeVar("T")

_PACKAGES = ("dynamo-backends", "onnx", "onnxruntime", "onnxscript", "onnx-ir", "numpy", "transformers")


_SMALL = 500_000
"""Characters of a manifest that is written at each change."""

_TIMES_LONGER = 20
"""How many times as long as a write took the next one waits."""


class Manifest:
    """The manifest of one dump folder. All methods may be called from several threads."""

    def __init__(self, folder: DumpFolder) -> None:
        self._folder = folder
        self._working_folder = _in_utf8(working_folder())
        self._graphs: dict[GraphName, schema.GraphEntry] = {}
        self._options: dict[str, object] = {}
        self._failures: dict[GraphName, str] = {}
        self._dynamo_graphs: dict[int, schema.DynamoGraphEntry] = {}
        self._stages: dict[GraphName, list[schema.StageEntry]] = {}
        self._region_stages: dict[tuple[GraphName, int], list[schema.StageEntry]] = {}
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
        forker = self._folder.forked_from
        for name, entry in self._graphs.items():
            self._graphs[name] = dataclasses.replace(entry.as_compiled, files_in=entry.files_in or forker)
        for of_dynamo in self._dynamo_graphs.values():
            of_dynamo.files_in = of_dynamo.files_in or forker

    def add_stage(self, graph: GraphName, stage: schema.StageEntry) -> None:
        """A stage's graph and file, from ``StageFiles.write``; it is in the file with the next write."""
        with self._lock:
            self._is_behind = True
            self._dynamo_graph(graph.index)
            _replace(self._stages.setdefault(graph, []), stage)

    def add_region_stage(self, compiled: CompiledRegion, stage: schema.StageEntry) -> None:
        """The same for a model of a region; ``nodes`` are ONNX nodes."""
        with self._lock:
            self._is_behind = True
            _replace(self._region_stages.setdefault((compiled.graph, compiled.region.index), []), stage)

    def _dynamo_graph(self, index: int) -> schema.DynamoGraphEntry:
        """The entry of a Dynamo graph, made if it is new, while Dynamo compiles it."""
        if index not in self._dynamo_graphs:
            frame, call = frame_being_compiled(), call_being_compiled()
            begin = end = called_from = None
            if frame is not None:
                file, line = short_file(frame.file), frame.line
                here = f"{file}:{line}"
                said = place(str(call) if call is not None and not is_user_file(frame.file) else here, here)
                begin = schema.LineEntry(frame.function, file, line, said)
                end = schema.EndEntry(frame.reason, short_file(frame.end_file), frame.end_line, frame.details)
            if call is not None:
                called_from = schema.LineEntry(call.function, short_file(call.file), call.line)
            stages = self._stages.setdefault(GraphName(index), [])
            self._dynamo_graphs[index] = schema.DynamoGraphEntry(index, begin, end, stages, called_from)
        return self._dynamo_graphs[index]

    def add_given_up(self, graph: GraphName, why: str) -> None:
        """A Dynamo graph that is not used, and why."""
        with self._lock:
            self._dynamo_graph(graph.index).given_up = why
            self._changed()

    def add_not_compiled(self, graph: GraphName, why: str) -> None:
        """A forward, backward or inference graph that PyTorch runs because its compile failed, and why."""
        with self._lock:
            self._dynamo_graph(graph.index).not_compiled[graph.direction] = why
            self._changed(at_once=True)

    def add_failure(self, name: GraphName, why: str) -> None:
        """What was to be dumped or compared of a graph, or without a direction of all directions, was not, and why."""
        with self._lock:
            self._failures.setdefault(name, why)
            for other, entry in self._graphs.items():
                self._apply_failure(other, entry)
            self._changed(at_once=True)

    def _apply_failure(self, name: GraphName, entry: schema.GraphEntry) -> None:
        """The verdict on a graph of which something failed, unless a comparison finds it wrong."""
        why = self._failures.get(name) or self._failures.get(GraphName(name.index))
        if why is not None and name not in self._faulty:
            entry.verdict = f"not comparable: {why}"

    def add_passes(self, graph: GraphName, results: Sequence[PassResult]) -> None:
        """What the passes of ``pre_grad`` or ``joint`` did to a Dynamo graph; it is in the file with the next write."""
        with self._lock:
            self._is_behind = True
            entry = self._dynamo_graph(graph.index)
            entry.passes = [*entry.passes, *_rounded(results)]

    def add_graph(self, graph: CompiledGraph, options: Options, *, reference: str) -> None:
        """A graph that compiled, not yet run; ``reference``: what its runs are compared with."""
        coverage = graph.split.coverage
        folder = graph_folder(graph.name)
        placeholders = graph.module.graph.find_nodes(op="placeholder")
        seconds = {"passes": sum(result.milliseconds for result in graph.passes) / 1e3, **graph.seconds}
        entry = schema.GraphEntry(
            index=graph.name.index,
            direction=cast(Direction, graph.name.direction),
            folder=folder,
            nodes=coverage.total,
            nodes_on_onnx=coverage.on_onnx,
            share_on_onnx=coverage.share,
            regions=[
                schema.RegionEntry(
                    index=item.region.index,
                    folder=f"{folder}/region_{item.region.index}",
                    nodes=len(item.region.operators),
                    onnx_nodes=len(item.model.graph),
                    onnx_nodes_optimized=len(item.optimized_model.graph),
                    passes=_rounded(item.passes),
                    session=msgspec.convert(item.executable.settings.as_json(), schema.Settings),
                    constants=item.executable.constants,
                    stages=self._region_stages.setdefault((graph.name, item.region.index), []),
                )
                for item in graph.regions
            ],
            in_pytorch=[
                schema.FallbackEntry(node.name, operator_name(node), str(reason), where(node))
                for node, reason in coverage.in_pytorch.items()
            ],
            passes=_rounded(graph.passes),
            stages=self._stages.setdefault(graph.name, []),
            names={node.name: name for node in placeholders if (name := user_name(node))},
            seconds={stage: round(taken, 4) for stage, taken in seconds.items()},
            reference=reference,
        )
        with self._lock:
            self._options = {name: _in_utf8(value) for name, value in dataclasses.asdict(options).items()}
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
            entry.runs += 1
            entry.runs_at_other_sizes += at_other_sizes
            if entry.verdict is None and self._options["compare"] != "never":
                entry.unchecked = ["its runs: none of them was compared"]

    def add_comparison(
        self, name: GraphName, comparison: GraphComparison, repeated: Mapping[int, RepeatedRegion], cost: Cost
    ) -> None:
        """A compared run and its cost. A verdict that is not ``ok`` stays: a later run does not hide it."""
        with self._lock:
            entry = self._graphs[name]
            entry.status = "compared"
            entry.compared_runs += 1
            sizes = entry.compared_sizes
            if comparison.sizes and comparison.sizes not in sizes and len(sizes) < MOST_SIZES:
                sizes.append(comparison.sizes)
            is_first_fault = not comparison.ok and not self._faulty
            if name not in self._faulty:
                entry.verdict, entry.note = comparison.verdict, comparison.note
                entry.blame = comparison.blame.entry if comparison.blame is not None else None
                entry.worst = msgspec.convert(comparison.worst, schema.ErrorEntry | None, from_attributes=True)
                entry.unchecked, entry.rescued = comparison.unchecked, comparison.rescued
                entry.sizes, entry.cost = comparison.sizes, cost
                entry.repeated = {
                    i: schema.RepeatedEntry(len(item.unstable), item.failure) for i, item in repeated.items()
                }
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
        content = schema.RunEntry(
            SCHEMA_VERSION,
            self._started,
            self._folder.forked_from,
            self._working_folder,
            {"python": platform.python_version(), **_versions()},
            self._options,
            [graph for _, graph in sorted(self._dynamo_graphs.items())],
            [self._graphs[name] for name in sorted(self._graphs, key=lambda name: (name.index, _rank(name)))],
            dict(counters["dynamo_backends"]),
        )
        return msgspec.json.format(msgspec.json.encode(content), indent=1).decode()


_manifests: weakref.WeakSet[Manifest] = weakref.WeakSet()


@atexit.register
def flush_manifests() -> None:
    """Writes what the files of all runs of this process do not have yet."""
    for manifest in list(_manifests):
        manifest.flush()


def _rank(name: GraphName) -> int:
    return ("", *DIRECTIONS).index(name.direction)


def _replace(stages: list[schema.StageEntry], stage: schema.StageEntry) -> None:
    """Adds a stage; what is compiled twice, such as a dynamic backward, has it already."""
    stages[:] = [other for other in stages if other.name != stage.name] + [stage]


def _in_utf8(value: T) -> T | str:
    """A text that may be a path, whose bytes need not be UTF-8, as JSON is; anything else as it is."""
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def _rounded(results: Sequence[PassResult]) -> list[PassResult]:
    return [dataclasses.replace(result, milliseconds=round(result.milliseconds, 3)) for result in results]


@functools.cache
def _versions() -> dict[str, str]:
    found = {"torch": str(torch.__version__)}  # with the build, such as +cpu, which not every package's metadata has
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:  # transformers is optional, onnxruntime has other names
            continue
    return found
