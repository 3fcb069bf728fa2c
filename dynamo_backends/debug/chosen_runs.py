"""Which runs of a graph are compared: by default the first, and of a dynamic graph the first at each new set of sizes.

A graph with symbolic shapes is one graph for all sizes, and a fault may show at some of them only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_symbols

from passes.engine.locks import Lock

from ..graphs.locations import user_name

MOST_SIZES = 8
"""Sets of sizes of a graph that are compared by default."""

MOST_RETRIES = 3
"""Further forwards that are compared by default where those before had no backward."""

_SHOWN = 3
"""Arguments whose sizes a verdict names; the manifest has all."""

SizesByName = dict[str, object]
"""By what the user calls an argument: the shape of a tensor as a list, or the value of a number."""


class Sizes:
    """What may be another at each call of a graph, besides the elements of tensors: sizes, strides, whole numbers."""

    def __init__(self, module: fx.GraphModule) -> None:
        placeholders = module.graph.find_nodes(op="placeholder")
        values = [node.meta.get("val", node.meta.get("example_value")) for node in placeholders]
        of_tensors = {s for value in values if isinstance(value, torch.Tensor) for s in free_symbols(value)}
        self._symbolic = symbolic = [i for i, value in enumerate(values) if _is_symbolic(value)]
        self._names = {
            i: user_name(placeholders[i]) or placeholders[i].name
            for i in symbolic
            if isinstance(values[i], torch.Tensor) or not free_symbols(values[i]) <= of_tensors
        }

    @property
    def is_dynamic(self) -> bool:
        """Whether there is anything of that kind."""
        return bool(self._symbolic)

    def key(self, args: Sequence[object]) -> Hashable:
        """The same for two calls, if and only if their sizes are the same."""
        return tuple([_extent(args[i]) for i in self._symbolic])

    def named(self, args: Sequence[object]) -> SizesByName:
        """The sizes of a call by argument; numbers that are sizes of an argument are left out."""
        return {
            name: list(map(_plain, value.shape)) if isinstance(value := args[i], torch.Tensor) else _plain(value)
            for i, name in self._names.items()
        }


def _is_symbolic(value: object) -> bool:
    return isinstance(value, (torch.Tensor, torch.SymInt)) and bool(free_symbols(value))


def _extent(value: object) -> Hashable:
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        return value.shape, value.stride(), value.dtype
    return value.shape if isinstance(value, torch.Tensor) else value


def _plain(size: object) -> object:
    """A size as it goes into a file; that of a jagged tensor is no number."""
    return size if isinstance(size, int) else str(size)


def sizes_text(sizes: SizesByName) -> str:
    """``x 7x8, mask 7x7``; ``""`` where nothing may change."""
    texts = [f"{name} {'x'.join(map(str, size)) if isinstance(size, list) else size}" for name, size in sizes.items()]
    more = [f"{len(texts) - _SHOWN} more"] if len(texts) > _SHOWN else []
    return ", ".join(texts[:_SHOWN] + more)


@dataclasses.dataclass(frozen=True)
class ChosenRun:
    """A run that is compared: its key, and its sizes by argument."""

    key: Hashable
    sizes: SizesByName


class Choice:
    """Chooses the runs of one graph. All methods may be called from several threads.

    Under ``first``: the first run at each set of sizes, ``MOST_SIZES`` at most. A forward whose compared run had no
    backward is compared again, ``MOST_RETRIES`` times at most, so that the backward is compared, too.

    Args:
        sizes: of the graph.
        how: the option ``compare``.
    """

    def __init__(self, sizes: Sizes, how: str) -> None:
        self._sizes = sizes
        self._how = how
        self._most = MOST_SIZES if sizes.is_dynamic else 1
        self._lock = Lock()
        self._compared: set[Hashable] = set()
        self._awaiting: set[Hashable] = set()
        self._retries = self._running = 0

    def begin(self, args: Sequence[object]) -> ChosenRun | None:
        """A run with these arguments, if it is to be compared; then ``end`` or ``fail`` must follow."""
        key = self._sizes.key(args)
        with self._lock:
            if not self._wants(key):
                return None
            self._running += 1
        return ChosenRun(key, self._sizes.named(args))

    def _wants(self, key: Hashable) -> bool:
        if self._how != "first":
            return self._how == "every"
        if key not in self._compared and len(self._compared) < self._most:
            self._compared.add(key)
            return True
        if key in self._awaiting and self._retries < MOST_RETRIES:
            self._retries += 1
            return True
        return False

    def end(self, run: ChosenRun, *, awaits_backward: bool) -> None:
        """A run was compared; ``awaits_backward``: whether its backward may come, and is to be compared with it."""
        with self._lock:
            self._running -= 1
            if awaits_backward and self._how == "first":
                self._awaiting.add(run.key)

    def fail(self, run: ChosenRun) -> None:
        """A run ended with an error: nothing came of it."""
        with self._lock:
            self._running -= 1
            self._compared.discard(run.key)

    def backward_came(self, run: ChosenRun) -> None:
        """The backward of a compared run is compared."""
        with self._lock:
            self._awaiting.discard(run.key)

    @property
    def is_done(self) -> bool:
        """Whether no run will be compared any more."""
        with self._lock:
            is_full = len(self._compared) >= self._most
            return self._how == "first" and is_full and not self._awaiting and not self._running


@dataclasses.dataclass(frozen=True, eq=False)
class Uncompared:
    """Tells the runs of a compiled graph at sizes of which none was compared."""

    sizes: Sizes
    _compared: set[Hashable] = dataclasses.field(default_factory=set)

    def ran(self, args: Sequence[object], *, compared: bool) -> bool:
        """Notes a run; whether none at its sizes was compared, though one at others was."""
        key = self.sizes.key(args)
        if compared and len(self._compared) < MOST_SIZES:
            self._compared.add(key)
        return not compared and bool(self._compared) and key not in self._compared
