"""Runs a whole call again: in float64, or in the model's dtypes, with gradients.

::

    runs = CallRuns(arguments)                       # before the call, which may write into its arguments
    expected = runs.run(interpreted(captured))       # results, changed arguments, gradients
    actual = runs.run(interpreted(rewritten))
    runs.differing(captured, expected, actual)

Two programs that compute the same differ in float64 by its rounding only. How much that is, of numbers that cancel,
runs in which each value is perturbed show; they are made only if results differ.

- What depends on no argument is computed in the model's dtype: passes fold it.
- Random numbers are drawn in float32, from a private state.
- Uninitialized memory is filled with zeros.
- An operator without float64 runs in float32; it is named, and the perturbed runs have its rounding.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    is_traceable_wrapper_subclass,
)

from passes.engine.fx.editing import is_view, value_in, written_by

from ..common.operator_watchers import transforms_undone, without_saved_tensors_hooks
from ..exporter.upstream_faults import UNINITIALIZED
from ..graphs.operators import is_collective
from ..numerics import operator_facts as facts
from ..numerics.arrays import same_number
from ..numerics.exact import (
    BIT_CASTS,
    TOLERANT_REPLACEMENTS,
    WIDER,
    OperatorError,
    call_wide,
    called,
    floats,
    is_floating,
    widen,
    widened,
    wider_dtype,
)
from ..numerics.function_runs import NotRepeatableError, is_strided
from ..numerics.randomness import PrivateRandomness, draws_numbers, perturbed
from ..numerics.verdicts import epsilon
from .interpreter import Interpreter, flat

Key: TypeAlias = "int | tuple[str, int]"
"""``i`` for result i, ``("argument", j)`` for the memory of argument j after the call, ``("gradient", j)`` for its
gradient, ``("backward", j)`` for its memory after the backward."""

MOST_RUNS = 16
"""Runs with perturbed values, which are added one by one while they do not explain a difference."""

_FEW_RUNS = 4
"""After so many, a difference far beyond all of them is not explained by more."""

_UNITS = 4.0
"""By how many units in the last place float64 values are perturbed in these runs, and others by one."""

_TIMES = 16.0
"""How many times larger than in these runs a difference may be."""

_HOPELESS = 64.0

_OF_ELEMENT, _OF_ROW, _OF_FLOAT32 = 2.0**-46, 2.0**-46, 2.0**-23
"""Differences that need no perturbed runs: some thousand units of float64 of the element; or some hundred of the row's
largest, if the element differs by less than float32 can tell."""

_K = TypeVar("_K")

_RANDOM_STATES = {"run_and_save_rng_state", "run_with_rng_state"}
"""Higher-order operators that call an operator that draws random numbers."""


class WideMode(TorchDispatchMode):
    """Runs the operators of a call in float64.

    Args:
        state: of the CPU's random numbers.
        seed: of the perturbations of each value; ``None`` if there are none.
        rounding: the dtype by whose rounding float64 values are perturbed.
        widens: without it, the operators run in the model's dtypes.

    Attributes:
        widens: as given; an interpreter turns it off for constants.
        writes: how often operators wrote each storage, by its identity. Inference tensors have no version.
        draws: how many operators drew random numbers.
        inexact: operators without float64, with the reason.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        state: torch.Tensor,
        seed: int | None = None,
        *,
        rounding: torch.dtype = torch.float64,
        widens: bool = True,
    ) -> None:
        super().__init__()
        self.state = state
        self._rounding = rounding
        self._randomness = PrivateRandomness(state)
        self._generator = None if seed is None else torch.Generator().manual_seed(seed)
        self.perturbs = seed is not None
        self.widens = widens
        self.writes: collections.Counter[int] = collections.Counter()
        self.draws = 0
        self.inexact: dict[str, str] = {}

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """This mode and the private random numbers are active, and no other mode."""
        with _disable_current_modes(), self._randomness, self:
            yield

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        kwargs = kwargs or {}
        if is_collective(func):
            raise NotRepeatableError(f"{func} communicates with other processes, and is not run again")
        if isinstance(func, torch._ops.HigherOrderOperator):
            return self._higher_order(func, args, kwargs)
        self.writes.update(storage_of(leaf) for leaf in _tensors(_written_by(func, args, kwargs)))
        if draws_numbers(func, args, kwargs):
            return self._drawn(func, args, kwargs)
        if self.widens:
            args, kwargs = pytree.tree_map(wider_dtype, (args, kwargs))
        if func in UNINITIALIZED:
            result = func(*args, **kwargs).zero_()
            return widen(result) if self.widens else result
        return self._wide(func, args, kwargs) if self.widens else func(*args, **kwargs)

    def _wide(self, func: Any, args: Any, kwargs: Any) -> object:
        if func in BIT_CASTS and floats(args) and not args[1].is_floating_point:
            raise NotRepeatableError(f"{func} reads the bits of a number, which float64 does not have")
        if func._schema.is_mutable or is_view(func):
            return called(func, args, kwargs)
        args, kwargs = widened((args, kwargs))
        try:
            result = call_wide(func, args, kwargs)
        except OperatorError as error:
            result = called(func, *pytree.tree_map(_narrow, (args, kwargs)))
            if floats(result):
                self.inexact[str(func)] = str(error)
        return self._rounded_inside(func, args, kwargs, pytree.tree_map(self.perturbed, result))

    def _rounded_inside(self, func: Any, args: Any, kwargs: Any, result: Any) -> Any:
        """A result off by what the function rounds inside, see ``operator_facts``, if values are perturbed."""
        if self._generator is None or not isinstance(result, torch.Tensor) or result.is_complex():
            return result
        with _disable_current_modes(), torch.no_grad():
            size = facts.size_inside(func, args, kwargs)
            if size is None or size.shape != result.shape:
                return result
            change = perturbed(size.double(), self._unit(torch.float64), self._generator) - size
        return result + change

    def _unit(self, dtype: torch.dtype) -> float:
        """By how much a value of a dtype is perturbed, relative to itself."""
        dtype = max(dtype, self._rounding, key=epsilon)
        return (_UNITS if dtype is torch.float64 else 1.0) * epsilon(dtype)

    def perturbed(self, value: Any) -> Any:
        """A value in float64, perturbed by some units of the dtype that it was computed in, if runs are."""
        if self._generator is None or not is_floating(value):
            return widen(value)
        if value.is_complex():
            return torch.view_as_complex(self.perturbed(torch.view_as_real(value.resolve_conj())).contiguous())
        with _disable_current_modes():
            wide = widen(value)
            changed = perturbed(wide, self._unit(value.dtype), self._generator)
            return torch.where(
                wide == wide.round(), wide, changed
            )  # masks and indices are exact where they are compared

    def _drawn(self, func: Any, args: Any, kwargs: Any) -> object:
        """Draws in float32, also for a model in half precision, as all stages then do."""
        self.draws += 1
        if not self.widens:
            return func(*args, **kwargs)
        args, kwargs = pytree.tree_map(_single_dtype, (args, kwargs))
        written = _tensors(written_by(func, args, kwargs))
        drawn = func(*pytree.tree_map(_narrow, args), **pytree.tree_map(_narrow, kwargs))
        for tensor, new in zip(written, _tensors(drawn), strict=False):
            tensor.copy_(new)
        return written[0] if written else widened(drawn)

    def _higher_order(self, func: Any, args: Any, kwargs: Any) -> object:
        """Its subgraphs run in this mode."""
        if func.name() in _RANDOM_STATES and self.widens:
            self.draws += 1
            return widened(func(*pytree.tree_map(_narrow, args), **kwargs))

        def inside(value: object) -> object:
            return _Inside(self, value) if isinstance(value, fx.GraphModule) else value

        return func(*map(inside, args), **kwargs)


class _Inside(torch.nn.Module):
    """A subgraph of a higher-order operator, which runs in a mode."""

    def __init__(self, mode: WideMode, module: fx.GraphModule) -> None:
        super().__init__()
        self._mode, self._module = mode, module

    def forward(self, *args: object) -> object:
        with self._mode:
            return self._module(*args)


def _written_by(func: Any, args: Any, kwargs: Any) -> object:
    """What an operator writes; batch normalization in training writes its statistics, which its schema hides."""
    if func is torch.ops.aten.native_batch_norm.default and args[5]:
        return args[3:5]
    return written_by(func, args, kwargs)


def _narrow(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.dtype is torch.float64 else value


def _single_dtype(value: object) -> object:
    return torch.float32 if value in (torch.float16, torch.bfloat16, torch.float64) else value


def _tensors(values: object) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def storage_of(value: torch.Tensor) -> int:
    """Identifies the memory of a tensor; a tensor without one storage identifies itself."""
    return value.untyped_storage()._cdata if is_strided(value) else id(value)


@dataclasses.dataclass
class _WideConstant:
    """The memory of a constant in float64, and how often both had been written when it was made."""

    narrow: torch.Tensor
    wide: torch.Tensor
    writes: tuple[int, int]


class WideInterpreter(Interpreter):
    """Interprets a graph of any stage in a mode, which is active."""

    def __init__(self, module: fx.GraphModule, mode: WideMode) -> None:
        super().__init__(module, garbage_collect_values=True)
        self._mode = mode
        self.computed: set[fx.Node] = set()  # from arguments; others are constants
        self._constants: dict[int, _WideConstant] = {}

    def give(self, node: fx.Node, value: object, *, computed: bool) -> None:
        """Sets the value of a node, which was computed from arguments or not."""
        if self._mode.widens and computed:
            self.computed.add(node)
            value = pytree.tree_map(self._mode.perturbed, widened(value))
        self.env[node] = value

    def run_node(self, n: fx.Node) -> object:
        if not self._mode.widens:
            return super().run_node(n)
        if n.op in ("placeholder", "output"):
            self.computed.add(n)
            return pytree.tree_map(self._widened, super().run_node(n))  # what was written into a constant is there
        if n.op == "get_attr":
            return super().run_node(n)
        if not self._is_constant(n):
            self.computed.add(n)
            return self._run_wide(n)
        self._mode.widens, draws = False, self._mode.draws
        try:
            value = super().run_node(n)
        finally:
            self._mode.widens = True
        if self._mode.draws > draws:
            self.computed.add(n)
            return pytree.tree_map(self._mode.perturbed, value)
        return value

    def _run_wide(self, node: fx.Node) -> object:
        args, kwargs = pytree.tree_map(self._widened, self.fetch_args_kwargs_from_env(node))
        args, kwargs = _with_limits(node, *pytree.tree_map(wider_dtype, (args, kwargs)))
        value = getattr(self, node.op)(_TO_DOUBLE.get(node.target, node.target), args, kwargs)
        if isinstance(value, torch.Tensor) and any(value is item for item in args) and _casts(node):
            return value.clone()  # as the cast of the model's dtype, which float64 does not need
        return value

    def call_function(self, target: Any, args: Any, kwargs: Any) -> object:
        return super().call_function(TOLERANT_REPLACEMENTS.get(target, target), args, kwargs)

    def _is_constant(self, node: fx.Node) -> bool:
        """Whether a node depends on no argument, and none was written into what it reads."""
        if any(item in self.computed for item in node.all_input_nodes):
            return False
        read = _tensors([self.env[item] for item in node.all_input_nodes])
        known = (self._constants.get(storage_of(item)) for item in read)
        return not any(item is not None and self._writes(item.wide) != item.writes[1] for item in known)

    def _writes(self, value: torch.Tensor) -> int:
        return self._mode.writes[storage_of(value)]

    def _widened(self, value: Any) -> Any:
        """The float64 of a constant; constants that share memory have float64 that does."""
        if not isinstance(value, torch.Tensor) or value.dtype not in WIDER:
            return value
        if not is_strided(value):
            return self._mode.perturbed(value)
        known = self._constants.get(storage_of(value))
        if known is None or known.writes[0] != self._writes(value):
            wide = self._mode.perturbed(memory_of(value))
            known = _WideConstant(value, wide, (self._writes(value), self._writes(wide)))
            self._constants[storage_of(value)] = known
        return known.wide.as_strided(value.size(), value.stride(), value.storage_offset())


_TO_DOUBLE: dict[object, Any] = {
    **dict.fromkeys(("float", "half", "bfloat16"), "double"),
    **dict.fromkeys((torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16), torch.Tensor.double),
}
"""Methods that convert to a dtype, with their replacement in float64."""


def _with_limits(node: fx.Node, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of a node, where a missing one stands for a limit of its dtype: with that of the model's dtype.

    Half precision is computed in float32, whose epsilon is added then.
    """
    target = getattr(node.target, "_opname", getattr(node.target, "__name__", node.target))
    defaults = _LIMITS.get(str(target).removesuffix("_"))
    fake = value_in(node.all_input_nodes[0].meta) if defaults and node.all_input_nodes else None
    if not defaults or not isinstance(fake, torch.Tensor) or not fake.is_floating_point():
        return args, kwargs
    limits = torch.finfo(fake.dtype)
    values = {"max": limits.max, "min": limits.min, "eps": min(limits.eps, torch.finfo(torch.float32).eps)}
    args, kwargs = list(args), dict(kwargs)
    for name, (position, limit) in defaults.items():
        if position < len(args):
            args[position] = values[limit] if args[position] is None else args[position]
        elif kwargs.get(name) is None:
            kwargs[name] = values[limit]
    return tuple(args), kwargs


_LIMITS = {
    "nan_to_num": {"posinf": (2, "max"), "neginf": (3, "min")},
    "rms_norm": {"eps": (3, "eps")},
}
"""By function, the arguments that stand for a limit of the dtype if they are missing: position and limit."""


def _casts(node: fx.Node) -> bool:
    """Whether a node's first argument has another dtype in the model."""
    values = (value_in(item.meta) for item in (node, *node.all_input_nodes[:1]))
    return len({value.dtype for value in values if isinstance(value, torch.Tensor)}) > 1


def memory_of(value: torch.Tensor) -> torch.Tensor:
    """The whole memory of a strided tensor, as one dimension."""
    storage = value.untyped_storage()
    with _disable_current_modes():
        return value.new_empty(0).set_(storage, 0, (storage.nbytes() // value.element_size(),), (1,)).detach()


class _Passed(torch.autograd.Function):
    """Makes a result in the same memory of a leaf, which may be changed in place."""

    @staticmethod
    def forward(ctx: object, leaf: torch.Tensor) -> torch.Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


Program: TypeAlias = "Callable[[Sequence[object], WideMode], tuple[object, contextlib.AbstractContextManager[None]]]"
"""Takes arguments and the mode of a run; returns results, and the context for their backward."""


def interpreted(module: fx.GraphModule) -> Program:
    """A graph, run by an interpreter."""

    def run(arguments: Sequence[object], mode: WideMode) -> tuple[object, contextlib.AbstractContextManager[None]]:
        with mode.alone():
            results = WideInterpreter(module, mode).run(*arguments, enable_io_processing=False)
        return results, mode.alone()

    return run


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a run computed.

    Attributes:
        values: by key.
        inexact: operators without float64, with the reason.
        unchecked: why there are no gradients, or ``""``.
    """

    values: Mapping[Key, object]
    inexact: Mapping[str, str]
    unchecked: str = ""

    @property
    def not_float64(self) -> list[str]:
        return [f"{name} has no float64: {reason}" for name, reason in self.inexact.items()]


class CallRuns:
    """Runs programs on copies of the arguments of a call, in its grad mode and autocast. Made before the call.

    Memory is copied as a whole, so that views of each other stay views. The copies of memory that no run wrote are
    used by the next run.

    Args:
        arguments: the originals; not changed.
        state: of the CPU's random numbers; by default the current one.
        wide: in float64, or in the model's dtypes.
    """

    def __init__(self, arguments: Sequence[object], state: torch.Tensor | None = None, *, wide: bool = True) -> None:
        self.arguments = arguments
        self.state = torch.get_rng_state() if state is None else state
        self._wide = wide
        self._copies: dict[object, torch.Tensor] = {}

    def run(
        self,
        program: Program,
        seed: int | None = None,
        *,
        rounding: torch.dtype = torch.float64,
        gradients: bool = True,
    ) -> Outcome:
        """The outcome of a program; with a ``seed``, each value is perturbed by the rounding of a dtype.

        Gradients are computed where the user's call does, unless they are not wanted.

        Raises:
            NotRepeatableError: the program must run once only.
        """
        mode = WideMode(self.state, seed, rounding=rounding, widens=self._wide)
        given, leaves = self._given(mode)
        has_gradients = torch.is_grad_enabled()
        with torch.set_grad_enabled(has_gradients), transforms_undone(), without_saved_tensors_hooks():
            returned, backward = program(given, mode)
        results: dict[Key, object] = dict(enumerate(flat(returned)))
        ends = results | {("argument", j): given[j] for j in _written(given, mode)}
        values = {key: _detached(value) for key, value in results.items()}
        values |= self._memories(given, mode, "argument")
        tangents = {
            key: tangent(key, value)
            for key, value in ends.items()
            if has_gradients and isinstance(value, torch.Tensor) and value.requires_grad
        }
        if not tangents or not leaves or not gradients:
            return Outcome(values, mode.inexact)
        draws = mode.draws
        mode.writes.clear()
        with backward:
            outputs = [ends[key] for key in tangents]
            inputs = list(leaves.values())
            # AOTAutograd compiles a backward that keeps what it read, as the user's may run twice
            found = torch.autograd.grad(outputs, inputs, list(tangents.values()), allow_unused=True, retain_graph=True)
        values |= self._memories(given, mode, "backward")
        if mode.draws > draws:
            return Outcome(values, mode.inexact, "the backward draws random numbers, which cannot be reproduced")
        values |= {("gradient", j): _detached(value) for j, value in zip(leaves, found, strict=True)}
        return Outcome(values, mode.inexact)

    def differing(
        self, program: Program, expected: Outcome, actual: Outcome, rounding: torch.dtype = torch.float64
    ) -> list[Key]:
        """The keys of values that differ by more than the rounding of a dtype; ``expected`` is of ``program``."""
        has_gradients = not (expected.unchecked or actual.unchecked)
        keys = [key for key in {**expected.values, **actual.values} if has_gradients or not is_of_backward(key)]

        def again(seed: int) -> dict[Key, object]:
            outcome = self.run(program, seed, rounding=rounding)
            return {key: self.pair_of(key, expected, outcome)[1] for key in keys}

        return unexplained({key: self.pair_of(key, expected, actual) for key in keys}, again)

    def pair_of(self, key: Key, expected: Outcome, actual: Outcome) -> tuple[object, object]:
        """A value of two outcomes. Memory that was not written is that of the argument, a missing gradient is zero."""
        first, second = (self._value_of(key, outcome) for outcome in (expected, actual))
        if isinstance(key, tuple) and key[0] == "gradient":
            first = torch.zeros_like(second) if first is None and isinstance(second, torch.Tensor) else first
            second = torch.zeros_like(first) if second is None and isinstance(first, torch.Tensor) else second
        return first, second

    def _value_of(self, key: Key, outcome: Outcome) -> object:
        value = outcome.values.get(key)
        if value is not None or isinstance(key, int) or key[0] == "gradient":
            return value
        after_call = outcome.values.get(("argument", key[1]))
        argument = self.arguments[key[1]]
        if after_call is not None or not is_strided(argument):
            return after_call
        return memory_of(argument).to(WIDER.get(argument.dtype, argument.dtype))

    def _memories(self, given: Sequence[object], mode: WideMode, kind: str) -> dict[Key, object]:
        """The memory of the arguments that were written; the next run has other copies."""
        found: dict[Key, object] = {}
        for j in _written(given, mode):
            value = given[j]
            assert isinstance(value, torch.Tensor)
            found[kind, j] = memory_of(value).clone()
            self._copies = {key: copy for key, copy in self._copies.items() if storage_of(copy) != storage_of(value)}
        return found

    def _given(self, mode: WideMode) -> tuple[list[object], dict[int, torch.Tensor]]:
        """The arguments of one run, and autograd's leaves by the position of their first argument."""
        copied: dict[object, torch.Tensor] = {} if mode.perturbs else self._copies
        roots: dict[int, torch.Tensor] = {}
        leaves: dict[int, torch.Tensor] = {}

        def copy_of(value: torch.Tensor) -> torch.Tensor:
            if not is_strided(value):
                return self._changed(value.detach().clone(), mode)
            if value.is_conj() or value.is_neg() or value._is_zerotensor():
                return self._changed(value.detach().clone().resolve_conj().resolve_neg(), mode)
            key = storage_of(value), value.dtype
            if key not in copied:
                copied[key] = self._changed(memory_of(value), mode)
            storage = copied[key].untyped_storage()
            return copied[key].new_empty(0).set_(storage, value.storage_offset(), value.size(), value.stride())

        def root_of(value: torch.Tensor, position: int) -> torch.Tensor:
            if id(value) not in roots:
                leaf = copy_of(value)
                if value.requires_grad:
                    leaves[position] = leaf.requires_grad_()
                roots[id(value)] = _Passed.apply(leaf) if value.requires_grad and not value.is_leaf else leaf
            return roots[id(value)]

        def given(value: object, position: int) -> object:
            if not isinstance(value, torch.Tensor):
                return value
            base = value._base
            if base is None or not is_strided(value) or base.dtype != value.dtype or value.is_leaf:
                return root_of(value, position)
            view: torch.Tensor = root_of(base, position)
            return view.as_strided(value.size(), value.stride(), value.storage_offset())

        with torch.enable_grad():
            return [given(value, j) for j, value in enumerate(self.arguments)], leaves

    def _changed(self, value: torch.Tensor, mode: WideMode) -> torch.Tensor:
        """A copy in the dtype of the runs."""
        copied = value.to(WIDER.get(value.dtype, value.dtype) if self._wide else value.dtype)
        copied = copied.clone() if copied is value else copied
        return mode.perturbed(copied) if mode.perturbs else copied


def _written(given: Sequence[object], mode: WideMode) -> list[int]:
    """The positions of the arguments whose memory was written, the first of those that share it."""
    first = {storage_of(value): j for j, value in reversed(list(enumerate(given))) if isinstance(value, torch.Tensor)}
    return [j for storage, j in first.items() if mode.writes[storage]]


def _detached(value: object) -> object:
    return value.detach() if isinstance(value, torch.Tensor) else value


def tangent(key: Key, value: torch.Tensor) -> torch.Tensor:
    """A random gradient of a result or a changed argument, the same in each run."""
    generator = torch.Generator().manual_seed(2 * key if isinstance(key, int) else 2 * key[1] + 1)
    parts = [torch.randn(value.shape, dtype=torch.float64, generator=generator) for _ in range(1 + value.is_complex())]
    return (torch.complex(*parts) if value.is_complex() else parts[0]).to(value.dtype)


def is_of_backward(key: Key) -> bool:
    return isinstance(key, tuple) and key[0] != "argument"


def unexplained(
    pairs: Mapping[_K, tuple[object, object]], again: Callable[[int], Mapping[_K, object]], relative: float = 0.0
) -> list[_K]:
    """The keys of the pairs whose values differ by more than rounding; ``again`` perturbs the first of each.

    Elements may differ by ``relative`` of themselves.
    """
    wrong = [key for key, pair in pairs.items() if not is_close(*pair)]
    tensors = {key: _same_shape(*pairs[key]) for key in wrong}
    open_ = {key: _Noise(*pair, relative) for key, pair in tensors.items() if pair is not None}
    for number in range(1, MOST_RUNS + 1):
        if not open_:
            break
        others = again(number)
        for key, noise in list(open_.items()):
            other = _same_shape(pairs[key][0], others.get(key))
            if other is not None:
                noise.add(other[1])
            if noise.explains:
                wrong.remove(key)
            if noise.explains or (number >= _FEW_RUNS and noise.is_hopeless):
                del open_[key]
    return wrong


class _Noise:
    """How much a value differs from the expected one, and how much it does in perturbed runs."""

    def __init__(self, expected: torch.Tensor, actual: torch.Tensor, relative: float) -> None:
        self._expected = expected
        self._difference = distance(expected, actual)
        self._allowed = _rounding(expected)
        if expected.is_floating_point():
            self._allowed = torch.maximum(self._allowed, relative * expected.abs().nan_to_num_(0.0, 0.0, 0.0))

    def add(self, other: torch.Tensor) -> None:
        self._allowed = torch.maximum(self._allowed, distance(self._expected, other).mul_(_TIMES))

    @property
    def explains(self) -> bool:
        return bool((self._difference <= self._allowed).all())

    @property
    def is_hopeless(self) -> bool:
        return bool((self._difference > _HOPELESS * self._allowed.amax()).any())


def is_close(expected: object, actual: object) -> bool:
    """Whether two float64 values differ by no more than rounding does without cancellation."""
    pair = _same_shape(expected, actual)
    if pair is None:
        is_tensor = isinstance(expected, torch.Tensor) or isinstance(actual, torch.Tensor)
        return not is_tensor and (same_number(expected, actual) or not is_value(expected) or not is_value(actual))
    return torch.equal(*pair) or bool((distance(*pair) <= _rounding(pair[0])).all())


def is_value(value: object) -> bool:
    """Not an object of another kind, such as the context of ``_enter_autocast``, which each run makes anew."""
    return value is None or isinstance(value, (torch.Tensor, bool, int, float, complex))


def distance(expected: torch.Tensor, actual: torch.Tensor) -> torch.Tensor:
    """The magnitude of each element's difference; infinite where only one is finite, 0 or 1 of discrete elements."""
    different = (expected != actual) & ~(expected.isnan() & actual.isnan())
    if not expected.is_floating_point():
        return different.double()
    return torch.where(different, (expected - actual).abs().nan_to_num_(torch.inf), 0.0)


def _rounding(value: torch.Tensor) -> torch.Tensor:
    if not value.is_floating_point() or not value.numel():
        return torch.zeros(value.shape, dtype=torch.float64)
    size = value.abs().nan_to_num_(0.0, 0.0, 0.0)
    row = size.amax(-1, keepdim=True) if value.dim() else size
    return torch.minimum(_OF_ROW * row, _OF_FLOAT32 * size).add_(size, alpha=_OF_ELEMENT)


def _same_shape(expected: object, actual: object) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Two tensors as dense ones of real numbers; ``None`` if they cannot be compared element by element."""
    if not isinstance(expected, torch.Tensor) or not isinstance(actual, torch.Tensor):
        return None
    first, second = plain(expected), plain(actual)
    is_comparable = first.shape == second.shape and first.is_floating_point() == second.is_floating_point()
    return (first, second) if is_comparable else None


def plain(value: torch.Tensor) -> torch.Tensor:
    """A tensor as a dense one of real numbers, in float64 if it is of floating-point ones."""
    value = value.detach()
    if is_traceable_wrapper_subclass(value):
        names, _ = value.__tensor_flatten__()
        return torch.cat([plain(getattr(value, name)).reshape(-1).double() for name in names])
    if value.layout is not torch.strided:
        value = value.to_dense()
    if value.is_complex():
        value = torch.view_as_real(value.resolve_conj())
    return value.double() if value.is_floating_point() else value
