"""Compiles one of Dynamo's graphs to a callable that runs it on ONNX Runtime.

``onnxrt`` and ``onnx_debug`` use this pipeline with different observers, ``fx_debug`` without ONNX Runtime. The
stages, and where they run::

    dynamo, pre_grad       Pipeline.compile_dynamo_graph   torch IR
    joint                  Pipeline.partitioner            forward and backward together
    aten ... session       stages                          one direction, to a callable

If the Program of a graph is in the cache, the stages from ``aten`` to ``session`` are skipped, and for an inference
graph ``joint`` too (``runners.Runners``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._guards import detect_fake_mode

from passes.engine.registry import are_only_built_in
from passes.order import LOOKED_FOR

from ..common.fork_safety import Lock
from ..common.garbage_collection import only_new
from ..common.safety_net import or_original
from ..errors import AheadOfTimeError
from ..events import count
from ..exporter.decompositions import registered_operators_kept
from ..graphs import descriptors, dynamo_frames, partitioning, static_inputs, user_names
from ..graphs.artifacts import GraphName, Runner
from ..graphs.fake_tensors import correct_strides, fake_tensors_as_kernels
from ..graphs.guard_filter import take_thread_count_from_loader
from ..graphs.locations import UserName
from ..graphs.saving_mode import is_ahead_of_time, is_precompiling, is_saving
from ..graphs.static_inputs import StaticInput
from ..options import Options
from ..placement.engines import Placement, placement_of
from .observer import Observer
from .runners import CompileGraph, Runners

graph_numbers = itertools.count()
_graph_numbers_lock = Lock()


class _FrameGraphs:
    """The numbers of the graphs that AOTAutograd compiles for one frame, and their argument names."""

    def __init__(self) -> None:
        self._number_by_aot_id: dict[str, int] = {}
        self._joint_number: int | None = None
        self.argument_names: list[UserName] = []

    def number_of(self, graph: descriptors.GraphBeingCompiled) -> int:
        """The number of a graph; a joint graph, its forward and its backward have the same."""
        number = self._number_by_aot_id.get(graph.aot_id) if graph.aot_id is not None else None
        if graph.direction == "forward" and self._joint_number is not None:
            number, self._joint_number = self._joint_number, None
        numbers = set(self._number_by_aot_id.values())
        if number is None and graph.direction == "backward" and len(numbers) == 1:
            [number] = numbers  # ``aot_id`` is that of another thread's graph
        if number is None:
            number = _next_graph_number()
            count("graphs")
        if graph.direction == "joint":
            self._joint_number = number
        elif graph.aot_id is not None:
            self._number_by_aot_id[graph.aot_id] = number
        return number


@dataclasses.dataclass(frozen=True, eq=False)
class _FrameCompilers:
    """AOTAutograd's compilers of the graphs that it makes from one of Dynamo's; AOTAutograd keeps them.

    Attributes:
        graph: the name of Dynamo's graph.
        names: the user's names of its inputs.
        weights: its static inputs by position, until it is compiled: nothing must keep them alive.
        runners: run graphs on ONNX Runtime.
        placement: chooses an engine for each graph; ``None`` if all run on ONNX Runtime.
    """

    graph: GraphName
    names: Sequence[UserName]
    weights: Mapping[int, StaticInput]
    runners: Runners
    placement: Placement | None

    def __deepcopy__(self, memo: dict[int, object]) -> _FrameCompilers:
        """Returns itself, see ``Pipeline.__deepcopy__``."""
        return self

    def forward(self, aten: fx.GraphModule, inputs: Sequence[object]) -> Runner:
        """A runner of a forward whose backward may follow."""
        partitioning.save_copies_of_changed_arguments(aten)
        return self._compiled("forward", aten)

    def backward(self, aten: fx.GraphModule, inputs: Sequence[object]) -> Runner:
        """A runner of a backward."""
        return self._compiled("backward", aten)

    def inference(self, aten: fx.GraphModule, inputs: Sequence[object]) -> Runner:
        """A runner of a graph of which no result needs a gradient."""
        return self._compiled("inference", aten)

    def _compiled(self, direction: str, aten: fx.GraphModule) -> Runner:
        name = dataclasses.replace(self.graph, direction=direction)
        return self.runners.or_in_pytorch(name, aten, functools.partial(self._runner, name))

    def _runner(self, name: GraphName, aten: fx.GraphModule) -> Runner:
        descriptors.name_values(aten, self.names)
        is_inference = name.direction == "inference"
        weights = static_inputs.at_placeholders(aten, self.weights) if is_inference else static_inputs.NO_WEIGHTS
        if self.placement is not None:
            return self.placement.runner(name, aten, weights)
        return self.runners.on_onnx(name, aten, is_joint=is_inference, weights=weights)


class Pipeline:
    """Compiles the graphs of one ``torch.compile`` call.

    Args:
        options, observer, compile_graph: see ``Runners``. ``placement`` chooses engines only with the default.
    """

    def __init__(
        self,
        options: Options,
        observer: Observer,
        compile_graph: CompileGraph | None = None,
    ) -> None:
        self.options = options
        self.observer = observer
        self.runners = Runners(options, observer, compile_graph)
        self._may_be_placed = compile_graph is None
        self._lock = Lock()
        self._graphs_without_context = _FrameGraphs()
        self._graphs_by_context: weakref.WeakKeyDictionary[object, _FrameGraphs] = weakref.WeakKeyDictionary()

    def __deepcopy__(self, memo: dict[int, object]) -> Pipeline:
        """Returns itself: a copy of a compiled model uses the dump and the records of the original."""
        return self

    def compile_dynamo_graph(self, module: fx.GraphModule, example_inputs: Sequence[object]) -> Callable[..., object]:
        """Runs the whole pipeline on one of Dynamo's graphs.

        Args:
            module: the graph, in torch IR.
            example_inputs: example arguments: tensors and symbolic integers.

        Returns:
            The callable for Dynamo; it takes the graph's arguments.

        Raises:
            UnsupportedOperatorError: a node cannot run on ONNX Runtime, and ``fallback`` is ``error``.
            AheadOfTimeError: ``torch.compile(...).aot_compile(...)`` compiles a graph that cannot be saved.
        """
        graph = GraphName(_next_graph_number(), frame=dynamo_frames.frame_number())
        try:
            return self._compile_dynamo_graph(graph, module, example_inputs)
        except Exception as error:
            self.observer.gave_up(graph, dynamo_frames.why_given_up(error))
            raise

    @only_new()
    def _compile_dynamo_graph(
        self, graph: GraphName, module: fx.GraphModule, example_inputs: Sequence[object]
    ) -> Callable[..., object]:
        names = user_names.argument_names(module)
        dynamo_frames.name_call(module)
        self.runners.place = dynamo_frames.place_being_compiled()
        self.observer.stage("dynamo", graph, module)
        if self.observer.explains or _may_match(module):
            from .stages import run_pre_grad  # imported lazily, see there

            self.observer.passes(graph, run_pre_grad(self.runners.context, graph, module, example_inputs))
        self.observer.stage("pre_grad", graph, module)

        arguments = [*static_inputs.lifted_attributes(module).values(), *example_inputs]
        weights = static_inputs.weights(module, arguments) if self._has_constant_weights else {}
        # what is saved or watched runs on ONNX Runtime
        may_be_placed = self._may_be_placed and not self.observer.watches and not is_saving()
        placement = placement_of(self.runners, module, arguments) if may_be_placed else None
        with self._autograd_cache(module, arguments, weights) as is_cached:
            compilers = _FrameCompilers(graph, names, weights, self.runners, placement)
            backend = self._aot_backend(compilers, arguments, is_cached=is_cached)
            with fake_tensors_as_kernels(detect_fake_mode(example_inputs)), registered_operators_kept():
                result: Callable[..., object] = backend(module, example_inputs)
        weights.clear()  # AOTAutograd keeps the compilers, which must not keep the weights alive
        count("graphs")  # only now: in AOTAutograd, Dynamo may restart the trace with a float as a constant
        if dynamo_frames.is_recompile():
            count("recompiles")
        return self.observer.entry(graph, result)

    def _aot_backend(
        self, compilers: _FrameCompilers, arguments: Sequence[object], *, is_cached: bool
    ) -> Callable[..., Callable[..., object]]:
        """AOTAutograd with our compilers for one of Dynamo's graphs.

        ``arguments`` are its parameters, buffers and inputs; ``is_cached`` if AOTAutograd's cache may keep it.
        """
        own: dict[str, Callable[[fx.GraphModule, Sequence[object]], Runner]]
        own = {"fw_compiler": compilers.forward, "inference_compiler": compilers.inference}
        if is_cached:
            from ..graphs.aot_serialization import serializable  # imported lazily: it imports Inductor

            own = {name: serializable(compiler) for name, compiler in own.items()}
        is_plain = compilers.placement is not None and are_only_built_in()
        joint = partitioning.min_cut_partition if is_plain else None
        return aot_autograd(
            **own,
            bw_compiler=compilers.backward,
            partition_fn=joint or self.partitioner(compilers.graph, arguments, compilers.names),
            decompositions=self.runners.decompositions() if compilers.placement is None else {},
            keep_inference_input_mutations=True,
        )

    @contextlib.contextmanager
    def _autograd_cache(
        self, module: fx.GraphModule, arguments: Sequence[object], weights: Mapping[int, StaticInput]
    ) -> Iterator[bool]:
        """A context in which AOTAutograd saves the graph, if the user asks PyTorch to save; whether it does."""
        if not is_saving():
            yield False
            return
        from ..graphs.aot_serialization import keyed, share_memory  # imported lazily: it imports Inductor

        take_thread_count_from_loader()
        # PyTorch's key does not say which arguments share memory; such a graph is saved, but not found by its key.
        key = None if share_memory(arguments) else self.runners.programs.key_for_autograd(weights)
        if key is None and not (is_ahead_of_time() or is_precompiling()):
            reason = "a graph without a key"
            count(f"not_saved: {reason}")
            yield False
            return
        with keyed(module, key or uuid.uuid4().hex):
            yield True

    def compile_for_aot_autograd(self, module: fx.GraphModule) -> Runner:
        """Runs the stages from ``aten`` on, for ``aot_autograd(fw_compiler=...)``.

        AOTAutograd does not partition inference graphs: for these, the stage ``joint`` runs here too.

        Raises:
            UnsupportedOperatorError: see ``compile_dynamo_graph``.
            AheadOfTimeError: for ``torch.compile(...).aot_compile(...)``, which needs the backend ``onnxrt``.
        """
        partitioning.save_copies_of_changed_arguments(module)
        return self.runners.or_in_pytorch(None, module, self._compile_for_aot_autograd)

    def _compile_for_aot_autograd(self, module: fx.GraphModule) -> Runner:
        if is_ahead_of_time():  # the key in PyTorch's cache would not have our options
            raise AheadOfTimeError("a graph of onnx_compiler() cannot be saved; use backend='onnxrt'")
        graph, direction, names = self._graph_of_aot_autograd(module)
        self.runners.place = dynamo_frames.place_being_compiled()
        descriptors.name_values(module, names)
        correct_strides(module)
        name = dataclasses.replace(graph, direction=direction)
        if direction != "inference":
            return self.runners.on_onnx(name, module)
        weights = static_inputs.static_arguments(module) if self._has_constant_weights else {}
        return self.runners.on_onnx(name, module, is_joint=True, weights=weights)

    def partition_for_aot_autograd(
        self, joint: fx.GraphModule, inputs: object, **kwargs: object
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Runs the stage ``joint``, for ``aot_autograd(partition_fn=...)``; see ``partitioner``.

        ``verify_passes`` runs the graph on synthetic arguments, because AOTAutograd does not pass the real ones.
        """

        def facts() -> tuple[GraphName, None, Sequence[UserName]]:
            graph, _, names = self._graph_of_aot_autograd(joint, is_joint=True)
            return graph, None, names

        return self._partitioned(joint, inputs, kwargs, facts)

    def _graph_of_aot_autograd(
        self, module: fx.GraphModule, *, is_joint: bool = False
    ) -> tuple[GraphName, str, list[UserName]]:
        """Name, direction and the user's argument names of a graph that AOTAutograd compiles."""
        compiling = descriptors.graph_being_compiled(module, is_joint=is_joint)
        with self._lock:
            graphs = self._graphs_without_context
            if compiling.context is not None:
                graphs = self._graphs_by_context.setdefault(compiling.context, _FrameGraphs())
            number = graphs.number_of(compiling)
            if compiling.direction != "backward":  # a backward may be compiled after Dynamo has left the frame
                graphs.argument_names = user_names.argument_names_of_frame()
        return GraphName(number, frame=dynamo_frames.frame_number()), compiling.direction, graphs.argument_names

    def partitioner(
        self, graph: GraphName, example_inputs: Sequence[object] | None, names: Sequence[UserName]
    ) -> Callable[..., tuple[fx.GraphModule, fx.GraphModule]]:
        """AOTAutograd's ``partition_fn``: runs the joint passes, then the min-cut partitioner.

        Args:
            graph: its name.
            example_inputs: the parameters, buffers and inputs of Dynamo's graph; ``None`` if they are not known.
            names: the user's names of the arguments.
        """
        # AOTAutograd keeps the partitioner, which must not keep the first batch alive.
        arguments = example_inputs if self.options.verify_passes else ()

        def partition(joint: fx.GraphModule, inputs: object, **kwargs: object) -> tuple[fx.GraphModule, fx.GraphModule]:
            return self._partitioned(joint, inputs, kwargs, lambda: (graph, arguments, names))

        return partition

    def _partitioned(
        self,
        joint: fx.GraphModule,
        inputs: object,
        kwargs: Mapping[str, object],
        facts: Callable[[], tuple[GraphName, Sequence[object] | None, Sequence[UserName]]],
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Runs the joint passes and the partitioner; if that fails, PyTorch's partitioner alone.

        ``facts`` returns the arguments of ``partitioner``.
        """

        def partition() -> tuple[fx.GraphModule, fx.GraphModule]:
            from .stages import run_joint  # imported lazily, see there

            graph, arguments, names = facts()
            descriptors.name_values(joint, names)
            run_joint(self.runners.context, graph, joint, arguments)
            return partitioning.min_cut_partition(joint, inputs, **kwargs)

        return or_original(
            joint,
            partition,
            lambda graph: partitioning.plain_partition(graph, inputs, **kwargs),
            what="the stage joint",
            instead="PyTorch partitions the graph",
            must_compile=lambda: self.options.fallback == "error",
        )

    @property
    def _has_constant_weights(self) -> bool:
        return self.options.weights != "inputs"


def _may_match(module: fx.GraphModule) -> bool:
    """Whether a pass of the stage ``pre_grad`` may match; decided without importing the passes."""
    looked_for = {name: readers for functions in LOOKED_FOR.values() for name, readers in functions.items()}
    for node in module.graph.nodes:
        readers = looked_for.get(_name_of_callee(node))
        if readers is not None and (not readers or any(_name_of_callee(user) in readers for user in node.users)):
            return True
    return not are_only_built_in()


def _name_of_callee(node: fx.Node) -> str:
    """The name of the function or method that a node calls."""
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def _next_graph_number() -> int:
    with _graph_numbers_lock:
        return next(graph_numbers)
