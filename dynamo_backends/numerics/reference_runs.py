"""Runs a function in PyTorch twice, with gradients: in eager, and in float64 as the reference.

::

    runs = ReferenceRuns(function, SharedCopies(arguments), torch.get_rng_state())
    runs.outputs.eager, runs.outputs.exact  # float64 runs now
    runs.gradients(tangents, of)           # of both runs, by autograd

Two dispatch modes see every ATen operator that reaches a kernel, in forward and backward. ``Recording`` is active in
the eager run and stores what float64 must not decide: booleans, indices and integers that are computed from
floating-point values, random numbers, bit casts. ``Float64`` widens dtype arguments and results in the default dtype,
and uses the stored results, call by call of the same operator: a comparison that flips would look like an error.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeGuard, cast

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from passes.engine.fx.editing import is_view, written_by

from ..graphs.operators import is_collective
from .exact import BIT_CASTS, KERNEL_ERRORS, WIDER, call_wide, floats, is_decision, keep_discrete, widened, wider_dtype
from .randomness import (
    CHECK_AFTER,
    MOST_PERTURBATIONS,
    PERTURBATIONS,
    PrivateRandomness,
    computes,
    draws_numbers,
    perturbed,
    perturbed_near_one,
)
from .tensor_measure import format_of, same_elements
from .verdicts import Verdict, epsilon, further, is_discrete, verdict

aten = torch.ops.aten

Values: TypeAlias = "Mapping[object, object]"
Context: TypeAlias = "Callable[[], contextlib.AbstractContextManager[object]]"


class NotRepeatableError(RuntimeError):
    """A function has effects that must happen once, so it cannot be run again for a comparison."""


@dataclasses.dataclass(frozen=True)
class Results:
    """The results of both runs, by key: tensors or numbers.

    Attributes:
        eager, exact: by key.
        perturbed: the values of so many float64 runs with random rounding, of some keys at least. It may return several
            runs as one, with those elements that are furthest from ``exact``.
    """

    eager: Values
    exact: Values
    perturbed: Callable[[int, Collection[object]], Sequence[Values]] = lambda times, keys: ()

    def under(self, keys: Mapping[Any, object]) -> Results:
        """Some of the results, with new keys: ``keys`` maps old to new ones."""

        def mapped(values: Values) -> Values:
            return {new: values[key] for key, new in keys.items() if key in values}

        def perturbed(times: int, of: Collection[object]) -> list[Values]:
            return list(map(mapped, self.perturbed(times, [old for old, new in keys.items() if new in of])))

        return Results(mapped(self.eager), mapped(self.exact), perturbed)

    def verdict(self, actual: object, key: object) -> Verdict:
        """Compares a value with a result: by eager's error, and if that is not enough, by those of random rounding.

        Some of the runs round by as much as the tolerance of a single operator: an error of that size may decide
        whether a gradient passes through a ``relu``. Their errors are scaled down, see ``_moved``.
        """
        eager, exact = self.eager.get(key), self.exact.get(key)
        result = verdict(actual, eager, exact)
        if result.is_wrong and result.is_of_size:
            for times in (*CHECK_AFTER, MOST_PERTURBATIONS + PERTURBATIONS):
                result = verdict(actual, eager, exact, [run.get(key) for run in self.perturbed(times, self.eager)])
                if not result.is_wrong:
                    break
        return result


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


class SharedCopies:
    """Copies of arguments, in their dtypes and in float64, that runs one after the other share; see ``copies``.

    Without ``kept``, each run has copies of its own, so that none takes memory after its run.
    """

    def __init__(self, originals: Sequence[object], *, kept: bool = True) -> None:
        self.originals = originals
        self._is_kept = kept
        self._unchanged: dict[bool, Sequence[object]] = {}

    def take(self, *, wide: bool) -> Sequence[object]:
        """Copies that nobody has changed."""
        return self._unchanged.pop(wide, None) or copies(self.originals, wide=wide)

    def give_back(self, copied: Sequence[object], *, wide: bool) -> None:
        """The next run may have copies that this one has not changed."""
        if self._is_kept:
            self._unchanged[wide] = copied


class ReferenceRuns:
    """Runs a function on copies of its arguments: in eager when it is made, in float64 when that is needed.

    Args:
        function: takes the arguments and returns a sequence of results.
        arguments: whose copies the function gets.
        generator_state: the state of the CPU's random numbers at the start of each run.
        are_leaves: for each argument, whether it is a leaf of autograd; one that is not may be changed in place.
        keeps_runs: whether ``Results.perturbed`` keeps each run.
    """

    def __init__(
        self,
        function: Callable[..., Sequence[object]],
        arguments: SharedCopies,
        generator_state: torch.Tensor,
        are_leaves: Sequence[bool] | None = None,
        *,
        keeps_runs: bool = False,
    ) -> None:
        leaves = are_leaves or [True] * len(arguments.originals)

        # not a method: the perturbed runs must not keep these runs alive
        def run(mode: Recording | Float64) -> FunctionRun:
            copied = arguments.take(wide=isinstance(mode, Float64))
            return FunctionRun(function, copied, leaves, generator_state, mode)

        self._run = run
        self._keeps_runs = keeps_runs
        self._arguments = arguments
        self._has_gradients = torch.is_grad_enabled()
        self._recording = Recording()
        self._float64 = Float64(self._recording)
        eager = run(self._recording)
        pairs = enumerate(zip(arguments.originals, eager.arguments, strict=True))
        self._changed = [j for j, (before, after) in pairs if _is_changed(before, after)]
        self._give_back(eager, wide=False)
        self._eager: FunctionRun | None = eager
        self._exact: FunctionRun | None = None

    def _give_back(self, run: FunctionRun, *, wide: bool) -> None:
        # a result that shares memory with a copy would change if the next run writes into it
        if not self._changed and not any(run.are_written) and not _share_memory(run.returned, run.leaves):
            self._arguments.give_back(run.leaves, wide=wide)

    def _run_exact(self) -> FunctionRun:
        with torch.set_grad_enabled(self._has_gradients):
            run = self._run(self._float64)
        self._give_back(run, wide=True)
        return run

    @functools.cached_property
    def outputs(self) -> Results:
        """The results by position, and under ``("input", j)`` the j-th argument after the run, if it changed.

        Must be read before ``gradients`` is called, if it is needed.
        """
        eager = self._eager
        results = self.outputs_alone()
        self._eager = eager
        return results

    def outputs_alone(self) -> Results:
        """``outputs``, after which ``gradients`` cannot be called: float64 runs after the eager run was freed."""
        changed, run, self._eager = self._changed, self._eager, None
        assert run is not None
        eager = _outputs(run, changed)
        del run
        self._exact = self._run_exact()
        exact = _outputs(self._exact, changed)
        perturbed = self._perturbed(lambda run, _: _outputs(run, changed), eager, exact, has_gradients=False)
        return Results(eager, exact, perturbed)

    @property
    def inexact(self) -> Mapping[str, str]:
        """Operators whose result in float64, if that has run, is eager's or of a lower precision, with the reason."""
        return self._float64.inexact

    @property
    def draws(self) -> int:
        """How many operators of the eager run drew random numbers."""
        return self._recording.draws

    def gradients(self, tangents: Mapping[object, torch.Tensor], of: Sequence[int]) -> Results:
        """The gradients of some arguments, by autograd. Can be called once.

        Unless ``outputs`` was read, float64 runs after the eager run was freed.

        Args:
            tangents: the gradients of the results: by position, by ``("input", j)`` for an argument that the function
                changed, by ``("base", i)`` for the tensor that result i is a view of.
            of: positions of the arguments.

        Returns:
            By the argument's position; ``None`` if it has no gradient.

        Raises:
            NotRepeatableError: the backward draws random numbers. A checkpoint should draw those of the forward, but
                PyTorch draws others when it runs a captured checkpoint.
        """
        run, draws, self._eager = self._eager, self._recording.draws, None
        assert run is not None
        eager = _gradients(run, tangents, of)
        if self._recording.draws > draws:
            raise NotRepeatableError("the backward draws random numbers, which cannot be reproduced")
        run, self._exact = self._exact, None
        exact = _gradients(run or self._run_exact(), tangents, of)

        def values_of(run: FunctionRun, keys: Collection[object]) -> dict[object, object]:
            return _gradients(run, tangents, [j for j in of if j in keys])

        return Results(eager, exact, self._perturbed(values_of, eager, exact, has_gradients=True))

    def _perturbed(
        self,
        values_of: Callable[[FunctionRun, Collection[object]], dict[object, object]],
        eager: Values,
        exact: Values,
        *,
        has_gradients: bool,
    ) -> _PerturbedRuns:
        """Runs float64 with random rounding; ``values_of`` returns those of some keys, at least, of a run.

        The inputs of each operator are perturbed by up to a unit in the last place of the eager run's coarsest dtype,
        and the results of functions such as SiLU by the error of a unit of one inside. These runs decide comparisons
        and indices themselves. A run that fails is omitted: a shape may depend on a comparison.
        """
        run, recording = self._run, self._recording

        def once(seed: int, keys: Collection[object]) -> dict[object, object]:
            generator = torch.Generator().manual_seed(seed)
            is_coarse = 1 <= seed <= PERTURBATIONS  # early: they often explain what the others do not
            mode = Float64(recording, decides_itself=True, perturbing=True, as_tolerated=is_coarse, generator=generator)
            with contextlib.suppress(*KERNEL_ERRORS, IndexError), torch.set_grad_enabled(has_gradients):
                values = values_of(run(mode), keys)
                return {k: _moved(v, eager.get(k), exact.get(k)) for k, v in values.items()} if is_coarse else values
            return {}

        return _PerturbedRuns(once, {} if self._keeps_runs else exact)


def _moved(value: object, eager: object, exact: object) -> object:
    """A result moved towards the exact one, so that the tolerance allows two times its error, not ``factor`` times.

    An error in proportion to the rounding then counts up to 1.6 times as much as with a unit in the last place.
    """
    if not isinstance(value, torch.Tensor) or not isinstance(exact, torch.Tensor) or is_discrete(value):
        return value
    if not isinstance(eager, torch.Tensor) or value.shape != exact.shape:
        return value
    moved = exact.lerp(value, 2 / format_of(eager.dtype).factor)
    return torch.where(moved.isfinite(), moved, value)


class _PerturbedRuns:
    """``Results.perturbed``: makes runs when they are needed.

    Of the floating-point tensors that are in ``exact`` only the elements that are furthest from it are kept, as if they
    were of one run: a run of a large model has as many gradients as it has weights.

    Args:
        once: makes the run of a seed, and returns its values for some keys, at least.
        exact: the values without rounding.
    """

    def __init__(self, once: Callable[[int, Collection[object]], dict[object, object]], exact: Values) -> None:
        self._once, self._exact = once, exact
        self._start(())

    def _start(self, keys: Collection[object]) -> None:
        self._keys, self._done = set(keys), 0
        self._furthest: dict[object, object] = {}
        self._runs: list[Values] = [self._furthest]

    def __call__(self, times: int, keys: Collection[object]) -> Sequence[Values]:
        if not self._keys.issuperset(keys):
            self._start(keys)
        while self._done < times:
            values = self._once(self._done, self._keys)
            self._done += 1
            for key in list(values):
                value, exact = values[key], self._exact.get(key)
                if not isinstance(value, torch.Tensor) or not isinstance(exact, torch.Tensor) or is_discrete(value):
                    continue
                if value.shape == exact.shape:
                    self._furthest[key] = further(value, cast(torch.Tensor, self._furthest.get(key, exact)), exact)
                    del values[key]
            self._runs.append(values)
        return self._runs


def _outputs(run: FunctionRun, changed: Sequence[int]) -> dict[object, object]:
    values = dict(enumerate(run.returned)) | {("input", j): run.arguments[j] for j in changed}
    return {key: value.detach() if isinstance(value, torch.Tensor) else value for key, value in values.items()}


def _gradients(run: FunctionRun, tangents: Mapping[object, torch.Tensor], of: Sequence[int]) -> dict[object, object]:
    def output(key: object) -> torch.Tensor:
        if isinstance(key, int):
            return run.returned[key]
        assert isinstance(key, tuple)
        kind, position = key
        return cast(torch.Tensor, run.arguments[position] if kind == "input" else run.returned[position]._base)

    inputs = [cast(torch.Tensor, run.leaves[j]) for j in of]
    gradients = run.gradients([output(key) for key in tangents], list(tangents.values()), inputs)
    return dict(zip(of, gradients, strict=True))


def _share_memory(values: Sequence[object], others: Sequence[object]) -> bool:
    """Whether a tensor shares its storage with one of the others; tensors without one storage count as if they did."""
    tensors, theirs = ([item for item in items if isinstance(item, torch.Tensor)] for items in (values, others))
    if not all(map(is_strided, [*tensors, *theirs])):
        return True
    storages = {item.untyped_storage()._cdata for item in theirs}
    return any(item.untyped_storage()._cdata in storages for item in tensors)


def _is_changed(before: object, after: object) -> bool:
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor) or before.is_nested:
        return False  # PyTorch cannot compare nested tensors
    return before.dtype != after.dtype or not same_elements(before.detach(), after.detach())


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


class Recording(TorchDispatchMode):
    """Stores, operator by operator and call by call, what float64 must not decide, and counts random draws.

    Args:
        raises: whether an operator that cannot run again is an error; if not, the reason is stored in ``failure``.

    Attributes:
        stored: by operator.
        draws: how many operators have drawn random numbers.
        dtypes: by operator, for each call: the coarsest floating-point dtype of its arguments and results (except
            those of eight bits, in which nothing is computed), and whether all results are discrete.
        failure: why the run cannot be repeated, or ``""``.
    """

    supports_higher_order_operators = True

    def __init__(self, *, raises: bool = True) -> None:
        super().__init__()
        self.stored: dict[object, list[_Stored]] = collections.defaultdict(list)
        self.draws = 0
        self.dtypes: dict[object, list[tuple[torch.dtype, bool]]] = collections.defaultdict(list)
        self.failure = ""
        self._raises = raises

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        kwargs = kwargs or {}
        if is_collective(func):
            self.failure = f"{func} runs once in all processes, and cannot run again for a comparison"
            if self._raises:
                raise NotRepeatableError(self.failure)
        result = func(*args, **kwargs)
        dtypes = {leaf.dtype for leaf in floats((args, kwargs, result)) if leaf.itemsize > 1}
        self.dtypes[func].append((max(dtypes, key=epsilon, default=torch.float64), not floats(result)))
        self.draws += draws_numbers(func, args, kwargs)
        if _is_stored(func, args, kwargs, result):
            self.stored[func].append(_Stored(_cloned(result), _cloned(written_by(func, args, kwargs))))
        return result


def _is_stored(func: object, args: Sequence[object], kwargs: Mapping[str, object], result: object) -> bool:
    """Whether a result is random, or discrete and computed from floating-point values."""
    if draws_numbers(func, args, kwargs) or func in BIT_CASTS:
        return True
    if not isinstance(func, torch._ops.OpOverload) or func._schema.is_mutable:
        return False
    return any(map(is_decision, pytree.tree_leaves(result))) and bool(floats((args, kwargs)))


class Float64(TorchDispatchMode):
    """Runs in float64, with the random numbers and decisions of a recorded run.

    Args:
        recording: of the eager run.
        decides_itself: whether comparisons and indices are computed in float64; random numbers are still eager's.
        perturbing: whether inputs of operators are perturbed: by the rounding of a dtype, or with ``True`` by that of
            the dtype that the same call had in the eager run.
        as_tolerated: whether by as many units in the last place as the tolerance has, instead of by one.
        generator: of these perturbations.

    Attributes:
        inexact: operators whose result is eager's or that of a lower precision, with the reason.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        recording: Recording,
        *,
        decides_itself: bool = False,
        perturbing: torch.dtype | bool = False,
        as_tolerated: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self._perturbing, self._as_tolerated = perturbing, as_tolerated
        self._generator = generator or torch.Generator().manual_seed(0)
        self.inexact: dict[str, str] = {}
        self._recording = recording
        self._decides = decides_itself
        self._position: collections.Counter[object] = collections.Counter()
        self._calls: collections.Counter[object] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        args, kwargs = pytree.tree_map(wider_dtype, (args, kwargs or {}))
        if draws_numbers(func, args, kwargs):
            return self._drawn(func, args, kwargs)
        result = self._compute(func, args, kwargs)
        if func in BIT_CASTS if self._decides else _is_stored(func, args, kwargs, result):
            stored = self._next(func)
            if stored is not None and func in BIT_CASTS:
                return widened(stored.result)
            if stored is not None:
                return pytree.tree_map(keep_discrete, result, stored.result)
        return result

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
            return func(*args, **kwargs)
        if func is aten.native_dropout.default:
            probability, mask = args[1], stored.result[1]
            scale = 0.0 if probability == 1 else 1 / (1 - probability)
            return args[0] * mask * scale, mask
        written = written_by(func, args, kwargs)
        for name, value in written.items():
            with torch.no_grad():
                value.copy_(stored.written[name])
        returned = func._schema.returns
        if len(returned) == 1 and returned[0].alias_info is not None and returned[0].alias_info.is_write:
            return next(iter(written.values()))
        return widened(stored.result)

    def _compute(self, func: Any, args: Any, kwargs: Any) -> object:
        if not isinstance(func, torch._ops.OpOverload) or func._schema.is_mutable:
            return func(*args, **kwargs)
        rounding = self._rounding_of(func) if self._perturbing and computes(func) else None
        if rounding is not None:
            dtype, compares = rounding
            units = format_of(dtype).units if self._as_tolerated else 1.0
            args, kwargs = pytree.tree_map(
                lambda value: (
                    perturbed(value, self._generator, dtype=dtype, units=units, whole_stay=compares)
                    if isinstance(value, torch.Tensor) and value.dtype is torch.float64
                    else value
                ),
                (args, kwargs),
            )
        try:
            result = func(*args, **kwargs) if is_view(func) else call_wide(func, args, kwargs)
        except KERNEL_ERRORS as error:
            result = func(*pytree.tree_map(_narrowed, args), **pytree.tree_map(_narrowed, kwargs))
            if floats(result):  # other results are eager's in any case
                self.inexact[str(func)] = f"no float64: {error}".splitlines()[0]
            return widened(result)
        if rounding is not None and isinstance(result, torch.Tensor) and result.dtype is torch.float64:
            return perturbed_near_one(func.overloadpacket.__name__, result, args, rounding[0], self._generator)
        return result

    def _rounding_of(self, func: object) -> tuple[torch.dtype, bool]:
        """The dtype of the operator's next call in the eager run, and whether that call had only discrete results."""
        if isinstance(self._perturbing, torch.dtype):
            return self._perturbing, False
        dtypes, position = self._recording.dtypes[func], self._calls[func]
        self._calls[func] += 1
        return dtypes[min(position, len(dtypes) - 1)] if dtypes else (torch.float64, False)


def _narrowed(value: object) -> object:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype is torch.float64 else value
