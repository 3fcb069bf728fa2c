"""Compares the results and gradients of one call with those of the same call on a reference.

Values are judged by the rule of ``numerics.whole_graph``, with the reference in place of eager and float64. Where an
error is larger than some units in the last place, the call is run in float64 with the arguments of each operator
perturbed by a rounding. Errors in proportion to what this changes are allowed: the operator is ill-conditioned.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import TypeAlias

import torch

from ..numerics import operator_facts as facts
from ..numerics.arrays import same_number
from ..numerics.exact import WIDER, is_floating, widen
from ..numerics.rule import Measure
from ..numerics.whole_graph import ResultCheck, measure
from .call_execution import FLOAT64, CallExecution, Change, RunTarget
from .gradients import Gradients
from .names import is_of_pytorch
from .tool import dtype_name

_STEP = 1e-6
"""The step of a numerical derivative."""

_DIFFERENCE_ERROR = 1e-8
"""The error of a numerical derivative in float64, relative to the results."""

_DERIVATIVE_ERROR = 1e-3
"""The tolerance of a directional derivative, relative to its size: a function may have kinks."""

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
            same = same_number(returned, run.returned)
            complaint = "" if same else f"{returned} instead of {run.returned}"
            compared = ComparedValue("output", type(returned).__name__, (), same, 0.0, None, complaint)
            return [compared], {}
        expected = {name: run.results[name] for name in results if name in run.results}
        return self._compare(results, expected, self._run_forward), expected

    def gradients(self, gradients: Gradients) -> list[ComparedValue]:
        """Compares what a call added to the gradients of its arguments.

        Raises:
            ChangedSinceError: an argument was changed in place since the call.
        """
        run = functools.partial(self._run_backward, gradients)
        compared = self._compare(gradients.inputs, run(self._reference), run, gradients.outputs)
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

    def _magnitudes(self) -> _Values:
        """For each element, the sum of the magnitudes of its terms, if the call only adds up products of its
        arguments."""
        if not all(map(facts.adds_up, self._execution.recording.calls)):
            return {}
        return self._run_forward(FLOAT64, lambda _, value: value.abs())

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
        self, actual: _Values, expected: _Values, run: _Run, incoming: _Values = MappingProxyType({})
    ) -> list[ComparedValue]:
        """Compares values of the same names."""
        unset = self._unset(actual, expected, run)
        is_wide = self._reference.wide
        names = {name: _without_unset(unset, name, value) for name, value in expected.items()}
        check = ResultCheck(
            {name: _narrowed(value, actual[name]) if name in actual else value for name, value in names.items()},
            lambda seed: self._values(run, seed, unset, names, incoming),
            terms=lambda: self._execution.recording.terms,
            magnitudes=self._magnitudes if run == self._run_forward else None,
        )

        def compare(name: str, value: torch.Tensor, reference: torch.Tensor) -> ComparedValue:
            shape, is_comparable = tuple(value.shape), value.shape == reference.shape
            # some functions choose their own dtype, also in float64
            known = (WIDER.get(value.dtype, value.dtype) if is_wide else value.dtype, value.dtype)
            complaint = "" if reference.dtype in known else f"Inconsistent dtypes: {value.dtype} {reference.dtype}"
            value = _without_unset(unset, name, value) if is_comparable else value.detach().cpu()
            found = check.judge(name, value)
            error = found.ours or Measure()
            complaint = complaint or found.complaint or (str(found) if error.nonfinite else "")
            allclose = not found.is_wrong and not complaint
            if name in unset and not complaint:
                complaint = f"{int(unset[name].sum())} elements that the operator leaves unset are not compared"
            compared = ComparedValue(name, dtype_name(value.dtype), shape, allclose, math.inf, None, complaint)
            if not is_comparable or not is_floating(value):
                max_diff = measure(value, reference.cpu().to(value.dtype)).max_abs if is_comparable else math.inf
                return dataclasses.replace(compared, max_diff=max_diff)
            share = error.share if allclose or error.share > 1 else math.inf
            return dataclasses.replace(compared, max_diff=error.max_abs, allowed=error.limit or None, share=share)

        return [compare(name, value, expected[name]) for name, value in actual.items() if name in expected]

    def _values(self, run: _Run, seed: int | None, unset: _Values, expected: _Values, incoming: _Values) -> _Values:
        """The reference's values; with a seed, those that a perturbed run in float64 moves them to."""
        if seed is None:
            return {name: widen(value) for name, value in expected.items()}
        dtypes = [item.dtype for item in incoming.values()]  # under autocast, lower than the arguments'
        coarsest = max([self._execution.coarsest, *dtypes], key=lambda dtype: torch.finfo(dtype).eps)
        found = run(dataclasses.replace(FLOAT64, seed=seed, rounding=coarsest), None)
        found = {name: _without_unset(unset, name, value) for name, value in found.items()}
        if self._reference.wide:
            return found
        base = self._float64(run, unset)  # around the reference's value, which need not be float64's
        return {
            name: widen(expected[name]) + (value - base[name]) if is_floating(value) else value
            for name, value in found.items()
            if name in base and name in expected and value.shape == expected[name].shape
        }

    def _float64(self, run: _Run, unset: _Values) -> _Values:
        return {name: _without_unset(unset, name, value) for name, value in run(FLOAT64, None).items()}

    def _unset(self, actual: _Values, expected: _Values, run: _Run) -> _Values:
        """Finds elements that an operator of PyTorch leaves unset, as ``aten._ctc_loss`` does past a shorter target.

        Where a result looks wrong, the call is run again with NaN in all newly allocated memory.

        Returns:
            Masks, ``True`` at unset elements, by the names of the results that have such elements.
        """
        pairs = {
            name: (value.detach(), expected[name].detach())
            for name, value in actual.items()
            if is_floating(value) and name in expected and expected[name].shape == value.shape
        }
        if not is_of_pytorch(self._execution.function) or all(
            measure(value.cpu(), reference.cpu()).is_rounding for value, reference in pairs.values()
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


def _narrowed(reference: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """A reference in the dtype of the value that it is compared with; a discrete one unchanged."""
    return reference.to(value.dtype) if is_floating(reference) and is_floating(value) else reference


def _without_unset(unset: _Values, name: str, value: torch.Tensor) -> torch.Tensor:
    """The elements that the operator sets."""
    value = value.detach()
    return (value[~unset[name].to(value.device)] if name in unset else value).cpu()


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
