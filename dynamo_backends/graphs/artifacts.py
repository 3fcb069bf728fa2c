"""Data that the stages exchange: names of graphs, regions, the split of a graph, compiled regions and graphs.

``Split`` says what runs where. ``RunnableRegion`` runs a region on ONNX Runtime, or in PyTorch if that fails.
``CompiledRegion`` and ``CompiledGraph`` keep all that was compiled, for observers.
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
from ..common.backoff import BackoffBySizes, sizes_of
from ..common.safety_net import caught
from ..errors import Reason, SessionError, WrongResultError, first_line
from ..events import count, is_candidate_run
from .in_place import is_write_back
from .layout import Layout

if TYPE_CHECKING:  # the exporter imports this module, and must not import the runtime
    import onnx_ir as ir

    from passes.engine.results import PassResult

    from ..partition.program import Program, RegionProgram
    from ..partition.provider_check import CheckedSession
    from ..runtime.binding import BoundSession
    from ..runtime.executable import Executable
    from ..runtime.product_kernels import ProductKernel
    from ..weights.frozen_session import FrozenSession

logger = logging.getLogger(__name__)

_FAKE = torch._C._TorchDispatchModeKey.FAKE

Runner = Callable[[list[object]], object]
"""A compiled graph. It takes its arguments boxed, in one list that it empties, and returns the results."""


@dataclasses.dataclass(frozen=True)
class GraphName:
    """The number of a Dynamo graph, and the direction ``forward``, ``backward`` or ``inference``; ``""`` before
    AOTAutograd.

    ``frame`` is the number of the Python frame, the same when it is compiled again; ``None`` if it is not known.
    """

    index: int
    direction: str = ""
    frame: int | None = dataclasses.field(default=None, compare=False)

    def __str__(self) -> str:
        return f"graph {self.index} {self.direction}".rstrip()


@dataclasses.dataclass(frozen=True)
class RegionOutput:
    """A result of a region's model, and the order of its dimensions in memory.

    Attributes:
        node: the FX node.
        permutation: ``None`` if it is row-major. Else the model returns it transposed by this, named
            ``<node>__memory``; the caller transposes back without a copy, and so gets eager's strides.
        index: which of the node's results, if it has several.
    """

    node: fx.Node
    permutation: tuple[int, ...] | None = None
    index: int | None = None


@dataclasses.dataclass(frozen=True)
class RegionInput:
    """An argument of a region's model, and the order of its dimensions in memory, as in ``RegionOutput``."""

    node: fx.Node
    permutation: tuple[int, ...] | None = None


def operator_name(node: fx.Node) -> str:
    """The name of what a node calls: ``aten.add.Tensor``, ``operator.mul``, ``math.trunc``."""
    target = node.target
    name = getattr(target, "__qualname__", None)
    if name is None or isinstance(target, (str, torch._ops.OpOverload, torch._ops.HigherOrderOperator)):
        return str(target)
    return f"{target.__module__.lstrip('_')}.{name}"


def is_operator(call: fx.Node) -> bool:
    """Whether a call is an operator of the model: not ``getitem``, which selects one of several results, and not what
    AOTAutograd adds to copy a new value into an argument."""
    return call.target is not operator.getitem and not is_write_back(call)


@dataclasses.dataclass
class Region:
    """Nodes of one graph that run as one ONNX model.

    Attributes:
        index: position among the graph's regions.
        nodes: in execution order.
        inputs: nodes outside of the region that it reads: tensors and symbolic integers.
        outputs: nodes of the region that other nodes read.
        layouts: the memory layout of each output in eager.
    """

    index: int
    nodes: list[fx.Node]
    inputs: list[RegionInput]
    outputs: list[RegionOutput]
    layouts: list[Layout]

    @property
    def operators(self) -> list[fx.Node]:
        """The nodes that are operators, see ``is_operator``."""
        return [node for node in self.nodes if is_operator(node)]


@dataclasses.dataclass
class Split:
    """The regions of a graph, and the reason for each node that runs in PyTorch."""

    regions: list[Region]
    in_pytorch: dict[fx.Node, Reason]

    @functools.cached_property
    def coverage(self) -> Coverage:
        """How much of the graph runs on ONNX Runtime."""
        in_pytorch = {node: reason for node, reason in self.in_pytorch.items() if is_operator(node)}
        return Coverage(sum(len(region.operators) for region in self.regions), in_pytorch)


@dataclasses.dataclass(frozen=True)
class Coverage:
    """How much of a graph runs on ONNX Runtime; counters, log, manifest and tables all use it.

    Attributes:
        on_onnx: the number of operators on ONNX Runtime.
        in_pytorch: the operators in PyTorch, each with its reason.
    """

    on_onnx: int
    in_pytorch: dict[fx.Node, Reason]

    @property
    def total(self) -> int:
        """The number of operators of the graph."""
        return self.on_onnx + len(self.in_pytorch)

    @property
    def share(self) -> float:
        """The share of operators on ONNX Runtime, 0 to 1; 1 if there are no operators."""
        return self.on_onnx / self.total if self.total else 1.0

    @property
    def fallbacks(self) -> collections.Counter[tuple[str, Reason]]:
        """The number of operators in PyTorch by name (``aten.sort.default``) and reason."""
        return collections.Counter((operator_name(node), reason) for node, reason in self.in_pytorch.items())


@dataclasses.dataclass(eq=False)
class RunnableRegion:
    """Runs a region on ONNX Runtime, or in PyTorch if that fails. It keeps no FX graph, and only a serialized model.

    After a failure PyTorch also runs some of the next calls, see ``common.backoff``.

    Attributes:
        graph: the graph that it is a part of.
        index: position among the graph's regions.
        session: runs it on ONNX Runtime; may rebuild its session when weights change.
        in_pytorch: the same in PyTorch.
        must_run_on_onnx: whether failures are raised (``fallback="error"``).
        failures: the number of calls that PyTorch ran because of failures.
        last_failure: the last failure, in a line.
    """

    graph: GraphName
    index: int
    session: BoundSession | FrozenSession | CheckedSession
    in_pytorch: Callable[..., Sequence[object]]
    must_run_on_onnx: bool = False

    def __post_init__(self) -> None:
        self.__name__ = region_name(self.index)  # shown by tools
        self.failures = 0
        self.last_failure = ""
        self._has_warned_of_tangents = False
        self._backoff = BackoffBySizes()

    def __call__(self, *args: object) -> Sequence[object]:
        if operator_watchers.is_watched and operator_watchers.has_watchers():
            return operator_watchers.call(self, args)
        return self._run(self.session, args)

    def run_to_compare(self, args: Sequence[object]) -> tuple[Sequence[object], BoundSession | None]:
        """A call that first checks every byte of the weights, so that no node is blamed for a stale weight.

        It always tries ONNX Runtime. Returns the results and the session that ran; ``None`` if there is none for these
        weights.
        """
        try:
            bound = self.session.chosen(args, complete=True)
        except Exception as error:
            return self._after_failure(args, error), None
        return self._run(bound, args, always=True), bound

    def _run(
        self,
        session: BoundSession | FrozenSession | CheckedSession,
        args: Sequence[object],
        *,
        always: bool = False,
    ) -> Sequence[object]:
        """``always``: also if the region failed before, and is to be tried in a later call."""
        if forward_ad._current_level >= 0:
            return self._with_tangents(args)
        if torch._C._get_dispatch_mode(_FAKE) is not None:
            return self.in_pytorch(*args)  # fake tensors have no memory
        failed_before = self._backoff.is_failing
        if failed_before and not always and not self._backoff.is_due(sizes_of(args)):
            results = self.in_pytorch(*args)
            self.failures += 1
            count("calls_after_failures", reason=self.last_failure)
            return results
        try:
            results = session(args)
        except Exception as error:
            return self._after_failure(args, error)
        if failed_before and self._backoff.succeeded(sizes_of(args)):
            count("recovered_regions")
            logger.info("%s region %d runs on ONNX Runtime again", self.graph, self.index)
        return results

    def _with_tangents(self, args: Sequence[object]) -> Sequence[object]:
        """Runs the region in PyTorch, because tensors may carry tangents of forward-mode AD."""
        if self.must_run_on_onnx:
            raise SessionError(
                f"{self.graph} region {self.index} is called inside forward-mode AD, which ONNX Runtime does not "
                "support. Remove options={'fallback': 'error'} to run it in PyTorch."
            )
        count("calls_inside_forward_ad", reason="forward-mode AD, which ONNX Runtime does not support")
        if not self._has_warned_of_tangents:
            self._has_warned_of_tangents = True
            logger.warning("%s region %d: inside forward-mode AD, PyTorch runs it", self.graph, self.index)
        return self.in_pytorch(*args)

    def _after_failure(self, args: Sequence[object], error: Exception) -> Sequence[object]:
        """Runs the region in PyTorch after ONNX Runtime or our code failed; if PyTorch fails too, its error is
        raised."""
        if is_candidate_run():
            raise error
        results = self.in_pytorch(*args)
        is_ours, is_wrong = not isinstance(error, SessionError), isinstance(error, WrongResultError)
        what = "ONNX Runtime returned a wrong shape or dtype" if is_wrong else "ONNX Runtime failed in this call"
        if is_ours:
            what = f"internal error in this call: {type(error).__name__}"
        self.failures += 1
        self.last_failure = f"{what}: {self._wrong_fake(args) or first_line(str(error))}"
        if not self.must_run_on_onnx:
            self._backoff.failed(sizes_of(args))
        elif is_ours:
            count("internal_failures")
            raise error
        instead = "PyTorch ran the region; ONNX Runtime is tried again in later calls"
        if is_ours:
            caught(f"a call of {self.graph} region {self.index}", error, instead)
            return results
        count("wrong_results" if is_wrong else "runtime_failures", reason=self.last_failure)
        if self.must_run_on_onnx:
            raise SessionError(
                f"{self.graph} region {self.index}: {what}: {error}. "
                "Remove options={'fallback': 'error'} to run the region in PyTorch."
            )
        if self.failures == 1:
            logger.warning("%s region %d: %s: %s", self.graph, self.index, instead, self.last_failure)
        return results

    def _wrong_fake(self, args: Sequence[object]) -> str:
        """Which argument is not as the region was compiled for, because of an operator's fake implementation; or
        ``""``."""
        try:
            bound = getattr(self.session, "bound", None)
        except SessionError:  # of all providers
            return ""
        specs = zip(bound.inputs if bound is not None else (), args, strict=False)
        unlike = ((spec.name, unlike_fake(value, spec.dtype, spec.sizes or ())) for spec, value in specs)
        return next((f"the operator of {name} returned {text}" for name, text in unlike if text), "")


def unlike_fake(value: object, dtype: torch.dtype | None, sizes: Sequence[object]) -> str:
    """How a tensor differs from the dtype and the sizes that a fake implementation said; ``""`` if it does not.

    Sizes that are no integers are symbolic.
    """
    if not isinstance(value, torch.Tensor) or dtype is None:
        return ""
    fixed = all(size == known for size, known in zip(value.shape, sizes, strict=False) if isinstance(known, int))
    if value.dtype == dtype and value.ndim == len(sizes) and fixed:
        return ""
    return (
        f"{value.dtype} {tuple(value.shape)}, and its fake implementation (register_fake) said {dtype} {tuple(sizes)}"
    )


def region_name(index: int) -> str:
    """The name of a region in the code of its graph."""
    return f"region_{index}"


@dataclasses.dataclass(eq=False)
class CompiledRegion:
    """A region with its models and its session, for observers.

    Attributes:
        graph: the graph that it is a part of.
        region: its nodes, inputs and outputs.
        model: the exported model.
        optimized_model: the model after the passes of the stage ``onnx``.
        passes: the results of these passes.
        program: the model that ONNX Runtime loads, its settings, and the code in PyTorch.
        session: runs the region; it may rebuild its session when weights change.
        products: how its products are computed, with the weights of the compile; empty if no observer watches.
    """

    graph: GraphName
    region: Region
    model: ir.Model
    optimized_model: ir.Model
    passes: list[PassResult]
    program: RegionProgram
    session: BoundSession | FrozenSession
    products: Sequence[ProductKernel] = ()

    @property
    def executable(self) -> Executable:
        """The model that ONNX Runtime loads, and its settings."""
        return self.program.executable

    @property
    def bound(self) -> BoundSession:
        """Its session; with several sets of weights, one of their sessions."""
        return self.session.bound


@dataclasses.dataclass(eq=False)
class CompiledGraph:
    """A forward, backward or inference graph and all that was compiled from it, for observers.

    Attributes:
        name: which graph.
        module: the graph of the stage ``post_grad``.
        split: its regions, and the reason for each node in PyTorch.
        regions: the compiled regions.
        program: what is loaded.
        passes: the results of the ``post_grad`` passes.
        seconds: the duration of ``split``, ``export``, ``onnx_passes`` and ``session``, over all regions and attempts.
    """

    name: GraphName
    module: fx.GraphModule
    split: Split
    regions: list[CompiledRegion]
    program: Program
    passes: list[PassResult]
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)


def without_graph(module: fx.GraphModule) -> Callable[..., Any]:
    """The code of a graph module with the attributes that it reads, so that the graph can be freed."""
    targets = [str(node.target) for op in ("get_attr", "call_module") for node in module.graph.find_nodes(op=op)]
    names = {target.split(".")[0] for target in targets}
    attributes = types.SimpleNamespace(**{name: getattr(module, name) for name in names})
    return types.MethodType(type(module).forward, attributes)
