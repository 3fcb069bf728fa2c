"""A session with weights as constants, which is rebuilt when a weight changes.

Before each call a ``Watch`` checks the weights. If one changed, a new session with the new values replaces the old one.
A weight that keeps changing becomes an input: building sessions must not take longer than running them.

A model that is compiled again, for symbolic sizes, has its weights in another session too. The old one is freed, since
Dynamo does not call its graph any more.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import logging
import weakref
from collections.abc import Collection, Mapping, Sequence, Set

import torch

from passes.engine.locks import Lock

from ..errors import SessionError, first_line
from ..events import count
from ..options import most_threads
from ..runtime.binding import BoundSession
from ..runtime.executable import Executable
from ..runtime.system_memory import available, give_back
from ..runtime.tensors import on_same_memory, uses_of
from .changes import CALLS, Addresses, Watch, addresses_of, can_be_watched

logger = logging.getLogger(__name__)

_MOST_NAMES = 8

_COPIES = 2
"""Copies of a constant while ONNX Runtime makes a session: the original and the packed one."""

FREE_REFRESHES = 3
"""Rebuilds, for each set of weights, of sessions that did not run ``WORTH_CALLS`` times."""

WORTH_CALLS = 50
"""Calls that pay for making a session: it takes 0.2 to 1 s, and constants save some 20 % of 5 to 100 ms."""

MOST_SETS = 256
"""Sets of weights with a session each: more than the deepest models have layers, which may be compiled one by one. Each
session has its own threads, so with many threads there are fewer (``most_threads``)."""

_MOST_SEEN = 10_000


@dataclasses.dataclass(frozen=True)
class Weight:
    """A parameter or buffer of the user's model.

    Attributes:
        name: the user's name, ``encoder.layer.0.weight``.
        tensor: its value when the graph was compiled.
        is_statistic: whether it is a running mean or variance of batch norm. PyTorch's kernels write it in training
            without incrementing its version.
    """

    name: str
    tensor: torch.Tensor
    is_statistic: bool = False


_states: weakref.WeakSet[_State] = weakref.WeakSet()
"""All of the process: weights may be constants of several graphs."""

_states_lock = Lock()


class _State:
    """A session with one set of weights, by the position of the argument, and the watch that detects changes.

    Calls in other threads may still use it when it is replaced.
    """

    def __init__(
        self, owner: FrozenSession, executable: Executable, weights: Mapping[int, torch.Tensor], *, complete: bool
    ) -> None:
        self.owner = weakref.ref(owner)
        self.tensors = [tensor.detach() for tensor in weights.values()]
        self.watch = Watch(list(weights.values()), complete=complete)  # before the session reads them
        executable = _chosen(executable, weights)
        self.bound = executable.load({position: on_same_memory(tensor) for position, tensor in weights.items()})
        self.calls = itertools.count()  # thread-safe
        self._addresses = dict(zip(map(id, weights.values()), self.watch.addresses, strict=True))
        with _states_lock:
            _states.add(self)

    def is_unused(self, current: Mapping[int, int], held: Mapping[int, int]) -> bool:
        """Whether no model has this set of weights any more: nobody else holds the memory of a weight, or a tensor of
        the set has another address now.

        Such a tensor may get its old memory back (``p.data = ...``), but its version does not count writes to that
        memory in between.

        Args:
            current: the addresses of the current weights, by the ``id`` of the tensor.
            held: the result of ``_held_by_sessions``.
        """
        if any(self._addresses.get(tensor, address) != address for tensor, address in current.items()):
            return True
        storages = (tensor.untyped_storage() for tensor in self.tensors)
        return any(uses_of(storage) <= 1 + held[storage._cdata] for storage in storages)  # 1: ``storage`` itself


_USES = 3
"""References of a state to the storage of a weight: by its tensor, its watch, and ``on_same_memory``. The session and
ONNX Runtime refer to the result of the last, as often as their versions do."""


def _held_by_sessions() -> collections.Counter[int]:
    """How often the states of this process refer to each storage."""
    with _states_lock:
        states = list(_states)
    held: collections.Counter[int] = collections.Counter()
    for tensor in (tensor for state in states for tensor in state.tensors):
        held[tensor.untyped_storage()._cdata] += _USES
    return held


def pool_threads() -> int:
    """Number of threads in the pools of the states of this process."""
    with _states_lock:
        states = list(_states)
    return sum(state.bound.session.pool_threads for state in states)


def _threads_fit(threads: int) -> bool:
    """Whether a state with so many threads may be added: all together have ``most_threads`` at most."""
    return pool_threads() + threads - 1 <= most_threads()


class FrozenSession:
    """Runs an executable with weights as constants.

    Several sets of weights may share an executable: those of layers that are compiled one by one, or of weights and
    their moving average. A set gets a session at its second call; at the first, which may be the only one, its weights
    are inputs.

    Args:
        executable: the model.
        weights: the weights that are constants, by the position of the argument.
        complete: whether each call reads every byte of the weights.

    Attributes:
        sets: the sets of weights that have a session, by their addresses.

    Raises:
        SessionError: ONNX Runtime rejected the model.
    """

    def __init__(self, executable: Executable, weights: Mapping[int, Weight], *, complete: bool = False) -> None:
        self._executable = executable
        self._names = {position: weight.name for position, weight in weights.items()}
        self._statistics = {position for position, weight in weights.items() if weight.is_statistic}
        self._complete = complete
        self._lock = Lock()
        self._positions = tuple(weights)
        self.sets: dict[Addresses, _State] = {}
        self._most_sets = 0  # the maximum so far
        self._early_rebuilds = 0  # of sessions with fewer than WORTH_CALLS calls, minus other rebuilds
        self._seen: set[int] = set()  # hashes of addresses
        self._without_constants: _State | None = None  # for sets that came once, or are too many
        self._was_replaced = False
        self._is_full = False
        self._build([weight.tensor for weight in weights.values()])

    @property
    def bound(self) -> BoundSession:
        """A session of the executable, with any weights."""
        with self._lock:
            return (next(iter(self.sets.values()), None) or self._inputs_only()).bound

    def chosen(self, args: Sequence[torch.Tensor | int | bool], *, complete: bool = False) -> BoundSession:
        """The session for the current weights.

        Args:
            args: all arguments of a call.
            complete: whether to read every byte of the weights.
        """
        tensors = [args[i] for i in self._positions]
        state = self.sets.get(addresses_of(tensors))
        if state is None or complete or not state.watch.is_unchanged(tensors):
            state = self._current_state(args)
        next(state.calls)
        return state.bound

    def __call__(self, args: Sequence[torch.Tensor | int | bool]) -> list[torch.Tensor | int | bool]:
        """Runs the model on all arguments, with the current weights, see ``BoundSession.__call__``."""
        return self.chosen(args)(args)

    def stale(self, args: Sequence[torch.Tensor | int | bool]) -> dict[int, str]:
        """The positions and names of weights of which the session for these arguments has other values.

        ``chosen`` prevents this; the debugger checks it when a session is wrong.
        """
        tensors = [args[i] for i in self._positions]
        with self._lock:
            state = self.sets.get(addresses_of(tensors))
        stale = state.watch.differing(tensors) if state is not None else []
        return {self._positions[i]: self._name(i) for i in stale}

    def _current_state(self, args: Sequence[torch.Tensor | int | bool]) -> _State:
        """The state for the current weights, built if needed."""
        with self._lock:
            tensors: list[torch.Tensor] = [args[i] for i in self._positions]
            addresses = addresses_of(tensors)
            state = self.sets.get(addresses)
            if state is not None:
                changed, unseen = state.watch.changed(tensors)
                return self._rebuild(args, [state], changed, unseen) if changed else state
            evicted = self._evict_unused(dict(zip(map(id, tensors), addresses, strict=True)))
            if not evicted and all(map(can_be_watched, tensors)):
                return self._add_set(addresses, tensors)
            known = [state.watch.addresses for state in evicted] + list(self.sets)
            changed = [i for i, address in enumerate(addresses) if all(one[i] != address for one in known)]
            return self._rebuild(args, evicted, changed or range(len(addresses)), [])  # all: sets may be mixed

    def _rebuild(
        self,
        args: Sequence[torch.Tensor | int | bool],
        replaced: Sequence[_State],
        changed: Sequence[int],
        unseen: Sequence[int],
    ) -> _State:
        """A state that replaces others, because some weights changed.

        ``changed`` are indices in ``self._positions``; ``unseen`` of these were written without PyTorch's knowledge.
        """
        count("weight_refreshes")
        logger.info("a session is rebuilt because weights changed: %s", self._listed(changed))
        self._warn_of_unseen([i for i in unseen if self._positions[i] not in self._statistics])
        for state in replaced:
            self.sets.pop(state.watch.addresses, None)
            self._early_rebuilds += 1 if next(state.calls) < WORTH_CALLS else -1
            self._early_rebuilds = max(0, self._early_rebuilds)
        keep_changing = self._early_rebuilds > FREE_REFRESHES * self._most_sets
        tensors: list[torch.Tensor] = [args[i] for i in self._positions]
        inputs = [i for i in range(len(tensors)) if keep_changing and i in changed or not can_be_watched(tensors[i])]
        if inputs:
            count("weights_made_inputs", len(inputs))
            logger.info("weights that keep changing, or cannot be watched, become inputs: %s", self._listed(inputs))
            self.sets.clear()
            self._early_rebuilds = 0
            self._positions = tuple(p for i, p in enumerate(self._positions) if i not in inputs)
            tensors = [args[i] for i in self._positions]
        return self._try_build(tensors)

    def _warn_of_unseen(self, unseen: Sequence[int]) -> None:
        if unseen:
            count("weights_written_unseen", len(unseen))
            logger.warning(
                "%s changed without PyTorch's knowledge (through .data, numpy() or DLPack). Up to %d calls since then "
                "may have used the old values; write under torch.no_grad() instead, or use "
                "options={'weights': 'checked'}",
                self._listed(unseen),
                CALLS,
            )

    def _add_set(self, addresses: Addresses, tensors: Sequence[torch.Tensor]) -> _State:
        """The state for one more set of weights."""
        name = hash(addresses)
        if name in self._seen and not self._is_full:
            if len(self.sets) < MOST_SETS and _threads_fit(self._executable.settings.current_threads) and _fit(tensors):
                state = self._try_build(tensors)
                if state is not self._without_constants:
                    count("weight_sets")
                return state
            self._is_full = True
            count("weight_sets_full")
        if len(self._seen) >= _MOST_SEEN:
            self._seen.clear()
        self._seen.add(name)
        return self._inputs_only()

    def _evict_unused(self, current: Mapping[int, int]) -> list[_State]:
        """Evicts and returns the states that ``is_unused``."""
        held = _held_by_sessions()
        unused = {addresses: state for addresses, state in self.sets.items() if state.is_unused(current, held)}
        for addresses in unused:
            del self.sets[addresses]
        self._is_full = self._is_full and not unused
        return list(unused.values())

    def _inputs_only(self) -> _State:
        """The state without constants, built at first use."""
        if self._without_constants is None:
            self._without_constants = _State(self, self._executable, {}, complete=False)
        return self._without_constants

    def _try_build(self, tensors: Sequence[torch.Tensor]) -> _State:
        """A new state; the one without constants if ONNX Runtime has no memory for it."""
        try:
            return self._build(tensors)
        except SessionError as error:
            logger.warning("weights are inputs, which is slower: %s", first_line(str(error)))
            self._is_full = True
            return self._inputs_only()

    def _build(self, tensors: Sequence[torch.Tensor]) -> _State:
        executable = self._executable
        if self.sets:  # layers that are compiled one by one run one after the other
            executable = dataclasses.replace(
                executable, settings=dataclasses.replace(executable.settings, shares_graph=True)
            )
        state = _State(self, executable, dict(zip(self._positions, tensors, strict=True)), complete=self._complete)
        self.sets[state.watch.addresses] = state
        self._most_sets = max(self._most_sets, len(self.sets))
        self._free_replaced(set(state.watch.addresses))
        give_back()
        return state

    def _free_replaced(self, weights: Set[int]) -> None:
        """Frees the sessions with the same weights of graphs that this one replaced."""
        with _states_lock:
            owners = [state.owner() for state in _states if set(state.watch.addresses) == weights != set()]
        for owner in owners:
            if owner is not None and self._executable.generalizes(owner._executable):
                owner._free(weights)

    def _free(self, weights: Set[int]) -> None:
        """Frees the session with these weights, once: if its graph is called all the same, for instance by another
        compiled model, they are a new set of weights."""
        with self._lock:
            if not self._was_replaced:
                self._was_replaced = True
                self.sets = {addresses: state for addresses, state in self.sets.items() if set(addresses) != weights}
                count("replaced_sessions_freed")
                logger.info("a session is freed: a graph for symbolic sizes replaced its graph")

    def _name(self, index: int) -> str:
        return self._names[self._positions[index]]

    def _listed(self, indices: Sequence[int]) -> str:
        shown = ", ".join(map(self._name, indices[:_MOST_NAMES]))
        return shown if len(indices) <= _MOST_NAMES else f"{shown} and {len(indices) - _MOST_NAMES} more"


def load_session(
    executable: Executable, constants: Mapping[int, Weight], *, complete: bool
) -> BoundSession | FrozenSession:
    """A session of an executable with weights as constants.

    The weights stay inputs if there is not enough memory for their copies, or if ONNX Runtime rejects only the model
    with constants.

    Args:
        executable: the model.
        constants: by the position of the argument; its weights that are not among them stay inputs.
        complete: whether each call reads every byte of the weights.

    Raises:
        SessionError: ONNX Runtime rejected the model.
    """
    why = ""
    if constants and _fit([weight.tensor for weight in constants.values()]):
        try:
            session = FrozenSession(executable, constants, complete=complete)
        except SessionError as error:
            why = first_line(str(error))
        else:
            count("constant_weights", len(constants))
            _count_inputs(len(executable.weights) - len(constants))
            return session
    bound = _chosen(executable, ()).load()
    if why:
        logger.warning("weights are inputs, which is slower: %s", why)
    _count_inputs(len(executable.weights))
    return bound


def _count_inputs(number: int) -> None:
    if number:
        count("weights_left_inputs", number)


def _chosen(executable: Executable, constants: Collection[int]) -> Executable:
    """An executable whose other weights are inputs."""
    chosen, made = executable.with_constants(constants)
    if made:
        count("choices_without_weights", made)
    return chosen


def _fit(weights: Sequence[torch.Tensor]) -> bool:
    """Whether there is enough memory for the copies of weights."""
    size, free = sum(weight.nbytes for weight in weights), available()
    if free is None or _COPIES * size <= free:
        return True
    logger.warning(
        "weights of %.1f GB stay inputs, which is slower: as constants they need %.1f GB more, and %.1f GB are free",
        size / 1e9,
        _COPIES * size / 1e9,
        free / 1e9,
    )
    return False
