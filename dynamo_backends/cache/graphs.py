"""What the pipeline asks of the cache: is this graph compiled already, and keep this one.

A graph's key is the SHA-256 of all that its compile depends on: the graph (``description``), the options, and where it
is compiled (``environment``). What cannot be described, or what came out other than it always would, is not kept, and
counted with the reason.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ..artifacts import CompiledGraph, GraphName, Runner
from ..coverage_report import Report
from ..errors import SessionError
from ..events import count
from ..exporter.decompositions import translated_operators
from ..frozen import Weight
from ..options import Options
from ..reasons import Kind
from ..safety_net import never_fails
from ..stage_log import cached_model
from . import environment
from .code import CannotStoreError
from .description import constants, describe, describe_symbols, shape_environment
from .entry import from_record, to_record
from .store import Record, Store, folder_named, tell_once

if TYPE_CHECKING:
    from passes.engine.manager import PassResult

logger = logging.getLogger(__name__)

T = TypeVar("T")

_NOT_OF_THE_RESULT = frozenset({"cache", "cache_dir", "cache_size", "dump_dir", "compare", "tensor_limit"})
"""Options that change nothing of what is compiled."""


@dataclasses.dataclass(frozen=True)
class Lookup:
    """What the cache says of a graph.

    Attributes:
        found: what runs, if it is there.
        keep: is told of the graph when it was compiled; ``None`` if it is there, or is not to be kept.
    """

    found: Runner | None = None
    keep: Callable[[CompiledGraph, Sequence[fx.Graph], Sequence[PassResult]], None] | None = None


def store_of(options: Options) -> Store:
    """The store that the options name.

    Raises:
        OSError: its folder has no known place.
    """
    return Store(folder_named(options.cache_dir), options.cache_size)


_NO_ENTRY = "It is as if the cache had no entry"
_NOT_KEPT = "Nothing is kept on disk"


@never_fails("the cache", _NO_ENTRY, lambda: None)
def cached_graphs(options: Options) -> CachedGraphs | None:
    """The cache of one backend; ``None``, and a line in the log, where its folder has no known place."""
    try:
        return CachedGraphs(options)
    except OSError as error:
        tell_once(str(error))
        return None


class CachedGraphs:
    """The cache of one backend.

    Args:
        options: of the backend.

    Raises:
        OSError: its folder has no known place.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._store = store_of(options)

    @never_fails("the cache", _NO_ENTRY, lambda: None)
    def translated_operators(self, opset: int) -> frozenset[str] | None:
        """See ``decompositions.translated_operators``; ``None`` where the answer may be another each time."""
        try:
            key = self._digest("translated operators", opset=opset)
        except CannotStoreError:
            return None
        names = self._store.read(key, lambda record: frozenset(record.header))
        if names is None:
            names = translated_operators(opset)
            self._store.put(key, Record(sorted(names)))
        return names

    @never_fails("looking a graph up in the cache", _NO_ENTRY, Lookup)
    def look_up(
        self, name: GraphName, module: fx.GraphModule, weights: Mapping[fx.Node, Weight], *, is_joint: bool
    ) -> Lookup:
        """Whether a graph was compiled before.

        Args:
            name: of the graph.
            module: the graph, before any of its passes.
            weights: the arguments that may be constants, by placeholder.
            is_joint: whether the joint passes are to run.
        """
        try:
            if self._store.reason_against() is not None:
                raise CannotStoreError("a folder that others may write")
            key = self._key(name, module, weights, is_joint=is_joint)
            originals = constants(module)
        except CannotStoreError as error:
            return _not_cached(name, str(error))
        found = self._load(key, name, module, weights)
        if found is not None:
            count("cache_hits")
            logger.info("%s is taken from the cache: %s", name, key)
            return Lookup(found)
        count("cache_misses")
        symbols = shape_environment(module)
        known = None if symbols is None else describe_symbols(symbols)

        @never_fails("keeping a graph in the cache", _NOT_KEPT, lambda: None)
        def keep(graph: CompiledGraph, in_pytorch: Sequence[fx.Graph], ran: Sequence[PassResult]) -> None:
            self._keep(key, graph, in_pytorch, ran, originals, symbols, known)

        return Lookup(keep=keep)

    @never_fails("the cache", _NO_ENTRY, lambda: None)
    def fact(self, question: Mapping[str, object], read: Callable[[Record], T]) -> T | None:
        """What an earlier process kept under a question, if ``read``, which raises for anything else, takes it."""
        key = self._key_of_fact(question)
        return None if key is None else self._store.read(key, read)

    @never_fails("the cache", _NOT_KEPT, lambda: None)
    def keep_fact(self, question: Mapping[str, object], answer: object) -> None:
        """Keeps what JSON can hold under a question, with the options and the environment of now."""
        key = self._key_of_fact(question)
        if key is not None:
            self._store.put(key, Record(answer))

    @never_fails("the cache", _NOT_KEPT, lambda: None)
    def forget_fact(self, question: Mapping[str, object]) -> None:
        """Forgets what ``fact`` returns."""
        key = self._key_of_fact(question)
        if key is not None:
            self._store.remove(key)

    def _key_of_fact(self, question: Mapping[str, object]) -> str | None:
        try:
            return self._digest_here("fact", question=question)
        except CannotStoreError:
            return None

    def _digest(self, what: str, **content: object) -> str:
        """A key of what depends on ``content`` and on what cannot change within a process.

        Raises:
            CannotStoreError: nothing can be kept here.
        """
        against = environment.obstacle(self._options)
        if against is not None:
            raise CannotStoreError(against)
        described = {"what": what, "environment": environment.fixed(), **content}
        text = json.dumps(described, sort_keys=True, allow_nan=False, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def _digest_here(self, what: str, **content: object) -> str:
        """The same, of what also depends on the options and on what is set in the process."""
        return self._digest(what, options=self._options_of_the_result(), settings=environment.describe(), **content)

    def _options_of_the_result(self) -> dict[str, str]:
        return {
            field.name: repr(getattr(self._options, field.name))
            for field in dataclasses.fields(self._options)
            if field.name not in _NOT_OF_THE_RESULT
        }

    def _key(
        self, name: GraphName, module: fx.GraphModule, weights: Mapping[fx.Node, Weight], *, is_joint: bool
    ) -> str:
        return self._digest_here(
            "graph",
            direction=name.direction,
            is_joint=is_joint,
            graph=describe(module),
            weights=[node in weights for node in module.graph.find_nodes(op="placeholder")],
        )

    def _load(
        self, key: str, name: GraphName, module: fx.GraphModule, weights: Mapping[fx.Node, Weight]
    ) -> Runner | None:
        def load(record: Record) -> tuple[Runner, Report, Record] | None:
            try:
                return *from_record(record, name, module, weights, self._options), record
            except SessionError as error:  # there may be no memory just now
                logger.warning("%s is in the cache, and is compiled anew: %s", name, error)
                return None

        found = self._store.read(key, load)
        if found is None:
            return None
        run, report, record = found
        report.tell(name)
        for i, _ in enumerate(record.header["regions"]):
            cached_model(name, i, record.blobs[i])
        return run

    def _keep(
        self,
        key: str,
        graph: CompiledGraph,
        in_pytorch: Sequence[fx.Graph],
        ran: Sequence[PassResult],
        originals: Mapping[str, torch.Tensor],
        symbols: ShapeEnv | None,
        known: Mapping[str, Any] | None,
    ) -> None:
        """Keeps a compiled graph, unless it may come out otherwise the next time."""
        try:
            if any(result.undone for result in ran):
                raise CannotStoreError("a pass that was undone")
            if any(reason.kind is Kind.OUT_OF_MEMORY for reason in graph.split.in_pytorch.values()):
                raise CannotStoreError("memory ran out")
            if symbols is not None and describe_symbols(symbols) != known:
                raise CannotStoreError("the compile added guards")
            environment.check_sources()
            record = to_record(graph, in_pytorch, originals)
        except CannotStoreError as error:
            _not_cached(graph.name, str(error))
            return
        if self._store.put(key, record):
            count("cache_stored")


def _not_cached(name: GraphName, reason: str) -> Lookup:
    count("not_cached")
    count(f"not_cached: {reason}")
    logger.info("%s is not cached: %s", name, reason)
    return Lookup()
