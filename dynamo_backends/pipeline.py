"""The stages in order, from Dynamo's graph to a callable on ONNX Runtime.

``onnxrt`` and ``onnx_debug`` are this one pipeline; they differ in the observer. ``fx_debug`` differs in the lowering.
The stages and where they are::

    dynamo, pre_grad       Pipeline.compile_dynamo_graph   torch IR
    joint                  Pipeline.partitioner            forward and backward together
    aten, post_grad        Pipeline.compile_aten_graph     one direction
    regions ... session    lowering.OnnxLowering           what goes to ONNX, one model for each region
    run                    CompiledGraph.run               called for each batch
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch.utils._python_dispatch import _disable_current_modes

from passes.engine.locks import Lock
from passes.engine.manager import Checker

from . import aot
from .aliases import read_memory_of_owners, separate_returned_views
from .artifacts import GraphName, Runner
from .events import count
from .exporter.decompositions import decomposition_table
from .freezing import weights_of
from .lowering import Lowering, OnnxLowering
from .numerics.exact import attribute
from .observer import Observer
from .options import Options
from .regions import Support
from .stage_passes import StagePasses
from .verification import Evaluation, GraphChecker, at_first_call, can_be_verified

_graph_numbers = itertools.count()
_graph_numbers_lock = Lock()


class _Numbers:
    """The numbers of the graphs that AOTAutograd compiles for one of Dynamo's frames."""

    def __init__(self) -> None:
        self._by_aot_id: dict[str, int] = {}
        self._of_joint: int | None = None

    def number_of(self, told: aot.GraphBeingCompiled) -> int:
        """The number of a graph; a forward has that of the joint graph before it, a backward that of its forward."""
        number = self._by_aot_id.get(told.aot_id) if told.aot_id is not None else None
        if told.direction == "forward" and self._of_joint is not None:
            number, self._of_joint = self._of_joint, None
        if number is None and told.direction == "backward" and len(set(self._by_aot_id.values())) == 1:
            [number] = set(self._by_aot_id.values())  # the name is another thread's
        if number is None:
            number = _next_graph_number()
            count("graphs")
        if told.direction == "joint":
            self._of_joint = number
        elif told.aot_id is not None:
            self._by_aot_id[told.aot_id] = number
        return number


class Pipeline:
    """Compiles the graphs of one ``torch.compile`` call.

    Args:
        options: of the backend.
        observer: is told of each stage.
        lowering: makes callables of the graphs of the stage ``post_grad``; by default on ONNX Runtime.
    """

    def __init__(self, options: Options, observer: Observer, lowering: Lowering | None = None) -> None:
        self.options = options
        self.observer = observer
        support = Support(options.opset, options.providers)
        self.passes = StagePasses(options, observer, support)
        self.lowering = lowering or OnnxLowering(options, observer, support, self.passes)
        self._lock = Lock()
        self._without_context = _Numbers()
        self._by_context: weakref.WeakKeyDictionary[object, _Numbers] = weakref.WeakKeyDictionary()

    def __deepcopy__(self, memo: dict[int, object]) -> Pipeline:
        """Itself: a copy of a model that ``aot_autograd`` compiles by it is dumped and recorded where the model is."""
        return self

    def compile_dynamo_graph(self, module: fx.GraphModule, example_inputs: Sequence[object]) -> Callable[..., object]:
        """The whole pipeline on one of Dynamo's graphs.

        Args:
            module: the graph, in torch IR.
            example_inputs: what it will be called with, tensors and symbolic integers.

        Returns:
            What Dynamo calls instead of the graph, with the graph's arguments.

        Raises:
            UnsupportedOperatorError: a node cannot run on ONNX Runtime, and ``fallback`` is ``error``.
        """
        graph = GraphName(_next_graph_number())
        self.observer.stage("dynamo", graph, module)
        checker = GraphChecker(example_inputs) if self.options.verify_passes else None
        self.observer.passes(graph, self.passes.run("pre_grad", graph, module, checker=checker))
        self.observer.stage("pre_grad", graph, module)

        def compile_direction(direction: str) -> Callable[[fx.GraphModule, Sequence[object]], Runner]:
            name = GraphName(graph.index, direction)
            return lambda aten, inputs: self.compile_aten_graph(name, aten)

        arguments = [*aot.lifted_attributes(module).values(), *example_inputs]
        weights = aot.weights(module, arguments) if self._freezes else {}

        def compile_inference(aten: fx.GraphModule, inputs: Sequence[object]) -> Runner:
            known = aot.at_placeholders(aten, weights)
            return self.compile_aten_graph(GraphName(graph.index, "inference"), aten, is_joint=True, weights=known)

        backend = aot_autograd(
            fw_compiler=compile_direction("forward"),
            bw_compiler=compile_direction("backward"),
            inference_compiler=compile_inference,
            partition_fn=self.partitioner(graph, arguments),
            decompositions=decomposition_table(self.options.opset),
        )
        result: Callable[..., object] = backend(module, example_inputs)
        weights.clear()  # AOTAutograd keeps the compilers
        count("graphs")  # not before: Dynamo may give up an attempt and trace again, with a float made a constant
        if aot.is_recompile():
            count("recompiles")
        return self.observer.entry(graph, result)

    def compile_for_aot_autograd(self, module: fx.GraphModule) -> Runner:
        """The pipeline from the stage ``aten`` on, for ``aot_autograd(fw_compiler=...)``; an inference graph, which
        AOTAutograd does not partition, goes through the stage ``joint`` too."""
        graph, direction = self._graph_of_aot_autograd(module)
        name = GraphName(graph.index, direction)
        if direction != "inference":
            return self.compile_aten_graph(name, module)
        weights = aot.static_arguments(module) if self._freezes else {}
        return self.compile_aten_graph(name, module, is_joint=True, weights=weights)

    def partition_for_aot_autograd(
        self, joint: fx.GraphModule, inputs: object, **kwargs: object
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """The stage ``joint`` for ``aot_autograd(partition_fn=...)``, see ``partitioner``.

        The numeric check of passes runs it on made-up arguments: AOTAutograd does not tell the real ones.
        """
        graph, _ = self._graph_of_aot_autograd(joint, is_joint=True)
        return self.partitioner(graph, None)(joint, inputs, **kwargs)

    def _graph_of_aot_autograd(self, module: fx.GraphModule, *, is_joint: bool = False) -> tuple[GraphName, str]:
        """The graph that AOTAutograd is compiling, and which part of it."""
        told = aot.graph_being_compiled(module, is_joint=is_joint)
        with self._lock:
            known = self._without_context
            if told.context is not None:
                known = self._by_context.setdefault(told.context, _Numbers())
            number = known.number_of(told)
        return GraphName(number), told.direction

    def partitioner(
        self, graph: GraphName, example_inputs: Sequence[object] | None
    ) -> Callable[..., tuple[fx.GraphModule, fx.GraphModule]]:
        """AOTAutograd's ``partition_fn``: the joint passes, then the min-cut partitioner.

        Args:
            graph: which graph.
            example_inputs: what AOTAutograd's graph is called with; ``None`` if that is not known.
        """
        verify = self.options.verify_passes
        arguments = example_inputs if verify else ()  # AOTAutograd keeps what is made here, and the first batch with it

        def partition(joint: fx.GraphModule, inputs: object, **kwargs: object) -> tuple[fx.GraphModule, fx.GraphModule]:
            checker = GraphChecker(aot.real_arguments(joint, arguments)) if verify else None
            self._joint(graph, joint, checker)
            return aot.min_cut_partition(joint, inputs, **kwargs)

        return partition

    def _joint(self, graph: GraphName, module: fx.GraphModule, checker: Checker | None) -> None:
        results = self.passes.run("joint", graph, module, checker=checker)
        self.observer.passes(GraphName(graph.index), results)
        read_memory_of_owners(module)  # not only later: the partitioner may save a view, and its memory would be lost
        self.observer.stage("joint", GraphName(graph.index), module)

    @property
    def _freezes(self) -> bool:
        return self.options.weights != "inputs"

    def compile_aten_graph(
        self,
        name: GraphName,
        module: fx.GraphModule,
        *,
        is_joint: bool = False,
        weights: Mapping[int, aot.StaticInput] = MappingProxyType({}),
    ) -> Runner:
        """The stages from ``aten`` to ``session`` on one functional ATen graph; returns its boxed callable.

        Args:
            name: which graph.
            module: the graph; changed in place.
            is_joint: whether the joint passes run too: AOTAutograd calls no partitioner for an inference graph.
            weights: the arguments that are parameters or buffers, by position. Where their values are not known, the
                graph is compiled at its first call.
        """
        verify = self.options.verify_passes

        def build(arguments: Sequence[object] | None) -> Runner:
            with _disable_current_modes():  # AOTAutograd's fake mode, in which no real tensor can be made
                checker = GraphChecker(arguments) if verify and arguments is not None else None
                frozen = weights_of(module, weights, arguments)
                if is_joint:
                    self._joint(name, module, checker)
                self.observer.stage("aten", name, module)
                _complete_meta(module)
                passes = self.passes.run("post_grad", name, module, checker=checker)
                read_memory_of_owners(module)
                separate_returned_views(module)
                self.observer.stage("post_grad", name, module)
                is_verified = checker is not None and can_be_verified(module)
                evaluation = Evaluation(module, arguments, exact=True) if is_verified else None  # type: ignore[arg-type]
                return self.lowering.lower(name, module, passes, evaluation, frozen)

        needs_arguments = verify or any(weight.value is None for weight in weights.values())
        return aot.boxed(at_first_call(build) if needs_arguments else build(None))


def _next_graph_number() -> int:
    with _graph_numbers_lock:
        return next(_graph_numbers)


def _complete_meta(module: fx.GraphModule) -> None:
    """Gives ``meta["val"]`` to constants that tracing lifted into attributes."""
    for node in module.graph.find_nodes(op="get_attr"):
        if "val" not in node.meta:
            value = attribute(module, str(node.target))
            if isinstance(value, torch.Tensor):
                node.meta["val"] = value
