"""Detects writes to tensors on a GPU that a session holds as constants.

Each call compares the tensors' addresses (the caller does) and version counters, which PyTorch increments at each write
it knows of. Other writes (``p.data.copy_(...)``, DLPack, a kernel of another library) are found by checksums, which the
GPU computes. All tensors together are divided into groups of about equal size. Every eighth call launches the checksums
of the next group and their comparison on PyTorch's stream, and reads the result of the previous group, so that no call
waits for what it launches. So a write that PyTorch does not know of is found within ``CALLS`` calls.

A checksum is the sum of the elements' bits, each multiplied by a random factor that is chosen by its position modulo a
prime number. Elements that change places change it too, unless their distance is a multiple of that prime.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..common.fork_safety import renew_in_children
from .watchable import CALLS, VersionWatch, can_be_watched

_PERIOD = 8
"""Calls between launches: those of one call take as long as launching some kernels of a model."""

_GROUPS = CALLS // _PERIOD - 1
"""Parts of the tensors, so that each is compared, and its answer read, within ``CALLS`` calls."""

_PRIMES = (1021, 1019, 1013, 1009)
"""Numbers of factors. The first that divides no size of the tensor is used: rows that change places meet others."""

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
"""By the size of an element, the dtype of its bits. Not int64: signs that are flipped in pairs would cancel."""


@functools.cache
def _factors(number: int, device: torch.device) -> torch.Tensor:
    """Random odd numbers."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(-(2**62), 2**62, (number,), generator=generator, dtype=torch.int64)
    return (numbers * 2 + 1).to(device)


def checksum(tensor: torch.Tensor) -> torch.Tensor:
    """A number of type int64, on the tensor's device, that almost any write to the dense tensor changes."""
    words = tensor.detach().as_strided((tensor.numel(),), (1,)).view(_WORDS[tensor.itemsize])
    number = next((prime for prime in _PRIMES if all(size % prime for size in tensor.shape)), _PRIMES[0])
    factors, rows = _factors(number, tensor.device), len(words) // number
    rest = words[rows * number :]
    total = (rest * factors[: len(rest)]).sum()
    if rows:
        columns = words[: rows * number].view(rows, number).sum(0, dtype=torch.int64)
        total = total + (columns * factors).sum()
    return total


class _Pending(NamedTuple):
    """An answer that the GPU computes: whether checksums differ."""

    differ: torch.Tensor  # in memory of the CPU
    event: torch.cuda.Event | None

    def read(self) -> bool:
        if self.event is not None:
            self.event.synchronize()  # for some calls long: it is ready unless the program is that far ahead
        return bool(self.differ)


class GpuWatch(VersionWatch):
    """Remembers the content of tensors, and detects when it changes; see ``changes.Watch``.

    Args:
        tensors: tensors that ``can_be_watched``, of which one at least is on a GPU.
        complete: whether each call compares all of them, and waits for that.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], *, complete: bool = False) -> None:
        super().__init__(tensors)
        self._versions = self._first_versions
        self._device = next((item.device for item in tensors if item.device.type == "cuda"), torch.device("cpu"))
        self._checksums = self._of(tensors)
        self._groups = _groups([tensor.nbytes for tensor in tensors])
        self._complete = complete
        self._turns = itertools.count()  # thread-safe
        self._pending: _Pending | None = None
        self._lock = threading.Lock()
        renew_in_children(self)

    def renew_in_child(self) -> None:
        """See ``fork_safety.Renewable``."""
        self._lock = threading.Lock()

    def is_unchanged(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether this call's checks find no write."""
        if self.written_meanwhile:
            return False
        try:
            if [tensor._version for tensor in tensors] != self._versions:
                return False
        except RuntimeError:  # one has no version counter
            return False
        if self._complete:
            return torch.equal(self._of(tensors), self._checksums)
        turn = next(self._turns)
        if turn % _PERIOD or not self._lock.acquire(blocking=False):
            return True
        try:
            return self._next_group(tensors, turn // _PERIOD)
        finally:
            self._lock.release()

    def changed(self, tensors: Sequence[torch.Tensor]) -> tuple[list[int], list[int]]:
        """See ``changes.Watch``; waits for the GPU."""
        pairs = zip(tensors, self.addresses, strict=True)
        moved = {i for i, (item, address) in enumerate(pairs) if item.data_ptr() != address or not can_be_watched(item)}
        versions = [-1 if i in moved else item._version for i, item in enumerate(tensors)]
        written = {*self.differing(tensors), *self.written_meanwhile} - moved
        if not moved and not written:
            self._versions = versions
        unseen = [i for i in sorted(written) if versions[i] == self._versions[i]]
        return sorted(moved | written), unseen

    def differing(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """See ``changes.Watch``; waits for the GPU."""
        watched = [i for i, tensor in enumerate(tensors) if can_be_watched(tensor)]
        differ = self._of([tensors[i] for i in watched]) != self._checksums[watched]
        return [watched[i] for i in differ.nonzero().flatten().tolist()]

    def _of(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """The checksums of tensors, on the device of the answers."""
        sums = [checksum(tensor).to(self._device, non_blocking=True) for tensor in tensors]
        return torch.stack(sums) if sums else torch.zeros(0, dtype=torch.int64, device=self._device)

    def _next_group(self, tensors: Sequence[torch.Tensor], turn: int) -> bool:
        """Reads the last answer, and launches the comparison of the next group."""
        if self._device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return True
        pending, self._pending = self._pending, None
        if pending is not None and pending.read():
            return False
        start, stop = self._groups[turn % len(self._groups)]
        differ = (self._of(tensors[start:stop]) != self._checksums[start:stop]).any()
        if self._device.type != "cuda":
            self._pending = _Pending(differ, None)
            return True
        event = torch.cuda.Event()
        answer = torch.empty((), dtype=torch.bool, pin_memory=True)
        answer.copy_(differ, non_blocking=True)
        event.record(torch.cuda.current_stream(self._device))
        self._pending = _Pending(answer, event)
        return True


def _groups(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """At most ``_GROUPS`` ranges of positions, with about as many bytes each."""
    total = max(1, sum(sizes))
    before = [end - size for size, end in zip(sizes, itertools.accumulate(sizes), strict=True)]
    groups = itertools.groupby(range(len(sizes)), lambda i: before[i] * _GROUPS // total)
    ranges = [list(positions) for _, positions in groups]
    return [(positions[0], positions[-1] + 1) for positions in ranges]
