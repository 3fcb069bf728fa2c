"""Cuts a model: chosen nodes become a model of their own, whose inputs are the values they read from other nodes.

::

    parts = Parts(model)
    part = parts.cut([3, 4], known)         # known: values by name, which give the inputs their types and shapes
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TypeAlias

import numpy as np
import onnx_ir as ir
from onnx_ir import analysis
from onnx_ir.passes import common

Feeds: TypeAlias = "Mapping[str, np.ndarray]"
"""Tensors by name, of any dtype that ONNX has."""


class Parts:
    """The nodes of a model, and models made of some of them. The model is not changed.

    Attributes:
        model: the model, its functions inlined.
        nodes: of its graph, in execution order.
        weights: the inputs that a session holds as constants; by default those that the metadata marks as weights.
        by_name: the position of the node that computes a value.
    """

    def __init__(self, model: ir.Model, constants: Collection[str] | None = None) -> None:
        if model.functions:
            model = model.clone()
            common.InlinePass()(model)
        self.model = model
        self.nodes = list(model.graph)
        marked = (str(value.name) for value in model.graph.inputs if "weight" in value.metadata_props)
        self.weights = set(marked if constants is None else constants)
        captured = analysis.analyze_implicit_usage(model.graph)
        self._read_by = [_values_read(node, captured) for node in self.nodes]
        self._readers: dict[ir.Value, set[int]] = {}
        for i, values in enumerate(self._read_by):
            for value in values:
                self._readers.setdefault(value, set()).add(i)
        self._returned = set(model.graph.outputs)
        self._producers = {value: i for i, node in enumerate(self.nodes) for value in node.outputs}
        self.by_name = {str(value.name): i for value, i in self._producers.items() if value.name}

    def inputs_of(self, kept: Collection[int]) -> list[ir.Value]:
        """The values that these nodes read and do not compute, without initializers."""
        kept = set(kept)
        found = {
            value: None
            for i in sorted(kept)
            for value in self._read_by[i]
            if self._producers.get(value) not in kept and value.const_value is None
        }
        return list(found)

    def outputs_of(self, kept: Collection[int]) -> list[ir.Value]:
        """The tensors that these nodes compute and another node, nothing, or the caller of the model reads."""
        kept = set(kept)
        return [
            value
            for i in sorted(kept)
            for value in self.nodes[i].outputs
            if value.name
            and (value in self._returned or not self._readers.get(value) or self._readers[value] - kept)
            and _is_tensor(value)
        ]

    def before(self, names: Iterable[str], stop: Collection[str] = ()) -> list[int]:
        """The nodes that compute these values, back to the inputs of the model or the values in ``stop``."""
        found: set[int] = set()
        pending = [self.by_name[name] for name in names if name in self.by_name]
        while pending:
            i = pending.pop()
            if i not in found:
                found.add(i)
                read = (value for value in self._read_by[i] if value in self._producers and value.name not in stop)
                pending += [self._producers[value] for value in read]
        return sorted(found)

    def cut(
        self,
        kept: Collection[int],
        known: Feeds | None = None,
        *,
        outputs: Collection[str] | None = None,
        constants: Collection[str] = (),
    ) -> ir.Model | None:
        """A model of the nodes ``kept``; ``None`` if it would return nothing, or an input has no known value.

        Args:
            known: values by name; the inputs get their types and shapes.
            outputs: which of ``outputs_of`` the model returns; by default all.
            constants: inputs that become initializers, with the known values.
        """
        inputs = self.inputs_of(kept)
        returned = [value for value in self.outputs_of(kept) if outputs is None or value.name in outputs]
        if not returned or (known is not None and any(value.name not in known for value in inputs)):
            return None
        graph = ir.convenience.extract(self.model.graph, inputs, returned)
        for value in list(graph.inputs):
            if known is not None:
                array = known[str(value.name)]
                value.type = ir.TensorType(ir.DataType.from_numpy(array.dtype))
                value.shape = ir.Shape(array.shape)
                if value.name in constants:
                    value.const_value = ir.Tensor(array, name=str(value.name))
                    graph.inputs.remove(value)
                    graph.initializers[str(value.name)] = value
        return ir.Model(graph, ir_version=self.model.ir_version, producer_name="dynamo-backends")

    def exposed(self) -> ir.Model:
        """The whole model, with all its tensors as outputs."""
        model, names = self.model.clone(), set(self.tensors())
        model.graph.outputs[:] = [value for node in model.graph for value in node.outputs if value.name in names]
        return model

    def tensors(self) -> list[str]:
        """The names of all tensors that its nodes compute, in execution order."""
        return [str(value.name) for node in self.nodes for value in node.outputs if value.name and _is_tensor(value)]


def known_of(values: Iterable[ir.Value], known: Feeds | None) -> Feeds:
    """The known values of a model's inputs or outputs; empty if ``known`` is ``None``."""
    return {} if known is None else {str(value.name): known[str(value.name)] for value in values}


def _values_read(node: ir.Node, captured: Mapping[ir.Graph, Collection[ir.Value]]) -> list[ir.Value]:
    """What a node reads, including what its subgraphs capture."""
    graphs: list[ir.Graph] = []
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            graphs.append(attribute.as_graph())
        elif attribute.type == ir.AttributeType.GRAPHS:
            graphs += attribute.as_graphs()
    implicit = sorted({value for graph in graphs for value in captured.get(graph, ())}, key=lambda value: value.name)
    return [*(value for value in node.inputs if value is not None), *implicit]


def _is_tensor(value: ir.Value) -> bool:
    return value.type is None or isinstance(value.type, ir.TensorType)
