"""Runs one call again: in float64, on another device, or on another runtime, with gradients.

::

    execution = CallExecution(function, args, kwargs)      # before the call: copies the arguments
    with execution.recording:
        result = function(*args, **kwargs)
    execution.run(FLOAT64).results                         # returned tensors, and arguments that were changed
    execution.run(FLOAT64, with_gradients=True).gradients({"output": gradient})

The function is any: an ATen operator, one composed of many, a user's own.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.utils import _pytree as pytree

from ..numerics.exact import WIDER, is_floating
from ..numerics.function_runs import Context, FunctionRun, Recording, Rerun, copies, requires_grad, version_of

Change: TypeAlias = Callable[[str, torch.Tensor], torch.Tensor]
"""Takes an argument's name and the argument; returns another of the same shape."""


@dataclasses.dataclass(frozen=True)
class RunTarget:
    """In which precision, and where, a call is run."""

    wide: bool = False  # in float64, with the random numbers and decisions of the recorded call, see ``Rerun``
    seed: int | None = None  # with ``wide``: of a perturbed run
    rounding: torch.dtype = torch.float32  # what it perturbs by, where the recorded call did not run an operator
    device: torch.device | None = None  # of the copies; by default that of each argument
    function: Callable[..., Any] | None = None  # computes the same on another runtime
    timer: Context = contextlib.nullcontext  # creates a context for the function, and one for the backward

    def copies(self, values: Sequence[object], *, in_memory: bool) -> list[object]:
        """Copies of the tensors among some values; with ``in_memory``, of whole storages, shared as before."""
        if in_memory:
            values = copies(values, wide=self.wide)
            if self.device is None:
                return values
        known = {id(value): self._copy(value) for value in values if isinstance(value, torch.Tensor)}
        return [known.get(id(value), value) for value in values]

    def _copy(self, value: torch.Tensor) -> torch.Tensor:
        dtype = WIDER.get(value.dtype, value.dtype) if self.wide else value.dtype
        return value.detach().to(self.device or value.device, dtype, copy=True)


FLOAT64 = RunTarget(wide=True)


class ChangedSinceError(RuntimeError):
    """An argument was changed after the call, so that the call cannot be run again."""


class CallExecution:
    """A call that can be run again. Created before the call, which may write into its arguments.

    Random numbers are drawn from a private state.

    Args:
        function: what is called.
        args, kwargs: of the call.
        writes: whether the call may write into its arguments.
        reads_memory: whether it reads memory outside of its arguments' elements.

    Attributes:
        recording: the context for the call itself, which records its random numbers and decisions.
        names: of the flattened arguments: ``args[0]``, ``kwargs[weight]``.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: Sequence[object],
        kwargs: Mapping[str, object],
        *,
        writes: bool = False,
        reads_memory: bool = False,
    ) -> None:
        self.function = function
        self.recording = Recording(raises=False)
        self.random_state = torch.get_rng_state()
        self.writes = writes
        self._in_memory = writes or reads_memory
        paths, self.spec = pytree.tree_flatten_with_path((tuple(args), dict(kwargs)))
        self.names = [_name(path) for path, _ in paths]
        self._requires_grad = [requires_grad(leaf) for _, leaf in paths]
        self._own = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for _, leaf in paths]
        self._versions = list(map(version_of, self._own))
        self._before: list[object] | None = RunTarget().copies(self._own, in_memory=self._in_memory)

    @property
    def coarsest(self) -> torch.dtype:
        """The floating-point dtype of least precision among the arguments; float32 if there is none."""
        dtypes = [leaf.dtype for leaf in self.tensors if is_floating(leaf)]
        return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The caller's own tensors among the arguments."""
        return [leaf for leaf in self._own if isinstance(leaf, torch.Tensor)]

    def run(self, target: RunTarget, change: Change | None = None, *, with_gradients: bool = False) -> CallRun:
        """Calls the function on copies of the arguments. To be used after the call itself.

        ``change`` is applied to each floating-point argument. Gradients can be computed ``with_gradients``.

        Raises:
            ChangedSinceError: an argument was changed in place since the first run.
            Whatever the function raises there.
        """
        leaves = self._leaves(target, with_gradients=with_gradients, change=change)
        return CallRun(self, target, leaves, with_gradients=with_gradients)

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Copies of the arguments as they were before the call."""
        args, kwargs = pytree.tree_unflatten(self._leaves(RunTarget(), with_gradients=True), self.spec)
        return args, kwargs

    def _leaves(self, target: RunTarget, *, with_gradients: bool, change: Change | None = None) -> list[object]:
        leaves = target.copies(self._arguments(), in_memory=self._in_memory)
        if change is not None:
            leaves = _changed(self.names, leaves, change)
        for leaf, wanted in zip(leaves, self._requires_grad, strict=True):
            if isinstance(leaf, torch.Tensor):
                leaf.requires_grad_(wanted and with_gradients)
        return leaves

    def _arguments(self) -> list[object]:
        """The arguments as they were before the call: the caller's own tensors while these are unchanged."""
        is_unchanged = list(map(version_of, self._own)) == self._versions
        if self._before is not None and (self.writes or not is_unchanged):
            return self._before
        if not is_unchanged:
            raise ChangedSinceError("an argument was changed in place after the call")
        self._before = None
        return self._own


class CallRun:
    """One run of a call.

    Attributes:
        returned: what the function returned.
        results: the tensors in it, by name (``output[1]``), and the arguments that it wrote (``args[0] after it``).
    """

    def __init__(
        self, execution: CallExecution, target: RunTarget, leaves: Sequence[object], *, with_gradients: bool
    ) -> None:
        first = {id(leaf): name for name, leaf in reversed(list(zip(execution.names, leaves, strict=True)))}
        self._leaves = {first[id(leaf)]: leaf for leaf in leaves if requires_grad(leaf)}
        self._target = target
        self._float64 = Rerun(execution.recording, target.seed, otherwise=target.rounding)

        def call(*given: object) -> Any:
            args, kwargs = pytree.tree_unflatten(given, execution.spec)
            with target.timer():
                return (target.function or execution.function)(*args, **kwargs)

        are_leaves, mode = [not execution.writes] * len(leaves), self._float64 if target.wide else None
        is_elsewhere = target.function is not None
        with torch.set_grad_enabled(with_gradients):
            self._run = FunctionRun(call, leaves, are_leaves, execution.random_state, mode, is_elsewhere=is_elsewhere)
        self.returned = self._run.returned
        self.results: dict[str, torch.Tensor] = dict(named_tensors(self.returned, "output"))
        returned = {id(value) for value in self.results.values()}
        for name, value, is_written in zip(execution.names, self._run.arguments, self._run.are_written, strict=True):
            if isinstance(value, torch.Tensor) and (execution.writes or is_written) and id(value) not in returned:
                self.results[f"{name} after it"] = value

    @property
    def is_inexact(self) -> bool:
        """Whether an operator has no float64 kernel, and ran in a lower precision."""
        return bool(self._float64.inexact)

    def gradients(self, tangents: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The gradients of the arguments that have one, by name; a repeated argument has the first of its names.

        ``tangents`` are the gradients of results, by name.
        """
        outputs = {name: value for name, value in self.results.items() if name in tangents and requires_grad(value)}
        if not outputs or not self._leaves:
            return {}
        given = [tangents[name] for name in outputs]
        found = self._run.gradients(list(outputs.values()), given, list(self._leaves.values()), self._target.timer)
        return {name: value for name, value in zip(self._leaves, found, strict=True) if value is not None}


def named_tensors(value: object, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in nested lists, tuples and dictionaries, with their names: ``output``, ``output[1]``."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, (Mapping, list, tuple)):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from named_tensors(item, f"{name}[{key}]")


def _name(path: Sequence[Any]) -> str:
    """The name of a leaf of ``(args, kwargs)``, in the form of ``named_tensors``."""
    keys = [getattr(key, "key", getattr(key, "idx", None)) for key in path]
    return ("kwargs" if keys[0] else "args") + "".join(f"[{key}]" for key in keys[1:])


def _changed(names: Sequence[str], values: Sequence[object], change: Change) -> list[object]:
    """The values with their floating-point tensors changed; a repeated tensor is changed once."""
    changed: dict[int, object] = {}
    with torch.no_grad():
        for name, value in zip(names, values, strict=True):
            if isinstance(value, torch.Tensor) and value.is_floating_point() and id(value) not in changed:
                new = change(name, value)
                changed[id(value)] = value.copy_(new) if value.is_contiguous() else new  # keeps the rest of the memory
    return [changed.get(id(value), value) for value in values]
