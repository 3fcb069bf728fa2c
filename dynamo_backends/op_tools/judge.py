"""Compares the results and gradients of one call with float64, or with those on another runtime.

``numerics.whole_graph`` judges. Where another runtime has other values than PyTorch by more than rounding, float64
decides, and both must be right.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from ..numerics.arrays import same_number
from ..numerics.function_runs import FunctionRun
from ..numerics.rule import Measure
from ..numerics.verdicts import Verdict, difference_in_kind
from ..numerics.whole_graph import FunctionCheck, measure
from .call_execution import CallExecution, Tensors, ValuesOf
from .gradients import Gradients
from .tool import dtype_name


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison:
    """The comparison of one result or gradient of a call with the reference."""

    value: str  # "output", "output[1]", "args[0] after it", "gradient of args[1]"
    dtype: str
    shape: tuple[int, ...]
    allclose: bool  # no element has an error above its tolerance, and shape and dtype are right
    max_diff: float  # the largest absolute error
    allowed: float | None  # the tolerance of the element with the largest share; None where elements are counted
    complaint: str = ""  # what is wrong besides the size of an error
    share: float = 0.0  # the largest error as a multiple of its element's tolerance
    name: str = ""  # of the operator
    number: int = 0  # of the call, counted for each operator
    call: str = ""  # the operator and its arguments, as text
    source: str = ""  # see ``Place.source``
    module: str = ""  # see ``Place.module``

    def __str__(self) -> str:
        which = "" if self.value == "output" else f" {self.value}"
        complaint = f"  {self.complaint}" if self.complaint else ""
        return (
            f"OpAutoCompare: {self.name + which:60} allclose: {str(self.allclose):5} "
            f"max_diff: {self.max_diff:12.9f}{complaint}"
        )


Elsewhere: TypeAlias = Callable[[], FunctionRun] | None
"""Runs a call on another runtime; ``None`` to compare with float64."""


def compare_results(
    execution: CallExecution, results: Tensors, returned: object, elsewhere: Elsewhere = None
) -> tuple[list[Comparison], Tensors]:
    """Compares the tensors that a call returned or wrote, or the number that it returned.

    Returns:
        The comparisons, and the reference's results.

    Raises:
        Whatever the function raises on the reference.
    """
    if results or not isinstance(returned, (bool, int, float)):
        return _compare(execution, results, execution.results, elsewhere)
    run = elsewhere() if elsewhere is not None else execution.run_wide()
    expected, _ = run.returned
    same = same_number(returned, expected)
    compared = Comparison(
        value="output",
        dtype=type(returned).__name__,
        shape=(),
        allclose=same,
        max_diff=0.0,
        allowed=None,
        complaint="" if same else f"{returned} instead of {expected}",
    )
    return [compared], {}


def compare_gradients(execution: CallExecution, gradients: Gradients, elsewhere: Elsewhere = None) -> list[Comparison]:
    """Compares what a call added to the gradients of its arguments.

    Raises:
        ChangedSinceError: an argument was changed in place since the call.
        Whatever the function or its backward raises on the reference.
    """
    values_of = functools.partial(execution.gradients, tangents=gradients.outputs)
    dtypes = [tangent.dtype for tangent in gradients.outputs.values()]  # under autocast, lower than the arguments'
    with torch.enable_grad():
        found, _ = _compare(execution, gradients.inputs, values_of, elsewhere, dtypes)
    return [dataclasses.replace(item, value=f"gradient of {item.value}") for item in found]


def compare_derivatives(
    execution: CallExecution, gradients: Gradients, generator: torch.Generator
) -> tuple[list[Comparison], list[str]]:
    """Compares derivatives by autograd in float64 with derivatives by differences.

    Returns:
        The comparisons, and the arguments for which there is no derivative.

    Raises:
        NoDerivativeError, ChangedSinceError: see ``CallExecution.derivatives``.
    """
    compared, undefined = [], []
    for name, found in execution.derivatives(gradients.outputs, generator).items():
        if not found.exists:
            undefined.append(name)
            continue
        error = abs(found.by_autograd - found.by_differences)
        is_right = error <= found.allowed
        complaint = f"the derivative of its results is {found.by_differences:.6g}, not {found.by_autograd:.6g}"
        compared.append(
            Comparison(
                value=f"gradient of {name} by differences",
                dtype="float64",
                shape=(),
                allclose=is_right,
                max_diff=error,
                allowed=found.allowed,
                complaint="" if is_right else complaint,
                share=error / found.allowed if found.allowed else 0.0,
            )
        )
    return compared, undefined


def _compare(
    execution: CallExecution,
    actual: Tensors,
    values_of: ValuesOf,
    elsewhere: Elsewhere,
    dtypes: Sequence[torch.dtype] = (),
) -> tuple[list[Comparison], Tensors]:
    """Compares values of a call; returns the comparisons, and what they were compared with."""
    check = functools.cache(lambda: execution.check(actual, values_of, dtypes))
    expected = values_of(elsewhere()) if elsewhere is not None else _tensors(check())
    comparisons = []
    for name, value in actual.items():
        if name not in expected:
            continue
        value, reference = value.detach(), expected[name].detach().to(value.device)
        found = Verdict(difference_in_kind(value, reference))
        if elsewhere is None:
            found = check().judge(name, value)
        elif not found.is_wrong:
            found = Verdict(ours=measure(value, reference))
            if found.is_wrong:
                verdicts = [check().judge(name, item) for item in (value, reference)]
                found = next((item for item in verdicts if item.is_wrong), verdicts[0])
        comparisons.append(_comparison(name, value, reference, found))
    return comparisons, expected


def _tensors(check: FunctionCheck) -> dict[str, torch.Tensor]:
    return {str(name): value for name, value in check.exact.items() if isinstance(value, torch.Tensor)}


def _comparison(name: str, value: torch.Tensor, reference: torch.Tensor, found: Verdict) -> Comparison:
    error = found.ours or Measure()
    max_abs = error.max_abs
    if found.is_wrong and found.ours is None:
        max_abs = measure(value, reference).max_abs if value.shape == reference.shape else math.inf
    return Comparison(
        value=name,
        dtype=dtype_name(value.dtype),
        shape=tuple(value.shape),
        allclose=not found.is_wrong,
        max_diff=max_abs,
        allowed=error.limit or None,
        complaint=found.complaint or (str(found) if error.nonfinite else ""),
        share=math.inf if found.complaint else error.share,
    )
