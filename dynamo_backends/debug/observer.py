"""The observer of ``onnx_debug``: writes each stage to the dump folder, and compares runs with eager and float64.

What runs is what ``onnxrt`` runs: the same split graph and the same sessions. A compared run is interpreted node by
node, each region still one call, so that the values between regions can be kept.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import logging
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

import onnx_ir as ir
import torch
from torch import fx
from torch._guards import CompileContext

from passes.engine.locks import Lock
from passes.engine.manager import Listener, PassResult

from ..artifacts import CompiledGraph, CompiledRegion, GraphName, Runner
from ..dumps.blame import Kind
from ..dumps.cut_folder import repro_text
from ..errors import CompiledNodesError, SessionError, first_line
from ..events import count
from ..exporter.translate import serialize
from ..observer import Observer
from ..options import Options
from ..placement.graph_facts import may_run_twice, written_arguments
from ..runtime.arena import ARENA
from ..runtime.binding import InputSpec, OutputSpec
from ..runtime.kernels import serialized
from ..safety_net import caught, net
from ..stage_log import trace
from ..watchers import unseen
from .captured import Call, Captured, Finding, JointGraphs
from .choice import Choice, ChosenRun, Sizes, SizesByName, Uncompared
from .culprit import reference_of
from .dump_folder import DumpFolder, dump_folder, graph_folder
from .judge import ComparedEntry, Judge, Judged, KeptGraphs, Listeners, ModelGraphs
from .manifest import Manifest
from .pass_diffs import PassDiffs
from .record import Record, RecordObserver, Run, Snapshots, make_record
from .replay import Replay
from .rows import OK, Blame, GraphComparison
from .stage_files import StageFiles
from .stages import StageGraphs
from .tables import arguments_of, regions_text, side_by_side_json, side_by_side_text
from .tensors import write_tensor
from .undefined import without_undefined
from .verdict import conclude, with_precision
from .watched import WatchedRun, are_plain, watch

logger = logging.getLogger(__name__)

_MODELS = {"onnx": "model.onnx", "onnx_optimized": "model.optimized.onnx", "session": "model.session.onnx"}
"""The files of the stages that are models of a region."""

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
            self._choices[graph] = Choice(Sizes(module), self._options.compare)
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
            content = serialized(compiled.optimized_model, compiled.executable.settings.providers)
            nodes = len(compiled.optimized_model.graph)
            if content == serialize(compiled.model):
                same_as = "onnx"
                self._folder.remove(file)  # what is compiled twice may have one of the first time
            else:
                self._folder.write_bytes(file, content)
            model = _MODELS[same_as or stage]
            self._folder.write_text(f"{folder}/repro.py", repro_text(_settings_of(compiled, model)))
        elif stage == "session":
            try:
                nodes = self._write_session(compiled, file)
            except CompiledNodesError:
                same_as, nodes = "onnx_optimized", len(compiled.optimized_model.graph)
                self._folder.remove(file)  # see above
        else:
            return
        entry: dict[str, object] = {
            "name": stage,
            "file": None if same_as else file,
            "same_as": same_as,
            "nodes": nodes,
        }
        self._manifest.add_region_stage(compiled, entry)

    def _write_session(self, compiled: CompiledRegion, file: str) -> int:
        """Writes what ONNX Runtime made of a region's model; returns the number of its nodes.

        Raises:
            CompiledNodesError: a provider made something of it that is no ONNX model.
        """
        session, nodes = compiled.bound.session, 0

        def save(path: Path) -> None:
            nonlocal nodes
            try:
                model, _ = session.optimized()
            except CompiledNodesError:
                raise
            except SessionError as error:  # the session itself was made: what fails is the writing
                raise OSError(f"ONNX Runtime cannot write its optimized model: {error}") from error
            nodes = len(model.graph)
            path.write_bytes(serialize(model))

        self._folder.write_with(file, save)
        return nodes

    def runner(self, graph: CompiledGraph) -> Runner:
        if not self.is_open:
            return graph.run if self._records is None else RecordObserver(self._records).runner(graph)
        self._folder.write_text(f"{graph_folder(graph.name)}/regions.txt", regions_text(graph))
        has_captured = self._judges[graph.name].captured is not None
        self._compiles[graph.name] = CompileContext.try_get()
        self._manifest.add_graph(
            graph, self._options, reference=f"{'Dynamo' if has_captured else 'AOTAutograd'}'s graph"
        )
        record = make_record(graph) if self._records is not None else None
        if self._records is not None:
            self._records.append(record)
        sizes = Sizes(graph.module)
        if has_captured:
            choice = self._choices[GraphName(graph.name.index)]
        else:
            choice = self._choices[graph.name] = Choice(sizes, self._options.compare)
        watched = _WatchedGraph(graph, self, self._judges[graph.name], choice, Uncompared(sizes), record)
        return watched.run

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
                self._write_culprit(graph, run, judged.comparison.blame)
        return judged

    def _write_culprit(self, graph: CompiledGraph, run: WatchedRun, blame: Blame | None) -> None:
        """What PyTorch computes at a node that is wrong by itself: without PyTorch nothing else tells what is right."""
        if blame is None or blame.region is None or blame.cause.kind != Kind.NODE:
            return
        compiled = next(item for item in graph.regions if item.region.index == blame.region)
        try:
            reference = reference_of(compiled, blame.value, run.values, self._replay)
        except SessionError as error:
            logger.info("no reference of %s is dumped: %s", blame.value, error)
            return
        except Exception as error:
            caught(f"the reference of {blame.value}, which is dumped,", error, "The graph runs")
            return
        limit = self._options.tensor_limit
        for kind, values in (("input", reference.inputs), ("eager", reference.eager), ("exact", reference.exact)):
            for i, (name, value) in enumerate(values.items()):
                write_tensor(self._folder, f"{_region_folder(compiled)}/culprit/{kind}_{i}", value, name, limit)

    def conclude(
        self, graph: CompiledGraph, run: WatchedRun, judged: Judged, finding: Finding, sizes: SizesByName
    ) -> GraphComparison:
        """Writes the tables of a compared run, and says the verdict in the log and the manifest.

        Args:
            graph: the graph.
            run: the run.
            judged: what was found in the graph and its stages.
            finding: what the captured graph says of the results.
            sizes: of the arguments of the run.
        """
        comparison = conclude(judged.comparison, [finding, *judged.findings], sizes)
        try:
            comparison = without_undefined(comparison, graph.module, run.values)
        except Exception as error:
            caught("whether PyTorch leaves a value undefined", error, "The graph runs")
        comparison = with_precision(comparison, self._options.providers)
        count("unchecked_values", len(comparison.unchecked))
        with self._lock:
            table = f"{graph_folder(graph.name)}/side_by_side"
            text = side_by_side_text(comparison, arguments_of(graph.module))
            if not self._manifest.has_fault(graph.name):
                self._folder.write_text(f"{table}.txt", text)
                self._folder.write_text(f"{table}.json", side_by_side_json(comparison))
            trace(graph.name, "side_by_side", lambda: text, self._compiles[graph.name])
            self._manifest.add_comparison(graph.name, comparison, run.repeated, run.cost)
        for judge in self._finished(graph.name):
            judge.drop()
        level = logging.INFO if comparison.verdict == OK and not comparison.unchecked else logging.WARNING
        logger.log(
            level, "%s: %s%s", graph.name, comparison.verdict, f" ({comparison.note})" if comparison.note else ""
        )
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
    """Calls a compiled graph, and compares the runs that the option ``compare`` asks for.

    Args:
        graph: the graph.
        observer: compares.
        judge: of the graph.
        choice: which runs are compared: calls of the captured graph, if there is one.
        uncompared: tells the runs at sizes of which none was.
        record: gets each run, if there is one.
    """

    def __init__(
        self,
        graph: CompiledGraph,
        observer: DebugObserver,
        judge: Judge,
        choice: Choice,
        uncompared: Uncompared,
        record: Record | None,
    ) -> None:
        self._graph = graph
        self._observer = observer
        self._judge = judge
        self._choice = choice
        self._uncompared = uncompared
        self._record = record
        self._run = graph.run

    def run(self, args: list[object]) -> object:
        chosen: _Chosen | None = None
        try:
            chosen = self._before(args)
        except Exception as error:
            self._observer.comparison_failed(self._graph.name, error)
        if chosen is None:
            return self._run(args)
        outputs = self._watched(args, chosen) if chosen.compares else self._run(args)
        try:
            if self._record is not None:
                self._record.runs.append(Run(chosen.inputs, self._observer.snapshots.of(outputs)))
        except Exception as error:
            self._observer.comparison_failed(self._graph.name, error)
        return outputs

    def _before(self, args: list[object]) -> _Chosen | None:
        """Whether a run is compared, and what it was given; ``None`` where it is not looked at."""
        is_open = self._observer.is_open
        if not are_plain(args) or not (is_open or self._record is not None):
            return None
        call = self._judge.call_of(args) if is_open else None
        run = self._choice.begin(args) if is_open and self._judge.captured is None else None
        chosen = _Chosen(call, run)
        try:
            if self._record is not None:
                chosen.inputs = self._observer.snapshots.of(args)
            if is_open:
                at_other_sizes = self._uncompared.ran(args, compared=chosen.compares)
                self._observer.count_run(self._graph, at_other_sizes=at_other_sizes)
            if chosen.compares:
                chosen.again = _Again(self._graph, args)
        except Exception:
            self._fail(chosen)
            raise
        return chosen

    def _fail(self, chosen: _Chosen) -> None:
        """A run that was to be compared was not."""
        if chosen.run is not None:
            self._choice.fail(chosen.run)

    def _watched(self, args: list[object], chosen: _Chosen) -> object:
        """A compared run. What PyTorch raises in it is the user's."""
        again = chosen.again
        try:
            run = watch(self._graph, args)
        except Exception as error:
            self._fail(chosen)
            if again is None or not again.is_possible:
                raise
            results = self._run(again.arguments())  # raises the user's error once more, if it is that
            self._observer.comparison_failed(self._graph.name, error)
            return results
        except BaseException:
            self._fail(chosen)
            raise
        try:
            self._compare(run, chosen)
        except Exception as error:
            self._fail(chosen)
            self._observer.comparison_failed(self._graph.name, error)
        return run.results

    def _compare(self, run: WatchedRun, chosen: _Chosen) -> None:
        call, chosen_run = chosen.call, chosen.run
        if run.failure is not None:
            raise run.failure
        ARENA.shrink()  # the comparison needs memory of its own
        judged = self._observer.compare(self._graph, run, call)

        def finish(finding: Finding) -> None:
            of_run = chosen_run or (call.chosen if call is not None else None)
            sizes = of_run.sizes if of_run is not None else {}
            comparison = self._observer.conclude(self._graph, run, judged, finding, sizes)
            if call is not None and not comparison.ok:
                call.fault = comparison.verdict
            if self._record is not None and (self._record.comparison is None or self._record.comparison.ok):
                self._record.comparison = comparison

        if call is not None and self._graph.name.direction != "backward":
            call.finish = finish  # the results and the arguments are judged when the call has returned
            return
        if call is not None and call.chosen is not None:
            self._choice.backward_came(call.chosen)
        if chosen_run is not None:
            self._choice.end(chosen_run, awaits_backward=False)
            chosen.run = None
        finish(Finding())


@dataclasses.dataclass
class _Chosen:
    """What is known of a run before it.

    Attributes:
        call: the compared call of the captured graph that it belongs to.
        run: the run, where it is compared and there is no captured graph; ``None`` once it ended.
        inputs: copies of the arguments, for a record.
        again: lets a compared run be repeated.
    """

    call: Call | None
    run: ChosenRun | None
    inputs: list[object] = dataclasses.field(default_factory=list)
    again: _Again | None = None

    @property
    def compares(self) -> bool:
        return self.call is not None or self.run is not None


class _Again:
    """Lets a graph run again, on what it was given, after a watched run failed.

    It cannot where the graph does more than compute, write into its arguments and draw random numbers on the CPU.
    """

    def __init__(self, graph: CompiledGraph, args: Sequence[object]) -> None:
        written = written_arguments(graph.module)
        self.is_possible = written is not None and may_run_twice(graph.module)
        self._args = list(args) if self.is_possible else []
        tensors = [(item, item.clone()) for i in written or () if isinstance(item := args[i], torch.Tensor)]
        self._written = tensors if self.is_possible else []
        self._state = torch.get_rng_state()

    def arguments(self) -> list[object]:
        """The arguments, with what they held before."""
        with torch.no_grad():
            for tensor, before in self._written:
                tensor.copy_(before)
        torch.set_rng_state(self._state)
        return self._args


def _settings_of(compiled: CompiledRegion, model: str) -> dict[str, object]:
    """What ``repro.py`` is told of a region: the file of the model that ran, and how its session was made."""
    executable = compiled.executable
    return {
        "model": model,
        "session": executable.settings.as_json(),
        "constants": executable.constants,
    }


def _region_folder(compiled: CompiledRegion) -> str:
    return f"{graph_folder(compiled.graph)}/region_{compiled.region.index}"
