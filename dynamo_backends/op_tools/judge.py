"""Judges the results and gradients of one call by those of the call made again."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

import torch

from ..numerics.call_execution import FLOAT64, CallExecution, Change, Target
from ..numerics.distance import distance, ordinary
from ..numerics.exact import WIDER
from ..numerics.local_error import is_broadcast
from ..numerics.measure import group_size_of
from ..numerics.randomness import PERTURBATIONS, perturbed
from ..numerics.verdicts import epsilon, is_discrete, largest, same_number
from .gradients import Gradients
from .names import is_of_pytorch
from .tool import dtype_name

_STEP = 1e-6
_DIFFERENCES = 1e-8
"""How far arguments are moved for a derivative by differences, and its error in float64 relative to the results."""

_TIES = 0.01
"""The share of comparisons and indices that may come out otherwise in float64, where two values are equal."""

_BESIDE = 1e3
"""By how much larger than a result what is computed with it may be, and its rounding be in the result."""

_NUMERICAL = 1e-3
"""The relative error of a directional derivative that needs no explanation: the function may have kinks."""

_Values: TypeAlias = Mapping[str, torch.Tensor]
_Run: TypeAlias = Callable[[Target, Change | None], _Values]
"""Makes a call again, and returns its results or gradients by name."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """How one result, or one gradient, of a call compares with the reference.

    Attributes:
        value: ``output``, ``output[1]``, ``args[0] after it``, ``gradient of args[1]``.
        dtype, shape: of it.
        allclose: whether it is as near to the reference as its dtype and the condition of the operator allow.
        max_diff: largest absolute difference.
        allowed: what needs no explanation at the element that is worst for it; ``None`` where elements are counted.
        complaint: ``Inconsistent dtypes: ...``, another shape, elements that differ, NaN; elements that were not
            compared; or ``""``.
        share: the largest error as a multiple of what is allowed at that element.
    """

    value: str
    dtype: str
    shape: tuple[int, ...]
    allclose: bool
    max_diff: float
    allowed: float | None
    complaint: str = ""
    share: float = 0.0


class CallJudge:
    """Judges one call. It holds the arguments of the call, and none of its results.

    A result is right if it is as near to the reference as rounding explains: that of the result itself, or, where an
    operator is ill-conditioned, that of its arguments and of every step inside. How much the latter may be is tried:
    the call is made again in float64 with each of them perturbed by up to a unit in the last place.

    Args:
        execution: makes the call again.
        reference: by which it is judged.
    """

    def __init__(self, execution: CallExecution, reference: Target) -> None:
        self._execution = execution
        self._reference = reference
        self._generator = torch.Generator().manual_seed(0)  # the user's random numbers are theirs

    def results(self, results: _Values, returned: object) -> tuple[list[Verdict], dict[str, torch.Tensor]]:
        """Verdicts on what a call gave, and the reference's results by name.

        Args:
            results: the tensors, by name.
            returned: what it returned, which may be a number.

        Raises:
            Whatever the function raises on the reference.
        """
        run = self._execution.run(self._reference)
        if not results and isinstance(returned, (bool, int, float)):
            return [_of_number(returned, run.returned)], {}
        exact = {name: run.results[name] for name in results if name in run.results}
        verdicts = self._verdicts(
            results, exact, lambda target, change: self._execution.run(target, change).results, torch.float64
        )
        return verdicts, exact

    def gradients(self, gradients: Gradients) -> list[Verdict]:
        """Verdicts on what a call added to the gradients of its arguments.

        Raises:
            ChangedSinceError: they were changed in place since the call.
        """
        dtypes = [value.dtype for value in gradients.outputs.values()]  # under autocast, lower than the arguments'
        run = functools.partial(self._gradients, gradients)
        found = self._verdicts(gradients.inputs, run(self._reference), run, max(dtypes, key=epsilon))
        return [dataclasses.replace(verdict, value=f"gradient of {verdict.value}") for verdict in found]

    def numerical_gradient(self, gradients: Gradients) -> list[Verdict]:
        """A verdict on the formula of the derivative: float64's gradients by autograd, all together, against the
        derivative of the results in a random direction, by differences.

        Raises:
            ChangedSinceError: the arguments were changed in place since the call.
        """
        exact = {
            name: value.double().cpu()
            for name, value in self._gradients(gradients, FLOAT64).items()
            if value.is_floating_point()
        }
        directions = {
            name: torch.randn(value.shape, dtype=torch.float64, generator=self._generator)
            for name, value in exact.items()
        }
        if not exact:
            return []
        steps = {alike: value * _STEP for name, value in directions.items() for alike in gradients.alike[name]}
        ahead, here, behind = (self._along(gradients, steps, sign) for sign in (1, 0, -1))
        if ahead is None or here is None or behind is None:
            return []  # float64 has not the operator
        slopes = (ahead[0] - here[0]) / _STEP, (here[0] - behind[0]) / _STEP
        by_differences = sum(slopes) / 2
        products = [value * directions[name] for name, value in exact.items()]
        by_gradients = sum(float(item.sum()) for item in products)
        size = sum(float(item.square().sum()) for item in products) ** 0.5
        magnitude = max(terms for _, terms in (ahead, here, behind))
        allowed = _NUMERICAL * max(size, abs(by_differences)) + _DIFFERENCES * magnitude
        if not abs(slopes[0] - slopes[1]) <= allowed:
            return []  # it has no derivative here: two values are equal, or one is 0
        error = abs(by_gradients - by_differences)
        complaint = ""
        if not error <= allowed:
            complaint = f"the derivative of its results is {by_differences:.6g}, not {by_gradients:.6g}"
        return [Verdict("gradient by differences", "float64", (), not complaint, error, allowed, complaint)]

    def _along(self, gradients: Gradients, steps: _Values, sign: int) -> tuple[float, float] | None:
        """The product of the results, where arguments are moved, with the gradients that came in; its terms' size."""
        run = self._execution.run(FLOAT64, lambda name, value: value + sign * steps[name] if name in steps else value)
        products = [
            value.double().cpu() * gradients.outputs[name].double().cpu()
            for name, value in run.results.items()
            if name in gradients.outputs
        ]
        if run.is_inexact:
            return None
        return sum(float(item.sum()) for item in products), sum(float(item.abs().sum()) for item in products)

    def _gradients(self, gradients: Gradients, target: Target, change: Change | None = None) -> _Values:
        """The gradients of the call made again; where arguments change, the gradients that come in do too."""
        tangents = gradients.outputs
        if change is not None:
            tangents = {name: change(name, value.double()) for name, value in tangents.items()}
        found = self._execution.run(target, change, with_gradients=True).gradients(tangents)
        by_name = {}
        for name, alike in gradients.alike.items():  # of an argument that was given twice, both parts
            parts = [found[other] for other in alike if other in found]
            if parts:
                by_name[name] = sum(parts[1:], parts[0])
        return by_name

    def _verdicts(self, ours: _Values, exact: _Values, run: _Run, computed_in: torch.dtype) -> list[Verdict]:
        """Judges values by those of the same name.

        Args:
            ours: what the call gave.
            exact: what the reference gave.
            run: makes the call again.
            computed_in: a dtype whose rounding the values may have.
        """
        unset = self._unset(ours, exact, run)
        beside = largest(_where_set(unset, exact).values())

        @functools.cache
        def perturbed_runs(dtype: torch.dtype) -> Sequence[_Values]:
            """Float64's values; and these where the arguments, and all inside, are perturbed by their rounding."""
            target = dataclasses.replace(FLOAT64, perturbing=dtype)
            found = [run(FLOAT64, None), *(run(target, self._perturb(dtype)) for _ in range(PERTURBATIONS))]
            return [_where_set(unset, values) for values in found]

        def verdict(name: str, value: torch.Tensor, exact: torch.Tensor) -> Verdict:
            judged = functools.partial(Verdict, name, dtype_name(value.dtype), tuple(value.shape))
            if exact.shape != value.shape:
                said = f"shape {tuple(value.shape)} instead of {tuple(exact.shape)}"
                return judged(False, math.inf, None, said)
            expected = WIDER.get(value.dtype, value.dtype) if self._reference.wide else value.dtype
            is_same = exact.dtype in (expected, value.dtype)  # some functions have a dtype of their own in float64 too
            complaint = "" if is_same else f"Inconsistent dtypes: {value.dtype} {exact.dtype}"
            value, exact = (_where_set(unset, {name: item})[name].detach().cpu() for item in (value, exact))
            if is_discrete(value):
                error = distance(value, exact)
                complaint = complaint or self._discrete_difference(name, value, exact, run)
                return judged(not complaint, error.max_abs, None, complaint)
            coarser = max((value.dtype, computed_in, self._execution.coarsest), key=epsilon)
            inner = self._magnitudes(exact) + beside / _BESIDE
            error = distance(value, exact, inner_size=inner)
            if error.nonfinite:
                complaint = complaint or f"{error.nonfinite} elements are NaN or infinite on one side only"
            elif not error.is_rounding:
                base, *near = perturbed_runs(coarser)
                # around what it is compared with, which need not be float64
                around = [exact + (item[name] - base[name]).cpu() for item in near if name in item]
                error = distance(
                    value, exact, *around, inner_size=inner, group_size=group_size_of(exact.shape), dtype=coarser
                )
            is_right = error.is_rounding and not complaint
            allowed = error.limit if error.limit else None
            if name in unset:
                complaint = (
                    complaint or f"{int(unset[name].sum())} elements are not compared: the operator sets no value"
                )
            return judged(
                is_right, error.max_abs, allowed, complaint, error.share if is_right or error.share > 1 else math.inf
            )

        return [verdict(name, value, exact[name]) for name, value in ours.items() if name in exact]

    def _magnitudes(self, exact: torch.Tensor) -> torch.Tensor:
        """For each element of a result, the magnitude of numbers inside of its computation: of the elements of the
        arguments that are broadcast to it, and of the result's ordinary elements."""
        size = torch.full(exact.shape, ordinary(exact), dtype=torch.float64)
        for item in self._execution.tensors:
            if item.is_floating_point() and is_broadcast(item.shape, exact.shape):
                size = torch.maximum(
                    size, item.detach().abs().double().cpu().nan_to_num(0.0, 0.0, 0.0).expand(exact.shape)
                )
        return size

    def _unset(self, ours: _Values, exact: _Values, run: _Run) -> _Values:
        """Where an operator of PyTorch leaves elements of a result as the memory was, as ``aten._ctc_loss`` does behind
        the end of a shorter target: where a result is wrong, the call is made again with NaN in all new memory.

        Args:
            ours, exact, run: as of ``_verdicts``.

        Returns:
            By the names of results that have such elements, ``True`` at these.
        """
        pairs = {
            name: (value.detach(), exact[name].detach())
            for name, value in ours.items()
            if not is_discrete(value) and name in exact and exact[name].shape == value.shape
        }
        if not is_of_pytorch(self._execution.function) or all(
            distance(value.cpu(), other.cpu()).is_rounding for value, other in pairs.values()
        ):
            return {}
        with _nan_in_new_memory():
            again = run(Target(), None)
            reference = run(self._reference, None) if self._reference.function is None else {}
        unset = {}
        for name, (value, _) in pairs.items():
            is_nan = again[name].isnan() if name in again else torch.zeros_like(value, dtype=torch.bool)
            # What is NaN in every run is one, or memory that was NaN by chance
            is_other = ~value.isnan() | (reference[name].to(value.device).isnan() if name in reference else False)
            if bool((is_nan & is_other).any()):
                unset[name] = is_nan & is_other
        return unset

    def _discrete_difference(self, name: str, value: torch.Tensor, exact: torch.Tensor, run: _Run) -> str:
        """How many elements of a result of integers or booleans are wrong, in words; ``""`` if few enough.

        In float64, that of the call's own decisions is compared exactly; then float64 decides, and where it decides
        otherwise on arguments that are perturbed by their rounding, two values may be equal, or nearly so.
        """
        if not self._reference.wide:
            is_rounded = any(item.is_floating_point() for item in self._execution.tensors)
            return _turned(value, exact, _TIES if is_rounded else 0.0)
        difference = _turned(value, exact, share=0)
        is_rounded = self._execution.coarsest is not torch.float64
        if difference or self._execution.recording.draws or not is_rounded:
            return difference
        deciding = dataclasses.replace(FLOAT64, decides=True)
        decided = run(deciding, None).get(name)
        if decided is None or not (difference := _turned(value, decided.cpu())):
            return ""
        others = (run(deciding, self._perturb(self._execution.coarsest)).get(name) for _ in range(PERTURBATIONS))
        is_tie = any(other is not None and _turned(decided, other) for other in others)
        return "" if is_tie else difference

    def _perturb(self, dtype: torch.dtype) -> Change:
        """Perturbs an argument by up to a unit in the last place of a dtype."""

        return lambda _, value: perturbed(value, self._generator, dtype=dtype).to(value.dtype)


def _where_set(unset: _Values, values: _Values) -> _Values:
    """The values without the elements that are unset, see ``CallJudge._unset``."""
    return {name: value[~unset[name].to(value.device)] if name in unset else value for name, value in values.items()}


@contextlib.contextmanager
def _nan_in_new_memory() -> Iterator[None]:
    """PyTorch fills what it allocates, also inside of operators: a part of its deterministic mode."""
    mode, fills = torch.get_deterministic_debug_mode(), torch.utils.deterministic.fill_uninitialized_memory
    with warnings.catch_warnings(action="ignore"):  # of operators that are not deterministic
        try:
            torch.set_deterministic_debug_mode("warn")
            torch.utils.deterministic.fill_uninitialized_memory = True
            yield
        finally:
            torch.set_deterministic_debug_mode(mode)
            torch.utils.deterministic.fill_uninitialized_memory = fills


def _of_number(value: float, exact: object) -> Verdict:
    """The verdict on a result that is a number."""
    is_same = same_number(value, exact)
    if isinstance(value, float) and isinstance(exact, (int, float)):
        is_same = is_same or math.isclose(value, exact, rel_tol=1e-5)
    complaint = "" if is_same else f"{exact} on the reference, not {value}"
    return Verdict("output", type(value).__name__, (), is_same, 0.0, None, complaint)


def _turned(value: torch.Tensor, other: torch.Tensor, share: float = _TIES) -> str:
    """In words, how many elements of two discrete results differ; ``""`` if no more than ``share`` of them."""
    differing = int((value != other).sum())
    return f"{differing} of {value.numel()} elements differ" if differing > share * value.numel() else ""
