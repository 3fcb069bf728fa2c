"""The Programs of graphs in the cache on disk: loaded, or compiled and kept."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping

from torch import fx

from ..cache.graphs import CachedGraphs, CacheEntry, cached_graphs
from ..events import count
from ..graphs.artifacts import GraphName, Runner
from ..graphs.saving_mode import is_saving
from ..graphs.static_inputs import StaticInput
from ..options import Options
from ..partition.program import Program, load
from ..weights.region_session import Weight
from ..weights.watchable import can_be_watched
from .stage_logging import cached_model

logger = logging.getLogger(__name__)


class ProgramCache:
    """The cache of a backend, whose answers can be called.

    Args:
        options: of the backend.
        is_on: whether graphs are looked up and kept; otherwise each is compiled.
    """

    def __init__(self, options: Options, *, is_on: bool) -> None:
        self._options = options
        self._graphs: CachedGraphs | None = cached_graphs(options) if is_on else None

    def key_for_autograd(self, weights: Mapping[int, StaticInput]) -> str | None:
        """A part of a graph's key in AOTAutograd's cache; ``None`` if it cannot be kept there."""
        constants = [i for i, item in weights.items() if can_be_watched(item.value)]
        return self._graphs.key_for_autograd(constants) if self._graphs is not None else None

    def translated_operators(self) -> frozenset[str] | None:
        """See ``decompositions.translated_operators``; ``None`` if they are not cached."""
        return self._graphs.translated_operators(self._options.opset) if self._graphs is not None else None

    def loaded_or(
        self,
        compile_it: Callable[[], tuple[Program, Runner]],
        name: GraphName,
        module: fx.GraphModule,
        weights: Mapping[int, Weight],
        *,
        is_joint: bool,
    ) -> tuple[Program, Runner]:
        """A graph's Program and its runner, from the cache; if it is not there, compiled and kept.

        Args:
            compile_it: compiles the graph, which it may change.
            name: of the graph.
            module: the graph, before its passes.
            weights: the arguments that may be constants, by position.
            is_joint: whether the joint passes are to run.
        """
        graphs = self._graphs
        entry = graphs.entry(name, module, weights, is_joint=is_joint) if graphs is not None else None
        if graphs is None or entry is None:
            return compile_it()
        found = self._load(graphs, entry, weights)
        if found is not None:
            return found
        with graphs.locked(entry):
            found = self._load(graphs, entry, weights)  # another process may have compiled it meanwhile
            if found is None:
                count("cache_misses")
                found = compile_it()
                graphs.keep(entry, found[0])
            return found

    def _load(
        self, graphs: CachedGraphs, entry: CacheEntry, weights: Mapping[int, Weight]
    ) -> tuple[Program, Runner] | None:
        """The Program of a graph and its runner; ``None`` if it is not in the cache, or ONNX Runtime rejects it."""

        def loaded(program: Program) -> tuple[Program, Runner] | None:
            result = load(program, entry.name, weights, self._options)
            if result.rejection is None:
                return program, result.run
            # for instance, too little memory at the moment
            logger.warning("%s cannot be loaded from the cache, and is compiled: %s", entry.name, result.rejection)
            return None

        found = graphs.found(entry, loaded)
        if found is None:
            return None
        count("cache_hits")
        logger.info("%s is loaded from the cache: %s", entry.name, entry.key)
        program, runner = found

        @functools.cache
        def with_lines() -> Program:
            from ..partition.lines_at_hand import with_lines_of  # imported lazily: it imports onnx

            return with_lines_of(program, entry.module.graph)

        for i, _ in enumerate(program.regions):
            cached_model(entry.name, i, lambda i=i: with_lines().regions[i].executable.model_without_constants)  # type: ignore[misc]
        return (with_lines() if is_saving() else program), runner
