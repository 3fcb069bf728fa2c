"""Why a node runs in PyTorch: a kind, for programs, and a text, for people."""

from __future__ import annotations

import dataclasses
import enum


class Kind(enum.Enum):
    """What keeps a node from ONNX Runtime."""

    NO_TRANSLATION = "no translation"
    """Neither we nor torchlib have a translation, or not of these arguments."""
    NOT_IN_ONNX = "not in ONNX"
    """ONNX, or ONNX Runtime, has no such values: complex or sparse tensors, side effects."""
    UPSTREAM_FAULT = "upstream fault"
    """A translation of torchlib or a kernel of ONNX Runtime is known to compute something else."""
    REFUSED = "refused"
    """ONNX Runtime has no kernel for it, or did not load its model."""
    OUT_OF_MEMORY = "out of memory"
    """There was no memory to find out: the answer may be another one next time."""
    DEVICE = "device"
    """It is on a device, or copies between devices, that no execution provider serves."""
    UNKNOWN_SHAPE = "unknown shape"
    """Its shapes, strides or memory are not known before the call."""
    RANDOM = "random"
    """It draws random numbers, which come from PyTorch's generator, so that a seed gives eager's."""
    UNINITIALIZED = "uninitialized"
    """It makes memory without values."""
    SHARED_MEMORY = "shared memory"
    """Its result shares memory with another, in eager and so here."""
    FASTER_IN_PYTORCH = "faster in PyTorch"
    """ONNX Runtime could run it, and would take longer."""


_BY_DESIGN = frozenset(
    {Kind.RANDOM, Kind.UNINITIALIZED, Kind.SHARED_MEMORY, Kind.FASTER_IN_PYTORCH},
)


@dataclasses.dataclass(frozen=True)
class Reason:
    """Why a node runs in PyTorch.

    Attributes:
        kind: what programs ask for.
        text: what people read.
    """

    kind: Kind
    text: str

    def __str__(self) -> str:
        return self.text

    @property
    def by_design(self) -> bool:
        """Whether it is no lack of ours: such nodes are counted and listed, but neither warned of nor an error."""
        return self.kind in _BY_DESIGN
