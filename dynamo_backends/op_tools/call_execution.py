"""Runs one call again: in float64, on another device, or on another runtime, with gradients.

::

    execution = CallExecution(function, args, kwargs)      # before the call
    with execution.recording:
        result = function(*args, **kwargs)
    check = execution.check({"output": result}, execution.results)    # against float64
    check.judge("output", result).is_wrong

The function is any: an ATen operator, one composed of many, a user's own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.utils import _pytree as pytree

from ..common.random_state import RandomState
from ..numerics import operator_facts as facts
from ..numerics.exact import WIDER, is_floating
from ..numerics.function_runs import (
    FunctionRun,
    Recording,
    Rerun,
    copies,
    passed,
    requires_grad,
    version_of,
)
from ..numerics.whole_graph import FunctionCheck
from .call import named_results
from .names import function_name, is_of_pytorch, may_write

Values: TypeAlias = Mapping[str, Any]
"""Tensors, or one number, by name: ``output``, ``output[1]``, ``args[0] after it``; gradients by the argument's."""

ValuesOf: TypeAlias = Callable[[FunctionRun], Values]
"""Returns the values of a run that are compared: ``CallExecution.results``, or gradients."""


class ChangedSinceError(RuntimeError):
    """An argument was changed after the call, so that the call cannot be run again."""


class CallExecution:
    """A call that can be run again. Created before the call, which may write into its arguments.

    Random numbers are drawn from a private state. It holds the call's arguments, but none of its results.

    Attributes:
        recording: the context for the call itself, which records its random numbers and decisions.
        random_state: of the random numbers before the call.
    """

    def __init__(self, function: Callable[..., Any], args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        self.function = function
        self.recording = Recording(raises=False)
        self.random_state = RandomState.now()
        self._writes = may_write(function, kwargs)
        self._reads_memory = self._writes or "as_strided" in function_name(function)  # beside an argument's elements
        paths, self._spec = pytree.tree_flatten_with_path((tuple(args), dict(kwargs)))
        self._names = [_name(path) for path, _ in paths]
        self._requires_grad = [requires_grad(leaf) for _, leaf in paths]
        detached = {id(leaf): leaf.detach() for _, leaf in paths if isinstance(leaf, torch.Tensor)}
        self._own = [detached.get(id(leaf), leaf) for _, leaf in paths]
        self._versions = list(map(version_of, self._own))
        is_copied = self._writes or not is_of_pytorch(function)  # a user's function may write, and does not say so
        self._before = self._copied(self._own) if is_copied else None

    def run(
        self,
        leaves: Sequence[object],
        mode: Rerun | None = None,
        *,
        function: Callable[..., Any] | None = None,
    ) -> FunctionRun:
        """Calls the function, or another on another runtime. To be used after the call itself."""
        call = functools.partial(self._call, function or self.function)
        is_elsewhere = function is not None
        return FunctionRun(call, leaves, [True] * len(leaves), self.random_state, mode, is_elsewhere=is_elsewhere)

    def _call(self, function: Callable[..., Any], *leaves: object) -> tuple[Any, Sequence[Any]]:
        """Calls a function; returns its result, and the arguments that it got."""
        given = [passed(leaf) if self._writes and requires_grad(leaf) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(given, self._spec)
        return function(*args, **kwargs), given

    def check(self, actual: Values, values_of: ValuesOf, dtypes: Sequence[torch.dtype] = ()) -> FunctionCheck:
        """Compares values of the call with float64.

        Args:
            actual: the values of the call.
            values_of: returns the same values of another run.
            dtypes: those of which the computation may have the precision, besides those of the arguments.

        Raises:
            ChangedSinceError: an argument was changed in place since the call.
            Whatever the function raises in float64.
        """

        def magnitudes() -> Values:
            sizes = [leaf.abs() if is_floating(leaf) else leaf for leaf in self.leaves(wide=True)]
            return values_of(self.run(sizes, Rerun(self.recording)))

        adds_up = values_of == self.results and all(map(facts.adds_up, self.recording.calls))
        dtypes = [*dtypes, *(leaf.dtype for leaf in self._own if is_floating(leaf))]
        leaves = self.leaves(wide=True)
        return FunctionCheck(
            functools.partial(self._call, self.function),
            leaves,
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
        is_changed = list(map(version_of, self._own)) != self._versions
        if is_changed and self._before is None:
            raise ChangedSinceError("an argument was changed in place after the call")
        self._writes |= is_changed
        before = self._before if self._before is not None and self._writes else self._own
        leaves = self._copied(before, wide=wide, device=device)
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

    def results(self, run: FunctionRun) -> Values:
        """The tensors, or the number, that a run returned, and the arguments that it may have changed."""
        returned, given = run.returned
        if isinstance(returned, (bool, int, float)):
            return {"output": returned}
        arguments = zip(self._names, given, strict=True)
        tensors = {name: value for name, value in arguments if isinstance(value, torch.Tensor)}
        return named_results(returned, tensors if self._writes else {})

    def gradients(self, run: FunctionRun, tangents: Values) -> Values:
        """The gradients of the arguments that have one, by name; a repeated argument has the first of its names.

        ``tangents`` are the gradients of results, by name.
        """
        leaves = self.differentiable(run.leaves)
        results = self.results(run)
        outputs = {name: value for name, value in results.items() if name in tangents and requires_grad(value)}
        if not outputs or not leaves:
            return {}
        given = [tangents[name] for name in outputs]
        found = run.gradients(list(outputs.values()), given, list(leaves.values()))
        return {name: value for name, value in zip(leaves, found, strict=True) if value is not None}

    def differentiable(self, leaves: Sequence[object]) -> dict[str, torch.Tensor]:
        """The arguments that require gradients, by the first name of each."""
        names = {id(leaf): name for name, leaf in reversed(list(zip(self._names, leaves, strict=True)))}
        return {names[id(leaf)]: leaf for leaf in leaves if requires_grad(leaf)}


def on_onnx(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function on ONNX Runtime, with its gradients. It raises an error if an operator cannot run there."""

    def call(*args: Any, **kwargs: Any) -> Any:  # Dynamo compiles Python functions only
        return function(*args, **kwargs)

    call.__code__ = call.__code__.replace()  # Dynamo's limit of recompilations is for each code object
    return torch.compile(call, backend="onnxrt", fullgraph=True, dynamic=False, options={"fallback": "error"})


def _name(path: Sequence[Any]) -> str:
    """The name of a leaf of ``(args, kwargs)``, in the form of ``named_tensors``."""
    keys = [getattr(key, "key", getattr(key, "idx", None)) for key in path]
    return ("kwargs" if keys[0] else "args") + "".join(f"[{key}]" for key in keys[1:])
