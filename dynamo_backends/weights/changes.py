"""Notices when tensors that a session holds as constants change.

Three signs tell, in each call:

- the address of the memory (``addresses_of``, which the caller compares): it is another one when a tensor was replaced,
  or given other memory by ``p.data = ...``;
- a hash of the memory (XXH3) of small tensors (``WHOLE``), each read whole in each call;
- of large tensors the version counter, which PyTorch raises at each write that it knows of, and for the other writes
  (``p.data.copy_(...)``, ``numpy()``, DLPack) the hash of a part: of the next of ``CALLS`` slices of all of them, one
  behind the other, so that each call reads as many bytes, in few pieces. A few bytes of each are compared besides, from
  its start in one call and from its middle in the next: a write to a whole tensor is noticed sooner.

So a write to a small tensor is noticed by the next call, and a write to a large one that PyTorch does not know of
within ``CALLS`` calls.

The tensors' storages are kept alive, so that no other tensor can have their memory. They may be freed all the same
(``storage.resize_(0)``), so memory is read only where a tensor of now has that address.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
import torch
from xxhash import xxh3_64_intdigest

CALLS = 64
"""Within how many calls every byte is read."""

WHOLE = 16 * 1024
"""Bytes of the largest tensor that is read whole in each call."""

_SMALL = 64 * 1024
"""Bytes of all tensors together, up to which each is read whole in each call, whatever its size."""

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


@dataclasses.dataclass(frozen=True, slots=True)
class _Piece:
    """A part of the memory of a tensor, and its hash when the watch was made.

    Attributes:
        tensor: its position.
        start: the first byte.
        memory: the bytes.
        digest: their hash.
    """

    tensor: int
    start: int
    memory: memoryview
    digest: int

    @property
    def is_same(self) -> bool:
        return xxh3_64_intdigest(self.memory) == self.digest


class _Pieces:
    """Pieces that are read together."""

    def __init__(self, pieces: Iterable[_Piece] = ()) -> None:
        pieces = list(pieces)
        self._memories = [piece.memory for piece in pieces]
        self._digests = [piece.digest for piece in pieces]

    def are_same(self) -> bool:
        return list(map(xxh3_64_intdigest, self._memories)) == self._digests


class Watch:
    """Remembers what tensors hold.

    A write while a watch is made, or later, is a change: versions are remembered before the memory is read.

    Args:
        tensors: those that ``can_be_watched``.
        complete: whether every byte is read in each call.

    Attributes:
        addresses: of the tensors, as they were.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], *, complete: bool = False) -> None:
        self.addresses = addresses_of(tensors)
        are_whole = complete or sum(tensor.nbytes for tensor in tensors) <= _SMALL
        self._large = [i for i, tensor in enumerate(tensors) if not are_whole and tensor.nbytes > WHOLE]
        self._versions = [tensors[i]._version for i in self._large]
        memories = [_memory(tensor) for tensor in tensors]
        self._samples = [[_sample(memories[i], share) for i in self._large] for share in (0.0, 0.5)]
        self._sampled = [b"".join(samples) for samples in self._samples]
        small = set(range(len(tensors))) - set(self._large)
        whole = [_piece(i, memories[i], 0, len(memories[i])) for i in sorted(small)]
        slices = _slices(memories, self._large)
        self._pieces = [*whole, *itertools.chain.from_iterable(slices)]
        self._whole = _Pieces(whole)
        self._slices = [_Pieces(pieces) for pieces in slices]
        self._turns = itertools.count()  # safe in all threads

    def is_unchanged(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether no sign tells that a tensor was written to.

        Args:
            tensors: those of now, in the same order; of the dtypes and shapes of those before, at the same addresses.
        """
        if not self._whole.are_same():
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
        return self._slices[turn % CALLS].are_same()

    def changed(self, tensors: Sequence[torch.Tensor]) -> tuple[list[int], list[int]]:
        """Which of the tensors hold something else now; every byte of them is read.

        A raised version without another value is no change, and told only once. A tensor that cannot be watched is one.

        Args:
            tensors: those of now, in the same order.

        Returns:
            The positions of all of them, and of those that were written without PyTorch's knowledge, maybe some calls
            ago: these are large.
        """
        addresses = addresses_of(tensors)
        moved = {i for i, address in enumerate(self.addresses) if addresses[i] != address}
        moved |= {i for i, tensor in enumerate(tensors) if not can_be_watched(tensor)}
        versions = [-1 if i in moved else tensors[i]._version for i in self._large]
        # the memory of what moved may be gone
        written = {piece.tensor for piece in self._pieces if piece.tensor not in moved and not piece.is_same}
        if not moved and not written:
            self._versions = versions
        pairs = zip(self._large, versions, self._versions, strict=True)
        return sorted(moved | written), [i for i, now, before in pairs if i in written and now == before]

    def differing(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """The positions of tensors whose bytes are not those that were remembered, wherever they are now.

        Args:
            tensors: those of now, in the same order; of the dtypes and shapes of those before.
        """
        memories = [_memory(tensor) if can_be_watched(tensor) else None for tensor in tensors]
        found = set()
        for piece in self._pieces:
            memory = memories[piece.tensor]
            if memory is not None:
                now = memory[piece.start : piece.start + len(piece.memory)]
                if xxh3_64_intdigest(now) != piece.digest:
                    found.add(piece.tensor)
        return sorted(found)


def _memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor, in the order of its memory; through DLPack, as a storage that ``numpy()`` was asked of
    cannot be resized any more."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    return np.from_dlpack(flat.view(torch.uint8)).data


def _sample(memory: memoryview, share: float) -> memoryview:
    """A few bytes that begin at a share of the memory."""
    start = int(len(memory) * share)
    return memory[start : start + _SAMPLE]


def _piece(tensor: int, memory: memoryview, start: int, stop: int) -> _Piece:
    part = memory[start:stop]
    return _Piece(tensor, start, part, xxh3_64_intdigest(part))


def _slices(memories: Sequence[memoryview], large: Sequence[int]) -> list[list[_Piece]]:
    """``CALLS`` slices of the large tensors, of as many bytes each; none if no tensor is large."""
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
