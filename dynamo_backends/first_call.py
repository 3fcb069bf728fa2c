"""Real arguments: a compile that waits for those of the first call, and made-up values where there are none."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from passes.engine.locks import Lock

from .artifacts import Runner

_SEED = 0
"""Equal types have equal values, in each process."""


def at_first_call(build: Callable[[Sequence[object]], Runner]) -> Runner:
    """A runner that is built from the arguments of its first call.

    Args:
        build: compiles on real arguments, and returns what runs.
    """
    lock = Lock()
    waiting = [build]
    built: list[Runner] = []

    def run(args: list[object]) -> object:
        with lock:
            if not built:
                built.append(waiting[0](tuple(args)))
                waiting.clear()  # it keeps the graph
        return built[0](args)

    return run


def synthetic(value: object) -> object:
    """A real value of a fake one's type: normal random numbers, zeros for integers, the hint of a symbolic number."""
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value.node.hint
    if not isinstance(value, torch.Tensor):
        return value
    sizes, strides = ([_as_int(item) for item in items] for items in (value.shape, value.stride()))
    elements = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) if all(sizes) else 0
    memory = torch.zeros(elements, dtype=value.dtype, device=value.device)
    if value.is_floating_point():
        memory.normal_(generator=torch.Generator(value.device).manual_seed(_SEED))
    return memory.as_strided(sizes, strides)  # not filled as it reads: where it is expanded it may not be written


def _as_int(size: int | torch.SymInt) -> int:
    return size if isinstance(size, int) else int(size.node.hint)
