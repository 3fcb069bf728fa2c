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
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ..artifacts import CompiledGraph, GraphName, Runner
from ..contest import Outcome
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
from .entry import entry_of, from_record, to_record
from .store import Record, Store, folder_named, tell_once

if TYPE_CHECKING:
    from passes.engine.manager import PassResult

logger = logging.getLogger(__name__)

_NOT_OF_THE_RESULT = frozenset({"cache", "cache_dir", "cache_size", "dump_dir", "compare", "tensor_limit"})
"""Options that change nothing of what is compiled."""

_SOURCES_CHANGED = "sources that cannot be read, or changed"


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
        tell_once(error)
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
        if environment.obstacle(self._options) is not None:
            return None
        try:
            key = _digest({"what": "translated operators", "opset": opset, "environment": environment.fixed()})
        except OSError:
            return None
        record = self._store.get(key)
        if record is not None:
            return frozenset(record.header)
        names = translated_operators(opset)
        self._store.put(key, Record(sorted(names)))
        return names

    @never_fails("looking a graph up in the cache", _NO_ENTRY, Lookup)
    def look_up(
        self, name: GraphName, module: fx.GraphModule, weights: Mapping[fx.Node, Weight], *, is_joint: bool
    ) -> Lookup:
        """Whether a graph was compiled before.

        Args:
            name: which graph.
            module: the graph, before any of its passes.
            weights: the arguments that may be constants, by placeholder.
            is_joint: whether the joint passes are to run.
        """
        against = environment.obstacle(self._options)
        if against is not None:
            return _not_cached(name, against)
        if self._store.reason_against() is not None:
            return _not_cached(name, "a folder that others may write")
        try:
            key = self._key(name, module, weights, is_joint=is_joint)
            originals = constants(module)
        except CannotStoreError as error:
            return _not_cached(name, str(error))
        except OSError:
            return _not_cached(name, _SOURCES_CHANGED)
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
    def outcome(self, frame: str, direction: str, ways: Sequence[str]) -> Outcome | None:
        """How a contest ended in an earlier process; ``None`` if that is not known.

        Args:
            frame: what tells the captured graph from others.
            direction: ``forward``, ``backward`` or ``inference``.
            ways: the ways it may run.
        """
        key = self._key_of_outcome(frame, direction, ways)
        record = self._store.get(key) if key is not None else None
        if record is None:
            return None
        try:
            return _outcome(record.header)
        except (TypeError, ValueError, AttributeError) as error:
            logger.warning("an entry of the cache is ignored and removed: %s: %r", key, error)
            self._store.remove(str(key))
            return None

    @never_fails("the cache", _NOT_KEPT, lambda: None)
    def keep_outcome(self, frame: str, direction: str, ways: Sequence[str], outcome: Outcome) -> None:
        """Keeps what ``outcome`` returns from now on."""
        key = self._key_of_outcome(frame, direction, ways)
        if key is not None:
            self._store.put(key, Record(dataclasses.asdict(outcome)))

    def _key_of_outcome(self, frame: str, direction: str, ways: Sequence[str]) -> str | None:
        if environment.obstacle(self._options) is not None:
            return None
        try:
            described = environment.describe()
        except OSError:
            return None
        return _digest(
            {
                "what": "outcome",
                "frame": frame,
                "direction": direction,
                "ways": list(ways),
                "options": self._options_of_the_result(),
                "environment": described,
            }
        )

    def _options_of_the_result(self) -> dict[str, str]:
        return {
            field.name: repr(getattr(self._options, field.name))
            for field in dataclasses.fields(self._options)
            if field.name not in _NOT_OF_THE_RESULT
        }

    def _key(
        self, name: GraphName, module: fx.GraphModule, weights: Mapping[fx.Node, Weight], *, is_joint: bool
    ) -> str:
        return _digest(
            {
                "what": "graph",
                "direction": name.direction,
                "is_joint": is_joint,
                "graph": describe(module),
                "weights": [node in weights for node in module.graph.find_nodes(op="placeholder")],
                "options": self._options_of_the_result(),
                "environment": environment.describe(),
            }
        )

    def _load(
        self, key: str, name: GraphName, module: fx.GraphModule, weights: Mapping[fx.Node, Weight]
    ) -> Runner | None:
        record = self._store.get(key)
        if record is None:
            return None
        try:
            entry = from_record(record)
            run = entry.runner(name, module, weights, self._options)
        except SessionError as error:  # there may be no memory just now
            logger.warning("%s is in the cache, and is compiled anew: %s", name, error)
            return None
        except (ValueError, LookupError, TypeError, AttributeError, RuntimeError) as error:  # the last are PyTorch's
            logger.warning("an entry of the cache is ignored and removed: %s: %r", key, error)
            self._store.remove(key)
            return None
        entry.report.tell(name)
        for i, executable in enumerate(entry.regions):
            cached_model(name, i, executable.model)
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
            entry = entry_of(graph, in_pytorch, originals)
            record = to_record(entry)
            _check(record)
        except CannotStoreError as error:
            _not_cached(graph.name, str(error))
            return
        except OSError:
            _not_cached(graph.name, _SOURCES_CHANGED)
            return
        if self._store.put(key, record):
            count("cache_stored")


def _outcome(header: Any) -> Outcome:
    """What was kept of a contest.

    Raises:
        TypeError, ValueError, AttributeError: it is no outcome.
    """
    outcome = Outcome(**header)
    milliseconds = {str(name): float(time) for name, time in outcome.milliseconds.items()}
    out = {str(name): str(why) for name, why in outcome.out.items()}
    return Outcome(str(outcome.winner), milliseconds, out)


def _check(record: Record) -> None:
    """Checks that what is read is what was written.

    Raises:
        CannotStoreError: it is not.
    """
    written = json.loads(json.dumps(record.header))
    try:
        again = to_record(from_record(Record(written, record.blobs)))
    except (ValueError, LookupError, TypeError) as error:
        raise CannotStoreError("it cannot be read again") from error
    if json.loads(json.dumps(again.header)) != written or list(again.blobs) != list(record.blobs):
        raise CannotStoreError("it is another when it is read again")


def _not_cached(name: GraphName, reason: str) -> Lookup:
    count("not_cached")
    count(f"not_cached: {reason}")
    logger.info("%s is not cached: %s", name, reason)
    return Lookup()


def _digest(content: object) -> str:
    text = json.dumps(content, sort_keys=True, allow_nan=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
