"""A region as ONNX Runtime runs it, without FX: the part of a compiled region that the cache stores."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from types import MappingProxyType

import torch

from .binding import InputSpec, OutputSpec
from .constants import declared, declared_as_inputs, with_choices_made
from .expected_shapes import Size
from .providers import Provider, needs_subprocess
from .session import Session
from .settings import SessionSettings
from .subprocess_session import check_in_subprocess


@dataclasses.dataclass(frozen=True)
class Executable:
    """A model, and how to run it on torch tensors. It can be pickled and compared.

    The same region gives the same content in every process: it holds no graph numbers, and no paths but those of the
    model's source lines.

    Attributes:
        model: serialized by ``kernel_faults.serialized``, without the inputs in ``weights``.
        inputs, outputs: one for each argument and result.
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

    @property
    def model_without_constants(self) -> bytes:
        """The model whose inputs are all arguments."""
        return self.model + declared_as_inputs(self.inputs[i].declaration for i in self.weights)

    def on(self, providers: tuple[Provider, ...]) -> Executable:
        """A copy for other execution providers."""
        return dataclasses.replace(self, settings=dataclasses.replace(self.settings, providers=providers))

    def with_constants(self, constants: Collection[int]) -> tuple[Executable, int]:
        """A copy for sessions in which only these ``weights`` are constants, and how many kernels are chosen for that
        (``constants.with_choices_made``)."""
        if len(constants) == len(self.weights):
            return self, 0
        names = {self.inputs[i].name for i in constants}
        model, made = with_choices_made(self.model, [self.inputs[i].declaration for i in self.weights], names)
        return dataclasses.replace(self, model=model), made

    def generalizes(self, other: Executable) -> bool:
        """Whether its arguments have symbolic sizes where those of the other have sizes from 2 on, and equal ones
        elsewhere. Then Dynamo calls its graph instead of that of the other, if their guards are equal otherwise."""
        mine, others = self._argument_sizes, other._argument_sizes
        if mine is None or others is None or list(map(len, mine)) != list(map(len, others)):
            return False
        pairs = [(new, old) for sizes in zip(mine, others, strict=True) for new, old in zip(*sizes, strict=True)]
        return any(old != new for new, old in pairs) and all(
            old == new or (isinstance(old, int) and old > 1 and not isinstance(new, int)) for new, old in pairs
        )

    @property
    def _argument_sizes(self) -> list[tuple[Size, ...]] | None:
        """The shapes of its tensor inputs without ``weights``; ``None`` if one is not known."""
        specs = [spec for i, spec in enumerate(self.inputs) if i not in self.weights and spec.dtype is not None]
        known = [spec.sizes for spec in specs if spec.sizes is not None]
        return known if len(known) == len(specs) else None

    def load(self, constants: Mapping[int, torch.Tensor] = MappingProxyType({})) -> Session:
        """A session that takes all arguments.

        Args:
            constants: values of some of ``weights``, by position; the others stay inputs.

        Raises:
            SessionError: ONNX Runtime rejected the model.
        """
        if needs_subprocess(self.settings.providers):
            check_in_subprocess(self.model_without_constants, self.settings, self._input_shapes)
        model = self.model + declared_as_inputs(self.inputs[i].declaration for i in self.weights if i not in constants)
        model += declared(self.inputs[i].declaration for i in constants)
        values = {
            self.inputs[i].name: self.inputs[i].in_memory_order(tensor).detach() for i, tensor in constants.items()
        }
        return Session(model, self.settings, self.inputs, self.outputs, values)

    @property
    def _input_shapes(self) -> dict[str, tuple[int, ...]] | None:
        """The shapes of the model's inputs by name; ``None`` if a size is symbolic or not known."""
        shapes = {spec.name: spec.memory_shape for spec in self.inputs}
        known = {name: shape for name, shape in shapes.items() if shape is not None}
        return known if len(known) == len(shapes) else None
