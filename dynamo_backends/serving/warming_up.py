"""``warm_up``: calls a compiled model on examples of its inputs until nothing is compiled or rebuilt any more.

::

    inputs = [(torch.randn(size, 64),) for size in (1, 8, 32)]
    with torch.inference_mode():
        print(dynamo_backends.warm_up(compiled, inputs))  # the second size recompiles
        dynamo_backends.warm_up(compiled, inputs, recompile="error")  # raises if an input still recompiles
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch.utils import _pytree as pytree

from ..common.call_statistics import CallStatistics
from ..common.progress import progress
from ..common.text_table import text_table
from ..errors import WarmUpError
from ..events import FallbackCount
from .metrics import FAILED_CALLS, fallback_counts

_CHOICES = ("allow", "error")


@dataclasses.dataclass(frozen=True)
class WarmedInput:
    """What the calls with one input did.

    Attributes:
        title: dtypes and shapes of its tensors.
        calls: their number.
        first_seconds, last_seconds: the duration of the first and of the last call.
        graphs: the number of Dynamo's graphs that were compiled or loaded from the cache; a recompile adds one.
        cache_hits: the number of AOTAutograd's graphs that were loaded from the cache.
        recompiles: how many of ``graphs`` are of code that ``compiled`` had compiled before.
        weight_refreshes: sessions that were replaced because a weight changed.
        fallbacks: operators in PyTorch, in all graphs that ran, that should run on ONNX Runtime.
        failures: why PyTorch ran instead in a call: what failed, or that no compiled graph ran.
    """

    title: str
    calls: int
    first_seconds: float
    last_seconds: float
    graphs: int
    cache_hits: int
    recompiles: int
    weight_refreshes: int
    fallbacks: Sequence[FallbackCount]
    failures: Sequence[str]


@dataclasses.dataclass(frozen=True)
class WarmUp:
    """The result of ``warm_up``; ``str`` shows it as a table.

    Attributes:
        inputs: one for each input, in order.
        is_settled: whether the last turn counted no event.
    """

    inputs: Sequence[WarmedInput]
    is_settled: bool

    @property
    def fallbacks(self) -> list[str]:
        """All fallbacks and failures, each in one line."""
        lines = [f"{item.operator} x{item.number}: {item.reason}" for each in self.inputs for item in each.fallbacks]
        failures = [f"{each.title}: {failure}" for each in self.inputs for failure in each.failures]
        return list(dict.fromkeys([*lines, *failures]))

    def __str__(self) -> str:
        headers = ("input", "calls", "first", "last", "graphs", "cache hits", "recompiles", "in PyTorch")
        rows = [
            (
                item.title,
                item.calls,
                f"{item.first_seconds * 1e3:.1f} ms",
                f"{item.last_seconds * 1e3:.1f} ms",
                item.graphs,
                item.cache_hits,
                item.recompiles,
                sum(fallback.number for fallback in item.fallbacks),
            )
            for item in self.inputs
        ]
        lines = [text_table(rows, headers), *(f"in PyTorch: {line}" for line in self.fallbacks)]
        return "\n".join(lines if self.is_settled else [*lines, "not settled: events were counted in the last turn"])


def warm_up(
    compiled: Callable[..., object],
    inputs: Iterable[Sequence[object] | Mapping[str, object]],
    *,
    fallback: str = "allow",
    recompile: str = "allow",
    most_calls: int = 64,
) -> WarmUp:
    """Calls a compiled model with each of several inputs in turn, until a whole turn counts no event.

    Events are those of ``events.EVENTS``: a compile, a cache hit, an autotuned engine, a rebuilt session and others.

    Call it as the model will be served: under ``torch.inference_mode()`` if that is so, and with the same number of
    threads, since compiled graphs are guarded by both. If it takes more than two seconds on a terminal, a progress bar
    shows it.

    Args:
        compiled: the result of ``torch.compile``, or any function that calls one.
        inputs: each a tuple or list of positional arguments, or a mapping of keyword arguments. The objects are passed
            in each call; a model that writes to its arguments sees what it wrote.
        fallback: ``error`` raises if operators run in PyTorch that should run on ONNX Runtime, if a call failed there,
            or if no compiled graph ran in a call, as if the function is not compiled.
        recompile: ``error`` raises if code was compiled again, as usually in a first warm-up with several sizes, or if
            the last turn still counted an event.
        most_calls: the maximum number of calls for each input, at least 1.

    Returns:
        What happened.

    Raises:
        WarmUpError: see ``fallback`` and ``recompile``; after all calls.
        TypeError: an input is neither a tuple, a list nor a mapping.
        ValueError: another argument is wrong.
    """
    if fallback not in _CHOICES or recompile not in _CHOICES:
        raise ValueError(f"fallback and recompile are 'allow' or 'error', not {fallback!r} and {recompile!r}")
    if most_calls < 1:
        raise ValueError(f"most_calls: expected at least 1, not {most_calls}")
    warmed = [_Input(compiled, item) for item in inputs]
    is_settled = not warmed
    # what is compiled in the first turn settles in the second
    with progress("warming up", 2 * len(warmed)) as advance:
        for _ in range(most_calls):
            compiles = False
            for item in warmed:
                compiles |= item.call()
                advance()
            if not compiles:
                is_settled = True
                break
    result = WarmUp(tuple(item.result() for item in warmed), is_settled)
    reasons = result.fallbacks if fallback == "error" else []
    if recompile == "error":
        again = [f"{item.title}: {item.recompiles} recompiles" for item in result.inputs if item.recompiles]
        reasons = [*reasons, *again, *([] if is_settled else [f"not settled after {most_calls} calls of each input"])]
    if reasons:
        raise WarmUpError(reasons)
    return result


class _Input:
    """An input, and what its calls did.

    Raises:
        TypeError: see ``warm_up``.
    """

    def __init__(self, compiled: Callable[..., object], arguments: Sequence[object] | Mapping[str, object]) -> None:
        if not isinstance(arguments, (tuple, list, Mapping)):
            raise TypeError(
                "an input is a tuple of positional arguments or a mapping of keyword arguments, not "
                f"{type(arguments).__name__}; for one argument x, pass (x,)"
            )
        self._compiled = compiled
        self._arguments = arguments
        self._statistics = CallStatistics()

    def call(self) -> bool:
        """Calls the model. Returns whether an event was counted that does not repeat in each call."""
        before = self._compiled_so_far()
        end = self._statistics.enter()
        try:
            if isinstance(self._arguments, Mapping):
                self._compiled(**self._arguments)
            else:
                self._compiled(*self._arguments)
        finally:
            end()
        return self._compiled_so_far() != before

    def _compiled_so_far(self) -> int:
        """The number of events so far, without ``FAILED_CALLS``, which each call repeats."""
        return sum(number for event, number in self._statistics.snapshot().counts.items() if event not in FAILED_CALLS)

    def result(self) -> WarmedInput:
        now = self._statistics.snapshot()
        counts = now.counts
        return WarmedInput(
            title=_title(self._arguments),
            calls=now.calls,
            first_seconds=now.latencies[0],
            last_seconds=now.latencies[-1],
            graphs=counts["graphs"],
            cache_hits=counts["cache_hits"],
            recompiles=counts["recompiles"],
            weight_refreshes=counts["weight_refreshes"],
            fallbacks=fallback_counts(now.graphs),
            failures=[now.reasons.get(event, event) for event in FAILED_CALLS if event in counts],
        )


def _title(arguments: Sequence[object] | Mapping[str, object]) -> str:
    tensors = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
    return ", ".join(f"{str(item.dtype).removeprefix('torch.')}{list(item.shape)}" for item in tensors) or "no tensors"
