"""Runs a function in PyTorch again, with gradients: in eager, in float64, and with random rounding at each operator.

::

    recording = Recording()
    are_leaves = [True] * len(arguments)
    eager = FunctionRun(function, copies(arguments), are_leaves, state, recording)
    float64 = FunctionRun(function, copies(arguments, wide=True), are_leaves, state, Rerun(recording))

Dispatch modes see every ATen operator that reaches a kernel, in forward and backward. ``Recording`` is active in the
eager run and stores what float64 must not decide: booleans, indices and integers that are computed from
floating-point values, random numbers, bit casts. ``Rerun`` widens dtype arguments and results in the default dtype,
and uses the stored results, call by call of the same operator: a comparison that flips would look like an error.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard, cast

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from passes.engine.fx.editing import UNINITIALIZED, is_view, written_by

from ..common.random_state import RandomState, unchanged_random_state
from ..graphs.operators import is_collective
from . import operator_facts as facts
from .arrays import format_of
from .exact import (
    BIT_CASTS,
    WIDER,
    OperatorError,
    call_wide,
    called,
    floats,
    is_decision,
    is_floating,
    keep_discrete,
    widen,
    widened,
    wider_dtype,
)
from .randomness import CALL_A_RANDOM_OPERATOR, PrivateRandomness, draws_numbers, perturbed
from .verdicts import verdict

aten = torch.ops.aten


class NotRepeatableError(RuntimeError):
    """A function has effects that must happen once, so it cannot be run again for a comparison."""


class UnstableError(NotRepeatableError):
    """A function can be run again, and does not return the same.

    Args:
        operators: those of its operators that return other numbers each time, if they are known.
    """

    def __init__(self, operators: Iterable[str] = ()) -> None:
        names = ", ".join(operators)
        super().__init__("it is not the same in each run" + (f": other numbers from {names}" if names else ""))


class FunctionRun:
    """One run of a function, and its backward. Other dispatch modes are disabled.

    Args:
        function: called once with the arguments.
        leaves: copies of the arguments; autograd's leaves.
        are_leaves: for each argument, whether the function gets the leaf itself; if not, it may change it in place.
        state: of the random numbers, at the start of the forward and of the backward.
        mode: sees the operators of the function.
        is_elsewhere: whether the function runs on another runtime, where no dispatch mode can be active.

    Attributes:
        leaves: as given.
        arguments: what the function got, after the run.
        are_written: for each argument, whether PyTorch counted a write.
        returned: what the function returned.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        leaves: Sequence[object],
        are_leaves: Sequence[bool],
        state: RandomState,
        mode: TorchDispatchMode | None = None,
        *,
        is_elsewhere: bool = False,
    ) -> None:
        self.leaves = leaves
        self._state, self._mode, self._is_elsewhere = state, mode, is_elsewhere
        with torch.enable_grad():
            self.arguments = [
                passed(leaf) if requires_grad(leaf) and not is_leaf else leaf
                for leaf, is_leaf in zip(leaves, are_leaves, strict=True)
            ]
        versions = list(map(version_of, self.arguments))
        with self._context():
            self.returned = function(*self.arguments)
        self.are_written = [
            version_of(value) != version for value, version in zip(self.arguments, versions, strict=True)
        ]

    @contextlib.contextmanager
    def _context(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(_disable_current_modes())
            if self._is_elsewhere:
                stack.enter_context(unchanged_random_state())
                self._state.restore()
            else:
                stack.enter_context(PrivateRandomness(self._state))
            if self._mode is not None:
                stack.enter_context(self._mode)
            yield

    def gradients(
        self,
        outputs: Sequence[torch.Tensor],
        tangents: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
    ) -> Sequence[torch.Tensor | None]:
        """The gradients of the leaves ``inputs``, ``None`` where there is none.

        ``tangents`` are the gradients of the results ``outputs``, in any dtype.
        """
        with self._context():
            given = [tangent.detach().to(output, copy=True) for output, tangent in zip(outputs, tangents, strict=True)]
            return torch.autograd.grad(outputs, inputs, given, allow_unused=True)


def storage_of(value: torch.Tensor) -> int:
    """Identifies the memory of a tensor; a tensor without one storage identifies itself."""
    return value.untyped_storage()._cdata if is_strided(value) else id(value)


def memory_of(value: torch.Tensor) -> torch.Tensor:
    """The whole memory of a strided tensor, as one dimension."""
    storage = value.untyped_storage()
    with _disable_current_modes():
        return value.new_empty(0).set_(storage, 0, (storage.nbytes() // value.element_size(),), (1,)).detach()


class _Passed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, leaf: torch.Tensor) -> torch.Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def passed(leaf: torch.Tensor) -> torch.Tensor:
    """A result in the same memory as a leaf of autograd, which may be changed in place."""
    result: torch.Tensor = _Passed.apply(leaf)
    return result


class CopiedMemory:
    """Copies of memory: of tensors that share it, the copies share it too.

    Args:
        wide: whether the copies are in float64.
    """

    def __init__(self, *, wide: bool = False) -> None:
        self._wide = wide
        self._copies: dict[object, torch.Tensor] = {}

    def copy(self, value: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor, without gradients. The same memory is copied once, so it must live on until then."""
        dtype = WIDER.get(value.dtype, value.dtype) if self._wide else value.dtype
        source = value.detach()
        if not is_strided(value) or value.is_conj() or value.is_neg() or value._is_zerotensor():
            return source.clone().resolve_conj().resolve_neg().to(dtype)
        key = storage_of(value), value.dtype
        if key not in self._copies:
            self._copies[key] = memory_of(source).to(dtype, copy=True)
        storage = self._copies[key].untyped_storage()
        return self._copies[key].new_empty(0).set_(storage, value.storage_offset(), value.size(), value.stride())

    def forget(self, storages: Collection[int]) -> None:
        """The next copies are others than those in these storages."""
        self._copies = {key: copy for key, copy in self._copies.items() if storage_of(copy) not in storages}


def copies(values: Sequence[object], *, wide: bool = False) -> list[object]:
    """Copies of tensors, in float64 with ``wide``, that share memory where the originals do; other values unchanged."""
    memory = CopiedMemory(wide=wide)
    with torch.no_grad():
        return [
            memory.copy(value).requires_grad_(requires_grad(value)) if isinstance(value, torch.Tensor) else value
            for value in values
        ]


def is_strided(value: object) -> TypeGuard[torch.Tensor]:
    """Whether a value is a strided tensor, and not of a subclass."""
    return type(value) in (torch.Tensor, torch.nn.Parameter) and cast(torch.Tensor, value).layout is torch.strided


def requires_grad(value: object) -> TypeGuard[torch.Tensor]:
    """Whether a value is a tensor that requires gradients."""
    return isinstance(value, torch.Tensor) and value.requires_grad


def version_of(value: object) -> int:
    """How often a tensor was changed in place; 0 in inference mode, where PyTorch does not count."""
    return value._version if isinstance(value, torch.Tensor) and not value.is_inference() else 0


@dataclasses.dataclass(frozen=True)
class _Stored:
    """What a call of an operator gave that another run must not decide: its result, the arguments that it wrote."""

    result: Any
    written: Mapping[str, Any]


def _cloned(values: object) -> Any:
    return pytree.tree_map(lambda value: value.detach().clone() if isinstance(value, torch.Tensor) else value, values)


@dataclasses.dataclass(frozen=True)
class _Call:
    """A call of an operator that computes new values, in the recorded run."""

    dtypes: Sequence[torch.dtype]  # of its floating-point arguments, in order
    compares: bool  # whether its results are discrete, or that is not known


class Recording(TorchDispatchMode):
    """Stores, operator by operator and call by call, what another run must not decide, and counts random draws.

    Args:
        raises: whether an operator that cannot run again is an error; if not, the reason is stored in ``failure``.

    Attributes:
        stored, calls: by operator.
        draws: how many operators have drawn random numbers.
        reads_memory: whether the run has uninitialized memory.
        terms: the most terms that an operator added up.
        failure: why the run cannot be repeated, or ``""``.
    """

    supports_higher_order_operators = True

    def __init__(self, *, raises: bool = True) -> None:
        super().__init__()
        self.stored: dict[object, list[_Stored]] = collections.defaultdict(list)
        self.calls: dict[object, list[_Call]] = collections.defaultdict(list)
        self.draws = 0
        self.reads_memory = False
        self.terms = 1
        self.failure = ""
        self._raises = raises

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        kwargs = kwargs or {}
        if is_collective(func):
            self.failure = f"{func} runs once in all processes, and cannot run again for a comparison"
            if self._raises:
                raise NotRepeatableError(self.failure)
        if isinstance(func, torch._ops.HigherOrderOperator):
            return _with_subgraphs_in(self, func, args, kwargs)
        result = func(*args, **kwargs)
        self.reads_memory |= func in UNINITIALIZED
        if _computes(func):
            self.calls[func].append(_Call([leaf.dtype for leaf in floats((args, kwargs))], not floats(result)))
            self.terms = max(self.terms, facts.terms_of(func, args, result))
        self.draws += draws_numbers(func, args, kwargs)
        if _is_stored(func, args, kwargs, result):
            self.stored[func].append(_Stored(_cloned(result), _cloned(written_by(func, args, kwargs))))
        return result


def _computes(target: object) -> bool:
    """Whether an ATen operator computes new values: it writes into no argument and returns no view."""
    return isinstance(target, torch._ops.OpOverload) and not target._schema.is_mutable and not is_view(target)


def _is_stored(func: object, args: Sequence[object], kwargs: Mapping[str, object], result: object) -> bool:
    """Whether a result is random, or discrete and computed from floating-point values."""
    if draws_numbers(func, args, kwargs) or func in BIT_CASTS:
        return True
    if not isinstance(func, torch._ops.OpOverload) or func._schema.is_mutable:
        return False
    return any(map(is_decision, pytree.tree_leaves(result))) and bool(floats((args, kwargs)))


class _Subgraph(torch.nn.Module):
    """A subgraph of a higher-order operator, which runs in a mode."""

    def __init__(self, mode: TorchDispatchMode, module: fx.GraphModule) -> None:
        super().__init__()
        self._mode, self._module = mode, module

    def forward(self, *args: object) -> object:
        with self._mode:
            return self._module(*args)


def _with_subgraphs_in(mode: TorchDispatchMode, func: Any, args: Any, kwargs: Any) -> object:
    def inside(value: object) -> object:
        return _Subgraph(mode, value) if isinstance(value, fx.GraphModule) else value

    return func(*map(inside, args), **kwargs)


class Rerun(TorchDispatchMode):
    """Runs again: in float64, and perturbed.

    With the random numbers of a recorded run, if there is one, and its decisions; a perturbed run decides comparisons
    and indices itself. Without, random numbers are drawn in float32. In a perturbed run, the floating-point arguments
    of each operator are off by a rounding of the dtype that they had in the recorded run, and so are numbers inside of
    functions. Uninitialized memory is zero; in a perturbed run it is NaN, and so is what depends on it.

    Args:
        recording: of the eager run.
        seed: of a perturbed run.
        is_wide: whether float64 runs; if not, dtypes are as recorded.
        coarser: the dtype to which float32 may be rounded.
        otherwise: the dtype of operators that were not recorded.
        is_repeated: whether each operator runs twice, to find those that do not return the same.

    Attributes:
        inexact: operators whose result is eager's or that of a lower precision, with the reason.
        reads_memory: whether it has uninitialized memory.
        unstable: with ``is_repeated``, operators that return other numbers each time.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        recording: Recording | None = None,
        seed: int | None = None,
        *,
        is_wide: bool = True,
        coarser: torch.dtype = torch.float32,
        otherwise: torch.dtype = torch.float32,
        is_repeated: bool = False,
    ) -> None:
        super().__init__()
        self._otherwise, self._is_repeated = otherwise, is_repeated
        self.unstable: dict[str, None] = {}
        self.reads_memory = False
        self.inexact: dict[str, str] = {}
        self._recording = Recording() if recording is None else recording
        self._generator = None if seed is None else torch.Generator().manual_seed(seed)
        self._is_recorded, self._decides = recording is not None, seed is not None or recording is None
        self.is_wide, self._coarser = is_wide, coarser
        self._position: collections.Counter[object] = collections.Counter()
        self._calls: collections.Counter[object] = collections.Counter()

    @property
    def terms(self) -> int:
        """The most terms that an operator added up."""
        return self._recording.terms

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        kwargs = kwargs or {}
        if is_collective(func):
            raise NotRepeatableError(f"{func} communicates with other processes, and is not run again")
        if isinstance(func, torch._ops.HigherOrderOperator):
            if func.name() in CALL_A_RANDOM_OPERATOR and self.is_wide:
                args = pytree.tree_map(narrowed, args)
            return self._widened(_with_subgraphs_in(self, func, args, kwargs))
        if self.is_wide:
            args, kwargs = pytree.tree_map(wider_dtype, (args, kwargs))
        if draws_numbers(func, args, kwargs):
            return self._drawn(func, args, kwargs)
        if func in UNINITIALIZED:
            self.reads_memory = True
            return facts.filled(self._widened(called(func, args, kwargs)), 0.0 if self._generator is None else math.nan)
        if func in BIT_CASTS and not self._is_recorded and self.is_wide and floats(args):
            raise NotRepeatableError(f"{func} reads the bits of a number, which float64 does not have")
        copied = _cloned((args, kwargs)) if self._is_repeated else None
        result = self._compute(func, args, kwargs)
        if copied is not None:
            self._repeat(func, copied, (result, args, kwargs))
        if not (func in BIT_CASTS if self._decides else _is_stored(func, args, kwargs, result)):
            return result
        stored = self._next(func)
        if stored is None:
            return result
        if func in BIT_CASTS:
            return self._widened(stored.result)
        return pytree.tree_map(keep_discrete, result, stored.result)

    def _widened(self, values: Any) -> Any:
        return widened(values) if self.is_wide else values

    def _next(self, func: object) -> _Stored | None:
        """What the eager run stored for the same call of the operator; a copy, since the run may write into it."""
        stored, position = self._recording.stored[func], self._position[func]
        self._position[func] += 1
        if position < len(stored):
            return dataclasses.replace(stored[position], result=_cloned(stored[position].result))
        if self._is_recorded:
            self.inexact[str(func)] = "float64 calls it more often than eager"
        return None

    def _drawn(self, func: Any, args: Any, kwargs: Any) -> object:
        """The result of a random operator, with eager's random numbers, or new ones of float32."""
        stored = self._next(func)
        written = written_by(func, args, kwargs)
        if stored is None and self.is_wide:
            narrow_args, narrow_kwargs = pytree.tree_map(narrowed, pytree.tree_map(_single_dtype, (args, kwargs)))
            stored = _Stored(called(func, narrow_args, narrow_kwargs), written_by(func, narrow_args, narrow_kwargs))
        if stored is None:
            return called(func, args, kwargs)
        if func is aten.native_dropout.default:
            (_, probability, is_training), mask = args, stored.result[1]
            scale = 1.0 if is_training is False else 0.0 if probability == 1 else 1 / (1 - probability)
            return self._widened(args[0]) * mask * scale, mask
        for name, value in written.items():
            with torch.no_grad():
                value.copy_(stored.written[name])
        returned = func._schema.returns
        if len(returned) == 1 and returned[0].alias_info is not None and returned[0].alias_info.is_write:
            return next(iter(written.values()))
        return self._widened(stored.result)

    def _compute(self, func: Any, args: Any, kwargs: Any) -> object:
        if not _computes(func):
            return called(func, args, kwargs)
        call = self._recorded_call(func)
        if self.is_wide:
            args, kwargs = pytree.tree_map(widen, (args, kwargs))
        if self._generator is not None:
            args, kwargs = self._perturbed_arguments(args, kwargs, call)
        if not self.is_wide:
            return called(func, args, kwargs)
        try:
            result = call_wide(func, args, kwargs)
        except OperatorError as error:
            result = called(func, *pytree.tree_map(narrowed, (args, kwargs)))
            if floats(result):  # other results are eager's in any case
                self.inexact[str(func)] = f"no float64: {error}"
            return pytree.tree_map(self._off_by_float32, widened(result))
        self._recording.terms = max(self._recording.terms, facts.terms_of(func, args, result))
        return result if self._generator is None else self._rounded_inside(func, args, kwargs, call, result)

    def _repeat(self, func: object, copied: Any, first: object) -> None:
        """Runs an operator again on copies of its arguments, which it may write."""
        leaves = map(pytree.tree_leaves, ((self._compute(func, *copied), *copied), first))
        pairs = ((ours, theirs) for ours, theirs in zip(*leaves, strict=True) if isinstance(theirs, torch.Tensor))
        if any(verdict(ours, theirs, torch.float32).is_wrong for ours, theirs in pairs):
            self.unstable[str(func)] = None

    def _recorded_call(self, func: object) -> _Call:
        """What was recorded of the next call of an operator. Some have no float64, and run as several: these compute in
        float32."""
        calls, position = self._recording.calls.get(func), self._calls[func]
        self._calls[func] += 1
        return calls[min(position, len(calls) - 1)] if calls else _Call([], True)

    def _perturbed_arguments(self, args: Any, kwargs: Any, call: _Call) -> Any:
        """Arguments whose floating-point values are off by a rounding; those in one memory, as ``x`` and ``x[:, None]``
        are, in the same way."""
        dtypes = collections.deque(call.dtypes)
        readers = collections.Counter(storage_of(leaf) for leaf in floats((args, kwargs)))
        memories: dict[object, torch.Tensor] = {}

        def one(value: object) -> object:
            if not is_floating(value):
                return value
            dtype = dtypes.popleft() if dtypes else self._otherwise if self.is_wide else value.dtype
            if not is_strided(value) or not value.numel():
                return value
            if readers[storage_of(value)] == 1 or value.is_conj() or value.is_neg():
                return self._perturbed(value, dtype, call.compares)
            key = storage_of(value), value.dtype
            if key not in memories:
                memories[key] = self._perturbed(memory_of(value), dtype, call.compares)
            return memories[key].as_strided(value.size(), value.stride(), value.storage_offset())

        return pytree.tree_map(one, (args, kwargs))

    def _perturbed(self, value: torch.Tensor, dtype: torch.dtype, compares: bool) -> torch.Tensor:
        """A value off by a rounding of a dtype. Whole numbers that are compared are exact: masks, indices; and those of
        a model without float64, which are integers of a quantization."""
        unit = format_of(self._coarser if dtype is torch.float32 else dtype).epsilon
        assert self._generator is not None
        wide = widen(value)
        changed = perturbed(wide, unit, self._generator)
        if (compares or not self.is_wide) and not value.is_complex():
            changed = torch.where(wide == wide.round(), wide, changed)
        return changed.to(value.dtype)

    def _off_by_float32(self, value: Any) -> Any:
        if self._generator is None or not is_floating(value):
            return value
        return perturbed(value, format_of(torch.float32).epsilon, self._generator)

    def _rounded_inside(self, func: Any, args: Any, kwargs: Any, call: _Call, result: Any) -> Any:
        """A result off by what the function rounds inside, see ``operator_facts``."""
        unit = max(format_of(dtype).computed for dtype in call.dtypes or [self._otherwise])
        if facts.subtracts_a_mean(func) and isinstance(result, tuple):
            return type(result)(
                (self._shifted(result[0], unit, facts.size_of_scaled_gradient(func, args)), *result[1:])
            )
        if facts.subtracts_a_mean(func):
            return self._shifted(result, unit)
        size = facts.size_inside(func, args, kwargs) if is_floating(result) and not result.is_complex() else None
        if size is None or size.shape != result.shape:
            return result
        assert self._generator is not None
        return result + perturbed(size, unit, self._generator).sub_(size)

    def _shifted(self, value: Any, unit: float, least: float = 0.0) -> Any:
        """A tensor whose elements are all off by one rounding of a mean, which is at least ``least``."""
        if not is_floating(value) or not value.numel():
            return value
        side = float(torch.empty(()).uniform_(-unit, unit, generator=self._generator))
        return value + side * value.abs().nan_to_num(0.0, 0.0, 0.0).mean().clamp(min=least)


def narrowed(value: object) -> object:
    """A tensor in float64 as float32; anything else unchanged."""
    return value.float() if isinstance(value, torch.Tensor) and value.dtype is torch.float64 else value


def _single_dtype(value: object) -> object:
    return torch.float32 if value in (torch.float16, torch.bfloat16, torch.float64) else value
