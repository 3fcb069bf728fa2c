"""Random numbers of runs that are made for a comparison: drawn from a private state, and used to imitate rounding.

PyTorch has one generator for the CPU. A comparison that set it would let other threads draw the same numbers twice, so
operators receive another generator. The few that accept none run under a lock, with the process's generator set before
and restored afterwards.

``perturbed`` and ``perturbed_near_one`` are the random rounding with which all modules find out how sensitive a
computation is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from passes.engine.fx.editing import is_view
from passes.engine.locks import Lock

aten = torch.ops.aten

_process_generator = Lock()


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
    """Draws random numbers of the CPU from a private state. The process's generator is neither read nor changed.

    Args:
        state: as returned by ``torch.get_rng_state``.

    Attributes:
        draws: how many operators have drawn numbers.
    """

    supports_higher_order_operators = True

    def __init__(self, state: torch.Tensor) -> None:
        super().__init__()
        self._generator = torch.Generator()
        self._generator.set_state(state)
        self.draws = 0

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.HigherOrderOperator):  # its subgraph may draw, or read the state
            return self._with_process_generator(func, args, kwargs)
        if not draws_numbers(func, args, kwargs) or kwargs.get("generator") is not None or not _is_on_cpu(args, kwargs):
            return func(*args, **kwargs)
        self.draws += 1
        if func is aten.native_dropout.default and args[0].dtype in (torch.float32, torch.float64):
            return self._dropout(*args, **kwargs)
        overload = _with_generator(func)
        if overload is None:
            return self._with_process_generator(func, args, kwargs)
        return overload(*args, **{**kwargs, "generator": self._generator})

    def _dropout(self, input: torch.Tensor, p: float, train: bool | None) -> object:
        """As ``native_dropout_cpu`` of ``aten/src/ATen/native/Dropout.cpp``, which takes no generator."""
        if train is False or input.numel() == 0:
            return aten.native_dropout.default(input, p, train)
        mask = torch.empty_like(input, dtype=torch.bool).bernoulli_(1 - p, generator=self._generator)
        return input.mul(mask).mul_(0.0 if p == 1 else 1 / (1 - p)), mask

    def _with_process_generator(self, func: Any, args: Any, kwargs: Any) -> object:
        with _process_generator, torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self._generator.get_state())
            result = func(*args, **kwargs)
            self._generator.set_state(torch.get_rng_state())
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


def _is_on_cpu(args: object, kwargs: dict[str, Any]) -> bool:
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    device = kwargs.get("device") or (tensors[0].device if tensors else "cpu")
    return torch.device(device).type == "cpu"


PERTURBATIONS = 4
"""Runs with random rounding: in a single one, the perturbation of an element may be nearly 0."""

MOST_PERTURBATIONS = 16
"""The limit where these do not explain an error, such as that of a comparison near a tie."""

CHECK_AFTER = (1, 2, PERTURBATIONS, 6, 8, 12, MOST_PERTURBATIONS)
"""Numbers of runs after which it is checked whether they explain the errors; more runs explain more."""


def computes(target: object) -> bool:
    """Whether an ATen operator computes new values: it writes into no argument and returns no view."""
    return isinstance(target, torch._ops.OpOverload) and not target._schema.is_mutable and not is_view(target)


_CHUNK = 2**16
"""Elements perturbed at a time, to fit into a processor's cache."""


def _noise(size: torch.Tensor, unit: float, generator: torch.Generator) -> torch.Tensor:
    """Uniform random numbers of up to ``unit`` times each size, in 256 steps, which are drawn eight at once."""
    drawn = torch.empty((size.numel() + 7) // 8, dtype=torch.int64).random_(-(2**63), None, generator=generator)
    steps = drawn.view(torch.int8)[: size.numel()].view(size.shape)
    return size * steps.to(size.device, torch.float64).mul_(unit / 128)


def perturbed(
    value: Any,
    generator: torch.Generator,
    *,
    dtype: torch.dtype | None = None,
    units: float = 1.0,
    whole_stay: bool = False,
    zeros_stay: bool = False,
) -> Any:
    """A floating-point tensor in float64, each element changed by up to some units in its last place; others unchanged.

    Zeros and infinities stay, except in float16: ONNX Runtime computes it in float32, where they may be numbers that
    are too small or too large for float16. They are replaced by such.

    Args:
        value: anything.
        generator: of the random numbers.
        dtype: whose unit; by default the tensor's.
        units: how many.
        whole_stay: whether all whole numbers stay. Where values are compared, those are exact: masks, indices.
        zeros_stay: whether zeros of float16 stay.
    """
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    info, wide = torch.finfo(dtype or value.dtype), value.detach().to(torch.float64, copy=True)
    if value.dtype is torch.float16:
        wide = torch.where(wide.isinf(), wide.sign() * 2 * torch.finfo(value.dtype).max, wide)
        if not zeros_stay:
            wide = torch.where(wide == 0, torch.finfo(value.dtype).smallest_normal * 2**-11, wide)
    for part in wide.as_strided((wide.numel(),), (1,)).split(_CHUNK):  # a copy has no gaps
        size = part.abs().clamp_(min=info.smallest_normal)  # subnormal numbers have the same spacing
        stays = part.isfinite().logical_not_().logical_or_(part == (part.round() if whole_stay else 0.0))
        part += _noise(size, units * info.eps, generator).masked_fill_(stays, 0.0)
    return wide


NEAR_ONE = frozenset(
    {"erf", "sigmoid", "silu", "gelu", "elu", "celu", "selu", "mish", "hardswish", "hardsigmoid", "log_sigmoid_forward"}
)
"""Functions that kernels compute from numbers near one, such as ``exp(x) - 1``, or multiples of such numbers."""

_GRADIENTS_NEAR_ONE = frozenset({f"{name}_backward" for name in (*NEAR_ONE, "tanh", "log_sigmoid", "softplus")})


def size_near_one(name: str, args: Sequence[object]) -> torch.Tensor | None:
    """The magnitude of numbers near one, or of their multiples, inside an operator; ``None`` if it has none.

    ``name`` is without the overload.
    """
    floats = [item for item in args if isinstance(item, torch.Tensor) and item.is_floating_point()]
    if name in NEAR_ONE and floats:
        return floats[0].abs().clamp(min=1.0)
    if name in _GRADIENTS_NEAR_ONE and len(floats) > 1:
        return floats[0].abs() * floats[1].abs().clamp(min=1.0)
    return None


def perturbed_near_one(
    name: str, result: torch.Tensor, args: Sequence[object], dtype: torch.dtype, generator: torch.Generator
) -> torch.Tensor:
    """The float64 result of an operator, changed by the error of a unit in the last place of one inside of it.

    Unchanged if there are no numbers near one. Half precision is computed in float32, so units are at most float32's.
    """
    size = size_near_one(name, args)
    unit = min(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    return result if size is None else result + _noise(size.expand(result.shape), unit, generator)
