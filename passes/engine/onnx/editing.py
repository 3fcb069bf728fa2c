"""Functions with which passes change ONNX models: queries of nodes and values, and checked replacement.

``substitute`` replaces values by the results of new nodes. It infers their dtypes and shapes, and rejects, with a
reason that the dump shows, different ones and nodes without a kernel. ``use_existing`` replaces a value by one of the
model. Both call ``context.allows``::

    for node in nodes_of(model, "Mul"):
        sigmoid = producer(node.inputs[1], "Sigmoid")
        if sigmoid is not None and sigmoid.inputs[0] is node.inputs[0] and is_only_used_by(sigmoid.outputs[0], node):
            new = ir.Node("com.microsoft", "QuickGelu", [node.inputs[0]], [ir.AttrFloat32("alpha", 1.0)])
            fired += substitute(model, context, node.outputs[:1], [new])

For a few fixed patterns, ``passes.onnx_pattern_pass`` is shorter.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import onnx_ir as ir

from ..choices import OTHERWISE
from ..context import PassContext, Target
from .inference import contradiction, dims_of, settle_types


def constant(value: ir.Value | None) -> np.ndarray | None:
    """The array of an initializer or ``Constant`` node, else ``None``."""
    if value is None or value.is_graph_input():
        return None
    tensor = ir.convenience.get_const_tensor(value)
    return None if tensor is None else tensor.numpy()


_WEIGHT = "weight"


def mark_weight(value: ir.Value) -> None:
    """Marks an input of a model as a parameter or buffer, which the session holds as a constant."""
    value.metadata_props[_WEIGHT] = "1"


def is_weight(value: ir.Value | None) -> bool:
    """Whether a value is a parameter or buffer. The session folds what depends on weights alone.

    Weights may change, so passes do not see their numbers.
    """
    return value is not None and _WEIGHT in value.metadata_props


def is_known(*values: ir.Value | None) -> bool:
    """Whether ONNX Runtime knows values when it makes the session: they depend on weights and constants alone."""
    seen, pending = set[ir.Value](), list(values)
    while pending:
        value = pending.pop()
        if value is None or value in seen:
            continue
        seen.add(value)
        node = value.producer()
        if node is None and not is_weight(value) and not value.is_initializer():
            return False
        if node is not None and any(item.type == ir.AttributeType.GRAPH for item in node.attributes.values()):
            return False  # its subgraphs may read any value
        pending.extend(() if node is None else node.inputs)
    return True


def nodes_of(model: ir.Model, *operators: str, domain: str = "") -> Iterator[ir.Node]:
    """The nodes of these operators, also in subgraphs; skips nodes erased during the iteration."""
    domains = (domain, domain or "ai.onnx")
    nodes = ir.traversal.RecursiveGraphIterator(model.graph)
    found = [node for node in nodes if node.op_type in operators and node.domain in domains]
    yield from (node for node in found if node.graph is not None)


def producer(value: ir.Value | None, *operators: str, domain: str = "") -> ir.Node | None:
    """The node that computes a value, if it has one of these operators."""
    node = None if value is None else value.producer()
    if node is None or node.op_type not in operators or node.domain not in (domain, domain or "ai.onnx"):
        return None
    return node


def operand(value: ir.Value | None, *operators: str, index: int = 0) -> ir.Value | None:
    """An input of the node that computes a value, if it has one of these operators of ONNX's own."""
    node = producer(value, *operators)
    return node.inputs[index] if node is not None and index < len(node.inputs) else None


def only_user(value: ir.Value, *operators: str) -> ir.Node | None:
    """The only user of a value that is no output, if it has one of these operators of ONNX's own."""
    users = value.uses()
    if len(users) != 1 or value.is_graph_output():
        return None
    node = users[0].node
    return node if node.op_type in operators and node.domain in ("", "ai.onnx") else None


def is_only_used_by(value: ir.Value, *nodes: ir.Node) -> bool:
    """Whether a value has no users but these nodes, and is no output."""
    return not value.is_graph_output() and all(user in nodes for user in value.consumers())


def sizes(value: ir.Value | None) -> list[int | str] | None:
    """A value's shape, symbolic sizes by name (equal names are equal sizes); ``None`` if not all are known."""
    dims = [None] if value is None or value.shape is None else dims_of(value.shape)
    known = [dim for dim in dims if dim is not None]
    return known if len(known) == len(dims) else None


def number(value: ir.Value | None) -> float | None:
    """The number in a constant of one element, of any rank, else ``None``."""
    array = constant(value)
    if array is None or array.size != 1 or array.dtype.kind not in "fiu":
        return None
    return float(array.reshape(-1)[0])


def integers(value: ir.Value | None) -> list[int] | None:
    """The numbers in a constant of integers, else ``None``."""
    array = constant(value)
    return None if array is None or array.dtype.kind not in "iu" else [int(item) for item in array.reshape(-1)]


def permutation(node: ir.Node) -> list[int] | None:
    """The permutation of a ``Transpose``; ``None`` without ``perm`` and with unknown rank."""
    if "perm" in node.attributes:
        return list(node.attributes["perm"].as_ints())
    value = node.inputs[0]
    return None if value is None or value.shape is None else list(range(len(value.shape)))[::-1]


def is_named(value: ir.Value) -> bool:
    """Whether a value has the name of an FX node's result, rather than of a step inside a translation."""
    node = value.producer()
    if node is None:
        return True
    origin = node.metadata_props.get("fx_node")
    return origin is not None and re.fullmatch(rf"{re.escape(origin)}(__\d+)?", value.name or "") is not None


def hidden_value(result: ir.Value, what: str, shape: Sequence[int | str] | None = None) -> ir.Value:
    """A new value named after ``result``, with its dtype and by default its shape."""
    dims = result.shape if shape is None else ir.Shape(shape)
    return ir.Value(name=f"{result.name}__{what}", type=result.type, shape=dims)


def new_constant(model: ir.Model, name: str, array: np.ndarray) -> ir.Value:
    """A new initializer of the model, with a name that no FX node has."""
    name = f"constant.{name}"
    while name in model.graph.initializers:
        name += "_"
    tensor = ir.Tensor(array, name=name)
    value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape), const_value=tensor)
    model.graph.register_initializer(value)
    return value


class MatchError(Exception):
    """A match that was incomplete, or that a check rejected; ``rewrite_each`` records it as a near miss.

    Args:
        reason: the condition that does not hold.
        matched: how many nodes matched.
    """

    def __init__(self, reason: str, matched: int) -> None:
        super().__init__(reason)
        self.matched = matched


def require(condition: bool, reason: str, matched: int) -> None:
    """Raises ``MatchError`` if a condition does not hold."""
    if not condition:
        raise MatchError(reason, matched)


def rewrite_each(context: PassContext, nodes: Iterable[ir.Node], of: int, rewrite: Callable[[ir.Node], int]) -> int:
    """Calls ``rewrite`` on each node and sums its results; records its near misses, of patterns of ``of`` nodes."""
    fired = 0
    for node in nodes:
        try:
            fired += rewrite(node)
        except MatchError as miss:
            context.record_near_miss(node, str(miss), matched=miss.matched, of=of)
    return fired


class Builder:
    """Makes constants, and nodes of ONNX's own operators with inferred results, for one run of a pass."""

    def __init__(self, model: ir.Model, context: PassContext) -> None:
        self._model = model
        self._context = context
        self._added: list[ir.Node] = []
        self._names = {value.name for graph in model.graphs() for node in graph for value in node.outputs}
        self._count = 0
        self._constants: dict[tuple[str, bytes], ir.Value] = {}
        self._shared: dict[tuple[object, ...], ir.Value] = {}

    def constant(self, name: str, values: float | Sequence[int] | np.ndarray) -> ir.Value:
        """A float32 number, an int64 vector or an array, one value for all users."""
        default = np.float32 if isinstance(values, float) else np.int64
        array = values if isinstance(values, (np.ndarray, np.generic)) else np.array(values, default)
        array = np.asarray(array)
        key = (f"{name}{array.dtype}{array.shape}", array.tobytes())
        if key not in self._constants:
            self._constants[key] = new_constant(self._model, name, array)
        return self._constants[key]

    def add(
        self, of: ir.Value, operator: str, inputs: Sequence[ir.Value | None], *attributes: ir.Attr, domain: str = ""
    ) -> ir.Value:
        """The result of a new node, which the next ``substitute`` inserts, named after a value."""
        node = self._node(of, operator, inputs, *attributes, domain=domain)
        self._added.append(node)
        return node.outputs[0]

    def choose(
        self, of: ir.Value, condition: ir.Value, then: Callable[[], object], otherwise: Callable[[], object], why: str
    ) -> ir.Value:
        """The result of one of two functions, which ``add`` nodes; the last node has it.

        If the condition depends on weights alone, ONNX Runtime keeps one of them when it makes the session. ``why``
        says why the second is taken.
        """
        before, branches = self._added, []
        for name, function in (("then_branch", then), ("else_branch", otherwise)):
            self._added = []
            function()
            graph = ir.Graph([], self._added[-1].outputs, nodes=self._added, name=f"{of.name}__{name}")
            branches.append(ir.AttrGraph(name, graph))
        self._added = before
        result = self.add(of, "If", [condition], *branches)
        self._added[-1].metadata_props[OTHERWISE] = why
        return result

    def substitute(self, old: Sequence[ir.Value]) -> bool:
        """Replaces values by the results of the added nodes; see ``substitute``."""
        nodes, self._added = self._added, []
        return substitute(self._model, self._context, old, nodes)

    def _node(
        self, of: ir.Value, operator: str, inputs: Sequence[ir.Value | None], *attributes: ir.Attr, domain: str = ""
    ) -> ir.Node:
        name = f"{of.name}__{operator.lower()}"
        while name in self._names:
            name = f"{of.name}__{operator.lower()}_{self._count}"
            self._count += 1
        self._names.add(name)
        result = ir.Value(name=name)
        node = ir.Node(domain, operator, inputs, attributes, outputs=[result], name=f"node_{name}")
        settle_types(node, self._model.opset_imports.get("", 1), self._context.target)
        return node

    def shared(self, of: ir.Value, operator: str, inputs: Sequence[ir.Value | None], *attributes: ir.Attr) -> ir.Value:
        """The result of a node inserted right after the producer of a value, one for all users."""
        key = (of, operator, *inputs, *map(str, attributes))
        if key not in self._shared:
            node, source = self._node(of, operator, inputs, *attributes), of.producer()
            self._shared[key] = node.outputs[0]
            if source is None:
                graph = of.graph or self._model.graph
                graph.insert_before(graph[0], node)
            else:
                assert source.graph is not None
                node.metadata_props.update(source.metadata_props)
                source.graph.insert_after(source, node)
        return self._shared[key]

    def erase_unused(self) -> None:
        """Erases unused shared nodes."""
        erase_unused(self._shared.values())


def substitute(
    model: ir.Model,
    context: PassContext,
    old: Sequence[ir.Value],
    nodes: Sequence[ir.Node],
    *,
    new: Sequence[ir.Value] | None = None,
    after: ir.Node | None = None,
    pattern: str = "",
    size: int = 1,
) -> bool:
    """Replaces values by the results of new nodes, if these are equivalent and the target has kernels.

    The new values take the names, types and shapes of the old ones, also as graph outputs, the new nodes their
    metadata. Unused nodes are erased.

    Args:
        old: the values to replace; the producer of the first names the match.
        nodes: the new nodes, in execution order, not yet in a graph.
        new: the new values; by default the first results of the last node.
        after: the node after which the new ones are inserted; by default the producer of ``old[0]``. It follows all
            inputs of the new nodes, and precedes all users of ``old``.
        pattern, size: the name of the pattern and its number of nodes, for near misses.

    Returns:
        Whether it replaced them.
    """
    root = old[0].producer()
    assert root is not None
    new = nodes[-1].outputs[: len(old)] if new is None else new
    reason = _reason_against_substituting(model, old, new, nodes, context.target)
    if reason is not None:
        context.record_near_miss(root, reason, matched=size, of=size, pattern=pattern)
        return drop(nodes)
    if not context.allows(root):
        return drop(nodes)
    place = after or root
    assert place.graph is not None
    _note_origin(model, nodes, root)
    place.graph.insert_after(place, nodes)
    for value, before in zip(new, old, strict=True):
        use_instead(before, value)
    erase_unused(old)
    return True


def _reason_against_substituting(
    model: ir.Model, old: Sequence[ir.Value], new: Sequence[ir.Value], nodes: Sequence[ir.Node], target: Target
) -> str | None:
    """Why new values cannot replace old ones, or ``None``: another dtype or shape, or no kernel. Infers types."""
    opset = model.opset_imports.get("", 1)
    nodes = list(_with_branches(nodes))
    for node in nodes:
        imported = model.opset_imports.get(node.domain, node.version)
        if node.version not in (None, imported):
            return f"the replacement needs opset {node.version} of {node.domain or 'ai.onnx'}, the model has {imported}"
        problem = settle_types(node, opset, target)
        if problem is not None:
            return problem
    for value, before in zip(new, old, strict=True):
        problem = contradiction(before, value.dtype, None if value.shape is None else dims_of(value.shape))
        if problem is not None:
            return f"the replacement gives {problem}"
        if value.producer() in nodes:
            value.type, value.shape = before.type or value.type, before.shape or value.shape
    for node in nodes:
        reason = None if node.op_type in ("Constant", "If") else target.rejects(node)
        if reason is not None:
            return f"{node.op_type}: {reason}"
    return None


def _with_branches(nodes: Iterable[ir.Node]) -> Iterator[ir.Node]:
    """Nodes, each after those of its subgraphs."""
    for node in nodes:
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH:
                yield from _with_branches(attribute.as_graph())
        yield node


def use_existing(result: ir.Value, value: ir.Value, context: PassContext) -> bool:
    """Replaces ``result`` by an existing value of the model, if both are equivalent; returns whether it did.

    If one of both has the name of an FX node, that name is kept. Unused nodes are erased.

    Args:
        result: the value to replace.
        value: its replacement, computed before the users of ``result``.
        context: allows the change, and records a rejection.
    """
    node = result.producer()
    assert node is not None
    reason = _reason_against_using(result, value)
    if reason is not None:
        context.record_near_miss(node, reason, matched=1, of=1)
        return False
    if not context.allows(node):
        return False
    is_free = not value.is_graph_output() and not value.is_initializer() and not value.is_graph_input()
    takes_name = result.is_graph_output() or (is_named(result) and not is_named(value) and is_free)
    value.shape, value.type = value.shape or result.shape, value.type or result.type
    if takes_name:
        use_instead(result, value)
        source = value.producer()
        if source is not None and value.index() == 0:
            source.name = f"node_{value.name}"
    else:
        result.replace_all_uses_with(value)
    erase_unused([result])
    return True


def _reason_against_using(result: ir.Value, value: ir.Value) -> str | None:
    problem = contradiction(result, value.dtype, None if value.shape is None else dims_of(value.shape))
    if problem is not None:
        return f"it would be {problem}"
    if not result.is_graph_output():
        return None
    source, node = value.producer(), result.producer()
    if source is None or node is None or source.graph is not node.graph or source.op_type == "Constant":
        return "the result is an output, which must not share memory with an input or a constant"
    if value.is_graph_output():
        return "the result is an output, which must not share memory with another output"
    return None


def _note_origin(model: ir.Model, nodes: Sequence[ir.Node], root: ir.Node) -> None:
    for node in _with_branches(nodes):
        if not node.metadata_props.keys() - {OTHERWISE}:
            node.metadata_props.update(root.metadata_props)
        if not node.name and node.outputs[0].name:
            node.name = f"node_{node.outputs[0].name}"
        model.graph.opset_imports.setdefault(node.domain, node.version or 1)
    nodes[-1].name = root.name


def drop(nodes: Sequence[ir.Node]) -> bool:
    """Removes the inputs of new nodes that are not used after all, which then have fewer users; returns ``False``."""
    for node in _with_branches(nodes):
        for i in range(len(node.inputs)):
            node.replace_input_with(i, None)
    return False


def use_instead(old: ir.Value, new: ir.Value) -> None:
    """Replaces ``old`` by ``new`` for all users and as a graph output, under the name of ``old``."""
    name = old.name
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    old.name = f"{name}__replaced"
    new.name = name


def erase_unused(values: Iterable[ir.Value | None]) -> None:
    """Erases the producers of unused values, and then those of their inputs."""
    pending = list(values)
    while pending:
        value = pending.pop()
        node = None if value is None else value.producer()
        if node is None or node.graph is None:
            continue
        if any(output.is_graph_output() or output.uses() for output in node.outputs):
            continue
        pending.extend(node.inputs)
        node.graph.remove(node, safe=True)
