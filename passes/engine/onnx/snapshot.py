"""A snapshot of an ONNX model before a pass: detects changes, checks the changed model, and restores the old one."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from ..context import Target
from .inference import settle_types


class OnnxSnapshot:
    """A snapshot of a model.

    Args:
        model: the model; the snapshot is valid until another one is taken.
    """

    def __init__(self, model: ir.Model) -> None:
        self._model = model
        self._clone = model.clone()
        self._outputs = tuple(model.graph.outputs)
        self._initializers = set(model.graph.initializers)
        self._content = _content(model)
        self._nodes = dict(_rows(model.graph))

    def changed(self) -> bool:
        """Whether the model changed; removes new unused initializers first."""
        graph = self._model.graph
        for name, value in list(graph.initializers.items()):
            if name not in self._initializers and not value.uses() and not value.is_graph_output():
                del graph.initializers[name]
        return _content(self._model) != self._content

    def problem(self, target: Target) -> str | None:
        """Why the model is broken, or ``None``: it is malformed, its results have other names, dtypes or shapes, or the
        target objects to it. Infers missing types and shapes of changed nodes.
        """
        problem = self._malformed() or self._wrong_types(target) or self._wrong_results()
        if problem is None and (objection := target.objection(self._model)) is not None:
            return f"the changed model must not run: {objection}"
        return problem

    def _malformed(self) -> str | None:
        graph = self._model.graph
        now, then = ([value.name for value in graph.inputs] for graph in (graph, self._clone.graph))
        if now != then:
            return f"the model has the inputs {', '.join(map(str, now))}, it had {', '.join(map(str, then))}"
        known = {*graph.inputs, *graph.initializers.values()}
        for node in graph:
            for value in node.inputs:
                if value is not None and value not in known:
                    return f"{node.op_type} {node.outputs[0].name} reads {value.name}, which is not computed before it"
            known.update(node.outputs)
        for value in graph.outputs:
            if value not in known:
                return f"the output {value.name} is computed by no node"
            if value.is_graph_input() and value not in self._outputs:
                return f"the output {value.name} is an input, and would share its memory"
        if len(set(graph.outputs)) < len(graph.outputs):
            return "two outputs are one value, which would share memory"
        names: set[str] = set()
        for name in (value.name for value in known if value.name):
            if name in names:
                return f"two values are named {name}"
            names.add(name)
        return None

    def _wrong_types(self, target: Target) -> str | None:
        opset = self._model.opset_imports.get("", 1)
        for node, row in _rows(self._model.graph):
            if self._nodes.get(node) == row:
                continue
            problem = settle_types(node, opset, target)
            if problem is not None:
                return f"at {node.outputs[0].name}: {problem}"
        return None

    def _wrong_results(self) -> str | None:
        outputs, recorded = self._model.graph.outputs, self._clone.graph.outputs
        if len(outputs) != len(recorded):
            return f"the model has {len(outputs)} outputs, {len(recorded)} before"
        for value, before in zip(outputs, recorded, strict=True):
            if value.name != before.name:
                return f"the output {before.name} is named {value.name}"
            if value.type != before.type or (before.shape is not None and value.shape != before.shape):
                return f"the output {value.name} is {value.dtype} {value.shape}, it was {before.type} {before.shape}"
        return None

    def before(self) -> ir.Model:
        """A copy of the old model."""
        return self._clone

    def restore(self) -> None:
        """Restores the old model, with new nodes and values."""
        self._model.graph = self._clone.graph
        self._model.functions.clear()
        self._model.functions.update(self._clone.functions)


def _content(model: ir.Model) -> list[object]:
    """What a model computes, with subgraphs and functions, without unused constants; to compare it later."""
    graph = model.graph
    return [
        [(value, value.name) for value in (*graph.inputs, *graph.outputs)],
        [(name, value.const_value) for name, value in graph.initializers.items() if value.uses()],
        [list(_rows(ir.traversal.RecursiveGraphIterator(part))) for part in (graph, *model.functions.values())],
    ]


def _rows(nodes: Iterable[ir.Node]) -> Iterable[tuple[ir.Node, object]]:
    """Each node with what it computes; nodes and values compare by identity."""
    for node in nodes:
        outputs = [(value, value.name) for value in node.outputs]
        yield node, (node.op_identifier(), node.inputs, outputs, tuple(node.attributes.values()))
