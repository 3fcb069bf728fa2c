"""Splits a graph into regions for ONNX Runtime and nodes for PyTorch.

A node goes to ONNX if it has a translation, ONNX Runtime has kernels for it, and no fault of either is known. A session
of the node alone tests for kernels, which is the only reliable test; equal nodes share the answer. Other nodes run in
PyTorch, or become constants if they depend on no argument. The regions are as few as the order of nodes allows; random
operators and side effects keep their order.
"""

from __future__ import annotations

import collections
import heapq
import operator
from collections.abc import Container, Sequence

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from ..errors import KernelFaultError, Kind, Reason, SessionError, TranslationError
from ..exporter.known_constants import KNOWN_VALUE, nodes_of_known_values
from ..exporter.registration import registered_converter
from ..exporter.results import is_inferred
from ..exporter.signature import signature, used_results
from ..exporter.translate import find_translation, fold_constants, translate
from ..exporter.upstream_faults import draws_random_numbers, faults_of, reason_not_to_translate
from ..graphs.aliases import IN_PYTORCH
from ..graphs.artifacts import Region, RegionInput, RegionOutput, Split, attribute, region_name
from ..graphs.in_place import AFTER, write_in_place
from ..graphs.layout import ROW_MAJOR, Layout, layout_of
from ..graphs.operators import is_collective
from ..runtime.integer_kernels import is_for_any_processor
from ..runtime.kernel_faults import reason_against_model
from ..runtime.node_support import ANSWERS
from ..runtime.providers import Provider, device_types, fallbacks, provider_name
from .dry_run import example_sizes, wrong_result
from .faster_in_pytorch import VIEWS_ONLY, is_shape_operator, views_of_arguments
from .needed_passes import with_needed_passes

_FASTPATH = frozenset(
    {torch.ops.aten._transformer_encoder_layer_fwd.default, torch.ops.aten._native_multi_head_attention.default}
)
"""Whole layers of ``nn.TransformerEncoder`` and ``nn.MultiheadAttention`` in inference, each as one operator."""

_WITHOUT_FASTPATH = "torch.backends.mha.set_fastpath_enabled(False), before the model is compiled,"

_IS_FASTPATH = Reason(
    Kind.NO_TRANSLATION,
    f"no translation to ONNX; {_WITHOUT_FASTPATH} makes PyTorch use operators that have one",
    remedy=_WITHOUT_FASTPATH.rstrip(","),
)

_SYMBOLIC_STRIDES = Reason(Kind.UNKNOWN_SHAPE, "its result's strides are not known before the call")

ORIGINAL = "original_node"
"""Key in the ``meta`` of an assembled graph's nodes: the node of the original graph with the same value."""


class Support:
    """Decides whether ONNX Runtime can run a node.

    Args:
        opset: of the models.
        providers: in order of preference.
        only_first: whether the first provider must run all of a node.
        must_run_on_onnx: whether a node that they reject, and that those after the first run, is in a region
            (``fallback="error"``). The region then runs on those.
    """

    def __init__(
        self,
        opset: int,
        providers: Sequence[Provider],
        *,
        only_first: bool = False,
        must_run_on_onnx: bool = False,
    ) -> None:
        self.opset = opset
        self._only_first = only_first
        self.providers = tuple(providers)
        self._must_run_on_onnx = must_run_on_onnx
        self._names = [provider_name(provider) for provider in providers]

    def reason_against(self, node: fx.Node) -> Reason | None:
        """Why a node must run in PyTorch; ``None`` if ONNX Runtime can run it."""
        if node.op != "call_function":
            return Reason(Kind.NOT_IN_ONNX, f"ONNX has no {node.op} nodes")
        if IN_PYTORCH in node.meta:
            reason: Reason = node.meta[IN_PYTORCH]
            return reason
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            producer = node.args[0]
            if isinstance(producer.meta.get("val"), (tuple, list)):
                return self.reason_against(producer)
        if "val" in node.meta and (against := reason_not_to_translate(node)) is not None:
            return against
        faults = list(faults_of(node)) if "val" in node.meta and registered_converter(node.target) is None else []
        for fault in faults:
            if fault.is_of(self._names):
                return fault.reason
        if find_translation(node.target, self.opset) is None:
            return _IS_FASTPATH if node.target in _FASTPATH else Reason(Kind.NO_TRANSLATION, "no translation to ONNX")
        if is_ordered(node) and not draws_random_numbers(node):
            return Reason(Kind.NOT_IN_ONNX, "it has side effects")
        if "val" not in node.meta or any("val" not in arg.meta for arg in node.all_input_nodes):
            return Reason(Kind.UNKNOWN_SHAPE, "its shapes are not known")
        devices = _devices(node)
        elsewhere = next((item for item in devices if item.type not in device_types(self.providers)), None)
        if elsewhere is not None:
            return Reason(Kind.DEVICE, f"no execution provider in {self._names} for {elsewhere}")
        if len(devices) > 1:
            return Reason(Kind.DEVICE, "it copies between devices")
        if faults and self._cached_probe(node, only_first=True) is not None:
            return faults[0].reason  # the CPU provider, which has the fault, would run what the first provider does not
        rejection = self._cached_probe(node, only_first=self._only_first)
        if rejection is not None and self._must_run_on_onnx:
            _, *alternatives = fallbacks(self.providers, {device.type for device in devices})
            if any(self._cached_probe(node, others) is None for others in alternatives):
                return None
        return rejection

    def _cached_probe(
        self, node: fx.Node, providers: Sequence[Provider] | None = None, *, only_first: bool = False
    ) -> Reason | None:
        """See ``probe``."""
        translation = find_translation(node.target, self.opset)
        is_deterministic, any_ = torch.are_deterministic_algorithms_enabled(), is_for_any_processor()
        # The function, not its id, which may be reused after the function is freed.
        asked = self.providers if providers is None else providers
        question = (translation, self.opset, repr(asked), only_first, is_deterministic, any_, signature(node))
        return ANSWERS.get(question, lambda: self.probe(node, asked, only_first=only_first))

    def probe(
        self, node: fx.Node, providers: Sequence[Provider] | None = None, *, only_first: bool = False
    ) -> Reason | None:
        """Translates a node and creates a session of it alone; returns why that fails, or ``None``.

        Args:
            node: a node with ``meta["val"]`` that has a translation.
            providers: of the session; by default all.
            only_first: whether the first provider must run all of it.
        """
        inputs = [RegionInput(arg) for arg in node.all_input_nodes]
        providers = self.providers if providers is None else providers
        try:
            model = translate([node], inputs, results_of(node), opset=self.opset, name=node.name)
            model = with_needed_passes(model)
            sizes = example_sizes(node, model)
            error = reason_against_model(model, providers, only_first=only_first, sizes=sizes)
            if error is not None and error.reason.kind is not Kind.OUT_OF_MEMORY:
                error = reason_against_model(fold_constants(model), providers, only_first=only_first, sizes=sizes)
            if error is None and not is_inferred(node, find_translation(node.target, self.opset), self.opset):
                return wrong_result(node, model)
        except TranslationError as failure:
            return _out_of_memory(failure) or failure.reason
        return None if error is None else error.reason


class InPytorch(Support):
    """Keeps all nodes in PyTorch, for a graph that is faster there."""

    def __init__(self, opset: int, providers: Sequence[Provider], why: str) -> None:
        super().__init__(opset, providers)
        self._reason = Reason(Kind.FASTER_IN_PYTORCH, why)

    def reason_against(self, node: fx.Node) -> Reason | None:
        return self._reason


def _out_of_memory(error: BaseException | None) -> Reason | None:
    """The reason of an error that was caused by a ``MemoryError``, else ``None``."""
    while error is not None:
        if isinstance(error, MemoryError):
            return Reason(Kind.OUT_OF_MEMORY, "its translation ran out of memory")
        error = error.__cause__
    return None


def _devices(node: fx.Node) -> set[torch.device]:
    """The devices of a node's arguments and results that are read. Single numbers on the CPU do not count: a session
    for a GPU reads and returns them, too."""
    value = node.meta["val"]
    results = [value[i] for i in used_results(node)] if isinstance(value, (tuple, list)) else [value]
    items = [*results, *(arg.meta["val"] for arg in node.all_input_nodes)]
    tensors = [item for item in tree_leaves(items) if isinstance(item, torch.Tensor)]
    devices = {item.device for item in tensors}
    return {item.device for item in tensors if item.dim() or item.device.type != "cpu"} or devices


def results_of(node: fx.Node) -> list[RegionOutput]:
    """The results of a node that are read and not ``None``."""
    value = node.meta["val"]
    if isinstance(value, (tuple, list)):
        return [RegionOutput(node, index=i) for i in used_results(node) if value[i] is not None]
    return [RegionOutput(node)]


def split_graph(graph: fx.GraphModule, support: Support, rejected: dict[fx.Node, Reason]) -> Split:
    """Splits a graph into regions for ONNX Runtime and nodes for PyTorch.

    Args:
        graph: an ATen graph with ``meta["val"]`` on every node.
        support: which nodes ONNX Runtime can run.
        rejected: nodes that must run in PyTorch whatever ``support`` says, with the reason.
    """
    calls = [node for node in graph.graph.nodes if node.op not in ("placeholder", "output", "get_attr")]
    while True:
        in_pytorch = _in_pytorch(calls, support, rejected)
        in_pytorch.update(dict.fromkeys(views_of_arguments(calls, in_pytorch), VIEWS_ONLY))
        regions: list[Region] = []
        for nodes in _partition(calls, in_pytorch):
            if all(is_shape_operator(node) for node in nodes):
                in_pytorch.update(dict.fromkeys(nodes, VIEWS_ONLY))
            else:
                regions.append(make_region(len(regions), nodes))
        symbolic = [
            output.node
            for region in regions
            for output, layout in zip(region.outputs, region.layouts, strict=True)
            if layout.is_symbolic
        ]
        if not symbolic:
            return Split(regions, in_pytorch)
        rejected = rejected | dict.fromkeys(map(producer_of, symbolic), _SYMBOLIC_STRIDES)


def whole_graph(graph: fx.GraphModule, support: Support) -> tuple[Region, dict[fx.Node, Reason]]:
    """A graph as one region, whose inputs and outputs are those of the graph, row-major; for a file.

    Returns:
        The region, and the nodes that ONNX Runtime cannot run, each with its reason. Results that share memory in eager
        are no reason, as a session's share none; nor is uninitialized memory, which may be 0.
    """
    for node in graph.graph.nodes:
        if IN_PYTORCH in node.meta and node.meta[IN_PYTORCH].kind is Kind.SHARED_MEMORY:
            del node.meta[IN_PYTORCH]
    calls = [node for node in graph.graph.nodes if node.op not in ("placeholder", "output", "get_attr")]
    inputs = [RegionInput(node) for node in graph.graph.find_nodes(op="placeholder")]
    outputs = [RegionOutput(node) for node in graph.graph.output_node().args[0]]
    region = Region(0, calls, inputs, outputs, [ROW_MAJOR] * len(outputs))
    in_pytorch = _in_pytorch(calls, support, {})
    return region, {node: reason for node, reason in in_pytorch.items() if reason.kind is not Kind.UNINITIALIZED}


def _in_pytorch(calls: Sequence[fx.Node], support: Support, rejected: dict[fx.Node, Reason]) -> dict[fx.Node, Reason]:
    """The nodes that run in PyTorch, with reasons; sets ``meta[KNOWN_VALUE]`` of all nodes."""
    result = {}
    gpu: torch.device | None = None  # a session runs on one
    known = nodes_of_known_values(
        node for node in calls if producer_of(node) not in rejected and IN_PYTORCH not in node.meta
    )
    for node in calls:
        reason = rejected.get(producer_of(node)) or support.reason_against(node)
        if reason is None and "val" in node.meta:
            others = {device for device in _devices(node) if device.type == "cuda"}
            gpu = gpu or next(iter(others), None)
            if others - {gpu}:
                reason = Reason(Kind.DEVICE, f"another node of the graph runs on {gpu}")
        node.meta[KNOWN_VALUE] = reason is not None and not reason.by_design and node in known
        if reason is not None and not node.meta[KNOWN_VALUE]:
            result[node] = reason
    return result


def producer_of(node: fx.Node) -> fx.Node:
    """The node that computes a result: the source of a ``getitem``, else the node itself."""
    while node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _partition(calls: Sequence[fx.Node], in_pytorch: Container[fx.Node]) -> list[list[fx.Node]]:
    """The nodes of each region in execution order; the regions in the order of their first nodes."""
    by_round: dict[int, list[fx.Node]] = {}
    rounds = _rounds(calls, in_pytorch)
    for node in calls:
        if node not in in_pytorch:
            by_round.setdefault(rounds[node], []).append(node)
    return list(by_round.values())


def _rounds(calls: Sequence[fx.Node], in_pytorch: Container[fx.Node]) -> dict[fx.Node, int]:
    """The round in which each node runs, counted from the end: 0 is the last. A round is one region, then PyTorch.

    A node runs as late as its readers, and what overwrites its arguments (``AFTER``), allow: in the earliest round of
    one of these; or in the one before that, if it runs in PyTorch and the other does not. So the number of rounds is
    minimal, and a value that only one region reads is computed there. The time is linear; PyTorch's
    ``CapabilityBasedPartitioner`` took 38 times as long for 4 times the nodes (6.4 s for 2,000 with 106 in PyTorch,
    version 2.13).

    Args:
        calls: the nodes of a graph in execution order, without inputs and output.
        in_pytorch: those that run in PyTorch.
    """
    rounds: dict[fx.Node, int] = {}
    following: fx.Node | None = None
    overwriting: collections.defaultdict[fx.Node, list[fx.Node]] = collections.defaultdict(list)
    for node in reversed(calls):
        readers = [user for user in (*node.users, *overwriting[node]) if user in rounds]
        for earlier in node.meta.get(AFTER, ()):
            overwriting[earlier].append(node)
        if is_ordered(node):
            readers += [] if following is None else [following]
            following = node
        here = node in in_pytorch
        rounds[node] = max((rounds[user] + (here and user not in in_pytorch) for user in readers), default=0)
    for node in calls:  # a ``getitem`` is not a node in ONNX: it runs with its source
        source = node.args[0] if node.target is operator.getitem else None
        if isinstance(source, fx.Node) and source in rounds and (node in in_pytorch) == (source in in_pytorch):
            rounds[node] = rounds[source]
    return rounds


def is_ordered(node: fx.Node) -> bool:
    """Whether a node must keep its order among such nodes: collectives, random numbers, side effects."""
    if node.op not in ("call_function", "call_module", "call_method"):
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        if is_collective(node.target):
            return True
        return draws_random_numbers(node) or node.is_impure(impure_random=False)
    return node.target is not operator.getitem and not _is_pure_function(node.target)


def _is_pure_function(target: object) -> bool:
    return getattr(target, "__module__", "") in ("_operator", "operator", "math", "builtins", "torch")


def make_region(index: int, nodes: list[fx.Node]) -> Region:
    """A region of some nodes, in execution order, with its inputs and outputs."""
    inside = set(nodes)
    inputs: dict[fx.Node, None] = {}
    for node in nodes:
        inputs.update(dict.fromkeys(arg for arg in node.all_input_nodes if arg not in inside))
    outputs = [node for node in nodes if any(user not in inside for user in node.users)]
    layouts = [_layout(node) for node in outputs]
    return Region(
        index,
        nodes,
        [RegionInput(node, _layout(node).permutation) for node in inputs],
        [RegionOutput(node, layout.permutation) for node, layout in zip(outputs, layouts, strict=True)],
        layouts,
    )


def depth_first(region: Region) -> list[fx.Node]:
    """The nodes of a region in an order that needs little memory: depth first, from the last output to the first.

    ONNX Runtime derives its execution order from the model's. In PyTorch's backward graphs, recomputed forward values
    come first, and stay in memory until a gradient needs them. For a BERT of 4 layers, intermediate values take 705 MB
    in PyTorch's order and 395 MB in this one (ONNX Runtime 1.32).
    """
    position = {node: i for i, node in enumerate(region.nodes)}
    ordered: dict[fx.Node, None] = {}
    for result in (*(output.node for output in reversed(region.outputs)), *region.nodes):
        stack = [result]
        while stack:
            waiting = [arg for arg in stack[-1].all_input_nodes if arg in position and arg not in ordered]
            if waiting:
                stack.append(min(waiting, key=position.__getitem__))
            else:
                ordered[stack.pop()] = None
    return list(ordered)


def _layout(node: fx.Node) -> Layout:
    value = node.meta["val"]
    return layout_of(value) if isinstance(value, torch.Tensor) else ROW_MAJOR


def rejected_nodes(region: Region, error: SessionError | TranslationError, support: Support) -> dict[fx.Node, Reason]:
    """The nodes because of which a region was rejected, with reasons: the one that the error names, else those that are
    rejected alone."""
    named = [node for node in region.nodes if node.name == error.node]
    if named or isinstance(error, KernelFaultError):
        return {producer_of(node): error.reason for node in named or region.nodes}
    reasons = {node: support.probe(node) for node in region.operators}
    return {node: reason for node, reason in reasons.items() if reason is not None}


def all_nodes(region: Region, error: SessionError | TranslationError) -> dict[fx.Node, Reason]:
    """All nodes of a region that was rejected, for a reason that is not known."""
    return dict.fromkeys(region.nodes, Reason(error.reason.kind, f"rejected with its region: {error.reason}"))


def assemble(graph: fx.GraphModule, regions: Sequence[Region]) -> fx.Graph:
    """A graph in which each region is one call of a module ``region_i``, which returns the list of its outputs.

    The graph takes its arguments boxed (one list, emptied by the call).

    Args:
        graph: the graph that was split; not changed.
        regions: of the graph; their indices count from 0.
    """
    result = fx.Graph()
    result.set_codegen(fx.graph._BoxedCodeGen())
    copies: dict[fx.Node, fx.Node] = {}
    for unit in execution_order(graph, regions):
        if isinstance(unit, fx.Node):
            copies[unit] = result.node_copy(unit, copies.__getitem__)
            if AFTER in unit.meta:
                copies[unit] = write_in_place(copies[unit])
            copies[unit].meta[ORIGINAL] = unit
            continue
        arguments = tuple(copies[item.node] for item in unit.inputs)
        call = result.call_module(region_name(unit.index), arguments)
        for i, output in enumerate(unit.outputs):
            copies[output.node] = result.call_function(operator.getitem, (call, i))
            copies[output.node].meta[ORIGINAL] = output.node
    return result


def attributes_of(graph: fx.GraphModule) -> dict[str, object]:
    """The attributes and submodules that a graph reads, by name."""
    return {
        str(node.target): attribute(graph, str(node.target))
        for op in ("get_attr", "call_module")
        for node in graph.graph.find_nodes(op=op)
    }


def execution_order(graph: fx.GraphModule, regions: Sequence[Region]) -> list[fx.Node | Region]:
    """Nodes and regions in topological order, as close to the graph's order as possible.

    Of those that are ready, the first in the graph runs first. So the writes to inputs (``copy_``), which AOTAutograd
    puts last, run after all reads of the old values, and the output comes last.
    """
    region_of = {node: region for region in regions for node in region.nodes}
    units: dict[int, fx.Node | Region] = {}
    unit_of: dict[fx.Node, int] = {}
    for position, node in enumerate(graph.graph.nodes):
        region = region_of.get(node)
        key = position if region is None else unit_of.get(region.nodes[0], position)
        units.setdefault(key, node if region is None else region)
        unit_of[node] = key
    waiting: dict[int, set[int]] = {key: set() for key in units}
    previous: int | None = None
    for node, key in unit_of.items():
        waiting[key].update(unit_of[arg] for arg in (*node.all_input_nodes, *node.meta.get(AFTER, ())))
        if is_ordered(node):
            if previous is not None:
                waiting[key].add(previous)
            previous = key
    users: dict[int, list[int]] = {key: [] for key in units}
    for key, needed in waiting.items():
        needed.discard(key)
        for other in needed:
            users[other].append(key)
    ready = [key for key, needed in waiting.items() if not needed]  # ascending, so it is a heap
    order = []
    while ready:
        key = heapq.heappop(ready)
        order.append(units[key])
        for user in users[key]:
            waiting[user].discard(key)
            if not waiting[user]:
                heapq.heappush(ready, user)
    assert len(order) == len(units), "regions and nodes wait for each other"
    return order


def region_graph(region: Region) -> fx.Graph:
    """A region as a graph, which returns the list of the region's outputs."""
    result = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for item in region.inputs:
        copies[item.node] = result.placeholder(item.node.name)
        copies[item.node].meta = dict(item.node.meta)
    for node in region.nodes:
        copies[node] = result.node_copy(node, copies.__getitem__)
    result.output([copies[item.node] for item in region.outputs])
    return result
