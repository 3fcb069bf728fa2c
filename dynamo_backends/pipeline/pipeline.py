"""The stages in order, from Dynamo's graph to a callable on ONNX Runtime.

``onnxrt`` and ``onnx_debug`` are this one pipeline; they differ in the observer. ``fx_debug`` differs in the lowering.
The stages and where they are::

    dynamo, pre_grad       Pipeline.compile_dynamo_graph   torch IR
    joint                  Pipeline.partitioner            forward and backward together
    aten, post_grad        compiler.Compiler.aten          one direction
    regions ... session    lowering.OnnxLowering           what goes to ONNX, one model for each region: a Program
    run                    program.load                    what is called for each batch

A Program that is in the cache takes the place of the stages from ``aten`` to ``session``, in an inference graph of
``joint`` too (``runners.Runners``).
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._guards import detect_fake_mode

from passes.engine.locks import Lock
from passes.engine.registry import are_only_built_in
from passes.order import LOOKED_FOR

from ..common.garbage_collection import only_new
from ..common.safety_net import or_as_it_was
from ..errors import AheadOfTimeError
from ..events import count
from ..graphs import aot
from ..graphs.artifacts import GraphName, Runner
from ..graphs.fake_tensors import correct_strides, fake_tensors_as_kernels
from ..graphs.locations import UserName
from ..options import Options
from ..placement.engines import placement_of
from .observer import Observer
from .runners import Runners

if TYPE_CHECKING:
    from .lowering import Lowering

graph_numbers = itertools.count()
_graph_numbers_lock = Lock()


class _Numbers:
    """The numbers of the graphs that AOTAutograd compiles for one of Dynamo's frames."""

    def __init__(self) -> None:
        self._by_aot_id: dict[str, int] = {}
        self._of_joint: int | None = None
        self.argument_names: list[UserName] = []

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
        lowering: makes Programs of the graphs of the stage ``post_grad``; by default for ONNX Runtime.
    """

    def __init__(self, options: Options, observer: Observer, lowering: Lowering | None = None) -> None:
        self.options = options
        self.observer = observer
        self.runners = Runners(options, observer, lowering)
        self._is_placed = lowering is None
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
            AheadOfTimeError: ``torch.compile(...).aot_compile(...)`` was asked for.
        """
        if aot.is_ahead_of_time():
            raise AheadOfTimeError
        graph = GraphName(_next_graph_number())
        try:
            return self._compile_dynamo_graph(graph, module, example_inputs)
        except Exception as error:
            self.observer.gave_up(graph, aot.why_given_up(error))
            raise

    @only_new
    def _compile_dynamo_graph(
        self, graph: GraphName, module: fx.GraphModule, example_inputs: Sequence[object]
    ) -> Callable[..., object]:
        names = aot.argument_names(module)
        aot.name_call(module)
        self.observer.stage("dynamo", graph, module)
        has_passes = self.observer.explains or _may_change(module)
        self.observer.passes(graph, self.runners.compiler.pre_grad(graph, module, example_inputs) if has_passes else [])
        self.observer.stage("pre_grad", graph, module)

        arguments = [*aot.lifted_attributes(module).values(), *example_inputs]
        weights = aot.weights(module, arguments) if self._freezes else {}
        backend = self._aot_backend(graph, module, arguments, names, weights)
        with fake_tensors_as_kernels(detect_fake_mode(example_inputs)):
            result: Callable[..., object] = backend(module, example_inputs)
        weights.clear()  # AOTAutograd keeps the compilers
        count("graphs")  # not before: Dynamo may give up an attempt and trace again, with a float made a constant
        if aot.is_recompile():
            count("recompiles")
        return self.observer.entry(graph, result)

    def _aot_backend(
        self,
        graph: GraphName,
        module: fx.GraphModule,
        arguments: Sequence[object],
        names: Sequence[UserName],
        weights: Mapping[int, aot.StaticInput],
    ) -> Callable[..., Callable[..., object]]:
        """AOTAutograd with our compilers of the graphs that it makes of a graph of Dynamo's.

        Args:
            graph: which graph.
            module: Dynamo's graph.
            arguments: its parameters, buffers and inputs.
            names: what the user calls its inputs.
            weights: see ``aot.weights``.
        """
        placement = placement_of(self.runners, module, arguments) if self._is_placed else None
        compile_trained = self.runners.on_onnx if placement is None else placement.runner

        def compile_direction(direction: str) -> Callable[[fx.GraphModule, Sequence[object]], Runner]:
            name = GraphName(graph.index, direction)

            def compile_it(aten: fx.GraphModule) -> Runner:
                aot.name_values(aten, names)
                return compile_trained(name, aten)

            return lambda aten, inputs: self.runners.or_in_pytorch(name, aten, compile_it)

        def compile_inference(aten: fx.GraphModule) -> Runner:
            aot.name_values(aten, names)
            known = aot.at_placeholders(aten, weights)
            name = GraphName(graph.index, "inference")
            if placement is not None and self.options.placement == "fastest":
                known = {i: aot.StaticInput(item.name) for i, item in known.items()}  # their values come with the call
                return placement.runner(name, aten, known)
            if placement is not None:  # it was traced to be trained, and has nothing to be trained
                placement.decompose(aten)
            return self.runners.on_onnx(name, aten, is_joint=True, weights=known)

        is_plain = placement is not None and placement.is_plain
        return aot_autograd(
            fw_compiler=compile_direction("forward"),
            bw_compiler=compile_direction("backward"),
            inference_compiler=lambda aten, inputs: self.runners.or_in_pytorch(
                GraphName(graph.index, "inference"), aten, compile_inference
            ),
            partition_fn=aot.min_cut_partition if is_plain else self.partitioner(graph, arguments, names),
            decompositions=self.runners.decompositions() if placement is None else {},
        )

    def compile_for_aot_autograd(self, module: fx.GraphModule) -> Runner:
        """The pipeline from the stage ``aten`` on, for ``aot_autograd(fw_compiler=...)``; an inference graph, which
        AOTAutograd does not partition, goes through the stage ``joint`` too.

        Raises:
            UnsupportedOperatorError: a node cannot run on ONNX Runtime, and ``fallback`` is ``error``.
            AheadOfTimeError: ``torch.compile(...).aot_compile(...)`` was asked for.
        """
        return self.runners.or_in_pytorch(None, module, self._compile_for_aot_autograd)

    def _compile_for_aot_autograd(self, module: fx.GraphModule) -> Runner:
        if aot.is_ahead_of_time():
            raise AheadOfTimeError
        graph, direction, names = self._graph_of_aot_autograd(module)
        aot.name_values(module, names)
        correct_strides(module)
        name = GraphName(graph.index, direction)
        if direction != "inference":
            return self.runners.on_onnx(name, module)
        weights = aot.static_arguments(module) if self._freezes else {}
        return self.runners.on_onnx(name, module, is_joint=True, weights=weights)

    def partition_for_aot_autograd(
        self, joint: fx.GraphModule, inputs: object, **kwargs: object
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """The stage ``joint`` for ``aot_autograd(partition_fn=...)``, see ``partitioner``.

        The numeric check of passes runs it on made-up arguments: AOTAutograd does not tell the real ones.
        """

        def partition(joint: fx.GraphModule) -> tuple[fx.GraphModule, fx.GraphModule]:
            graph, _, names = self._graph_of_aot_autograd(joint, is_joint=True)
            return self._partition(graph, None, names, joint, inputs, kwargs)

        return self._partitioned(joint, inputs, kwargs, partition)

    def _graph_of_aot_autograd(
        self, module: fx.GraphModule, *, is_joint: bool = False
    ) -> tuple[GraphName, str, list[UserName]]:
        """The graph that AOTAutograd is compiling, which part of it, and what the user calls its arguments."""
        told = aot.graph_being_compiled(module, is_joint=is_joint)
        with self._lock:
            known = self._without_context
            if told.context is not None:
                known = self._by_context.setdefault(told.context, _Numbers())
            number = known.number_of(told)
            if told.direction != "backward":  # that is compiled after Dynamo forgot its frame
                known.argument_names = aot.argument_names_of_frame()
        return GraphName(number), told.direction, known.argument_names

    def partitioner(
        self, graph: GraphName, example_inputs: Sequence[object] | None, names: Sequence[UserName]
    ) -> Callable[..., tuple[fx.GraphModule, fx.GraphModule]]:
        """AOTAutograd's ``partition_fn``: the joint passes, then the min-cut partitioner.

        Args:
            graph: which graph.
            example_inputs: what AOTAutograd's graph is called with; ``None`` if that is not known.
            names: what the user calls the arguments of Dynamo's graph.
        """
        verify = self.options.verify_passes
        arguments = example_inputs if verify else ()  # AOTAutograd keeps what is made here, and the first batch with it

        def partition(joint: fx.GraphModule, inputs: object, **kwargs: object) -> tuple[fx.GraphModule, fx.GraphModule]:
            def with_passes(joint: fx.GraphModule) -> tuple[fx.GraphModule, fx.GraphModule]:
                return self._partition(graph, arguments, names, joint, inputs, kwargs)

            return self._partitioned(joint, inputs, kwargs, with_passes)

        return partition

    def _partition(
        self,
        graph: GraphName,
        arguments: Sequence[object] | None,
        names: Sequence[UserName],
        joint: fx.GraphModule,
        inputs: object,
        kwargs: Mapping[str, object],
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        aot.name_values(joint, names)
        self.runners.compiler.joint(graph, joint, arguments)
        return aot.min_cut_partition(joint, inputs, **kwargs)

    def _partitioned(
        self,
        joint: fx.GraphModule,
        inputs: object,
        kwargs: Mapping[str, object],
        partition: Callable[[fx.GraphModule], tuple[fx.GraphModule, fx.GraphModule]],
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """What ``partition`` makes of the joint graph; if it fails, PyTorch's partitioner, without our passes."""
        return or_as_it_was(
            joint,
            lambda: partition(joint),
            lambda graph: aot.plain_partition(graph, inputs, **kwargs),
            what="the stage joint",
            instead="PyTorch partitions the graph",
            must_compile=lambda: self.options.fallback == "error",
        )

    @property
    def _freezes(self) -> bool:
        return self.options.weights != "inputs"


def _may_change(module: fx.GraphModule) -> bool:
    """Whether a pass of the stage ``pre_grad`` may find what it looks for; asked without importing the passes."""
    looked_for = {name: readers for functions in LOOKED_FOR.values() for name, readers in functions.items()}
    for node in module.graph.nodes:
        readers = looked_for.get(_called(node))
        if readers is not None and (not readers or any(_called(user) in readers for user in node.users)):
            return True
    return not are_only_built_in()


def _called(node: fx.Node) -> str:
    """The name of the function or method that a node calls."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _next_graph_number() -> int:
    with _graph_numbers_lock:
        return next(graph_numbers)
