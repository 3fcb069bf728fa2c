"""The observer of ``onnx_debug``: dumps each stage, and compares runs with eager and float64.

The runs use the split graph and the sessions that ``onnxrt`` uses. A compared run is interpreted node by node, each
region as one call, so that the values between regions can be recorded.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
from collections.abc import Callable, Iterable, Sequence

import onnx_ir as ir
import torch
from torch import fx
from torch._guards import CompileContext

from passes.engine.manager import Listener
from passes.engine.results import PassResult

from ..common.fork_safety import Lock
from ..common.operator_watchers import watchers_disabled
from ..common.safety_net import caught, net
from ..dumps.cut_folder import repro_text
from ..dumps.schema import StageEntry
from ..errors import CompiledNodesError, SessionError
from ..events import count, is_new
from ..exporter.translate import serialize
from ..graphs.artifacts import GraphName, Runner
from ..graphs.locations import user_name
from ..options import Options
from ..partition.program import LoadedProgram
from ..pipeline.observer import Observer
from ..pipeline.stage_data import CompiledGraph, CompiledRegion
from ..pipeline.stage_logging import trace
from ..runtime.binding import InputSpec, OutputSpec
from ..runtime.kernel_faults import serialized
from ..runtime.memory_arena import ARENA
from .captured_graph import BACKWARD, COMPARING, CapturedGraph, Interpretation, doing
from .chosen_runs import RunSelector, SelectedRun, SizesByName
from .comparison_tables import side_by_side_json, side_by_side_text
from .dump_folder import dump_folder, graph_folder
from .manifest import manifest_of
from .node_sessions import NodeSessions
from .optimized_models import optimized_model
from .record import Record, RecordObserver
from .recorded_run import RecordedRun, can_be_compared, record_run
from .rows import ExpectedValues, Finding, GraphComparison, exception_text
from .run_comparison import ComparedEntry, Judge, JudgedRun, RecordedForwards
from .stage_files import PassDiffs, StageFiles
from .stage_graphs import StageGraphs
from .tensor_files import write_tensor
from .verdict import conclude, with_precision
from .wrong_rewrite import ModelSteps

logger = logging.getLogger(__name__)

_HALF = (torch.float16, torch.bfloat16)

_ELSEWHERE = "onnxrt may find PyTorch faster and run it there, see placement"
"""Said of a graph that was compared on ONNX Runtime."""

_MODELS = {"onnx": "model.onnx", "onnx_optimized": "model.optimized.onnx", "session": "model.session.onnx"}
"""The file of each stage that is a model of a region."""


@dataclasses.dataclass(eq=False)
class _GraphState:
    """What is kept of one of Dynamo's graphs, or of its forward, backward or inference graph.

    Attributes:
        captured, selector: of Dynamo's graph; the selector selects its calls.
        joint: the graphs of this stage if there is no captured graph.
        rejected: how many models ONNX Runtime rejected.
        compile: in which it was compiled, for PyTorch's structured log.
        record: for the user.
    """

    captured: CapturedGraph | None = None
    selector: RunSelector | None = None
    joint: StageGraphs = dataclasses.field(default_factory=StageGraphs)
    judge: Judge | None = None
    rejected: int = 0
    compile: CompileContext | None = None
    record: Record | None = None


class DebugObserver(Observer):
    """Dumps and compares everything that one pipeline compiles.

    Args:
        options: it uses ``dump_dir``, ``compare`` and ``tensor_limit``.
        records: a list that gets one ``Record`` for each compiled graph, or ``None``.
    """

    explains = True

    def __init__(self, options: Options, records: list[object] | None = None) -> None:
        self._options = options
        self._recorder = RecordObserver(records) if records is not None else None
        self.is_open = True
        self._folder = dump_folder(options.dump_dir)
        self._manifest = manifest_of(self._folder)
        self._stage_files = StageFiles(self._folder)
        self._sessions = NodeSessions(options.opset, options.providers, options.threads)
        self._lock = Lock()
        self._graphs: collections.defaultdict[GraphName, _GraphState] = collections.defaultdict(_GraphState)

    def close(self) -> Observer:
        """Stops observing: compiled graphs run on without comparisons. Writes the manifest."""
        self.is_open = False
        with self._lock:
            for state in self._graphs.values():
                if state.judge is not None:
                    state.judge.drop()
        self._manifest.flush()
        return Observer() if self._recorder is None else self._recorder

    def stage(self, name: str, graph: GraphName, artifact: object) -> None:
        super().stage(name, graph, artifact)
        self._folder.announce()
        if isinstance(artifact, fx.GraphModule):
            self._manifest.add_stage(graph, self._stage_files.write(name, graph, artifact))
            self._keep_stage(name, graph, artifact)
        elif isinstance(artifact, CompiledRegion):
            self._write_region(name, artifact)

    def gave_up(self, graph: GraphName, why: str) -> None:
        self._manifest.add_given_up(graph, why)

    def not_compiled(self, graph: GraphName, why: str) -> None:
        self._manifest.add_not_compiled(graph, why)

    def failed(self, graph: GraphName, why: str) -> None:
        self._manifest.add_failure(graph, why)

    def passes(self, graph: GraphName, results: Sequence[PassResult]) -> None:
        self._manifest.add_passes(graph, results)

    def pass_listener(self, graph: GraphName, region: int | None = None) -> Listener | None:
        if region is None:
            return PassDiffs(self._folder, graph_folder(graph), lambda stage: self._stage_graphs(stage, graph))
        steps = ModelSteps(self._judge_of(graph).models.setdefault(region, [])) if self._compares else None
        return PassDiffs(self._folder, f"{graph_folder(graph)}/region_{region}", lambda stage: steps)

    @property
    def _compares(self) -> bool:
        return self._options.compare != "never"

    def _keep_stage(self, name: str, graph: GraphName, module: fx.GraphModule) -> None:
        """Keeps the graph of a stage for comparisons."""
        of_dynamo = self._graphs[GraphName(graph.index)]
        if name == "dynamo" and self._compares:
            of_dynamo.captured = CapturedGraph(self._options.opset)
            of_dynamo.selector = RunSelector(module, self._options.compare)
        if name == "aten":
            self._graphs[graph].judge = Judge(graph, of_dynamo.captured, of_dynamo.joint)
            if graph.direction == "inference":
                of_dynamo.joint = StageGraphs()
        graphs = self._stage_graphs(name, graph)
        if graphs is not None:
            (graphs.start if name in ("dynamo", "aten") else graphs.end)(name, module)

    def _stage_graphs(self, stage: str, graph: GraphName) -> StageGraphs | None:
        """The object that keeps the graphs of a stage; ``None`` if they are not compared."""
        if not self._compares:
            return None
        if stage in ("aten", "post_grad"):
            return self._judge_of(graph).post_grad
        of_dynamo = self._graphs[GraphName(graph.index)]
        captured = of_dynamo.captured
        if stage == "joint":
            return captured.joint if captured is not None else of_dynamo.joint
        return captured.pre_grad if captured is not None else None

    def entry(self, graph: GraphName, compiled: Callable[..., object]) -> Callable[..., object]:
        state = self._graphs[GraphName(graph.index)]
        if state.captured is None or state.selector is None:
            return compiled
        return ComparedEntry(graph, compiled, state.captured, state.selector, self)

    def rejected(self, graph: GraphName, region: int, model: ir.Model, error: SessionError) -> None:
        self._graphs[graph].rejected += 1
        file = f"{graph_folder(graph)}/rejected/{self._graphs[graph].rejected:03d}_region_{region}"
        self._folder.write_bytes(f"{file}.onnx", serialize(model))
        self._folder.write_text(f"{file}.txt", f"{error}\n")

    def _write_region(self, stage: str, compiled: CompiledRegion) -> None:
        folder = _region_folder(compiled)
        file = f"{folder}/{_MODELS[stage]}"
        same_as: str | None = None
        content = b""
        if stage == "onnx":
            nodes, content = len(compiled.model.graph), serialize(compiled.model)
        elif stage == "onnx_optimized":
            nodes, content = len(compiled.optimized_model.graph), serialized(compiled.optimized_model)
            same_as = "onnx" if content == serialize(compiled.model) else None
            session, model_file = compiled.executable.settings.as_json(), _MODELS[same_as or stage]
            constants = compiled.executable.constants
            settings = {"model": model_file, "session": session, "constants": constants, "is_region": True}
            self._folder.write_text(f"{folder}/repro.py", repro_text(settings))
        else:
            try:
                model, _ = optimized_model(compiled.bound)
                nodes, content = len(model.graph), serialize(model)
            except CompiledNodesError:  # a provider compiled it to something that is not an ONNX model
                nodes, same_as = len(compiled.optimized_model.graph), "onnx_optimized"
        if same_as is None:
            self._folder.write_bytes(file, content)
        else:
            self._folder.remove(file)  # a graph that is compiled twice may have one of the first time
        entry = StageEntry(stage, nodes, None if same_as else file, same_as)
        self._manifest.add_stage(compiled.graph, entry, compiled.region.index)

    def runner(self, graph: CompiledGraph, loaded: LoadedProgram) -> Runner:
        state, judge = self._graphs[graph.name], self._judge_of(graph.name)
        state.compile = CompileContext.try_get()
        reference = "AOTAutograd's graph" if judge.captured is None else "Dynamo's graph"
        self._manifest.add_graph(graph, self._options, reference=reference)
        if judge.captured is not None and graph.name.direction == BACKWARD:
            self._tell_gradients(graph.name, judge.captured)  # a dynamic backward may be compiled twice
        selector = RunSelector(graph.module, self._options.compare)
        compared = _ComparedGraph(graph, loaded, self, judge, selector)
        if self._recorder is None:
            return compared.run
        state.record = self._recorder.add(graph)
        return self._recorder.recorded(compared.run, state.record)

    def _judge_of(self, graph: GraphName) -> Judge:
        judge = self._graphs[graph].judge
        assert judge is not None, f"{graph} has no stage aten"
        return judge

    def judge(self, graph: CompiledGraph, run: RecordedRun) -> JudgedRun:
        """Judges one run of a graph; must be called before anything writes into its arguments.

        Dumps its values unless an earlier run was wrong, so that a graph's folder shows one run.
        """
        with self._lock, watchers_disabled(), torch.no_grad():
            judged = self._judge_of(graph.name).judge(graph, run, self._sessions)
            count("compared_runs")
            if not self._manifest.has_fault(graph.name):
                for compiled in graph.regions:
                    self._write_test_data(compiled, run.values)
                self._write_arguments(graph, run.values)
                if judged.comparison.expected is not None:
                    self._write_culprit(graph.name, judged.comparison.expected)
        return judged

    def _write_arguments(self, graph: CompiledGraph, actual: dict[fx.Node, object]) -> None:
        """Writes the arguments of a graph in half precision; ``precision`` runs it again."""
        if not any(isinstance(value, torch.Tensor) and value.dtype in _HALF for value in actual.values()):
            return
        weights = _weights_of(actual)
        for i, node in enumerate(graph.module.graph.find_nodes(op="placeholder")):
            value = actual[node]
            tensor = value if isinstance(value, torch.Tensor) else torch.tensor(value)
            path, name = f"{graph_folder(graph.name)}/arguments/input_{i}", user_name(node, static_only=True)
            limit = self._options.tensor_limit
            write_tensor(self._folder, path, tensor, name or node.name, limit, always=node in weights)

    def _write_culprit(self, graph: GraphName, expected: ExpectedValues) -> None:
        """Writes the expected results of a node that is wrong alone; ``bisect`` needs them, without PyTorch."""
        folder = f"{graph_folder(graph)}/region_{expected.region}/culprit"
        for kind in ("input", "eager", "exact"):
            for i, (name, value) in enumerate(getattr(expected, kind).items()):
                path = f"{folder}/{kind}_{i}"
                write_tensor(self._folder, path, value, name, self._options.tensor_limit, always=True)

    def add_gradients(self, graph: GraphName, finding: Finding) -> bool:
        """The stages of a call were compared: what was found about its gradients, whose backward may never run.

        Returns whether the backward has a verdict of its own.
        """
        name, captured = GraphName(graph.index, BACKWARD), self._graphs[GraphName(graph.index)].captured
        if captured is None or not self._manifest.has_graph(name):
            return False
        if finding.culprit is not None or finding.unchecked:
            captured.gradients.append(finding)
            self._tell_gradients(name, captured)
        return True

    def _tell_gradients(self, name: GraphName, captured: CapturedGraph) -> None:
        """Tells of wrong gradients that the comparison of the stages found."""
        comparison = conclude(GraphComparison(), captured.gradients, {})
        if comparison.blame is not None and self._manifest.add_fault_of_stages(name, comparison):
            self._log(name, comparison)

    def conclude(self, judged: JudgedRun, findings: Sequence[Finding], sizes: SizesByName) -> None:
        """Makes the verdict on a run; writes it to the log, the tables and the manifest.

        ``findings`` are those on the stages before it, and on its call.
        """
        name, run = judged.graph.name, judged.run
        comparison = conclude(judged.comparison, [*findings, *judged.findings], sizes)
        comparison = with_precision(comparison, self._options.providers)
        if run.sessions and self._may_run_elsewhere(name):
            comparison.note = "; ".join(filter(None, [comparison.note, _ELSEWHERE]))
        count("unchecked_values", len(comparison.unchecked))
        with self._lock:
            table = f"{graph_folder(name)}/side_by_side"
            text = side_by_side_text(comparison)
            if not self._manifest.has_fault(name):
                self._folder.write_text(f"{table}.txt", text)
                self._folder.write_text(f"{table}.json", side_by_side_json(comparison))
            trace(name, "side_by_side", lambda: text, self._graphs[name].compile)
            self._manifest.add_comparison(name, comparison, run, sizes)
            record = self._graphs[name].record
            if record is not None and (record.comparison is None or record.comparison.ok):
                record.comparison = comparison
        self._log(name, comparison)

    def _may_run_elsewhere(self, name: GraphName) -> bool:
        """Whether ``onnxrt`` with the same options may choose another engine for a graph."""
        placement = self._options.placement
        return placement == "fastest" or (placement == "measured" and name.direction != "inference")

    def _log(self, name: GraphName, comparison: GraphComparison) -> None:
        """Logs a verdict; a warning, unless it is right, or the same fault at the same line was warned of before."""
        blame = comparison.blame
        is_known = blame is not None and not is_new((self._folder, blame.cause, blame.source, blame.module))
        is_right = comparison.ok and not comparison.unchecked
        note = f" ({comparison.note})" if comparison.note else ""
        level = logging.INFO if is_right or is_known else logging.WARNING
        logger.log(level, "%s: %s%s", name, comparison.verdict, note)

    def all_compared(self, graph: GraphName) -> None:
        """No further run of the graph is compared."""
        self._judge_of(graph).drop()

    def comparison_failed(self, graph: GraphName, error: Exception) -> None:
        """Logs an internal exception of a comparison, and makes it the verdict."""
        caught(f"the comparison of {graph}", error, "The graph runs")
        with net("the manifest", "The graph runs"):
            self.failed(graph, f"the comparison failed: {exception_text(error)}")

    def count_run(self, graph: CompiledGraph, *, at_other_sizes: bool) -> None:
        self._manifest.count_run(graph.name, at_other_sizes=at_other_sizes)

    def _write_test_data(self, compiled: CompiledRegion, actual: dict[fx.Node, object]) -> None:
        """Writes the inputs and outputs of a region's model in ONNX's test layout."""
        weights = _weights_of(actual)

        def write(kind: str, specs: Sequence[InputSpec | OutputSpec], nodes: Sequence[fx.Node]) -> None:
            for i, (spec, node) in enumerate(zip(specs, nodes, strict=True)):
                value = actual[node]
                tensor = value if isinstance(value, torch.Tensor) else torch.tensor(value)
                if spec.permutation is not None:
                    tensor = tensor.permute(spec.permutation)
                path = f"{_region_folder(compiled)}/test_data_set_0/{kind}_{i}"
                limit = self._options.tensor_limit
                write_tensor(self._folder, path, tensor, spec.name, limit, always=node in weights)

        write("input", compiled.bound.inputs, [item.node for item in compiled.region.inputs])
        write("output", compiled.bound.outputs, [item.node for item in compiled.region.outputs])


@dataclasses.dataclass(frozen=True, eq=False)
class _ComparedGraph:
    """A compiled graph, whose runs are compared if they belong to a compared call of the captured graph.

    Those of a backward, or of a graph without a captured graph, are selected one by one.
    """

    graph: CompiledGraph
    loaded: LoadedProgram
    observer: DebugObserver
    judge: Judge
    selector: RunSelector

    def run(self, args: list[object]) -> object:
        what = self.judge.doing
        if isinstance(what, Interpretation):
            return what.run(self.graph.name, self.graph.module, args)
        selected: SelectedRun | None = None
        try:
            if what is not COMPARING and self.observer.is_open and can_be_compared(args):
                if isinstance(what, RecordedForwards):
                    self.selector.add(args)
                elif self.judge.selects_runs:
                    selected = self.selector.begin(args)
                self.observer.count_run(self.graph, at_other_sizes=self.selector.has_only_others(args))
        except Exception as error:
            self._fail(selected, error)
            selected = None
        if isinstance(what, RecordedForwards):
            return self._recorded(args, what)
        return self.loaded.run(args) if selected is None else self._compared(args, selected)

    def _recorded(self, args: list[object], recording: RecordedForwards) -> Sequence[object]:
        """A run of a compared call, see ``ComparedEntry``. PyTorch's exceptions in it are the user's."""
        run = record_run(self.graph, self.loaded, args)
        try:
            recording.runs.append(self._judged(run))
        except Exception as error:
            recording.has_failed = True
            self._fail(None, error)
        return run.results

    def _compared(self, args: list[object], selected: SelectedRun) -> Sequence[object]:
        """A run that is compared by itself, in order."""
        try:
            run = record_run(self.graph, self.loaded, args)
        except BaseException:
            self.selector.fail(selected)
            raise
        try:
            self.observer.conclude(self._judged(run), [], selected.sizes)
        except Exception as error:
            self._fail(selected, error)
            return run.results
        if self.selector.end():
            self.observer.all_compared(self.graph.name)
        return run.results

    def _judged(self, run: RecordedRun) -> JudgedRun:
        if run.failure is not None:
            raise run.failure
        ARENA.shrink()  # the comparison needs memory of its own
        with doing(COMPARING):
            return self.observer.judge(self.graph, run)

    def _fail(self, selected: SelectedRun | None, error: Exception) -> None:
        """The comparison failed, and not the user's call."""
        if selected is not None:
            self.selector.fail(selected)
        self.observer.comparison_failed(self.graph.name, error)


def _weights_of(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """The parameters and buffers, and what is computed from them alone, such as a transposed weight."""
    weights: set[fx.Node] = set()
    for node in nodes:
        read = node.all_input_nodes
        if user_name(node, static_only=True) or (read and weights.issuperset(read)):
            weights.add(node)
    return weights


def _region_folder(compiled: CompiledRegion) -> str:
    return f"{graph_folder(compiled.graph)}/region_{compiled.region.index}"
