"""Judges the results and gradients of one call by those of the call made again."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import torch

from ..numerics.again import CallAgain, InFloat64
from ..numerics.differences import discrete_difference, is_discrete, largest, same_number
from ..numerics.distance import EQUAL, Distance, allowed_error, distance, is_explained
from ..numerics.exact import WIDER
from .gradients import Gradients
from .references import Reference, named_results
from .tool import dtype_name

_TRIES = 3
"""How often arguments are moved by a unit in their last place, to see how much that moves results."""

_STEP = 1e-6
_DIFFERENCES = 1e-8
"""How far arguments are moved for a derivative by differences, and its error in float64 relative to the results."""

_NUMERICAL = 1e-3
"""The relative error of a directional derivative that needs no explanation: the function may have kinks."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """How one result, or one gradient, of a call compares with the reference.

    Attributes:
        value: ``output``, ``output[1]``, ``args[0] after it``, ``gradient of args[1]``.
        dtype, shape: of it.
        allclose: whether it is as near to the reference as its dtype and the condition of the operator allow.
        max_diff: largest absolute difference.
        allowed: the largest that needs no explanation; ``None`` where elements are counted.
        complaint: ``Inconsistent dtypes: ...``, another shape, elements that differ, NaN; or ``""``.
    """

    value: str
    dtype: str
    shape: tuple[int, ...]
    allclose: bool
    max_diff: float
    allowed: float | None
    complaint: str = ""


class CallJudge:
    """Judges one call. It holds the arguments of the call, and none of its results.

    A result is right if it is as near to the reference as rounding explains: that of the result itself, or, where an
    operator is ill-conditioned, that of its arguments and of every step inside. How much the latter may be is tried:
    the call is made again in float64 with each of them moved at random by a unit in the last place.

    Args:
        again: the call made again.
        names: of its flattened arguments.
        reference: by which it is judged.

    Attributes:
        exact: the results of the reference, by name.
    """

    def __init__(self, again: CallAgain, names: Sequence[str], reference: Reference) -> None:
        self._again = again
        self._names = names
        self._reference = reference
        self._generator = torch.Generator().manual_seed(0)  # the user's random numbers are theirs
        self.exact: dict[str, object] = {}

    def results(self, results: Mapping[str, torch.Tensor], returned: object) -> list[Verdict]:
        """Verdicts on what a call gave.

        Args:
            results: the tensors, by name.
            returned: what it returned, which may be a number.

        Raises:
            Whatever the function raises on the reference.
        """
        again, written = self._again.results()
        self.exact = named_results(again, written, self._names)
        if not results and isinstance(returned, (bool, int, float)):
            is_same = same_number(returned, again) or (isinstance(returned, float) and _is_near(returned, again))
            complaint = "" if is_same else f"{again} on the reference, not {returned}"
            return [Verdict("output", type(returned).__name__, (), is_same, 0.0, None, complaint)]
        verdicts = []
        beside = largest(list(results.values())) if len(results) > 1 else 0.0
        for name, value in results.items():
            other = self.exact.get(name)
            if isinstance(other, torch.Tensor):
                verdicts.append(
                    self._verdict(
                        name, value.detach(), other, functools.partial(self._moved, name), beside, value.dtype
                    )
                )
        return verdicts

    def forget_results(self) -> None:
        """Frees the reference's results."""
        self.exact = {}

    def gradients(self, gradients: Gradients) -> list[Verdict]:
        """Verdicts on what a call added to the gradients of its arguments.

        Raises:
            ChangedSinceError: they were changed in place since the call.
        """
        exact = self._again.gradients(gradients.outputs, self._named)
        beside = largest(value for value in exact.values() if value is not None)
        dtypes = [value.dtype for value in gradients.outputs.values()]  # under autocast, lower than the arguments'
        computed_in = max(dtypes, key=_epsilon)
        verdicts = []
        for name, value in gradients.inputs.items():
            other = self._sum(exact, gradients.alike[name])
            if other is not None:
                verdicts.append(
                    self._verdict(
                        f"gradient of {name}",
                        value,
                        other,
                        functools.partial(self._moved_gradient, gradients, name),
                        beside,
                        computed_in,
                    )
                )
        return verdicts

    def numerical_gradient(self, gradients: Gradients) -> list[Verdict]:
        """A verdict on the formula of the derivative: float64's gradients by autograd, all together, against the
        derivative of the results in a random direction, by differences.

        Raises:
            ChangedSinceError: the arguments were changed in place since the call.
        """
        exact = self._again.gradients(gradients.outputs, self._named)
        steps: dict[str, torch.Tensor] = {}
        along = []
        for alike in gradients.alike.values():
            gradient = self._sum(exact, alike)
            if gradient is not None and gradient.is_floating_point():
                direction = torch.randn(gradient.shape, dtype=torch.float64, generator=self._generator)
                steps |= dict.fromkeys(alike, direction * _STEP)
                along.append(gradient.double().cpu() * direction)
        if not along:
            return []
        at = [self._along(gradients, {name: sign * item for name, item in steps.items()}) for sign in (1, 0, -1)]
        magnitude = max(size for _, size in at)
        ahead, behind = (at[0][0] - at[1][0]) / _STEP, (at[1][0] - at[2][0]) / _STEP
        by_differences = (ahead + behind) / 2
        by_gradients = sum(float(item.sum()) for item in along)
        size = sum(float(item.square().sum()) for item in along) ** 0.5
        allowed = _NUMERICAL * max(size, abs(by_differences)) + _DIFFERENCES * magnitude
        if self._again.is_inexact or abs(ahead - behind) > allowed:
            return []  # float64 has not the operator, or it has no derivative here: two values are equal, or one is 0
        error = abs(by_gradients - by_differences)
        complaint = ""
        if not error <= allowed:
            complaint = f"the derivative of its results is {by_differences:.6g}, not {by_gradients:.6g}"
        return [Verdict("gradient by differences", "float64", (), not complaint, error, allowed, complaint)]

    def _along(self, gradients: Gradients, steps: Mapping[str, torch.Tensor]) -> tuple[float, float]:
        """The product of the results, where arguments are moved, with the gradients that came in; its terms' size."""
        moved = self._again.with_moved(self._names, steps)
        products = [
            value.double().cpu() * gradients.outputs[name].double().cpu()
            for name, value in named_results(moved, {}, self._names).items()
            if isinstance(value, torch.Tensor) and name in gradients.outputs
        ]
        return sum(float(item.sum()) for item in products), sum(float(item.abs().sum()) for item in products)

    def _verdict(
        self,
        name: str,
        value: torch.Tensor,
        exact: torch.Tensor,
        moved: Callable[[torch.dtype], list[torch.Tensor]],
        beside: float,
        computed_in: torch.dtype,
    ) -> Verdict:
        dtype, shape = dtype_name(value.dtype), tuple(value.shape)
        expected = WIDER.get(value.dtype, value.dtype) if self._reference.is_exact else value.dtype
        if exact.shape != value.shape:
            complaint = f"shape {shape} instead of {tuple(exact.shape)}"
            return Verdict(name, dtype, shape, False, float("inf"), None, complaint)
        is_same = exact.dtype in (expected, value.dtype)  # some functions have a dtype of their own in float64 too
        complaint = "" if is_same else f"Inconsistent dtypes: {value.dtype} {exact.dtype}"
        value, exact = value.cpu(), exact.detach().cpu()
        if is_discrete(value):
            return self._discrete(name, value, exact, complaint)
        ours = distance(value, exact)
        coarser = max((value.dtype, computed_in, self._again.coarsest), key=_epsilon)
        near = EQUAL
        explained = is_explained(ours, near, value.dtype, beside) or (
            not ours.nonfinite and ours.max_abs <= _lost(value.dtype, beside)
        )
        if not explained and ours.nonfinite == 0:
            near = _largest([distance(other.cpu(), exact) for other in moved(coarser)])
            explained = is_explained(ours, near, coarser, beside)
        if ours.nonfinite:
            complaint = complaint or f"{ours.nonfinite} elements are NaN or infinite on one side only"
        allowed = allowed_error(near, value.dtype, max(ours.scale, near.scale))
        return Verdict(name, dtype, shape, explained and not complaint, ours.max_abs, allowed, complaint)

    def _discrete(self, name: str, value: torch.Tensor, exact: torch.Tensor, complaint: str) -> Verdict:
        dtype, shape = dtype_name(value.dtype), tuple(value.shape)
        difference = discrete_difference(value, exact, share=0)
        if not difference and self._reference.is_exact and not self._again.is_random and not _is_exact(self._again):
            decided = self._decided(name, lambda item: item)
            difference = discrete_difference(value, decided) if decided is not None else ""
            for _ in range(_TRIES if difference else 0):  # two values may be equal, or nearly so
                other = self._decided(name, self._mover(self._again.coarsest))
                if other is not None and decided is not None and discrete_difference(decided, other):
                    difference = ""
        elif difference and not self._reference.is_exact:
            difference = discrete_difference(value, exact)
        complaint = complaint or difference
        worst = (
            float((value.double() - exact.double()).abs().max()) if value.numel() and value.dtype != torch.bool else 0.0
        )
        return Verdict(name, dtype, shape, not complaint, worst, None, complaint)

    def _decided(self, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor | None:
        """A discrete result where float64 compares and rounds for itself."""
        result = self._again.with_other_arguments(change, InFloat64(decides_itself=True))
        found = named_results(result, {}, self._names).get(name)
        return found if isinstance(found, torch.Tensor) else None

    def _mover(self, dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
        """Moves an argument at random by up to a unit in the last place of a dtype."""
        epsilon = torch.finfo(dtype).eps

        def move(value: torch.Tensor) -> torch.Tensor:
            noise = (
                torch.rand(value.shape, dtype=torch.float64, generator=self._generator).mul_(2).sub_(1).mul_(epsilon)
            )
            return (value * (1 + noise.to(value.device))).to(value.dtype)

        return move

    def _moved(self, name: str, dtype: torch.dtype) -> list[torch.Tensor]:
        """A result where the arguments, and all that is computed inside, are moved by a unit in their last place."""
        found = []
        for _ in range(_TRIES):
            moved = self._again.with_other_arguments(self._mover(dtype), _noisy(dtype))
            result = named_results(moved, {}, self._names).get(name)
            if isinstance(result, torch.Tensor):
                found.append(result)
        return found

    def _moved_gradient(self, gradients: Gradients, name: str, dtype: torch.dtype) -> list[torch.Tensor]:
        """A gradient where the arguments, the gradients that come in, and all inside are moved by such a unit."""
        found = []
        for _ in range(_TRIES):
            mover = self._mover(dtype)
            tangents = {key: mover(value.double()) for key, value in gradients.outputs.items()}
            exact = self._again.gradients(tangents, self._named, mover, _noisy(dtype))
            moved = self._sum(exact, gradients.alike[name])
            found += [] if moved is None else [moved]
        return found

    def _sum(self, gradients: Mapping[int, torch.Tensor | None], names: Sequence[str]) -> torch.Tensor | None:
        """The gradient of an argument that the call was given under several names."""
        found = [value for i, value in gradients.items() if self._names[i] in names and value is not None]
        return sum(found[1:], found[0]) if found else None

    def _named(self, result: object, given: Sequence[object]) -> dict[str, object]:
        written = {i: value for i, value in enumerate(given) if isinstance(value, torch.Tensor)}
        return named_results(result, written, self._names)


def _noisy(dtype: torch.dtype) -> InFloat64:
    return InFloat64(noise=torch.finfo(dtype).eps)


def _largest(distances: Sequence[Distance]) -> Distance:
    return max(distances, key=lambda item: item.max_abs, default=EQUAL)


def _lost(dtype: torch.dtype, beside: float) -> float:
    """What may be lost of a value beside much larger ones: a hundredth of their rounding, as ``is_carried`` has it."""
    return _epsilon(dtype) * beside / 100


def _epsilon(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 0.0


def _is_exact(again: CallAgain) -> bool:
    """Whether the arguments have no rounding that a comparison could depend on."""
    return again.coarsest is torch.float64


def _is_near(value: float, other: object) -> bool:
    return isinstance(other, (int, float)) and abs(value - other) <= 1e-5 * max(abs(value), abs(other), 1e-30)
