"""The errors a user of the backends can see, beside ``ValueError`` for options; and why a node runs in PyTorch.

Each error knows its node, if there is one. A ``Reason`` has a kind, for programs, and a text, for people.
"""

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


def first_line(text: str) -> str:
    """The first line of what was said, at most 300 characters."""
    lines = text.strip().splitlines()
    return lines[0][:300] if lines else ""


class UnsupportedOperatorError(RuntimeError):
    """A node cannot run on ONNX Runtime and ``options={"fallback": "error"}`` forbids PyTorch to run it.

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
    """``torch.compile(...).aot_compile(...)`` was asked for; the backends' compiled graphs cannot be saved that way."""

    def __init__(self) -> None:
        super().__init__(
            "aot_compile() saves a compiled function, and the graphs of dynamo-backends cannot be saved that way yet. "
            "Call the compiled function itself: options={'cache_dir': FOLDER} keeps its graphs on disk, where other "
            "processes find them."
        )


class TranslationError(RuntimeError):
    """An FX node has no translation to ONNX, or its translation failed.

    Attributes:
        reason: why; a text given for it is of the kind ``NO_TRANSLATION``.
        node: the name of the FX node, ``None`` until it is known.
    """

    def __init__(self, reason: Reason | str, node: str | None = None, operator: str = "") -> None:
        self.reason = reason if isinstance(reason, Reason) else Reason(Kind.NO_TRANSLATION, reason)
        self.node = node
        super().__init__(f"{node} ({operator}): {self.reason}" if node is not None else str(self.reason))

    def of(self, node: str, operator: str) -> TranslationError:
        """The same error, as one of this FX node."""
        return TranslationError(self.reason, node, operator)


class SessionError(RuntimeError):
    """ONNX Runtime refused a model, or failed while it ran one; the message is what it said.

    Attributes:
        reason: the same as a reason, without the names of nodes, so that alike refusals are one.
        node: the name of the FX node that the ONNX node comes from which ONNX Runtime names, or ``None``.
    """

    def __init__(self, message: str, reason: Reason | None = None, node: str | None = None) -> None:
        super().__init__(message)
        self.reason = reason or Reason(Kind.REFUSED, first_line(message))
        self.node = node


class KernelFaultError(SessionError):
    """A model was not given to ONNX Runtime: one of its kernels would compute something wrong.

    Attributes:
        reason: what the kernel does.
        node: the name of the FX node the ONNX node comes from; ``None`` if it does not say.
    """

    def __init__(self, onnx_node: str, reason: Reason, node: str | None) -> None:
        super().__init__(f"{onnx_node}: {reason}", reason, node)


class CandidateError(RuntimeError):
    """A candidate of autotuning is not to be used, though nothing failed."""


class CompiledNodesError(SessionError):
    """ONNX Runtime cannot write a session's model: an execution provider compiled some of its nodes into one of its
    own."""


class WrongResultError(SessionError):
    """What ONNX Runtime returned has another shape or dtype than eager's result.

    Attributes:
        result: the name of the ONNX value.
        what: ``has shape (2, 3) where eager returns (3,)``.
    """

    def __init__(self, result: str, what: str) -> None:
        super().__init__(f"{result} {what}")
        self.result = result
        self.what = what
