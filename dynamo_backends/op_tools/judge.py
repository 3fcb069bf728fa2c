"""Compares the results and gradients of one call with float64. ``numerics.whole_graph`` judges.

Where values of another runtime are there, too, both must be right.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence

import torch

from ..numerics.function_runs import Rerun
from ..numerics.verdicts import Verdict
from .call import CallText
from .call_execution import CallExecution, Values, ValuesOf
from .gradients import Gradients

_STEP = 1e-6
_DERIVATIVE_ERROR = 1e-3
"""The step of a numerical derivative, and its tolerance relative to its size, as in ``torch.autograd.gradcheck``."""

_DIFFERENCE_ERROR = 1e-8
"""The error of a numerical derivative in float64, relative to the results."""


class NoDerivativeError(RuntimeError):
    """There is no derivative by differences in float64."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison(CallText):
    """The comparison of one result or gradient of a call with the reference."""

    value: str  # "output", "output[1]", "args[0] after it", "gradient of args[1]"
    allclose: bool  # no element has an error above its tolerance, and shape and dtype are right
    max_diff: float  # the largest absolute error
    allowed: float | None  # the tolerance of the element with the largest share; None where elements are counted
    complaint: str = ""  # what is wrong besides the size of an error
    share: float = 0.0  # the largest error as a multiple of its element's tolerance

    def __str__(self) -> str:
        which = "" if self.value == "output" else f" {self.value}"
        complaint = f"  {self.complaint}" if self.complaint else ""
        return (
            f"OpAutoCompare: {self.name + which:60} allclose: {str(self.allclose):5} "
            f"max_diff: {self.max_diff:12.9f}{complaint}"
        )


def compare_values(
    execution: CallExecution,
    actual: Values,
    values_of: ValuesOf | None = None,
    others: Values | None = None,
    dtypes: Sequence[torch.dtype] = (),
) -> tuple[list[Comparison], Values]:
    """Compares values of a call, by default its results, with float64.

    Args:
        execution, actual, values_of, dtypes: see ``CallExecution.check``.
        others: the same values on another runtime, which must be right, too.

    Returns:
        The comparisons, and the reference's values: ``others``, if there are any.

    Raises:
        Whatever the function raises in float64.
    """
    check = execution.check(actual, values_of or execution.results, dtypes)
    reference: Values = check.exact if others is None else others
    comparisons = []
    for name, value in actual.items():
        if name in check.exact and name in reference:
            values = (value,) if others is None else (value, others[name].to(value.device))
            verdicts = [check.judge(name, item.detach() if isinstance(item, torch.Tensor) else item) for item in values]
            comparisons.append(_comparison(name, max(verdicts, key=_rank)))
    return comparisons, reference


def compare_gradients(execution: CallExecution, gradients: Gradients, others: Values | None = None) -> list[Comparison]:
    """Compares what a call added to the gradients of its arguments; for the arguments and errors see
    ``compare_values``."""
    values_of = functools.partial(execution.gradients, tangents=gradients.outputs)
    dtypes = [tangent.dtype for tangent in gradients.outputs.values()]  # under autocast, lower than the arguments'
    with torch.enable_grad():
        found, _ = compare_values(execution, gradients.inputs, values_of, others, dtypes)
    return [dataclasses.replace(item, value=f"gradient of {item.value}") for item in found]


def compare_derivatives(
    execution: CallExecution, tangents: Values, generator: torch.Generator
) -> Iterator[tuple[str, Comparison | None]]:
    """Compares derivatives of the results, multiplied by ``tangents``, by autograd in float64 with derivatives by
    differences, in one random direction of each real argument; ``None`` where an argument has no derivative.

    As ``torch.autograd.gradcheck`` with ``fast_mode``, but with the gradients of this call as tangents, and the
    direction is not normal to the gradient, so that a wrong factor is always seen.

    Raises:
        NoDerivativeError: float64 lacks an operator.
        ChangedSinceError: an argument was changed in place since the call.
    """
    leaves = execution.leaves(wide=True)
    with torch.enable_grad():
        gradients = execution.gradients(execution.run(leaves, Rerun(execution.recording)), tangents)

    def terms_at(leaf: torch.Tensor, moved: torch.Tensor) -> torch.Tensor:
        mode = Rerun(execution.recording)
        found = execution.results(execution.run([moved if item is leaf else item for item in leaves], mode))
        if mode.inexact:
            raise NoDerivativeError("; ".join(mode.inexact.values()))
        return torch.cat([(found[name] * tangents[name].double()).flatten() for name in tangents if name in found])

    for name, leaf in execution.differentiable(leaves).items():
        if name not in gradients or not leaf.is_floating_point():
            continue
        gradient, start = gradients[name].detach(), leaf.detach()
        direction = torch.randn(leaf.shape, dtype=torch.float64, generator=generator).to(leaf.device)
        size = float(gradient.norm())
        if size:
            along = gradient / size
            direction += (1 - float((along * direction).sum())) * along
        behind, here, ahead = (terms_at(leaf, start + distance * direction) for distance in (-_STEP, 0.0, _STEP))
        slopes = [float(difference.sum()) / _STEP for difference in (here - behind, ahead - here)]
        by_differences, by_autograd = sum(slopes) / 2, float((gradient * direction).sum())
        allowed = _DERIVATIVE_ERROR * max(size, abs(by_differences)) + _DIFFERENCE_ERROR * float(here.abs().sum())
        if abs(slopes[0] - slopes[1]) > allowed:
            yield name, None
            continue
        error = abs(by_autograd - by_differences)
        complaint = f"the derivative of its results is {by_differences:.6g}, not {by_autograd:.6g}"
        yield (
            name,
            Comparison(
                value=f"gradient of {name} by differences",
                allclose=error <= allowed,
                max_diff=error,
                allowed=allowed,
                complaint="" if error <= allowed else complaint,
                share=error / allowed if allowed else 0.0,
            ),
        )


def _rank(found: Verdict) -> tuple[bool, float]:
    return found.is_wrong, found.ours.share if found.ours is not None else 0.0


def _comparison(name: str, found: Verdict) -> Comparison:
    error = found.ours
    return Comparison(
        value=name,
        allclose=not found.is_wrong,
        max_diff=error.max_abs if error is not None else math.inf if found.is_wrong else 0.0,
        allowed=(error.limit or None) if error is not None else None,
        complaint=found.complaint or (str(found) if error is not None and error.nonfinite else ""),
        share=math.inf if found.complaint else error.share if error is not None else 0.0,
    )
