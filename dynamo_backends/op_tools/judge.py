"""Compares the results and gradients of one call with those of the same call on a reference.

Values are compared by ``numerics.verdicts``. Where an error is larger than some units in the last place, the call is
run in float64 with every argument and every step perturbed by up to a unit in the last place. Errors of the size that
this makes are allowed: the operator is ill-conditioned.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeAlias

import torch

from ..numerics.call_execution import FLOAT64, CallExecution, Change, RunTarget
from ..numerics.exact import WIDER
from ..numerics.local_error import SUMS
from ..numerics.measure import group_size_of
from ..numerics.randomness import PERTURBATIONS, perturbed
from ..numerics.tensor_measure import measure_tensor, ordinary
from ..numerics.verdicts import RIGHT, Verdict, epsilon, is_discrete, largest, verdict
from .gradients import Gradients
from .names import is_of_pytorch, last_name
from .tool import dtype_name

_STEP = 1e-6
"""The step of a numerical derivative."""

_DIFFERENCE_ERROR = 1e-8
"""The error of a numerical derivative in float64, relative to the results."""

_DERIVATIVE_ERROR = 1e-3
"""The tolerance of a directional derivative, relative to its size: a function may have kinks."""

_INSIDE = 1e3
"""An element may contain the rounding of numbers that are this many times smaller than the largest result."""

_Values: TypeAlias = Mapping[str, torch.Tensor]
_Run: TypeAlias = Callable[[RunTarget, Change | None], _Values]
"""Runs a call again, and returns its results or gradients by name."""


@dataclasses.dataclass(frozen=True)
class ComparedValue:
    """The comparison of one result or gradient of a call with the reference."""

    value: str  # "output", "output[1]", "args[0] after it", "gradient of args[1]"
    dtype: str
    shape: tuple[int, ...]
    allclose: bool  # no element has an error above its tolerance, and shape and dtype are right
    max_diff: float  # the largest absolute error
    allowed: float | None  # the tolerance of the element with the largest share; None where elements are counted
    complaint: str = ""  # what is wrong besides the size of an error, or how many elements are not compared
    share: float = 0.0  # the largest error as a multiple of its element's tolerance


class CallJudge:
    """Compares the values of one call. It holds the call's arguments, but none of its results."""

    def __init__(self, execution: CallExecution, reference: RunTarget) -> None:
        self._execution = execution
        self._reference = reference
        self._generator = torch.Generator().manual_seed(0)  # leaves the user's random numbers alone

    def results(self, results: _Values, returned: object) -> tuple[list[ComparedValue], dict[str, torch.Tensor]]:
        """Compares the tensors that a call returned or wrote, or the number that it returned.

        Returns:
            The comparisons, and the reference's results by name.

        Raises:
            Whatever the function raises on the reference.
        """
        run = self._execution.run(self._reference)
        if not results and isinstance(returned, (bool, int, float)):
            found = verdict(returned, run.returned, run.returned)
            compared = ComparedValue("output", type(returned).__name__, (), not found.is_wrong, 0.0, None, str(found))
            return [compared], {}
        expected = {name: run.results[name] for name in results if name in run.results}
        return self._compare(results, expected, self._run_forward, torch.float64, self._sums_of_magnitudes), expected

    def gradients(self, gradients: Gradients) -> list[ComparedValue]:
        """Compares what a call added to the gradients of its arguments.

        Raises:
            ChangedSinceError: an argument was changed in place since the call.
        """
        dtypes = [value.dtype for value in gradients.outputs.values()]  # under autocast, lower than the arguments'
        run = functools.partial(self._run_backward, gradients)
        compared = self._compare(gradients.inputs, run(self._reference), run, max(dtypes, key=epsilon))
        return [dataclasses.replace(item, value=f"gradient of {item.value}") for item in compared]

    def numerical_gradient(self, gradients: Gradients) -> list[ComparedValue]:
        """Compares autograd's gradients in float64 with a numerical derivative in one random direction.

        Raises:
            ChangedSinceError: an argument was changed in place since the call.
        """
        by_autograd = {
            name: value.double().cpu()
            for name, value in self._run_backward(gradients, FLOAT64).items()
            if value.is_floating_point()
        }
        direction = {
            name: torch.randn(value.shape, dtype=torch.float64, generator=self._generator)
            for name, value in by_autograd.items()
        }
        if not by_autograd:
            return []
        steps = {alias: value * _STEP for name, value in direction.items() for alias in gradients.aliases[name]}
        ahead, here, behind = (self._moved_result(gradients, steps, sign) for sign in (1, 0, -1))
        if ahead is None or here is None or behind is None:
            return []  # float64 lacks the operator
        slopes = (ahead[0] - here[0]) / _STEP, (here[0] - behind[0]) / _STEP
        numerical = sum(slopes) / 2
        products = [value * direction[name] for name, value in by_autograd.items()]
        analytical = sum(float(item.sum()) for item in products)
        size = sum(float(item.square().sum()) for item in products) ** 0.5
        magnitude = max(terms for _, terms in (ahead, here, behind))
        allowed = _DERIVATIVE_ERROR * max(size, abs(numerical)) + _DIFFERENCE_ERROR * magnitude
        if not abs(slopes[0] - slopes[1]) <= allowed:
            return []  # no derivative here: two values are equal, or one is 0
        error = abs(analytical - numerical)
        is_right = error <= allowed
        complaint = "" if is_right else f"the derivative of its results is {numerical:.6g}, not {analytical:.6g}"
        return [ComparedValue("gradient by differences", "float64", (), is_right, error, allowed, complaint)]

    def _moved_result(self, gradients: Gradients, steps: _Values, sign: int) -> tuple[float, float] | None:
        """The dot product of the results on moved arguments with their incoming gradients, and the sum of its terms'
        magnitudes; ``None`` if float64 lacks an operator."""
        run = self._execution.run(FLOAT64, lambda name, value: value + sign * steps[name] if name in steps else value)
        products = [
            value.double().cpu() * gradients.outputs[name].double().cpu()
            for name, value in run.results.items()
            if name in gradients.outputs
        ]
        if run.is_inexact:
            return None
        return sum(float(item.sum()) for item in products), sum(float(item.abs().sum()) for item in products)

    def _run_forward(self, target: RunTarget, change: Change | None = None) -> _Values:
        return self._execution.run(target, change).results

    def _sums_of_magnitudes(self) -> _Values:
        """The results on the magnitudes of the arguments, if the call adds products of its arguments."""
        adds = last_name(self._execution.function) in SUMS
        return self._run_forward(FLOAT64, lambda _, value: value.abs()) if adds else {}

    def _run_backward(self, gradients: Gradients, target: RunTarget, change: Change | None = None) -> _Values:
        """The gradients of the call run again. ``change`` applies to the incoming gradients, too."""
        incoming = gradients.outputs
        if change is not None:
            incoming = {name: change(name, value.double()) for name, value in incoming.items()}
        found = self._execution.run(target, change, with_gradients=True).gradients(incoming)
        by_name = {}
        for name, aliases in gradients.aliases.items():  # an argument passed twice has two parts
            parts = [found[alias] for alias in aliases if alias in found]
            if parts:
                by_name[name] = sum(parts[1:], parts[0])
        return by_name

    def _compare(
        self,
        actual: _Values,
        expected: _Values,
        run: _Run,
        computed_in: torch.dtype,
        sums_of_magnitudes: Callable[[], _Values] = dict,
    ) -> list[ComparedValue]:
        """Compares values of the same names, which may have been rounded to ``computed_in``."""
        sums_of_magnitudes = functools.cache(sums_of_magnitudes)
        unset = self._unset(actual, expected, run)
        largest_result = largest(_without_unset(unset, expected).values())

        @functools.cache
        def perturbed_runs(dtype: torch.dtype) -> Sequence[_Values]:
            """Float64's values, and those with arguments and all steps perturbed by the rounding of a dtype."""
            target = dataclasses.replace(FLOAT64, perturbing=dtype)
            found = [run(FLOAT64, None), *(run(target, self._perturb(dtype)) for _ in range(PERTURBATIONS))]
            return [_without_unset(unset, values) for values in found]

        def verdict_on(name: str, value: torch.Tensor, reference: torch.Tensor) -> Verdict:
            if is_discrete(value):
                return self._discrete_verdict(name, value, reference, run)
            wide = value.to(reference.dtype) if value.shape == reference.shape else value
            inner_size = self._magnitudes(reference) + largest_result / _INSIDE
            found = verdict(wide, reference, reference, inner_size=inner_size, rounded_to=value.dtype)
            size = sums_of_magnitudes().get(name) if found.is_wrong and found.ours is not None else None
            if size is not None and name not in unset and size.shape == reference.shape:
                inner_size = torch.maximum(inner_size, size.detach().abs().double().cpu())
                found = verdict(wide, reference, reference, inner_size=inner_size, rounded_to=value.dtype)
            if found.ours is None or not found.is_wrong or found.ours.nonfinite:
                return found
            coarser = max((value.dtype, computed_in, self._execution.coarsest), key=epsilon)
            base, *others = perturbed_runs(coarser)
            # around the reference's value, which need not be float64's
            near = [reference + (item[name] - base[name]).cpu() for item in others if name in item]
            group_size = group_size_of(reference.shape)
            return verdict(
                wide, reference, reference, near, group_size=group_size, inner_size=inner_size, rounded_to=coarser
            )

        def compare(name: str, value: torch.Tensor, reference: torch.Tensor) -> ComparedValue:
            shape, is_comparable = tuple(value.shape), value.shape == reference.shape
            # some functions choose their own dtype, also in float64
            known = (WIDER.get(value.dtype, value.dtype) if self._reference.wide else value.dtype, value.dtype)
            complaint = "" if reference.dtype in known else f"Inconsistent dtypes: {value.dtype} {reference.dtype}"
            if is_comparable:
                value, reference = (_without_unset(unset, {name: item})[name] for item in (value, reference))
            value, reference = value.detach().cpu(), reference.detach().cpu()
            found = verdict_on(name, value, reference)
            error = found.ours
            complaint = complaint or found.complaint or (str(found) if error and error.nonfinite else "")
            allclose = not found.is_wrong and not complaint
            if name in unset and not complaint:
                complaint = f"{int(unset[name].sum())} elements that the operator leaves unset are not compared"
            compared = ComparedValue(name, dtype_name(value.dtype), shape, allclose, math.inf, None, complaint)
            if error is None:  # equal, integers, or of another shape
                max_diff = measure_tensor(value, reference).max_abs if is_comparable else math.inf
                return dataclasses.replace(compared, max_diff=max_diff)
            share = error.share if allclose or error.share > 1 else math.inf
            return dataclasses.replace(compared, max_diff=error.max_abs, allowed=error.limit or None, share=share)

        return [compare(name, value, expected[name]) for name, value in actual.items() if name in expected]

    def _magnitudes(self, expected: torch.Tensor) -> torch.Tensor:
        """For each element of a result, the magnitude of the numbers that may be added up for it: elements of arguments
        that are broadcast to it, and ordinary elements of the result."""
        size = torch.full(expected.shape, ordinary(expected), dtype=torch.float64)
        for item in self._execution.tensors:
            if item.is_floating_point():
                wide = item.detach().abs().double().cpu().nan_to_num(0.0, 0.0, 0.0)
                with contextlib.suppress(RuntimeError):  # it is not broadcast
                    size = torch.maximum(size, wide.expand(expected.shape))
        return size

    def _unset(self, actual: _Values, expected: _Values, run: _Run) -> _Values:
        """Finds elements that an operator of PyTorch leaves unset, as ``aten._ctc_loss`` does past a shorter target.

        Where a result looks wrong, the call is run again with NaN in all newly allocated memory.

        Returns:
            Masks, ``True`` at unset elements, by the names of the results that have such elements.
        """
        pairs = {
            name: (value.detach(), expected[name].detach())
            for name, value in actual.items()
            if not is_discrete(value) and name in expected and expected[name].shape == value.shape
        }
        if not is_of_pytorch(self._execution.function) or all(
            measure_tensor(value.cpu(), reference.cpu()).is_rounding for value, reference in pairs.values()
        ):
            return {}
        with _nan_in_new_memory():
            filled = run(RunTarget(), None)
            filled_reference = run(self._reference, None) if self._reference.function is None else {}
        unset = {}
        for name, (value, _) in pairs.items():
            is_nan = filled[name].isnan() if name in filled else torch.zeros_like(value, dtype=torch.bool)
            # NaN in every run is a value, or memory that happened to be NaN
            was_set = ~value.isnan()
            if name in filled_reference:
                was_set |= filled_reference[name].to(value.device).isnan()
            if bool((is_nan & was_set).any()):
                unset[name] = is_nan & was_set
        return unset

    def _discrete_verdict(self, name: str, value: torch.Tensor, reference: torch.Tensor, run: _Run) -> Verdict:
        """The verdict on a result of integers or booleans.

        Float64 repeats the comparisons of the call, so its result must be equal. Where float64 decides by itself, or on
        another reference, elements may differ that are near a tie: perturbed arguments change them, too.
        """

        def verdict_on(item: torch.Tensor, expected: torch.Tensor, others: Sequence[torch.Tensor] = ()) -> Verdict:
            item, expected, *others = (each.cpu().to(value.dtype) for each in (item, expected, *others))
            return verdict(item, expected, expected, others)

        is_wide, coarsest = self._reference.wide, self._execution.coarsest
        found = verdict_on(value, reference)
        is_settled = found.is_wrong if is_wide else not (found.is_wrong and found.is_of_size)
        if is_settled or coarsest is torch.float64 or self._execution.recording.draws:
            return found
        deciding = dataclasses.replace(FLOAT64, decides=True)
        decided = run(deciding, None).get(name)
        if decided is None:
            return found
        compared = [value] if is_wide else [value, reference]
        if all(not verdict_on(item, decided).is_wrong for item in compared):
            return RIGHT
        runs = [run(deciding, self._perturb(coarsest)) for _ in range(PERTURBATIONS)]
        others = [values[name] for values in runs if name in values]
        verdicts = [verdict_on(item, decided, others) for item in compared]
        return next((item for item in verdicts if item.is_wrong), RIGHT)

    def _perturb(self, dtype: torch.dtype) -> Change:
        """Perturbs an argument by up to a unit in the last place of a dtype."""

        return lambda _, value: perturbed(value, self._generator, dtype=dtype).to(value.dtype)


def _without_unset(unset: _Values, values: _Values) -> _Values:
    return {name: value[~unset[name].to(value.device)] if name in unset else value for name, value in values.items()}


@contextlib.contextmanager
def _nan_in_new_memory() -> Iterator[None]:
    """PyTorch fills all memory that it allocates, inside operators too: a part of its deterministic mode."""
    mode, fills = torch.get_deterministic_debug_mode(), torch.utils.deterministic.fill_uninitialized_memory
    with warnings.catch_warnings(action="ignore"):  # nondeterministic operators warn
        try:
            torch.set_deterministic_debug_mode("warn")
            torch.utils.deterministic.fill_uninitialized_memory = True
            yield
        finally:
            torch.set_deterministic_debug_mode(mode)
            torch.utils.deterministic.fill_uninitialized_memory = fills
