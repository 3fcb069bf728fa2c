"""The cache as the pipeline uses it: find a compiled graph, keep one, and keep facts such as autotuned engines.

A graph's key is the SHA-256 of everything its compile depends on: the graph (``description``), the options, and the
``environment``. A graph is not kept if it cannot be described, or if compiling it again may give another result; the
reason is counted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import fx

from ..common.safety_net import never_fails
from ..events import count
from ..exporter.decompositions import translated_operators
from ..graphs.artifacts import GraphName
from ..graphs.graph_json import CannotStoreError
from ..graphs.size_assumptions import Assumptions
from ..options import Options
from ..partition.program import Program
from ..runtime.providers import described
from ..weights.region_session import Weight
from . import environment
from .description import constants, describe
from .program_record import from_record, to_record
from .store import Store, StoredRecord, folder_named, warn_once

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class CacheEntry:
    """A graph and its key in the cache."""

    name: GraphName
    module: fx.GraphModule  # before its passes
    key: str
    originals: Mapping[str, torch.Tensor]  # its constants
    assumptions: Assumptions


def store_of(options: Options) -> Store:
    """The store that the options name.

    Raises:
        OSError: its folder is in a home that is not known.
    """
    return Store(folder_named(options.cache_dir), options.cache_size)


WAIT_SECONDS = 120.0
"""How long a process waits for another one that compiles the same graph, before it compiles it too."""

_NO_ENTRY = "It is as if the cache had no entry"
_NOT_KEPT = "Nothing is kept on disk"


@never_fails("the cache", _NO_ENTRY, lambda: None)
def cached_graphs(options: Options) -> CachedGraphs | None:
    """The cache of a backend; ``None``, with a warning, if its folder is in a home that is not known."""
    try:
        return CachedGraphs(options)
    except OSError as error:
        warn_once(str(error))
        return None


class CachedGraphs:
    """The cache of a backend with these options.

    Raises:
        OSError: its folder is in a home that is not known.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._store = store_of(options)

    @never_fails("the cache", _NO_ENTRY, lambda: None)
    def translated_operators(self, opset: int) -> frozenset[str] | None:
        """See ``decompositions.translated_operators``; ``None`` if the answer cannot be cached."""
        try:
            key = self._fixed_key("translated operators", opset=opset)
        except CannotStoreError:
            return None
        names = self._store.read(key, lambda record: frozenset(record.header))
        if names is None:
            names = translated_operators(opset)
            self._store.put(key, StoredRecord(sorted(names)))
        return names

    @never_fails("looking a graph up in the cache", _NO_ENTRY, lambda: None)
    def entry(
        self, name: GraphName, module: fx.GraphModule, weights: Mapping[int, Weight], *, is_joint: bool
    ) -> CacheEntry | None:
        """The entry of a graph, whether it is stored or not; ``None`` if it cannot be cached.

        Args:
            name: of the graph.
            module: the graph, before its passes.
            weights: the arguments that may be constants, by position.
            is_joint: whether the joint passes are to run.
        """
        try:
            if self._store.reason_against() is not None:
                raise CannotStoreError("a cache folder that is not trusted")
            key = self._key(
                "graph",
                direction=name.direction,
                is_joint=is_joint,
                graph=describe(module),
                weights=[i in weights for i, _ in enumerate(module.graph.find_nodes(op="placeholder"))],
            )
            return CacheEntry(name, module, key, constants(module), Assumptions(module))
        except CannotStoreError as error:
            _not_cached(name, str(error))
            return None

    @never_fails("reading a graph from the cache", _NO_ENTRY, lambda: None)
    def found(self, entry: CacheEntry, load: Callable[[Program], T | None]) -> T | None:
        """The result of ``load`` for the cached Program; ``None`` if there is none, or it is not valid."""
        return self._store.read(entry.key, lambda record: load(from_record(record, entry.module, self._options)))

    def locked(self, entry: CacheEntry) -> contextlib.AbstractContextManager[None]:
        """A context for compiling a graph: it waits while another process compiles the same one."""
        return self._store.locked(entry.key, WAIT_SECONDS)

    @never_fails("keeping a graph in the cache", _NOT_KEPT, lambda: None)
    def keep(self, entry: CacheEntry, program: Program) -> None:
        """Keeps a compiled graph, unless compiling it again may give another result."""
        try:
            if program.varies:
                raise CannotStoreError(program.varies)
            if entry.assumptions.growth():
                raise CannotStoreError("the compile added guards")
            environment.check_sources()
            record = to_record(program, entry.originals)
        except CannotStoreError as error:
            _not_cached(entry.name, str(error))
            return
        if self._store.put(entry.key, record):
            count("cache_stored")

    @never_fails("the cache", _NO_ENTRY, lambda: None)
    def key_for_autograd(self, constants: Sequence[int]) -> str | None:
        """What a compile depends on besides the Dynamo graph; ``None`` if it cannot be cached.

        ``constants`` are the positions of the arguments that may be constants.
        """
        try:
            return self._key("for AOTAutograd", constants=list(constants))
        except CannotStoreError:
            return None

    @never_fails("the cache", _NO_ENTRY, lambda: None)
    def fact(self, question: Mapping[str, object], read: Callable[[StoredRecord], T]) -> T | None:
        """The fact that an earlier process kept; ``None`` if there is none, or ``read`` raises."""
        key = self._key_of_fact(question)
        return None if key is None else self._store.read(key, read)

    @never_fails("the cache", _NOT_KEPT, lambda: None)
    def keep_fact(self, question: Mapping[str, object], answer: object) -> None:
        """Keeps a fact, which is JSON, for the current options and environment."""
        key = self._key_of_fact(question)
        if key is not None:
            self._store.put(key, StoredRecord(answer))

    def _key_of_fact(self, question: Mapping[str, object]) -> str | None:
        try:
            return self._key("fact", question=question)
        except CannotStoreError:
            return None

    def _fixed_key(self, what: str, **content: object) -> str:
        """The key of something that depends on ``content`` and on what cannot change within a process.

        Raises:
            CannotStoreError: nothing can be cached.
        """
        obstacle = environment.obstacle(self._options)
        if obstacle is not None:
            raise CannotStoreError(obstacle)
        described = {"what": what, "environment": environment.fixed(), **content}
        text = json.dumps(described, sort_keys=True, allow_nan=False, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def _key(self, what: str, **content: object) -> str:
        """The key of something that also depends on the options and the settings of the process."""
        fields = dataclasses.fields(self._options)
        names = {field.name for field in fields if field.metadata["changes_graphs"]}
        options = {name: repr(getattr(self._options, name)) for name in names}
        settings = {**environment.describe(), "providers": described(self._options.providers)}
        return self._fixed_key(what, options=options, settings=settings, **content)


def _not_cached(name: GraphName, reason: str) -> None:
    count("not_cached")
    count(f"not_cached: {reason}")
    logger.info("%s is not cached: %s", name, reason)
