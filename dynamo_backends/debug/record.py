"""What ``onnx_compiler(record=...)`` hands to the user: one record for each compiled graph."""

from __future__ import annotations

import dataclasses

import onnx
import onnx_ir as ir
import torch
from torch import fx
from torch.utils import _pytree as pytree

from ..artifacts import CompiledGraph, Runner
from ..observer import Observer
from .rows import GraphComparison


@dataclasses.dataclass
class Run:
    """The inputs and outputs of one call of a graph; tensors are copies, so later changes in place do not show."""

    inputs: list[object]
    outputs: list[object]


@dataclasses.dataclass
class Record:
    """One compiled graph.

    Attributes:
        index: number of the Dynamo graph; a forward and its backward share it.
        direction: ``forward``, ``backward`` or ``inference``.
        graph_module: the ATen graph after the post-grad passes.
        onnx_models: the exported model of each region, in order.
        runs: inputs and outputs of each call.
        comparison: the comparison with eager and float64 of the last compared run; ``None`` without ``debug=True``.
    """

    index: int
    direction: str
    graph_module: fx.GraphModule
    onnx_models: list[onnx.ModelProto]
    runs: list[Run] = dataclasses.field(default_factory=list)
    comparison: GraphComparison | None = None

    @property
    def onnx_model(self) -> onnx.ModelProto:
        """The model of a graph that is one region.

        Raises:
            ValueError: the graph is split into several regions, or has none; see ``onnx_models``.
        """
        if len(self.onnx_models) != 1:
            raise ValueError(f"the {self.direction} graph has {len(self.onnx_models)} regions; use onnx_models")
        return self.onnx_models[0]


def make_record(graph: CompiledGraph) -> Record:
    models = [ir.to_proto(region.model) for region in graph.regions]
    return Record(graph.name.index, graph.name.direction, graph.module, models)


def snapshot(values: object) -> list[object]:
    """Copies of a list's tensors, detached, with their strides; numbers as they are."""
    return pytree.tree_map(
        lambda value: (
            value.detach().clone(memory_format=torch.preserve_format) if isinstance(value, torch.Tensor) else value
        ),
        list(values) if isinstance(values, (list, tuple)) else [values],
    )


class RecordObserver(Observer):
    """Appends a ``Record`` for each compiled graph to the user's list, and each run to its record."""

    def __init__(self, records: list[object]) -> None:
        self._records = records

    def runner(self, graph: CompiledGraph) -> Runner:
        record = make_record(graph)
        self._records.append(record)

        def run(args: list[object]) -> object:
            inputs = snapshot(args)
            outputs = graph.run(args)
            record.runs.append(Run(inputs, snapshot(outputs)))
            return outputs

        return run
