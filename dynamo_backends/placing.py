"""Where a graph runs as a whole: what ``Contest`` finds out, kept on disk, and the ways there are to run it."""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import fx

from . import aot
from .artifacts import GraphName, Runner, is_operator, without_graph
from .collectives import is_collective
from .contest import Contest, Outcome
from .errors import CandidateError, first_line
from .events import count
from .safety_net import caught

if TYPE_CHECKING:
    from .cache.graphs import CachedGraphs

logger = logging.getLogger(__name__)

PYTORCH, ONNX, INDUCTOR = "PyTorch", "ONNX Runtime", "Inductor"
"""The ways to run a graph."""

_MOST_SECONDS = 300.0
"""After how long, in all, this process compiles no further graph with Inductor to try it."""

_MARGIN, _MARGIN_IN_TRAINING = 0.97, 0.9
"""The share of PyTorch's time that a winner may take at most. PyTorch runs what is between the graphs of training, and
where a step runs in both, each waits for the other's threads."""

_COPY = torch.ops.aten.copy_.default

_OURS_AND_PYTORCHS = frozenset({"aten", "prims", "dynamo_backends"})
"""Libraries of operators that say what they do besides computing; of others nobody knows."""

Way = Callable[[fx.GraphModule], Runner]
"""Makes a callable of a copy of the graph."""


def copy_of(module: fx.GraphModule) -> fx.GraphModule:
    """A graph that may be changed while the other stays; they share attributes and fake tensors."""
    graph = fx.Graph()
    output = graph.graph_copy(module.graph, {}, return_output_node=True)
    assert output is not None
    results, original = output
    graph.output(results).meta = dict(original.meta)
    return fx.GraphModule(module, graph)


aten = torch.ops.aten

_CALLED_FASTER = {
    aten.mm.default: torch.mm,
    aten.bmm.default: torch.bmm,
    aten.addmm.default: torch.addmm,
    aten.add.Tensor: torch.add,
    aten.sub.Tensor: torch.sub,
    aten.mul.Tensor: torch.mul,
    aten.div.Tensor: torch.div,
    aten.sum.dim_IntList: torch.sum,
    aten.t.default: torch.t,
    aten.permute.default: torch.permute,
    aten.transpose.int: torch.transpose,
    aten.unsqueeze.default: torch.unsqueeze,
    aten.view.default: torch.Tensor.view,
    aten.expand.default: torch.Tensor.expand,
}
"""Functions that call the same operators on the same arguments, and read these faster: 1.2 microseconds instead of 2.2
(PyTorch 2.13). They are half to three quarters of the nodes of a training step: 540 of 705 of a BERT of 4 layers."""


def boxed_code(module: fx.GraphModule) -> Runner:
    """A graph as PyTorch runs it, one operator after the other; it takes its arguments boxed."""
    for node in module.graph.nodes:
        if node.op == "call_function" and not node.kwargs:
            node.target = _CALLED_FASTER.get(node.target, node.target)
    module.graph.set_codegen(fx.graph._BoxedCodeGen())
    module.recompile()
    count("nodes_in_pytorch", sum(node.op == "call_function" and is_operator(node) for node in module.graph.nodes))
    return without_graph(module)


def describe_frame(module: fx.GraphModule, arguments: Sequence[object]) -> str:
    """What tells a captured graph from others where it is timed: its code, what it is called with, and autocasting.

    Args:
        module: Dynamo's graph.
        arguments: its parameters, buffers and inputs.
    """
    code = [part.code for part in module.modules() if isinstance(part, fx.GraphModule)]
    autocast = str(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else ""
    return "\n".join([*code, autocast, *map(_describe_argument, arguments)])


def _describe_argument(arg: object) -> str:
    if not isinstance(arg, torch.Tensor):
        return str(type(arg))
    strides = [str(stride) for stride in arg.stride()] if arg.layout is torch.strided else arg.layout
    return f"{arg.dtype} {arg.device} {[str(size) for size in arg.shape]} {strides} {arg.requires_grad}"


@dataclasses.dataclass
class _Budget:
    """The seconds that are left for Inductor. Candidates are built in one thread at a time."""

    left: float = _MOST_SECONDS


_budget = _Budget()


class Placing:
    """Runs the graphs of one of Dynamo's frames where they are fastest.

    Args:
        frame: what tells it from others, see ``describe_frame``.
        kept: where outcomes are kept; ``None`` to keep none.
    """

    def __init__(self, frame: str, kept: CachedGraphs | None) -> None:
        self._frame = frame
        self._kept = kept
        self._symbols: dict[str, object] | None = None

    def known(self, direction: str, ways: Sequence[str]) -> Outcome | None:
        """How the contest between these ways ended in an earlier process, if it is known.

        Args:
            direction: ``forward``, ``backward`` or ``inference``.
            ways: which ways there are, by name.
        """
        return self._kept.outcome(self._frame, direction, ways) if self._kept is not None else None

    def place(self, name: GraphName, module: fx.GraphModule, ways: Mapping[str, Way]) -> Runner:
        """What runs the graph where it is, or will be found, fastest.

        Args:
            name: which graph.
            module: the graph, before any of its passes; it stays as it is.
            ways: the ways to run it, by name; the first runs it until it is decided. What cannot be run twice runs on
                ONNX Runtime in inference, by the first in training.
        """
        names = list(ways)
        unmeasured = ways[ONNX if name.direction == "inference" and ONNX in ways else names[0]]
        if torch.are_deterministic_algorithms_enabled():  # a clock decides otherwise another time
            return unmeasured(copy_of(module))
        outcome = self.known(name.direction, names)
        if outcome is not None and outcome.winner in ways:
            logger.info("%s runs by %s, as was found before: %s", name, outcome.winner, outcome)
            try:
                return ways[outcome.winner](copy_of(module))
            except Exception as error:  # whatever a compiler raises, one that is no longer there for instance
                if outcome.winner == names[0]:
                    raise
                if outcome.winner != INDUCTOR:
                    caught(f"the compile of {name}", error, "The graph is timed with each engine again")
                else:
                    why = first_line(str(error))
                    logger.warning("%s is measured anew, %s cannot compile it any more: %s", name, outcome.winner, why)
        written = written_arguments(module)
        if written is None or not may_run_twice(module):
            return unmeasured(copy_of(module))

        def ended(outcome: Outcome) -> None:
            if self._kept is not None:
                self._kept.keep_outcome(self._frame, name.direction, names, outcome)

        candidates = {way: functools.partial(self._build, way, make, module) for way, make in ways.items()}
        exact = functools.partial(_exact_results, module)
        margin = _MARGIN if name.direction == "inference" else _MARGIN_IN_TRAINING
        return Contest(
            name,
            candidates,
            margin=margin,
            written=written,
            draws=_draws(module),
            exact=exact,
            ended=ended,
            in_pytorch=lambda: boxed_code(copy_of(module)),
            foreign=(INDUCTOR,),
        )

    def _build(self, way: str, make: Way, module: fx.GraphModule) -> Runner:
        """Builds a candidate at a call, as Dynamo compiles: FX traces for one thread at a time."""
        with aot.as_dynamo_compiles():
            return self._build_alone(way, make, module)

    def _build_alone(self, way: str, make: Way, module: fx.GraphModule) -> Runner:
        if way != INDUCTOR:
            return self._holding_for_all_sizes(way, make, module)
        if _budget.left < 0:
            raise CandidateError(f"{_MOST_SECONDS:.0f} s were spent on it for other graphs")
        started = time.perf_counter()
        try:
            return self._holding_for_all_sizes(way, make, module)
        finally:
            _budget.left -= time.perf_counter() - started

    def _holding_for_all_sizes(self, way: str, make: Way, module: fx.GraphModule) -> Runner:
        """What ``make`` makes, if it assumed nothing on symbolic sizes: Dynamo has its guards by now.

        The graphs of a frame have their symbols together, and what one way assumed the next finds as a fact: so none
        but PyTorch, which reads sizes as it runs, is made after something was assumed since the frame's first call.

        Raises:
            CandidateError: something was.
        """
        from .cache.description import describe_symbols, shape_environment

        symbols = shape_environment(module)
        if symbols is None:
            return make(copy_of(module))
        before = describe_symbols(symbols)
        if self._symbols is None:
            self._symbols = before
        made = make(copy_of(module))
        if describe_symbols(symbols) != (before if way == PYTORCH else self._symbols):
            raise CandidateError("it would hold for some sizes only")
        return made


def _exact_results(module: fx.GraphModule, args: Sequence[object], state: torch.Tensor | None) -> list[object]:
    """The results of a graph in float64, ``None`` for those that are no tensors."""
    from .verification import Evaluation  # where something differs, ONNX Runtime or Inductor is loaded anyway

    values = Evaluation(module, args, exact=True, state=state).exact
    results = module.graph.output_node().args[0]
    assert isinstance(results, (list, tuple))
    sources = {node.args[0]: node.args[1] for node in module.graph.find_nodes(op="call_function", target=_COPY)}
    placeholders = module.graph.find_nodes(op="placeholder")
    written = [sources[placeholders[i]] for i in written_arguments(module) or ()]
    return [values[item] if isinstance(item, fx.Node) else None for item in (*results, *written)]


def written_arguments(module: fx.GraphModule) -> list[int] | None:
    """Positions of the arguments that a graph writes to; ``None`` if it writes to anything else."""
    placeholders = {node: i for i, node in enumerate(module.graph.find_nodes(op="placeholder"))}
    found = []
    for node in module.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        if node.target._schema.is_mutable:
            if node.args[0] not in placeholders or node.target is not _COPY:
                return None
            found.append(placeholders[node.args[0]])
    return found


def may_run_twice(module: fx.GraphModule) -> bool:
    """Whether a graph only computes, writes to arguments and draws random numbers on the CPU, whose generator alone
    ``Contest`` puts back, as far as is known: an operator of another library may count its calls, or draw random
    numbers and not say so."""
    for node in module.graph.nodes:
        if node.op == "call_module" or (
            node.op == "call_function" and isinstance(node.target, torch._ops.HigherOrderOperator)
        ):
            return False
        if is_collective(node.target) or (_may_draw(node) and not _is_on_cpu(node)):
            return False
        if not isinstance(node.target, torch._ops.OpOverload) or node.target is _COPY:
            continue
        if node.target.namespace not in _OURS_AND_PYTORCHS or node.is_impure(impure_random=False):
            return False
    return True


def _draws(module: fx.GraphModule) -> bool:
    return any(map(_may_draw, module.graph.nodes))


def _may_draw(node: fx.Node) -> bool:
    """Whether a node may draw random numbers: who writes an operator seldom tells PyTorch that it does."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    is_torchs = node.target.namespace in ("aten", "prims")
    return not is_torchs or torch.Tag.nondeterministic_seeded in node.target.tags


def _is_on_cpu(node: fx.Node) -> bool:
    leaves = torch.utils._pytree.tree_leaves(node.meta.get("val"))
    return all(leaf.device.type == "cpu" for leaf in leaves if isinstance(leaf, torch.Tensor))
