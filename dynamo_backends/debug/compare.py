"""The three-way comparison of one run of a graph, node by node: onnx, eager, exact.

``onnx``
    what the runtime computed. *Propagated*: on its own upstream values, the region in one session with every value
    exposed. *Local*: on eager's inputs, each node in a session of its own. And *session*: what the session that really
    ran returned; only a region's outputs have it.
``eager``
    what PyTorch computes in the model's dtype on the same inputs.
``exact``
    what PyTorch computes in float64. The local errors are judged by float64 on eager's inputs.

The outputs of the graph as it really ran are judged first. If all are as near to exact as eager's, the graph is
``ok``. Otherwise the culprit is the first node in execution order whose local error eager's own does not explain.
"""

from __future__ import annotations

import cmath
import dataclasses
import operator
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import fx
from torch.utils import _pytree as pytree

from .. import aot
from ..artifacts import CompiledGraph, Region, is_operator, operator_name
from ..dumps.blame import Cause, Kind
from ..errors import CompiledNodesError, SessionError, first_line
from ..exporter.known_wrong import is_uninitialized
from ..exporter.locations import module_path, source_line, stack, user_name
from ..exporter.translate import value_names
from ..numerics.differences import Deviation, largest
from ..numerics.distance import EQUAL, dense, distance, is_carried, is_explained, nearer
from ..numerics.exact import Environment, run_eager, run_exact, widen
from ..numerics.extent import extent, nonfinite_elements
from ..numerics.graph_execution import FxExecution
from ..regions import is_ordered
from .repeat import Instability, instability_of
from .replay import Replay
from .rows import Blame, GraphComparison, Row
from .suspects import ModelStep, find_rewrite, wrong_needed_pass
from .watched import WatchedRun

_EXPOSED_TIMES = 4
"""How often a region with all its values exposed is run again."""

Models = Mapping[int, Sequence[ModelStep]]
"""By index of a region, its model after each pass of the stage ``onnx`` that fired."""


def compare_run(graph: CompiledGraph, run: WatchedRun, models: Models, replay: Replay) -> GraphComparison:
    """Compares one run of a graph with eager and float64."""
    lockstep = _Lockstep(graph, run, replay)
    rows = list(lockstep.rows())
    comparison = _Judgement(graph, run, models, rows).comparison()
    again = [f"region_{i} was not run again: {item.failure}" for i, item in run.repeated.items() if item.failure]
    if run.rescued and comparison.ok:
        comparison.not_comparable = "; ".join(f"PyTorch ran region_{i}: {why}" for i, why in run.rescued.items())
    unchecked = [*lockstep.unchecked(), *again]
    return dataclasses.replace(comparison, rows=rows, unchecked=unchecked, rescued=run.rescued)


@dataclasses.dataclass(frozen=True, eq=False)
class _Judgement:
    """The verdict on the rows of one run."""

    graph: CompiledGraph
    run: WatchedRun
    models: Models
    rows: list[Row]

    def comparison(self) -> GraphComparison:
        found = self._stale() or self._unstable()
        if found is not None:
            return found
        faulty = [row for row in self.rows if row.is_output and not row.explained]
        culprit = next((row for row in self.rows if row.jumps), None)
        if culprit is None and faulty:
            culprit = next((row for row in self.rows if not row.locally_explained), None)
        if culprit is not None:
            return self._diverges(culprit)
        return self._rewritten() or (self._without_culprit(faulty) if faulty else GraphComparison(note=self._nearer()))

    def _diverges(
        self, row: Row, cause: Cause | None = None, note: str | None = None, said: str = ""
    ) -> GraphComparison:
        cause = cause or self._cause(row)
        said = ", ".join(filter(None, [row.complaint, said]))
        blame = Blame(row.name, cause, row.region, row.where, row.user_name, said=Deviation(said))
        return GraphComparison(blame, note=self._nearer() if note is None else note)

    def _cause(self, row: Row) -> Cause:
        """What makes the value of a node wrong that is wrong in its exported model, or in PyTorch."""
        if row.region is None:
            return Cause(Kind.PYTORCH)
        compiled = self.graph.regions[row.region]
        name = wrong_needed_pass(compiled, self.run.session_of(compiled), self.run.values, row)
        return Cause(Kind.PASS, name) if name else Cause(Kind.NODE)

    def _stale(self) -> GraphComparison | None:
        """The verdict on a session that returned something wrong, and has a weight from before it was changed."""
        wrong = {row.region for row in self.rows if row.session is not None and not row.explained}
        for compiled in self.graph.regions:
            if compiled.region.index not in wrong:
                continue
            inputs = compiled.region.inputs
            stale = compiled.session.stale([self.run.values[item.node] for item in inputs])
            names = {inputs[position].node: name for position, name in stale.items()}
            for node in compiled.region.nodes:
                for weight in node.all_input_nodes:
                    if weight in names:
                        reader = next(row for row in self.rows if row.name == value_names(node)[0])
                        return self._diverges(reader, Cause(Kind.STALE_WEIGHT, names[weight]))
        return None

    def _rewritten(self) -> GraphComparison | None:
        """The verdict on a value that is right in the exported model, and wrong in the session that ran."""
        flipped: set[int] = set()
        for row in self.rows:
            if row.session is None or row.onnx is None or row.eager is None or row.region is None:
                continue
            if not row.propagated_explained or row.is_explained(row.session, row.eager):
                continue
            found = row.session_instability
            if found is not None and found.between_runs:  # by less than eager's own error, and yet a reason
                return self._not_the_same(row, found, "every node by itself is right")
            if not row.torch_dtype.is_floating_point and not row.torch_dtype.is_complex and not row.is_output:
                flipped.add(row.region)  # rounding turned a comparison; what follows of it is no rewrite's fault
            if row.region in flipped and not row.is_output:
                continue
            compiled = self.graph.regions[row.region]
            bound, steps = self.run.session_of(compiled), self.models.get(row.region, ())
            cause, value = find_rewrite(compiled, bound, steps, self.run.values, row.name)
            note = f"every node of region_{row.region} by itself is right: a rewrite of its model makes the fault"
            return self._diverges(next((item for item in self.rows if item.name == value), row), cause, note)
        return None

    def _unstable(self) -> GraphComparison | None:
        """The verdict on results that are others each time, or with another number of threads."""
        for row in self.rows:
            if row.unstable_alone and row.local_instability is not None:
                return self._not_the_same(row, row.local_instability, "the node alone, on the same inputs")
        for row in self.rows:
            found = row.session_instability
            if found is None or not row.unstable_in_session or row.region is None:
                continue
            rounds = any(item.region == row.region and item.local_instability is not None for item in self.rows)
            if not found.between_runs and (is_carried(found.difference, row.torch_dtype) or rounds):
                continue  # threads add up in another order, and the graph carries it on, past a comparison that flips
            note = f"no node of region_{row.region} by itself gave other results in ten runs"
            return self._not_the_same(row, found, note)
        return None

    def _not_the_same(self, row: Row, found: Instability, where: str) -> GraphComparison:
        cause = Cause(Kind.UNSTABLE, "runs" if found.between_runs else "threads")
        difference = found.difference
        note = f"{where}: results {found} differ by {difference.max_abs:.3g}, at values up to {difference.scale:.3g}"
        if difference.nonfinite:
            note += f", {difference.nonfinite} of them NaN or infinite in one only"
        return self._diverges(row, cause, note, f"{row.operator}, {found}")

    def _without_culprit(self, faulty: Sequence[Row]) -> GraphComparison:
        """No node and no rewrite is wrong, and yet an output is not as near to exact as eager's."""
        worst = max(faulty, key=lambda row: row.error.relative if row.error is not None else 0.0)
        if worst.ours is not None and is_carried(worst.ours, worst.torch_dtype):
            note = f"eager is nearer at {worst.name}: rounding carried on by the graph; every node by itself is right"
            return GraphComparison(note=note)
        first = next((row for row in self.rows if row.onnx is not None and not row.explained), worst)
        note = "every node by itself is right; the difference grows, for example by a comparison that flips"
        return self._diverges(first, Cause(Kind.ROUNDING), note)

    def _nearer(self) -> str:
        outputs = [row for row in self.rows if row.is_output]
        sides = [nearer(row.ours, row.eager) for row in outputs if row.ours is not None and row.eager is not None]
        return ", ".join(
            f"{side} nearer to exact at {sides.count(side)} outputs" for side in ("runtime", "eager") if side in sides
        )


class _Lockstep:
    """Runs eager, float64 and the runtime side by side, one node at a time, and drops values after their last use."""

    def __init__(self, graph: CompiledGraph, run: WatchedRun, replay: Replay) -> None:
        self._graph = graph
        self._run = run
        self._actual = run.values
        self._replay = replay
        nodes = graph.module.graph.nodes
        recorded = {  # random numbers and side effects happened once, in the run
            node: self._actual[node]
            for node in nodes
            if node in self._actual and (node.op in ("placeholder", "get_attr") or is_ordered(node))
        }
        self._execution = FxExecution(graph.module, (), torch.get_rng_state(), recorded=recorded)
        self._repeated = {
            value_names(compiled.region.outputs[position].node)[0]: instability
            for compiled in graph.regions
            if (repeated := run.repeated.get(compiled.region.index)) is not None
            for position, instability in repeated.unstable.items()
        }
        self._region_of = {node: region.region for region in graph.regions for node in region.region.nodes}
        self._propagated: dict[str, object] = {}
        self._in_session: dict[str, torch.Tensor] = {}
        self._ready_regions: set[int] = set()
        self._unchecked: list[str] = []
        self._alone: dict[str, str] = {}
        self._returned_nodes = set(graph.module.graph.output_node().all_input_nodes)
        is_backward = graph.name.direction == "backward"
        self._gradients = largest(map(self._actual.get, self._returned_nodes)) if is_backward else 0.0
        self._result_names = aot.result_names(graph.module)

    def unchecked(self) -> list[str]:
        """What could not be compared, and why, after the rows."""
        alone = [f"{name} does not run by itself: {why}" for name, why in self._alone.items()]
        inexact = [
            f"eager is the reference of {name}, not float64: {why}" for name, why in self._execution.inexact.items()
        ]
        return [*self._unchecked, *alone, *inexact]

    def rows(self) -> Iterator[Row]:
        for node in self._graph.module.graph.nodes:
            if node.op == "output":
                return
            self._execution.run(node)
            if node.target is not operator.getitem:
                yield from self._rows_of(node)
            for dead in self._execution.release(*node.all_input_nodes):
                if not isinstance(dead.meta.get("val"), (tuple, list)):  # of several results, each is used by itself
                    self._propagated.pop(value_names(dead)[0], None)

    def _rows_of(self, node: fx.Node) -> Iterator[Row]:
        """A row for each tensor among a node's results."""
        results = self._execution.eager[node]
        several = isinstance(results, (tuple, list))
        values_of_eager: Sequence[object] = results if isinstance(results, (tuple, list)) else [results]
        is_computed = node.op not in ("placeholder", "get_attr")
        exact = self._execution.exact_of(node) if is_computed else None
        local = self._local(node) if is_computed else None
        beside = max(largest([exact]), self._gradients) if several else self._gradients
        rows: dict[int, Row] = {}
        for i, eager in enumerate(values_of_eager):
            if not isinstance(eager, torch.Tensor):
                continue
            index = i if several else None
            row = Row(
                name=f"{node.name}__{i}" if several else node.name,
                operator=operator_name(node) if node.op == "call_function" else node.op,
                module=module_path(node),
                source=source_line(node),
                user_name=user_name(node) or self._result_names.get(node, ""),
                stack=stack(node),
                dtype=str(eager.dtype).removeprefix("torch."),
                shape=tuple(eager.shape),
                beside=beside,
                inputs=list(dict.fromkeys(name for arg in node.all_input_nodes for name in value_names(arg))),
                has_infinite_argument=_has_infinite_argument(node),
                is_uninitialized=is_uninitialized(node),
                eager_extent=extent(eager),
            )
            if is_computed:
                expected = _item(exact, index)
                assert isinstance(expected, torch.Tensor)
                self._compare(row, node, index, dense(eager), dense(expected))
                if local is not None:
                    self._compare_local(row, node, index, local[i], dense(eager))
                row.session_instability = self._repeated.get(row.name)
                self._look_at_nonfinite(row, node, index, eager)
            rows[i] = row
        self._repeat_alone(node, rows, values_of_eager)
        yield from rows.values()

    def _repeat_alone(self, node: fx.Node, rows: Mapping[int, Row], results: Sequence[object]) -> None:
        """Repeats a node by itself where its region gave other results another time, or the node is wrong alone."""
        region = self._region_of.get(node)
        if region is None or not is_operator(node):
            return
        repeated = self._run.repeated.get(region.index)
        is_suspicious = repeated is not None and repeated.is_suspicious
        if not is_suspicious and all(row.locally_explained and row.in_model_explained for row in rows.values()):
            return
        found = self._replay.repeat_node(node, self._given(node))
        present = [i for i, item in enumerate(results) if item is not None]  # an absent result has no ONNX value
        several = isinstance(self._execution.eager[node], (tuple, list))
        again = self._local(node) if found else None
        for position, instability in found.items():
            i = present[position]
            rows[i].local_instability = instability
            value, eager = again[i] if again is not None else None, results[i]
            if isinstance(value, torch.Tensor) and isinstance(eager, torch.Tensor) and not rows[i].complaint:
                # what is unstable is judged by eager's own error
                self._compare_local_in_float64(rows[i], node, i if several else None, value, dense(eager))
        for row in rows.values():
            if row.locally_explained and not row.in_model_explained and row.session_instability is None:
                row.session_instability = self._repeat_exposed(row.name, region)

    def _repeat_exposed(self, name: str, region: Region) -> Instability | None:
        """How a value that is wrong in its region's model, though its node is right alone, comes out another time."""
        compiled, first = self._graph.regions[region.index], self._propagated[name]
        arguments = [self._actual[item.node] for item in region.inputs]
        assert isinstance(first, torch.Tensor)
        for _ in range(_EXPOSED_TIMES):
            other = self._replay.region_values(compiled, arguments)[name]
            assert isinstance(other, torch.Tensor)
            found = instability_of(first, other, compiled.bound.threads)
            if found is not None:
                return found
        return None

    def _compare(self, row: Row, node: fx.Node, index: int | None, eager: torch.Tensor, exact: torch.Tensor) -> None:
        """Measures what was computed on upstream values: eager's, the model's or PyTorch's, and the session's."""
        region = self._region_of.get(node)
        returned = self._returned(node, index)
        returned = dense(returned) if isinstance(returned, torch.Tensor) else returned
        row.is_output = returned is not None and self._is_returned(node, index)
        row.eager = distance(eager, exact)
        ours = returned
        if region is not None:
            self._expose(region)
            row.region = region.index
            ours = self._propagated.get(row.name)
        row.onnx_extent = extent(ours)
        if isinstance(ours, torch.Tensor):
            row.complaint = _complaint(ours, eager)
            if not row.complaint:
                row.equals_eager = torch.equal(ours, eager)
                row.onnx = row.eager if row.equals_eager else distance(ours, exact)
                if region is not None and not row.propagated_explained:
                    self._compare_in_model(row, node, index, ours)
        if region is None:
            return
        inside = self._in_session.pop(row.name, None)
        value = returned if isinstance(returned, torch.Tensor) else inside
        row.session_extent = extent(value)
        if value is None:
            return
        complaint = _complaint(value, eager)
        if value is returned:
            row.complaint = complaint = row.complaint or complaint
        if not complaint:
            is_propagated = row.onnx is not None and isinstance(ours, torch.Tensor) and torch.equal(value, ours)
            row.session = row.onnx if is_propagated else distance(value, exact)

    def _look_at_nonfinite(self, row: Row, node: fx.Node, index: int | None, eager: torch.Tensor) -> None:
        """Keeps some elements that are NaN or infinite, with what they were computed of."""
        names = {arg: value_names(arg)[0] for arg in node.all_input_nodes if value_names(arg)}
        if row.eager_extent is not None and not row.eager_extent.is_finite:
            inputs = [(name, self._execution.eager.get(arg)) for arg, name in names.items()]
            row.nonfinite_elements = nonfinite_elements(dense(eager), inputs)
        elif row.onnx_extent is not None and not row.onnx_extent.is_finite:
            ours = self._propagated.get(row.name, self._returned(node, index))
            inputs = [(name, self._runtime_value(arg)) for arg, name in names.items()]
            if isinstance(ours, torch.Tensor):
                row.nonfinite_elements = nonfinite_elements(dense(ours), inputs)

    def _compare_in_model(self, row: Row, node: fx.Node, index: int | None, ours: torch.Tensor) -> None:
        """Measures a node's error on what it was given in the region's model: how much of it is the node's own."""
        here = self._region_of.get(node)  # another region gives what its session returned
        given: Environment = {
            arg: self._runtime_value(arg) if self._region_of.get(arg) is here else self._actual.get(arg)
            for arg in node.all_input_nodes
        }
        if any(value is None for value in given.values()):
            return
        results = run_eager(node, given)
        exact = _item(run_exact(node, _widened(given), results), index)
        eager = _item(results, index)
        assert isinstance(eager, torch.Tensor) and isinstance(exact, torch.Tensor)
        if eager.shape == ours.shape:
            row.in_model_onnx, row.in_model_eager = distance(ours, exact), distance(eager, exact)

    def _runtime_value(self, node: fx.Node) -> object | None:
        """What the region's model, with all values exposed, or the run has for a node."""
        found = self._propagated.get(value_names(node)[0]) if node in self._region_of else None
        return self._actual.get(node) if found is None else found

    def _compare_local(self, row: Row, node: fx.Node, index: int | None, value: object, eager: torch.Tensor) -> None:
        """Measures a node's error alone, on eager's inputs: to eager itself, and to float64 where that is not enough.

        A result that is no further from eager than rounding may be is as near to float64 as eager, but for that.
        """
        if not isinstance(value, torch.Tensor):
            return
        row.complaint = row.complaint or _complaint(value, eager)
        if row.complaint:
            return
        nothing = dataclasses.replace(EQUAL, scale=row.eager.scale if row.eager is not None else 0.0)
        row.local_eager = nothing
        row.local_onnx = nothing if torch.equal(value, eager) else distance(value, eager)
        if not is_explained(row.local_onnx, nothing, row.torch_dtype):
            self._compare_local_in_float64(row, node, index, value, eager)

    def _compare_local_in_float64(
        self, row: Row, node: fx.Node, index: int | None, value: torch.Tensor, eager: torch.Tensor
    ) -> None:
        execution = self._execution
        widened = _widened({arg: execution.eager[arg] for arg in node.all_input_nodes})
        reference = _item(run_exact(node, widened, execution.eager[node], execution.inexact), index)
        if isinstance(reference, torch.Tensor):
            row.local_onnx, row.local_eager = distance(value, reference), distance(eager, reference)

    def _returned(self, node: fx.Node, index: int | None) -> object | None:
        """What the run returned for a result: a region's output, or a value PyTorch computed."""
        if node in self._actual:
            return _item(self._actual[node], index)
        users = (user for user in node.users if index is not None and _is_item(user, index))
        return next((self._actual[user] for user in users if user in self._actual), None)

    def _is_returned(self, node: fx.Node, index: int | None) -> bool:
        if node in self._returned_nodes:
            return True
        return index is not None and any(_is_item(user, index) for user in node.users if user in self._returned_nodes)

    def _expose(self, region: Region) -> None:
        """Gets all values of a region: in its exported model, and in the session that ran."""
        if region.index in self._ready_regions:
            return
        self._ready_regions.add(region.index)
        compiled = self._graph.regions[region.index]
        arguments = [self._actual[item.node] for item in region.inputs]
        values: Mapping[str, object] = {}
        try:
            values = self._replay.region_values(compiled, arguments)
            self._propagated.update(values)
        except SessionError as error:  # the local errors and the outputs remain
            self._unchecked.append(f"the values inside region_{region.index}: {first_line(str(error))}")
        try:
            inside = self._replay.session_values(compiled, self._run.session_of(compiled), arguments)
        except CompiledNodesError:  # inside there is one kernel of a provider, and its results are compared
            return
        except SessionError as error:
            self._unchecked.append(f"the values inside region_{region.index}'s session: {first_line(str(error))}")
            return
        for name, value in inside.items():  # the same values are kept once
            known = values.get(name)
            is_known = isinstance(known, torch.Tensor) and torch.equal(known, value)
            self._in_session[name] = known if is_known else value

    def _given(self, node: fx.Node) -> list[object]:
        return [self._execution.eager[arg] for arg in node.all_input_nodes]

    def _local(self, node: fx.Node) -> list[object] | None:
        """A node's results from the runtime on eager's inputs."""
        if node not in self._region_of:
            return None
        values = self._replay.node_values(node, self._given(node))
        if isinstance(values, str):
            self._alone[node.name] = values
            return None
        eager = self._execution.eager[node]
        if not isinstance(eager, (tuple, list)):
            return values
        present = iter(values)  # a node's absent results (None) have no ONNX value
        return [None if item is None else next(present) for item in eager]


def _item(results: object, index: int | None) -> object:
    """One of a node's results; all of them are one, where it has no several."""
    return results if index is None else results[index]  # type: ignore[index]


def _is_item(node: fx.Node, index: int) -> bool:
    return node.target is operator.getitem and node.args[1] == index


def _widened(values: Environment) -> Environment:
    return {node: pytree.tree_map(widen, value) for node, value in values.items()}


def _has_infinite_argument(node: fx.Node) -> bool:
    """Whether a number among a node's arguments is infinite or NaN."""
    numbers = [leaf for leaf in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(leaf, (float, complex))]
    return not all(map(cmath.isfinite, numbers))


def _complaint(ours: torch.Tensor, eager: torch.Tensor) -> str:
    if ours.dtype != eager.dtype:
        return f"dtype {ours.dtype} instead of {eager.dtype}"
    if ours.shape != eager.shape:
        return f"shape {tuple(ours.shape)} instead of {tuple(eager.shape)}"
    return ""
