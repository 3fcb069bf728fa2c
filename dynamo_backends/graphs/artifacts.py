"""What travels between the stages: names of graphs, regions, the split of a graph, compiled regions and graphs.

The stages import this module; it imports none of them.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import logging
import operator
import types
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.autograd import forward_ad

from ..common import operator_watchers
from ..common.safety_net import caught
from ..errors import Reason, SessionError, WrongResultError, first_line
from ..events import count, is_tried
from .layout import Layout

if TYPE_CHECKING:  # the exporter imports this module, and does not know the runtime
    import onnx_ir as ir

    from passes.engine.results import PassResult

    from ..partition.program import Program, RegionProgram
    from ..partition.provider_check import CheckedSession
    from ..runtime.binding import BoundSession
    from ..runtime.executable import Executable
    from ..weights.frozen_session import FrozenSession

logger = logging.getLogger(__name__)

MOST_FAILURES = 3
"""Calls in which our own code or ONNX Runtime's binding fails, after which PyTorch runs the region."""

Runner = Callable[[list[object]], object]
"""A compiled graph: takes its arguments boxed (in one list, which it empties) and returns the results."""


@dataclasses.dataclass(frozen=True)
class GraphName:
    """Which graph: the number of the Dynamo graph, and ``forward``, ``backward``, ``inference`` or, before
    AOTAutograd told them apart, an empty direction."""

    index: int
    direction: str = ""

    def __str__(self) -> str:
        return f"graph {self.index} {self.direction}".rstrip()


@dataclasses.dataclass(frozen=True)
class Output:
    """One result of a region's model: an FX node, and the order its dimensions have in memory.

    ``permutation`` is ``None`` for a row-major result. Otherwise the model returns the result transposed by it,
    which is row-major in memory, under the name ``<node>__memory``, so that the caller can present it with the
    strides eager gives it without a copy.
    """

    node: fx.Node
    permutation: tuple[int, ...] | None = None
    index: int | None = None
    """Which result, if ``node`` itself has several."""


@dataclasses.dataclass(frozen=True)
class Input:
    """One argument of a region's model, and like an ``Output`` the order its dimensions have in memory."""

    node: fx.Node
    permutation: tuple[int, ...] | None = None


def operator_name(node: fx.Node) -> str:
    """What a node calls: an operator by its name, a function with its module: ``operator.mul``, ``math.trunc``."""
    target = node.target
    name = getattr(target, "__qualname__", None)
    if name is None or isinstance(target, (str, torch._ops.OpOverload, torch._ops.HigherOrderOperator)):
        return str(target)
    return f"{target.__module__.lstrip('_')}.{name}"


def is_operator(call: fx.Node) -> bool:
    """Whether a call computes something, and does not only take one of several results."""
    return call.target is not operator.getitem


@dataclasses.dataclass
class Region:
    """Nodes of one graph that run as one ONNX model.

    Attributes:
        index: position among the graph's regions.
        nodes: in execution order.
        inputs: nodes outside that it reads: tensors and symbolic integers.
        outputs: nodes of its own that others read.
        layouts: how each output lies in memory in eager.
    """

    index: int
    nodes: list[fx.Node]
    inputs: list[Input]
    outputs: list[Output]
    layouts: list[Layout]

    @property
    def operators(self) -> list[fx.Node]:
        """The nodes that compute something, see ``is_operator``."""
        return [node for node in self.nodes if is_operator(node)]


@dataclasses.dataclass
class Split:
    """A graph's regions, and for each node that stays in PyTorch the reason."""

    regions: list[Region]
    in_pytorch: dict[fx.Node, Reason]

    @functools.cached_property
    def coverage(self) -> Coverage:
        """How much of the graph runs on ONNX Runtime."""
        in_pytorch = {node: reason for node, reason in self.in_pytorch.items() if is_operator(node)}
        return Coverage(sum(len(region.operators) for region in self.regions), in_pytorch)


@dataclasses.dataclass(frozen=True)
class Coverage:
    """How much of a graph runs on ONNX Runtime: the one account from which counters, log, manifest and tables take it.

    Attributes:
        on_onnx: operators that run on ONNX Runtime.
        in_pytorch: operators that run in PyTorch, each with its reason.
    """

    on_onnx: int
    in_pytorch: dict[fx.Node, Reason]

    @property
    def total(self) -> int:
        """All operators of the graph."""
        return self.on_onnx + len(self.in_pytorch)

    @property
    def share(self) -> float:
        """The share of the operators that run on ONNX Runtime, 0 to 1; 1 where there are none."""
        return self.on_onnx / self.total if self.total else 1.0

    @property
    def fallbacks(self) -> collections.Counter[tuple[str, Reason]]:
        """How often an operator (``aten.sort.default``) runs in PyTorch for a reason."""
        return collections.Counter((operator_name(node), reason) for node, reason in self.in_pytorch.items())


@dataclasses.dataclass(eq=False)
class RunnableRegion:
    """What runs for a region, and all that production keeps of it: no graph, and no model but the serialized one.

    Attributes:
        graph: the graph it is a part of.
        index: position among the graph's regions.
        session: what runs on ONNX Runtime; it may renew its session when weights change.
        in_pytorch: the region's code for PyTorch: what runs where the session fails.
        must_run_on_onnx: whether a failure of the session is an error (``fallback="error"``) rather than PyTorch's to
            make good.
        failures: calls on which the session failed.
        last_failure: what happened in the last of them, a line.
    """

    graph: GraphName
    index: int
    session: BoundSession | FrozenSession | CheckedSession
    in_pytorch: Callable[..., Sequence[object]]
    must_run_on_onnx: bool = False

    def __post_init__(self) -> None:
        self.__name__ = region_name(self.index)  # as tools show it
        self.failures = 0
        self.last_failure = ""
        self._has_told_of_tangents = False
        self._internal_failures = 0

    def __call__(self, *args: object) -> Sequence[object]:
        if operator_watchers.is_watched and operator_watchers.watch_this_thread():
            return operator_watchers.call(self, args)
        return self._run(self.session, args)

    def run_to_compare(self, args: Sequence[object]) -> tuple[Sequence[object], BoundSession | None]:
        """A call after a look at every byte of its weights: that some are not seen yet is no fault of a node.

        Returns:
            What a call returns, and the session that ran; ``None`` where there was none with these weights.
        """
        try:
            bound = self.session.chosen(args, complete=True)
        except SessionError as error:
            return self._rescue(args, error), None
        except Exception as error:
            return self._caught(args, error), None
        return self._run(bound, args), bound

    def _run(self, session: BoundSession | FrozenSession | CheckedSession, args: Sequence[object]) -> Sequence[object]:
        if forward_ad._current_level >= 0:
            return self._with_tangents(args)
        if self._internal_failures >= MOST_FAILURES:
            self.failures += 1
            return self.in_pytorch(*args)
        try:
            return session(args)
        except SessionError as error:
            return self._rescue(args, error)
        except Exception as error:
            return self._caught(args, error)

    def _with_tangents(self, args: Sequence[object]) -> Sequence[object]:
        """Runs the region in PyTorch inside forward-mode AD, whose tensors may carry tangents."""
        if self.must_run_on_onnx:
            raise SessionError(
                f"{self.graph} region {self.index} is called inside forward-mode AD, which only PyTorch can do. "
                "Remove options={'fallback': 'error'} to let it."
            )
        count("calls_inside_forward_ad")
        if not self._has_told_of_tangents:
            self._has_told_of_tangents = True
            logger.warning("%s region %d: PyTorch runs it inside forward-mode AD", self.graph, self.index)
        return self.in_pytorch(*args)

    def _caught(self, args: Sequence[object], error: Exception) -> Sequence[object]:
        """Runs the region in PyTorch after anything but the session failed; PyTorch's own error wins."""
        if is_tried():
            raise error
        results = self.in_pytorch(*args)
        self.failures += 1
        self.last_failure = f"our own code failed on this call: {type(error).__name__}: {first_line(str(error))}"
        if self.must_run_on_onnx:
            count("internal_failures")
            raise error
        self._internal_failures += 1
        instead = "PyTorch ran the region"
        if self._internal_failures == MOST_FAILURES:
            instead += ", and will from now on"
        caught(f"a call of {self.graph} region {self.index}", error, instead)
        return results

    def _rescue(self, args: Sequence[object], error: SessionError) -> Sequence[object]:
        """Runs the region in PyTorch after the session failed on these arguments; PyTorch's own error wins."""
        if is_tried():
            raise error
        results = self.in_pytorch(*args)
        is_wrong = isinstance(error, WrongResultError)
        count("wrong_results" if is_wrong else "runtime_failures")
        what = "ONNX Runtime returned another result than eager's" if is_wrong else "ONNX Runtime failed on this call"
        self.failures += 1
        self.last_failure = f"{what}: {first_line(str(error))}"
        if self.must_run_on_onnx:
            raise SessionError(
                f"{self.graph} region {self.index}: {what}: {error}. "
                "Remove options={'fallback': 'error'} to let PyTorch run the region."
            )
        if self.failures == 1:
            logger.warning(
                "%s region %d: PyTorch ran the region, as it will where this happens again: %s",
                self.graph,
                self.index,
                self.last_failure,
            )
        return results


def region_name(index: int) -> str:
    """What the code of a graph calls a region."""
    return f"region_{index}"


@dataclasses.dataclass(eq=False)
class CompiledRegion:
    """A region with its models, and the session that was made to know that ONNX Runtime takes them; for observers.

    Attributes:
        graph: the graph it is a part of.
        region: its nodes, inputs and outputs.
        model: the exported model.
        optimized_model: the model after the passes of the stage ``onnx``.
        passes: what these did.
        program: the model as it was given to ONNX Runtime, how it is run, and what PyTorch runs instead.
        session: what runs; it may renew its session when weights change.
    """

    graph: GraphName
    region: Region
    model: ir.Model
    optimized_model: ir.Model
    passes: list[PassResult]
    program: RegionProgram
    session: BoundSession | FrozenSession

    @property
    def executable(self) -> Executable:
        """The model as it was given to ONNX Runtime, and how it is run."""
        return self.program.executable

    @property
    def bound(self) -> BoundSession:
        """Its session; where several sets of weights have one each, that of any."""
        return self.session.bound


@dataclasses.dataclass(eq=False)
class CompiledGraph:
    """One forward, backward or inference graph: what was compiled of it, and what it was; for observers.

    Attributes:
        name: which graph.
        module: the graph of the stage ``post_grad``.
        split: its regions, and why the rest stays in PyTorch.
        regions: with their models.
        program: what is loaded.
        passes: what those of ``post_grad`` did.
        seconds: how long its stages took: ``split``, ``export``, ``onnx_passes``, ``session``, of all regions and
            attempts.
    """

    name: GraphName
    module: fx.GraphModule
    split: Split
    regions: list[CompiledRegion]
    program: Program
    passes: list[PassResult]
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)


def without_graph(module: fx.GraphModule) -> Callable[..., Any]:
    """The code of a graph module, with the attributes that it reads, and without the graph it was made of."""
    targets = [str(node.target) for op in ("get_attr", "call_module") for node in module.graph.find_nodes(op=op)]
    names = {target.split(".")[0] for target in targets}
    attributes = types.SimpleNamespace(**{name: getattr(module, name) for name in names})
    return types.MethodType(type(module).forward, attributes)
