"""The observer of ``onnx_debug``: writes each stage to the dump folder, and compares runs with eager and float64.

What runs is what ``onnxrt`` runs: the same split graph and the same sessions. A compared run is interpreted node by
node, each region still one call, so that the values between regions can be kept.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Sequence

import onnx_ir as ir
import torch
from torch import fx
from torch._guards import CompileContext

from passes.engine.locks import Lock
from passes.engine.manager import Listener
from passes.engine.results import PassResult

from ..common.operator_watchers import unseen
from ..common.safety_net import caught, net
from ..dumps.blame import Kind
from ..dumps.cut_folder import repro_text
from ..dumps.schema import StageEntry
from ..errors import CompiledNodesError, SessionError, first_line
from ..events import count
from ..exporter.translate import serialize
from ..graphs.artifacts import CompiledGraph, CompiledRegion, GraphName, Runner
from ..options import Options
from ..partition.program import Loaded
from ..pipeline.observer import Observer
from ..pipeline.stage_logging import trace
from ..runtime.binding import InputSpec, OutputSpec
from ..runtime.kernel_faults import serialized
from ..runtime.memory_arena import ARENA
from .captured_graph import Call, Captured, JointGraphs
from .chosen_runs import Choice, ChosenRun, Sizes, SizesByName, Uncompared
from .comparison_tables import regions_text, side_by_side_json, side_by_side_text
from .dump_folder import DumpFolder, dump_folder, graph_folder
from .expected_values import reference_of
from .manifest import Manifest
from .node_sessions import Replay
from .pass_diffs import PassDiffs
from .record import Record, RecordObserver, Snapshots, make_record, recorded
from .recorded_run import WatchedRun, are_plain, watch
from .rows import Blame, Finding, GraphComparison
from .run_verdict import ComparedEntry, Judge, Judged
from .stage_comparison import StageGraphs
from .stage_files import StageFiles
from .tensor_files import write_tensor
from .undefined_results import without_undefined
from .verdict import conclude, with_precision
from .wrong_rewrite import ModelSteps

logger = logging.getLogger(__name__)

_MODELS = {"onnx": "model.onnx", "onnx_optimized": "model.optimized.onnx", "session": "model.session.onnx"}
"""The files of the stages that are models of a region."""

_FX_STAGES = ("dynamo", "pre_grad", "joint", "aten", "post_grad")


@functools.cache
def _manifest_of(folder: DumpFolder) -> Manifest:
    """The one manifest of a folder, which several compiled models of a process share."""
    return Manifest(folder)


class DebugObserver(Observer):
    """Dumps and compares everything one pipeline compiles.

    Args:
        options: ``dump_dir``, ``compare`` and ``tensor_limit`` are for it.
        records: a list that gets one ``Record`` for each compiled graph, or ``None``.
    """

    def __init__(self, options: Options, records: list[object] | None = None) -> None:
        self._options = options
        self._records = records
        self._snapshots = Snapshots()
        self.is_open = True
        self._folder = dump_folder(options.dump_dir)
        self._manifest = _manifest_of(self._folder)
        self._stage_files = StageFiles(self._folder)
        self._replay = Replay(options.opset, options.providers, options.threads)
        self._lock = Lock()
        self._captured: dict[int, Captured] = {}
        self._judges: dict[GraphName, Judge] = {}
        self._choices: dict[GraphName, Choice] = {}
        self._joints: collections.defaultdict[int, JointGraphs] = collections.defaultdict(JointGraphs)
        self._refused: collections.Counter[GraphName] = collections.Counter()
        self._compiles: dict[GraphName, CompileContext | None] = {}

    def close(self) -> None:
        """Stops watching: what it watched runs on, and what is compiled later is not seen. Writes the manifest."""
        self.is_open = False
        with self._lock:
            for judge in self._judges.values():
                judge.drop()
        self._manifest.flush()

    def stage(self, name: str, graph: GraphName, artifact: object) -> None:
        super().stage(name, graph, artifact)
        if not self.is_open:
            return
        self._folder.announce()
        if name in _FX_STAGES and isinstance(artifact, fx.GraphModule):
            self._manifest.add_stage(graph, self._stage_files.write(name, graph, artifact))
            self._keep_stage(name, graph, artifact)
        elif isinstance(artifact, CompiledRegion):
            self._write_region(name, artifact)

    explains = True

    def gave_up(self, graph: GraphName, why: str) -> None:
        if self.is_open:
            self._manifest.add_given_up(graph, why)

    def not_compiled(self, graph: GraphName, why: str) -> None:
        if self.is_open:
            self._manifest.add_not_compiled(graph, why)

    def failed(self, graph: GraphName, why: str) -> None:
        if self.is_open:
            self._manifest.add_failure(graph, why)

    def passes(self, graph: GraphName, results: Sequence[PassResult]) -> None:
        if self.is_open:
            self._manifest.add_passes(graph, results)

    def pass_listener(self, graph: GraphName, region: int | None = None) -> Listener | None:
        if not self.is_open:
            return None
        if region is None:
            return PassDiffs(self._folder, graph_folder(graph), lambda stage: self._stage_graphs(stage, graph))
        kept = ModelSteps(self._judges[graph].models.setdefault(region, [])) if self._compares else None
        return PassDiffs(self._folder, f"{graph_folder(graph)}/region_{region}", lambda stage: kept)

    @property
    def _compares(self) -> bool:
        return self._options.compare != "never"

    def _keep_stage(self, name: str, graph: GraphName, module: fx.GraphModule) -> None:
        """Keeps the graph of a stage for the comparison of runs."""
        if name == "dynamo" and self._compares:
            self._captured[graph.index] = Captured(self._options.opset)
            self._choices[graph] = Choice(Sizes(module), self._options.compare)
        if name == "aten":
            joints = self._joints
            joint = joints.pop(graph.index, None) if graph.direction == "inference" else joints.get(graph.index)
            self._judges[graph] = Judge(graph, self._captured.get(graph.index), module, joint)
        graphs = self._stage_graphs(name, graph)
        if graphs is not None:
            (graphs.start if name in ("dynamo", "aten") else graphs.end)(name, module)

    def _stage_graphs(self, stage: str, graph: GraphName) -> StageGraphs | None:
        """Where the graphs of a stage are kept; ``None`` where nothing is compared with them."""
        if not self._compares:
            return None
        if stage in ("aten", "post_grad"):
            return self._judges[graph].post_grad
        captured = self._captured.get(graph.index)
        if stage == "joint":
            return captured.joint if captured is not None else self._joints[graph.index]
        return captured.pre_grad if captured is not None else None

    def entry(self, graph: GraphName, compiled: Callable[..., object]) -> Callable[..., object]:
        captured = self._captured.get(graph.index)
        if captured is None or not self.is_open:
            return compiled
        return ComparedEntry(
            compiled,
            captured,
            self._choices[GraphName(graph.index)],
            is_open=lambda: self.is_open,
            failed=functools.partial(self.comparison_failed, graph),
        )

    def refused(self, graph: GraphName, region: int, model: ir.Model, error: SessionError) -> None:
        if not self.is_open:
            return
        self._refused[graph] += 1
        file = f"{graph_folder(graph)}/refused/{self._refused[graph]:03d}_region_{region}"
        self._folder.write_bytes(f"{file}.onnx", serialize(model))
        self._folder.write_text(f"{file}.txt", f"{error}\n")

    def _write_region(self, stage: str, compiled: CompiledRegion) -> None:
        folder = _region_folder(compiled)
        same_as, file, nodes = None, f"{folder}/{_MODELS.get(stage, '')}", 0
        if stage == "onnx":
            self._folder.write_bytes(file, serialize(compiled.model))
            nodes = len(compiled.model.graph)
        elif stage == "onnx_optimized":
            content = serialized(compiled.optimized_model)
            nodes = len(compiled.optimized_model.graph)
            if content == serialize(compiled.model):
                same_as = "onnx"
                self._folder.remove(file)  # what is compiled twice may have one of the first time
            else:
                self._folder.write_bytes(file, content)
            settings = {"session": compiled.executable.settings.as_json(), "constants": compiled.executable.constants}
            repro = repro_text({"model": _MODELS[same_as or stage], **settings})
            self._folder.write_text(f"{folder}/repro.py", repro)
        elif stage == "session":
            try:
                model, _ = compiled.bound.session.optimized()
                self._folder.write_bytes(file, serialize(model))
                nodes = len(model.graph)
            except CompiledNodesError:  # a provider made something of it that is no ONNX model
                same_as, nodes = "onnx_optimized", len(compiled.optimized_model.graph)
                self._folder.remove(file)  # see above
        else:
            return
        entry = StageEntry(stage, nodes, None if same_as else file, same_as)
        self._manifest.add_region_stage(compiled, entry)

    def runner(self, graph: CompiledGraph, loaded: Loaded) -> Runner:
        if not self.is_open:
            return loaded.run if self._records is None else RecordObserver(self._records).runner(graph, loaded)
        self._folder.write_text(f"{graph_folder(graph.name)}/regions.txt", regions_text(graph))
        has_captured = self._judges[graph.name].captured is not None
        self._compiles[graph.name] = CompileContext.try_get()
        self._manifest.add_graph(
            graph, self._options, reference=f"{'Dynamo' if has_captured else 'AOTAutograd'}'s graph"
        )
        sizes = Sizes(graph.module)
        if has_captured:
            choice = self._choices[GraphName(graph.name.index)]
        else:
            choice = self._choices[graph.name] = Choice(sizes, self._options.compare)
        record = make_record(graph) if self._records is not None else None
        watched = _WatchedGraph(graph, loaded, self, self._judges[graph.name], choice, Uncompared(sizes), record)
        if self._records is None or record is None:
            return watched.run
        self._records.append(record)
        return recorded(watched.run, record, self._snapshots)

    def compare(self, graph: CompiledGraph, run: WatchedRun, call: Call | None) -> Judged:
        """Compares one run of a graph, before anything writes into its arguments.

        What a graph's folder has of a run is of one run: the first that is wrong, else the last that was compared.
        """
        with self._lock, unseen(), torch.no_grad():
            judged = self._judges[graph.name].judge(graph, run, call, self._replay)
            count("compared_runs")
            if not self._manifest.has_fault(graph.name):
                for compiled in graph.regions:
                    self._write_test_data(compiled, run.values)
                self._write_culprit(graph, run, judged[0].blame)
        return judged

    def _write_culprit(self, graph: CompiledGraph, run: WatchedRun, blame: Blame | None) -> None:
        """What PyTorch computes at a node that is wrong by itself: without PyTorch nothing else tells what is right."""
        if blame is None or blame.region is None or blame.cause.kind != Kind.NODE:
            return
        compiled = graph.regions[blame.region]
        try:
            reference = reference_of(compiled, blame.value, run.values, self._replay)
        except SessionError as error:
            logger.info("no reference of %s is dumped: %s", blame.value, error)
            return
        except Exception as error:
            caught(f"the reference of {blame.value}, which is dumped,", error, "The graph runs")
            return
        for kind, values in reference.items():
            for i, (name, value) in enumerate(values.items()):
                path = f"{_region_folder(compiled)}/culprit/{kind}_{i}"
                write_tensor(self._folder, path, value, name, self._options.tensor_limit)

    def conclude(
        self, graph: CompiledGraph, run: WatchedRun, judged: Judged, finding: Finding, sizes: SizesByName
    ) -> GraphComparison:
        """Writes the tables of a compared run, and says the verdict in the log and the manifest.

        ``finding`` is what the captured graph says of the results.
        """
        comparison, findings = judged
        comparison = conclude(comparison, [finding, *findings], sizes)
        with net("whether PyTorch leaves a value undefined", "The graph runs"):
            comparison = without_undefined(comparison, graph.module, run.values)
        comparison = with_precision(comparison, self._options.providers)
        count("unchecked_values", len(comparison.unchecked))
        with self._lock:
            table = f"{graph_folder(graph.name)}/side_by_side"
            text = side_by_side_text(comparison)
            if not self._manifest.has_fault(graph.name):
                self._folder.write_text(f"{table}.txt", text)
                self._folder.write_text(f"{table}.json", side_by_side_json(comparison))
            trace(graph.name, "side_by_side", lambda: text, self._compiles[graph.name])
            self._manifest.add_comparison(graph.name, comparison, run.repeated, run.cost)
        for judge in self._finished(graph.name):
            judge.drop()
        level = logging.INFO if comparison.ok and not comparison.unchecked else logging.WARNING
        note = f" ({comparison.note})" if comparison.note else ""
        logger.log(level, "%s: %s%s", graph.name, comparison.verdict, note)
        return comparison

    def _finished(self, name: GraphName) -> list[Judge]:
        """The judges that no run is left for, after a compared run of a graph. That of a forward is needed until a
        backward was compared."""
        judge = self._judges[name]
        if name.direction == "forward" and judge.awaits_backward:
            return []
        forward = dataclasses.replace(name, direction="forward")
        names = [name, forward] if name.direction == "backward" and forward in self._judges else [name]
        choices = [self._choices[GraphName(name.index) if judge.captured is not None else item] for item in names]
        return [self._judges[item] for item in names] if all(choice.is_done for choice in choices) else []

    def comparison_failed(self, graph: GraphName, error: Exception) -> None:
        """An exception of ours while a call was watched or compared: it is told of, and the verdict says it."""
        caught(f"the comparison of {graph}", error, "The graph runs")
        with net("the manifest", "The graph runs"):
            self.failed(graph, f"the comparison failed: {type(error).__name__}: {first_line(str(error))}")

    def count_run(self, graph: CompiledGraph, *, at_other_sizes: bool) -> None:
        self._manifest.count_run(graph.name, at_other_sizes=at_other_sizes)

    def _write_test_data(self, compiled: CompiledRegion, actual: dict[fx.Node, object]) -> None:
        """ONNX's test layout: what the model took and returned, in the order of its inputs and outputs."""

        def write(kind: str, specs: Sequence[InputSpec | OutputSpec], nodes: Sequence[fx.Node]) -> None:
            for i, (spec, node) in enumerate(zip(specs, nodes, strict=True)):
                value = actual[node]
                tensor = value if isinstance(value, torch.Tensor) else torch.tensor(value)
                if spec.permutation is not None:
                    tensor = tensor.permute(spec.permutation)
                path = f"{_region_folder(compiled)}/test_data_set_0/{kind}_{i}"
                write_tensor(self._folder, path, tensor, spec.name, self._options.tensor_limit)

        write("input", compiled.bound.inputs, [item.node for item in compiled.region.inputs])
        write("output", compiled.bound.outputs, [item.node for item in compiled.region.outputs])


@dataclasses.dataclass(frozen=True, eq=False)
class _WatchedGraph:
    """Calls a compiled graph, and compares the runs that ``choice`` names: of calls of the captured graph, if there is
    one. A record gets the comparison."""

    graph: CompiledGraph
    loaded: Loaded
    observer: DebugObserver
    judge: Judge
    choice: Choice
    uncompared: Uncompared
    record: Record | None

    def run(self, args: list[object]) -> object:
        call: Call | None = None
        chosen: ChosenRun | None = None
        with self._guarded(None):
            if self.observer.is_open and are_plain(args):
                call, chosen = self._chosen(args)
        is_compared = call is not None or chosen is not None
        return self._compared(args, call, chosen) if is_compared else self.loaded.run(args)

    def _chosen(self, args: Sequence[object]) -> tuple[Call | None, ChosenRun | None]:
        """The compared call of the captured graph that a run belongs to; the run, where there is no captured graph."""
        call = self.judge.call_of(args)
        chosen = self.choice.begin(args) if self.judge.captured is None else None
        try:
            is_compared = call is not None or chosen is not None
            at_other_sizes = self.uncompared.ran(args, compared=is_compared)
            self.observer.count_run(self.graph, at_other_sizes=at_other_sizes)
        except Exception:
            self._fail(chosen)
            raise
        return call, chosen

    def _fail(self, chosen: ChosenRun | None) -> None:
        """A run that was to be compared was not."""
        if chosen is not None:
            self.choice.fail(chosen)

    @contextlib.contextmanager
    def _guarded(self, chosen: ChosenRun | None) -> Iterator[None]:
        """An exception inside does not end the user's call."""
        try:
            yield
        except Exception as error:
            self._fail(chosen)
            self.observer.comparison_failed(self.graph.name, error)

    def _compared(self, args: list[object], call: Call | None, chosen: ChosenRun | None) -> Sequence[object]:
        """A compared run. What PyTorch raises in it is the user's."""
        try:
            run = watch(self.graph, self.loaded, args)
        except BaseException:
            self._fail(chosen)
            raise
        judged: Judged | None = None
        with self._guarded(chosen):
            if run.failure is not None:
                raise run.failure
            ARENA.shrink()  # the comparison needs memory of its own
            judged = self.observer.compare(self.graph, run, call)
        if judged is None:
            return run.results
        finish = functools.partial(self._finish, run, judged, call, chosen)
        if call is not None and self.graph.name.direction != "backward":
            call.finish = finish  # the results and the arguments are judged when the call has returned
            return run.results
        with self._guarded(None):
            if call is not None and call.chosen is not None:
                self.choice.backward_came(call.chosen)
            if chosen is not None:
                self.choice.end(chosen, awaits_backward=False)
            finish(Finding())
        return run.results

    def _finish(
        self, run: WatchedRun, judged: Judged, call: Call | None, chosen: ChosenRun | None, finding: Finding
    ) -> None:
        """Makes the verdict on a run, when the captured graph has said what it finds in the results."""
        of_run = chosen or (call.chosen if call is not None else None)
        sizes = of_run.sizes if of_run is not None else {}
        comparison = self.observer.conclude(self.graph, run, judged, finding, sizes)
        if call is not None and not comparison.ok:
            call.fault = comparison.verdict
        if self.record is not None and (self.record.comparison is None or self.record.comparison.ok):
            self.record.comparison = comparison


def _region_folder(compiled: CompiledRegion) -> str:
    return f"{graph_folder(compiled.graph)}/region_{compiled.region.index}"
