"""Runs one call of a function again, gradients included: in float64, on another device, or on another runtime.

::

    execution = CallExecution(function, args, kwargs)      # before the call: copies of its arguments
    with execution.recording:
        result = function(*args, **kwargs)
    execution.run(FLOAT64).results                         # of the copies: what was returned, and changed arguments
    execution.run(FLOAT64, with_gradients=True).gradients({"output": gradient})

The call is any: of an ATen operator, of a function made of many, of a user's own.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeGuard

import torch
from torch.utils import _pytree as pytree

from .exact import WIDER
from .program_execution import Float64, Recording, copies
from .randomness import PrivateRandomness
from .verdicts import epsilon

Change: TypeAlias = Callable[[str, torch.Tensor], torch.Tensor]
"""Is given an argument's name and the argument; returns another of the same shape."""


@dataclasses.dataclass(frozen=True)
class Target:
    """In which precision, and where, a call is run.

    Attributes:
        wide: whether in float64; comparisons, indices and random numbers are those of the recorded call, see ``twice``.
        decides: whether comparisons and indices are float64's own all the same.
        perturbing: with ``wide``, the dtype by whose rounding what is computed inside is perturbed.
        device: of the copies; ``None`` for the arguments' own.
        function: computes the same on another runtime; no mode of PyTorch is in its way.
        timer: makes the context in which the function, and then the backward, is called.
    """

    wide: bool = False
    decides: bool = False
    perturbing: torch.dtype | None = None
    device: torch.device | None = None
    function: Callable[..., Any] | None = None
    timer: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext

    def converted(self, value: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor for the run."""
        dtype = WIDER.get(value.dtype, value.dtype) if self.wide else value.dtype
        return value.detach().to(self.device or value.device, dtype, copy=True)

    def copies(self, values: Sequence[object], *, in_memory: bool) -> list[object]:
        """Copies of the tensors among some values.

        Args:
            values: tensors and other objects.
            in_memory: whether the copies share memory where the tensors do, and keep what is beside their elements.
        """
        if in_memory:
            values = copies(values, wide=self.wide)
            if self.device is None:
                return values
        known = {id(value): self.converted(value) for value in values if isinstance(value, torch.Tensor)}
        return [known.get(id(value), value) for value in values]


FLOAT64 = Target(wide=True)


class ChangedSinceError(RuntimeError):
    """An argument was changed after the call, so that the call cannot be run again."""


class CallExecution:
    """A call that can be run again; made before the call, which may write into its arguments.

    No mode may be active that is not to see it; random numbers are drawn from a state of their own.

    Args:
        function: what is called.
        args, kwargs: of the call.
        writes: whether the call may write into its arguments.
        reads_memory: whether it reads memory beside their elements.

    Attributes:
        recording: a context in which the call itself is made: its random numbers and decisions are remembered.
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
        self.requires_grad = [isinstance(leaf, torch.Tensor) and leaf.requires_grad for _, leaf in paths]
        self._own = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for _, leaf in paths]
        self._versions = [version_of(leaf) for leaf in self._own]
        self._before: list[object] | None = Target().copies(self._own, in_memory=self._in_memory)

    @property
    def coarsest(self) -> torch.dtype:
        """The floating-point or complex dtype of least precision among the arguments; float64 if there is none."""
        dtypes = [leaf.dtype for leaf in self.tensors]
        return max((dtype for dtype in dtypes if epsilon(dtype)), key=epsilon, default=torch.float64)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The caller's own tensors among the arguments."""
        return [leaf for leaf in self._own if isinstance(leaf, torch.Tensor)]

    def run(self, target: Target, change: Change | None = None, *, with_gradients: bool = False) -> Run:
        """Calls the function on copies of the arguments; after the call itself.

        Args:
            target: in what.
            change: of each floating-point argument.
            with_gradients: whether gradients can be asked for.

        Raises:
            ChangedSinceError: an argument was changed in place since the first run.
            Whatever the function raises there.
        """
        leaves = target.copies(self._arguments(), in_memory=self._in_memory)
        if change is not None:
            leaves = _changed(self.names, leaves, change)
        return Run(self, target, leaves, with_gradients=with_gradients)

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Copies of the arguments of the call as they were before it."""
        leaves = Target().copies(self._arguments(), in_memory=self._in_memory)
        given = [_requiring(leaf, wanted) for leaf, wanted in zip(leaves, self.requires_grad, strict=True)]
        args, kwargs = pytree.tree_unflatten(given, self.spec)
        return args, kwargs

    def _arguments(self) -> list[object]:
        """The arguments as they were before the call; the user's own, without copies, while these are unchanged."""
        is_unchanged = [version_of(leaf) for leaf in self._own] == self._versions
        if self._before is not None and (self.writes or not is_unchanged):
            return self._before
        if not is_unchanged:
            raise ChangedSinceError("an argument was changed in place after the call")
        self._before = None
        return self._own


class Run:
    """One run of a call on copies of its arguments.

    Attributes:
        returned: what the function returned.
        results: the tensors in it, by name (``output[1]``), and the arguments that it wrote, ``args[0] after it``.
    """

    def __init__(
        self, execution: CallExecution, target: Target, leaves: Sequence[object], *, with_gradients: bool
    ) -> None:
        self._target = target
        self._state = execution.random_state
        self._modes: list[Any] = []
        if target.function is None:
            self._modes.append(PrivateRandomness(self._state))
        self._float64 = Float64(
            execution.recording, decides_itself=target.decides, perturbing=target.perturbing or False
        )
        if target.wide:
            self._modes.append(self._float64)
        wanted = execution.requires_grad if with_gradients else [False] * len(leaves)
        leaves = [_requiring(leaf, is_wanted) for leaf, is_wanted in zip(leaves, wanted, strict=True)]
        first = {id(leaf): name for name, leaf in reversed(list(zip(execution.names, leaves, strict=True)))}
        self._leaves = {first[id(leaf)]: leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}
        with torch.set_grad_enabled(with_gradients), self._running():
            given = leaves
            if execution.writes:  # a leaf must not be written
                given = [leaf.clone() if requires_grad(leaf) else leaf for leaf in leaves]
            versions = [version_of(leaf) for leaf in given]
            args, kwargs = pytree.tree_unflatten(given, execution.spec)
            with target.timer():
                self.returned = (target.function or execution.function)(*args, **kwargs)
        self.results: dict[str, torch.Tensor] = dict(named_tensors(self.returned, "output"))
        returned = {id(value) for value in self.results.values()}
        for name, value, version in zip(execution.names, given, versions, strict=True):
            is_written = execution.writes or version_of(value) != version
            if isinstance(value, torch.Tensor) and is_written and id(value) not in returned:
                self.results[f"{name} after it"] = value

    @property
    def is_inexact(self) -> bool:
        """Whether float64 lacks an operator of the call, which ran in a lower precision instead."""
        return bool(self._float64.inexact)

    def gradients(self, tangents: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The gradients of the arguments that have one, by name; of one that is there twice, by the first.

        Args:
            tangents: the gradient of each result that has one, by its name.
        """
        ends = {name: value for name, value in self.results.items() if name in tangents and requires_grad(value)}
        of = {name: leaf for name, leaf in self._leaves.items() if requires_grad(leaf)}
        if not ends or not of:
            return {}
        with self._running():
            given = [self._target.converted(tangents[name]).to(end) for name, end in ends.items()]
            with self._target.timer():
                found = torch.autograd.grad(list(ends.values()), list(of.values()), given, allow_unused=True)
        return {name: gradient for name, gradient in zip(of, found, strict=True) if gradient is not None}

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if not self._modes:
                stack.enter_context(torch.random.fork_rng(devices=[]))
                torch.set_rng_state(self._state)
            for mode in self._modes:
                stack.enter_context(mode)
            yield


def as_float64(function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]) -> object:
    """A function's result in float64, discrete results from floating-point values excepted.

    Raises:
        RuntimeError, TypeError, NotImplementedError: float64 has no kernel for it.
    """
    execution = CallExecution(function, args, kwargs)
    with execution.recording:
        function(*args, **kwargs)
    return execution.run(FLOAT64).returned


def named_tensors(value: object, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of nested lists, tuples and dictionaries, each with where it is: ``output``, ``output[1]``."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from named_tensors(item, f"{name}[{key}]")
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from named_tensors(item, f"{name}[{i}]")


def version_of(value: object) -> int:
    """How often a tensor was changed in place; 0 for one of inference mode, where PyTorch does not count."""
    return value._version if isinstance(value, torch.Tensor) and not value.is_inference() else 0


def requires_grad(value: object) -> TypeGuard[torch.Tensor]:
    """Whether a value is a tensor of which gradients are asked for."""
    return isinstance(value, torch.Tensor) and value.requires_grad


def _name(path: Sequence[Any]) -> str:
    """The name of a leaf of ``(args, kwargs)``, as ``named_tensors`` gives it."""
    keys = [getattr(key, "key", getattr(key, "idx", None)) for key in path]
    return ("kwargs" if keys[0] else "args") + "".join(f"[{key}]" for key in keys[1:])


def _requiring(leaf: object, wanted: bool) -> object:
    return leaf.requires_grad_(wanted) if isinstance(leaf, torch.Tensor) else leaf


def _changed(names: Sequence[str], values: Sequence[object], change: Change) -> list[object]:
    """The values with their floating-point tensors changed; one that is there twice is changed once."""
    changed: dict[int, object] = {}
    with torch.no_grad():
        for name, value in zip(names, values, strict=True):
            if isinstance(value, torch.Tensor) and value.is_floating_point() and id(value) not in changed:
                other = change(name, value)  # in place, where memory beside the elements may matter
                changed[id(value)] = value.copy_(other) if value.is_contiguous() else other
    return [changed.get(id(value), value) for value in values]
