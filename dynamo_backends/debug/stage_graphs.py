"""Keeps the graph of each stage, and the graph after each pass that fired, until they are compared."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from passes.engine.fx.editing import is_gradient
from passes.engine.results import PassResult

from ..dumps.blame import Cause, CauseKind
from ..graphs import static_inputs
from ..graphs.descriptors import takes_gradients
from ..graphs.in_place import write_backs
from ..graphs.locations import Place, UserName, set_user_name, user_name, where
from ..numerics.verdicts import epsilon
from .interpreter import flat


@dataclasses.dataclass(frozen=True)
class Step:
    """A graph within a stage, the pass or stage that made it, and the names of the nodes that the pass matched."""

    cause: Cause
    graph: fx.GraphModule
    is_pass: bool = False
    matches: Sequence[str] = ()


@dataclasses.dataclass(eq=False)
class StageGraphs:
    """The graphs of one stage, from its input to its output; a listener of the pass manager."""

    steps: list[Step] = dataclasses.field(default_factory=list)

    def start(self, stage: str, graph: object) -> None:
        assert isinstance(graph, fx.GraphModule)
        self.steps = [Step(Cause(CauseKind.STAGE, stage), functional(graph))]

    def fired(self, result: PassResult, graph: object) -> None:
        assert isinstance(graph, fx.GraphModule)
        if not result.undone:
            self.steps.append(Step(Cause(CauseKind.PASS, result.name), functional(graph), True, result.matches))

    def end(self, stage: str, graph: fx.GraphModule) -> None:
        """The stage ends with ``graph``."""
        if not self.steps:  # no pass is on
            self.start(stage, graph)
        self.steps.append(Step(Cause(CauseKind.STAGE, stage), functional(graph)))

    def drop(self) -> None:
        """Frees the graphs; no further run is compared."""
        self.steps = []

    @property
    def first(self) -> fx.GraphModule:
        return self.steps[0].graph

    @property
    def last(self) -> fx.GraphModule:
        return self.steps[-1].graph

    @property
    def is_unchanged(self) -> bool:
        """Whether neither a pass nor anything else changed the graph."""
        return not self.steps or (not self.has_passes and _described(self.first) == _described(self.last))

    @property
    def has_passes(self) -> bool:
        """Whether a pass fired."""
        return any(step.is_pass for step in self.steps)

    @property
    def placeholders(self) -> list[str]:
        """The names of the arguments."""
        return [node.name for node in self.first.graph.find_nodes(op="placeholder")]

    @property
    def narrowing_steps(self) -> list[tuple[Step, Step]]:
        """The steps after which the graph has more casts to a lower precision, each after the step before it."""
        casts = list(map(_casts, (step.graph for step in self.steps)))
        pairs = zip(self.steps, self.steps[1:], casts, casts[1:], strict=False)
        return [(before, step) for before, step, old, new in pairs if new - old]


def _described(module: fx.GraphModule) -> list[object]:
    return [(node.op, node.target, repr(node.args), repr(node.kwargs)) for node in module.graph.nodes]


def _casts(module: fx.GraphModule) -> collections.Counter[torch.dtype]:
    """How many nodes convert to each dtype from one of higher precision, by their values; without, by their arguments:
    then a dtype counts if the graph has values of higher precision."""
    found: collections.Counter[torch.dtype] = collections.Counter()
    units = {epsilon(leaf.dtype) for node in module.graph.nodes for leaf in _tensors(node)}
    finest = min((unit for unit in units if unit), default=0.0)
    for node in module.graph.nodes:
        value = _example(node)
        if isinstance(value, torch.Tensor):
            sources = (leaf.dtype for item in node.all_input_nodes for leaf in _tensors(item))
            found[value.dtype] += any(0 < epsilon(item) < epsilon(value.dtype) for item in sources)
        elif value is None:  # added by a pass
            named = {"half": torch.float16, "bfloat16": torch.bfloat16, "float": torch.float32}.get(str(node.target))
            dtypes = [*pytree.tree_leaves((node.args, node.kwargs)), named]
            found.update(item for item in dtypes if isinstance(item, torch.dtype) and epsilon(item) > finest)
    return found


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(_example(node)) if isinstance(leaf, torch.Tensor)]


def _example(node: fx.Node) -> object:
    return node.meta.get("val", node.meta.get("example_value"))


@dataclasses.dataclass(eq=False)
class PreGradGraphs(StageGraphs):
    """The graphs of the stage ``pre_grad``, with the same attributes as arguments as in AOTAutograd's graphs.

    A comparison must not change the user's tensors, so a graph that changes attributes gets copies as arguments.
    """

    attributes: list[torch.Tensor] = dataclasses.field(default_factory=list)  # the first arguments

    def end(self, stage: str, graph: fx.GraphModule) -> None:
        super().end(stage, graph)
        attributes = static_inputs.lifted_attributes(graph)
        self.attributes = list(attributes.values())
        if attributes:
            self.steps = [dataclasses.replace(step, graph=_lifted(step.graph, list(attributes))) for step in self.steps]

    def drop(self) -> None:
        super().drop()
        self.attributes = []


def _lifted(module: fx.GraphModule, names: Sequence[str]) -> fx.GraphModule:
    """A copy of a graph that takes these attributes as its first arguments."""
    copied = copy_of(module)
    users: dict[object, list[fx.Node]] = collections.defaultdict(list)
    for node in copied.graph.find_nodes(op="get_attr"):
        users[node.target].append(node)
    with copied.graph.inserting_before(next(iter(copied.graph.nodes))):
        for name in names:
            placeholder = copied.graph.placeholder(name.replace(".", "_"))
            set_user_name(placeholder, UserName(name, is_static=True))
            for node in users[name]:
                node.replace_all_uses_with(placeholder)
                copied.graph.erase_node(node)
    return copied


def place_of_result(graph: fx.GraphModule, key: object) -> Place:
    """The name and the source line of a result.

    The line of a gradient is where its argument is first read; that of a changed argument, where it is last used. The
    key is the result's position, or its kind and the position of an argument, see ``call_runs.Key``.
    """
    if isinstance(key, int):
        results = flat(graph.graph.output_node().args[0])
        node = results[key] if key < len(results) else None
        return Place(node.name, where(node), "") if isinstance(node, fx.Node) else Place(f"result {key}", "", "")
    assert isinstance(key, tuple)
    kind, position = key
    placeholder = list(graph.graph.find_nodes(op="placeholder"))[position]
    name = user_name(placeholder) or placeholder.name
    if kind == "gradient":
        return Place(f"grad of {name}", _first_line(placeholder.users), "")
    return Place(f"the input {name}", _first_line(reversed([*placeholder.users])), "")


def _first_line(nodes: Iterable[fx.Node]) -> str:
    return next(filter(None, map(where, nodes)), "")


class _GraphWithoutCode(fx.GraphModule):
    """A graph module for an interpreter: generating its Python code would take longer than copying its nodes."""

    def recompile(self) -> Any:  # called when the graph is set
        return None


def copy_of(module: fx.GraphModule, kind: type[fx.GraphModule] = _GraphWithoutCode) -> fx.GraphModule:
    """A copy of the nodes, those of subgraphs of higher-order operators included; tensors are shared.

    By default the copy is for an interpreter, and cannot be called.
    """
    graph = fx.Graph()
    results = graph.graph_copy(module.graph, {})
    graph.output(results)
    copied = kind(module, graph)
    copied.graph.output_node().meta = dict(module.graph.output_node().meta)
    for node in copied.graph.find_nodes(op="get_attr"):
        part = getattr(copied, str(node.target), None)
        if isinstance(part, fx.GraphModule):
            setattr(copied, str(node.target), copy_of(part, fx.GraphModule))  # the operator calls it
    return copied


def functional(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of a graph, see ``copy_of``; what a forward copies into arguments becomes the last results."""
    copied = copy_of(module)
    may_be_backward = takes_gradients(copied)  # PyTorch 2.13 tags the writes of inference graphs as a backward's too
    pairs = [(new, copy) for _, new, copy in write_backs(copied) if not (may_be_backward and is_gradient(copy))]
    output = copied.graph.output_node()
    for new, copy in pairs:
        copy.replace_all_uses_with(new)
        copied.graph.erase_node(copy)
    if pairs:
        output.args = ([*flat(output.args[0]), *(new for new, _ in pairs)],)
    return copied
