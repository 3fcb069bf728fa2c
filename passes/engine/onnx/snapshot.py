"""What an ONNX model was before a pass: to tell whether the pass changed it, to put it back, and to check what it is.

A snapshot lists nodes and values, which takes 2 microseconds a node, where a clone takes 14. A model is built of it
only if it is needed.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir

from ..context import Target
from .inference import MOST_DATA, settle_types

_GRAPHS = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)


@dataclasses.dataclass(frozen=True)
class _Recorded:
    """A node as it was."""

    node: ir.Node
    identifier: tuple[str, str, str]
    inputs: Sequence[ir.Value | None]
    outputs: Sequence[ir.Value]
    attributes: tuple[ir.Attr, ...]
    name: str | None
    metadata: dict[str, str]

    def is_as_it_was(self, node: ir.Node) -> bool:
        return (
            node is self.node
            and node.op_identifier() == self.identifier
            and node.inputs == self.inputs
            and node.outputs == self.outputs
            and tuple(node.attributes.values()) == self.attributes
        )


@dataclasses.dataclass(frozen=True)
class _RecordedValue:
    """A value as it was."""

    name: str | None
    type: ir.TypeProtocol | None
    shape: ir.Shape | None
    const_value: ir.TensorProtocol | None
    metadata: dict[str, str]


class OnnxSnapshot:
    """A model as it is now.

    Args:
        model: the model; the snapshot is good until another one is taken.
    """

    def __init__(self, model: ir.Model) -> None:
        self._model = model
        graph = model.graph
        self._nodes = [
            _Recorded(
                node,
                node.op_identifier(),
                node.inputs,
                node.outputs,
                tuple(node.attributes.values()),
                node.name,
                dict(node.metadata_props),
            )
            for node in graph
        ]
        self._inputs, self._outputs = tuple(graph.inputs), tuple(graph.outputs)
        self._initializers = dict(graph.initializers)
        self._functions = dict(model.functions)
        self._opset_imports = dict(graph.opset_imports)
        produced = (value for item in self._nodes for value in item.outputs)
        self._values = {
            value: _RecordedValue(value.name, value.type, value.shape, value.const_value, dict(value.metadata_props))
            for value in (*self._inputs, *self._initializers.values(), *produced)
        }
        has_graphs = any(attribute.type in _GRAPHS for item in self._nodes for attribute in item.attributes)
        self._clone = model.clone() if has_graphs or model.functions else None  # inner graphs are not listed

    def changed(self) -> bool:
        """Whether the model computes otherwise now; new initializers that nothing uses are removed."""
        graph = self._model.graph
        for name, value in list(graph.initializers.items()):
            if name not in self._initializers and not value.uses() and not value.is_graph_output():
                del graph.initializers[name]
        if len(graph) != len(self._nodes) or tuple(graph.outputs) != self._outputs:
            return True
        if tuple(graph.inputs) != self._inputs:
            return True
        if not all(item.is_as_it_was(node) for item, node in zip(self._nodes, graph, strict=True)):
            return True
        if any(value.name != item.name for value, item in self._values.items()):
            return True
        if any(value.const_value is not self._values[value].const_value for value in self._initializers.values()):
            return True
        return self._clone is not None and _inner(self._model) != _inner(self._clone)

    def problem(self, target: Target) -> str | None:
        """Why the model cannot be what was meant: it is malformed, or its results have other names, dtypes or shapes.

        Values of nodes that changed, of which type or shape was not known, get those that are inferred.
        """
        return self._malformed() or self._wrong_types(target) or self._wrong_results()

    def _malformed(self) -> str | None:
        graph = self._model.graph
        if tuple(graph.inputs) != self._inputs or any(value.name != self._values[value].name for value in graph.inputs):
            now, then = ([str(value.name) for value in values] for values in (graph.inputs, self._inputs))
            return f"the model has the inputs {', '.join(now)}, it had {', '.join(then)}"
        known = {*graph.inputs, *graph.initializers.values()}
        for node in graph:
            for value in node.inputs:
                if value is not None and value not in known:
                    return f"{_label(node)} reads {value.name}, which is not computed before it"
            known.update(node.outputs)
        for value in graph.outputs:
            if value not in known:
                return f"the output {value.name} is computed by no node"
            if value.is_graph_input() and value not in self._outputs:
                return f"the output {value.name} is an input, whose memory is not its own"
        if len(set(graph.outputs)) < len(graph.outputs):
            return "two outputs are one value, which would share memory"
        named = [value.name for value in known if value.name]
        if len(set(named)) < len(named):
            twice = next(name for name in named if named.count(name) > 1)
            return f"two values are named {twice}"
        return None

    def _wrong_types(self, target: Target) -> str | None:
        recorded = {item.node: item for item in self._nodes}
        opset = self._model.opset_imports.get("", 1)
        for node in self._model.graph:
            item = recorded.get(node)
            if item is not None and (item.is_as_it_was(node) or self._reads_the_same(item, node)):
                continue
            said = settle_types(node, opset, target)
            if said is not None:
                return f"at {node.outputs[0].name}: {said}"
        return None

    def _reads_the_same(self, item: _Recorded, node: ir.Node) -> bool:
        """Whether a node reads, if other values, then such of the same dtype and shape, and equal small constants."""
        if node.op_identifier() != item.identifier or tuple(node.attributes.values()) != item.attributes:
            return False
        if node.outputs != item.outputs or len(node.inputs) != len(item.inputs):
            return False
        return all(old is new or self._is_alike(old, new) for old, new in zip(item.inputs, node.inputs, strict=True))

    def _is_alike(self, old: ir.Value | None, new: ir.Value | None) -> bool:
        before = None if old is None else self._values.get(old)
        if old is None or new is None or before is None or before.shape is None:
            return False
        if before.type != new.type or before.shape != new.shape:
            return False
        one, other = ir.convenience.get_const_tensor(old), ir.convenience.get_const_tensor(new)
        if one is None or other is None:
            return one is other
        return one.size > MOST_DATA or one.tobytes() == other.tobytes()

    def _wrong_results(self) -> str | None:
        outputs = self._model.graph.outputs
        if len(outputs) != len(self._outputs):
            return f"the model has {len(outputs)} outputs, {len(self._outputs)} before"
        for value, old in zip(outputs, self._outputs, strict=True):
            before = self._values[old]
            if value.name != before.name:
                return f"the output {before.name} is named {value.name}"
            if value.type != before.type or (before.shape is not None and value.shape != before.shape):
                return f"the output {value.name} is {value.dtype} {value.shape}, it was {before.type} {before.shape}"
        return None

    def before(self) -> ir.Model:
        """The model as it was, apart from the one there is now."""
        if self._clone is not None:
            return self._clone.clone()
        made: dict[ir.Value, ir.Value] = {}
        inputs = [self._copy(value, made) for value in self._inputs]
        initializers = [self._copy(value, made) for value in self._initializers.values()]
        nodes = []
        for item in self._nodes:
            domain, operator, overload = item.identifier
            nodes.append(
                ir.Node(
                    domain,
                    operator,
                    [None if value is None else made[value] for value in item.inputs],
                    item.attributes,
                    overload=overload,
                    outputs=[self._copy(value, made) for value in item.outputs],
                    version=item.node.version,
                    name=item.name,
                    doc_string=item.node.doc_string,
                    metadata_props=dict(item.metadata),
                )
            )
        graph = self._model.graph
        copied = ir.Graph(
            inputs,
            [made[value] for value in self._outputs],
            nodes=nodes,
            initializers=initializers,
            doc_string=graph.doc_string,
            opset_imports=dict(self._opset_imports),
            name=graph.name,
            metadata_props=dict(graph.metadata_props),
        )
        model = copy.copy(self._model)
        model.graph = copied
        return model

    def _copy(self, value: ir.Value, made: dict[ir.Value, ir.Value]) -> ir.Value:
        if value not in made:
            item = self._values[value]
            made[value] = ir.Value(
                name=item.name,
                type=item.type,
                shape=None if item.shape is None else item.shape.copy(),
                const_value=item.const_value,
                metadata_props=dict(item.metadata),
            )
        return made[value]

    def recompile(self) -> None:
        """Nothing: a model is what it says."""

    def restore(self) -> None:
        """Makes the model what it was; its nodes and values are new."""
        saved = self.before()
        self._model.graph = saved.graph
        self._model.functions.clear()
        self._model.functions.update(saved.functions)


def _inner(model: ir.Model) -> list[tuple[Any, ...]]:
    """The nodes of a model's functions and inner graphs, to compare them with another model's."""
    graphs = [*model.functions.values(), *model.graph.subgraphs()]
    return [
        (
            node.op_identifier(),
            [None if value is None else value.name for value in node.inputs],
            [value.name for value in node.outputs],
            [(name, attribute.value) for name, attribute in node.attributes.items() if attribute.type not in _GRAPHS],
        )
        for graph in graphs
        for node in graph
    ]


def _label(node: ir.Node) -> str:
    return f"{node.op_type} {node.outputs[0].name}" if node.outputs else node.op_type
