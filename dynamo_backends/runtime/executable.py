"""A region as ONNX Runtime runs it, without FX: what a disk cache can store."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

import torch

from .binding import BoundSession, InputSpec, OutputSpec
from .constants import declared, declared_as_inputs
from .providers import Provider, only_cpu
from .session import Session
from .settings import SessionSettings
from .subprocess_session import check_apart


@dataclasses.dataclass(frozen=True)
class Executable:
    """All that is needed to run a model on torch tensors; it can be pickled, and equal content is equal.

    The same region gives the same content in every process: it has no numbers of graphs, and no paths but those of the
    lines of the model's source.

    Attributes:
        model: the serialized model without the inputs that may be constants, from ``kernels.serialized``.
        inputs: one for each argument.
        outputs: one for each output; where it is, too.
        settings: of the session.
        weights: the positions of the arguments that may be constants of the session.
    """

    model: bytes = dataclasses.field(repr=False)
    inputs: tuple[InputSpec, ...]
    outputs: tuple[OutputSpec, ...]
    settings: SessionSettings
    weights: tuple[int, ...] = ()

    @property
    def constants(self) -> list[str]:
        """The names of the model's inputs that may be constants of the session."""
        return [self.inputs[i].name for i in self.weights]

    def on(self, providers: tuple[Provider, ...]) -> Executable:
        """The same on other execution providers."""
        return dataclasses.replace(self, settings=dataclasses.replace(self.settings, providers=providers))

    def load(self, constants: Mapping[int, torch.Tensor] = MappingProxyType({})) -> BoundSession:
        """The session, ready to be called with all arguments.

        Args:
            constants: values of some of ``weights``, by position; the session takes the others in each call.

        Raises:
            SessionError: ONNX Runtime refused the model.
        """
        others = [i for i in self.weights if i not in constants]
        model = self.model + declared_as_inputs(self.inputs[i].declaration for i in others)
        model += declared(self.inputs[i].declaration for i in constants)
        if not only_cpu(self.settings.providers):
            whole = self.model + declared_as_inputs(self.inputs[i].declaration for i in self.weights)
            check_apart(whole, self.settings, self._sizes)
        held = {self.inputs[i].name: self.inputs[i].as_it_lies(tensor).detach() for i, tensor in constants.items()}
        return BoundSession(Session(model, self.settings, held), self.inputs, self.outputs)

    @property
    def _sizes(self) -> dict[str, list[int]] | None:
        """The shapes of the model's inputs by name, ``None`` if some are symbolic."""
        sizes = {}
        for spec in self.inputs:
            given = () if spec.dtype is None else spec.sizes
            if given is None or not all(isinstance(size, int) for size in given):
                return None
            order = range(len(given)) if spec.permutation is None else spec.permutation
            sizes[spec.name] = [int(given[i]) for i in order]
        return sizes
