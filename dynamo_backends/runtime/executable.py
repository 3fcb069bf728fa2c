"""A region as ONNX Runtime runs it, without FX: what a disk cache can store."""

from __future__ import annotations

import dataclasses
import hashlib

from .binding import BoundSession, InputSpec, OutputSpec
from .session import Session
from .settings import SessionSettings


@dataclasses.dataclass(frozen=True)
class Executable:
    """All that is needed to run a model on torch tensors; it can be pickled, and equal content is equal.

    The same region gives the same content in every process: it has no numbers of graphs, and no paths but those of the
    lines of the model's source.

    Attributes:
        model: the serialized model, from ``kernels.serialized``.
        inputs: one for each input of the model, in its order.
        outputs: one for each output; where it is, too.
        settings: of the session.
    """

    model: bytes = dataclasses.field(repr=False)
    inputs: tuple[InputSpec, ...]
    outputs: tuple[OutputSpec, ...]
    settings: SessionSettings

    @property
    def digest(self) -> str:
        """A name of the content, the same in every process: SHA-256 in hexadecimal."""
        content = hashlib.sha256(self.model)
        content.update(repr(self).encode())
        return content.hexdigest()

    def load(self) -> BoundSession:
        """The session, ready to be called.

        Raises:
            SessionError: ONNX Runtime refused the model.
        """
        return BoundSession(Session(self.model, self.settings), self.inputs, self.outputs)
