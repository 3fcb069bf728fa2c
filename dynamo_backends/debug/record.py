"""The records that ``onnx_compiler(record=...)`` appends to the user's list: one for each compiled graph."""

from __future__ import annotations

import dataclasses
import weakref

import onnx
import onnx_ir as ir
import torch
from torch import fx
from torch.utils import _pytree as pytree

from ..common.fork_safety import Lock
from ..common.safety_net import net
from ..common.strides import element_bytes
from ..graphs.artifacts import Runner
from ..partition.program import LoadedProgram
from ..pipeline.observer import Observer
from ..pipeline.stage_data import CompiledGraph
from .recorded_run import can_be_compared
from .rows import GraphComparison


@dataclasses.dataclass
class RecordedCall:
    """The inputs and outputs of one call of a graph, as copies.

    Runs share the copy of a tensor that did not change between calls, such as a weight.
    """

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
        comparison: the comparison with eager and float64 of the first wrong run, else of the last compared run;
            ``None`` without ``debug=True``.
    """

    index: int
    direction: str
    graph_module: fx.GraphModule
    onnx_models: list[onnx.ModelProto]
    runs: list[RecordedCall] = dataclasses.field(default_factory=list)
    comparison: GraphComparison | None = None

    @property
    def onnx_model(self) -> onnx.ModelProto:
        """The model of a graph that is one region.

        Raises:
            ValueError: the graph has several regions, or none; see ``onnx_models``.
        """
        if len(self.onnx_models) != 1:
            raise ValueError(f"the {self.direction} graph has {len(self.onnx_models)} regions; use onnx_models")
        return self.onnx_models[0]


class Snapshots:
    """Copies of tensors, for one list of records.

    A tensor whose bits equal the last copy of the same memory gets that copy again: a weight is copied once for all
    calls, and once for a forward that saves it and the backward that reads it. Only the runs keep copies alive.
    """

    def __init__(self) -> None:
        self._last: weakref.WeakValueDictionary[object, torch.Tensor] = weakref.WeakValueDictionary()
        self._lock = Lock()

    def of(self, values: object) -> list[object]:
        """The values as a list, with detached copies of its tensors, strides preserved."""
        listed = list(values) if isinstance(values, (list, tuple)) else [values]
        return pytree.tree_map_only(torch.Tensor, self._copy, listed)

    def _copy(self, value: torch.Tensor) -> torch.Tensor:
        value = value.detach()
        if value.layout is not torch.strided:
            return value.clone()
        memory = (value.device, value.data_ptr(), value.shape, value.stride())
        key = (memory, value.dtype, value.is_neg(), value.is_conj())
        with self._lock:
            last = self._last.get(key)
            if last is None or not torch.equal(element_bytes(last), element_bytes(value)):
                last = value.clone(memory_format=torch.preserve_format)
                self._last[key] = last
            return last


class RecordObserver(Observer):
    """Appends a ``Record`` of each compiled graph to the user's list, and each run to its record."""

    def __init__(self, records: list[object]) -> None:
        self._records = records
        self._snapshots = Snapshots()

    def runner(self, graph: CompiledGraph, loaded: LoadedProgram) -> Runner:
        return self.recorded(loaded.run, self.add(graph))

    def add(self, graph: CompiledGraph) -> Record:
        """A new record, appended to the list."""
        models = [ir.to_proto(region.model) for region in graph.regions]
        record = Record(graph.name.index, graph.name.direction, graph.module, models)
        self._records.append(record)
        return record

    def recorded(self, run_graph: Runner, record: Record) -> Runner:
        """A runner that also appends each run to a record."""

        def run(args: list[object]) -> object:
            inputs: list[object] | None = None
            with net("a record of the inputs", "The graph runs"):
                inputs = self._snapshots.of(args) if can_be_compared(args) else None
            outputs = run_graph(args)
            with net("a record of the outputs", "The graph runs"):
                if inputs is not None:
                    record.runs.append(RecordedCall(inputs, self._snapshots.of(outputs)))
            return outputs

        return run
