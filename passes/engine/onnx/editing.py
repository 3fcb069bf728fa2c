"""How passes change ONNX models: looking at nodes and values, and replacement that refuses what is not the same.

A pass looks at nodes, makes new ones, and hands both to ``substitute``. It infers the dtypes and shapes of what the new
nodes return, and refuses, with a reason that shows in the dump, what is not the same, or what the provider has no
kernel for. ``use_existing`` puts a value that is there in the place of another one. Both ask ``context.allows``::

    for node in nodes_of(model, "Mul"):
        sigmoid = producer(node.inputs[1], "Sigmoid")
        if sigmoid is not None and sigmoid.inputs[0] is node.inputs[0] and is_only_used_by(sigmoid.outputs[0], node):
            new = ir.Node("com.microsoft", "QuickGelu", [node.inputs[0]], [ir.AttrFloat32("alpha", 1.0)])
            fired += substitute(model, context, node.outputs[:1], [new])

``passes.onnx_pattern_pass`` says the same with less, where a few fixed forms are all there is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import onnx_ir as ir

from ..context import PassContext, Target
from .inference import contradiction, dims_of, settle_types


def constant(value: ir.Value | None) -> np.ndarray | None:
    """The number or array a value always has, or ``None``: of an initializer or a ``Constant`` node."""
    if value is None or value.is_graph_input():
        return None
    tensor = ir.convenience.get_const_tensor(value)
    return None if tensor is None else tensor.numpy()


_WEIGHT = "weight"


def mark_weight(value: ir.Value) -> None:
    """Says of an input of a model that it is a parameter or buffer, which the session holds as a constant."""
    value.metadata_props[_WEIGHT] = "1"


def is_weight(value: ir.Value | None) -> bool:
    """Whether a value is a parameter or buffer.

    What depends on weights alone costs nothing at a call, as they seldom change. They may, so that no pass sees them.
    """
    return value is not None and _WEIGHT in value.metadata_props


def nodes_of(model: ir.Model, *operators: str, domain: str = "") -> Iterator[ir.Node]:
    """The nodes of these operators, those of subgraphs included; nodes erased meanwhile are left out."""
    domains = (domain, domain or "ai.onnx")
    nodes = ir.traversal.RecursiveGraphIterator(model.graph)
    found = [node for node in nodes if node.op_type in operators and node.domain in domains]
    yield from (node for node in found if node.graph is not None)


def producer(value: ir.Value | None, *operators: str, domain: str = "") -> ir.Node | None:
    """The node that computes a value, if it is one of these operators."""
    node = None if value is None else value.producer()
    if node is None or node.op_type not in operators or node.domain not in (domain, domain or "ai.onnx"):
        return None
    return node


def is_only_used_by(value: ir.Value, *nodes: ir.Node) -> bool:
    """Whether nothing but these nodes needs a value: no other node, and not the caller of the graph."""
    return not value.is_graph_output() and all(user in nodes for user in value.consumers())


def sizes(value: ir.Value | None) -> list[int | str] | None:
    """A value's shape, a symbolic dimension by its name; ``None`` if it is not known in full.

    Equal names stand for equal sizes.
    """
    if value is None or value.shape is None:
        return None
    dims = [dim if isinstance(dim, int) else dim.value for dim in value.shape]
    return None if any(dim is None for dim in dims) else dims


def number(value: ir.Value | None) -> float | None:
    """The one number a constant holds, whatever its rank, or ``None``."""
    array = constant(value)
    if array is None or array.size != 1 or array.dtype.kind not in "fiu":
        return None
    return float(array.reshape(-1)[0])


def integers(value: ir.Value | None) -> list[int] | None:
    """The integers a constant of rank 0 or 1 holds, or ``None``."""
    array = constant(value)
    return None if array is None or array.dtype.kind not in "iu" else [int(item) for item in array.reshape(-1)]


def permutation(node: ir.Node) -> list[int] | None:
    """What a ``Transpose`` does; ``None`` where it has no ``perm`` and the rank is not known."""
    if "perm" in node.attributes:
        return list(node.attributes["perm"].as_ints())
    value = node.inputs[0]
    return None if value is None or value.shape is None else list(range(len(value.shape)))[::-1]


def is_named(value: ir.Value) -> bool:
    """Whether a value bears the name of an FX node's result: of a step inside a translation it does not."""
    node = value.producer()
    if node is None:
        return True
    origin = node.metadata_props.get("fx_node")
    return origin is not None and re.fullmatch(rf"{re.escape(origin)}(__\d+)?", value.name or "") is not None


def hidden_value(result: ir.Value, what: str, shape: Sequence[int | str] | None = None) -> ir.Value:
    """A new value on the way to ``result``, named after it, of its dtype and, unless given, of its shape."""
    dims = result.shape if shape is None else ir.Shape(shape)
    return ir.Value(name=f"{result.name}__{what}", type=result.type, shape=dims)


def new_constant(model: ir.Model, name: str, array: np.ndarray) -> ir.Value:
    """A new initializer of the model, of a name like this one; the point keeps it apart from those of FX nodes."""
    name = f"constant.{name}"
    while name in model.graph.initializers:
        name += "_"
    tensor = ir.Tensor(array, name=name)
    value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape), const_value=tensor)
    model.graph.register_initializer(value)
    return value


class NearMiss(Exception):
    """Why what begins like a form that a pass looks for is none.

    Args:
        reason: the condition that does not hold.
        matched: how many nodes of the form were found.
    """

    def __init__(self, reason: str, matched: int) -> None:
        super().__init__(reason)
        self.matched = matched


def require(condition: bool, otherwise: str, matched: int) -> None:
    """Raises ``NearMiss`` where a condition does not hold."""
    if not condition:
        raise NearMiss(otherwise, matched)


def rewrite_each(context: PassContext, nodes: Iterable[ir.Node], of: int, rewrite: Callable[[ir.Node], int]) -> int:
    """How often a function rewrote nodes; the near misses that it raises, of a form of ``of`` nodes, are noted."""
    fired = 0
    for node in nodes:
        try:
            fired += rewrite(node)
        except NearMiss as miss:
            context.refuse(node, str(miss), matched=miss.matched, of=of)
    return fired


class Builder:
    """Makes constants, and nodes of ONNX's own operators whose results are inferred, for one run of a pass."""

    def __init__(self, model: ir.Model, context: PassContext) -> None:
        self._model = model
        self._context = context
        self._added: list[ir.Node] = []
        self._constants: dict[tuple[str, bytes], ir.Value] = {}
        self._shared: dict[tuple[object, ...], ir.Value] = {}

    def constant(self, name: str, values: float | Sequence[int]) -> ir.Value:
        """A float32 number or a vector of int64, the same for all that read it."""
        array = np.array(values, np.float32 if isinstance(values, float) else np.int64)
        key = (name, array.tobytes())
        if key not in self._constants:
            self._constants[key] = new_constant(self._model, name, array)
        return self._constants[key]

    def add(self, of: ir.Value, operator: str, inputs: Sequence[ir.Value | None], *attributes: ir.Attr) -> ir.Value:
        """The result of a new node for the next ``substitute``, named after a value."""
        node = self._node(operator, inputs, f"{of.name}__{operator.lower()}_{len(self._added)}", *attributes)
        self._added.append(node)
        return node.outputs[0]

    def substitute(self, old: Sequence[ir.Value]) -> bool:
        """Computes values by the nodes that were added, as ``substitute``."""
        nodes, self._added = self._added, []
        return substitute(self._model, self._context, old, nodes)

    def _node(self, operator: str, inputs: Sequence[ir.Value | None], name: str, *attributes: ir.Attr) -> ir.Node:
        result = ir.Value(name=name)
        node = ir.Node("", operator, inputs, attributes, outputs=[result], name=f"node_{name}")
        settle_types(node, self._model.opset_imports.get("", 1), self._context.target)
        return node

    def shared(self, of: ir.Value, operator: str, inputs: Sequence[ir.Value | None], *attributes: ir.Attr) -> ir.Value:
        """The result of a node right behind that of a value, the same for all that read it."""
        key = (of, operator, *inputs, *map(str, attributes))
        if key not in self._shared:
            name = f"{of.name}__{operator.lower()}"
            while any(name == other.name for other in self._shared.values()):
                name += "_"
            node, before = self._node(operator, inputs, name, *attributes), of.producer()
            self._shared[key] = node.outputs[0]
            if before is None:
                self._model.graph.insert_before(self._model.graph[0], node)
            else:
                assert before.graph is not None
                node.metadata_props.update(before.metadata_props)
                before.graph.insert_after(before, node)
        return self._shared[key]

    def erase_unused(self) -> None:
        """Erases shared nodes that nothing reads."""
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
    """Computes values by other nodes, if the target has kernels for these and the pass may change the graph.

    The new values take the names, types, shapes and the place among the graph's outputs of those they replace, the new
    nodes their metadata. What nothing uses any more is erased.

    Args:
        old: the values to compute otherwise; the first one's producer is what ``context`` is told of.
        nodes: the new nodes, in execution order, not yet in a graph.
        new: what takes the place of ``old``; by default the first results of the last node.
        after: the node behind which the new ones go; by default the producer of ``old[0]``. All inputs of the new nodes
            are computed before it, and all users of ``old`` come after it.
        pattern, size: the name of the form that matched and how many nodes it has, for near misses.

    Returns:
        Whether it did.
    """
    root = old[0].producer()
    assert root is not None
    new = nodes[-1].outputs[: len(old)] if new is None else new
    reason = _reason_against_substituting(model, old, new, nodes, context.target)
    if reason is not None:
        context.refuse(root, reason, matched=size, of=size, pattern=pattern)
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
    """Why new nodes must not compute values, or ``None``: these would be others, or there is no kernel.

    What the nodes return is inferred, never taken over; the new values get what is known of the old ones besides.
    """
    opset = model.opset_imports.get("", 1)
    for node in nodes:
        imported = model.opset_imports.get(node.domain, node.version)
        if node.version not in (None, imported):
            return f"the replacement needs opset {node.version} of {node.domain or 'ai.onnx'}, the model has {imported}"
        said = settle_types(node, opset, target)
        if said is not None:
            return said
    for value, before in zip(new, old, strict=True):
        said = contradiction(before, value.dtype, None if value.shape is None else dims_of(value.shape))
        if said is not None:
            return f"the replacement gives {said}"
        if value.producer() in nodes:
            value.type, value.shape = before.type or value.type, before.shape or value.shape
    for node in nodes:
        reason = None if node.op_type == "Constant" else target.refuses(node)
        if reason is not None:
            return f"{node.op_type}: {reason}"
    return None


def use_existing(result: ir.Value, value: ir.Value, context: PassContext) -> bool:
    """Lets all that uses ``result`` use ``value``, which is there and the same, if the pass may; returns whether so.

    Of the names of both the one an FX node gave is kept. What nothing uses any more is erased.

    Args:
        result: what is replaced.
        value: what takes its place, computed before the users of ``result``.
        context: the pass's, which is asked, and told why not.
    """
    node = result.producer()
    assert node is not None
    reason = _reason_against_using(result, value)
    if reason is not None:
        context.refuse(node, reason, matched=1, of=1)
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
    said = contradiction(result, value.dtype, None if value.shape is None else dims_of(value.shape))
    if said is not None:
        return f"it would be {said}"
    if not result.is_graph_output():
        return None
    source, node = value.producer(), result.producer()
    if source is None or node is None or source.graph is not node.graph or source.op_type == "Constant":
        return "the result is an output, which must not be an input's or a constant's memory"
    if value.is_graph_output():
        return "the result is an output, which must not be another output's memory"
    return None


def _note_origin(model: ir.Model, nodes: Sequence[ir.Node], root: ir.Node) -> None:
    for node in nodes:
        if not node.metadata_props:
            node.metadata_props.update(root.metadata_props)
        if not node.name and node.outputs[0].name:
            node.name = f"node_{node.outputs[0].name}"
        model.graph.opset_imports.setdefault(node.domain, node.version or 1)
    nodes[-1].name = root.name


def drop(nodes: Sequence[ir.Node]) -> bool:
    """Takes back nodes that were made but not used, so that they do not count as users of their inputs."""
    for node in nodes:
        for i in range(len(node.inputs)):
            node.replace_input_with(i, None)
    return False


def use_instead(old: ir.Value, new: ir.Value) -> None:
    """Lets everything that uses ``old``, the graph's caller included, use ``new``, under the name of ``old``."""
    name = old.name
    old.replace_all_uses_with(new, replace_graph_outputs=True)
    old.name = f"{name}__replaced"
    new.name = name


def erase_unused(values: Iterable[ir.Value | None]) -> None:
    """Erases the nodes that compute values nobody needs, and then those that only these needed."""
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
