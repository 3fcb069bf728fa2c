"""The rows of a comparison: eager, float64 and the runtime side by side, node by node.

*Propagated*: what the runtime has at a node, where every value of the region's model is an output, against float64.
*Local*: the same value against the node computed by PyTorch on what the runtime has at the node's arguments: the error
of this node in the model that runs. *Session*: what the session that really ran returned, or still has inside.
"""

from __future__ import annotations

import cmath
import dataclasses
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import fx
from torch.utils import _pytree as pytree

from ..dumps.schema import ElementEntry
from ..errors import CompiledNodesError, SessionError, first_line
from ..exporter.registration import registered_converter, written_at
from ..exporter.translate import value_names
from ..exporter.upstream_faults import is_uninitialized
from ..graphs import aot
from ..graphs.artifacts import CompiledGraph, Region, is_operator, operator_name
from ..graphs.locations import module_path, source_line, stack, user_name
from ..numerics.distance import dense, distance
from ..numerics.exact import REFUSALS, Environment, run_eager
from ..numerics.graph_execution import FxExecution
from ..numerics.local_error import NodeCheck, Segment, name_of
from ..numerics.measure import Measure, group_size_of
from ..numerics.value_range import extent, nonfinite_elements
from ..partition.regions import is_ordered
from .node_sessions import Replay
from .recorded_run import WatchedRun
from .repeated_runs import Instability, instability_of
from .rows import Row

_REARRANGING = frozenset(
    {"view", "_unsafe_view", "reshape", "t", "transpose", "permute", "squeeze", "unsqueeze", "clone", "alias", "detach"}
)
"""Operators whose results have the elements of their first argument, in another shape or layout."""

_EXPOSED_TIMES = 4
"""How often a region with all its values exposed is run again."""


def recorded_values(graph: CompiledGraph, run: WatchedRun) -> dict[fx.Node, object]:
    """What is not computed again for a comparison: arguments, random numbers and side effects, which happened once."""
    return {
        node: run.values[node]
        for node in graph.module.graph.nodes
        if node in run.values and (node.op in ("placeholder", "get_attr") or is_ordered(node))
    }


class Lockstep:
    """Runs eager, float64 and the runtime side by side, one node at a time, and drops values after their last use."""

    def __init__(self, graph: CompiledGraph, run: WatchedRun, replay: Replay) -> None:
        self._graph = graph
        self._run = run
        self._actual = run.values
        self._replay = replay
        recorded = recorded_values(graph, run)
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
        self._runtime: Environment = {}
        self._missing: dict[fx.Node, Segment] = {}
        self._exposed: dict[int, bool] = {}
        self._measured: dict[fx.Node, Row] = {}
        self._unchecked: list[str] = []
        self._alone: dict[str, str] = {}
        self._returned_nodes = set(graph.module.graph.output_node().all_input_nodes)
        self._result_names = aot.result_names(graph.module)

    def unchecked(self) -> list[str]:
        """What could not be compared, and why, after the rows."""
        alone = [f"{name} does not run by itself: {why}" for name, why in self._alone.items()]
        inexact = [
            f"eager is the reference of {name}, not float64: {why}" for name, why in self._execution.inexact.items()
        ]
        return [*self._unchecked, *alone, *inexact]

    def rows(self) -> Iterator[Row]:
        """A row for each tensor, in execution order."""
        for node in self._graph.module.graph.nodes:
            if node.op == "output":
                return
            self._execution.run(node)
            region = self._region_of.get(node)
            if region is not None:
                self._expose(region)
            self._runtime[node] = self._runtime_value(node)
            if node.target is not operator.getitem:
                yield from self._rows_of(node)
            for dead in self._execution.release(*node.all_input_nodes):
                self._runtime.pop(dead, None)
                self._missing.pop(dead, None)
                if not isinstance(dead.meta.get("val"), (tuple, list)):  # of several results, each is used by itself
                    self._propagated.pop(value_names(dead)[0], None)

    def _runtime_value(self, node: fx.Node) -> object:
        """What the region's model, with all values exposed, or the run has for a node.

        What has no value of its own in the model, such as what an identity reads, PyTorch computes of what has.
        """
        if node.op != "call_function":
            return self._execution.eager[node]
        if node.target is operator.getitem:
            parent, index = node.args
            assert isinstance(parent, fx.Node) and isinstance(index, int)
            if parent in self._missing and value_names(node)[0] not in self._propagated:
                self._missing[node] = dataclasses.replace(
                    self._missing[parent], nodes=[*self._missing[parent].nodes, node]
                )
            return self._runtime[parent][index]  # type: ignore[index]
        eager = self._execution.eager[node]
        found: object = self._actual.get(node)
        if node in self._region_of:
            found = [self._propagated.get(name) for name in value_names(node)]
            found = (
                found
                if isinstance(eager, (tuple, list))
                else found[0]
                if found[0] is not None
                else self._actual.get(node)
            )
        wanted, known = (item if isinstance(item, (tuple, list)) else [item] for item in (eager, found))
        if all(item is not None for item, needed in zip(known, wanted, strict=True) if needed is not None):
            return found
        segment = self._missing[node] = self._segment(node)
        try:
            computed = segment.results(run_eager, segment.given)
        except (*REFUSALS, IndexError):  # what it is given is wrong, as an index may be
            computed = eager
        if not isinstance(computed, (tuple, list)):
            return computed
        return [new if old is None else old for old, new in zip(known, computed, strict=True)]

    def _segment(self, node: fx.Node) -> Segment:
        """A node on what the runtime has where it runs; with it the nodes whose values the model does not have."""
        region = self._region_of.get(node)
        nodes: list[fx.Node] = []
        given: Environment = {}
        for arg in node.all_input_nodes:
            if arg in self._missing:
                nodes += [item for item in self._missing[arg].nodes if item not in nodes]
                given |= self._missing[arg].given
            elif region is not None and self._region_of.get(arg) is region:
                given[arg] = self._runtime[arg]
            else:  # another region gives what its session returned
                actual = self._actual.get(arg)
                given[arg] = self._runtime[arg] if actual is None else actual
        return Segment([*nodes, node], {arg: value for arg, value in given.items() if arg not in nodes})

    def _rows_of(self, node: fx.Node) -> Iterator[Row]:
        """A row for each tensor among a node's results."""
        results = self._execution.eager[node]
        several = isinstance(results, (tuple, list))
        values_of_eager: Sequence[object] = results if isinstance(results, (tuple, list)) else [results]
        is_computed = node.op not in ("placeholder", "get_attr")
        exact = self._execution.exact_of(node) if is_computed else None
        rows: dict[int, Row] = {}
        for i, eager in enumerate(values_of_eager):
            if not isinstance(eager, torch.Tensor):
                continue
            index = i if several else None
            row = self._new_row(node, index, eager)
            if is_computed and not row.is_uninitialized:
                expected = item_of(exact, index)
                assert isinstance(expected, torch.Tensor)
                self._compare(row, node, index, dense(eager), dense(expected))
                row.session_instability = self._repeated.get(row.name)
                self._look_at_nonfinite(row, node, index, eager)
            rows[i] = row
        if is_computed:
            self._compare_local(rows, node)
            self._repeat_alone(node, rows, values_of_eager)
        yield from rows.values()

    def _new_row(self, node: fx.Node, index: int | None, eager: torch.Tensor) -> Row:
        return Row(
            name=f"{node.name}__{index}" if index is not None else node.name,
            operator=operator_name(node) if node.op == "call_function" else node.op,
            module=module_path(node),
            source=source_line(node),
            user_name=user_name(node) or self._result_names.get(node, ""),
            stack=stack(node),
            dtype=str(eager.dtype).removeprefix("torch."),
            shape=tuple(eager.shape),
            inputs=list(dict.fromkeys(name for arg in node.all_input_nodes for name in value_names(arg))),
            has_infinite_argument=_has_infinite_argument(node),
            is_uninitialized=is_uninitialized(node),
            eager_extent=extent(eager),
            converter=_converter(node),
        )

    def _compare(self, row: Row, node: fx.Node, index: int | None, eager: torch.Tensor, exact: torch.Tensor) -> None:
        """Measures what was computed on upstream values: eager's, the model's or PyTorch's, and the session's."""
        region = self._region_of.get(node)
        returned = self._returned(node, index)
        returned = dense(returned) if isinstance(returned, torch.Tensor) else returned
        row.is_output = returned is not None and self._is_returned(node, index)
        same = self._measured.get(node.all_input_nodes[0]) if _only_rearranges(node) else None
        row.eager = (same and same.eager) or _as_right(distance(eager, exact))
        ours = returned
        if region is not None:
            row.region = region.index
            ours = self._propagated.get(row.name)
        if isinstance(ours, torch.Tensor):
            row.complaint = _complaint(ours, eager)
            if not row.complaint:
                row.equals_eager = torch.equal(ours, eager)
                rearranges = region is not None and _only_rearranges(node) and self._rearranges(node, row, ours)
                if rearranges:
                    row.local_onnx = row.local_eager = Measure()
                if row.equals_eager:
                    row.onnx = row.eager
                elif rearranges and same is not None and same.onnx is not None:
                    row.onnx = same.onnx
                else:
                    row.onnx = _propagated(ours, exact, eager)
        row.onnx_extent = row.eager_extent if row.equals_eager else extent(ours)
        self._measured[node] = row
        if region is None:
            return
        inside = self._in_session.pop(row.name, None)
        value = returned if isinstance(returned, torch.Tensor) else inside
        if value is None:
            return
        complaint = _complaint(value, eager)
        if value is returned:
            row.complaint = complaint = row.complaint or complaint
        if not complaint and row.onnx is not None and isinstance(ours, torch.Tensor) and torch.equal(value, ours):
            row.session, row.session_extent = row.onnx, row.onnx_extent
            return
        row.session_extent = extent(value)
        if not complaint:
            row.session = _propagated(value, exact, eager)

    def _rearranges(self, node: fx.Node, row: Row, ours: torch.Tensor) -> bool:
        """Whether a value of the runtime has the elements of what its node rearranges."""
        source = node.all_input_nodes[0]
        same = self._measured.get(source)
        is_eager = same.equals_eager if same else self._runtime[source] is self._execution.eager[source]
        if row.equals_eager and is_eager:
            return True
        computed = run_eager(node, {source: self._runtime[source]})
        return isinstance(computed, torch.Tensor) and computed.dtype == ours.dtype and torch.equal(computed, ours)

    def _compare_local(self, rows: Mapping[int, Row], node: fx.Node) -> None:
        """Measures the error of a node by itself; of one in PyTorch only where its value is wrong."""
        region = self._region_of.get(node)
        if not is_operator(node) or is_uninitialized(node) or any(row.complaint for row in rows.values()):
            return
        if region is None and (is_ordered(node) or all(row.propagated_explained for row in rows.values())):
            return
        if all(row.local_onnx is not None for row in rows.values()):
            return
        if region is None or self._exposed[region.index]:
            segment, actual = self._segment(node), self._runtime[node]
        else:
            given = {arg: self._execution.eager[arg] for arg in node.all_input_nodes}
            segment, actual = Segment([node], given), self._alone_on_eager(node)
        if actual is None or node in self._missing and not isinstance(actual, (tuple, list)):
            return
        try:
            check = NodeCheck(segment)
            found = check.verdicts(actual if isinstance(actual, (tuple, list)) else [actual])
        except (*REFUSALS, IndexError) as error:  # what it is given is wrong, as an index may be
            self._alone[node.name] = first_line(str(error))
            return
        self._execution.inexact.update(check.inexact)
        for i, row in rows.items():
            row.complaint = row.complaint or found[i].complaint
            row.local_onnx, row.local_eager = found[i].ours or Measure(), found[i].eager or check.eager_error(i)
            row.index = found[i].index if found[i].is_wrong else ()

    def _alone_on_eager(self, node: fx.Node) -> object | None:
        """A node's results from a session of its own, on eager's inputs, where ONNX Runtime does not take the region's
        model with all values exposed."""
        values = self._replay.node_values(node, [self._execution.eager[arg] for arg in node.all_input_nodes])
        if isinstance(values, str):
            self._alone[node.name] = values
            return None
        eager = self._execution.eager[node]
        if not isinstance(eager, (tuple, list)):
            return values[0]
        present = iter(values)  # a node's absent results (None) have no ONNX value
        return [None if item is None else next(present) for item in eager]

    def _repeat_alone(self, node: fx.Node, rows: Mapping[int, Row], results: Sequence[object]) -> None:
        """Repeats a node by itself where its region gave other results another time, or the node is wrong."""
        region = self._region_of.get(node)
        if region is None or not is_operator(node):
            return
        repeated = self._run.repeated.get(region.index)
        is_suspicious = repeated is not None and repeated.is_suspicious
        if not is_suspicious and all(row.locally_explained for row in rows.values()):
            return
        given = [self._execution.eager[arg] for arg in node.all_input_nodes]
        found = self._replay.repeat_node(node, given)
        present = [i for i, item in enumerate(results) if item is not None]  # an absent result has no ONNX value
        for position, instability in found.items():
            rows[present[position]].local_instability = instability
        for row in rows.values():
            if not row.locally_explained and row.local_instability is None and row.session_instability is None:
                row.session_instability = self._repeat_exposed(row.name, region)

    def _repeat_exposed(self, name: str, region: Region) -> Instability | None:
        """How a value that is wrong in its region's model comes out another time."""
        compiled, first = self._graph.regions[region.index], self._propagated.get(name)
        arguments = [self._actual[item.node] for item in region.inputs]
        for _ in range(_EXPOSED_TIMES if isinstance(first, torch.Tensor) else 0):
            other = self._replay.region_values(compiled, arguments)[name]
            assert isinstance(first, torch.Tensor) and isinstance(other, torch.Tensor)
            found = instability_of(first, other, compiled.bound.threads)
            if found is not None:
                return found
        return None

    def _look_at_nonfinite(self, row: Row, node: fx.Node, index: int | None, eager: torch.Tensor) -> None:
        """Keeps some elements that are NaN or infinite, with what they were computed of."""
        names = {arg: value_names(arg)[0] for arg in node.all_input_nodes if value_names(arg)}
        ours = self._propagated.get(row.name, self._returned(node, index))
        if row.eager_extent is not None and not row.eager_extent.is_finite:
            result, values = eager, self._execution.eager
        elif row.onnx_extent is not None and not row.onnx_extent.is_finite and isinstance(ours, torch.Tensor):
            result, values = ours, self._runtime
        else:
            return
        found = nonfinite_elements(dense(result), [(name, values.get(arg)) for arg, name in names.items()])
        row.nonfinite_elements = [msgspec.convert(element, ElementEntry) for element in found]

    def _returned(self, node: fx.Node, index: int | None) -> object | None:
        """What the run returned for a result: a region's output, or a value PyTorch computed."""
        if node in self._actual:
            return item_of(self._actual[node], index)
        users = (user for user in node.users if index is not None and _is_item(user, index))
        return next((self._actual[user] for user in users if user in self._actual), None)

    def _is_returned(self, node: fx.Node, index: int | None) -> bool:
        if node in self._returned_nodes:
            return True
        return index is not None and any(_is_item(user, index) for user in node.users if user in self._returned_nodes)

    def _expose(self, region: Region) -> None:
        """Gets all values of a region: in its exported model, and in the session that ran."""
        if region.index in self._exposed:
            return
        compiled = self._graph.regions[region.index]
        arguments = [self._actual[item.node] for item in region.inputs]
        values: Mapping[str, object] = {}
        self._exposed[region.index] = False
        try:
            values = self._replay.region_values(compiled, arguments)
            self._propagated.update(values)
            self._exposed[region.index] = True
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


def _only_rearranges(node: fx.Node) -> bool:
    """Whether a node's result has the elements of what it reads, whose error is that of what it reads."""
    if name_of(node) not in _REARRANGING or len(node.all_input_nodes) != 1:
        return False
    fakes = node.meta.get("val"), node.all_input_nodes[0].meta.get("val")
    return all(isinstance(fake, torch.Tensor) for fake in fakes) and fakes[0].dtype == fakes[1].dtype


def _converter(node: fx.Node) -> str:
    function = registered_converter(node.target)
    return written_at(function) if function is not None else ""


def _propagated(value: torch.Tensor, exact: torch.Tensor, eager: torch.Tensor) -> Measure:
    return distance(value, exact, eager, group_size=group_size_of(eager.shape))


def _as_right(found: Measure) -> Measure:
    """Eager's own distance to float64 is that of a right value: no share of a tolerance is told."""
    return Measure(found.max_abs, found.max_rel, found.rmse, found.max_ulp, found.nonfinite, found.scale)


def item_of(results: Any, index: int | None) -> Any:
    """One of a node's results; ``None`` for the result of a node that has one."""
    return results if index is None else results[index]


def _is_item(node: fx.Node, index: int) -> bool:
    return node.target is operator.getitem and node.args[1] == index


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
