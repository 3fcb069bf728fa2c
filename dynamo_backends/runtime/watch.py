"""Notices when tensors that a session holds as constants change.

Three signs tell, in each call:

- the address of the memory: it is another one when a tensor was replaced, or given other memory by ``p.data = ...``;
- the version counter, which PyTorch raises at each write that it knows of;
- the memory itself, for writes that PyTorch does not know of: ``p.data.copy_(...)``, ``numpy()``, DLPack. A few bytes
  of each tensor are looked at, from its start in one call and from its middle in the next, and a part of all there is,
  so that after ``MOST_CALLS`` calls every byte was. Of small models all is looked at in each call.

The tensors' memory is kept alive, so that no other tensor can have its address.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import torch

MOST_CALLS = 1_000
"""After how many calls every byte was looked at, whatever the size."""

SMALL = 64 * 1024
"""Bytes that are looked at in each call, if there are no more."""

_WORD = 8
_SMALLEST_CHUNK = 2_048
_MOST_SMALL_CHUNKS = 16
_SAMPLE = 32

_address_of = torch.Tensor.data_ptr


class Watch:
    """Remembers what tensors hold.

    A write while a watch is made, or later, is a change: signs are remembered before the memory is read.

    Args:
        tensors: on the CPU, each with its elements side by side in memory, in any order of the dimensions.
        complete: whether every byte is looked at in each call.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], *, complete: bool = False) -> None:
        self._addresses = list(map(_address_of, tensors))
        self._versions = [tensor._version for tensor in tensors]
        memories = [_memory(tensor) for tensor in tensors]
        self._samples = [[_bytes_at(memory, share) for memory in memories] for share in (0.0, 0.5)]
        self._sampled = [b"".join(samples) for samples in self._samples]
        total = sum(len(memory) for memory in memories)
        words = max(_SMALLEST_CHUNK, total // _WORD // max(MOST_CALLS - len(tensors), MOST_CALLS // 2))
        self._factors = _factors(words)
        self._chunks = [(i, chunk) for i, memory in enumerate(memories) for chunk in _chunks(memory, words)]
        self._checksums = [self._checksum(chunk) for _, chunk in self._chunks]
        count = len(self._chunks)
        is_small = total <= SMALL and count <= _MOST_SMALL_CHUNKS
        self._step = count if complete or is_small else -(-count // MOST_CALLS)
        self._turns = itertools.count()  # safe in all threads

    def is_unchanged(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether no sign tells that a tensor changed.

        Args:
            tensors: those of now, in the same order; of the dtypes and shapes of those before.
        """
        if list(map(_address_of, tensors)) != self._addresses:
            return False
        if [tensor._version for tensor in tensors] != self._versions:
            return False
        turn = next(self._turns)
        if b"".join(self._samples[turn % 2]) != self._sampled[turn % 2]:
            return False
        count, start = len(self._chunks), turn * self._step
        return all(self._is_same(i % count) for i in range(start, start + self._step))

    def changed(self, tensors: Sequence[torch.Tensor]) -> tuple[list[int], list[int]]:
        """Which of the tensors hold something else now; every byte of them is looked at.

        A raised version without another value is no change, and told only once.

        Returns:
            The positions of all of them, and of those that were written without PyTorch's knowledge.
        """
        versions = [tensor._version for tensor in tensors]
        moved = {i for i, tensor in enumerate(tensors) if _address_of(tensor) != self._addresses[i]}
        written = {i for n, (i, _) in enumerate(self._chunks) if not self._is_same(n)} - moved
        if not moved and not written:
            self._versions = versions
        unseen = {i for i in written if versions[i] == self._versions[i]}
        return sorted(moved | written), sorted(unseen)

    def _is_same(self, index: int) -> bool:
        return self._checksum(self._chunks[index][1]) == self._checksums[index]

    def _checksum(self, chunk: np.ndarray) -> int:
        """A number that is another one if a word is, or two of them changed places."""
        return int(chunk.dot(self._factors[: len(chunk)]))


def _memory(tensor: torch.Tensor) -> np.ndarray:
    """The bytes of a tensor, in the order of its memory."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8).numpy()


def _bytes_at(memory: np.ndarray, share: float) -> memoryview:
    start = int(len(memory) * share)
    return memory[start : start + _SAMPLE].data


def _chunks(memory: np.ndarray, words: int) -> Iterator[np.ndarray]:
    """The memory in pieces: words of eight bytes, and the last few bytes."""
    whole = len(memory) // _WORD * _WORD
    array = memory[:whole].view(np.int64)
    for start in range(0, len(array), words):
        yield array[start : start + words]
    if whole < len(memory):
        yield memory[whole:]


@functools.lru_cache(maxsize=4)
def _factors(words: int) -> np.ndarray:
    """What the words of a chunk are multiplied by: odd numbers, so that no bit is lost, and different ones."""
    return np.random.default_rng(0).integers(-(2**62), 2**62, words, np.int64) | 1
