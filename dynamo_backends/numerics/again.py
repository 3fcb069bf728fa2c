"""One call of a function made again beside itself, gradients included: in float64, on another device, elsewhere.

::

    again = CallAgain(function, args, kwargs, how=InFloat64())     # before the call: copies of its arguments
    with again.recording():
        result = function(*args, **kwargs)
    again.results()                     # of the copies: what the function returned, and the changed arguments
    again.gradients(gradients_of_results)

The call is any: of an ATen operator, of a function made of many, of a user's own.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree

from .exact import WIDER
from .randomness import PrivateRandomness
from .twice import Float64, Recording, copies


class How(Protocol):
    """In what a call is made again."""

    def convert(self, value: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor for it."""

    def copies(self, values: Sequence[object]) -> list[object]:
        """Copies of tensors that share memory where they do."""

    def running(self, recording: Recording, state: torch.Tensor) -> contextlib.AbstractContextManager[object]:
        """In what the function is called, and its gradients are computed.

        Args:
            recording: of the call itself.
            state: of the CPU's random numbers before the call.
        """


class InFloat64:
    """In float64 on the same device; what float64 must not decide is the call's own, see ``twice``.

    Args:
        decides_itself: whether comparisons and indices are float64's own.
        noise: each result inside is moved at random by up to so much of itself, as rounding would.

    Attributes:
        inexact: operators that PyTorch has no float64 of, with the reason.
    """

    def __init__(self, *, decides_itself: bool = False, noise: float = 0.0) -> None:
        self.inexact: dict[str, str] = {}
        self._decides = decides_itself
        self._noise = noise

    def convert(self, value: torch.Tensor) -> torch.Tensor:
        return value.detach().to(WIDER.get(value.dtype, value.dtype), copy=True)

    def copies(self, values: Sequence[object]) -> list[object]:
        return copies(values, wide=True)

    @contextlib.contextmanager
    def running(self, recording: Recording, state: torch.Tensor) -> Iterator[None]:
        mode = Float64(recording, decides_itself=self._decides, noise=self._noise)
        with PrivateRandomness(state), mode:
            yield
        self.inexact.update(mode.inexact)


class OnDevice:
    """On another device, in the same dtypes.

    Args:
        device: of the copies.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)

    def convert(self, value: torch.Tensor) -> torch.Tensor:
        return value.detach().to(self.device, copy=True)

    def copies(self, values: Sequence[object]) -> list[object]:
        made = copies(values)
        on_device = {id(item): item.to(self.device) for item in made if isinstance(item, torch.Tensor)}
        return [on_device.get(id(item), item) for item in made]

    def running(self, recording: Recording, state: torch.Tensor) -> contextlib.AbstractContextManager[object]:
        return PrivateRandomness(state)


class AsItIs(OnDevice):
    """On the CPU in the same dtypes, by a function that brings a runtime of its own: no mode is in its way."""

    def __init__(self) -> None:
        super().__init__("cpu")

    @contextlib.contextmanager
    def running(self, recording: Recording, state: torch.Tensor) -> Iterator[None]:
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(state)
            yield


class ChangedSinceError(RuntimeError):
    """An argument was changed after the call, so that its gradients cannot be computed again."""


@dataclasses.dataclass
class _Kept:
    """An argument as it is needed once more for the gradients."""

    value: Any
    version: int


class CallAgain:
    """A call made again on copies of its arguments; made before the call, which may write into them.

    No mode may be active that is not to see it; random numbers are drawn from a state of their own.

    Args:
        function: called with the copies.
        args, kwargs: of the call.
        how: in what.
        writes: whether the call may write into its arguments.
        in_memory: whether it reads memory beside their elements; then, and if it writes, the copies lie in memory as
            the arguments do.
        in_pytorch: computes the same in PyTorch, where ``function`` does not (a model of ONNX Runtime has its dtypes):
            called where another ``how`` is asked for.
    """

    def __init__(
        self,
        function: Callable[..., object],
        args: Sequence[object],
        kwargs: Mapping[str, object],
        how: How,
        *,
        writes: bool = False,
        in_memory: bool = False,
        in_pytorch: Callable[..., object] | None = None,
    ) -> None:
        self.function = function
        self._in_pytorch = in_pytorch or function
        self._how = how
        self._recording = Recording(raises=False)
        self._state = torch.get_rng_state()
        leaves, self._spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
        self._requires_grad = [_requires_grad(leaf) for leaf in leaves]
        self._dtypes = [leaf.dtype if isinstance(leaf, torch.Tensor) else None for leaf in leaves]
        self._writes = writes
        self._in_memory = in_memory or writes
        self._arguments: list[object] = [_detached(leaf) for leaf in leaves]
        self._versions = [_version(leaf) for leaf in leaves]
        self._copies: list[object] = self._copy(self._arguments)
        self._kept: list[object] = []

    def recording(self) -> contextlib.AbstractContextManager[object]:
        """In what the call itself is made: its random numbers and decisions are remembered."""
        return self._recording

    @property
    def is_random(self) -> bool:
        """Whether the call drew random numbers."""
        return self._recording.draws > 0

    @property
    def is_inexact(self) -> bool:
        """Whether float64 lacks an operator of the call, which ran in a lower precision instead."""
        return isinstance(self._how, InFloat64) and bool(self._how.inexact)

    @property
    def failure(self) -> str:
        """Why it cannot be made again, or ``""``."""
        return self._recording.failure

    def results(self) -> tuple[object, dict[int, torch.Tensor]]:
        """Calls the function again; after the call itself, and once.

        Returns:
            What it returned, and by position among the flattened arguments those copies that it wrote into.
        """
        given, self._copies = self._copies, []
        changed = [_version(value) for value in self._arguments] != self._versions
        if self._writes or changed:
            self._kept = given
            given = self._copy(given)
        else:
            self._kept = [_Kept(item, _version(item)) if _is_tensor(item) else item for item in self._arguments]
        self._arguments = []
        versions = [_version(value) for value in given]
        with torch.no_grad():
            result = self._call(given)
        written = {
            i: value
            for i, value in enumerate(given)
            if isinstance(value, torch.Tensor) and _version(value) != versions[i]
        }
        return result, written

    def with_other_arguments(self, change: Callable[[torch.Tensor], torch.Tensor], how: How | None = None) -> object:
        """What the function returns on changed copies of the arguments; after ``results``.

        Args:
            change: of each floating-point copy.
            how: in what, if not in the same.
        """
        with torch.no_grad():
            return self._call(_changed(self._given(how), change), how)

    def with_moved(self, names: Sequence[str], steps: Mapping[str, torch.Tensor]) -> object:
        """What the function returns where something is added to some arguments; after ``results``.

        Args:
            names: of the flattened arguments.
            steps: what is added, by name.
        """
        given = [
            value + steps[name] if isinstance(value, torch.Tensor) and name in steps else value
            for name, value in zip(names, self._given(), strict=True)
        ]
        with torch.no_grad():
            return self._call(given)

    def gradients(
        self,
        tangents: Mapping[str, torch.Tensor],
        name_results: Callable[[object, Sequence[object]], Mapping[str, Any]],
        change: Callable[[torch.Tensor], torch.Tensor] | None = None,
        how: How | None = None,
    ) -> dict[int, torch.Tensor | None]:
        """The gradients of the arguments that require them.

        Args:
            tangents: the gradient of each result that has one, by its name.
            name_results: names what the function returned and the arguments after it.
            change: of each floating-point copy of an argument.
            how: in what, if not in the same.

        Returns:
            By position among the flattened arguments; of one that is there twice, by the first.

        Raises:
            ChangedSinceError: an argument was changed in place since the call.
        """
        leaves = self._given(how)
        if change is not None:
            leaves = _changed(leaves, change)
        leaves = [
            value.requires_grad_(requires_grad) if isinstance(value, torch.Tensor) else value
            for value, requires_grad in zip(leaves, self._requires_grad, strict=True)
        ]
        with torch.enable_grad(), (how or self._how).running(self._recording, self._state):
            given = [
                leaf.clone() if self._writes and isinstance(leaf, torch.Tensor) and leaf.requires_grad else leaf
                for leaf in leaves
            ]
            args, kwargs = pytree.tree_unflatten(given, self._spec)
            results = name_results(self._function_for(how)(*args, **kwargs), given)
            ends = [name for name in tangents if name in results and _requires_grad(results[name])]
            positions = {id(leaf): i for i, leaf in reversed(list(enumerate(leaves))) if _requires_grad(leaf)}
            of = sorted(positions.values())
            if not ends or not of:
                return {}
            outputs = [results[name] for name in ends]
            convert = (how or self._how).convert
            grads = [convert(tangents[name]).to(end) for name, end in zip(ends, outputs, strict=True)]
            found = torch.autograd.grad(outputs, [leaves[i] for i in of], grads, allow_unused=True)
        return dict(zip(of, found, strict=True))

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the call as they were before it, in their dtypes; after ``results``."""
        leaves = [
            value.to(dtype).requires_grad_(requires_grad) if isinstance(value, torch.Tensor) else value
            for value, dtype, requires_grad in zip(self._given(), self._dtypes, self._requires_grad, strict=True)
        ]
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        return args, kwargs

    @property
    def coarsest(self) -> torch.dtype:
        """The floating-point or complex dtype of least precision among the arguments; float64 if there is none."""
        dtypes = [
            dtype for dtype in self._dtypes if dtype is not None and (dtype.is_floating_point or dtype.is_complex)
        ]
        return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float64)

    def _given(self, how: How | None = None) -> list[object]:
        """Copies of the arguments as they were before the call, for another ``how`` if one is asked for."""
        for item in self._kept:
            if isinstance(item, _Kept) and _version(item.value) != item.version:
                raise ChangedSinceError("an argument was changed in place after the call")
        return self._copy([item.value if isinstance(item, _Kept) else item for item in self._kept], how)

    def _copy(self, values: Sequence[object], how: How | None = None) -> list[object]:
        how = how or self._how
        if self._in_memory:
            return how.copies(values)
        known: dict[int, object] = {}
        for value in values:
            if isinstance(value, torch.Tensor) and id(value) not in known:
                known[id(value)] = how.convert(value)
        return [known.get(id(value), value) for value in values]

    def _call(self, given: Sequence[object], how: How | None = None) -> object:
        args, kwargs = pytree.tree_unflatten(list(given), self._spec)
        with (how or self._how).running(self._recording, self._state):
            return self._function_for(how)(*args, **kwargs)

    def _function_for(self, how: How | None) -> Callable[..., object]:
        return self.function if how is None else self._in_pytorch


def _changed(values: Sequence[object], change: Callable[[torch.Tensor], torch.Tensor]) -> list[object]:
    """The values with their floating-point tensors changed; one that is there twice is changed once."""
    floats = {id(value): value for value in values if isinstance(value, torch.Tensor) and value.is_floating_point()}
    with torch.no_grad():
        changed: dict[int, object] = {
            key: value.copy_(change(value)) if value.is_contiguous() else change(value) for key, value in floats.items()
        }  # in place, where memory beside the elements may matter
    return [changed.get(id(value), value) for value in values]


def _version(value: object) -> int:
    return value._version if isinstance(value, torch.Tensor) and not value.is_inference() else 0


def _requires_grad(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


def _detached(value: object) -> object:
    return value.detach() if isinstance(value, torch.Tensor) else value


def as_float64(function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]) -> object:
    """A function's result in float64, discrete results from floating-point values excepted.

    Raises:
        RuntimeError, TypeError, NotImplementedError: float64 has no kernel for it.
    """
    again = CallAgain(function, args, kwargs, InFloat64())
    with again.recording():
        function(*args, **kwargs)
    return again.results()[0]
