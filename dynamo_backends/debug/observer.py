"""The observer of ``onnx_debug``: writes each stage to the dump folder, and compares runs with eager and float64.

What runs is what ``onnxrt`` runs: the same split graph and the same sessions. A compared run is interpreted node by
node, each region still one call, so that the values between regions can be kept.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from passes.engine.manager import PassResult

from ..errors import SessionError
from ..exporter.translate import serialize
from ..observer import GraphName, Observer, Runner
from ..options import Options
from ..pipeline import CompiledGraph, CompiledRegion, count
from ..regions import ORIGINAL
from ..runtime.binding import InputSpec, OutputSpec
from .compare import compare_run
from .dump_folder import DumpFolder, dump_folder, graph_folder
from .manifest import Cost, Manifest
from .pass_diffs import PassDiffs
from .record import Record, Run, make_record, snapshot
from .repeat import RepeatedRegion, repeat_region
from .replay import Replay
from .rows import OK, GraphComparison
from .tables import regions_text, side_by_side_json, side_by_side_text
from .tensors import write_tensor

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
        self._folder = dump_folder(options.dump_dir)
        self._manifest = _manifest_of(self._folder)
        self._replay = Replay(options.opset, options.providers, options.threads)
        self._lock = threading.Lock()

    def stage(self, name: str, graph: GraphName, artifact: object) -> None:
        self._folder.announce()
        if name in _FX_STAGES and isinstance(artifact, fx.GraphModule):
            self._folder.write_stage(name, graph, artifact)
        elif isinstance(artifact, CompiledRegion):
            self._write_region(name, artifact)

    explains = True

    def passes(self, graph: GraphName, results: Sequence[PassResult]) -> None:
        self._manifest.add_passes(graph, results)

    def pass_listener(self, graph: GraphName, region: int | None = None) -> PassDiffs:
        folder = graph_folder(graph) if region is None else f"{graph_folder(graph)}/region_{region}"
        return PassDiffs(self._folder, folder)

    def _write_region(self, stage: str, compiled: CompiledRegion) -> None:
        folder = _region_folder(compiled)
        if stage == "onnx":
            self._folder.write_bytes(f"{folder}/model.onnx", serialize(compiled.model))
        elif stage == "onnx_optimized" and compiled.bound is not None:
            self._folder.write_bytes(f"{folder}/model.optimized.onnx", compiled.bound.session.model)
        elif stage == "session" and compiled.bound is not None:
            session = compiled.bound.session

            def save(path: Path) -> None:
                try:
                    session.save_optimized(str(path))
                except SessionError as error:  # the session itself was made: what fails is the writing
                    raise OSError(f"ONNX Runtime cannot write its optimized model: {error}") from error

            self._folder.write_with(f"{folder}/model.session.onnx", save)

    def runner(self, graph: CompiledGraph) -> Runner:
        self._folder.write_text(f"{graph_folder(graph.name)}/regions.txt", regions_text(graph))
        self._manifest.add_graph(graph, self._options)
        record = make_record(graph) if self._records is not None else None
        if self._records is not None:
            self._records.append(record)
        watched = _WatchedGraph(graph, self, record)
        return watched.run

    def compare(
        self,
        graph: CompiledGraph,
        actual: dict[fx.Node, object],
        repeated: dict[int, RepeatedRegion],
        cost: Cost,
        *,
        write_data: bool,
    ) -> GraphComparison:
        """Compares one run, writes the tables, and says the verdict in the log and the manifest."""
        with self._lock, _disable_current_modes(), torch.no_grad(), torch.random.fork_rng(devices=[]):
            try:
                comparison = compare_run(graph, actual, self._replay, repeated)
            except Exception as error:  # a fault of the comparison must not end the user's run; the verdict says it
                logger.exception("%s: the comparison failed", graph.name)
                comparison = GraphComparison(f"not comparable: {type(error).__name__}: {error}")
            count("compared_runs")
            if write_data or not comparison.ok:
                for compiled in graph.regions:
                    self._write_test_data(compiled, actual)
            for compiled in graph.regions:
                folder = _region_folder(compiled)
                self._folder.write_text(f"{folder}/side_by_side.txt", side_by_side_text(comparison, compiled.region))
                self._folder.write_text(f"{folder}/side_by_side.json", side_by_side_json(comparison, compiled.region))
            self._manifest.add_comparison(graph.name, comparison, repeated, cost)
        level = logging.INFO if comparison.verdict == OK else logging.WARNING
        logger.log(
            level, "%s: %s%s", graph.name, comparison.verdict, f" ({comparison.note})" if comparison.note else ""
        )
        return comparison

    def count_run(self, graph: CompiledGraph) -> None:
        self._manifest.count_run(graph.name)

    @property
    def comparisons(self) -> str:
        """The option ``compare``."""
        return self._options.compare

    def _write_test_data(self, compiled: CompiledRegion, actual: dict[fx.Node, object]) -> None:
        """ONNX's test layout: what the model took and returned, in the order of its inputs and outputs."""
        folder = f"{_region_folder(compiled)}/test_data_set_0"
        assert compiled.bound is not None
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

    def __init__(self, graph: CompiledGraph, observer: DebugObserver, record: Record | None) -> None:
        self._graph = graph
        self._observer = observer
        self._record = record
        self._lock = threading.Lock()
        self._is_first = True

    def run(self, args: list[object]) -> object:
        with self._lock:
            is_first, self._is_first = self._is_first, False
        compares = self._observer.comparisons == "every" or (self._observer.comparisons == "first" and is_first)
        inputs = snapshot(args) if self._record is not None else []
        self._observer.count_run(self._graph)
        if compares:
            interpreter = _RecordingInterpreter(self._graph.assembled)
            outputs = interpreter.run(*args, enable_io_processing=False)
            args.clear()
            cost = measure_cost(self._graph, interpreter)
            comparison = self._observer.compare(
                self._graph, interpreter.values, interpreter.repeated, cost, write_data=is_first
            )
            if self._record is not None:
                self._record.comparison = comparison
        else:
            outputs = self._graph.run(args)
        if self._record is not None:
            self._record.runs.append(Run(inputs, snapshot(outputs)))
        return outputs


def measure_cost(graph: CompiledGraph, interpreter: _RecordingInterpreter) -> Cost:
    """What the run that was interpreted spent in regions and in PyTorch, and what went between them."""
    region_of = {node: region.region.index for region in graph.regions for node in region.region.nodes}
    tensors = size = 0
    for node, value in interpreter.values.items():
        if node.op in ("placeholder", "get_attr") or not isinstance(value, torch.Tensor):
            continue
        home = region_of.get(node)
        if any(user.op != "output" and region_of.get(user) != home for user in node.users):
            tensors += 1
            size += value.numel() * value.element_size()
    return Cost(interpreter.region_milliseconds, interpreter.pytorch_milliseconds, tensors, size)


class _RecordingInterpreter(fx.Interpreter):
    """Runs a split graph, each region a few times.

    Keeps the values of the nodes of the graph before the split, the time each side takes, and what came of the further
    runs: they come at once, before the graph writes into the region's inputs.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.values: dict[fx.Node, object] = {}
        self.repeated: dict[int, RepeatedRegion] = {}
        self.region_milliseconds: dict[int, float] = {}
        self.pytorch_milliseconds = 0.0

    def run_node(self, n: fx.Node) -> object:
        start = time.perf_counter()
        value = super().run_node(n)
        elapsed = (time.perf_counter() - start) * 1e3
        if isinstance(n.target, CompiledRegion):
            index = n.target.region.index
            self.region_milliseconds[index] = elapsed
            args, _ = self.fetch_args_kwargs_from_env(n)
            assert isinstance(value, (tuple, list))
            self.repeated[index] = repeat_region(n.target, args, value)
        else:
            self.pytorch_milliseconds += elapsed
        original = n.meta.get(ORIGINAL)
        if original is not None:
            self.values[original] = value
        return value


def _region_folder(compiled: CompiledRegion) -> str:
    return f"{graph_folder(compiled.graph)}/region_{compiled.region.index}"
