"""Runs a program twice in PyTorch, gradients included: as eager does, and in float64.

::

    twice = Twice(module, arguments)
    twice.outputs.eager, twice.outputs.exact
    twice.gradients(tangents)              # of the same two runs, by autograd

Both runs see every ATen operator that reaches a kernel, also those of the backward. The eager run keeps what float64
must not decide by itself: booleans, indices and integers that come of floating-point values, random numbers, bit-casts.
The float64 run takes these instead of its own, call by call of the same operator, or a comparison that flips would read
as an error of the values. It widens dtype arguments, and what is made without one in the default dtype.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeGuard, cast

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ..graphs.operators import is_collective
from .distance import same_elements
from .exact import BIT_CASTS, REFUSALS, WIDER, of_default_dtype, widen, wider_dtype
from .randomness import (
    MOST_PERTURBATIONS,
    PERTURBATIONS,
    PrivateRandomness,
    draws_numbers,
    perturbed,
    perturbed_near_one,
)
from .verdicts import Verdict, epsilon, verdict

aten = torch.ops.aten

Values: TypeAlias = "Mapping[object, object]"


@dataclasses.dataclass(frozen=True)
class Results:
    """What the two runs gave, by key: tensors or numbers.

    Attributes:
        perturbed: what float64 gives with random rounding, see ``Twice``, in so many runs: made when it is asked for.
    """

    eager: Values
    exact: Values
    perturbed: Callable[[int], Sequence[Values]] = lambda times: ()

    def under(self, keys: Mapping[Any, object]) -> Results:
        """Some of the results, by the keys that these are mapped to."""

        def mapped(values: Values) -> Values:
            return {new: values[key] for key, new in keys.items() if key in values}

        return Results(mapped(self.eager), mapped(self.exact), lambda times: list(map(mapped, self.perturbed(times))))

    def verdict(self, actual: object, key: object) -> Verdict:
        """The verdict on another value of a result: by eager's error, and where that does not explain it, by what
        random rounding makes."""
        eager, exact = self.eager.get(key), self.exact.get(key)
        found = verdict(actual, eager, exact)
        if found.is_wrong and found.is_of_size:
            for times in (PERTURBATIONS, MOST_PERTURBATIONS):
                found = verdict(actual, eager, exact, [item.get(key) for item in self.perturbed(times)])
                if not found.is_wrong:
                    break
        return found


class Twice:
    """Two runs of one callable on copies of the same arguments.

    Args:
        function: takes the arguments and returns a sequence of results; called once for each run.
        arguments: tensors and numbers. Copies that share memory where they do are what ``function`` gets; copies of
            tensors that require gradients do so too.
        generator_state: the state of the CPU's random numbers at the start of each run.
        are_leaves: whether each argument is a leaf for autograd; one that is not may be changed in place.

    Attributes:
        outputs: the results, by position; ``("input", j)`` is the j-th argument after the run, where it was changed.
        inexact: operators whose float64 result is eager's or that of a lower precision, with the reason.
    """

    def __init__(
        self,
        function: Callable[..., Sequence[object]],
        arguments: Sequence[object],
        generator_state: torch.Tensor,
        are_leaves: Sequence[bool] | None = None,
    ) -> None:
        self._function, self._given, self._are_leaves = function, arguments, are_leaves or [True] * len(arguments)
        self._recording = Recording()
        self._float64 = Float64(self._recording)
        self._arguments: dict[str, list[object]] = {}
        self._leaves: dict[str, list[object]] = {}
        self._results: dict[str, list[object]] = {}
        self._state = generator_state
        for name, mode in self._modes():
            leaves = copies(arguments, wide=mode is self._float64)
            given = _given(leaves, self._are_leaves)
            with _from_state(self._state), mode:
                self._results[name] = list(function(*given))
            self._arguments[name], self._leaves[name] = given, leaves
        changed = [j for j, value in enumerate(arguments) if _is_changed(value, self._arguments["eager"][j])]
        eager, exact = (self._values_of(name, changed) for name, _ in self._modes())
        self.outputs = Results(eager, exact, self._perturbed_runs(None, (), changed))

    def _perturbed_runs(
        self, tangents: Mapping[object, torch.Tensor] | None, of: Sequence[int], changed: Sequence[int] = ()
    ) -> Callable[[int], list[Values]]:
        """Gives the results, or with ``tangents`` the gradients, where float64 has the rounding of the eager
        run; without what the two runs returned.

        What an operator reads is perturbed by up to a unit in the last place of the coarsest dtype of the eager
        run, and the results of functions like SiLU by what a unit of one makes in them; a few times, each from other
        random numbers. Comparisons and indices are those runs' own; a run that cannot go on with them, as where a shape
        depends on one, is left out.
        """
        arguments, function, are_leaves = self._given, self._function, self._are_leaves
        recording, state = self._recording, self._state

        def run(seed: int) -> Iterator[Values]:
            with contextlib.suppress(*REFUSALS, IndexError):
                yield once(seed)

        def once(seed: int) -> Values:
            leaves = copies(arguments, wide=True)
            given = _given(leaves, are_leaves)
            generator = torch.Generator().manual_seed(seed)
            mode = Float64(recording, decides_itself=True, perturbing=True, generator=generator)
            with _from_state(state), torch.set_grad_enabled(bool(tangents)), mode:
                results = list(function(*given))
                if tangents is not None:
                    return _gradients(results, given, leaves, tangents, of)
                values: dict[object, object] = dict(enumerate(map(_detached, results)))
                return values | {("input", j): _detached(given[j]) for j in changed}

        runs = functools.cache(lambda seed: list(run(seed)))
        return lambda times: [values for seed in range(times) for values in runs(seed)]

    @property
    def inexact(self) -> Mapping[str, str]:
        return self._float64.inexact

    @property
    def draws(self) -> int:
        """How many operators of the eager run drew random numbers."""
        return self._recording.draws

    def gradients(self, tangents: Mapping[object, torch.Tensor], of: Sequence[int]) -> Results:
        """The gradients of some arguments, by autograd; the runs cannot be asked again.

        Args:
            tangents: the gradient of each result that takes part: by its position, by ``("input", j)`` for an argument
                that the function changed, by ``("base", i)`` for the tensor that result i is a view of.
            of: positions of the arguments.

        Returns:
            By the argument's position; ``None`` where it has no gradient.

        Raises:
            NotRepeatableError: the backward draws random numbers. Those of a checkpoint are to be the forward's, and
                PyTorch draws others when it runs a captured checkpoint.
        """
        found: list[dict[object, object]] = []
        draws = self._recording.draws
        for name, mode in self._modes():
            with _from_state(self._state), torch.enable_grad(), mode:
                given = self._results[name], self._arguments[name], self._leaves[name]
                gradients = _gradients(*given, tangents, of)
            if self._recording.draws > draws:
                raise NotRepeatableError("the backward draws random numbers, and there is no telling which")
            found.append(gradients)
        self._results.clear()
        return Results(found[0], found[1], self._perturbed_runs(tangents, of))

    def _modes(self) -> list[tuple[str, TorchDispatchMode]]:
        return [("eager", self._recording), ("exact", self._float64)]

    def _values_of(self, name: str, changed: Sequence[int]) -> dict[object, object]:
        values: dict[object, object] = dict(enumerate(map(_detached, self._results[name])))
        return values | {("input", j): _detached(self._arguments[name][j]) for j in changed}


def eager_values(
    function: Callable[..., Sequence[object]], arguments: Sequence[object], generator_state: torch.Tensor
) -> Values:
    """What ``Twice(...).outputs.eager`` would be, without the run in float64."""
    given = _given(copies(arguments), [True] * len(arguments))
    with _from_state(generator_state):
        values: dict[object, object] = dict(enumerate(map(_detached, function(*given))))
    pairs = enumerate(zip(arguments, given, strict=True))
    return values | {("input", j): _detached(new) for j, (old, new) in pairs if _is_changed(old, new)}


def _gradients(
    results: Sequence[object],
    arguments: Sequence[object],
    leaves: Sequence[object],
    tangents: Mapping[object, torch.Tensor],
    of: Sequence[int],
) -> dict[object, object]:
    """The gradients of some leaves by autograd, see ``Twice.gradients``."""

    def end(key: object) -> torch.Tensor:
        if isinstance(key, int):
            value = results[key]
        else:
            assert isinstance(key, tuple)
            kind, position = key
            value = arguments[position] if kind == "input" else cast(torch.Tensor, results[position])._base
        assert isinstance(value, torch.Tensor)
        return value

    ends = [end(key) for key in tangents]
    grads = [tangent.to(item.dtype) for item, tangent in zip(ends, tangents.values(), strict=True)]
    found = torch.autograd.grad(ends, [cast(torch.Tensor, leaves[j]) for j in of], grads, allow_unused=True)
    return dict(zip(of, found, strict=True))


def _detached(value: object) -> object:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _is_changed(before: object, after: object) -> bool:
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor) or before.is_nested:
        return False  # PyTorch does not compare nested ones
    return before.dtype != after.dtype or not same_elements(before.detach(), after.detach())


def _given(leaves: Sequence[object], are_leaves: Sequence[bool]) -> list[object]:
    with torch.enable_grad():
        return list(map(as_given, leaves, are_leaves))


def as_given(leaf: object, is_leaf: bool) -> object:
    """What the function gets for a leaf; where the user's tensor was none, a result, which may be changed in place."""
    if isinstance(leaf, torch.Tensor) and leaf.requires_grad and not is_leaf:
        return leaf.clone()
    return leaf


def copies(values: Sequence[object], *, wide: bool = False) -> list[object]:
    """Copies of tensors, whose storages are shared as theirs are, with ``wide`` in float64; anything else as it is."""
    given = [value.detach() if isinstance(value, torch.Tensor) else value for value in values]
    given = [_resolved(value) if is_plain(value) else value for value in given]
    memories: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def copy(value: torch.Tensor) -> torch.Tensor:
        dtype = WIDER.get(value.dtype, value.dtype) if wide else value.dtype
        if not is_plain(value):
            return value.clone().to(dtype)
        storage = value.untyped_storage()
        key = storage._cdata, value.dtype
        if key not in memories:
            whole = value.new_empty(0).set_(storage, 0, (storage.nbytes() // value.element_size(),), (1,))
            memories[key] = whole.to(dtype, copy=True)
        return memories[key].as_strided(value.size(), value.stride(), value.storage_offset()).detach()

    with torch.no_grad():
        return [
            copy(item).requires_grad_(value.requires_grad)
            if isinstance(item, torch.Tensor) and isinstance(value, torch.Tensor)
            else item
            for value, item in zip(values, given, strict=True)
        ]


def _resolved(value: torch.Tensor) -> torch.Tensor:
    """A tensor whose memory holds its values: no conjugate and negative bits, and no zero without memory."""
    value = value.resolve_conj().resolve_neg()
    return value.clone() if value._is_zerotensor() else value


def is_plain(value: object) -> TypeGuard[torch.Tensor]:
    """Whether a value is a tensor of strided memory and of no class of its own."""
    return type(value) in (torch.Tensor, torch.nn.Parameter) and cast(torch.Tensor, value).layout is torch.strided


@contextlib.contextmanager
def _from_state(state: torch.Tensor) -> Iterator[None]:
    """No other modes; random numbers from one state, and no trace of those drawn."""
    with _disable_current_modes(), PrivateRandomness(state):
        yield


def _is_discrete(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return not (value.is_floating_point() or value.is_complex())
    return isinstance(value, (bool, int))


def _floats(values: object) -> list[torch.Tensor]:
    return [
        leaf
        for leaf in pytree.tree_leaves(values)
        if isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())
    ]


class NotRepeatableError(RuntimeError):
    """A run has effects that must happen once, so that nothing can be computed a second time beside it."""


@dataclasses.dataclass(frozen=True)
class _Kept:
    """What an operator's call gave that another run must not decide: its result, and the arguments that it wrote."""

    result: Any
    written: Mapping[str, Any]


def written_by(func: Any, args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that an operator writes, by name."""
    if not isinstance(func, torch._ops.OpOverload) or not func._schema.is_mutable:
        return {}
    given = {item.name: value for item, value in zip(func._schema.arguments, args, strict=False)} | dict(kwargs)
    return {
        item.name: given[item.name]
        for item in func._schema.arguments
        if item.alias_info is not None and item.alias_info.is_write and item.name in given
    }


class Recording(TorchDispatchMode):
    """The eager run; keeps, for each operator, call after call, what float64 must not decide, and counts the draws.

    Args:
        raises: whether what cannot be run again is an error; else it is in ``failure``, and the run goes on.

    Attributes:
        kept: by operator.
        draws: how many operators have drawn random numbers.
        dtypes: by operator, call after call, the floating-point dtype of least precision that it took or returned, but
            for those of eight bits, which are stored and not computed; and whether it returned only discrete values.
        failure: why the run cannot be repeated, or ``""``.
    """

    supports_higher_order_operators = True

    def __init__(self, *, raises: bool = True) -> None:
        super().__init__()
        self.kept: dict[object, list[_Kept]] = collections.defaultdict(list)
        self.draws = 0
        self.dtypes: dict[object, list[tuple[torch.dtype, bool]]] = collections.defaultdict(list)
        self.failure = ""
        self._raises = raises

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        if is_collective(func):
            self.failure = f"{func} runs once, in all processes: not again for a comparison"
            if self._raises:
                raise NotRepeatableError(self.failure)
        result = func(*args, **(kwargs or {}))
        dtypes = {leaf.dtype for leaf in _floats((args, kwargs, result)) if leaf.itemsize > 1}
        self.dtypes[func].append((max(dtypes, key=epsilon, default=torch.float64), not _floats(result)))
        self.draws += draws_numbers(func, args, kwargs or {})
        if decides(func, args, kwargs or {}, result):
            written = {key: _cloned(value) for key, value in written_by(func, args, kwargs or {}).items()}
            self.kept[func].append(_Kept(pytree.tree_map(_cloned, result), written))
        return result


def _cloned(value: object) -> object:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def decides(func: object, args: Sequence[object], kwargs: Mapping[str, object], result: object) -> bool:
    """Whether a call's result is a matter of chance, or of a comparison or rounding of floating-point values."""
    if draws_numbers(func, args, kwargs) or func in BIT_CASTS:
        return True
    if not isinstance(func, torch._ops.OpOverload) or func._schema.is_mutable:
        return False
    leaves = pytree.tree_leaves(result)
    return any(_is_discrete(leaf) for leaf in leaves) and bool(_floats((args, kwargs)))


class Float64(TorchDispatchMode):
    """The float64 run beside a recorded one.

    Args:
        recording: what eager did.
        decides_itself: whether comparisons and indices are float64's own; random numbers are eager's all the same.
        perturbing: whether what an operator reads is perturbed, by the rounding of the dtype that the same call had in
            eager's run; or the dtype.
        generator: of the random numbers of it.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        recording: Recording,
        *,
        decides_itself: bool = False,
        perturbing: torch.dtype | bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self._perturbing = perturbing
        self._generator = generator or torch.Generator().manual_seed(0)
        self.inexact: dict[str, str] = {}
        self._recording = recording
        self._decides = decides_itself
        self._position: collections.Counter[object] = collections.Counter()
        self._calls: collections.Counter[object] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        args, kwargs = pytree.tree_map(wider_dtype, (args, kwargs or {}))
        if draws_numbers(func, args, kwargs):
            return self._chance(func, args, kwargs)
        result = self._compute(func, args, kwargs)
        if func in BIT_CASTS if self._decides else decides(func, args, kwargs, result):
            kept = self._next(func)
            if kept is not None:
                known = pytree.tree_map(_cloned, kept.result)  # the run may write into what it is given
                return pytree.tree_map(_discrete_of, result, known) if func not in BIT_CASTS else _widened(known)
        return result

    def _next(self, func: object) -> _Kept | None:
        """What the eager run had at the same call of the operator."""
        kept, position = self._recording.kept[func], self._position[func]
        self._position[func] += 1
        if position < len(kept):
            return kept[position]
        self.inexact[str(func)] = "float64 calls it more often than eager"
        return None

    def _chance(self, func: Any, args: Any, kwargs: Any) -> object:
        kept = self._next(func)
        if kept is None:
            return func(*args, **kwargs)
        if func is aten.native_dropout.default:
            probability, mask = args[1], kept.result[1]
            scale = 0.0 if probability == 1 else 1 / (1 - probability)
            return args[0] * mask * scale, mask
        for name, value in written_by(func, args, kwargs).items():
            with torch.no_grad():
                value.copy_(kept.written[name])
        returned = func._schema.returns
        if len(returned) == 1 and returned[0].alias_info is not None and returned[0].alias_info.is_write:
            return next(iter(written_by(func, args, kwargs).values()))
        return _widened(kept.result)

    def _compute(self, func: Any, args: Any, kwargs: Any) -> object:
        is_function = isinstance(func, torch._ops.OpOverload) and not func._schema.is_mutable
        is_perturbed = bool(self._perturbing) and is_function and not _returns_view(func)
        dtype, compares = self._rounding_of(func) if is_perturbed else (torch.float64, False)
        if is_perturbed:
            args, kwargs = pytree.tree_map(lambda value: self._perturbed(value, dtype, compares), (args, kwargs))
        try:
            result = func(*args, **kwargs)
        except REFUSALS as error:
            return self._in_low_precision(func, args, kwargs, error)
        if not is_function:
            return result
        if any(leaf.dtype in WIDER for leaf in _floats(result)) and not _returns_view(func):
            result = _widened(of_default_dtype(func, args, kwargs, result))
        if is_perturbed and isinstance(result, torch.Tensor) and result.dtype is torch.float64:
            result = perturbed_near_one(func.overloadpacket.__name__, result, args, dtype, self._generator)
        return result

    def _rounding_of(self, func: object) -> tuple[torch.dtype, bool]:
        """The dtype whose rounding the next call of an operator had in eager's run, and whether it compared."""
        if isinstance(self._perturbing, torch.dtype):
            return self._perturbing, False
        dtypes, position = self._recording.dtypes[func], self._calls[func]
        self._calls[func] += 1
        return dtypes[min(position, len(dtypes) - 1)] if dtypes else (torch.float64, False)

    def _perturbed(self, value: object, dtype: torch.dtype, compares: bool) -> object:
        if not isinstance(value, torch.Tensor) or value.dtype is not torch.float64:
            return value
        return perturbed(value, self._generator, dtype=dtype, whole_stay=compares)

    def _in_low_precision(self, func: Any, args: Any, kwargs: Any, error: Exception) -> object:
        """For an operator that float64 does not have."""
        if not isinstance(func, torch._ops.OpOverload) or func._schema.is_mutable:
            raise error
        self.inexact[str(func)] = f"no float64: {error}".splitlines()[0]
        args, kwargs = pytree.tree_map(_narrowed, (args, kwargs))
        return _widened(func(*args, **kwargs))


def _returns_view(func: torch._ops.OpOverload) -> bool:
    return any(result.alias_info is not None for result in func._schema.returns)


def _widened(value: object) -> Any:
    return pytree.tree_map(widen, value)


def _narrowed(value: object) -> object:
    if isinstance(value, torch.Tensor) and value.dtype is torch.float64:
        return value.float()
    return value


def _discrete_of(computed: object, kept: object) -> object:
    return kept if _is_discrete(kept) else computed
