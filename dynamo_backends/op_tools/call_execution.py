"""Runs one call again: in float64, on another device, or on another runtime, with gradients.

::

    execution = CallExecution(function, args, kwargs)      # before the call
    with execution.recording:
        result = function(*args, **kwargs)
    check = execution.check(results, execution.results)    # against float64
    check.judge("output", result).is_wrong

The function is any: an ATen operator, one composed of many, a user's own.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.utils import _pytree as pytree

from ..numerics import operator_facts as facts
from ..numerics.exact import WIDER, is_floating
from ..numerics.function_runs import (
    Context,
    FunctionRun,
    Recording,
    Rerun,
    copies,
    passed,
    requires_grad,
    version_of,
)
from ..numerics.whole_graph import FunctionCheck
from .names import function_name, is_of_pytorch, may_write

Tensors: TypeAlias = Mapping[str, torch.Tensor]
"""Tensors by name: ``output``, ``output[1]``, ``args[0] after it``; gradients by the name of the argument."""

ValuesOf: TypeAlias = Callable[[FunctionRun], Tensors]
"""Returns the values of a run that are compared: ``CallExecution.results``, or gradients."""

_STEP = 1e-6
"""The step of a numerical derivative, as in ``torch.autograd.gradcheck``."""

_DERIVATIVE_ERROR = 1e-3
"""The tolerance of a directional derivative, relative to its size, as in ``torch.autograd.gradcheck``."""

_DIFFERENCE_ERROR = 1e-8
"""The error of a numerical derivative in float64, relative to the results."""


class ChangedSinceError(RuntimeError):
    """An argument was changed after the call, so that the call cannot be run again."""


class NoDerivativeError(RuntimeError):
    """There is no derivative by differences in float64."""


@dataclasses.dataclass(frozen=True)
class Derivative:
    """The derivative of a call in one direction."""

    by_autograd: float
    by_differences: float
    allowed: float  # how much they may differ
    exists: bool  # whether the differences on both sides agree


class CallExecution:
    """A call that can be run again. Created before the call, which may write into its arguments.

    Random numbers are drawn from a private state. It holds the call's arguments, but none of its results.

    Attributes:
        recording: the context for the call itself, which records its random numbers and decisions.
        random_state: of the CPU's random numbers before the call.
    """

    def __init__(self, function: Callable[..., Any], args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        self.function = function
        self.recording = Recording(raises=False)
        self.random_state = torch.get_rng_state()
        self._writes = may_write(function, kwargs)
        self._reads_memory = self._writes or "as_strided" in function_name(function)  # beside an argument's elements
        paths, self._spec = pytree.tree_flatten_with_path((tuple(args), dict(kwargs)))
        self._names = [_name(path) for path, _ in paths]
        self._requires_grad = [requires_grad(leaf) for _, leaf in paths]
        detached = {id(leaf): leaf.detach() for _, leaf in paths if isinstance(leaf, torch.Tensor)}
        self._own = [detached.get(id(leaf), leaf) for _, leaf in paths]
        self._versions = list(map(version_of, self._own))
        self._before: list[object] | None = None
        if self._writes or not is_of_pytorch(function):  # a user's function may write, and does not say so
            self._before = self._copied(self._own)

    def run(
        self,
        leaves: Sequence[object],
        mode: Rerun | None = None,
        *,
        function: Callable[..., Any] | None = None,
        timer: Context = contextlib.nullcontext,
    ) -> FunctionRun:
        """Calls the function, or another on another runtime. To be used after the call itself.

        ``timer`` creates a context for the function.
        """

        def call(*leaves: object) -> tuple[Any, Sequence[Any]]:
            return self._call(*leaves, function=function, timer=timer)

        are_leaves = [True] * len(leaves)
        return FunctionRun(call, leaves, are_leaves, self.random_state, mode, is_elsewhere=function is not None)

    def _call(
        self, *leaves: object, function: Callable[..., Any] | None = None, timer: Context = contextlib.nullcontext
    ) -> tuple[Any, Sequence[Any]]:
        """Calls a function; returns its result, and the arguments that it got."""
        given = [passed(leaf) if self._writes and requires_grad(leaf) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(given, self._spec)
        with timer():
            return (function or self.function)(*args, **kwargs), given

    def run_wide(self) -> FunctionRun:
        """A run in float64."""
        return self.run(self.leaves(wide=True), Rerun(self.recording))

    def check(self, actual: Tensors, values_of: ValuesOf, dtypes: Sequence[torch.dtype] = ()) -> FunctionCheck:
        """Compares values of the call with float64.

        Args:
            actual: the values of the call.
            values_of: returns the same values of another run.
            dtypes: those of which the computation may have the precision, besides those of the arguments.

        Raises:
            ChangedSinceError: an argument was changed in place since the call.
            Whatever the function raises in float64.
        """

        def magnitudes() -> Tensors:
            sizes = [leaf.abs() if is_floating(leaf) else leaf for leaf in self.leaves(wide=True)]
            return values_of(self.run(sizes, Rerun(self.recording)))

        adds_up = values_of == self.results and all(map(facts.adds_up, self.recording.calls))
        dtypes = [*dtypes, *(leaf.dtype for leaf in self._own if is_floating(leaf))]
        return FunctionCheck(
            self._call,
            self.leaves(wide=True),
            self.random_state,
            values_of=values_of,
            written=None if self._writes else (),
            recording=self.recording,
            actual=actual,
            otherwise=max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32),
            magnitudes=magnitudes if adds_up else None,
        )

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Copies of the arguments as they were before the call."""
        args, kwargs = pytree.tree_unflatten(self.leaves(), self._spec)
        return args, kwargs

    def leaves(self, *, wide: bool = False, device: torch.device | None = None) -> list[Any]:
        """Copies of the flattened arguments as they were before the call, in float64 with ``wide``.

        Raises:
            ChangedSinceError: an argument was changed in place since the call.
        """
        leaves = self._copied(self._before_the_call(), wide=wide, device=device)
        for leaf, wanted in zip(leaves, self._requires_grad, strict=True):
            if isinstance(leaf, torch.Tensor):
                leaf.requires_grad_(wanted)
        return leaves

    def _copied(
        self, values: Sequence[object], *, wide: bool = False, device: torch.device | None = None
    ) -> list[object]:
        """Copies of tensors: of whole storages, shared as before, if the function may see that."""
        if self._reads_memory and device is None:
            return copies(values, wide=wide)

        def copy(value: torch.Tensor) -> torch.Tensor:
            return value.to(device or value.device, WIDER.get(value.dtype, value.dtype) if wide else None, copy=True)

        known = {id(value): copy(value) for value in values if isinstance(value, torch.Tensor)}
        return [known.get(id(value), value) for value in values]

    def _before_the_call(self) -> list[object]:
        """The arguments as they were before the call: the caller's own tensors while these are unchanged."""
        is_unchanged = list(map(version_of, self._own)) == self._versions
        if self._before is not None and (self._writes or not is_unchanged):
            self._writes = True
            return self._before
        if not is_unchanged:
            raise ChangedSinceError("an argument was changed in place after the call")
        self._before = None
        return self._own

    def results(self, run: FunctionRun) -> dict[str, torch.Tensor]:
        """The tensors that a run returned, and the arguments that it may have changed."""
        returned, given = run.returned
        found = dict(named_tensors(returned, "output"))
        known = {id(value) for value in found.values()}
        for name, value in zip(self._names, given, strict=True):
            if isinstance(value, torch.Tensor) and self._writes and id(value) not in known:
                found[f"{name} after it"] = value
        return found

    def gradients(
        self, run: FunctionRun, tangents: Tensors, timer: Context = contextlib.nullcontext
    ) -> dict[str, torch.Tensor]:
        """The gradients of the arguments that have one, by name; a repeated argument has the first of its names.

        ``tangents`` are the gradients of results, by name.
        """
        leaves = self._differentiable(run.leaves)
        results = self.results(run)
        outputs = {name: value for name, value in results.items() if name in tangents and requires_grad(value)}
        if not outputs or not leaves:
            return {}
        given = [tangents[name] for name in outputs]
        found = run.gradients(list(outputs.values()), given, list(leaves.values()), timer)
        return {name: value for name, value in zip(leaves, found, strict=True) if value is not None}

    def _differentiable(self, leaves: Sequence[object]) -> dict[str, torch.Tensor]:
        """The arguments that require gradients, by the first name of each."""
        names = {id(leaf): name for name, leaf in reversed(list(zip(self._names, leaves, strict=True)))}
        return {names[id(leaf)]: leaf for leaf in leaves if requires_grad(leaf)}

    def derivatives(self, tangents: Tensors, generator: torch.Generator) -> dict[str, Derivative]:
        """The derivatives of the results, multiplied by ``tangents``, in one random direction of each real argument.

        As ``torch.autograd.gradcheck`` with ``fast_mode``, but with the gradients of this call as tangents, and the
        direction is not normal to the gradient, so that a wrong factor is always seen.

        Raises:
            NoDerivativeError: float64 lacks an operator.
            ChangedSinceError: an argument was changed in place since the call.
        """
        leaves = self.leaves(wide=True)
        with torch.enable_grad():
            run = self.run(leaves, Rerun(self.recording))
            gradients = self.gradients(run, tangents)

        def results_of(leaf: torch.Tensor, moved: torch.Tensor) -> tuple[float, float]:
            """The sum of the results times their gradients, and of the magnitudes of its terms."""
            mode = Rerun(self.recording)
            found = self.results(self.run([moved if item is leaf else item for item in leaves], mode))
            if mode.inexact:
                raise NoDerivativeError("; ".join(mode.inexact.values()))
            terms = [found[name].double() * tangents[name].double() for name in tangents if name in found]
            return sum(float(term.sum()) for term in terms), sum(float(term.abs().sum()) for term in terms)

        derivatives = {}
        for name, leaf in self._differentiable(leaves).items():
            if name not in gradients or not leaf.is_floating_point():
                continue
            gradient, start = gradients[name].detach(), leaf.detach()
            direction = torch.randn(leaf.shape, dtype=torch.float64, generator=generator).to(leaf.device)
            size = float(gradient.norm())
            if size:
                along = gradient / size
                direction += (1 - float((along * direction).sum())) * along
            points = [results_of(leaf, start + distance * direction) for distance in (-_STEP, 0.0, _STEP)]
            (behind, _), (here, magnitude), (ahead, _) = points
            slopes = (here - behind) / _STEP, (ahead - here) / _STEP
            by_differences = sum(slopes) / 2
            allowed = _DERIVATIVE_ERROR * max(size, abs(by_differences)) + _DIFFERENCE_ERROR * magnitude
            exists = abs(slopes[0] - slopes[1]) <= allowed
            by_autograd = float((gradient * direction).sum())
            derivatives[name] = Derivative(by_autograd, by_differences, allowed, exists)
        return derivatives


def named_tensors(value: object, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in nested lists, tuples and dictionaries, with their names: ``output``, ``output[1]``. Autograd's
    zeros without memory are left out: PyTorch crashes where they are read."""
    if isinstance(value, torch.Tensor):
        if not value._is_zerotensor():
            yield name, value
    elif isinstance(value, (Mapping, list, tuple)):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from named_tensors(item, f"{name}[{key}]")


def _name(path: Sequence[Any]) -> str:
    """The name of a leaf of ``(args, kwargs)``, in the form of ``named_tensors``."""
    keys = [getattr(key, "key", getattr(key, "idx", None)) for key in path]
    return ("kwargs" if keys[0] else "args") + "".join(f"[{key}]" for key in keys[1:])
