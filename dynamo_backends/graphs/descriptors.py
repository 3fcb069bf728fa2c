"""What AOTAutograd knows about the graph it compiles: number, direction, and what each argument and result is.

AOTAutograd describes each argument and result in ``meta["desc"]``. Descriptors can be compared and are keys of
dictionaries. An argument of Dynamo's graph is told by the name of a lifted attribute, or the position among the others.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence

from torch import fx
from torch._functorch._aot_autograd.descriptors import (
    BufferAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    SavedForBackwardsAOTOutput,
    SubclassGetAttrAOTInput,
    TangentAOTInput,
    ViewBaseAOTInput,
)
from torch._functorch._aot_autograd.logging_utils import get_aot_graph_name
from torch._guards import TracingContext
from torch.utils import _pytree as pytree

from .locations import UserName, set_user_name

_GRAPH_NAME = re.compile(r"(?:^|__)(?P<id>\d+)_(?P<direction>forward|backward|inference|joint)")
_RESULT_NAMES = "dynamo_backends_result_names"
_DESCRIPTOR_NAMES = "dynamo_backends_descriptor_names"


@dataclasses.dataclass(frozen=True)
class GraphBeingCompiled:
    """What AOTAutograd knows about the graph it is compiling.

    Attributes:
        context: the frame's tracing context, the same for a joint graph, its forward and its backward; ``None``
            outside of Dynamo.
        aot_id: AOTAutograd's number, the same for these; or ``None``. PyTorch 2.13 keeps it in a global variable, so it
            may be another thread's.
        direction: ``forward``, ``backward``, ``joint`` or ``inference``.
    """

    context: TracingContext | None
    aot_id: str | None
    direction: str


def graph_being_compiled(module: fx.GraphModule, *, is_joint: bool = False) -> GraphBeingCompiled:
    """See ``GraphBeingCompiled``; ``module`` is the graph."""
    context = TracingContext.try_get()
    names = context.aot_graph_name if context is not None else None
    match = _GRAPH_NAME.search(names[0] if names else get_aot_graph_name())
    aot_id, direction = (match["id"], match["direction"]) if match else (None, "inference")
    return GraphBeingCompiled(context, aot_id, "joint" if is_joint else _direction(module, direction))


def _direction(module: fx.GraphModule, from_name: str) -> str:
    """The direction of a graph from its arguments and results, else from its name."""
    if takes_gradients(module):
        return "backward"
    if any(isinstance(item, SavedForBackwardsAOTOutput) for item in result_descriptors(module)):
        return "forward"
    return from_name if from_name in ("forward", "backward") else "inference"


def result_descriptors(module: fx.GraphModule) -> Sequence[object]:
    """The descriptors of a graph's results; states of random generators, which the partitioner saves, have none."""
    return module.graph.output_node().meta.get("desc") or []


def result_of_tangent(placeholder: fx.Node) -> object | None:
    """The descriptor of the result whose gradient an argument is; ``None`` for other arguments."""
    descriptor = placeholder.meta.get("desc")
    return descriptor.output if isinstance(descriptor, TangentAOTInput) else None


def takes_gradients(module: fx.GraphModule) -> bool:
    """Whether arguments are gradients of the forward's results."""
    return any(result_of_tangent(node) is not None for node in module.graph.find_nodes(op="placeholder"))


def changed_arguments(module: fx.GraphModule) -> list[object]:
    """The descriptors of the arguments of which a graph returns new values."""
    return [item.mutated_input for item in result_descriptors(module) if isinstance(item, InputMutationAOTOutput)]


def argument_of(descriptor: object) -> int | str | None:
    """The argument of Dynamo's graph that an argument, or a part of a tensor subclass, is; ``None`` for others."""
    match whole_of(descriptor)[0]:
        case ParamAOTInput(target=name) | BufferAOTInput(target=name):
            return name
        case PlainAOTInput(idx=i):
            return i
    return None


def viewing_argument(descriptor: object) -> int | None:
    """The position of the argument of Dynamo's graph that is a view of this argument."""
    if isinstance(descriptor, ViewBaseAOTInput) and isinstance(descriptor.base_of, PlainAOTInput):
        return descriptor.base_of.idx
    return None


def whole_of(descriptor: object) -> tuple[object, list[str]]:
    """The descriptor of an argument, and the path of attributes to the part that a placeholder is.

    AOTAutograd passes the parts of a tensor subclass, such as the integers and scales of a quantized weight.
    """
    path: list[str] = []
    while isinstance(descriptor, SubclassGetAttrAOTInput):
        path.insert(0, descriptor.attr)
        descriptor = descriptor.base
    return descriptor, path


def part_of(value: object, path: Sequence[str]) -> object:
    """The part of a tensor subclass; see ``whole_of``."""
    return functools.reduce(lambda outer, name: getattr(outer, name, None), path, value)


def number_of_lifted() -> int:
    """How many attributes precede the other arguments of the graph that is compiled."""
    context = TracingContext.try_get()
    return len(context.params_flat or ()) if context is not None else 0


def name_values(module: fx.GraphModule, names: Sequence[UserName]) -> None:
    """Sets the user's names on an AOTAutograd graph, from ``user_names.argument_names`` of Dynamo's graph."""
    placeholders, results = module.graph.find_nodes(op="placeholder"), result_descriptors(module)
    arguments = [node.meta.get("desc") for node in placeholders]
    module.meta[_DESCRIPTOR_NAMES] = {str(item): _name(item, names) for item in (*arguments, *results)}
    for node, item in zip(placeholders, arguments, strict=True):
        argument = argument_of(item)
        is_static = isinstance(argument, str)
        if isinstance(argument, int) and argument < len(names):
            is_static = names[argument].is_static
        set_user_name(node, UserName(_name(item, names), is_static))
    named = (GradAOTOutput, InputMutationAOTOutput)
    found = [_name(item, names) if isinstance(item, named) else "" for item in results]
    module.graph.output_node().meta[_RESULT_NAMES] = found


def _name(descriptor: object, names: Sequence[UserName]) -> str:
    """The user's name of what a descriptor describes; ``""`` if there is none."""
    match descriptor:
        case PlainAOTInput(idx=i):
            return names[i].text if i < len(names) else ""
        case ParamAOTInput(target=name) | BufferAOTInput(target=name):
            return name
        case PlainAOTOutput(idx=i):
            return f"result {i}"
        case SavedForBackwardsAOTOutput():
            return "for the backward"
        case SubclassGetAttrAOTInput(base=of, attr=attribute):
            name = _name(of, names)
            return f"{name}.{attribute}" if name else ""
        case ViewBaseAOTInput(base_of=of):
            what = "base"
        case TangentAOTInput(output=PlainAOTOutput() as of) | GradAOTOutput(grad_of=of):
            what = "grad"
        case InputMutationAOTOutput(mutated_input=of):
            what = "new value"
        case _:
            return ""
    name = _name(of, names)
    return f"{what} of {name}" if name else ""


def with_user_names(module: fx.GraphModule, line: str) -> str:
    """A line of code with ``# fc.weight`` instead of ``# PlainAOTInput(idx=0)``."""
    start, mark, text = line.rpartition("# ")
    return f"{start}{mark}{module.meta.get(_DESCRIPTOR_NAMES, {}).get(text) or text}"


def result_names(module: fx.GraphModule) -> dict[fx.Node, str]:
    """The results of an AOTAutograd graph that have a user's name, such as ``grad of fc.weight``."""
    output = module.graph.output_node()
    leaves = pytree.tree_leaves(output.args[0], is_leaf=lambda x: x is None)
    names = output.meta.get(_RESULT_NAMES, [])
    return {leaf: name for leaf, name in zip(leaves, names, strict=False) if isinstance(leaf, fx.Node) and name}
