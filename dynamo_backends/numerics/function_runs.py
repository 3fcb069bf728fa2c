"""Runs a function in PyTorch again, with gradients: in eager, in float64, and with random rounding at each operator.

::

    recording = Recording()
    eager = FunctionRun(function, copies(arguments), state, recording)
    exact = FunctionRun(function, copies(arguments, wide=True), state, Rerun(recording))

Dispatch modes see every ATen operator that reaches a kernel, in forward and backward. ``Recording`` is active in the
eager run and stores what float64 must not decide: booleans, indices and integers that are computed from
floating-point values, random numbers, bit casts. ``Rerun`` widens dtype arguments and results in the default dtype,
and uses the stored results, call by call of the same operator: a comparison that flips would look like an error.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeGuard, cast

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from passes.engine.fx.editing import is_view, written_by

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
from .randomness import PrivateRandomness, draws_numbers, perturbed

aten = torch.ops.aten

Context: TypeAlias = "Callable[[], contextlib.AbstractContextManager[object]]"


class NotRepeatableError(RuntimeError):
    """A function has effects that must happen once, so it cannot be run again for a comparison."""


class FunctionRun:
    """One run of a function, and its backward. Other dispatch modes are disabled.

    Args:
        function: called once with the arguments.
        leaves: copies of the arguments; autograd's leaves.
        are_leaves: for each argument, whether the function gets the leaf itself; see ``as_given``.
        state: of the CPU's random numbers, at the start of the forward and of the backward.
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
        state: torch.Tensor,
        mode: TorchDispatchMode | None = None,
        *,
        is_elsewhere: bool = False,
    ) -> None:
        self.leaves = leaves
        self._state, self._mode, self._is_elsewhere = state, mode, is_elsewhere
        with torch.enable_grad():
            self.arguments = list(map(as_given, leaves, are_leaves))
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
                stack.enter_context(torch.random.fork_rng(devices=[]))
                torch.set_rng_state(self._state)
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
        timer: Context = contextlib.nullcontext,
    ) -> Sequence[torch.Tensor | None]:
        """The gradients of the leaves ``inputs``, ``None`` where there is none; ``timer`` is for autograd alone.

        ``tangents`` are the gradients of the results ``outputs``, in any dtype.
        """
        with self._context():
            given = [tangent.detach().to(output, copy=True) for output, tangent in zip(outputs, tangents, strict=True)]
            with timer():
                return torch.autograd.grad(outputs, inputs, given, allow_unused=True)


def as_given(leaf: object, is_leaf: bool) -> object:
    """What a function gets for a leaf: if the user's tensor was not a leaf, a result, which may be changed in place."""
    return leaf.clone() if requires_grad(leaf) and not is_leaf else leaf


def copies(values: Sequence[object], *, wide: bool = False) -> list[object]:
    """Copies of tensors, in float64 with ``wide``, that share memory where the originals do; other values unchanged."""
    storages: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def copy(value: torch.Tensor) -> torch.Tensor:
        dtype = WIDER.get(value.dtype, value.dtype) if wide else value.dtype
        if not is_strided(value):
            return value.clone().to(dtype)
        storage = value.untyped_storage()
        key = storage._cdata, value.dtype
        if key not in storages:
            elements = storage.nbytes() // value.element_size()
            storages[key] = value.new_empty(0).set_(storage, 0, (elements,), (1,)).to(dtype, copy=True)
        return storages[key].as_strided(value.size(), value.stride(), value.storage_offset()).detach()

    with torch.no_grad():
        sources = list(map(_source, values))  # all are alive at once: their storages are compared by address
        return [
            copy(source).requires_grad_(requires_grad(value)) if isinstance(source, torch.Tensor) else value
            for value, source in zip(values, sources, strict=True)
        ]


def _source(value: object) -> object:
    """A detached tensor whose memory holds its values: no conjugate or negative bit, no zero tensor without memory."""
    if not isinstance(value, torch.Tensor):
        return value
    source = value.detach()
    if is_strided(source):
        source = source.resolve_conj().resolve_neg()
    return source.clone() if source._is_zerotensor() else source


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
    compares: bool  # whether its results are discrete


class Recording(TorchDispatchMode):
    """Stores, operator by operator and call by call, what another run must not decide, and counts random draws.

    Args:
        raises: whether an operator that cannot run again is an error; if not, the reason is stored in ``failure``.

    Attributes:
        stored, calls: by operator.
        draws: how many operators have drawn random numbers.
        terms: the most terms that an operator added up.
        failure: why the run cannot be repeated, or ``""``.
    """

    supports_higher_order_operators = True

    def __init__(self, *, raises: bool = True) -> None:
        super().__init__()
        self.stored: dict[object, list[_Stored]] = collections.defaultdict(list)
        self.calls: dict[object, list[_Call]] = collections.defaultdict(list)
        self.draws = 0
        self.terms = 1
        self.failure = ""
        self._raises = raises

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        kwargs = kwargs or {}
        if is_collective(func):
            self.failure = f"{func} runs once in all processes, and cannot run again for a comparison"
            if self._raises:
                raise NotRepeatableError(self.failure)
        result = func(*args, **kwargs)
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


class Rerun(TorchDispatchMode):
    """Runs again with the random numbers of a recorded run: in float64, and with its decisions; or perturbed.

    A perturbed run decides comparisons and indices itself. The floating-point arguments of each operator are off by a
    rounding of the dtype that they had in the recorded run, and so are numbers inside of functions.

    Args:
        recording: of the eager run.
        seed: of a perturbed run.
        is_wide: whether float64 runs; if not, dtypes are as recorded.
        coarser: the dtype to which float32 may be rounded.
        otherwise: the dtype of operators that were not recorded.

    Attributes:
        inexact: operators whose result is eager's or that of a lower precision, with the reason.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        recording: Recording,
        seed: int | None = None,
        *,
        is_wide: bool = True,
        coarser: torch.dtype = torch.float32,
        otherwise: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self._otherwise = otherwise
        self.inexact: dict[str, str] = {}
        self._recording = recording
        self._generator = None if seed is None else torch.Generator().manual_seed(seed)
        self._decides = seed is not None
        self._is_wide, self._coarser = is_wide, coarser
        self._position: collections.Counter[object] = collections.Counter()
        self._calls: collections.Counter[object] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        kwargs = kwargs or {}
        if self._is_wide:
            args, kwargs = pytree.tree_map(wider_dtype, (args, kwargs))
        if draws_numbers(func, args, kwargs):
            return self._drawn(func, args, kwargs)
        result = self._compute(func, args, kwargs)
        if not (func in BIT_CASTS if self._decides else _is_stored(func, args, kwargs, result)):
            return result
        stored = self._next(func)
        if stored is None:
            return result
        if func in BIT_CASTS:
            return self._widened(stored.result)
        return pytree.tree_map(keep_discrete, result, stored.result)

    def _widened(self, values: Any) -> Any:
        return widened(values) if self._is_wide else values

    def _next(self, func: object) -> _Stored | None:
        """What the eager run stored for the same call of the operator; a copy, since the run may write into it."""
        stored, position = self._recording.stored[func], self._position[func]
        self._position[func] += 1
        if position < len(stored):
            return dataclasses.replace(stored[position], result=_cloned(stored[position].result))
        self.inexact[str(func)] = "float64 calls it more often than eager"
        return None

    def _drawn(self, func: Any, args: Any, kwargs: Any) -> object:
        """The result of a random operator, with eager's random numbers."""
        stored = self._next(func)
        if stored is None:
            return called(func, args, kwargs)
        if func is aten.native_dropout.default:
            probability, mask = args[1], stored.result[1]
            scale = 0.0 if probability == 1 else 1 / (1 - probability)
            return self._widened(args[0]) * mask * scale, mask
        written = written_by(func, args, kwargs)
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
        if self._is_wide:
            args, kwargs = pytree.tree_map(widen, (args, kwargs))
        if self._generator is not None:
            dtypes = collections.deque(call.dtypes)
            args, kwargs = pytree.tree_map(lambda item: self._perturbed(item, dtypes, call.compares), (args, kwargs))
        if not self._is_wide:
            return called(func, args, kwargs)
        try:
            result = call_wide(func, args, kwargs)
        except OperatorError as error:
            result = called(func, *pytree.tree_map(_narrowed, (args, kwargs)))
            if floats(result):  # other results are eager's in any case
                self.inexact[str(func)] = f"no float64: {error}"
            return widened(result)
        self._recording.terms = max(self._recording.terms, facts.terms_of(func, args, result))
        return result if self._generator is None else self._rounded_inside(func, args, kwargs, call, result)

    def _recorded_call(self, func: object) -> _Call:
        """What was recorded of the next call of an operator. Some have no float64, and run as several: these compute in
        float32."""
        calls, position = self._recording.calls.get(func), self._calls[func]
        self._calls[func] += 1
        return calls[min(position, len(calls) - 1)] if calls else _Call([], False)

    def _perturbed(self, value: object, dtypes: collections.deque[torch.dtype], compares: bool) -> object:
        """A floating-point value off by a rounding. Whole numbers that are compared are exact: masks, indices; and
        those of a model without float64, which are integers of a quantization."""
        if not is_floating(value):
            return value
        dtype = dtypes.popleft() if dtypes else self._otherwise if self._is_wide else value.dtype
        if not is_strided(value) or not value.numel():
            return value
        unit = format_of(self._coarser if dtype is torch.float32 else dtype).epsilon
        assert self._generator is not None
        wide = widen(value)
        changed = perturbed(wide, unit, self._generator)
        if (compares or not self._is_wide) and not value.is_complex():
            changed = torch.where(wide == wide.round(), wide, changed)
        return changed.to(value.dtype)

    def _rounded_inside(self, func: Any, args: Any, kwargs: Any, call: _Call, result: Any) -> Any:
        """A result off by what the function rounds inside, see ``operator_facts``."""
        unit = max(format_of(dtype).computed for dtype in call.dtypes or [self._otherwise])
        if facts.subtracts_a_mean(func) and isinstance(result, tuple):
            return type(result)((self._shifted(result[0], unit), *result[1:]))
        if facts.subtracts_a_mean(func):
            return self._shifted(result, unit)
        size = facts.size_inside(func, args, kwargs) if is_floating(result) and not result.is_complex() else None
        if size is None or size.shape != result.shape:
            return result
        assert self._generator is not None
        return result + perturbed(size, unit, self._generator).sub_(size)

    def _shifted(self, value: Any, unit: float) -> Any:
        """A tensor whose elements are all off by one rounding of a mean."""
        if not is_floating(value) or not value.numel():
            return value
        side = float(torch.empty(()).uniform_(-unit, unit, generator=self._generator))
        return value + side * value.abs().nan_to_num(0.0, 0.0, 0.0).mean()


def _narrowed(value: object) -> object:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype is torch.float64 else value
