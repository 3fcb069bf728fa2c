"""Makes the rows of a comparison: what is known of each value."""

from __future__ import annotations

import cmath
import operator
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from passes.engine.origins import position_of, written_at

from ..exporter.registration import registered_converter
from ..exporter.translate import find_translation, value_names
from ..exporter.upstream_faults import is_uninitialized
from ..graphs import descriptors
from ..graphs.artifacts import is_operator, operator_name
from ..graphs.locations import module_path, short_file, source_line, stack, user_name
from ..numerics.arrays import as_array, dense, index_of
from ..numerics.element_records import Extent
from ..numerics.operator_facts import is_pointwise
from ..numerics.segments import Judged
from ..numerics.value_range import extent, mean_difference, nonfinite_elements
from ..pipeline.stage_data import CompiledGraph
from .recorded_run import RecordedRun
from .rows import MOST_WRONG_NODES, Row


class RowMaker:
    """Makes the rows of one run of a graph. ``opset`` is that of its models."""

    def __init__(self, graph: CompiledGraph, run: RecordedRun, opset: int) -> None:
        self._run, self._opset = run, opset
        self._region_of = {node: item.region.index for item in graph.regions for node in item.region.nodes}
        self._returned = set(graph.module.graph.output_node().all_input_nodes)
        self._result_names = descriptors.result_names(graph.module)
        self._described = 0

    def row(self, judged: Judged) -> Row | None:
        """The row of a value; ``None`` for one that is neither a tensor nor a wrong number."""
        node, eager = judged.node, judged.expected
        if not isinstance(eager, torch.Tensor):
            if not judged.is_wrong or not isinstance(eager, (bool, int, float)):
                return None
            eager = torch.tensor(eager)
        row = self._facts(node, judged.index, eager)
        row.eager_extent = row.extent = extent(eager)
        if judged.value is None or (node.op == "call_function" and not is_operator(node)):
            row.origin = row.origin if row.is_returned or not row.is_computed else ""
            self._add_nonfinite(row, judged, eager)
            return row
        row.segment = [item.name for item in judged.segment[:-1] if is_operator(item)]
        row.complaint, row.step = judged.complaint, judged.by
        row.error, row.eager = judged.found, judged.of_eager
        row.equals_eager = judged.by == "equal" and not judged.complaint
        value = judged.value
        if isinstance(value, torch.Tensor) and not row.equals_eager and not judged.complaint:
            row.extent, row.mean_difference = extent(value), mean_difference(value, eager)
        if judged.is_wrong and isinstance(value, torch.Tensor) and not judged.complaint:
            self._describe(row, judged, value)
        self._add_nonfinite(row, judged, eager)
        return row

    def _facts(self, node: fx.Node, index: int | None, eager: torch.Tensor) -> Row:
        region = self._region_of.get(node)
        is_computed = node.op not in ("placeholder", "get_attr")
        nodes = {node, *(user for user in node.users if index is not None and _is_item(user, index))}
        return Row(
            name=node.name if index is None else f"{node.name}__{index}",
            operator=operator_name(node) if node.op == "call_function" else node.op,
            module=module_path(node),
            source=source_line(node),
            user_name=user_name(node) or self._result_names.get(node, ""),
            stack=stack(node),
            dtype=str(eager.dtype).removeprefix("torch."),
            shape=tuple(eager.shape),
            region=region,
            origin=("PyTorch" if region is None else "session") if is_computed else "argument",
            inputs=list(dict.fromkeys(name for arg in node.all_input_nodes for name in value_names(arg))),
            is_output=is_computed and not nodes.isdisjoint(self._returned),
            has_infinite_argument=_has_infinite_argument(node),
            is_uninitialized=is_uninitialized(node),
            converter=self._converter(node) if is_computed else "",
            is_registered=registered_converter(node.target) is not None,
            is_returned=not nodes.isdisjoint(self._run.values),
        )

    def _converter(self, node: fx.Node) -> str:
        if (registered := registered_converter(node.target)) is not None:
            return written_at(registered)
        function = find_translation(node.target, self._opset) if node in self._region_of else None
        file, line = position_of(function) if callable(function) else ("", 0)
        return f"{short_file(file)}:{line}" if file else ""

    def _describe(self, row: Row, judged: Judged, value: torch.Tensor) -> None:
        """Adds the place of the worst element, and what the wrong elements have in common."""
        row.index = index_of(judged.found.position, value)
        if self._described == MOST_WRONG_NODES:
            return
        self._described += 1
        read: dict[str, Any] = {}
        if is_pointwise(judged.node) and len(judged.segment) == 1:
            given = ((user_name(arg) or arg.name, judged.inputs.get(arg)) for arg in judged.node.all_input_nodes)
            read = {name: as_array(item) for name, item in given if isinstance(item, torch.Tensor)}
        row.wrong_elements = judged.verdict(read).elements

    def _add_nonfinite(self, row: Row, judged: Judged, eager: torch.Tensor) -> None:
        """Adds some elements that are NaN or infinite, with the elements they were computed from."""
        if _is_finite(row.eager_extent) and _is_finite(row.extent):
            return
        ours = judged.value if isinstance(judged.value, torch.Tensor) else eager
        result = dense(eager if not _is_finite(row.eager_extent) else ours)
        read = [(value_names(arg)[0], value) for arg, value in judged.read.items() if value_names(arg)]
        row.nonfinite_elements = nonfinite_elements(result, read)


def _is_finite(found: Extent | None) -> bool:
    return found is None or found.is_finite


def _is_item(node: fx.Node, index: int) -> bool:
    return node.target is operator.getitem and node.args[1] == index


def _has_infinite_argument(node: fx.Node) -> bool:
    """Whether a number among a node's arguments is infinite or NaN."""
    numbers = [leaf for leaf in pytree.tree_leaves((node.args, node.kwargs)) if isinstance(leaf, (float, complex))]
    return not all(map(cmath.isfinite, numbers))
