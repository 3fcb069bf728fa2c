"""From one of AOTAutograd's graphs to what runs: a Program, from the cache or compiled, is loaded.

The one place for what holds whoever asks, ``Pipeline``, a first call or the autotuner:

- the net: whatever fails in our own part, PyTorch runs the graph (``Runners.or_in_pytorch``);
- the lock and the guards of what is compiled at a call, after Dynamo compiled (``late_compile``).
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from ..cache.graphs import CachedGraphs, Entry, cached_graphs
from ..common.garbage_collection import only_new
from ..common.safety_net import or_as_it_was
from ..errors import SessionError, first_line
from ..events import count, is_tried
from ..exporter.decompositions import Decompositions, decomposition_table
from ..graphs import aot
from ..graphs.artifacts import GraphName, Runner
from ..graphs.late_compile import compile_after_guards, compile_at_first_call
from ..graphs.pytorch_runner import boxed_code
from ..graphs.size_assumptions import Assumptions
from ..options import Options
from ..partition.program import Program, load
from ..weights.frozen_session import Weight
from ..weights.selection import weights_of
from .observer import Observer
from .stage_logging import cached_model

if TYPE_CHECKING:
    from .compiler import Compiler
    from .lowering import Lowering

logger = logging.getLogger(__name__)


class Runners:
    """Makes runners of AOTAutograd's graphs.

    Args:
        options: of the backend.
        observer: is told of each stage.
        lowering: makes Programs of the graphs of the stage ``post_grad``; by default for ONNX Runtime.
    """

    def __init__(self, options: Options, observer: Observer, lowering: Lowering | None = None) -> None:
        self.options = options
        self.observer = observer
        self._lowering = lowering

    @functools.cached_property
    def compiler(self) -> Compiler:
        """What compiles."""
        from .compiler import Compiler  # not before a graph is to be compiled, see there

        return Compiler(self.options, self.observer, self._lowering)

    @functools.cached_property
    def _cached(self) -> CachedGraphs | None:
        """The graphs on disk; ``None`` where each is to be compiled: to be watched, to be checked, or to be run
        elsewhere."""
        is_compiled_anew = self.observer.watches or self._lowering is not None or self.options.verify_passes
        if is_compiled_anew or self.options.fallback == "inductor":  # Inductor has a cache of its own
            return None
        return cached_graphs(self.options) if self.options.cache else None

    def decompositions(self) -> Decompositions:
        """Of the operators that have no translation."""
        known = self._cached.translated_operators(self.options.opset) if self._cached is not None else None
        return decomposition_table(self.options.opset, known)

    def on_onnx(
        self,
        name: GraphName,
        module: fx.GraphModule,
        *,
        is_joint: bool = False,
        weights: Mapping[int, aot.StaticInput] = aot.NO_WEIGHTS,
    ) -> Runner:
        """The stages from ``aten`` to ``session`` on one functional ATen graph; what runs takes its arguments boxed.

        Args:
            name: which graph.
            module: the graph; changed in place.
            is_joint: whether the joint passes run too: AOTAutograd calls no partitioner for an inference graph.
            weights: the arguments that are parameters or buffers, by position. Where their values are not known, the
                graph is compiled at its first call.
        """
        make = functools.partial(self._on_onnx, name, module, is_joint=is_joint, weights=weights)
        if not self.options.verify_passes and all(weight.value is not None for weight in weights.values()):
            return make(None)
        return compile_at_first_call(lambda arguments: self.or_in_pytorch(name, module, lambda _: make(arguments)))

    @only_new
    def _on_onnx(
        self,
        name: GraphName,
        module: fx.GraphModule,
        arguments: Sequence[object] | None,
        *,
        is_joint: bool,
        weights: Mapping[int, aot.StaticInput],
    ) -> Runner:
        """See ``on_onnx``; ``arguments`` are those of a call, where they are known."""
        is_at_a_call = arguments is not None or not aot.is_dynamo_compiling()  # as the backward of static sizes
        compiling = compile_after_guards(name, Assumptions(module)) if is_at_a_call else contextlib.nullcontext()
        with compiling, _disable_current_modes():  # AOTAutograd's fake mode, in which no real tensor can be made
            constants = weights_of(module, weights, arguments)
            placeholders = list(module.graph.find_nodes(op="placeholder"))
            held = {i: constants[node] for i, node in enumerate(placeholders) if node in constants}
            entry = self._cached.entry(name, module, held, is_joint=is_joint) if self._cached is not None else None
            found = self._found(entry, held) if entry is not None else None
            if found is None:
                compiled = self.compiler.aten(name, module, arguments, constants, is_joint=is_joint)
                sessions = [region.session for region in compiled.regions]
                loaded = load(compiled.program, name, held, self.options, sessions)
                if self._cached is not None and entry is not None:
                    self._cached.keep(entry, compiled.program)
                found = compiled.program, self.observer.runner(compiled, loaded)
        program, run = found
        program.report.tell(name)
        return run

    def _found(self, entry: Entry, weights: Mapping[int, Weight]) -> tuple[Program, Runner] | None:
        """A graph that is in the cache, ready to run."""
        assert self._cached is not None

        def loaded(program: Program) -> tuple[Program, Runner] | None:
            try:
                return program, load(program, entry.name, weights, self.options).run
            except SessionError as error:  # there may be no memory just now
                logger.warning("%s is in the cache, and is compiled anew: %s", entry.name, error)
                return None

        found = self._cached.found(entry, loaded)
        if found is None:
            count("cache_misses")
            return None
        count("cache_hits")
        logger.info("%s is taken from the cache: %s", entry.name, entry.key)
        for i, region in enumerate(found[0].regions):
            cached_model(entry.name, i, region.executable.model)
        return found

    def in_pytorch(self, name: GraphName, module: fx.GraphModule) -> Runner:
        """The same with all of the graph in PyTorch, for passes of others; ``module`` is changed in place."""
        from .compiler import Compiler  # not before a graph is to be compiled, see there

        def make(graph: fx.GraphModule) -> Runner:
            compiler = Compiler(self.options, self.observer, None, in_pytorch="its engine is PyTorch")
            with _disable_current_modes():
                compiled = compiler.aten(name, graph, None, {}, is_joint=False)
                return load(compiled.program, name, {}, self.options).run

        return self.or_in_pytorch(name, module, make)

    def or_in_pytorch(
        self, name: GraphName | None, module: fx.GraphModule, compile_it: Callable[[fx.GraphModule], Runner]
    ) -> Runner:
        """What ``compile_it`` makes of one of AOTAutograd's graphs; if it fails, PyTorch on the graph as it was.

        Args:
            name: which graph, if that is known.
            module: the graph; changed in place.
            compile_it: compiles it.
        """
        with _disable_current_modes():
            random_state = torch.get_rng_state()

        def failed(error: Exception) -> None:
            with _disable_current_modes():
                torch.set_rng_state(random_state)
            if name is not None:
                why = f"the compile failed, PyTorch runs it: {type(error).__name__}: {first_line(str(error))}"
                self.observer.not_compiled(name, why)

        return or_as_it_was(
            module,
            lambda: aot.boxed(compile_it(module)),
            lambda graph: aot.boxed(boxed_code(graph)),
            what=f"the compile of {name or 'a graph'}",
            instead="PyTorch runs the graph",
            must_compile=lambda: self.options.fallback == "error" or is_tried(),
            failed=failed,
        )
