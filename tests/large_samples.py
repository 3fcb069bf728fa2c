"""Samples of PyTorch's operator database with a million elements and more.

The database's samples have some hundred elements, too few for a kernel to use several threads. They are enlarged in one
of three ways, tried in this order:

1. Most sample functions compute their shapes from the module constants ``S``, ``M`` and ``L`` (5, 10, 20). Samples with
   the original and with doubled constants show by which power a sample grows, and so the required factor.
2. A sample whose input is a number of elements gets a larger number.
3. The tensors of one sample are repeated along some of their dimensions, the same for all of them.

``HAND_WRITTEN`` has samples for entries that none of these makes large, or that need other values.

Integer tensors next to floating-point ones are indices: they are reduced to few distinct values, so that they
repeat.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import itertools
import math
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from hand_written_samples import HAND_WRITTEN, INDEX_VALUES
from operators import call, copy_of, entry_name, loss, seed
from torch.testing._internal.opinfo.core import OpInfo, SampleInput
from torch.utils import _pytree as pytree

SMALLEST, LARGEST = 1_000_000, 8_000_000
"""How many elements the largest tensor of a large sample has, arguments and results together."""

_TARGET = 1_500_000
_PLACEHOLDER = 4 * LARGEST
"""Tensors with more elements than this are not made: a sample with one is not used."""

_SAMPLES_LOOKED_AT = 24
_SLOW = 2.0
"""Seconds that eager may take for a large sample."""

_MEMORY = 4 << 30
"""Bytes that making one sample may take."""

_LONGEST = 12.0
"""Seconds after which no further samples are made one way."""

_MODULES = tuple(
    f"torch.testing._internal.{name}"
    for name in (
        "common_methods_invocations",
        "opinfo.core",
        "opinfo.definitions._masked",
        "opinfo.definitions.linalg",
        "opinfo.definitions.special",
        "opinfo.definitions.fft",
        "opinfo.definitions.nested",
        "opinfo.definitions.signal",
        "opinfo.definitions.sparse",
    )
)

_ANY_OF_THEM = "unpooling: several values for one place, and which of them remains is not stated"
UNIQUE_INDICES = {
    "index_copy": "Tensor.index_copy_: the result is nondeterministic since it depends on which copy occurs last",
    "index_put": "Tensor.index_put_: if accumulate is False, the behavior is undefined if indices contain duplicates",
    "nn.functional.max_unpool1d": _ANY_OF_THEM,
    "nn.functional.multilabel_margin_loss": "targets are no indices",
    "nn.functional.max_unpool2d": _ANY_OF_THEM,
    "nn.functional.max_unpool3d": _ANY_OF_THEM,
    "put": "Tensor.put_: if accumulate is False, the behavior is undefined if index contain duplicate elements",
    "lu_unpack": "pivots are no indices",
    "scatter": "Tensor.scatter_: when indices are not unique, the behavior is non-deterministic",
}
"""Operators whose repeated indices have no defined result, and where PyTorch's documentation says so; their indices
stay as the database or the hand-written sample makes them."""


class TooSmall(Exception):
    """No large sample could be made; the message says what was tried."""


@dataclasses.dataclass(frozen=True)
class LargeSample:
    """A sample and how it was made."""

    sample: SampleInput
    how: str
    elements: int


def tensors_of(value: object) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def large_samples(op: OpInfo, dtype: torch.dtype, number: int, *, gradients: bool = False) -> list[LargeSample]:
    """Up to ``number`` large samples of an entry that differ in more than their values.

    Raises:
        TooSmall: there is none.
    """
    with memory_limit(_MEMORY):
        return _large_samples(op, dtype, number, gradients)


def _large_samples(op: OpInfo, dtype: torch.dtype, number: int, gradients: bool) -> list[LargeSample]:
    found: dict[object, LargeSample] = {}
    reasons: list[str] = []
    for make in (_hand_written, _by_constants, _by_number, _by_repetition):
        with contextlib.suppress(_Enough):
            for candidate in make(op, dtype, gradients, reasons):
                found.setdefault(_kind(candidate.sample), candidate)
                if len(found) >= number:
                    raise _Enough
        if found:
            return list(found.values())[:number]
    raise TooSmall("; ".join(dict.fromkeys(reasons)) or "no sample grows with the constants")


class _Enough(Exception):
    """Enough samples are there."""


def _kind(sample: SampleInput) -> object:
    """What tells samples apart but for their sizes: dimensions, dtypes and all that is no tensor."""

    def describe(leaf: object) -> object:
        if isinstance(leaf, torch.Tensor):
            return leaf.dim(), str(leaf.dtype)
        return "number" if type(leaf) in (int, float) else str(leaf)

    leaves, structure = pytree.tree_flatten(_arguments(sample))
    return str(structure), tuple(map(describe, leaves))


def _arguments(sample: SampleInput) -> tuple[object, object, object]:
    return sample.input, sample.args, sample.kwargs


@contextlib.contextmanager
def _constants(factor: float) -> Iterator[None]:
    """Sample functions make shapes from larger constants; what is far too large is a tensor without memory."""
    saved: list[tuple[Any, str, object]] = []
    for module in map(importlib.import_module, _MODULES):
        for name in ("XS", "S", "M", "L", "XL"):
            value = getattr(module, name, None)
            if isinstance(value, int):
                saved.append((module, name, value))
                setattr(module, name, max(value, round(value * factor)))
        if hasattr(module, "make_tensor"):
            saved.append((module, "make_tensor", module.make_tensor))
            module.make_tensor = _make_tensor  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module, name, value in saved:
            setattr(module, name, value)


def _make_tensor(*shape: Any, **kwargs: Any) -> torch.Tensor:
    sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
    if math.prod(sizes) <= _PLACEHOLDER:
        return torch.testing.make_tensor(*shape, **kwargs)
    return torch.zeros((), dtype=kwargs["dtype"]).expand(sizes)


@contextlib.contextmanager
def memory_limit(more: int) -> Iterator[None]:
    """PyTorch raises, and the machine lives on, where a process would take ``more`` bytes beside those it has."""
    before = resource.getrlimit(resource.RLIMIT_DATA)
    pages = int(Path("/proc/self/statm").read_text().split()[5])
    resource.setrlimit(resource.RLIMIT_DATA, (pages * resource.getpagesize() + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


@contextlib.contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Raises ``TimeoutError`` when the time is over, in the main thread between two operators."""

    def stop(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _made_with(op: OpInfo, dtype: torch.dtype, gradients: bool, factor: float) -> Iterator[tuple[int, SampleInput]]:
    """The first samples of an entry made with larger constants, by position; ends early where one fails."""
    seed()
    with contextlib.suppress(TimeoutError, RuntimeError, ValueError, IndexError, MemoryError), _constants(factor):
        with _time_limit(15.0):
            samples = iter(op.sample_inputs("cpu", dtype, requires_grad=gradients))
        for position in range(_SAMPLES_LOOKED_AT):
            with _time_limit(15.0):
                sample = next(samples, None)
            if sample is None:
                return
            yield position, sample


def _run(op: OpInfo, sample: SampleInput, gradients: bool) -> tuple[int, float] | None:
    """The most elements of a tensor of the sample or its results and eager's time, with the backward if that is
    wanted; ``None`` where eager fails."""
    leaves = tensors_of(_arguments(sample))
    elements = max((leaf.numel() for leaf in leaves), default=0)
    if elements > _PLACEHOLDER:
        return elements, 0.0
    try:
        started = time.perf_counter()
        with torch.set_grad_enabled(gradients), _time_limit(3 * _SLOW):
            results = call(op, copy_of(_arguments(sample)))
            total = loss(results)
            if total.requires_grad:
                total.backward()
        seconds = time.perf_counter() - started
    except Exception:
        return None
    return max([elements, *(leaf.numel() for leaf in tensors_of(results))]), seconds


def _suitable(
    op: OpInfo, sample: SampleInput, how: str, gradients: bool, smallest: int = SMALLEST
) -> LargeSample | None:
    """The sample with repeated indices if eager runs it in time and it is large enough, else ``None``."""
    for candidate in (with_repeated_indices(op, sample), sample):
        measured = _run(op, candidate, gradients)
        if measured is not None:
            elements, seconds = measured
            if smallest <= elements <= LARGEST and seconds < _SLOW:
                return LargeSample(candidate, how, elements)
            return None
    return None


def with_repeated_indices(op: OpInfo, sample: SampleInput) -> SampleInput:
    """The sample with its integer tensors taken modulo a small number."""
    leaves = tensors_of(_arguments(sample))
    if op.name in UNIQUE_INDICES or not any(leaf.is_floating_point() for leaf in leaves):
        return sample

    def repeat(leaf: object) -> object:
        if not isinstance(leaf, torch.Tensor) or leaf.dtype not in (torch.int32, torch.int64) or leaf.numel() < 100:
            return leaf
        if bool((leaf < 0).any()):
            return leaf
        return leaf % INDEX_VALUES

    input, args, kwargs = pytree.tree_map(repeat, _arguments(sample))
    return SampleInput(input, args=args, kwargs=kwargs)


def _by_constants(op: OpInfo, dtype: torch.dtype, gradients: bool, reasons: list[str]) -> Iterator[LargeSample]:
    sizes: list[dict[int, int]] = []
    for factor in (1, 2):
        made = _made_with(op, dtype, gradients, factor)
        measured = ((position, _run(op, sample, False)) for position, sample in made)
        sizes.append({position: found[0] for position, found in measured if found is not None})
    factors: dict[int, list[int]] = {}
    for position in sizes[0].keys() & sizes[1].keys():
        one, two = sizes[0][position], sizes[1][position]
        if one >= 1 and two >= 1.4 * one:
            factor = (_TARGET / one) ** (1 / math.log2(two / one))
            factors.setdefault(math.ceil(factor), []).append(position)
    if not factors:
        reasons.append("its sizes do not depend on the constants")
        return
    # Positions of the same growth share a factor. The most general samples have the most dimensions: least factor.
    deadline = time.monotonic() + _LONGEST
    tried = sorted(factors)
    for factor in tried if len(tried) <= 4 else [*tried[:2], tried[len(tried) // 2], tried[-1]]:
        for scale in (1.0, 0.7, 1.4):
            some = False
            for position, sample in _made_with(op, dtype, gradients, factor * scale):
                if time.monotonic() > deadline:
                    reasons.append("making samples with larger constants takes too long")
                    return
                if position in factors[factor] or len(factors[factor]) > 8:
                    found = _suitable(op, sample, f"sample {position}, constants times {factor * scale:.3g}", gradients)
                    if found is not None:
                        some = True
                        yield found
            if some:
                break
    reasons.append("with larger constants eager fails, is too slow or too large")


def _by_number(op: OpInfo, dtype: torch.dtype, gradients: bool, reasons: list[str]) -> Iterator[LargeSample]:
    """Samples that take a number of elements, or a number of rows and columns."""
    for position, sample in itertools.islice(_made_with(op, dtype, gradients, 1), 12):
        if type(sample.input) is not int:
            return
        for size, args in ((_TARGET, sample.args), (1500, (1500, *sample.args[1:]))):
            found = _suitable(
                op, SampleInput(size, args=args, kwargs=sample.kwargs), f"sample {position} of {size}", gradients
            )
            if found is not None:
                yield found
                break
    reasons.append("no number of elements runs")


def _by_repetition(op: OpInfo, dtype: torch.dtype, gradients: bool, reasons: list[str]) -> Iterator[LargeSample]:
    """Samples as they are, repeated along all dimensions, along the first, the last, or the first input's first."""
    deadline = time.monotonic() + _LONGEST
    for position, sample in itertools.islice(_made_with(op, dtype, gradients, 1), 12):
        leaves = tensors_of(_arguments(sample))
        largest = max(leaves, key=torch.Tensor.numel, default=None)
        if largest is None or largest.numel() == 0:
            continue
        for label, plan in _plans(largest).items():
            if time.monotonic() > deadline:
                reasons.append("its repetitions take too long")
                return
            for which in ("all tensors", "alike tensors", "input"):
                found = _suitable(
                    op,
                    _repeated(sample, plan, which, largest),
                    f"sample {position}, {label} of {which} repeated",
                    gradients,
                )
                if found is not None:
                    yield found
                    break
            else:
                continue
            break
    reasons.append("no repetition of its samples runs")


def _plans(largest: torch.Tensor) -> dict[str, Callable[[torch.Tensor], list[int]]]:
    """Ways to repeat tensors so that ``largest`` has enough elements: how often along each dimension."""
    growth = _TARGET / largest.numel()
    dims = max(sum(1 for size in largest.shape if size > 1), 1)
    return {
        "first dimension": lambda leaf: [math.ceil(growth)] + [1] * (leaf.dim() - 1),
        "last dimension": lambda leaf: [1] * (leaf.dim() - 1) + [math.ceil(growth)],
        "all dimensions": lambda leaf: [math.ceil(growth ** (1 / dims)) if size > 1 else 1 for size in leaf.shape],
        "last two dimensions": lambda leaf: [1] * (leaf.dim() - 2) + [math.ceil(growth**0.5)] * min(leaf.dim(), 2),
    }


def _repeated(
    sample: SampleInput, plan: Callable[[torch.Tensor], list[int]], which: str, largest: torch.Tensor
) -> SampleInput:
    """The sample with tensors repeated, and slightly changed so that their values do not repeat."""

    def repeat(leaf: object) -> object:
        if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided or leaf.dim() == 0:
            return leaf
        if which == "alike tensors" and (leaf.dim() != largest.dim() or leaf.shape[0] != largest.shape[0]):
            return leaf
        if which == "input" and leaf is not largest:
            return leaf
        result = leaf.detach().repeat(plan(leaf))
        if result.dtype in (torch.float32, torch.float64) and result.numel() > leaf.numel():
            result = result * torch.rand_like(result).mul_(1e-3).add_(1 - 1e-3)
        return result.requires_grad_(leaf.requires_grad)

    input, args, kwargs = pytree.tree_map(repeat, _arguments(sample))
    return SampleInput(input, args=args, kwargs=kwargs)


def _hand_written(op: OpInfo, dtype: torch.dtype, gradients: bool, reasons: list[str]) -> Iterator[LargeSample]:
    make = HAND_WRITTEN.get(entry_name(op))
    if make is None:
        return
    seed()

    def values(*shape: int, low: float = -1.0, high: float = 1.0) -> torch.Tensor:
        result = torch.empty(shape, dtype=dtype).uniform_(low, high) if dtype.is_floating_point else None
        if result is None:
            result = torch.testing.make_tensor(shape, dtype=dtype, device="cpu", low=int(low), high=int(high) + 1)
        return result.requires_grad_(gradients and dtype.is_floating_point)

    for position, sample in enumerate(make(values)):
        found = _suitable(op, sample, f"hand-written sample {position}", gradients, smallest=1)
        if found is not None:
            yield found
    reasons.append("the hand-written sample is not suitable")
