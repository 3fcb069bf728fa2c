"""What is assumed on symbolic sizes: a compile that assumes what Dynamo's guards do not check holds for some only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree


class Assumptions:
    """What is known of the sizes of a graph when this is made. The graphs of a frame have their symbols together.

    Args:
        module: a graph with ``meta``.

    Attributes:
        known: as JSON; ``None`` if the graph has no symbolic sizes.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        self._environment = _environment(module)
        self.known = None if self._environment is None else _described(self._environment)

    def growth(self) -> str:
        """What is assumed by now that was not, ``guards: Ne(s77, 4)``; empty if nothing is."""
        if self._environment is None or self.known is None:
            return ""
        now = _described(self._environment)
        new = (f"{kind}: {item}" for kind, items in now.items() for item in items if item not in self.known[kind])
        return "" if now == self.known else next(new, "less than before")


def _environment(module: fx.GraphModule) -> ShapeEnv | None:
    """Where PyTorch keeps what it knows of the symbols of a graph; ``None`` if it has none."""
    for node in module.graph.nodes:
        for number in _numbers(node.meta.get("val")):
            if isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool)):
                return number.node.shape_env
    return None


def _numbers(value: object) -> Iterator[object]:
    for item in pytree.tree_leaves(value):
        if isinstance(item, torch.Tensor) and item.layout is torch.strided:
            yield from (*item.shape, *item.stride(), item.storage_offset())
        else:
            yield item


def _described(environment: ShapeEnv) -> dict[str, Any]:
    """What is known of symbols: ranges, equalities, what is divisible, guards. A compile may look at all of these."""
    pairs: dict[str, Mapping[Any, Any]] = {
        "ranges": environment.var_to_range,
        "axioms": environment.axioms,
        "replacements": environment.replacements,
    }
    return {
        **{name: sorted([str(key), str(item)] for key, item in found.items()) for name, found in pairs.items()},
        "divisible": sorted(map(str, environment.divisible)),
        "sizes": sorted(map(str, environment.size_like)),
        "guards": sorted(str(guard.expr) for guard in environment.guards),
        "asserts": sorted(str(item.expr) for items in environment.deferred_runtime_asserts.values() for item in items),
    }
