"""``explain`` and ``coverage``: report what ``torch.compile`` and our backends do with a call, which runs in PyTorch.

::

    print(dynamo_backends.explain(model)(x))        # text
    dynamo_backends.coverage(model)(x)              # the same as data

They run the pipeline up to the split into regions. Regions with 8-bit tensors are also translated to ONNX, which tells
the kernels of their products.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo.utils import counters
from torch.utils import _pytree as pytree

from passes.engine.manager import PassManager
from passes.engine.results import PassResult

from ..errors import Reason, TranslationError
from ..exporter.upstream_faults import DROPOUT
from ..graphs import dynamo_frames
from ..graphs.artifacts import GraphName, Region, Split, operator_name
from ..graphs.locations import line_of_layer, module_path, short_file, where
from ..options import Options, parse_options
from ..partition.program import LoadedProgram
from ..partition.regions import Support, split_graph
from ..pipeline.emission import model_of
from ..pipeline.observer import Observer
from ..pipeline.pass_target import pass_target
from ..pipeline.pipeline import Pipeline
from ..pipeline.product_kernels import ProductKernel, product_kernels
from ..pipeline.stage_data import CompiledGraph, PostGradGraph
from ..pipeline.stages import Context, run_in_pytorch
from ..pipeline.usage import ExtensionUsage
from ..runtime.binding import InputSpec
from ..runtime.custom_operators import load_libraries
from ..runtime.provider_libraries import device_name, version_text
from ..runtime.providers import Provider, only_cpu, options_of, provider_name
from ..runtime.tensors import device_type_of
from ..weights.region_session import Weight
from .explanation import AtenGraph, DynamoGraph, Explanation, Fallback, Guard, Products, remedy_of

_MATRICES, _CONVOLUTIONS = "onnx.quantized_products", "onnx.quantized_convolutions"
_PASSES = frozenset({_MATRICES, _CONVOLUTIONS})


def explain(
    function: Callable[..., object],
    *,
    options: Mapping[str, object] | None = None,
    dynamic: bool | None = None,
) -> Callable[..., Explanation]:
    """Explains a call: graphs, graph breaks, operators, guards, and what runs on ONNX Runtime or in PyTorch, and why.

    Like ``torch._dynamo.explain``, this resets everything compiled in the process, before and after, and runs the
    function once in PyTorch, with its side effects. If results require gradients, the backward runs, too, and its
    gradients are dropped. No session of a whole graph is created, only small ones: to test new operators, and to find
    out which kernel ONNX Runtime would choose for quantized weights.

    Args:
        function: a function or a module.
        options: options of the backend ``onnxrt``. ``providers``, ``opset``, ``passes``, ``placement`` and
            ``custom_op_libraries`` change what is reported.
        dynamic: as in ``torch.compile``.

    Returns:
        A function with the arguments of ``function`` that returns an ``Explanation``, which prints as text.

    Raises:
        TypeError: ``function`` is not callable.
        ValueError: an option is unknown or has an invalid value.
    """
    if not callable(function):
        raise TypeError(f"explain takes a function or a module, not {function!r}: explain(model)(*inputs)")
    load_libraries(parse_options(options).custom_op_libraries)

    def explained(*args: Any, **kwargs: Any) -> Explanation:
        weights = list(function.parameters()) if isinstance(function, torch.nn.Module) else []
        device = device_type_of((args, kwargs, weights))
        checked = dataclasses.replace(parse_options(options, device=device), fallback="pytorch", verify_passes=False)
        torch._dynamo.reset()
        splitter = _Splitter(checked)
        listener = _GraphRecorder(splitter.usage)
        pipeline = Pipeline(checked, listener, splitter.compile)
        try:
            compiled = torch._dynamo.optimize(
                pipeline.compile_dynamo_graph, guard_export_fn=listener.guards.extend, dynamic=dynamic
            )
            results = compiled(function)(*args, **kwargs)
            _run_backward(results)
            listener.read_messages()
        finally:
            torch._dynamo.reset()
        details = {graph.details for graph in listener.graphs.values()}
        unused = {message: number for message, number in listener.messages.items() if message not in details}
        graphs = [
            dataclasses.replace(graph, graphs=splitter.graphs.get(index, []))
            for index, graph in listener.graphs.items()
        ]
        guards = [_guard(item) for item in listener.guards]
        notes = [
            *_engine_notes(graphs, checked.placement),
            *_provider_notes(graphs, checked.providers),
            *_advice(function),
        ]
        notes += [f"Dropout is active at {line}; model.eval() turns it off." for line in splitter.dropout]
        return Explanation(graphs, guards, unused, notes, splitter.usage.unused())

    return explained


def coverage(
    function: Callable[..., object],
    *,
    options: Mapping[str, object] | None = None,
    dynamic: bool | None = None,
) -> Callable[..., dict[str, Any]]:
    """The result of ``explain`` as data for JSON. Arguments and errors are the same.

    The keys are the attributes of ``explanation.Explanation``, ``DynamoGraph``, ``AtenGraph``, ``Fallback``,
    ``Products`` and ``Guard``; each of AOTAutograd's graphs also has ``share_on_onnx``.
    """
    explained = explain(function, options=options, dynamic=dynamic)
    return lambda *args, **kwargs: explained(*args, **kwargs).as_json()


def _engine_notes(graphs: Sequence[DynamoGraph], placement: str) -> Iterator[str]:
    """Which engine runs the graphs that can run on ONNX Runtime, and what gradients change."""
    parts = [part for graph in graphs for part in graph.graphs]
    is_training = any(not part.name.endswith("/inference") for part in parts)
    if not parts:
        return
    if placement == "measured" and not is_training:
        yield "Inference: ONNX Runtime runs the operators counted under 'on ONNX'."
    elif placement == "onnx":
        yield "ONNX Runtime runs the operators counted under 'on ONNX', because placement is 'onnx'."
    else:
        what = "graph" if placement == "fastest" else "training graph"
        engines = "PyTorch, ONNX Runtime and Inductor" if placement == "fastest" else "PyTorch and ONNX Runtime"
        yield (
            f"The operators counted under 'on ONNX' can run on ONNX Runtime. With placement {placement!r}, each {what} "
            f"is timed with {engines} in its first calls, and the fastest engine is kept. "
            "options={'placement': 'onnx'} always uses ONNX Runtime."
        )
    if is_training:
        yield (
            "Gradients are on. If they are not needed, call the model under torch.no_grad() or torch.inference_mode(): "
            "then it compiles one inference graph, which runs on ONNX Runtime with constant weights."
        )


def _provider_notes(graphs: Sequence[DynamoGraph], providers: Sequence[Provider]) -> Iterator[str]:
    """What the first provider runs, if it is not the CPU provider."""
    parts = [part for graph in graphs for part in graph.graphs]
    if parts and not only_cpu(providers):
        number, of = sum(part.on_first_provider for part in parts), sum(sum(part.on_onnx.values()) for part in parts)
        name, given = provider_name(providers[0]), options_of(providers[0])
        which = ", ".join(filter(None, [version_text(name, given), device_name(name, given)]))
        yield (
            f"{name} ({which or 'built into ONNX Runtime'}) runs {number} of the {of} operators counted under "
            "'on ONNX'; the next provider runs the others."
        )


def _advice(function: Callable[..., object]) -> Iterator[str]:
    if callable(getattr(function, "generate", None)):
        yield (
            "torch.compile(model).generate() runs the model without compiling it. Compile its forward instead: "
            "model.forward = torch.compile(model.forward, backend='onnxrt')."
        )


class _GraphRecorder(Observer):
    """Records Dynamo's graphs and messages."""

    def __init__(self, usage: ExtensionUsage) -> None:
        self._usage = usage
        self.graphs: dict[int, DynamoGraph] = {}
        self.guards: list[Any] = []
        self.messages: collections.Counter[str] = collections.Counter()
        self._known = _dynamo_messages()  # on functions compiled before

    def read_messages(self) -> list[str]:
        """Dynamo's new messages on code that it does not trace."""
        now = _dynamo_messages()
        new, self._known = now - self._known, now
        for message, number in new.items():
            self.messages[message.strip()] += number
        return [message.strip() for message in new]

    def stage(self, name: str, graph: GraphName, artifact: object) -> None:
        super().stage(name, graph, artifact)
        if name != "dynamo":
            return
        assert isinstance(artifact, fx.GraphModule)
        frame = dynamo_frames.frame_being_compiled()
        assert frame is not None  # Dynamo is active
        new = self.read_messages()
        details = frame.details
        if details not in new and len(new) == 1:  # for data-dependent branches, the frame names only bytecode
            details = new[0]
        self.graphs[graph.index] = DynamoGraph(
            graph.index,
            frame.function,
            dynamo_frames.place_being_compiled(),
            frame.reason,
            f"{short_file(frame.end_file)}:{frame.end_line}" if frame.end_line else "",
            details if frame.details else "",
            dict(collections.Counter(_callee(node) for node in artifact.graph.nodes if node.op.startswith("call_"))),
            [],
        )

    def gave_up(self, graph: GraphName, why: str) -> None:
        self.graphs.pop(graph.index, None)

    def passes(self, graph: GraphName, results: Sequence[PassResult]) -> None:
        self._usage.add_passes(results)


def _dynamo_messages() -> collections.Counter[str]:
    """Dynamo's messages in this process on code that it does not trace, with their number."""
    return collections.Counter(counters["graph_break"]) + collections.Counter(counters["unimplemented"])


class _Splitter:
    """Records how graphs are split into regions, and runs them in PyTorch."""

    def __init__(self, options: Options) -> None:
        self._options = options
        support = Support(options.opset, options.providers)
        self._on_first = Support(options.opset, options.providers, only_first=True)
        self._passes = PassManager(options.passes, pass_target(options, support), explain=True)
        self.graphs: dict[int, list[AtenGraph]] = {}
        self.usage = ExtensionUsage()
        self.dropout: dict[str, None] = {}  # the lines where it is active

    def compile(self, context: Context, graph: PostGradGraph) -> tuple[CompiledGraph, LoadedProgram]:
        """See ``stages.compile_graph``."""
        split = split_graph(graph.module, context.support, {})
        self.usage.add_graph(split)
        self.dropout |= dict.fromkeys(where(node) for node, reason in split.in_pytorch.items() if reason == DROPOUT)
        self.usage.add_passes(graph.passes)
        products = [item for region in split.regions for item in self._products(region, graph.weights)]
        explained = _aten_graph(graph.name, split, _grouped(products))
        number = sum(self._is_on_first(node) for region in split.regions for node in region.operators)
        explained = dataclasses.replace(explained, on_first_provider=number)
        self.graphs.setdefault(graph.name.index, []).append(explained)
        return run_in_pytorch(context, graph)

    def _is_on_first(self, node: fx.Node) -> bool:
        """Whether the first provider runs a node of a region by itself."""
        return only_cpu(self._options.providers) or self._on_first.reason_against(node) is None

    def _products(self, region: Region, weights: Mapping[fx.Node, Weight]) -> list[tuple[ProductKernel, str]]:
        """The products of a region with quantized operands, each with a pass's reason against integers."""
        if not any(_has_eight_bits(node) for node in (*region.nodes, *(item.node for item in region.inputs))):
            return []
        try:
            model = model_of(region, weights, opset=self._options.opset)
        except TranslationError:  # the nodes are translated again, without those that fail, when it is compiled
            return []
        passes = self._passes.run("onnx", model)
        reasons = {miss.node: miss.reason for item in passes if item.name in _PASSES for miss in item.near_misses}
        off = _PASSES - {item.name for item in passes}
        names = [str(value.name) for value in model.graph.inputs]
        tensors = {
            name: InputSpec(name, None, item.permutation).in_memory_order(weights[item.node].tensor)
            for name, item in zip(names, region.inputs, strict=True)
            if item.node in weights
        }
        lines = {node.name: line_of_layer(node) or f"module {module_path(node)}" for node in region.nodes}
        return [
            (
                dataclasses.replace(item, source=lines.get(item.node) or item.source),
                item.why or reasons.get(item.node, "") or _is_off(item, off) or _has_other_activations(item),
            )
            for item in product_kernels(model, tensors)
        ]


def _has_eight_bits(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype in (torch.int8, torch.uint8)


def _is_off(item: ProductKernel, off: Collection[str]) -> str:
    """The pass that may compute a product of two quantized operands with integers, if it is off."""
    name = _CONVOLUTIONS if item.kernel == "Conv" else _MATRICES
    return f"{name} is off" if item.bits.count("from 8 bits") == 2 and name in off else ""


def _has_other_activations(item: ProductKernel) -> str:
    """That a product has no integers to multiply, if only its weights are quantized and it dequantizes them."""
    first, second = item.bits.split(" x ")
    return "its activations are not quantized" if "from 8 bits" in second and "bits" not in first else ""


def _grouped(products: Sequence[tuple[ProductKernel, str]]) -> list[Products]:
    """Products by kernel, bits and reason; none if no operand is quantized."""
    lines: dict[tuple[str, str, str], list[str]] = {}
    for item, why in products:
        lines.setdefault((item.kernel, item.bits, why if item.has_integers else ""), []).append(item.source)
    if not any(item.has_integers for item, _ in products):
        return []
    return [
        Products(kernel, bits, len(found), why, [line for line in dict.fromkeys(found) if line])
        for (kernel, bits, why), found in lines.items()
    ]


def _aten_graph(name: GraphName, split: Split, products: Sequence[Products]) -> AtenGraph:
    on_onnx = collections.Counter(operator_name(node) for region in split.regions for node in region.operators)
    fallbacks = sorted(fallbacks_of(split), key=lambda item: (item.by_design, -item.number))
    return AtenGraph(
        f"{name.index}/{name.direction}", len(split.regions), dict(on_onnx.most_common()), fallbacks, products
    )


def fallbacks_of(split: Split) -> list[Fallback]:
    """The operators of a graph that run in PyTorch, grouped by operator and reason."""
    lines: dict[tuple[str, Reason], list[str]] = {}
    for node, reason in split.coverage.in_pytorch.items():
        lines.setdefault((operator_name(node), reason), []).append(where(node))
    return [
        Fallback(
            operator,
            len(found),
            reason.kind.name,
            str(reason),
            reason.remedy or remedy_of(reason.kind, operator),
            reason.by_design,
            [line for line in dict.fromkeys(found) if line],
        )
        for (operator, reason), found in lines.items()
    ]


def _callee(node: fx.Node) -> str:
    if node.op == "call_method":
        return f"Tensor.{node.target}"
    return getattr(node.target, "__name__", str(node.target))


def _run_backward(results: object) -> None:
    """Runs the backward of all results that have one, so that its graphs are compiled. Sets no ``.grad``."""
    leaves = [leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, torch.Tensor)]
    outputs = [leaf for leaf in leaves if leaf.grad_fn is not None]
    nodes: list[Any] = [output.grad_fn for output in outputs]
    seen = set(nodes)
    for node in nodes:
        following = {parent for parent, _ in node.next_functions if parent is not None} - seen
        seen |= following
        nodes += following
    inputs = [node.variable for node in nodes if hasattr(node, "variable")]
    if inputs:
        torch.autograd.grad(outputs, inputs, [torch.ones_like(output) for output in outputs], allow_unused=True)


def _guard(guard: Any) -> Guard:
    frame = guard.user_stack[-1] if guard.user_stack else None
    line = f"{short_file(frame.filename)}:{frame.lineno}" if frame is not None else ""
    conditions = [item for item in guard.code_list or [] if "_dynamo_" not in item]  # internal conditions of Dynamo
    return Guard(guard.name, guard.create_fn_name(), conditions, line)
