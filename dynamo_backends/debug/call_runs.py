"""Runs a whole call again: in float64, or in the model's dtypes, with gradients.

::

    runs = CallRuns(arguments)                       # before the call, which may write into its arguments
    expected = runs.run(interpreted(captured))       # results, changed arguments, gradients
    actual = runs.run(interpreted(rewritten))
    runs.differing(interpreted(captured), expected, actual)

Two equal programs differ only by the rounding of float64, however much cancellation amplifies it: by a tiny part of
what the rounding of the model's dtypes changes, which a run in these shows. If results differ by more, perturbed runs
decide, see ``numerics.whole_graph``.

What depends on no argument is computed in the model's dtype, since passes fold it.

Products take most of the time. One that the first program computed from the same numbers is not computed again, see
``KnownProducts``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass
from xxhash import xxh3_64_intdigest

from passes.engine.fx.editing import changes_memory, value_in

from ..common.operator_watchers import transforms_undone, without_saved_tensors_hooks
from ..common.random_state import RandomState
from ..graphs import partitioning
from ..numerics import operator_facts as facts
from ..numerics.arrays import as_array, dense, dtype_name
from ..numerics.exact import KERNEL_ERRORS, TOLERANT_REPLACEMENTS, floats, is_floating, widened, wider_dtype
from ..numerics.function_runs import CopiedMemory, Rerun, is_strided, memory_of, passed, storage_of
from ..numerics.randomness import PrivateRandomness
from ..numerics.rule import FORMATS, SPREAD, judge
from ..numerics.verdicts import RIGHT, Verdict, difference_in_kind, verdict, verdict_on
from ..numerics.whole_graph import ResultCheck
from .interpreter import Interpreter, flat

Key: TypeAlias = "int | tuple[str, int]"
"""``i`` for result i, ``("argument", j)`` for the memory of argument j after the call, ``("gradient", j)`` for its
gradient, ``("backward", j)`` for its memory after the backward."""


_K = TypeVar("_K")


_KEPT_BYTES = 2**29
"""The size of the products that are kept at once."""


class KnownProducts:
    """Products of matrices and convolutions that a program computed, for another one with the same.

    They are found by the operator and the bits of its arguments, each is used once, and as a copy. So neither program
    sees what the other writes. Those that have changed since are not used.
    """

    def __init__(self) -> None:
        self._results: dict[Hashable, tuple[torch.Tensor, int]] = {}
        self._left = _KEPT_BYTES

    def result(self, function: Any, args: Any, kwargs: Any, compute: Callable[[], Any]) -> Any:
        """The known result of an operator, or what ``compute`` returns, which is kept."""
        key = self._key(function, args, kwargs)
        known, content = self._results.pop(key, (None, 0))
        if known is not None:
            self._left += known.nbytes
            if _content(known) == content:
                return known.clone()
        result = compute()
        if result.nbytes <= self._left:
            self._left -= result.nbytes
            self._results[key] = result.detach(), _content(result)
        return result

    def _key(self, function: Any, args: Any, kwargs: Any) -> Hashable:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        parts = [
            (item.dtype, item.size(), item.stride(), _content(item)) if isinstance(item, torch.Tensor) else item
            for item in leaves
        ]
        return function, spec, tuple(parts)


def _content(value: torch.Tensor) -> int:
    """A hash of the elements of a tensor, in the order of its strides."""
    order = sorted(range(value.dim()), key=lambda dim: value.stride(dim), reverse=True)
    elements: Any = as_array(value.permute(order))  # a transposed matrix is not copied
    return xxh3_64_intdigest(elements)


class CallMode(Rerun):
    """Runs the operators of a call, and draws random numbers from a private state.

    Args:
        state: of the CPU's random numbers.
        others: of ``Rerun``.

    Attributes:
        products: that need not be computed again; ``None`` if all are computed.
    """

    def __init__(self, state: RandomState, seed: int | None = None, **others: Any) -> None:
        super().__init__(None, seed, **others)
        self.randomness = PrivateRandomness(state)
        self.products: KnownProducts | None = None

    def _compute(self, func: Any, args: Any, kwargs: Any) -> object:
        compute = functools.partial(super()._compute, func, args, kwargs)
        if self.products is None or not facts.is_product(func) or not all(map(is_strided, floats((args, kwargs)))):
            return compute()
        return self.products.result(func, args, kwargs, compute)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """This mode and the private random numbers are active, and no other mode."""
        with _disable_current_modes(), self.randomness, self:
            yield


class CallInterpreter(Interpreter):
    """Interprets a graph of any stage in a mode, which is active."""

    def __init__(self, module: fx.GraphModule, mode: CallMode) -> None:
        super().__init__(module, garbage_collect_values=True)
        self._mode = mode
        self._constants = constants_of(module.graph) if mode.is_wide else set()

    def run_node(self, n: fx.Node) -> object:
        if not self._mode.is_wide or n.op == "placeholder":
            return super().run_node(n)
        if n.op == "output":
            return widened(super().run_node(n))
        if n in self._constants:
            with _disable_current_modes(), self._mode.randomness:
                return super().run_node(n)
        if n.op == "get_attr":  # the graph writes into it
            return pytree.tree_map_only(torch.Tensor, torch.clone, widened(super().run_node(n)))
        args, kwargs = pytree.tree_map(wider_dtype, self.fetch_args_kwargs_from_env(n))
        if not self._constants.isdisjoint(n.all_input_nodes):
            args, kwargs = widened((args, kwargs))
        value = getattr(self, n.op)(_TO_DOUBLE.get(n.target, n.target), *_with_limits(n, args, kwargs))
        if isinstance(value, torch.Tensor) and any(value is item for item in args) and _casts(n):
            return value.clone()  # as the cast of the model's dtype, which float64 does not need
        return value

    def call_function(self, target: Any, args: Any, kwargs: Any) -> object:
        return super().call_function(TOLERANT_REPLACEMENTS.get(target, target), args, kwargs)


def constants_of(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that depend on no argument, and whose memory nothing writes."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op not in ("placeholder", "output") and found.issuperset(node.all_input_nodes):
            found.add(node)
    for node in graph.nodes:
        waiting = [node] if _writes(node) else []
        while waiting:
            item = waiting.pop()
            found.discard(item)
            waiting += [other for other in (*item.all_input_nodes, *item.users) if other in found]
    return found


def _writes(node: fx.Node) -> bool:
    is_in_place_method = node.op == "call_method" and str(node.target).endswith("_")
    return is_in_place_method or changes_memory(node) or node.kwargs.get("out") is not None


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


Program: TypeAlias = "Callable[[Sequence[object], CallMode], tuple[object, contextlib.AbstractContextManager[None]]]"
"""Takes arguments and the mode of a run; returns results, and the context for their backward."""


def interpreted(module: fx.GraphModule) -> Program:
    """A graph, run by an interpreter."""

    def run(arguments: Sequence[object], mode: CallMode) -> tuple[object, contextlib.AbstractContextManager[None]]:
        with mode.alone():
            results = CallInterpreter(module, mode).run(*arguments, enable_io_processing=False)
        return results, mode.alone()

    return run


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a run computed.

    Attributes:
        values: by key.
        mode: what the run found out about its operators.
        unchecked: why there are no gradients, or ``""``.
    """

    values: Mapping[Key, object]
    mode: Rerun
    unchecked: str = ""

    @property
    def not_float64(self) -> list[str]:
        return [f"{name} has {reason}" for name, reason in self.mode.inexact.items()]


class CallRuns:
    """Runs programs on copies of the arguments of a call, in its grad mode and autocast. Made before the call.

    Memory is copied as a whole, so that views of each other stay views. Copies that a run did not change are used by
    the next run.

    Args:
        arguments: the originals; not changed.
        state: of the CPU's random numbers; by default the current one.
        wide: in float64, or in the model's dtypes.
        narrow: the arguments in the model's dtypes, if the originals are in float64.
        rounded_to: the dtype of the rounding in perturbed runs in float64.
    """

    def __init__(
        self,
        arguments: Sequence[object],
        state: RandomState | None = None,
        *,
        wide: bool = True,
        narrow: Sequence[object] | None = None,
        rounded_to: torch.dtype = torch.float64,
    ) -> None:
        self.arguments, self._rounded_to = arguments, rounded_to
        self.state = RandomState.now() if state is None else state
        self._wide, self._narrow = wide, narrow or arguments
        self._copies = CopiedMemory(wide=wide)

    def run(
        self,
        program: Program,
        seed: int | None = None,
        *,
        gradients: bool = True,
        is_repeated: bool = False,
        products: KnownProducts | None = None,
    ) -> Outcome:
        """The outcome of a program; with a ``seed``, of one whose operators are perturbed by a rounding.

        Gradients are computed where the user's call does, unless they are not wanted. For ``is_repeated``, see
        ``Rerun``. ``products`` are those of the forward of another program, or receive those of this one.

        Raises:
            NotRepeatableError: the program must run once only.
        """
        mode = CallMode(self.state, seed, is_wide=self._wide, otherwise=self._rounded_to, is_repeated=is_repeated)
        given, leaves = self._given()
        before = hashes(given)
        has_gradients = torch.is_grad_enabled()
        mode.products = products
        with transforms_undone(), without_saved_tensors_hooks():
            returned, backward = program(given, mode)
        mode.products = None
        results: dict[Key, object] = dict(enumerate(flat(returned)))
        written, before = self._written(given, before)
        ends = results | {("argument", j): given[j] for j in written}
        values: dict[Key, object] = {key: _detached(value) for key, value in results.items()}
        values |= {("argument", j): memory_of(given[j]).clone() for j in written}
        tangents = {
            key: tangent(key, value)
            for key, value in ends.items()
            if has_gradients and isinstance(value, torch.Tensor) and value.requires_grad
        }
        if not tangents or not leaves or not gradients:
            return Outcome(values, mode)
        draws = mode.randomness.draws
        with backward, partitioning.backward_may_run_twice():
            outputs = [ends[key] for key in tangents]
            inputs = list(leaves.values())
            # AOTAutograd compiles a backward that keeps what it read, as the user's may run twice
            found = torch.autograd.grad(outputs, inputs, list(tangents.values()), allow_unused=True, retain_graph=True)
        values |= {("backward", j): memory_of(given[j]).clone() for j in self._written(given, before)[0]}
        if mode.randomness.draws > draws:
            why = "the backward draws random numbers, which cannot be reproduced"
            return Outcome(values, mode, why)
        for (j, leaf), gradient in zip(leaves.items(), found, strict=True):
            values["gradient", j] = torch.zeros_like(leaf) if gradient is None else gradient.detach()
        return Outcome(values, mode)

    def rounding(self, expected: Outcome, narrow: Outcome) -> dict[Key, torch.Tensor]:
        """What a run in the model's dtypes changes, see ``rounding_of``."""
        return rounding_of(expected.values, {key: self.value_of(key, narrow) for key in expected.values})

    def differing(
        self,
        program: Program,
        expected: Outcome,
        actual: Outcome,
        known: Mapping[Key, torch.Tensor] | None = None,
    ) -> dict[Key, Verdict]:
        """The values that differ by more than the rounding of float64.

        Args:
            program: that of ``expected``.
            expected, actual: what is compared.
            known: what ``self.rounding`` returned, if that is known.

        Raises:
            UnstableError: see ``differing``.
        """
        pairs = self._pairs(expected, actual)

        def again(seed: int) -> dict[Key, object]:
            outcome = self.run(program, seed)
            return {key: self.value_of(key, outcome) for key in pairs}

        def rounding() -> Mapping[Key, torch.Tensor]:
            return self.rounding(expected, self._run_narrow(program)) if known is None else known

        def unstable() -> Iterable[str]:
            return self.run(program, is_repeated=True).mode.unstable

        mode = expected.mode
        return differing(pairs, again, rounding, mode.terms, has_undefined=mode.reads_memory, unstable=unstable)

    def beyond_model(self, program: Program, expected: Outcome, actual: Outcome) -> dict[Key, Verdict]:
        """The values that differ by more than the rounding of the model's dtypes; ``expected`` is of ``program``.

        Passes and decompositions compute constants in these dtypes, such as the positions between pixels.
        """
        narrow = self._run_narrow(program)
        pairs = {key: (_plain(first), _plain(other)) for key, (first, other) in self._pairs(expected, actual).items()}
        found = {key: _beyond_model(*pair, _plain(self.value_of(key, narrow))) for key, pair in pairs.items()}
        return {key: item for key, item in found.items() if item.is_wrong}

    def _run_narrow(self, program: Program) -> Outcome:
        return CallRuns(self._narrow, self.state, wide=False).run(program)

    def _pairs(self, expected: Outcome, actual: Outcome) -> dict[Key, tuple[object, object]]:
        """The values of two outcomes; without gradients if one of them has none."""
        has_gradients = not (expected.unchecked or actual.unchecked)
        keys = [key for key in {**expected.values, **actual.values} if has_gradients or not is_of_backward(key)]
        return {key: (self.value_of(key, expected), self.value_of(key, actual)) for key in keys}

    def value_of(self, key: Key, outcome: Outcome) -> object:
        """A value of an outcome. Memory that was not changed is that of the argument, or of that after the call."""
        value = outcome.values.get(key)
        if value is not None or isinstance(key, int) or key[0] == "gradient":
            return value
        after_call, argument = outcome.values.get(("argument", key[1])), self.arguments[key[1]]
        return after_call if after_call is not None or not is_strided(argument) else widened(memory_of(argument))

    def _written(self, given: Sequence[object], before: Sequence[int | None]) -> tuple[list[int], list[int | None]]:
        """The positions of the arguments whose memory has changed, the first of those that share it; all hashes. The
        next run has other copies of these."""
        after = hashes(given)
        changed = {storage_of(given[j]): j for j in reversed(range(len(given))) if before[j] != after[j]}
        self._copies.forget(changed)
        return sorted(changed.values()), after

    def _given(self) -> tuple[list[object], dict[int, torch.Tensor]]:
        """The arguments of one run, and autograd's leaves by the position of their first argument."""
        roots: dict[int, torch.Tensor] = {}
        leaves: dict[int, torch.Tensor] = {}

        def root_of(value: torch.Tensor, position: int) -> torch.Tensor:
            if id(value) not in roots:
                leaf = self._copies.copy(value)
                if value.requires_grad:
                    leaves[position] = leaf.requires_grad_()
                roots[id(value)] = passed(leaf) if value.requires_grad and not value.is_leaf else leaf
            return roots[id(value)]

        def given(value: object, position: int) -> object:
            if not isinstance(value, torch.Tensor):
                return value
            base = value._base
            if base is None or not is_strided(value) or base.dtype != value.dtype or value.is_leaf:
                return root_of(value, position)
            return root_of(base, position).as_strided(value.size(), value.stride(), value.storage_offset())

        with torch.enable_grad():
            return [given(value, j) for j, value in enumerate(self.arguments)], leaves


def hashes(values: Sequence[object]) -> list[int | None]:
    """For each value, a hash of the memory that its elements are in, which is read once; 0 of a value that is no
    tensor, ``None`` if the memory cannot be read."""
    known: dict[int, int] = {}

    def hash_of(value: torch.Tensor) -> int | None:
        if is_strided(value):
            storage = storage_of(value)
            if storage not in known and value.device.type != "meta":
                memory: Any = as_array(_bytes_of(value).cpu())  # ``Tensor.numpy`` would keep the user from resizing it
                known[storage] = xxh3_64_intdigest(memory)
            return known.get(storage)
        parts = list(map(hash_of, _parts_of(value)))
        return None if not parts or None in parts else hash(tuple(parts))

    with torch.no_grad(), _disable_current_modes():
        return [hash_of(value) if isinstance(value, torch.Tensor) else 0 for value in values]


def _bytes_of(value: torch.Tensor) -> torch.Tensor:
    storage = value.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=value.device).set_(storage, 0, (storage.nbytes(),), (1,))


def _parts_of(value: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that a sparse tensor or one of a subclass consists of; empty if they are not known."""
    if is_traceable_wrapper_subclass(value):
        return [getattr(value, name) for name in value.__tensor_flatten__()[0]]
    if value.layout is torch.sparse_coo:
        return [value._indices(), value._values()]
    if value.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [value.crow_indices(), value.col_indices(), value.values()]
    if value.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [value.ccol_indices(), value.row_indices(), value.values()]
    return []


def _detached(value: object) -> object:
    return value.detach() if isinstance(value, torch.Tensor) else value


def tangent(key: Key, value: torch.Tensor) -> torch.Tensor:
    """A random gradient of a result or a changed argument, the same in each run."""
    generator = torch.Generator().manual_seed(2 * key if isinstance(key, int) else 2 * key[1] + 1)
    parts = [torch.randn(value.shape, dtype=torch.float64, generator=generator) for _ in range(1 + value.is_complex())]
    return (torch.complex(*parts) if value.is_complex() else parts[0]).to(value)


def is_of_backward(key: Key) -> bool:
    return isinstance(key, tuple) and key[0] != "argument"


def is_value(value: object) -> bool:
    """Not an object of another kind, such as the context of ``_enter_autocast``, which each run makes anew."""
    return value is None or isinstance(value, (torch.Tensor, bool, int, float, complex))


def _plain(value: object) -> object:
    """The tensors that one of a subclass consists of, as one; anything else unchanged."""
    if not isinstance(value, torch.Tensor) or not is_traceable_wrapper_subclass(value):
        return value
    return torch.cat([_plain(part).reshape(-1).double() for part in _parts_of(value)])  # type: ignore[attr-defined]


_IN_FLOAT64 = 2.0**-20
"""A smaller part of what rounding in the model's dtypes changes is rounding in float64, which is 2**-29 of float32's;
the margin is for programs that round at other places."""


def differing(
    pairs: Mapping[_K, tuple[object, object]],
    again: Callable[[int], Mapping[_K, object]],
    rounding: Callable[[], Mapping[_K, torch.Tensor]],
    terms: int,
    *,
    has_undefined: bool = False,
    unstable: Callable[[], Iterable[str]] = tuple,
) -> dict[_K, Verdict]:
    """The pairs whose values differ by more than rounding.

    Args:
        pairs: expected values, and others.
        again: makes a perturbed run with a seed, and returns the expected values in it.
        rounding: what rounding in the model's dtypes changes, see ``rounding_of``; called if values are not equal.
        terms: the most terms that an operator added up.
        has_undefined, unstable: see ``ResultCheck``.

    Raises:
        UnstableError: a value is not the same in each run, and no other differs.
    """
    expected = {key: _plain(first) for key, (first, _) in pairs.items() if is_value(first)}
    others = {key: _plain(pairs[key][1]) for key in expected}
    with _disable_current_modes():
        far = [key for key, value in expected.items() if not _is_near(value, others[key])]
    if far:
        try:
            rounded = rounding()
        except KERNEL_ERRORS:  # in the model's dtypes
            rounded = {}
        with _disable_current_modes():
            far = [key for key in far if not _is_near(expected[key], others[key], rounded.get(key))]

    def run(seed: int | None) -> Mapping[_K, object]:
        return expected if seed is None else {key: _plain(value) for key, value in again(seed).items() if key in far}

    eager = {key: expected[key] for key in far}
    check = ResultCheck(eager, run, terms=lambda: terms, has_undefined=has_undefined, unstable=unstable)
    return {key: found for key, found in check.judge_all({key: others[key] for key in far}) if found.is_wrong}


def rounding_of(exact: Mapping[_K, object], narrow: Mapping[_K, object]) -> dict[_K, torch.Tensor]:
    """By how much each element of float64's results may change if the model's dtypes are to round it away.

    That is a small part of what these change in its row, and no more than its own change and the rounding of float32;
    sums may cancel to zero by chance.
    """
    found: dict[_K, torch.Tensor] = {}
    with torch.no_grad(), _disable_current_modes():
        for key, value in exact.items():
            first, other = _plain(value), _plain(narrow.get(key))
            change = _changes(first, other)
            if change is None:
                continue
            assert isinstance(first, torch.Tensor) and isinstance(other, torch.Tensor)
            row = _largest_of_row(change)
            change += dense(first).abs().nan_to_num_(0.0, 0.0, 0.0) * FORMATS["float32"].epsilon
            change.masked_fill_(dense(other) == 0, torch.inf)
            found[key] = torch.minimum(row * _IN_FLOAT64, change).to(torch.bfloat16)  # it may be large
    return found


def _changes(exact: object, narrow: object) -> torch.Tensor | None:
    """What the model's dtypes change in each element of a result; ``None`` if that is not comparable."""
    if not is_floating(exact) or not is_floating(narrow) or not exact.numel():
        return None
    first, other = dense(exact), dense(narrow)
    return (first - other).abs().nan_to_num_(0.0, 0.0, 0.0) if first.shape == other.shape else None


def _largest_of_row(change: torch.Tensor) -> torch.Tensor:
    """The largest element of each row, which is what has the same first index: a single one may be zero by chance."""
    return change.amax(tuple(range(1, change.dim())) or None, keepdim=True)


def _beyond_model(expected: object, actual: object, narrow: object) -> Verdict:
    """Whether float64's results differ by more than the rounding of the model's dtypes, in which ``narrow`` is."""
    if not is_value(expected):
        return RIGHT
    with torch.no_grad(), _disable_current_modes():
        change = _changes(expected, narrow)
        complaint = difference_in_kind(actual, expected)
        if change is None or complaint or not isinstance(narrow, torch.Tensor):
            return verdict(actual, expected)
        assert isinstance(actual, torch.Tensor) and isinstance(expected, torch.Tensor)
        more = (_largest_of_row(change) * SPREAD[0]).expand(change.shape)
        value, reference = as_array(actual), as_array(expected)
        return verdict_on(value, reference, *judge(value, reference, dtype_name(narrow.dtype), as_array(more)))


def _is_near(expected: object, actual: object, rounding: torch.Tensor | None = None) -> bool:
    """Whether two results are equal, or differ by a small part of what rounding in the model's dtypes changes."""
    if not isinstance(expected, torch.Tensor) or not isinstance(actual, torch.Tensor):
        return False
    ours, theirs = dense(expected), dense(actual)
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return False
    if not is_floating(ours) or not ours.numel():
        return torch.equal(ours, theirs)
    more = None if rounding is None else as_array(rounding)
    return judge(as_array(theirs), as_array(ours), dtype_name(ours.dtype), more)[0].is_rounding
