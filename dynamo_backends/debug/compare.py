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
import contextlib
import dataclasses
import operator
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import fx
from torch.utils import _pytree as pytree

from .. import aot
from ..artifacts import CompiledGraph, CompiledRegion, Region, is_operator, operator_name
from ..dumps.blame import Cause, Kind
from ..errors import CompiledNodesError, SessionError, first_line
from ..exporter.known_wrong import is_uninitialized
from ..exporter.locations import module_path, source_line, stack, user_name
from ..exporter.translate import value_names
from ..numerics.differences import largest
from ..numerics.distance import EQUAL, Distance, dense, distance, is_carried, is_explained, nearer
from ..numerics.exact import Environment, run_eager, run_exact, widen
from ..numerics.extent import extent, nonfinite_elements
from ..numerics.products import Products, SharedProducts
from ..regions import is_ordered
from ..runtime.binding import BoundSession
from .beside import Beside, Eager, Trunk
from .repeat import Instability, RepeatedRegion, instability_of
from .replay import Replay
from .rows import OK, Blame, GraphComparison, Row, relative_error
from .suspects import ModelStep, find_rewrite, find_unstable_rewrite

aten = torch.ops.aten

_EXPOSED_TIMES = 4
"""How often a region with all its values exposed is run again."""

_SAME_ELEMENTS = {
    aten._unsafe_view.default,
    aten.alias.default,
    aten.clone.default,
    aten.detach.default,
    aten.permute.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.t.default,
    aten.transpose.int,
    aten.unsqueeze.default,
    aten.view.default,
}
"""Operators whose result has the elements of its argument, in another shape or order at most."""


@dataclasses.dataclass(frozen=True)
class RunValues:
    """What is known of one run of a graph.

    Attributes:
        actual: by node of ``graph.module``, the values of the run, as they were before the graph wrote into them: its
            inputs, its constants, what left a region, what PyTorch computed.
        sessions: by index of a region, the session that ran.
        repeated: by index of a region, what came of running it again.
        rescued: by index of a region that PyTorch ran because its session failed, what ONNX Runtime said.
        models: by index of a region, its model after each pass of the stage ``onnx`` that fired.
    """

    actual: Mapping[fx.Node, object]
    sessions: Mapping[int, BoundSession] = dataclasses.field(default_factory=dict)
    repeated: Mapping[int, RepeatedRegion] = dataclasses.field(default_factory=dict)
    rescued: Mapping[int, str] = dataclasses.field(default_factory=dict)
    models: Mapping[int, Sequence[ModelStep]] = dataclasses.field(default_factory=dict)

    def session_of(self, region: CompiledRegion) -> BoundSession:
        """The session of a region that ran; one of it where PyTorch did."""
        return self.sessions.get(region.region.index, region.bound)


def compare_run(
    graph: CompiledGraph,
    run: RunValues,
    replay: Replay,
    beside: Sequence[Beside] = (),
    products: Products | None = None,
) -> GraphComparison:
    """Compares one run of a graph with eager and float64.

    Args:
        graph: the graph that ran.
        run: the values of the run.
        replay: the sessions that explain a region.
        beside: graphs of the same stages, which read along with eager and float64.
        products: get the large products in float64, for the captured graph.
    """
    lockstep = _Lockstep(graph, run, replay, beside, products)
    rows = list(lockstep.rows())
    comparison = _judge(graph, run, rows)
    again = [f"region_{i} was not run again: {item.failure}" for i, item in run.repeated.items() if item.failure]
    unchecked = [*lockstep.unchecked(), *again]
    if run.rescued and comparison.ok:
        said = "; ".join(f"PyTorch ran region_{i}: {why}" for i, why in run.rescued.items())
        comparison = dataclasses.replace(comparison, verdict=f"not comparable: {said}")
    return dataclasses.replace(comparison, unchecked=unchecked)


def _judge(graph: CompiledGraph, run: RunValues, rows: list[Row]) -> GraphComparison:
    """The verdict on the rows of one run."""
    stale = _stale(graph, run, rows)
    if stale is not None:
        return stale
    unstable = _unstable(graph, run, rows)
    if unstable is not None:
        return unstable
    faulty = [row for row in rows if row.is_output and not row.explained]
    culprit = next((row for row in rows if row.jumps), None)
    if culprit is None and faulty:
        culprit = next((row for row in rows if not row.locally_explained), None)
    if culprit is not None:
        return GraphComparison(_diverges(culprit), _nearer_note(rows), rows, blame=_blame(culprit))
    rewritten = _rewritten(graph, run, rows)
    if rewritten is not None:
        return rewritten
    if not faulty:
        return GraphComparison(OK, _nearer_note(rows), rows)
    return _explain_without_culprit(rows, faulty)


def _stale(graph: CompiledGraph, run: RunValues, rows: list[Row]) -> GraphComparison | None:
    """The verdict on a session that returned something wrong, and has a weight from before it was changed."""
    wrong = {row.region for row in rows if row.session is not None and not row.explained}
    for compiled in graph.regions:
        if compiled.region.index not in wrong:
            continue
        inputs = compiled.region.inputs
        stale = compiled.runnable.session.stale([run.actual[item.node] for item in inputs])
        names = {inputs[position].node: name for position, name in stale.items()}
        for node in compiled.region.nodes:
            for weight in node.all_input_nodes:
                if weight in names:
                    reader = next(row for row in rows if row.name == value_names(node)[0])
                    cause = Cause(Kind.STALE_WEIGHT, names[weight])
                    verdict = f"{_diverges(reader)}: {cause}"
                    return GraphComparison(verdict, _nearer_note(rows), rows, blame=_blame(reader, cause))
    return None


def _rewritten(graph: CompiledGraph, run: RunValues, rows: list[Row]) -> GraphComparison | None:
    """The verdict on a value that is right in the exported model, and wrong in the session that ran."""
    flipped: set[int | None] = set()
    for row in rows:
        if row.session is None or row.onnx is None or row.eager is None or row.region is None:
            continue
        if not row.propagated_explained or is_explained(row.session, row.eager, row.torch_dtype, row.beside):
            continue
        found = row.session_instability
        if found is not None and found.between_runs:  # by less than eager's own error, and yet a reason
            return _unstable_verdict(row, found, "every node by itself is right", rows)
        if not row.torch_dtype.is_floating_point and not row.torch_dtype.is_complex and not row.is_output:
            flipped.add(row.region)  # rounding turned a comparison; what follows of it is no rewrite's fault
        if row.region in flipped and not row.is_output:
            continue
        region = _region(graph, row.region)
        steps = run.models.get(row.region, ())
        rewrite = find_rewrite(region, run.session_of(region), steps, run.actual, row.name)
        note = f"every node of region_{row.region} by itself is right: a rewrite of its model makes the fault"
        first = next((item for item in rows if item.name == rewrite.value), row)
        blame = _blame(first, rewrite.cause)
        return GraphComparison(f"{_diverges(first)}: {rewrite.cause}", note, rows, blame=blame)
    return None


def _unstable(graph: CompiledGraph, run: RunValues, rows: list[Row]) -> GraphComparison | None:
    """The verdict on results that are others each time, or with another number of threads; ``None`` if none are."""
    culprit = next((row for row in rows if row.unstable_alone), None)
    if culprit is not None:
        assert culprit.local_instability is not None
        return _unstable_verdict(culprit, culprit.local_instability, "the node alone, on the same inputs", rows)
    for row in rows:
        found = row.session_instability
        if found is None or not row.unstable_in_session:
            continue
        if not found.between_runs and (
            is_carried(found.difference, row.torch_dtype) or _rounds_by_threads(rows, row.region)
        ):
            continue  # threads add up in another order, and the graph carries it on, past a comparison that flips too
        assert row.region is not None
        region = _region(graph, row.region)
        origin = find_unstable_rewrite(region, run.session_of(region), run.models.get(row.region, ()), run.actual)
        note = f"no node of region_{row.region} by itself gave other results in ten runs: it is {origin}"
        return _unstable_verdict(row, found, note, rows)
    return None


def _unstable_verdict(row: Row, found: Instability, where: str, rows: list[Row]) -> GraphComparison:
    cause = Cause(Kind.UNSTABLE, "runs" if found.between_runs else "threads")
    size, scale = found.difference.max_abs, found.difference.scale
    note = f"{where}: results {found} differ by {size:.3g}, at values up to {scale:.3g}"
    if found.difference.nonfinite:
        note += f", {found.difference.nonfinite} of them NaN or infinite in one only"
    return GraphComparison(f"{_diverges(row)}: {cause}: {row.operator}, {found}", note, rows, blame=_blame(row, cause))


def _rounds_by_threads(rows: list[Row], region: int | None) -> bool:
    """Whether a node of a region by itself rounds differently with another number of threads."""
    return any(row.region == region and row.local_instability is not None for row in rows)


def _explain_without_culprit(rows: list[Row], faulty: list[Row]) -> GraphComparison:
    """No node and no rewrite is wrong, and yet an output is not as near to exact as eager's."""
    worst = max(faulty, key=relative_error)
    ours = worst.session or worst.onnx
    if ours is not None and is_carried(ours, worst.torch_dtype):
        note = f"eager is nearer at {worst.name}: rounding carried through the graph; every node by itself is right"
        return GraphComparison(OK, note, rows)
    first = next((row for row in rows if row.onnx is not None and not row.explained), worst)
    note = "every node by itself is right; the difference grows from rounding, for example by a comparison that flips"
    return GraphComparison(_diverges(first), note, rows, blame=_blame(first, Cause(Kind.ROUNDING)))


def _blame(row: Row, cause: Cause | None = None) -> Blame:
    own = Cause(Kind.PYTORCH if row.region is None else Kind.NODE)
    return Blame(row.name, cause or own, row.region, row.where, row.user_name)


def _region(graph: CompiledGraph, index: int) -> CompiledRegion:
    return next(region for region in graph.regions if region.region.index == index)


def _diverges(row: Row) -> str:
    return f"diverges at {row.name} ({row.where or 'no source line'})" + (f": {row.complaint}" if row.complaint else "")


def _nearer_note(rows: Sequence[Row]) -> str:
    sides = []
    for row in rows:
        ours = row.session or row.onnx
        if row.is_output and ours is not None and row.eager is not None:
            sides.append(nearer(ours, row.eager))
    return ", ".join(
        f"{side} nearer to exact at {sides.count(side)} outputs" for side in ("runtime", "eager") if side in sides
    )


class _Lockstep:
    """Runs eager, float64 and the runtime side by side, one node at a time, and drops values after their last use."""

    def __init__(
        self,
        graph: CompiledGraph,
        run: RunValues,
        replay: Replay,
        beside: Sequence[Beside],
        products: Products | None,
    ) -> None:
        self._sharing: contextlib.AbstractContextManager[object] = (
            contextlib.nullcontext() if products is None else SharedProducts(products, adds=True)
        )
        self._graph = graph
        self._trunk = Trunk(graph.module, beside)
        self._run = run
        repeated, actual = run.repeated, run.actual
        self._repeated = {
            value_names(output.node)[0]: repeated[region.region.index].unstable[i]
            for region in graph.regions
            if region.region.index in repeated
            for i, output in enumerate(region.region.outputs)
            if i in repeated[region.region.index].unstable
        }
        self._suspicious = {index for index, region in repeated.items() if region.is_suspicious}
        self._actual = actual
        self._replay = replay
        self._eager: Environment = {}
        self._exact: Environment = {}
        self._region_of = {node: region.region for region in graph.regions for node in region.region.nodes}
        self._propagated: dict[tuple[fx.Node, int | None], object] = {}
        self._in_session: dict[str, torch.Tensor] = {}
        self._distances: dict[fx.Node, Distance] = {}
        self._ready_regions: set[int] = set()
        self._place_of = {
            name: (node, i if len(names) > 1 else None)
            for node in self._region_of
            if node.target is not operator.getitem
            for names in [value_names(node)]
            for i, name in enumerate(names)
        }
        self._unchecked: list[str] = []
        self._alone: dict[str, str] = {}
        self._inexact: dict[str, str] = {}
        returned = graph.module.graph.output_node().all_input_nodes if graph.name.direction == "backward" else []
        self._gradients = largest(actual.get(node) for node in returned)
        self._result_names = aot.result_names(graph.module)
        nodes = list(graph.module.graph.nodes)
        last_use = {arg: node for node in nodes for arg in node.all_input_nodes}
        self._dies_at: dict[fx.Node, list[fx.Node]] = {}
        for arg, node in last_use.items():
            self._dies_at.setdefault(node, []).append(arg)

    def unchecked(self) -> list[str]:
        """What could not be compared, and why, after the rows."""
        alone = [f"{name} does not run by itself: {why}" for name, why in self._alone.items()]
        inexact = [f"eager is the reference of {name}, not float64: {why}" for name, why in self._inexact.items()]
        return [*self._unchecked, *alone, *inexact]

    def rows(self) -> Iterator[Row]:
        for node in self._graph.module.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self._eager[node] = self._actual[node]
                self._trunk.feed_argument(node, self._eager[node])
                yield from self._rows_of(node)
            elif node.op != "output":
                yield from self._call(node)
            for dead in self._dies_at.get(node, ()):
                self._eager.pop(dead, None)
                self._exact.pop(dead, None)
                self._propagated.pop(_place(dead), None)

    def _call(self, node: fx.Node) -> Iterator[Row]:
        if is_ordered(node) and node in self._actual:  # random numbers and side effects happened once, in the run
            self._eager[node] = self._actual[node]
            self._exact[node] = pytree.tree_map(widen, self._actual[node])
        else:
            self._eager[node] = run_eager(node, self._eager)
            for arg in node.all_input_nodes:
                if arg not in self._exact:  # a weight in float64 is twice its size: from its first reader on
                    self._exact[arg] = pytree.tree_map(widen, self._eager[arg])
            with self._sharing:
                self._exact[node] = run_exact(node, self._exact, self._eager[node], self._inexact)
        self._trunk.feed(node, Eager.of(self._eager[node]), self._exact[node])
        if node.target is not operator.getitem:
            yield from self._rows_of(node)

    def _rows_of(self, node: fx.Node) -> Iterator[Row]:
        """A row for each tensor among a node's results."""
        results, exact = self._eager[node], self._exact.get(node)
        several = isinstance(results, (tuple, list))
        local = self._local(node)
        values_of_eager: Sequence[object] = results if isinstance(results, (tuple, list)) else [results]
        rows: dict[int, Row] = {}
        beside = max(largest(exact), self._gradients) if several else self._gradients  # type: ignore[arg-type]
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
                inputs=_names_read(node),
                has_infinite_argument=_has_infinite_argument(node),
                is_uninitialized=is_uninitialized(node),
                eager_extent=extent(eager),
            )
            if node.op not in ("placeholder", "get_attr"):
                expected = exact[i] if several else exact  # type: ignore[index]
                assert isinstance(expected, torch.Tensor)
                self._compare(row, node, index, eager, expected)
                if local is not None:
                    self._compare_local(row, node, index, local[i], eager)
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
        right = all(row.locally_explained and row.in_model_explained for row in rows.values())
        if region.index not in self._suspicious and right:
            return
        found = self._replay.repeat_node(node, [self._eager[arg] for arg in node.all_input_nodes])
        present = [i for i, item in enumerate(results) if item is not None]  # an absent result has no ONNX value
        several = isinstance(self._eager[node], (tuple, list))
        again = self._local(node) if found else None
        for position, instability in found.items():
            i = present[position]
            rows[i].local_instability = instability
            value, eager = again[i] if again is not None else None, results[i]
            if isinstance(value, torch.Tensor) and isinstance(eager, torch.Tensor) and not rows[i].complaint:
                # what is unstable is judged by eager's own error
                self._compare_local_in_float64(rows[i], node, i if several else None, value, dense(eager))
        for i, row in rows.items():
            if row.locally_explained and not row.in_model_explained and row.session_instability is None:
                row.session_instability = self._repeat_exposed(node, i if several else None, region)

    def _repeat_exposed(self, node: fx.Node, index: int | None, region: Region) -> Instability | None:
        """How a value that is wrong in its region's model, though its node is right alone, comes out another time."""
        first = self._propagated[(node, index)]
        assert isinstance(first, torch.Tensor)
        for _ in range(_EXPOSED_TIMES):
            arguments = [self._actual[item.node] for item in region.inputs]
            values = self._replay.region_values(_region(self._graph, region.index), arguments)
            other = values[(node, index)]
            assert isinstance(other, torch.Tensor)
            found = instability_of(first, other, _region(self._graph, region.index).bound.threads)
            if found is not None:
                return found
        return None

    def _compare(self, row: Row, node: fx.Node, index: int | None, eager: torch.Tensor, exact: torch.Tensor) -> None:
        region = self._region_of.get(node)
        row.region = region.index if region is not None else None
        returned = _dense_value(self._returned(node, index))
        row.is_output = returned is not None and _is_returned(node, index, self._graph)
        ours = self._propagated_value(node, index) if region is not None else returned
        eager, exact = dense(eager), dense(exact)
        row.eager = self._distance_of_eager(node, index, eager, exact)
        row.onnx_extent = extent(ours)
        row.session_extent = extent(returned) if region is not None else None
        if isinstance(ours, torch.Tensor):
            row.complaint = _complaint(ours, eager)
            if not row.complaint:
                row.equals_eager = torch.equal(ours, eager)
                row.onnx = row.eager if row.equals_eager else distance(ours, exact)
                if region is not None and not row.propagated_explained:
                    self._compare_in_model(row, node, index, ours)
        inside = self._in_session.pop(row.name, None)
        if region is not None and isinstance(returned, torch.Tensor):
            row.complaint = row.complaint or _complaint(returned, eager)
            if not row.complaint:
                row.session = self._distance_in_session(row, returned, ours, exact)
        elif region is not None:
            row.session_extent = extent(inside)
            if inside is not None and not _complaint(inside, eager):
                row.session = self._distance_in_session(row, inside, ours, exact)

    @staticmethod
    def _distance_in_session(row: Row, value: torch.Tensor, ours: object, exact: torch.Tensor) -> Distance:
        is_propagated = isinstance(ours, torch.Tensor) and row.onnx is not None and torch.equal(value, ours)
        return row.onnx if is_propagated and row.onnx is not None else distance(value, exact)

    def _distance_of_eager(
        self, node: fx.Node, index: int | None, eager: torch.Tensor, exact: torch.Tensor
    ) -> Distance:
        """Eager's distance to float64; that of its argument where a node only arranges its elements."""
        known = None
        if node.target in _SAME_ELEMENTS and isinstance(node.args[0], fx.Node):
            known = self._distances.get(node.args[0])
        found = distance(eager, exact) if known is None else known
        if index is None:
            self._distances[node] = found
        return found

    def _look_at_nonfinite(self, row: Row, node: fx.Node, index: int | None, eager: torch.Tensor) -> None:
        """Keeps some elements that are NaN or infinite, with what they were computed of."""
        if row.eager_extent is not None and not row.eager_extent.is_finite:
            inputs = [(name, self._eager.get(arg)) for arg in node.all_input_nodes for name in value_names(arg)[:1]]
            row.nonfinite_elements = nonfinite_elements(dense(eager), inputs)
        elif row.onnx_extent is not None and not row.onnx_extent.is_finite:
            ours = self._propagated.get((node, index), self._returned(node, index))
            inputs = [(name, self._runtime_value(arg)) for arg in node.all_input_nodes for name in value_names(arg)[:1]]
            if isinstance(ours, torch.Tensor):
                row.nonfinite_elements = nonfinite_elements(dense(ours), inputs)

    def _compare_in_model(self, row: Row, node: fx.Node, index: int | None, ours: torch.Tensor) -> None:
        """Measures a node's error on what it was given in the region's model: how much of it is the node's own."""
        given: Environment = {}
        for arg in node.all_input_nodes:
            value = self._runtime_value(arg)
            if value is None:
                return
            given[arg] = value
        eager = run_eager(node, given)
        exact = run_exact(node, {arg: pytree.tree_map(widen, value) for arg, value in given.items()}, eager)
        if index is not None:
            eager, exact = eager[index], exact[index]  # type: ignore[index]
        assert isinstance(eager, torch.Tensor) and isinstance(exact, torch.Tensor)
        if eager.shape == ours.shape:
            row.in_model_onnx, row.in_model_eager = distance(ours, exact), distance(eager, exact)

    def _runtime_value(self, node: fx.Node) -> object | None:
        """What the region's model, with all values exposed, or the run has for a node."""
        found = self._propagated.get(_place(node))
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
        eager = dense(eager)
        nothing = dataclasses.replace(EQUAL, scale=row.eager.scale if row.eager is not None else 0.0)
        row.local_eager = nothing
        row.local_onnx = nothing if torch.equal(value, eager) else distance(value, eager)
        if not is_explained(row.local_onnx, nothing, row.torch_dtype):
            self._compare_local_in_float64(row, node, index, value, eager)

    def _compare_local_in_float64(
        self, row: Row, node: fx.Node, index: int | None, value: torch.Tensor, eager: torch.Tensor
    ) -> None:
        reference = self._reference(node)
        if index is not None:
            reference = reference[index]  # type: ignore[index]
        if isinstance(reference, torch.Tensor):
            row.local_onnx, row.local_eager = distance(value, reference), distance(eager, reference)

    def _reference(self, node: fx.Node) -> object:
        """A node's results in float64 on eager's inputs."""
        widened: Environment = {arg: pytree.tree_map(widen, self._eager[arg]) for arg in node.all_input_nodes}
        return run_exact(node, widened, self._eager[node], self._inexact)

    def _returned(self, node: fx.Node, index: int | None) -> object | None:
        """What the run returned for a result: a region's output, or a value PyTorch computed."""
        if node in self._actual:
            value = self._actual[node]
            return value if index is None else value[index]  # type: ignore[index]
        if index is not None:
            for user in node.users:
                if user.target is operator.getitem and user.args[1] == index and user in self._actual:
                    return self._actual[user]
        return None

    def _propagated_value(self, node: fx.Node, index: int | None) -> object | None:
        region = self._region_of[node]
        if region.index not in self._ready_regions:
            self._ready_regions.add(region.index)
            arguments = [self._actual[item.node] for item in region.inputs]
            self._expose(region, arguments)
        return self._propagated.get((node, index))

    def _expose(self, region: Region, arguments: Sequence[object]) -> None:
        """All values of a region: in its exported model, and in the session that ran."""
        compiled = _region(self._graph, region.index)
        try:
            self._propagated.update(self._replay.region_values(compiled, arguments))
        except SessionError as error:  # the local errors and the outputs remain
            self._unchecked.append(f"the values inside region_{region.index}: {first_line(str(error))}")
        try:
            bound = self._run.session_of(compiled)
            inside = self._replay.session_values(compiled, bound, arguments)
            self._in_session.update((name, self._as_propagated(name, value)) for name, value in inside.items())
        except CompiledNodesError:  # inside there is one kernel of a provider, and its results are compared
            pass
        except SessionError as error:
            self._unchecked.append(f"the values inside region_{region.index}'s session: {first_line(str(error))}")

    def _as_propagated(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """The same value of the exported model, so that it lies in memory once; ``value`` where there is none."""
        same = self._propagated.get(self._place_of.get(name, (None, None)))
        return same if isinstance(same, torch.Tensor) and torch.equal(same, value) else value

    def _local(self, node: fx.Node) -> list[object] | None:
        """A node's results from the runtime on eager's inputs."""
        if node not in self._region_of:
            return None
        arguments = [self._eager[arg] for arg in node.all_input_nodes]
        values = self._replay.node_values(node, arguments)
        if isinstance(values, str):
            self._alone[node.name] = values
            return None
        eager = self._eager[node]
        if not isinstance(eager, (tuple, list)):
            return values
        present = iter(values)  # a node's absent results (None) have no ONNX value
        return [None if item is None else next(present) for item in eager]


def _place(node: fx.Node) -> tuple[fx.Node, int | None]:
    """Which result of which node a node is."""
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node) and isinstance(node.args[1], int):
        return node.args[0], node.args[1]
    return node, None


def _names_read(node: fx.Node) -> list[str]:
    """The values that a node reads, each once, as rows have their names."""
    return list(dict.fromkeys(name for arg in node.all_input_nodes for name in value_names(arg)))


def _has_infinite_argument(node: fx.Node) -> bool:
    """Whether a number among a node's arguments is infinite or NaN."""
    numbers = [leaf for leaf in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(leaf, (float, complex))]
    return not all(map(cmath.isfinite, numbers))


def _dense_value(value: object) -> object:
    return dense(value) if isinstance(value, torch.Tensor) else value


def _is_returned(node: fx.Node, index: int | None, graph: CompiledGraph) -> bool:
    returned = graph.module.graph.output_node().all_input_nodes
    if node in returned:
        return True
    return any(item.target is operator.getitem and item.args[0] is node and item.args[1] == index for item in returned)


def _complaint(ours: torch.Tensor, eager: torch.Tensor) -> str:
    if ours.dtype != eager.dtype:
        return f"dtype {ours.dtype} instead of {eager.dtype}"
    if ours.shape != eager.shape:
        return f"shape {tuple(ours.shape)} instead of {tuple(eager.shape)}"
    return ""
