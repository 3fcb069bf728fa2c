"""Random numbers of runs that are made for a comparison: drawn from a private state, and used to imitate rounding.

PyTorch has one generator for each device. A comparison that set it would let other threads draw the same numbers twice,
so operators receive another generator. The few that accept none run under a lock, with the process's generators set
before and restored afterwards.

``perturbed`` is the random rounding with which all modules find out how sensitive a computation is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ..common.fork_safety import Lock
from ..common.random_state import RandomState, unchanged_random_state
from .exact import is_floating

aten = torch.ops.aten

_process_generator = Lock()

CALL_A_RANDOM_OPERATOR = ("run_and_save_rng_state", "run_with_rng_state")
"""Higher-order operators that call an operator that draws random numbers."""


def is_random(function: object) -> bool:
    """Whether an ATen operator draws random numbers."""
    if not isinstance(function, torch._ops.OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded in function.tags:
        return True
    return any(argument.name == "generator" for argument in function._schema.arguments)


def draws_numbers(function: object, args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Whether a call of an ATen operator draws random numbers: attention without dropout does not."""
    if not is_random(function):
        return False
    assert isinstance(function, torch._ops.OpOverload)
    for position, argument in enumerate(function._schema.arguments):
        if argument.name in ("dropout_p", "dropout"):
            given = args[position] if position < len(args) else kwargs.get(argument.name, argument.default_value)
            return given != 0.0
    return True


class PrivateRandomness(TorchDispatchMode):
    """Draws random numbers from a private state. The process's generators are neither read nor changed.

    Args:
        state: at the start.

    Attributes:
        draws: how many operators have drawn numbers.
    """

    supports_higher_order_operators = True

    def __init__(self, state: RandomState) -> None:
        super().__init__()
        self._generators = state.generators()
        self.draws = 0

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.HigherOrderOperator):  # its subgraph may draw, or read the state
            self.draws += func.name() in CALL_A_RANDOM_OPERATOR
            return self._with_process_generator(func, args, kwargs)
        draws = draws_numbers(func, args, kwargs) and kwargs.get("generator") is None
        generator = self._generators.get(_device(args, kwargs)) if draws else None
        if generator is None:
            return func(*args, **kwargs)
        self.draws += 1
        is_dropout = func is aten.native_dropout.default and args[0].dtype in (torch.float32, torch.float64)
        if is_dropout and generator.device.type == "cpu":
            return self._dropout(*args, **kwargs)
        overload = _with_generator(func)
        if overload is None:
            return self._with_process_generator(func, args, kwargs)
        return overload(*args, **{**kwargs, "generator": generator})

    def _dropout(self, input: torch.Tensor, p: float, train: bool | None) -> object:
        """As ``native_dropout_cpu`` of ``aten/src/ATen/native/Dropout.cpp``, which takes no generator."""
        if train is False or input.numel() == 0:
            return aten.native_dropout.default(input, p, train)
        generator = self._generators[input.device]
        mask = torch.empty_like(input, dtype=torch.bool).bernoulli_(1 - p, generator=generator)
        return input.mul(mask).mul_(0.0 if p == 1 else 1 / (1 - p)), mask

    def _with_process_generator(self, func: Any, args: Any, kwargs: Any) -> object:
        cpu, *gpus = (generator.get_state() for generator in self._generators.values())
        with _process_generator, unchanged_random_state():
            RandomState(cpu, tuple(gpus)).restore()
            result = func(*args, **kwargs)
            self._generators = RandomState.now().generators()
        return result


def _with_generator(func: torch._ops.OpOverload) -> Callable[..., object] | None:
    """The overload of an operator with the same arguments and a generator; ``None`` if there is none."""
    names = [argument.name for argument in func._schema.arguments if argument.name != "generator"]
    packet = func.overloadpacket
    for overload in (func, *(getattr(packet, name) for name in packet.overloads())):
        others = [argument.name for argument in overload._schema.arguments]
        if "generator" in others and [name for name in others if name != "generator"] == names:
            return overload
    return None


def _device(args: object, kwargs: dict[str, Any]) -> torch.device:
    """Where an operator draws random numbers."""
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    device = torch.device(kwargs.get("device") or (tensors[0].device if tensors else "cpu"))
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if device.type == "cpu" else device  # it may have an index


def perturbed(value: Any, unit: float, generator: torch.Generator) -> Any:
    """A float64 tensor with each finite element changed at random by up to ``unit`` of itself; others unchanged."""
    if not is_floating(value) or not unit or not value.numel():
        return value
    if value.is_complex():
        parts = (
            perturbed(part, unit, generator) for part in torch.unbind(torch.view_as_real(value.resolve_conj()), -1)
        )
        return torch.complex(*parts)
    noise = torch.empty(value.shape, dtype=torch.float32).uniform_(-unit, unit, generator=generator).to(value.device)
    changed = value + value * noise
    return changed if bool(value.isfinite().all()) else torch.where(value.isfinite(), changed, value)
