"""Judges the results of a computation whose inner values are not known: all of it is one segment.

::

    check = FunctionCheck(function, arguments, RandomState.now())
    check.judge(0, actual).is_wrong

The rule is that of ``segments``: a result is compared with eager's, then with float64's, and then with up to
``rule.RUNS`` runs in which the arguments of each operator are off by a rounding. What they change is allowed, if it is
the same when such a run is repeated: an operator that returns other numbers each time would excuse anything.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import fx
from torch.utils import _pytree as pytree

from ..common.random_state import RandomState
from ..graphs.layout import significant_strides
from .arrays import as_array, dense, dtype_name, format_of, is_equal
from .exact import KERNEL_ERRORS, TolerantInterpreter, is_floating, widened
from .function_runs import FunctionRun, Recording, Rerun, UnstableError, copies
from .rule import RUNS, UNITS, Measure, judge, spread, sum_units
from .verdicts import RIGHT, Verdict, difference_in_kind, verdict, verdict_on

Values: TypeAlias = "Mapping[Any, object]"
"""The results of a run by key, such as their positions."""

_UNDEFINED = 1e37
"""The change of an element that nothing defines."""


class ResultCheck:
    """Judges results.

    Args:
        eager: the results in eager.
        run: returns those in float64, and with a seed those of a perturbed run.
        terms: the most terms that an operator of it adds up, known after a run.
        magnitudes: the sums of the magnitudes of the terms of each result.
        coarser: the dtype to which float32 may be rounded.
        has_undefined: whether uninitialized memory is read. It is NaN in perturbed runs, and what is NaN then may have
            any value.
        unstable: returns the names of the operators that return other numbers each time.
    """

    def __init__(
        self,
        eager: Values,
        run: Callable[[int | None], Values],
        *,
        terms: Callable[[], int] = lambda: 1,
        magnitudes: Callable[[], Values] | None = None,
        coarser: torch.dtype = torch.float32,
        has_undefined: bool = False,
        unstable: Callable[[], Iterable[str]] = tuple,
    ) -> None:
        self.eager = eager
        self._has_undefined = has_undefined
        self._unstable = unstable
        self._run, self._terms, self._coarser = run, terms, coarser
        self._magnitudes = functools.cache(magnitudes or dict)
        self._exact: Values | None = None
        self._seeds = 0
        self._last: Values | None = None  # of the last perturbed run, until it is repeated
        self._differing: set[object] = set()  # keys of results that were not the same then
        self._furthest: dict[object, np.ndarray] = {}  # by key, the largest change
        self._discrete: collections.defaultdict[object, list[torch.Tensor]] = collections.defaultdict(list)

    @property
    def exact(self) -> Values:
        """The results in float64; those that do not fit their dtype are eager's."""
        if self._exact is None:
            self._exact = {key: _fitting(value, self.eager.get(key)) for key, value in self._run(None).items()}
        return self._exact

    def judge(self, key: object, actual: object) -> Verdict:
        """Whether a result is right.

        Raises:
            UnstableError: perturbed runs are needed, and the result is not the same in each run.
        """
        expected = self.eager.get(key)
        complaint = difference_in_kind(actual, expected)
        if complaint or not isinstance(actual, torch.Tensor) or not isinstance(expected, torch.Tensor):
            return Verdict(complaint)
        ours, theirs = dense(actual), dense(expected)
        if is_equal(ours, theirs):
            return RIGHT
        judge_elements = self._judge_numbers if is_floating(ours) else self._judge_discrete
        return judge_elements(key, ours, theirs)

    def judge_all(self, actual: Values) -> Iterator[tuple[Any, Verdict]]:
        """The verdicts on results, by key.

        Raises:
            UnstableError: at the end, if a result is not the same in each run, and no other is wrong.
        """
        unstable: UnstableError | None = None
        is_wrong = False
        for key, value in actual.items():
            try:
                found = self.judge(key, value)
            except UnstableError as error:
                unstable = error
            else:
                is_wrong |= found.is_wrong
                yield key, found
        if unstable is not None and not is_wrong:
            raise unstable

    def _judge_numbers(self, key: object, actual: torch.Tensor, expected: torch.Tensor) -> Verdict:
        rounded_to = self._coarser if actual.dtype is torch.float32 else actual.dtype
        value, name = as_array(actual), dtype_name(rounded_to)
        reference = as_array(expected)
        found, beyond = judge(value, reference, name)
        untold = 0
        exact = self.exact.get(key) if not found.is_rounding else None
        if isinstance(exact, torch.Tensor):
            reference, more = as_array(exact), self._summed(key, actual)
            is_double = actual.dtype in (torch.float64, torch.complex128)  # whose reference is rounded as it is
            if is_double:
                rounding = np.abs(reference) * (UNITS * format_of(actual.dtype).epsilon)
                more = rounding if more is None else 2 * more + rounding
            found, beyond = judge(value, reference, name, more)
            for _ in self._perturbed_runs(key) if not found.is_rounding else ():
                factor = spread(self._terms()) * (2 if is_double else 1)
                allowed = factor * self._furthest[key] + (0 if more is None else more)
                found, beyond = judge(value, reference, name, allowed)
                if found.is_rounding:
                    untold = _untold(reference, allowed)
                    break
            self._refuse_unstable(key)
        return dataclasses.replace(verdict_on(value, reference, found, beyond), untold=untold)

    def _summed(self, key: object, actual: torch.Tensor) -> np.ndarray | None:
        """What the sums of a result may round, if that is known."""
        size = self._magnitudes().get(key)
        if not isinstance(size, torch.Tensor) or size.shape != actual.shape:
            return None
        return as_array(size.detach().abs()) * (sum_units(self._terms()) * format_of(actual.dtype).computed)

    def _judge_discrete(self, key: object, actual: torch.Tensor, expected: torch.Tensor) -> Verdict:
        value, expected_array = as_array(actual), as_array(expected)
        found, beyond = judge(value, expected_array, "")
        for _ in self._perturbed_runs(key) if not found.is_rounding else ():
            for other in self._discrete[key]:
                array = as_array(other)
                expected_array = np.where(array == value, array, expected_array)
            found, beyond = judge(value, expected_array, "")
            if found.is_rounding:
                break
        self._refuse_unstable(key)
        return verdict_on(value, expected_array, found, beyond)

    def _refuse_unstable(self, key: object) -> None:
        """Repeats the last perturbed run, which decided; raises ``UnstableError`` if a result is not the same then."""
        first, self._last = self._last, None
        if first is not None:
            try:
                again = self._run(self._seeds)
            except (*KERNEL_ERRORS, IndexError):
                again = {}
            dtypes = {each: value.dtype for each, value in self.eager.items() if is_floating(value)}
            differing = (each for each in first if verdict(again.get(each), first[each], dtypes.get(each)).is_wrong)
            self._differing.update(differing)
        if key in self._differing:
            raise UnstableError(self._unstable())

    def _perturbed_runs(self, key: object) -> Iterator[None]:
        """Makes perturbed runs, one at a time; yields after each that there is, if it has a value of ``key``."""
        if self._seeds and (key in self._furthest or key in self._discrete):
            yield
        while self._seeds < RUNS:
            self._seeds += 1
            try:
                self._last = values = self._run(self._seeds)
            except (*KERNEL_ERRORS, IndexError):  # a shape depends on a comparison
                continue
            for each, value in values.items():
                self._add(each, value)
            if key in self._furthest or key in self._discrete:
                yield

    def _add(self, key: object, value: object) -> None:
        """Keeps what a perturbed run changes."""
        expected = self.eager.get(key)
        if not isinstance(value, torch.Tensor) or not isinstance(expected, torch.Tensor):
            return
        exact, changed = self.exact.get(key), dense(value.detach())
        if changed.shape != dense(expected).shape:
            return
        if not is_floating(expected):
            self._discrete[key].append(changed.to(expected.dtype))
            return
        if not isinstance(exact, torch.Tensor):
            return
        with np.errstate(all="ignore"):
            change = np.abs(as_array(changed) - as_array(exact))
        undefined = np.isnan(change) & np.isfinite(as_array(exact)) & self._has_undefined
        change = np.where(undefined, _UNDEFINED, np.nan_to_num(change, nan=0.0, posinf=0.0))
        is_double = expected.dtype in (torch.float64, torch.complex128)  # float32 takes half the memory
        change = np.maximum(self._furthest.get(key, change), change)
        self._furthest[key] = change.astype(np.float64 if is_double else np.float32)


def _untold(reference: np.ndarray, allowed: np.ndarray) -> int:
    """At how many elements the tolerance is as large as the result, by its root mean square: they may be anything.

    Not of those that are zero, or that nothing defines.
    """
    size = np.abs(reference.astype(np.complex128 if reference.dtype.kind == "c" else np.float64))
    counts = (size > 0) & np.isfinite(size) & (allowed < _UNDEFINED)
    with np.errstate(over="ignore"):
        spread_of_result = math.sqrt(np.square(size[counts]).mean()) if counts.any() else math.inf
    return int(np.count_nonzero(allowed[counts] >= spread_of_result))


def _fitting(exact: object, eager: object) -> object:
    """The value in float64, or eager's where it is larger than its dtype's largest number."""
    if not is_floating(eager) or not is_floating(exact):
        return exact
    wide, narrow = dense(exact.detach()), dense(eager)
    if wide.shape != narrow.shape:
        return wide
    beyond = wide.abs() > format_of(narrow.dtype).largest
    return torch.where(beyond, narrow.to(wide.dtype), wide) if bool(beyond.any()) else wide


ValuesOf: TypeAlias = Callable[[FunctionRun], Values]
"""Returns the results of a run, and gradients."""


def outputs_of(run: FunctionRun) -> dict[object, object]:
    """What a function returned, by position, and under ``("input", j)`` the j-th argument if the run wrote it."""
    values: dict[object, object] = dict(enumerate(run.returned))
    values |= {("input", j): run.arguments[j] for j, is_written in enumerate(run.are_written) if is_written}
    return {key: value.detach() if isinstance(value, torch.Tensor) else value for key, value in values.items()}


class FunctionCheck(ResultCheck):
    """Judges the results of a function.

    Args:
        function: takes the arguments and returns a sequence of results.
        arguments: whose copies the function gets.
        state: of the CPU's random numbers at the start of each run.
        values_of: the results of a run, and gradients, by key.
        written: positions of the arguments that the function may write; all others are not copied. ``None`` if any, or
            if there are gradients.
        is_wide: whether there is a float64; if not, the reference is eager.
        coarser, magnitudes: see ``ResultCheck``.
        recording: of a run that was made. The reference is then float64 alone, and not eager.
        actual: with ``recording``, the results of that run, whose dtypes the reference has.
        otherwise: the dtype of operators that were not recorded, see ``Rerun``.

    Attributes:
        inexact: operators whose result in float64, if that has run, is eager's or of a lower precision.
        draws: how many operators drew random numbers.
    """

    def __init__(
        self,
        function: Callable[..., Sequence[object]],
        arguments: Sequence[object],
        state: RandomState,
        *,
        values_of: ValuesOf = outputs_of,
        written: Collection[int] | None = None,
        is_wide: bool = True,
        coarser: torch.dtype = torch.float32,
        magnitudes: Callable[[], Values] | None = None,
        recording: Recording | None = None,
        actual: Values | None = None,
        otherwise: torch.dtype = torch.float32,
    ) -> None:
        has_gradients = torch.is_grad_enabled()
        recorded = Recording() if recording is None else recording

        def run(mode: Recording | Rerun, *, wide: bool) -> dict[Any, object]:
            given = _given(arguments, written, wide=wide)
            with torch.set_grad_enabled(has_gradients):
                return dict(values_of(FunctionRun(function, given, [True] * len(given), state, mode)))

        def again(seed: int | None) -> Values:
            if seed is None and not is_wide:
                return widened(dict(self.eager))
            rerun = Rerun(recorded, seed, is_wide=is_wide, coarser=coarser, otherwise=otherwise)
            found = run(rerun, wide=is_wide)
            self.inexact.update(rerun.inexact)
            return found if recording is not None else {key: found[key] for key in self.eager if key in found}

        def unstable() -> Iterable[str]:
            rerun = Rerun(recorded, is_wide=is_wide, coarser=coarser, otherwise=otherwise, is_repeated=True)
            run(rerun, wide=is_wide)
            return rerun.unstable

        self.inexact: dict[str, str] = {}
        if recording is None:
            exact, eager = None, run(recorded, wide=False)
        else:
            exact = again(None)
            eager = {key: _narrowed(value, (actual or {}).get(key)) for key, value in exact.items()}
        self.draws = recorded.draws
        super().__init__(
            eager,
            lambda seed: exact if seed is None and exact is not None else again(seed),
            terms=lambda: recorded.terms,
            magnitudes=magnitudes,
            coarser=coarser,
            has_undefined=recorded.reads_memory,
            unstable=unstable,
        )


def _narrowed(reference: object, value: object) -> object:
    """A reference in the dtype of the value that is compared with it; a discrete one unchanged."""
    return reference.detach().to(value.dtype) if is_floating(reference) and is_floating(value) else reference


def _given(arguments: Sequence[object], written: Collection[int] | None, *, wide: bool) -> list[object]:
    if written is None:
        return copies(arguments, wide=wide)
    copied = dict(zip(written, copies([arguments[i] for i in written], wide=wide), strict=True))
    return [copied.get(i, value) for i, value in enumerate(arguments)]


def graph_check(
    module: fx.GraphModule,
    arguments: Sequence[object],
    state: RandomState,
    *,
    written: Sequence[int] = (),
    coarser: torch.dtype = torch.float32,
) -> FunctionCheck:
    """The check of a graph's results, sampled, by position; the arguments that it writes follow them."""

    def values_of(run: FunctionRun) -> Values:
        values = [*leaves_of(run.returned), *(run.arguments[i] for i in written)]
        return {i: _elements(value) if isinstance(value, torch.Tensor) else value for i, value in enumerate(values)}

    def run(*args: object) -> Any:
        return TolerantInterpreter(module).run(*args, enable_io_processing=False)

    with torch.no_grad():
        return FunctionCheck(run, arguments, state, written=written, coarser=coarser, values_of=values_of)


def leaves_of(results: object) -> list[object]:
    """The results of a graph as a list."""
    return list(results) if isinstance(results, (list, tuple)) else [results]


def values_check(module: fx.GraphModule, arguments: Sequence[object], state: RandomState) -> FunctionCheck:
    """The check of all values of a graph, see ``all_values``."""
    with torch.no_grad():
        return FunctionCheck(
            lambda *given: all_values(module, given), arguments, state, values_of=lambda run: run.returned
        )


def all_values(module: fx.GraphModule, arguments: Sequence[object]) -> Any:
    """The values of a graph, by the names of nodes and the position among their tensors and numbers."""
    interpreter = fx.Interpreter(module, garbage_collect_values=False)
    interpreter.run(*arguments, enable_io_processing=False)
    values = {(node.name, i): leaf for node, value in interpreter.env.items() for i, leaf in enumerate(_flat(value))}
    return pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, values)


def _flat(value: object) -> list[object]:
    return pytree.tree_leaves(value, is_leaf=lambda leaf: leaf is None)


_SAMPLE = 2**18
"""Elements of the largest tensor that is compared as a whole."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """Some elements of a large tensor, spread evenly; all of a small one."""

    like: torch.Tensor  # of the same dtype, shape and strides; on ``meta`` if the tensor is large
    elements: torch.Tensor  # one-dimensional if the tensor is large


def sampled(results: Sequence[object]) -> list[object]:
    """The results, with a ``Sample`` for each tensor."""
    return [_sample(value) if isinstance(value, torch.Tensor) else value for value in results]


def _sample(value: torch.Tensor) -> Sample:
    elements = _elements(value)
    return Sample(value if elements is value else value.to("meta"), elements)


def _elements(value: torch.Tensor) -> torch.Tensor:
    """A tensor, or a sample of its elements."""
    if value.layout is not torch.strided or value.is_nested or value.numel() <= _SAMPLE:
        return value
    step = value.numel() // _SAMPLE | 1  # odd: not the same column of each row
    positions = torch.arange(0, value.numel(), step, device=value.device)
    return value.detach()[torch.unravel_index(positions, value.shape)]


def difference_of_results(
    expected: Sequence[object], actual: Sequence[object], check: Callable[[], ResultCheck], *, layouts: bool = True
) -> str:
    """The first difference of two runs of a graph that is not rounding; empty if there is none.

    If rounding changes most elements by as much as they are, nothing can be told, and that is a difference, too.

    Args:
        expected: PyTorch's results: tensors, samples of tensors, or other objects.
        actual: the others, of the same kinds.
        check: of the graph, made if results differ by more than the rounding of one operator.
        layouts: whether the order of dimensions in memory must be the same.
    """
    if len(actual) != len(expected):
        return f"{len(actual)} results, expected {len(expected)}"
    far: dict[int, torch.Tensor] = {}
    elements = untold = 0
    for i, (ours, theirs) in enumerate(zip(sampled(actual), sampled(expected), strict=True)):
        first, second = (item.like if isinstance(item, Sample) else item for item in (ours, theirs))
        if complaint := difference_in_kind(first, second):
            return f"result {i}: {complaint}"
        if type(first) is not type(second):
            return f"result {i}: {type(first).__name__} instead of {type(second).__name__}"
        if not isinstance(ours, Sample) or not isinstance(theirs, Sample):
            continue
        if layouts and not _have_one_layout(ours.like, theirs.like):
            return f"result {i} has another memory layout"
        elements += ours.elements.numel()
        if not measure(ours.elements, theirs.elements).is_rounding:
            far[i] = ours.elements
    try:
        for i, found in check().judge_all(far) if far else ():
            if found.is_wrong:
                return f"result {i} has other values"
            untold += found.untold
    except UnstableError as error:
        return str(error)
    return "rounding changes most of its results beyond recognition" if 2 * untold > elements else ""


def _have_one_layout(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.layout == second.layout and significant_strides(first) == significant_strides(second)


def measure(value: torch.Tensor, reference: torch.Tensor, units_of_scale: float = 0.0) -> Measure:
    """How a tensor differs from a reference of its shape, in its dtype or in float64.

    Allowed are the rounding of an operator, and so many units of the largest element.
    """
    ours, right = as_array(value), as_array(reference)
    found, _ = judge(ours, right, dtype_name(value.dtype))
    if found.is_rounding or not units_of_scale or not is_floating(value):
        return found
    unit = format_of(value.dtype).computed
    return judge(ours, right, dtype_name(value.dtype), np.full(right.shape, units_of_scale * unit * found.scale))[0]
