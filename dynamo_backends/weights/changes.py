"""Detects writes to tensors that a session holds as constants.

Each call checks:

- the address of the memory (``addresses_of``; the caller compares): it changes when a tensor is replaced, or gets other
  memory by ``p.data = ...``;
- of small tensors (``WHOLE``), a hash (XXH3) of the whole memory of them all;
- of large tensors, the version counter, which PyTorch increments at each write it knows of. Other writes
  (``p.data.copy_(...)``, ``numpy()``, DLPack) are found by hashing: all large tensors together are divided into
  ``CALLS`` slices of equal size, and each call hashes the next one. A few bytes of each large tensor are compared too,
  alternately at its start and middle, so that a write to a whole tensor is found sooner.

So the next call finds a write to a small tensor. A write to a large tensor that PyTorch does not know of is found
within ``CALLS`` calls.

The tensors' storages are kept alive, so that their addresses are not reused. But ``storage.resize_(0)`` may free them:
memory is read only if a current tensor has its address.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from xxhash import xxh3_64_intdigest

from .gpu_changes import GpuWatch, checksum
from .watchable import CALLS, VersionWatch, addresses_of, can_be_watched

WHOLE = 16 * 1024
"""Bytes up to which a tensor is read whole in each call."""

_SMALL = 64 * 1024
"""Bytes of all tensors together up to which each is read whole in each call."""

_SAMPLE = 32

_JOINED = 256 * 1024
"""Bytes of small pieces that are copied together and hashed at once: fewer than the cache of a processor's core has."""


class _Piece(NamedTuple):
    """A part of a tensor's memory, and its hash when the watch was made."""

    tensor: int
    start: int
    memory: memoryview
    digest: int


class _Pieces:
    """Pieces that are hashed in the same call.

    Where the weights do not stay in the processor's caches, most time is spent waiting for memory. Copying small pieces
    waits for several at once; hashing them waits for one after the other.

    Args:
        pieces: of tensors.
        stay_cached: whether they stay in the caches while the session runs.
    """

    def __init__(self, pieces: Sequence[_Piece], *, stay_cached: bool = False) -> None:
        most = 0 if stay_cached else WHOLE
        self._large = [piece.memory for piece in pieces if len(piece.memory) > most]
        self._groups: list[list[memoryview]] = []  # of small ones
        free = 0
        for memory in (piece.memory for piece in pieces if len(piece.memory) <= most):
            if len(memory) > free:
                self._groups.append([])
                free = _JOINED
            self._groups[-1].append(memory)
            free -= len(memory)
        self._digests = self._current()

    def are_unchanged(self) -> bool:
        return self._current() == self._digests

    def _current(self) -> list[int]:
        return [*map(xxh3_64_intdigest, map(b"".join, self._groups)), *map(xxh3_64_intdigest, self._large)]


class Snapshot:
    """Remembers the content of tensors, to compare it once, later.

    It keeps their memory alive, so that addresses are not reused; but not the tensors, and without weak references,
    with which ``swap_tensors`` fails.

    Args:
        tensors: each with a number; several may have the same.

    Attributes:
        tensors: others on the same memory.
    """

    def __init__(self, tensors: Iterable[tuple[int, torch.Tensor]]) -> None:
        contents = [(number, tensor, _content(tensor)) for number, tensor in tensors]
        self._known = [(number, content) for number, _, content in contents]
        self.tensors = [tensor.detach() for _, tensor, _ in contents]

    def unchanged(self, tensors: Iterable[tuple[int, torch.Tensor]]) -> set[int]:
        """The numbers of current tensors of which the memory was remembered; of a number, no memory was written to."""
        pairs = zip(self._known, self.tensors, strict=True)
        changed = {number for (number, content), tensor in pairs if content is None or _content(tensor) != content}
        places = {(number, content[0]) for number, content in self._known if content is not None}
        return {number for number, tensor in tensors if (number, tensor.data_ptr()) in places} - changed


def _content(tensor: torch.Tensor) -> tuple[int, int, int] | None:
    """Address, version and hash; ``None`` if it cannot be watched, or ``resize_`` freed its storage."""
    if not can_be_watched(tensor):
        return None
    end = (tensor.storage_offset() + tensor.numel()) * tensor.itemsize
    if end > tensor.untyped_storage().nbytes():
        return None
    digest = xxh3_64_intdigest(_memory(tensor)) if tensor.device.type == "cpu" else int(checksum(tensor))
    return tensor.data_ptr(), tensor._version, digest


class Watch(VersionWatch):
    """Remembers the content of tensors, and detects when it changes.

    Versions are read before memory: a write during the construction counts as a change.

    Args:
        tensors: tensors that ``can_be_watched``.
        complete: whether each call reads every byte.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], *, complete: bool = False) -> None:
        super().__init__(tensors)
        stay_cached = sum(tensor.nbytes for tensor in tensors) <= _SMALL
        all_whole = complete or stay_cached
        self._large = [i for i, tensor in enumerate(tensors) if not all_whole and tensor.nbytes > WHOLE]
        self._versions = [self._first_versions[i] for i in self._large]
        memories = [_memory(tensor) for tensor in tensors]
        self._samples = [[memories[i][len(memories[i]) * n // 2 :][:_SAMPLE] for i in self._large] for n in (0, 1)]
        self._sampled = [b"".join(samples) for samples in self._samples]
        small = [i for i in range(len(tensors)) if i not in set(self._large)]
        whole = [_piece(i, memories[i], 0, len(memories[i])) for i in small]
        slices = _slices(memories, self._large)
        self._pieces = [*whole, *itertools.chain.from_iterable(slices)]
        self._whole = _Pieces(whole, stay_cached=stay_cached)
        self._slices = [_Pieces(pieces) for pieces in slices]
        self._turns = itertools.count()  # thread-safe

    def is_unchanged(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether this call's checks find no write.

        Args:
            tensors: the current tensors in the same order, with the same addresses, dtypes and shapes.
        """
        if self.written_meanwhile or not self._whole.are_unchanged():
            return False
        if not self._large:
            return True
        try:
            if [tensors[i]._version for i in self._large] != self._versions:
                return False
        except RuntimeError:  # one has no version counter
            return False
        turn = next(self._turns)
        if b"".join(self._samples[turn % 2]) != self._sampled[turn % 2]:
            return False
        return self._slices[turn % CALLS].are_unchanged()

    def changed(self, tensors: Sequence[torch.Tensor]) -> tuple[list[int], list[int]]:
        """The tensors with another content; reads every byte.

        A new version with the same content is not a change, and is remembered. A tensor that cannot be watched counts
        as changed.

        Args:
            tensors: the current tensors, in the same order.

        Returns:
            The positions of all changed tensors; and of those among them that are large and were written without
            PyTorch's knowledge, maybe some calls ago.
        """
        addresses = addresses_of(tensors)
        moved = {i for i, address in enumerate(self.addresses) if addresses[i] != address}
        moved |= {i for i, tensor in enumerate(tensors) if not can_be_watched(tensor)}
        versions = [-1 if i in moved else tensors[i]._version for i in self._large]
        unmoved = (piece for piece in self._pieces if piece.tensor not in moved)  # other memory may be freed
        written = {piece.tensor for piece in unmoved if xxh3_64_intdigest(piece.memory) != piece.digest}
        written.update(self.written_meanwhile)
        if not moved and not written:
            self._versions = versions
        # PyTorch counts a write when it has ended: here that is more likely than before the memory was read
        unseen = [
            i
            for i, before in zip(self._large, self._versions, strict=True)
            if i in written and i not in moved and tensors[i]._version == before
        ]
        return sorted(moved | written), unseen

    def differing(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """The positions of tensors whose bytes differ from the remembered ones, at whatever address.

        Args:
            tensors: the current tensors in the same order, with the same dtypes and shapes.
        """
        memories = [_memory(tensor) if can_be_watched(tensor) else None for tensor in tensors]
        differing = set()
        for i, start, remembered, digest in self._pieces:
            memory = memories[i]
            if memory is not None and xxh3_64_intdigest(memory[start : start + len(remembered)]) != digest:
                differing.add(i)
        return sorted(differing)


def watch_of(tensors: Sequence[torch.Tensor], *, complete: bool = False) -> Watch | GpuWatch:
    """A watch of tensors, see ``Watch``; of tensors on a GPU one that works there."""
    on_cpu = all(tensor.device.type == "cpu" for tensor in tensors)
    return Watch(tensors, complete=complete) if on_cpu else GpuWatch(tensors, complete=complete)


def _memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor in the order of its memory. Through DLPack: after ``numpy()`` a storage cannot be
    resized."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    return np.from_dlpack(flat.view(torch.uint8)).data


def _piece(tensor: int, memory: memoryview, start: int, stop: int) -> _Piece:
    part = memory[start:stop]
    return _Piece(tensor, start, part, xxh3_64_intdigest(part))


def _slices(memories: Sequence[memoryview], large: Sequence[int]) -> list[list[_Piece]]:
    """``CALLS`` slices of the large tensors with equally many bytes; empty if no tensor is large."""
    total = sum(len(memories[i]) for i in large)
    slices: list[list[_Piece]] = [[] for _ in range(CALLS if large else 0)]
    before = 0  # bytes of the tensors before
    for i in large:
        size = len(memories[i])
        for n in range(before * CALLS // total, (before + size - 1) * CALLS // total + 1):
            start, stop = (-(-bound * total // CALLS) - before for bound in (n, n + 1))
            slices[n].append(_piece(i, memories[i], max(0, start), min(size, stop)))
        before += size
    return slices
