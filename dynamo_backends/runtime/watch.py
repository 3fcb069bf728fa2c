"""Notices when tensors that a session holds as constants change.

Three signs tell, in each call:

- the address of the memory (``addresses_of``, which the caller compares): it is another one when a tensor was replaced,
  or given other memory by ``p.data = ...``;
- the version counter, which PyTorch raises at each write that it knows of;
- the memory itself, for writes that PyTorch does not know of: ``p.data.copy_(...)``, ``numpy()``, DLPack. A few bytes
  of each tensor are looked at, from its start in one call and from its middle in the next, and a part of all there is,
  so that after ``MOST_CALLS`` calls every byte was. Of small models all is looked at in each call.

The tensors' storages are kept alive, so that no other tensor can have their memory. They may be freed all the same
(``storage.resize_(0)``), so memory is read only where a tensor of now has that address.
"""

from __future__ import annotations

import collections
import itertools
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

import numpy as np
import torch

MOST_CALLS = 1_000
"""After how many calls every byte was looked at, whatever the size."""

SMALL = 64 * 1024
"""Bytes that are looked at in each call, if there are no more."""

_SMALLEST_CHUNK = 4 * 1024
"""Bytes of which one checksum is made."""

_SAMPLE = 32

_DTYPES = frozenset(
    {
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool),
        *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8),
    }
)

Addresses: TypeAlias = tuple[int, ...]


def addresses_of(tensors: Iterable[torch.Tensor]) -> Addresses:
    """Where the memory of tensors begins."""
    return tuple(map(torch.Tensor.data_ptr, tensors))


def can_be_watched(tensor: torch.Tensor) -> bool:
    """Whether the signs tell of each write to a tensor.

    They do not where it is on another device or of another kind, where its elements are not side by side in memory, and
    where it has no version counter, as what was made under ``torch.inference_mode()``.
    """
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        return False
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.dtype not in _DTYPES:
        return False
    if tensor.numel() == 0 or tensor.is_neg() or tensor._is_zerotensor() or tensor.is_inference():
        return False
    return bool(torch.ops.aten.is_non_overlapping_and_dense.default(tensor))


class Watch:
    """Remembers what tensors hold.

    A write while a watch is made, or later, is a change: signs are remembered before the memory is read.

    Args:
        tensors: those that ``can_be_watched``.
        complete: whether every byte is looked at in each call.

    Attributes:
        addresses: of the tensors, as they were.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], *, complete: bool = False) -> None:
        self.addresses = addresses_of(tensors)
        self._versions: list[int | None] = [tensor._version for tensor in tensors]
        memories = [_memory(tensor) for tensor in tensors]
        total = sum(len(memory) for memory in memories)
        length = SMALL if total <= SMALL else _SAMPLE
        self._samples = [[_bytes_at(memory, share, length) for memory in memories] for share in (0.0, 0.5)]
        if total <= SMALL:
            self._samples[1] = self._samples[0]  # all of them
        self._sampled = [b"".join(samples) for samples in self._samples]
        size = max(_SMALLEST_CHUNK, total // max(MOST_CALLS - len(tensors), MOST_CALLS // 2))
        self._chunks = [(i, chunk) for i, memory in enumerate(memories) for chunk in _chunks(memory, size)]
        self._checksums = [zlib.crc32(chunk) for _, chunk in self._chunks]
        count = len(self._chunks)
        self._step = 0 if total <= SMALL else count if complete else -(-count // MOST_CALLS)
        self._turns = itertools.count()  # safe in all threads

    def is_unchanged(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether no sign tells that a tensor was written to.

        Args:
            tensors: those of now, in the same order; of the dtypes and shapes of those before, at the same addresses.
        """
        try:
            if [tensor._version for tensor in tensors] != self._versions:
                return False
        except RuntimeError:  # one has no version counter
            return False
        turn = next(self._turns)
        if b"".join(self._samples[turn % 2]) != self._sampled[turn % 2]:
            return False
        count, start = len(self._chunks), turn * self._step
        return all(self._is_same(i % count) for i in range(start, start + self._step))

    def changed(self, tensors: Sequence[torch.Tensor]) -> tuple[list[int], list[int]]:
        """Which of the tensors hold something else now; every byte of them is looked at.

        A raised version without another value is no change, and told only once. A tensor that cannot be watched is one.

        Args:
            tensors: those of now, in the same order.

        Returns:
            The positions of all of them, and of those that were written without PyTorch's knowledge.
        """
        now = addresses_of(tensors)
        moved = {i for i, address in enumerate(self.addresses) if now[i] != address}
        moved |= {i for i, tensor in enumerate(tensors) if not can_be_watched(tensor)}
        versions = [None if i in moved else tensor._version for i, tensor in enumerate(tensors)]
        # the memory of what moved may be gone
        written = {i for n, (i, _) in enumerate(self._chunks) if i not in moved and not self._is_same(n)}
        if not moved and not written:
            self._versions = versions
        unseen = {i for i in written if versions[i] == self._versions[i]}
        return sorted(moved | written), sorted(unseen)

    def differing(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """The positions of tensors whose bytes are not those that were remembered, wherever they are now.

        Args:
            tensors: those of now, in the same order; of the dtypes and shapes of those before.
        """
        memories = [_memory(tensor) if can_be_watched(tensor) else None for tensor in tensors]
        found, starts = set(), collections.Counter[int]()
        for (i, chunk), checksum in zip(self._chunks, self._checksums, strict=True):
            memory, start = memories[i], starts[i]
            starts[i] += len(chunk)
            if memory is not None and zlib.crc32(memory[start : start + len(chunk)].data) != checksum:
                found.add(i)
        return sorted(found)

    def _is_same(self, index: int) -> bool:
        return zlib.crc32(self._chunks[index][1]) == self._checksums[index]


def _memory(tensor: torch.Tensor) -> np.ndarray:
    """The bytes of a tensor, in the order of its memory; through DLPack, as a storage that ``numpy()`` was asked of
    cannot be resized any more."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    return np.from_dlpack(flat.view(torch.uint8))


def _bytes_at(memory: np.ndarray, share: float, length: int) -> memoryview:
    start = int(len(memory) * share)
    return memory[start : start + length].data


def _chunks(memory: np.ndarray, size: int) -> Iterator[memoryview]:
    """The memory in pieces."""
    for start in range(0, len(memory), size):
        yield memory[start : start + size].data
