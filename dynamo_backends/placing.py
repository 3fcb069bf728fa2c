"""Where a graph runs as a whole: what ``Contest`` finds out, kept on disk, and the ways there are to run it."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import fx
from torch._dynamo.convert_frame import compile_lock
from torch.compiler import _compile_session_context

from passes.engine.locks import Lock

from .artifacts import GraphName, Runner, is_operator, without_graph
from .collectives import is_collective
from .contest import Contest, Outcome
from .errors import first_line
from .events import count

if TYPE_CHECKING:
    from .cache.graphs import CachedGraphs

logger = logging.getLogger(__name__)

PYTORCH, ONNX, INDUCTOR = "PyTorch", "ONNX Runtime", "Inductor"
"""The ways to run a graph."""

_MOST_SECONDS = 300.0
"""How long one ``torch.compile`` may spend on compiling graphs with Inductor, to try it."""

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


def boxed_code(module: fx.GraphModule) -> Runner:
    """A graph as PyTorch runs it, one operator after the other; it takes its arguments boxed."""
    module.graph.set_codegen(fx.graph._BoxedCodeGen())
    module.recompile()
    count("nodes_in_pytorch", sum(node.op == "call_function" and is_operator(node) for node in module.graph.nodes))
    return without_graph(module)


def describe_frame(module: fx.GraphModule, arguments: Sequence[object]) -> str:
    """What tells a captured graph from others: its code, and the types of what it is called with.

    Args:
        module: Dynamo's graph.
        arguments: its parameters, buffers and inputs.
    """
    types = [
        f"{arg.dtype} {[str(size) for size in arg.shape]} {arg.requires_grad}"
        if isinstance(arg, torch.Tensor)
        else str(type(arg))
        for arg in arguments
    ]
    return "\n".join([module.code, *types])


class Placing:
    """Runs the graphs of one of Dynamo's frames where they are fastest.

    Args:
        frame: what tells it from others, see ``describe_frame``.
        kept: where outcomes are kept; ``None`` to keep none.
    """

    def __init__(self, frame: str, kept: CachedGraphs | None) -> None:
        self._frame = frame
        self._kept = kept
        self._lock = Lock()
        self._seconds = 0.0

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
            ways: the ways to run it, by name; the first runs what cannot be run twice, and all until it is decided.
        """
        names = list(ways)
        if torch.are_deterministic_algorithms_enabled():  # a clock decides otherwise another time
            return ways[names[0]](copy_of(module))
        outcome = self.known(name.direction, names)
        if outcome is not None and outcome.winner in ways:
            logger.info("%s runs by %s, as was found before: %s", name, outcome.winner, outcome)
            try:
                return ways[outcome.winner](copy_of(module))
            except Exception as error:  # whatever a compiler raises, one that is no longer there for instance
                if outcome.winner == names[0]:
                    raise
                why = first_line(str(error))
                logger.warning("%s is measured anew, %s cannot compile it any more: %s", name, outcome.winner, why)
        written = _written(module)
        if written is None or not _may_run_twice(module):
            return ways[names[0]](copy_of(module))

        def ended(outcome: Outcome) -> None:
            if self._kept is not None:
                self._kept.keep_outcome(self._frame, name.direction, names, outcome)

        candidates = {way: functools.partial(self._build, way, make, module) for way, make in ways.items()}
        exact = functools.partial(_exact_results, module)
        return Contest(name, candidates, written=written, draws=_draws(module), exact=exact, ended=ended)

    def _build(self, way: str, make: Way, module: fx.GraphModule) -> Runner:
        """Builds a candidate at a call, as Dynamo compiles: FX traces for one thread at a time."""
        with compile_lock, _compile_session_context():
            return self._build_alone(way, make, module)

    def _build_alone(self, way: str, make: Way, module: fx.GraphModule) -> Runner:
        if way != INDUCTOR:
            return _holding_for_all_sizes(make, module)
        if self._seconds > _MOST_SECONDS:
            raise TimeoutError(f"{self._seconds:.0f} s were spent on it for other graphs")
        started = time.perf_counter()
        try:
            return _holding_for_all_sizes(make, module)
        finally:
            with self._lock:
                self._seconds += time.perf_counter() - started


def _exact_results(module: fx.GraphModule, args: Sequence[object], state: torch.Tensor | None) -> list[object]:
    """The results of a graph in float64, ``None`` for those that are no tensors."""
    from .verification import Evaluation  # where something differs, ONNX Runtime or Inductor is loaded anyway

    values = Evaluation(module, args, exact=True, state=state).exact
    results = module.graph.output_node().args[0]
    assert isinstance(results, (list, tuple))
    sources = {node.args[0]: node.args[1] for node in module.graph.find_nodes(op="call_function", target=_COPY)}
    placeholders = module.graph.find_nodes(op="placeholder")
    written = [sources[placeholders[i]] for i in _written(module) or ()]
    return [values[item] if isinstance(item, fx.Node) else None for item in (*results, *written)]


def _holding_for_all_sizes(make: Way, module: fx.GraphModule) -> Runner:
    """What ``make`` makes, if it made no assumption on symbolic sizes: Dynamo has its guards by now.

    Raises:
        RuntimeError: it did.
    """
    from .cache.description import describe_symbols, shape_environment

    symbols = shape_environment(module)
    before = None if symbols is None else describe_symbols(symbols)
    made = make(copy_of(module))
    if symbols is not None and describe_symbols(symbols) != before:
        raise RuntimeError("it would hold for some sizes only")
    return made


def _written(module: fx.GraphModule) -> list[int] | None:
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


def _may_run_twice(module: fx.GraphModule) -> bool:
    """Whether a graph only computes, writes to arguments and draws random numbers, as far as is known: an operator of
    another library may count its calls, or draw random numbers and not say so."""
    for node in module.graph.nodes:
        if node.op == "call_module" or (
            node.op == "call_function" and isinstance(node.target, torch._ops.HigherOrderOperator)
        ):
            return False
        if is_collective(node.target):
            return False
        if not isinstance(node.target, torch._ops.OpOverload) or node.target is _COPY:
            continue
        if node.target.namespace not in _OURS_AND_PYTORCHS or node.is_impure(impure_random=False):
            return False
    return True


def _draws(module: fx.GraphModule) -> bool:
    return any(
        isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags
        for node in module.graph.nodes
    )
