"""The observer of ``onnx_debug``: writes each stage to the dump folder, and compares runs with eager and float64.

What runs is what ``onnxrt`` runs: the same split graph and the same sessions. A compared run is interpreted node by
node, each region still one call, so that the values between regions can be kept.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import onnx_ir as ir
import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from passes.engine.locks import Lock
from passes.engine.manager import Listener, PassResult

from ..artifacts import CompiledGraph, CompiledRegion, GraphName, Runner
from ..errors import SessionError
from ..events import count
from ..exporter.translate import serialize
from ..observer import Observer
from ..options import Options
from ..runtime.arena import ARENA
from ..runtime.binding import InputSpec, OutputSpec
from ..runtime.kernels import serialized
from .captured import Call, Captured, Finding, JointGraphs
from .dump_folder import DumpFolder, dump_folder, graph_folder
from .judge import ComparedEntry, Judge, Judged, KeptGraphs, Listeners, ModelGraphs
from .manifest import Manifest
from .pass_diffs import PassDiffs
from .record import Record, Run, Snapshots, make_record
from .replay import Replay
from .rows import OK, GraphComparison
from .stages import StageGraphs
from .tables import regions_text, side_by_side_json, side_by_side_text
from .tensors import write_tensor
from .verdict import conclude
from .watched import WatchedRun, are_plain, watch

logger = logging.getLogger(__name__)

_FX_STAGES = ("dynamo", "pre_grad", "joint", "aten", "post_grad")

_manifests: weakref.WeakKeyDictionary[DumpFolder, Manifest] = weakref.WeakKeyDictionary()


def _manifest_of(folder: DumpFolder) -> Manifest:
    """The one manifest of a folder, which several compiled models of a process share."""
    return _manifests.setdefault(folder, Manifest(folder))


class DebugObserver(Observer):
    """Dumps and compares everything one pipeline compiles.

    Args:
        options: ``dump_dir``, ``compare`` and ``tensor_limit`` are for it.
        records: a list that gets one ``Record`` for each compiled graph, or ``None``.
    """

    def __init__(self, options: Options, records: list[object] | None = None) -> None:
        self._options = options
        self._records = records
        self.snapshots = Snapshots()
        self._folder = dump_folder(options.dump_dir)
        self._manifest = _manifest_of(self._folder)
        self._replay = Replay(options.opset, options.providers, options.threads)
        self._lock = Lock()
        self._captured: dict[int, Captured] = {}
        self._judges: dict[GraphName, Judge] = {}
        self._joints: collections.defaultdict[int, JointGraphs] = collections.defaultdict(JointGraphs)
        self._refused: collections.Counter[GraphName] = collections.Counter()

    def stage(self, name: str, graph: GraphName, artifact: object) -> None:
        self._folder.announce()
        if name in _FX_STAGES and isinstance(artifact, fx.GraphModule):
            self._folder.write_stage(name, graph, artifact)
            self._keep_stage(name, graph, artifact)
        elif isinstance(artifact, CompiledRegion):
            self._write_region(name, artifact)

    explains = True

    def passes(self, graph: GraphName, results: Sequence[PassResult]) -> None:
        self._manifest.add_passes(graph, results)

    def pass_listener(self, graph: GraphName, region: int | None = None) -> Listener:
        if region is not None:
            diffs = PassDiffs(self._folder, f"{graph_folder(graph)}/region_{region}")
            return Listeners([diffs, *([ModelGraphs(self._judges[graph].models, region)] if self._compares else [])])
        kept = [KeptGraphs(lambda stage: self._stage_graphs(stage, graph))] if self._compares else []
        return Listeners([PassDiffs(self._folder, graph_folder(graph)), *kept])

    @property
    def _compares(self) -> bool:
        return self._options.compare != "never"

    def _keep_stage(self, name: str, graph: GraphName, module: fx.GraphModule) -> None:
        """Keeps the graph of a stage for the comparison of runs."""
        if name == "dynamo" and self._compares:
            self._captured[graph.index] = Captured(self._options.opset)
        if name == "aten":
            joint = (
                self._joints.pop(graph.index, None) if graph.direction == "inference" else self._joints.get(graph.index)
            )
            self._judges[graph] = Judge(graph, self._captured.get(graph.index), module, joint)
        graphs = self._stage_graphs(name, graph) if self._compares else None
        if graphs is not None:
            (graphs.start if name in ("dynamo", "aten") else graphs.end)(name, module)

    def _stage_graphs(self, stage: str, graph: GraphName) -> StageGraphs | None:
        """Where the graphs of a stage are kept; ``None`` where nothing is compared with them."""
        if stage in ("aten", "post_grad"):
            return self._judges[graph].post_grad
        captured = self._captured.get(graph.index)
        if stage == "joint":
            return captured.joint if captured is not None else self._joints[graph.index]
        return captured.pre_grad if captured is not None else None

    def entry(self, graph: GraphName, compiled: Callable[..., object]) -> Callable[..., object]:
        captured = self._captured.get(graph.index)
        if captured is None:
            return compiled
        return ComparedEntry(compiled, captured, every=self._options.compare == "every")

    def refused(self, graph: GraphName, region: int, model: ir.Model, error: SessionError) -> None:
        self._refused[graph] += 1
        file = f"{graph_folder(graph)}/refused/{self._refused[graph]:03d}_region_{region}"
        self._folder.write_bytes(f"{file}.onnx", serialize(model))
        self._folder.write_text(f"{file}.txt", f"{error}\n")

    def _write_region(self, stage: str, compiled: CompiledRegion) -> None:
        folder = _region_folder(compiled)
        if stage == "onnx":
            self._folder.write_bytes(f"{folder}/model.onnx", serialize(compiled.model))
        elif stage == "onnx_optimized":
            content = serialized(compiled.optimized_model, compiled.executable.settings.providers)
            self._folder.write_bytes(f"{folder}/model.optimized.onnx", content)
        elif stage == "session":
            session = compiled.bound.session

            def save(path: Path) -> None:
                try:
                    model, _ = session.optimized()
                except SessionError as error:  # the session itself was made: what fails is the writing
                    raise OSError(f"ONNX Runtime cannot write its optimized model: {error}") from error
                path.write_bytes(serialize(model))

            self._folder.write_with(f"{folder}/model.session.onnx", save)

    def runner(self, graph: CompiledGraph) -> Runner:
        self._folder.write_text(f"{graph_folder(graph.name)}/regions.txt", regions_text(graph))
        has_captured = self._judges[graph.name].captured is not None
        self._manifest.add_graph(
            graph, self._options, reference=f"{'Dynamo' if has_captured else 'AOTAutograd'}'s graph"
        )
        record = make_record(graph) if self._records is not None else None
        if self._records is not None:
            self._records.append(record)
        watched = _WatchedGraph(graph, self, self._judges[graph.name], record)
        return watched.run

    def compare(self, graph: CompiledGraph, run: WatchedRun, call: Call | None, *, write_data: bool) -> Judged:
        """Compares one run of a graph, before anything writes into its arguments."""
        with self._lock, _disable_current_modes(), torch.no_grad():
            judged = self._judges[graph.name].judge(graph, run, call, self._replay)
            count("compared_runs")
            if write_data or not judged.comparison.ok:
                for compiled in graph.regions:
                    self._write_test_data(compiled, run.values)
        return judged

    def conclude(self, graph: CompiledGraph, run: WatchedRun, judged: Judged, finding: Finding) -> GraphComparison:
        """Writes the tables of a compared run, and says the verdict in the log and the manifest.

        Args:
            graph: the graph.
            run: the run.
            judged: what was found in the graph and its stages.
            finding: what the captured graph says of the results.
        """
        comparison = conclude(judged.comparison, [finding, *judged.findings])
        count("unchecked_values", len(comparison.unchecked))
        with self._lock:
            for compiled in graph.regions:
                folder = _region_folder(compiled)
                self._folder.write_text(f"{folder}/side_by_side.txt", side_by_side_text(comparison, compiled.region))
                self._folder.write_text(f"{folder}/side_by_side.json", side_by_side_json(comparison, compiled.region))
            self._manifest.add_comparison(graph.name, comparison, run.repeated, run.cost)
        if self._options.compare == "first":
            for judge in self._finished(graph.name):
                judge.drop()
        level = logging.INFO if comparison.verdict == OK and not comparison.unchecked else logging.WARNING
        logger.log(
            level, "%s: %s%s", graph.name, comparison.verdict, f" ({comparison.note})" if comparison.note else ""
        )
        return comparison

    def _finished(self, name: GraphName) -> list[Judge]:
        """The judges that no run is left for, after a compared run of a graph.

        A forward with a captured graph may be compared again, until one of its backwards was.
        """
        judge = self._judges[name]
        if name.direction == "forward" and judge.captured is not None:
            return []
        forward = self._judges.get(dataclasses.replace(name, direction="forward"))
        return [judge] if forward is None else [judge, forward]

    def count_run(self, graph: CompiledGraph) -> None:
        self._manifest.count_run(graph.name)

    @property
    def comparisons(self) -> str:
        """The option ``compare``."""
        return self._options.compare

    def _write_test_data(self, compiled: CompiledRegion, actual: dict[fx.Node, object]) -> None:
        """ONNX's test layout: what the model took and returned, in the order of its inputs and outputs."""
        folder = f"{_region_folder(compiled)}/test_data_set_0"
        region = compiled.region
        specs: dict[str, Sequence[InputSpec | OutputSpec]] = {
            "input": compiled.bound.inputs,
            "output": compiled.bound.outputs,
        }
        nodes = {"input": [item.node for item in region.inputs], "output": [item.node for item in region.outputs]}
        for kind in ("input", "output"):
            for i, (spec, node) in enumerate(zip(specs[kind], nodes[kind], strict=True)):
                value = actual[node]
                tensor = value if isinstance(value, torch.Tensor) else torch.tensor(value)
                if spec.permutation is not None:
                    tensor = tensor.permute(spec.permutation)
                write_tensor(self._folder, f"{folder}/{kind}_{i}", tensor, spec.name, self._options.tensor_limit)


class _WatchedGraph:
    """Calls a compiled graph, and compares the runs that the option ``compare`` asks for."""

    def __init__(self, graph: CompiledGraph, observer: DebugObserver, judge: Judge, record: Record | None) -> None:
        self._graph = graph
        self._observer = observer
        self._judge = judge
        self._record = record
        self._run = graph.run
        self._lock = Lock()
        self._is_first = True
        self._has_compared = False

    def run(self, args: list[object]) -> object:
        if not are_plain(args):
            return self._run(args)
        call = self._judge.call_of(args)
        compares = call is not None if self._judge.captured is not None else self._is_asked_for()
        inputs = self._observer.snapshots.of(args) if self._record is not None else []
        self._observer.count_run(self._graph)
        outputs = self._compared(args, call) if compares else self._run(args)
        if self._record is not None:
            self._record.runs.append(Run(inputs, self._observer.snapshots.of(outputs)))
        return outputs

    def _is_asked_for(self) -> bool:
        """Whether the option wants this run of a graph that has no captured graph beside it."""
        with self._lock:
            is_first, self._is_first = self._is_first, False
        return self._observer.comparisons == "every" or (self._observer.comparisons == "first" and is_first)

    def _compared(self, args: list[object], call: Call | None) -> object:
        run = watch(self._graph, args)
        ARENA.shrink()  # the comparison needs memory of its own
        judged = self._observer.compare(self._graph, run, call, write_data=self._first_compared())

        def finish(finding: Finding) -> None:
            comparison = self._observer.conclude(self._graph, run, judged, finding)
            if call is not None and not comparison.ok:
                call.fault = comparison.verdict
            if self._record is not None:
                self._record.comparison = comparison

        if call is not None and self._graph.name.direction != "backward":
            call.finish = finish  # the results and the arguments are judged when the call has returned
        else:
            finish(Finding())
        return run.results

    def _first_compared(self) -> bool:
        with self._lock:
            is_first, self._has_compared = not self._has_compared, True
        return is_first


def _region_folder(compiled: CompiledRegion) -> str:
    return f"{graph_folder(compiled.graph)}/region_{compiled.region.index}"
