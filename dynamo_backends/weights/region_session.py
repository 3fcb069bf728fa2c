"""The session of a region, with weights as constants; it is rebuilt when a weight changes.

Before each call a ``Watch`` checks the weights. What follows a change is decided by two times, both measured: how long
the session took to build, and how long its calls took since then (``RegionSession``).

A model that is compiled again, for symbolic sizes, has its weights in another session too. The old one is freed, since
Dynamo does not call its graph any more.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import math
import time
import weakref
from collections.abc import Collection, Mapping, Sequence, Set
from typing import NamedTuple

import torch

from ..common.fork_safety import Lock
from ..common.text_table import listed
from ..errors import SessionError, first_line
from ..events import count
from ..options import most_threads
from ..runtime.executable import Executable
from ..runtime.session import Session
from ..runtime.system_memory import available, give_back
from ..runtime.tensors import on_same_memory, uses_of
from .changes import Snapshot, watch_of
from .watchable import CALLS, Addresses, addresses_of, can_be_watched

logger = logging.getLogger(__name__)

_MOST_NAMES = 8

_COPIES = 2
"""Copies of a constant while ONNX Runtime makes a session: the original and the packed one."""

MOST_SETS = 256
"""Sets of weights with a session each: more than the deepest models have layers, which may be compiled one by one. Each
session has its own threads, so with many threads there are fewer (``most_threads``)."""

_MOST_SEEN = 10_000

clock = time.perf_counter
"""Seconds; for how long sessions are built and run."""


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

    Attributes:
        cost: how long it took to build, in seconds.
        seconds: how long its calls took.
    """

    def __init__(
        self, owner: RegionSession, executable: Executable, weights: Mapping[int, torch.Tensor], *, complete: bool
    ) -> None:
        started = clock()
        self.owner = weakref.ref(owner)
        self.tensors = [tensor.detach() for tensor in weights.values()]
        self.watch = watch_of(list(weights.values()), complete=complete)  # before the session reads them
        executable = _chosen(executable, weights)
        self.bound = executable.load({position: on_same_memory(tensor) for position, tensor in weights.items()})
        self.watch.session_was_made(list(weights.values()))
        self._addresses = dict(zip(map(id, weights.values()), self.watch.addresses, strict=True))
        self.cost = clock() - started
        self.seconds = 0.0
        if owner.has_weights:
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
    """How often the states and snapshots of this process refer to each storage."""
    with _states_lock:
        states = list(_states)
    held: collections.Counter[int] = collections.Counter()
    for tensor in (tensor for state in states for tensor in state.tensors):
        held[tensor.untyped_storage()._cdata] += _USES
    owners = {state.owner() for state in states} - {None}
    for tensor in (tensor for owner in owners if owner is not None for tensor in owner.snapshot.tensors):
        held[tensor.untyped_storage()._cdata] += 1
    return held


def pool_threads() -> int:
    """Number of threads in the pools of the states of this process."""
    with _states_lock:
        states = list(_states)
    return sum(state.bound.pool_threads for state in states)


def _threads_fit(threads: int) -> bool:
    """Whether a state with so many threads may be added: all together have ``most_threads`` at most."""
    return pool_threads() + threads - 1 <= most_threads()


class _Sessions(NamedTuple):
    """What a call chooses its session from; replaced as a whole, since calls in other threads read it.

    Attributes:
        positions: the arguments that are constants.
        states: for each set of weights at these positions; without constants for sets that have to do without.
    """

    positions: tuple[int, ...]
    states: Mapping[Addresses, _State]


class RegionSession:
    """Runs an executable, with weights as constants where that pays.

    The weights are inputs at first if there is not enough memory for their copies, or if ONNX Runtime rejects only the
    model with constants. When a weight changes:

    - If the session ran for as long as it took to build, a new one with the new values replaces it.
    - If not, all weights become inputs. When calls have taken as long as building took, the weights that stayed the
      same meanwhile become constants; the others are looked at again after as long. Each session that did not run as
      long as it took doubles this time.

    So building takes no longer than running, whatever changes; and weights that no longer change become constants. It
    is the rule for renting or buying skis. What fails for lack of memory is tried again by the same rule.

    Several sets of weights may share an executable: those of layers that are compiled one by one, or of weights and
    their moving average. A set gets a session at its second call; at the first, which may be the only one, its weights
    are inputs.

    Args:
        executable: the model.
        weights: those that may be constants, by the position of the argument; the executable's others stay inputs.
        complete: whether each call reads every byte of the weights.
        frame: of the graph, see ``GraphName``.

    Attributes:
        snapshot: of the weights that are inputs, when it was last looked at them.

    Raises:
        SessionError: ONNX Runtime rejected the model, and not only with constants.
    """

    def __init__(
        self,
        executable: Executable,
        weights: Mapping[int, Weight],
        *,
        complete: bool = False,
        frame: int | None = None,
    ) -> None:
        self._executable = executable
        self._frame = frame
        self._names = {position: weight.name for position, weight in weights.items()}
        self._statistics = {position for position, weight in weights.items() if weight.is_statistic}
        self._complete = complete
        self._lock = Lock()
        self._weights = tuple(weights)
        self._current = _Sessions(self._weights, {})
        self._seen: set[int] = set()  # hashes of addresses
        self._without_constants: _State | None = None
        self._was_replaced = False
        self._is_full = False  # whether a set of weights once had to do without a session
        self._seconds = 0.0  # of all calls
        self._cost = 0.0  # of the last attempt to build a session
        self._patience = 0.0  # seconds of calls in which a weight must not change to become a constant
        self._look_at = math.inf  # seconds of calls after which to look whether inputs may become constants
        self.snapshot = Snapshot(())
        if len(weights) < len(executable.weights):
            count("weights_left_inputs", len(executable.weights) - len(weights))
        if not weights:
            self._current = _Sessions((), {(): self._inputs_only()})
            return
        tensors = {position: weight.tensor for position, weight in weights.items()}
        if not _fit(list(tensors.values())) or self._build(self._weights, list(tensors.values()), {}) is None:
            self._make_inputs(tensors)
        count("constant_weights" if self._current.positions else "weights_left_inputs", len(weights))

    @property
    def has_weights(self) -> bool:
        """Whether some arguments may be constants."""
        return bool(self._weights)

    @property
    def sets(self) -> dict[Addresses, _State]:
        """The sets of weights that have a session of their own, by their addresses."""
        return {addresses: state for addresses, state in self._current.states.items() if state.watch.addresses}

    @property
    def bound(self) -> Session:
        """A session of the executable, with any weights."""
        with self._lock:
            return (next(iter(self._current.states.values()), None) or self._inputs_only()).bound

    def chosen(self, args: Sequence[torch.Tensor | int | bool], *, complete: bool = False) -> Session:
        """The session for the current weights.

        Args:
            args: all arguments of a call.
            complete: whether to read every byte of the weights.
        """
        return self._chosen_state(args, complete=complete).bound

    def __call__(self, args: Sequence[torch.Tensor | int | bool]) -> list[torch.Tensor | int | bool]:
        """Runs the model on all arguments, with the current weights, see ``Session.__call__``."""
        state = self._chosen_state(args)
        started = clock()
        try:
            return state.bound(args)
        finally:
            seconds = clock() - started
            state.seconds += seconds  # calls in other threads may get lost, which does no harm
            self._seconds += seconds

    def stale(self, args: Sequence[torch.Tensor | int | bool]) -> dict[int, str]:
        """The positions and names of weights of which the session for these arguments has other values.

        ``chosen`` prevents this; the debugger checks it when a session is wrong.
        """
        positions, states = self._current
        tensors = [args[i] for i in positions]
        state = states.get(addresses_of(tensors))
        if state is None or state is self._without_constants:
            return {}
        return {positions[i]: self._names[positions[i]] for i in state.watch.differing(tensors)}

    def _chosen_state(self, args: Sequence[torch.Tensor | int | bool], *, complete: bool = False) -> _State:
        positions, states = self._current
        tensors = list(map(args.__getitem__, positions))
        state = states.get(addresses_of(tensors))
        if state is None or complete or self._seconds >= self._look_at or not state.watch.is_unchanged(tensors):
            state = self._current_state(args)
        return state

    def _current_state(self, args: Sequence[torch.Tensor | int | bool]) -> _State:
        """The state for the current weights, built if needed."""
        with self._lock:
            if self._seconds >= self._look_at:
                self._look_again(args)
            positions, states = self._current
            tensors: list[torch.Tensor] = [args[i] for i in positions]
            addresses = addresses_of(tensors)
            state = states.get(addresses)
            if state is not None:
                changed, unseen = state.watch.changed(tensors) if state is not self._without_constants else ([], [])
                return self._replace(args, [state], changed, unseen) if changed else state
            evicted = self._unused(dict(zip(map(id, tensors), addresses, strict=True)))
            if not evicted and all(map(can_be_watched, tensors)):
                return self._add_set(addresses, tensors)
            changed = [i for i, address in enumerate(addresses) if all(one[i] != address for one in states)]
            return self._replace(args, evicted, changed or range(len(addresses)), [])  # all: sets may be mixed

    def _replace(
        self,
        args: Sequence[torch.Tensor | int | bool],
        replaced: Sequence[_State],
        changed: Sequence[int],
        unseen: Sequence[int],
    ) -> _State:
        """A state that replaces others, because some weights changed.

        ``changed`` are indices in the current positions; ``unseen`` of these were written without PyTorch's knowledge.
        """
        positions, states = self._current
        count("weight_refreshes")
        logger.info("a session is replaced because weights changed: %s", self._listed([positions[i] for i in changed]))
        self._warn_of_unseen([positions[i] for i in unseen if positions[i] not in self._statistics])
        tensors: list[torch.Tensor] = [args[i] for i in positions]
        if all(state.seconds >= state.cost for state in replaced) and all(map(can_be_watched, tensors)):
            others = {addresses: state for addresses, state in states.items() if state not in replaced}
            state = self._build(positions, tensors, others)
            if state is not None:
                self._patience = min(self._patience, state.cost)
                return state
        return self._make_inputs({i: args[i] for i in self._weights})

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

    def _make_inputs(self, weights: Mapping[int, torch.Tensor]) -> _State:
        """Makes all weights inputs, until some stay the same for long enough."""
        positions, states = self._current
        if states:
            count("weights_made_inputs", len(positions))
            logger.info("weights that changed too soon, or cannot be constants, become inputs with all others")
        held = [
            item for state in states.values() for item in zip(positions, state.tensors, strict=False)
        ]  # none without constants
        without_constants = self._inputs_only()
        self._current = _Sessions((), {(): without_constants})
        self.snapshot = Snapshot([*held, *weights.items()])
        self._wait(max(without_constants.cost, sum(state.cost for state in states.values())))
        return without_constants

    def _wait(self, cost: float) -> None:
        """Waits longer than before, and for as long as building takes at least, until inputs may become constants."""
        self._patience = max(2 * self._patience, cost, self._cost)
        self._look_at = self._seconds + self._patience

    def _look_again(self, args: Sequence[torch.Tensor | int | bool]) -> None:
        """Makes inputs constants that did not change since the last look; lets sets without constants try again."""
        self._look_at = self._seconds + self._patience  # calls in other threads go on meanwhile
        positions, _ = self._current
        stable = sorted(self.snapshot.unchanged((i, args[i]) for i in self._weights if i not in positions))
        if stable:
            more = tuple(i for i in self._weights if i in positions or i in stable)
            tensors: list[torch.Tensor] = [args[i] for i in more]
            if all(map(can_be_watched, tensors)) and _fit(tensors) and self._build(more, tensors, {}) is not None:
                count("weights_made_constants", len(stable))
                logger.info("weights that stayed the same become constants: %s", self._listed(stable))
            else:
                self._wait(0.0)
        elif positions:
            self._current = _Sessions(positions, self.sets)
        inputs = [i for i in self._weights if i not in self._current.positions]
        self.snapshot = Snapshot((i, args[i]) for i in inputs)
        self._look_at = self._seconds + self._patience if inputs else math.inf

    def _add_set(self, addresses: Addresses, tensors: Sequence[torch.Tensor]) -> _State:
        """The state for one more set of weights."""
        name = hash(addresses)
        if name not in self._seen:
            if len(self._seen) >= _MOST_SEEN:
                self._seen.clear()
            self._seen.add(name)
            return self._inputs_only()
        positions, states = self._current
        threads = self._executable.settings.current_threads
        if len(self.sets) < MOST_SETS and _threads_fit(threads) and _fit(tensors):
            state = self._build(positions, tensors, states)
            if state is not None:
                count("weight_sets")
                return state
        # its weights are inputs, until it is tried again
        others = states if len(states) < _MOST_SEEN else self.sets
        self._current = _Sessions(positions, {**others, addresses: self._inputs_only()})
        if not self._is_full:
            self._is_full = True
            count("weight_sets_full")
        if self._look_at == math.inf:
            self._wait(0.0)
        return self._inputs_only()

    def _unused(self, current: Mapping[int, int]) -> list[_State]:
        """The states that ``is_unused``."""
        held = _held_by_sessions()
        return [state for state in self.sets.values() if state.is_unused(current, held)]

    def _inputs_only(self) -> _State:
        """The state without constants, built at first use."""
        if self._without_constants is None:
            self._without_constants = _State(self, self._executable, {}, complete=False)
        return self._without_constants

    def _build(
        self, positions: tuple[int, ...], tensors: Sequence[torch.Tensor], others: Mapping[Addresses, _State]
    ) -> _State | None:
        """A new state beside others; ``None`` if ONNX Runtime has no memory for it."""
        started = clock()
        try:
            weights = dict(zip(positions, tensors, strict=True))
            state = _State(self, self._beside(others), weights, complete=self._complete)
        except SessionError as error:
            self._inputs_only()  # or this is rejected too
            logger.warning("weights are inputs, which is slower: %s", first_line(str(error)))
            return None
        finally:
            self._cost = clock() - started
        self._current = _Sessions(positions, {**others, state.watch.addresses: state})
        self._free_replaced(set(state.watch.addresses))
        give_back()
        return state

    def _beside(self, others: Mapping[Addresses, _State]) -> Executable:
        """The executable for a session beside others, which are of layers that run one after the other: idle threads
        of one must not take the cores of the next."""
        if not any(others):
            return self._executable
        settings = dataclasses.replace(self._executable.settings, shares_graph=True)
        return dataclasses.replace(self._executable, settings=settings)

    def _free_replaced(self, weights: Set[int]) -> None:
        """Frees the sessions with the same weights of graphs of the same frame that this one replaced."""
        with _states_lock:
            owners = [state.owner() for state in _states if set(state.watch.addresses) == weights != set()]
        for owner in owners:
            if owner is None or self._frame is None or owner._frame != self._frame:
                continue
            if self._executable.generalizes(owner._executable):
                owner._free(weights)

    def _free(self, weights: Set[int]) -> None:
        """Frees the session with these weights, once: if its graph is called all the same, because it has other guards
        too, they are a new set of weights."""
        with self._lock:
            if not self._was_replaced:
                self._was_replaced = True
                positions, states = self._current
                kept = {addresses: state for addresses, state in states.items() if set(addresses) != weights}
                self._current = _Sessions(positions, kept)
                count("replaced_sessions_freed")
                logger.info("a session is freed: a graph for symbolic sizes replaced its graph")

    def _listed(self, positions: Sequence[int]) -> str:
        return listed((self._names[position] for position in positions), _MOST_NAMES)


def _chosen(executable: Executable, constants: Collection[int]) -> Executable:
    """An executable whose other weights are inputs."""
    chosen, made = executable.with_constants(constants)
    if made:
        count("choices_without_weights", made)
    return chosen


def _fit(weights: Sequence[torch.Tensor]) -> bool:
    """Whether there is enough memory for the copies of weights: of the system, and of the GPU that they are on."""
    size, free = sum(weight.nbytes for weight in weights), available()
    for device in {weight.device for weight in weights if weight.device.type == "cuda"}:
        on_gpu = torch.cuda.mem_get_info(device)[0]
        free = on_gpu if free is None else min(free, on_gpu)
    if free is None or _COPIES * size <= free:
        return True
    logger.warning(
        "weights of %.1f GB stay inputs, which is slower: as constants they need %.1f GB more, and %.1f GB are free",
        size / 1e9,
        _COPIES * size / 1e9,
        free / 1e9,
    )
    return False
