"""The rows of a comparison: eager, float64 and ONNX Runtime in lockstep, node by node.

A row has up to three errors of a value. *Propagated*: of the value in the region's model, run with every value as an
output, against float64. *Local*: of the same value against the node in PyTorch, on the node's inputs in the model; this
is the error of the node alone. *Session*: of the value that the session that ran returned, or has inside.
"""

from __future__ import annotations

import cmath
import dataclasses
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import fx
from torch.utils import _pytree as pytree

from ..dumps.schema import ElementEntry
from ..errors import CompiledNodesError, SessionError, first_line
from ..exporter.registration import position_of, registered_converter, written_at
from ..exporter.translate import find_translation, value_names
from ..exporter.upstream_faults import is_uninitialized
from ..graphs import aot
from ..graphs.artifacts import CompiledGraph, Region, is_operator, operator_name
from ..graphs.layout import hint_of
from ..graphs.locations import module_path, short_file, source_line, stack, user_name
from ..numerics.exact import KERNEL_ERRORS, Environment, run_eager
from ..numerics.graph_execution import FxExecution
from ..numerics.local_error import NodeCheck, Segment, name_without_overload
from ..numerics.measure import Measure, group_size_of
from ..numerics.tensor_measure import dense, measure_tensors
from ..numerics.value_range import extent, nonfinite_elements
from ..numerics.verdicts import verdict
from ..partition.regions import is_ordered
from .interpreter import flat
from .node_sessions import NodeSessions
from .recorded_run import RecordedRun
from .repeated_runs import instability_of
from .rows import MOST_WRONG_NODES, Row

_REARRANGING = frozenset(
    {"view", "_unsafe_view", "reshape", "t", "transpose", "permute", "squeeze", "unsqueeze", "clone", "alias", "detach"}
)
"""Operators whose result has the elements of their first argument, in another shape or layout."""

_REGION_REPEATS = 4
"""Repeats of a region with its values as outputs."""


_MOST_BYTES = 2**29
"""The size of the values of a region that are computed at once; more take several runs."""


def recorded_values(graph: CompiledGraph, run: RecordedRun) -> dict[fx.Node, object]:
    """The values that a comparison does not recompute: arguments, random numbers, and side effects."""
    return {
        node: run.values[node]
        for node in graph.module.graph.nodes
        if node in run.values and (node.op in ("placeholder", "get_attr") or is_ordered(node))
    }


@dataclasses.dataclass
class _Value:
    """A computed tensor, and its row."""

    row: Row  # gets the measures
    node: fx.Node
    index: int | None  # the position among the node's results if it has several
    eager: torch.Tensor  # dense, as ``exact``
    exact: torch.Tensor
    returned: object  # what the run returned for it: a region's output, or a value PyTorch computed; else ``None``

    def errors(self, *actual: torch.Tensor) -> tuple[list[Measure], Measure]:
        """The errors of other computations of the value, with upstream errors, and eager's."""
        return measure_tensors(actual, self.exact, self.eager, group_size=group_size_of(self.eager.shape))

    def describe(self, actual: torch.Tensor) -> None:
        """Describes the wrong elements of another computation of the value."""
        self.row.wrong_elements = verdict(actual, self.eager, self.exact).elements


class Lockstep:
    """Runs eager, float64 and ONNX Runtime one node at a time. Values are freed after their last use.

    Attributes:
        exact: after all rows, the graph's results in float64, by their keys; without gradients and saved values.
    """

    def __init__(self, graph: CompiledGraph, run: RecordedRun, sessions: NodeSessions) -> None:
        self.exact: dict[object, object] | None = None
        self._graph = graph
        self._run = run
        self._actual = run.values
        self._sessions = sessions
        recorded = recorded_values(graph, run)
        self._execution = FxExecution(graph.module, (), torch.get_rng_state(), recorded=recorded)
        self._session_instability = {
            value_names(compiled.region.outputs[position].node)[0]: instability
            for compiled in graph.regions
            if (repeated := run.repeated.get(compiled.region.index)) is not None
            for position, instability in repeated.unstable.items()
        }
        self._region_of = {node: region.region for region in graph.regions for node in region.region.nodes}
        self._in_model: dict[str, object] = {}  # values of regions' models, by name
        self._in_session: dict[str, torch.Tensor] = {}  # values of the sessions that ran
        self._runtime: Environment = {}
        self._missing: dict[fx.Node, Segment] = {}  # nodes whose values the model does not have
        numbers = _sizes_in_run(graph, run)
        parts = (part for region in graph.regions for part in _parts_of(region.region, numbers))
        self._parts = {node: part for part in parts for node in part}
        self._exposed: dict[int, bool] = {}  # whether a region's model runs with its values as outputs
        self._measured: dict[fx.Node, Row] = {}
        self._described = 0
        self._unchecked: list[str] = []
        self._without_session: dict[str, str] = {}
        self._returned_nodes = set(graph.module.graph.output_node().all_input_nodes)
        self._result_names = aot.result_names(graph.module)
        for written in aot.keys_of_writes(graph.module):
            self._execution.hold(written)  # until the end

    def unchecked(self) -> list[str]:
        """What could not be compared, and why; complete after the rows."""
        alone = [f"{name} does not run by itself: {why}" for name, why in self._without_session.items()]
        inexact = [
            f"eager is the reference of {name}, not float64: {why}" for name, why in self._execution.inexact.items()
        ]
        return list(dict.fromkeys([*self._unchecked, *alone, *inexact]))

    def rows(self) -> Iterator[list[Row]]:
        """For each node but the output, in execution order, a row for each tensor, and for a wrong symbolic integer."""
        for node in self._graph.module.graph.nodes:
            if node.op == "output":
                module = self._graph.module
                results = zip(aot.keys_of_results(module), flat(node.args[0]), strict=True)
                written = ((key, new) for new, key in aot.keys_of_writes(module).items())
                self.exact = {
                    key: self._execution.exact_of(leaf) if isinstance(leaf, fx.Node) else leaf
                    for key, leaf in (*results, *written)
                    if key not in (None, "saved") and not (isinstance(key, tuple) and key[0] == "gradient")
                }
                return
            self._execution.run(node)
            region = self._region_of.get(node)
            if region is not None:
                self._expose(region, node)
            self._runtime[node] = self._runtime_value(node)
            yield self._rows_of(node) if is_operator(node) else []
            for dead in self._execution.release(*node.all_input_nodes):
                self._runtime.pop(dead, None)
                self._missing.pop(dead, None)
                if not isinstance(dead.meta.get("val"), (tuple, list)):  # several results have users of their own
                    self._in_model.pop(value_names(dead)[0], None)

    def _runtime_value(self, node: fx.Node) -> object:
        """The value of a node in the region's model or in the run.

        PyTorch computes what the model does not have, such as the input of an identity, from what it has.
        """
        if node.op != "call_function":
            return self._execution.eager[node]
        if node.target is operator.getitem:
            parent, index = node.args
            assert isinstance(parent, fx.Node) and isinstance(index, int)
            if parent in self._missing and value_names(node)[0] not in self._in_model:
                segment = self._missing[parent]
                self._missing[node] = dataclasses.replace(segment, nodes=[*segment.nodes, node])
            return self._runtime[parent][index]  # type: ignore[index]
        eager = self._execution.eager[node]
        found: object = self._actual.get(node)
        if node in self._region_of:
            in_model = [self._in_model.get(name) for name in value_names(node)]
            if isinstance(eager, (tuple, list)):
                found = in_model
            elif in_model[0] is not None:
                found = in_model[0]
        wanted, known = (item if isinstance(item, (tuple, list)) else [item] for item in (eager, found))
        if all(item is not None for item, needed in zip(known, wanted, strict=True) if needed is not None):
            return found
        segment = self._missing[node] = self._segment(node)
        try:
            computed = segment.results(run_eager, segment.given)
        except (*KERNEL_ERRORS, IndexError):  # the inputs are wrong, such as an index
            computed = eager
        if not isinstance(computed, (tuple, list)):
            return computed
        return [new if old is None else old for old, new in zip(known, computed, strict=True)]

    def _segment(self, node: fx.Node) -> Segment:
        """A node with its inputs in the model, and the nodes before it whose values the model does not have."""
        region = self._region_of.get(node)
        nodes: list[fx.Node] = []
        given: Environment = {}
        for arg in node.all_input_nodes:
            if arg in self._missing:
                nodes += [item for item in self._missing[arg].nodes if item not in nodes]
                given |= self._missing[arg].given
            elif region is not None and self._region_of.get(arg) is region:
                given[arg] = self._runtime[arg]
            else:  # what another region's session returned
                actual = self._actual.get(arg)
                given[arg] = self._runtime[arg] if actual is None else actual
        return Segment([*nodes, node], {arg: value for arg, value in given.items() if arg not in nodes})

    def _rows_of(self, node: fx.Node) -> list[Row]:
        results = self._execution.eager[node]
        several = isinstance(results, (tuple, list))
        eager_values: Sequence[object] = results if isinstance(results, (tuple, list)) else [results]
        is_computed = node.op not in ("placeholder", "get_attr")
        exact_values = self._execution.exact_of(node) if is_computed else None
        rows: dict[int, Row] = {}
        for i, eager in enumerate(eager_values):
            if isinstance(eager, int) and not several:
                return self._wrong_number(node, eager)
            if not isinstance(eager, torch.Tensor):
                continue
            index = i if several else None
            row = rows[i] = self._new_row(node, index, eager)
            if is_computed and not row.is_uninitialized:
                exact, returned = item_of(exact_values, index), self._returned(node, index)
                assert isinstance(exact, torch.Tensor)
                returned = dense(returned) if isinstance(returned, torch.Tensor) else returned
                value = _Value(row, node, index, dense(eager), dense(exact), returned)
                self._measure(value)
                row.session_instability = self._session_instability.get(row.name)
                self._add_nonfinite_elements(value)
        if is_computed:
            self._measure_local(rows, node)
            self._repeat_alone(node, rows, eager_values)
        return list(rows.values())

    def _wrong_number(self, node: fx.Node, eager: int) -> list[Row]:
        """A row for a symbolic integer or boolean that the region's model computes wrongly from the numbers it has."""
        region, actual = self._region_of.get(node), self._runtime[node]
        if region is None:
            return []
        expected = run_eager(node, {arg: self._runtime[arg] for arg in node.all_input_nodes})
        if actual == expected:
            return []
        row = self._new_row(node, None, torch.tensor(eager))
        row.region, row.complaint = region.index, f"{actual} instead of {expected}"
        return [row]

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
            converter=self._converter(node),
            is_registered=registered_converter(node.target) is not None,
        )

    def _converter(self, node: fx.Node) -> str:
        if (registered := registered_converter(node.target)) is not None:
            return written_at(registered)
        function = find_translation(node.target, self._sessions.opset) if node in self._region_of else None
        file, line = position_of(function) if callable(function) else ("", 0)
        return f"{short_file(file)}:{line}" if file else ""

    def _measure(self, value: _Value) -> None:
        """Measures eager, the model (or PyTorch in the run) and the session, each with upstream errors."""
        row, node = value.row, value.node
        region = self._region_of.get(node)
        rearranges = _only_rearranges(node)
        source = self._measured.get(node.all_input_nodes[0]) if rearranges else None
        row.is_output = value.returned is not None and self._is_returned(node, value.index)
        in_model, in_session = value.returned, None
        if region is not None:
            row.region = region.index
            inside = self._in_session.pop(row.name, None)
            in_model = self._in_model.get(row.name)
            in_session = value.returned if isinstance(value.returned, torch.Tensor) else inside
        model, session = (_comparable(item, value.eager) for item in (in_model, in_session))
        row.complaint = _complaint(in_model, value.eager)
        if in_session is value.returned:
            row.complaint = row.complaint or _complaint(in_session, value.eager)
        row.equals_eager = model is not None and torch.equal(model, value.eager)
        is_same = model is not None and session is not None and torch.equal(session, model)
        shares_error = rearranges and model is not None and region is not None and self._rearranges(value, model)
        if shares_error:
            row.local_onnx = row.local_eager = Measure()
        of_source = source.onnx if shares_error and source is not None else None
        measured = [] if model is None or row.equals_eager or of_source is not None else [model]
        measured += [] if session is None or is_same else [session]
        errors: list[Measure] = []
        row.eager = source.eager if source is not None else None
        if measured or row.eager is None:
            errors, row.eager = value.errors(*measured)
        if model is not None:
            row.onnx = row.eager if row.equals_eager else of_source or errors.pop(0)
        row.onnx_extent = row.eager_extent if row.equals_eager else extent(in_model)
        self._measured[node] = row
        self._describe_if_wrong(value, row.onnx, model)
        if session is not None:
            row.session = row.onnx if is_same else errors.pop(0)
            self._describe_if_wrong(value, row.session, session)
        if in_session is not None:
            row.session_extent = row.onnx_extent if is_same else extent(in_session)

    def _describe_if_wrong(self, value: _Value, found: Measure | None, actual: torch.Tensor | None) -> None:
        """Describes the wrong elements of a value whose inputs are right."""
        is_wrong = found is not None and not found.is_rounding
        if actual is not None and is_wrong and self._reads_right_values(value.node):
            value.describe(actual)

    def _reads_right_values(self, node: fx.Node) -> bool:
        """Whether no input of a node is wrong: the fault is in the node, or in a rewrite of it."""
        rows = (self._measured.get(arg) for arg in node.all_input_nodes)
        return all(row is None or (row.explained and row.propagated_explained) for row in rows)

    def _rearranges(self, value: _Value, in_model: torch.Tensor) -> bool:
        """Whether a value of the model has the elements of the value that its node rearranges."""
        source = value.node.all_input_nodes[0]
        row = self._measured.get(source)
        is_eager = row.equals_eager if row else self._runtime[source] is self._execution.eager[source]
        if value.row.equals_eager and is_eager:
            return True
        expected = run_eager(value.node, {source: self._runtime[source]})
        is_tensor = isinstance(expected, torch.Tensor) and expected.dtype == in_model.dtype
        return is_tensor and torch.equal(expected, in_model)

    def _measure_local(self, rows: Mapping[int, Row], node: fx.Node) -> None:
        """Measures the error of a node alone; of a node in PyTorch only if its value is wrong."""
        region = self._region_of.get(node)
        if not is_operator(node) or is_uninitialized(node) or any(row.complaint for row in rows.values()):
            return
        if region is None and (is_ordered(node) or all(row.propagated_explained for row in rows.values())):
            return
        if all(row.local_onnx is not None for row in rows.values()):
            return
        if region is None or self._exposed[region.index]:
            if node in self._missing and not isinstance(self._runtime[node], (tuple, list)):
                return
            segment, actual = self._segment(node), self._runtime[node]
        else:
            given = {arg: self._execution.eager[arg] for arg in node.all_input_nodes}
            segment, actual = Segment([node], given), self._alone_on_eager(node)
        if actual is None:
            return
        try:
            check = NodeCheck(segment)
            found = check.verdicts(actual if isinstance(actual, (tuple, list)) else [actual])
        except (*KERNEL_ERRORS, IndexError) as error:  # the inputs are wrong, such as an index
            self._without_session[node.name] = first_line(str(error))
            return
        self._execution.inexact.update(check.inexact)
        for i, row in rows.items():
            row.complaint = row.complaint or found[i].complaint
            row.local_onnx, row.local_eager = found[i].ours or Measure(), found[i].eager or check.eager_error(i)
            row.index = found[i].index if found[i].is_wrong else ()
            if found[i].is_wrong and self._described < MOST_WRONG_NODES:
                self._described += 1
                row.wrong_elements = found[i].elements

    def _alone_on_eager(self, node: fx.Node) -> object | None:
        """A node's results on eager's inputs, from a session of its own.

        For regions that ONNX Runtime rejects with every value as an output.
        """
        values = self._sessions.node_values(node, [self._execution.eager[arg] for arg in node.all_input_nodes])
        if isinstance(values, str):
            self._without_session[node.name] = values
            return None
        eager = self._execution.eager[node]
        if not isinstance(eager, (tuple, list)):
            return values[0]
        present = iter(values)  # a result that is ``None`` has no ONNX value
        return [None if item is None else next(present) for item in eager]

    def _repeat_alone(self, node: fx.Node, rows: Mapping[int, Row], results: Sequence[object]) -> None:
        """Repeats a node alone if its region is unstable, or the node is wrong."""
        region = self._region_of.get(node)
        if region is None or not is_operator(node):
            return
        repeated = self._run.repeated.get(region.index)
        is_suspicious = repeated is not None and repeated.is_suspicious
        if not is_suspicious and all(row.locally_explained for row in rows.values()):
            return
        found = self._sessions.repeat_node(node, [self._execution.eager[arg] for arg in node.all_input_nodes])
        present = [i for i, item in enumerate(results) if item is not None]  # ``None`` has no ONNX value
        for position, instability in found.items():
            rows[present[position]].local_instability = instability
        for row in rows.values():
            if not (row.locally_explained or row.unstable_alone or row.unstable_in_session):
                self._repeat_in_model(row, node, region)

    def _repeat_in_model(self, row: Row, node: fx.Node, region: Region) -> None:
        """Repeats a region's model with the same values as outputs, until the value differs by more than rounding."""
        compiled, first = self._graph.regions[region.index], self._in_model.get(row.name)
        if not isinstance(first, torch.Tensor):
            return
        arguments = [self._actual[item.node] for item in region.inputs]
        for _ in range(_REGION_REPEATS):
            try:
                second = self._sessions.region_values(compiled, arguments, self._parts[node])[row.name]
            except SessionError as error:
                self._unchecked.append(f"{row.name} in repeated runs: {first_line(str(error))}")
                return
            assert isinstance(second, torch.Tensor)
            row.session_instability = instability_of(first, second, compiled.bound.threads) or row.session_instability
            if row.unstable_in_session:
                return

    def _add_nonfinite_elements(self, value: _Value) -> None:
        """Adds some elements that are NaN or infinite, with the elements they were computed from."""
        row, in_model = value.row, self._in_model.get(value.row.name, value.returned)
        if row.eager_extent is not None and not row.eager_extent.is_finite:
            result, values = value.eager, self._execution.eager
        elif row.onnx_extent is not None and not row.onnx_extent.is_finite and isinstance(in_model, torch.Tensor):
            result, values = dense(in_model), self._runtime
        else:
            return
        inputs = [(value_names(arg)[0], values.get(arg)) for arg in value.node.all_input_nodes if value_names(arg)]
        found = nonfinite_elements(result, inputs)
        row.nonfinite_elements = [msgspec.convert(element, ElementEntry) for element in found]

    def _returned(self, node: fx.Node, index: int | None) -> object | None:
        """See ``_Value.returned``."""
        if node in self._actual:
            return item_of(self._actual[node], index)
        users = (user for user in node.users if index is not None and _is_item(user, index))
        return next((self._actual[user] for user in users if user in self._actual), None)

    def _is_returned(self, node: fx.Node, index: int | None) -> bool:
        if node in self._returned_nodes:
            return True
        return index is not None and any(_is_item(user, index) for user in node.users if user in self._returned_nodes)

    def _expose(self, region: Region, node: fx.Node) -> None:
        """Computes a node's part of a region's values: in the exported model, and in the session that ran."""
        part = self._parts.get(node)
        if part is None or node is not part[0] or not self._exposed.get(region.index, True):
            return
        compiled = self._graph.regions[region.index]
        arguments = [self._actual[item.node] for item in region.inputs]
        values: Mapping[str, object] = {}
        self._exposed[region.index] = False
        try:
            values = self._sessions.region_values(compiled, arguments, part)
            self._in_model.update(values)
            self._exposed[region.index] = True
        except SessionError as error:  # local errors and outputs are still compared
            self._unchecked.append(f"the values inside region_{region.index}: {first_line(str(error))}")
        try:
            inside = self._sessions.session_values(compiled, self._run.session_of(compiled), arguments, part)
        except CompiledNodesError:  # one kernel of a provider, whose results are compared
            return
        except SessionError as error:
            self._unchecked.append(f"the values inside region_{region.index}'s session: {first_line(str(error))}")
            return
        for name, value in inside.items():  # equal values share memory
            known = values.get(name)
            is_known = isinstance(known, torch.Tensor) and torch.equal(known, value)
            self._in_session[name] = known if is_known else value


def _sizes_in_run(graph: CompiledGraph, run: RecordedRun) -> dict[object, int]:
    """The symbolic sizes of a graph's arguments."""
    numbers: dict[object, int] = {}
    for node in graph.module.graph.find_nodes(op="placeholder"):
        fake, value = node.meta.get("val"), run.values[node]
        sizes, known = ([*item.shape] if isinstance(item, torch.Tensor) else [item] for item in (fake, value))
        for size, number in zip(sizes, known, strict=True):
            if isinstance(size, torch.SymInt) and not size.node.is_nested_int():
                numbers[size.node.expr] = number
    return numbers


def _parts_of(region: Region, numbers: Mapping[object, int]) -> list[list[fx.Node]]:
    """The operators of a region, in parts whose results take no more than ``_MOST_BYTES``, or of one operator.

    ``numbers`` are the values of symbolic sizes.
    """
    parts: list[list[fx.Node]] = []
    left = 0
    for node in region.operators:
        results = [item for item in pytree.tree_leaves(node.meta.get("val")) if isinstance(item, torch.Tensor)]
        size = sum(math.prod(_number(size, numbers) for size in item.shape) * item.element_size() for item in results)
        if not parts or size > left:
            parts.append([])
            left = _MOST_BYTES
        parts[-1].append(node)
        left -= size
    return parts


def _number(size: int | torch.SymInt, numbers: Mapping[object, int]) -> int:
    """A size in this run; for one that depends on data, that of the first call, or 0."""
    if isinstance(size, int) or size.node.is_nested_int():
        return hint_of(size) or 0
    number = size.node.expr.subs(numbers)
    return int(number) if number.is_Integer else size.node.hint or 0


def _only_rearranges(node: fx.Node) -> bool:
    """Whether a node's result has the elements of its only input, and so its error."""
    if name_without_overload(node) not in _REARRANGING or len(node.all_input_nodes) != 1:
        return False
    fakes = node.meta.get("val"), node.all_input_nodes[0].meta.get("val")
    return all(isinstance(fake, torch.Tensor) for fake in fakes) and fakes[0].dtype == fakes[1].dtype


def item_of(results: Any, index: int | None) -> Any:
    """The result at a position; with ``None``, the only result."""
    return results if index is None else results[index]


def _is_item(node: fx.Node, index: int) -> bool:
    return node.target is operator.getitem and node.args[1] == index


def _has_infinite_argument(node: fx.Node) -> bool:
    """Whether a number among a node's arguments is infinite or NaN."""
    numbers = [leaf for leaf in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(leaf, (float, complex))]
    return not all(map(cmath.isfinite, numbers))


def _comparable(actual: object, eager: torch.Tensor) -> torch.Tensor | None:
    """A tensor that can be compared with eager's, see ``_complaint``."""
    return actual if isinstance(actual, torch.Tensor) and not _complaint(actual, eager) else None


def _complaint(actual: object, eager: torch.Tensor) -> str:
    """Why the elements of a tensor cannot be compared with eager's, if there is a reason."""
    if not isinstance(actual, torch.Tensor):
        return ""
    if actual.dtype != eager.dtype:
        return f"dtype {actual.dtype} instead of {eager.dtype}"
    if actual.shape != eager.shape:
        return f"shape {tuple(actual.shape)} instead of {tuple(eager.shape)}"
    return ""
