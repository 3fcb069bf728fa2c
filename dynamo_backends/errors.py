"""The exceptions of the package, and ``Reason``: why a node runs in PyTorch.

An exception has the node it is about, if there is one. A wrong option is a ``ValueError``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import os
from collections.abc import Iterator, Sequence


class Kind(enum.Enum):
    """What keeps a node from ONNX Runtime."""

    NO_TRANSLATION = "no translation"
    """Neither this package nor torchlib translates the operator with these arguments."""
    NOT_IN_ONNX = "not in ONNX"
    """ONNX or ONNX Runtime cannot represent it: complex or sparse tensors, side effects."""
    UPSTREAM_FAULT = "upstream fault"
    """A translation of torchlib or a kernel of ONNX Runtime is known to be wrong."""
    REJECTED = "rejected"
    """ONNX Runtime has no kernel for it, or rejected its model."""
    OUT_OF_MEMORY = "out of memory"
    """The probe ran out of memory; the answer may differ next time."""
    DEVICE = "device"
    """It is on a device, or copies between devices, that no execution provider supports."""
    UNKNOWN_SHAPE = "unknown shape"
    """Its shapes, strides or memory are unknown before the call."""
    RANDOM = "random"
    """It draws random numbers from PyTorch's generator, so that a seed gives eager's numbers."""
    UNINITIALIZED = "uninitialized"
    """It allocates memory without initializing it."""
    SHARED_MEMORY = "shared memory"
    """In eager, its result shares memory with another tensor."""
    FASTER_IN_PYTORCH = "faster in PyTorch"
    """ONNX Runtime could run it, but slower."""


_BY_DESIGN = frozenset(
    {Kind.RANDOM, Kind.UNINITIALIZED, Kind.SHARED_MEMORY, Kind.FASTER_IN_PYTORCH},
)


@dataclasses.dataclass(frozen=True)
class Reason:
    """Why a node runs in PyTorch.

    Attributes:
        kind: for programs.
        text: for people.
        remedy: what lets ONNX Runtime run the node, if there is something better than for others of the kind.
    """

    kind: Kind
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        return self.text

    @property
    def by_design(self) -> bool:
        """Whether PyTorch is the intended place: such nodes are counted and listed, without a warning or an error."""
        return self.kind in _BY_DESIGN


def first_line(text: str) -> str:
    """The first line of a message, at most 300 characters."""
    lines = text.strip().splitlines()
    return lines[0][:300] if lines else ""


class UnsupportedOperatorError(RuntimeError):
    """A node cannot run on ONNX Runtime, and ``options={"fallback": "error"}`` rules out PyTorch.

    Attributes:
        node: the name of the FX node.
        operator: what it calls, ``aten.sort.default``.
        source: the user's line, ``model.py:17``, or empty.
        reason: why it cannot.
    """

    def __init__(self, node: str, operator: str, source: str, reason: Reason) -> None:
        super().__init__(
            f"node {node!r} ({operator}) at {source or 'an unknown line'} cannot run on ONNX Runtime: {reason}. "
            "Remove options={'fallback': 'error'} to run it in PyTorch."
        )
        self.node = node
        self.operator = operator
        self.source = source
        self.reason = reason


class AheadOfTimeError(RuntimeError):
    """A graph cannot be saved by ``torch.compile(...).aot_compile(...)``, or a saved one cannot be loaded here."""


class WarmUpError(RuntimeError):
    """``warm_up`` saw something that its caller did not allow.

    Attributes:
        reasons: each in one line.
    """

    def __init__(self, reasons: Sequence[str]) -> None:
        super().__init__("\n".join(["the model is not ready to serve:", *(f"- {reason}" for reason in reasons)]))
        self.reasons = tuple(reasons)


class TranslationError(RuntimeError):
    """An FX node has no translation to ONNX, or its translation failed.

    Attributes:
        reason: why; a plain text becomes a reason of the kind ``NO_TRANSLATION``.
        node: the name of the FX node; ``None`` if it is not known yet.
    """

    def __init__(self, reason: Reason | str, node: str | None = None, operator: str = "") -> None:
        self.reason = reason if isinstance(reason, Reason) else Reason(Kind.NO_TRANSLATION, reason)
        self.node = node
        super().__init__(f"{node} ({operator}): {self.reason}" if node is not None else str(self.reason))

    def of(self, node: str, operator: str) -> TranslationError:
        """The same error, with the FX node it is about."""
        return TranslationError(self.reason, node, operator)


class ExportError(RuntimeError):
    """A model cannot be exported to an ONNX file; the message says why, with the user's line if there is one."""


class SessionError(RuntimeError):
    """ONNX Runtime rejected a model, or failed while running it. The message is ONNX Runtime's.

    Attributes:
        reason: the message without names of nodes, so that equal rejections have equal reasons.
        node: the FX node of the ONNX node in the message, or ``None``.
    """

    def __init__(self, message: str, reason: Reason | None = None, node: str | None = None) -> None:
        super().__init__(message)
        self.reason = reason or Reason(Kind.REJECTED, first_line(message))
        self.node = node


def is_out_of_memory(error: Exception) -> bool:
    """Whether something failed for want of memory, so that it may succeed at another time."""
    return isinstance(error, MemoryError) or (
        isinstance(error, SessionError) and error.reason.kind is Kind.OUT_OF_MEMORY
    )


class KernelFaultError(SessionError):
    """A model would run a kernel of ONNX Runtime that is known to be wrong.

    Attributes:
        reason: what the kernel computes wrongly.
        node: the FX node of the ONNX node, or ``None``.
    """

    def __init__(self, onnx_node: str, reason: Reason, node: str | None) -> None:
        super().__init__(f"{onnx_node}: {reason}", reason, node)


class CandidateError(RuntimeError):
    """A graph cannot be compiled at a call as it should, although nothing failed: it would need new guards on sizes, or
    Inductor's time is used up."""


class CompiledNodesError(SessionError):
    """ONNX Runtime cannot save a session's model because an execution provider compiled some of its nodes."""


class WrongResultError(SessionError):
    """A result of ONNX Runtime has another shape or dtype than eager's.

    Attributes:
        result: the name of the ONNX value.
        what: ``has shape (2, 3) where eager returns (3,)``.
    """

    def __init__(self, result: str, what: str) -> None:
        super().__init__(f"{result} {what}")
        self.result = result
        self.what = what


@contextlib.contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """An ``OSError`` of this block names what cannot be written: that of a full disk does not."""
    try:
        yield
    except OSError as error:
        if error.filename is not None:
            raise
        raise OSError(f"{os.fspath(path)} cannot be written: {error.strerror or error}") from error
