"""Selects the runs of a graph that are compared: the first one, and of a dynamic graph the first at each set of sizes.

A graph with symbolic shapes serves all sizes, and a fault may show at some of them only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_symbols

from ..common.fork_safety import Lock
from ..graphs.locations import user_name

MOST_SIZES = 8
"""Sets of sizes of a graph that are compared by default."""

_SHOWN = 3
"""Arguments whose sizes a verdict names; the manifest has all."""

SizesByName = dict[str, object]
"""By the user's name of an argument: the shape of a tensor as a list, or the value of a number."""


class VaryingSizes:
    """The sizes, strides and integers of a graph's arguments that may differ between calls."""

    def __init__(self, module: fx.GraphModule) -> None:
        placeholders = module.graph.find_nodes(op="placeholder")
        values = [node.meta.get("val", node.meta.get("example_value")) for node in placeholders]
        of_tensors = {s for value in values if isinstance(value, torch.Tensor) for s in free_symbols(value)}
        sized = [i for i, value in enumerate(values) if isinstance(value, (torch.Tensor, torch.SymInt))]
        self._symbolic = symbolic = [i for i in sized if free_symbols(values[i])]
        self.are_symbolic = bool(symbolic)
        names = {
            i: placeholders[i]
            for i in symbolic
            if isinstance(values[i], torch.Tensor) or not free_symbols(values[i]) <= of_tensors
        }
        have_names = any(map(user_name, names.values()))  # of a backward, some are saved values
        self._names = {
            i: user_name(node) or node.name for i, node in names.items() if user_name(node) or not have_names
        }

    def key(self, args: Sequence[object]) -> Hashable:
        """Equal for two calls exactly if their sizes are equal."""
        return tuple([_size_key(args[i]) for i in self._symbolic])

    def by_name(self, args: Sequence[object]) -> SizesByName:
        """The sizes of a call by argument, without numbers that are a size of another argument."""
        return {
            name: list(map(_as_json, value.shape)) if isinstance(value := args[i], torch.Tensor) else _as_json(value)
            for i, name in self._names.items()
        }


def _size_key(value: object) -> Hashable:
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        return value.shape, value.stride(), value.dtype
    return value.shape if isinstance(value, torch.Tensor) else value


def _as_json(size: object) -> object:
    """A size for JSON; the ragged size of a jagged tensor is a text."""
    return size if isinstance(size, int) else str(size)


def sizes_text(sizes: SizesByName) -> str:
    """``x 7x8, mask 7x7``; ``""`` for a static graph."""
    texts = [f"{name} {'x'.join(map(str, size)) if isinstance(size, list) else size}" for name, size in sizes.items()]
    more = [f"{len(texts) - _SHOWN} more"] if len(texts) > _SHOWN else []
    return ", ".join(texts[:_SHOWN] + more)


@dataclasses.dataclass(frozen=True)
class SelectedRun:
    """A run that is compared: its key, its sizes by argument, and whether it is the first of these sizes."""

    key: Hashable
    sizes: SizesByName
    is_first: bool


class RunSelector:
    """Selects the runs of one graph that are compared. Thread-safe.

    With ``compare="first"``: the first run at each set of sizes, at most ``MOST_SIZES``.

    Args:
        module: the graph.
        compare: the option ``compare``.
    """

    def __init__(self, module: fx.GraphModule, compare: str) -> None:
        self._sizes = VaryingSizes(module)
        self._compare = compare
        self._most = MOST_SIZES if self._sizes.are_symbolic else 1
        self._lock = Lock()
        self._compared: set[Hashable] = set()
        self._running = 0

    def begin(self, args: Sequence[object]) -> SelectedRun | None:
        """Selects a run with these arguments, or not; ``end`` or ``fail`` must follow if it is selected."""
        key = self._sizes.key(args)
        with self._lock:
            is_first = key not in self._compared and len(self._compared) < self._most
            if self._compare == "never" or (self._compare == "first" and not is_first):
                return None
            self._compared.add(key)
            self._running += 1
        return SelectedRun(key, self._sizes.by_name(args), is_first)

    def add(self, args: Sequence[object]) -> None:
        """A run with these arguments is compared, as part of a call that another one selected."""
        with self._lock:
            self._compared.add(self._sizes.key(args))

    def has_only_others(self, args: Sequence[object]) -> bool:
        """Whether runs were compared, but none at the sizes of these arguments."""
        return bool(self._compared) and self._sizes.key(args) not in self._compared

    def end(self) -> bool:
        """A selected run was compared; returns whether no run will be any more, and none is being compared."""
        with self._lock:
            self._running -= 1
            return self._compare == "first" and len(self._compared) >= self._most and not self._running

    def fail(self, run: SelectedRun) -> None:
        """A selected run was not compared because of an error."""
        with self._lock:
            self._running -= 1
            self._compared.discard(run.key)
