"""Writes ``manifest.json``: every compiled graph, its verdict, and the files of the dump.

The file is replaced atomically, so it is always valid JSON. A small one is written at each change. A large one, of a
hundred graphs or more, takes at most a twentieth of the time: changes wait for a later write or the end of the process,
except for the first fault.
"""

from __future__ import annotations

import atexit
import collections
import dataclasses
import datetime
import functools
import logging
import platform
import threading
import time
from collections.abc import Sequence
from importlib import metadata
from typing import TypeVar, cast

import msgspec
import torch
from torch._dynamo.utils import counters

from passes.engine.results import PassResult

from ..common.fork_safety import Lock, renew_in_children
from ..dumps import schema
from ..dumps.reading import MANIFEST, SCHEMA_VERSION
from ..dumps.schema import DIRECTIONS, Direction
from ..exporter.upstream_faults import DROPOUT
from ..graphs.artifacts import GraphName, operator_name
from ..graphs.dynamo_frames import call_being_compiled, frame_being_compiled, skipped_functions
from ..graphs.locations import is_user_file, location_text, short_file, user_name, where, working_folder
from ..options import Options
from ..pipeline.stage_data import CompiledGraph
from ..pipeline.usage import ExtensionUsage
from .chosen_runs import MOST_SIZES, SizesByName
from .dump_folder import DumpFolder, graph_folder
from .recorded_run import RecordedRun
from .rows import MOST_WRONG_NODES, GraphComparison

logger = logging.getLogger(__name__)

T = TypeVar("T")

_PACKAGES = ("dynamo-backends", "onnx", "onnxruntime", "onnxscript", "onnx-ir", "numpy", "transformers")

_SMALL = 500_000
"""A manifest with at most so many characters is written at each change."""

_WAIT = 20
"""A large manifest is written again after this multiple of the time of the last write."""


_README = """\
What torch.compile did with a program, and whether the results are right. Start with the verdicts:

    dynamo-backends ls -d {folder}
    dynamo-backends report -d {folder}          a page for a browser

manifest.json            every graph: source line, verdict, compile time, operators in PyTorch with the reasons
graph_000/               one Dynamo graph; each graph break and each recompile starts another
  dynamo.py              as Dynamo captured it; pre_grad.py: after our passes
  joint.py               forward and backward together, in ATen operators
  dynamo.json            the nodes as JSON; also pre_grad.json, joint.json, and below aten.json, post_grad.json
  passes/                what each pass changed, as a diff; also in the folders below
  forward/  backward/  or  inference/
    aten.py              one direction; post_grad.py: after our passes
    side_by_side.txt     every value against PyTorch on the same inputs; ! is wrong, ? not deterministic
    side_by_side.json    the same with every measure
    region_0/            one ONNX model
      model.onnx             as translated; model.optimized.onnx: after our passes; model.session.onnx: as it ran
      test_data_set_0/       its recorded inputs and outputs, in ONNX's test layout
      repro.py               runs the model on these, with onnxruntime, onnx and numpy only
      culprit/               inputs and expected results of a wrong node
    rejected/            models that ONNX Runtime rejected, and its errors

A stage that changed nothing has no file: manifest.json names the earlier stage with the same graph. Files with equal
content may be hard links: change a copy.

    dynamo-backends show GRAPH          the graph of a stage, with source lines          GRAPH: 0, graph_000/backward
    dynamo-backends diff GRAPH A B      what changed between two stages
    dynamo-backends compare A B         compare the values of two ONNX models
    python .../region_0/repro.py        run the model again, and compare with the recorded outputs
    dynamo-backends bisect GRAPH        the smallest model that is still wrong
    dynamo-backends nan GRAPH           the first node that creates NaN or infinity
"""


class Manifest:
    """The manifest of one dump folder. Thread-safe."""

    def __init__(self, folder: DumpFolder) -> None:
        self._folder = folder
        versions = {"python": platform.python_version(), **_versions()}
        self._run = schema.RunEntry(SCHEMA_VERSION, working_folder=_in_utf8(working_folder()), versions=versions)
        self._graphs: dict[GraphName, schema.GraphEntry] = {}
        self._dynamo_graphs: dict[int, schema.DynamoGraphEntry] = {}
        self._failures: dict[GraphName, str] = {}
        self._stages: collections.defaultdict[tuple[GraphName, int | None], list[schema.StageEntry]]
        self._stages = collections.defaultdict(list)  # by graph and region
        self._begin()
        renew_in_children(self)

    def _begin(self) -> None:
        self._lock = threading.RLock()
        self._run.started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self._run.forked_from = self._folder.forked_from
        self._run.unused = []
        self._usage = ExtensionUsage()
        self._faulty: set[GraphName] = set()
        self._warned: list[str] = []
        self._is_behind = False
        self._next_write = 0.0

    def renew_in_child(self) -> None:
        """See ``fork_safety.Renewable``. The child keeps the graphs that the parent compiled, without their runs."""
        self._folder.renew_in_child()  # the order of these calls in a child is not known
        self._begin()
        forker = self._folder.forked_from
        for name, entry in self._graphs.items():
            self._graphs[name] = dataclasses.replace(entry.as_compiled, files_in=entry.files_in or forker)
        for of_dynamo in self._dynamo_graphs.values():
            of_dynamo.files_in = of_dynamo.files_in or forker

    def add_stage(self, graph: GraphName, stage: schema.StageEntry, region: int | None = None) -> None:
        """Adds a stage, with the next write; ``region`` is that of a model."""
        with self._lock:
            self._is_behind = True
            self._dynamo_graph(graph.index)
            stages = self._stages[graph, region]  # a dynamic backward may be compiled twice
            stages[:] = [*(other for other in stages if other.name != stage.name), stage]

    def _dynamo_graph(self, index: int) -> schema.DynamoGraphEntry:
        """The entry of a Dynamo graph; created while Dynamo compiles it."""
        if index not in self._dynamo_graphs:
            frame, call = frame_being_compiled(), call_being_compiled()
            begin = end = called_from = None
            if frame is not None:
                file, line = short_file(frame.file), frame.line
                here = f"{file}:{line}"
                lines = location_text(str(call) if call is not None and not is_user_file(frame.file) else here, here)
                begin = schema.LineEntry(frame.function, file, line, lines)
                end = schema.EndEntry(frame.reason, short_file(frame.end_file), frame.end_line, frame.details)
            if call is not None:
                called_from = schema.LineEntry(call.function, short_file(call.file), call.line)
            stages = self._stages[GraphName(index), None]
            self._dynamo_graphs[index] = schema.DynamoGraphEntry(index, begin, end, stages, called_from)
        return self._dynamo_graphs[index]

    def add_given_up(self, graph: GraphName, why: str) -> None:
        """Adds why a Dynamo graph is not used."""
        with self._lock:
            self._dynamo_graph(graph.index).given_up = why
            self._changed()

    def add_not_compiled(self, graph: GraphName, why: str) -> None:
        """Adds why PyTorch runs a forward, backward or inference graph."""
        with self._lock:
            self._dynamo_graph(graph.index).not_compiled[graph.direction] = why
            self._changed(at_once=True)

    def add_failure(self, name: GraphName, why: str) -> None:
        """Adds why a graph, or a Dynamo graph with all its directions, was not dumped or compared."""
        with self._lock:
            self._failures.setdefault(name, why)
            self._changed(at_once=True)

    def add_passes(self, graph: GraphName, results: Sequence[PassResult]) -> None:
        """Adds the passes of ``pre_grad`` or ``joint``, with the next write."""
        with self._lock:
            self._is_behind = True
            entry = self._dynamo_graph(graph.index)
            entry.passes = [*entry.passes, *_rounded(results)]
            self._usage.add_passes(results)

    def add_graph(self, graph: CompiledGraph, options: Options, *, reference: str) -> None:
        """Adds a compiled graph; ``reference`` is what its runs are compared with."""
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
                    stages=self._stages[graph.name, item.region.index],
                    products=[schema.ProductEntry(**dataclasses.asdict(product)) for product in item.products],
                )
                for item in graph.regions
            ],
            in_pytorch=[
                schema.FallbackEntry(node.name, operator_name(node), str(reason), where(node))
                for node, reason in coverage.in_pytorch.items()
            ],
            passes=_rounded(graph.passes),
            stages=self._stages[graph.name, None],
            names={node.name: name for node in placeholders if (name := user_name(node))},
            seconds={stage: round(taken, 4) for stage, taken in seconds.items()},
            reference=reference,
            dropout=list(
                dict.fromkeys(where(node) for node, reason in coverage.in_pytorch.items() if reason == DROPOUT)
            ),
        )
        with self._lock:
            self._run.options = {name: _in_utf8(value) for name, value in dataclasses.asdict(options).items()}
            self._graphs[graph.name] = entry
            self._usage.add_graph(graph.split)
            self._usage.add_passes([*graph.passes, *(result for item in graph.regions for result in item.passes)])
            self._run.unused = self._usage.unused()
            self._faulty.discard(graph.name)
            self._changed()

    def count_run(self, name: GraphName, *, at_other_sizes: bool) -> None:
        """Counts a run before its comparison, with the next write.

        ``at_other_sizes``: whether runs were compared, but none at its sizes.
        """
        with self._lock:
            self._is_behind = True
            entry = self._graphs[name]
            entry.runs += 1
            entry.runs_at_other_sizes += at_other_sizes
            if entry.verdict is None and self._run.options["compare"] != "never":
                entry.unchecked = ["its runs: none of them was compared"]

    def add_comparison(
        self, name: GraphName, comparison: GraphComparison, run: RecordedRun, run_sizes: SizesByName
    ) -> None:
        """Adds a compared run. The first verdict that is not ``ok`` stays.

        A verdict may be about other sizes than those of the run.
        """
        with self._lock:
            entry = self._graphs[name]
            entry.status = "compared"
            entry.compared_runs += 1
            sizes = entry.compared_sizes
            if run_sizes and run_sizes not in sizes and len(sizes) < MOST_SIZES:
                sizes.append(run_sizes)
            is_first_fault = not comparison.ok and not self._faulty
            if name not in self._faulty:
                _set_verdict(entry, comparison)
                entry.cost, entry.rescued = run.cost, run.rescued
                entry.repeated = {
                    i: schema.RepeatedEntry(len(item.others), item.failure) for i, item in run.repeated.items()
                }
            if not comparison.ok:
                self._faulty.add(name)
            self._changed(at_once=is_first_fault)

    def add_fault_of_stages(self, name: GraphName, comparison: GraphComparison) -> bool:
        """Adds the verdict on the stages of a graph that need not have run; returns whether it is the first fault."""
        with self._lock:
            entry = self._graphs[name]
            is_first = entry.blame is None
            if is_first:
                _set_verdict(entry, comparison)
                self._changed(at_once=True)
            return is_first

    def has_graph(self, name: GraphName) -> bool:
        """Whether a graph was compiled."""
        return name in self._graphs

    def has_fault(self, name: GraphName) -> bool:
        """Whether a run of a graph was wrong."""
        return name in self._faulty

    def flush(self) -> None:
        """Writes the changes that wait; warns once of each registered converter and pass that no graph used."""
        with self._lock:
            if self._is_behind or (self._graphs and self._run.skipped != skipped_functions()):
                self._write()
            unused = [item for item in self._run.unused if item not in self._warned]
            self._warned += unused
        if unused:
            where = f" of {self._folder.location}" if self._folder.location is not None else ""
            logger.warning("registered, but not used by any graph%s: %s", where, "; ".join(unused))

    def _changed(self, *, at_once: bool = False) -> None:
        self._is_behind = True
        if at_once or time.monotonic() >= self._next_write:
            self._write()

    def _write(self) -> None:
        start = time.monotonic()
        text = self._text()
        location = self._folder.location
        if location is not None and not (location / "README.txt").exists():
            self._folder.write_text("README.txt", _README.format(folder=location.name))
        self._folder.write_text(MANIFEST, text)
        self._is_behind = False
        end = time.monotonic()
        self._next_write = end + (end - start) * _WAIT if len(text) > _SMALL else end

    def _text(self) -> str:
        for name, entry in self._graphs.items():
            why = self._failures.get(name) or self._failures.get(GraphName(name.index))
            if why is not None and name not in self._faulty:
                entry.verdict = f"not comparable: {why}"
        self._run.dynamo_graphs = [graph for _, graph in sorted(self._dynamo_graphs.items())]
        graphs = sorted(self._graphs.values(), key=lambda entry: (entry.index, DIRECTIONS.index(entry.direction)))
        self._run.graphs = graphs
        self._run.counters = dict(counters["dynamo_backends"])
        self._run.skipped = skipped_functions()
        return msgspec.json.format(msgspec.json.encode(self._run), indent=1).decode()


_manifests: dict[DumpFolder, Manifest] = {}
_manifests_lock = Lock()


def manifest_of(folder: DumpFolder) -> Manifest:
    """The manifest of a folder, which all compiled models of a process share."""
    with _manifests_lock:
        if folder not in _manifests:
            _manifests[folder] = Manifest(folder)
        return _manifests[folder]


@atexit.register
def flush_manifests() -> None:
    """Writes the changes that wait, of all manifests of this process."""
    for manifest in list(_manifests.values()):
        manifest.flush()


def _set_verdict(entry: schema.GraphEntry, comparison: GraphComparison) -> None:
    entry.verdict, entry.note, entry.sizes = comparison.verdict, comparison.note, comparison.sizes
    entry.blame = comparison.blame.entry if comparison.blame is not None else None
    entry.wrong_nodes = [row.wrong_node for row in comparison.wrong_nodes[:MOST_WRONG_NODES]]
    entry.worst = msgspec.convert(comparison.worst, schema.Error[schema.MeasureEntry] | None, from_attributes=True)
    entry.nonfinite, entry.unchecked = comparison.nonfinite, comparison.unchecked


def _in_utf8(value: T) -> T | str:
    """A text as UTF-8, which a path need not be; other values unchanged."""
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def _rounded(results: Sequence[PassResult]) -> list[PassResult]:
    return [dataclasses.replace(result, milliseconds=round(result.milliseconds, 3)) for result in results]


@functools.cache
def _versions() -> dict[str, str]:
    found = {"torch": str(torch.__version__)}  # with the build, such as +cpu, which some metadata lacks
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:  # transformers is optional; onnxruntime-gpu has another name
            continue
    return found
