"""Cuts models: any set of a model's nodes as a model of its own, whose inputs are the values it takes from the rest.

::

    parts = Parts(model)
    part = parts.cut([3, 4], known)         # known: the values at which the model was cut, by name
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import onnx_ir as ir
from onnx_ir import analysis
from onnx_ir.passes import common

from .candidate_runs import Feeds


class Parts:
    """The nodes of a model, which are its parts. The model is left as it is.

    Attributes:
        model: the model, its functions inlined.
        nodes: of its graph, in execution order.
        weights: the names of its inputs whose values a session holds as constants; by default those marked as weights.
        by_name: the position of the node that computes a value.
    """

    def __init__(self, model: ir.Model, constants: Collection[str] | None = None) -> None:
        if model.functions:
            model = model.clone()
            common.InlinePass()(model)
        self.model = model
        self.nodes: Sequence[ir.Node] = list(model.graph)
        marked = (str(value.name) for value in model.graph.inputs if "weight" in value.metadata_props)
        self.weights = set(marked if constants is None else constants)
        captured = analysis.analyze_implicit_usage(model.graph)
        self._takes = [self._taken(node, captured) for node in self.nodes]
        self._used_by: dict[ir.Value, set[int]] = {}
        for i, values in enumerate(self._takes):
            for value in values:
                self._used_by.setdefault(value, set()).add(i)
        self._returned = set(model.graph.outputs)
        self._made_by = {value: i for i, node in enumerate(self.nodes) for value in node.outputs}
        self.by_name = {str(value.name): i for value, i in self._made_by.items() if value.name}

    @staticmethod
    def _taken(node: ir.Node, captured: Mapping[ir.Graph, Collection[ir.Value]]) -> list[ir.Value]:
        """What a node reads, its subgraphs included."""
        graphs: list[ir.Graph] = []
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH:
                graphs.append(attribute.as_graph())
            elif attribute.type == ir.AttributeType.GRAPHS:
                graphs += attribute.as_graphs()
        inner = sorted({value for graph in graphs for value in captured.get(graph, ())}, key=lambda value: value.name)
        return [*(value for value in node.inputs if value is not None), *inner]

    def inputs_of(self, kept: Collection[int]) -> list[ir.Value]:
        """What a set of nodes takes from outside; initializers come with them."""
        kept = set(kept)
        found = {
            value: None
            for i in sorted(kept)
            for value in self._takes[i]
            if self._made_by.get(value) not in kept and value.const_value is None
        }
        return list(found)

    def outputs_of(self, kept: Collection[int]) -> list[ir.Value]:
        """What a set of nodes gives to the rest: what another node or nothing uses, and what the model returns."""
        kept = set(kept)
        return [
            value
            for i in sorted(kept)
            for value in self.nodes[i].outputs
            if value.name
            and (value in self._returned or not self._used_by.get(value) or self._used_by[value] - kept)
            and _is_tensor(value)
        ]

    def before(self, names: Iterable[str], stop: Collection[str] = ()) -> list[int]:
        """The nodes that values are computed by, back to the model's inputs or to the values in ``stop``."""
        found: set[int] = set()
        pending = [self.by_name[name] for name in names if name in self.by_name]
        while pending:
            i = pending.pop()
            if i in found:
                continue
            found.add(i)
            for value in self._takes[i]:
                if value in self._made_by and value.name not in stop:
                    pending.append(self._made_by[value])
        return sorted(found)

    def cut(
        self,
        kept: Collection[int],
        known: Feeds | None = None,
        *,
        outputs: Collection[str] | None = None,
        constants: Collection[str] = (),
    ) -> ir.Model | None:
        """A model of some nodes.

        Args:
            kept: positions of the nodes.
            known: the values it takes, which give it their types and shapes.
            outputs: what it returns, of what ``outputs_of`` says; by default all of it.
            constants: inputs that become initializers, with the known values.

        Returns:
            The model; ``None`` if it would return nothing, or if the type of an input is not known.
        """
        takes = self.inputs_of(kept)
        gives = [value for value in self.outputs_of(kept) if outputs is None or value.name in outputs]
        if not gives or (known is not None and any(value.name not in known for value in takes)):
            return None
        graph = ir.convenience.extract(self.model.graph, takes, gives)
        for value in list(graph.inputs):
            if known is not None:
                array = known[str(value.name)]
                value.type = ir.TensorType(ir.DataType.from_numpy(array.dtype))
                value.shape = ir.Shape(array.shape)
                if value.name in constants:
                    value.const_value = ir.Tensor(array, name=str(value.name))
                    graph.inputs.remove(value)
                    graph.initializers[str(value.name)] = value
            elif value.type is None:
                return None
        return ir.Model(graph, ir_version=self.model.ir_version, producer_name="dynamo-backends")

    def exposed(self) -> ir.Model:
        """The whole model, which returns all its tensors."""
        model, names = self.model.clone(), set(self.tensors())
        model.graph.outputs[:] = [value for node in model.graph for value in node.outputs if value.name in names]
        return model

    def tensors(self) -> list[str]:
        """The names of all tensors that its nodes compute, in execution order."""
        return [str(value.name) for node in self.nodes for value in node.outputs if value.name and _is_tensor(value)]


def inputs_of(model: ir.Model, known: Feeds | None) -> Feeds:
    """The inputs of a part, of known values; empty where none are known."""
    return {} if known is None else {str(value.name): known[str(value.name)] for value in model.graph.inputs}


def outputs_of(model: ir.Model, known: Feeds | None) -> Feeds:
    """The same of its outputs."""
    return {} if known is None else {str(value.name): known[str(value.name)] for value in model.graph.outputs}


def _is_tensor(value: ir.Value) -> bool:
    return value.type is None or isinstance(value.type, ir.TensorType)
