"""A session whose weights are constants, and never stale.

Before each call a ``Watch`` says whether a weight changed. If one did, a session with the new values takes the place of
the old one. A weight that keeps changing becomes an input: making sessions must not take longer than they run.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import logging
import weakref
from collections.abc import Mapping, Sequence

import torch

from passes.engine.locks import Lock

from ..errors import SessionError, first_line
from ..events import count
from ..runtime.binding import BoundSession
from ..runtime.executable import Executable
from ..runtime.system_memory import available, give_back
from ..runtime.tensors import on_same_memory, uses_of
from .changes import CALLS, Addresses, Watch, addresses_of, can_be_watched

logger = logging.getLogger(__name__)

_MOST_NAMES = 8

_COPIES = 2
"""How often ONNX Runtime holds a constant at most, while it makes a session: as it was given, and packed."""

FREE_REFRESHES = 3
"""How often each set of weights may change before its session was worth its making."""

WORTH_CALLS = 50
"""Calls that pay for making a session: it takes 0.2 to 1 s, and constants save some 20 % of 5 to 100 ms."""

MOST_SETS = 256
"""Sets of weights that have a session each: the layers of the deepest models, compiled one by one, are fewer."""

_MOST_SEEN = 10_000


@dataclasses.dataclass(frozen=True)
class Weight:
    """A parameter or buffer of the user's model.

    Attributes:
        name: as the user calls it, ``encoder.layer.0.weight``.
        tensor: its value when the graph was compiled.
        is_statistic: whether it is a running mean or variance of batch norm. Training writes all of it at once, and its
            version counter stays: PyTorch's kernels do not say that they write there.
    """

    name: str
    tensor: torch.Tensor
    is_statistic: bool = False


_states: weakref.WeakSet[_State] = weakref.WeakSet()
"""All of the process: the same weights may be constants of several graphs."""

_states_lock = Lock()


class _State:
    """A session and what its constants were; it is replaced as a whole, and calls in other threads may go on with it.

    Args:
        executable: the model, and how it is run.
        weights: the constants, by the position of the argument.
        complete: whether every byte of them is looked at in each call.

    Attributes:
        tensors: the constants, as they lie in memory.
        watch: notices when they change.
        bound: the session.
        calls: counts its calls, in all threads.
    """

    def __init__(self, executable: Executable, weights: Mapping[int, torch.Tensor], *, complete: bool) -> None:
        self.tensors = [tensor.detach() for tensor in weights.values()]
        self.watch = Watch(list(weights.values()), complete=complete)  # before the session reads them: see there
        self.bound = executable.load({position: on_same_memory(tensor) for position, tensor in weights.items()})
        self.calls = itertools.count()
        self._places = dict(zip(map(id, weights.values()), self.watch.addresses, strict=True))
        with _states_lock:
            _states.add(self)

    def is_out_of_use(self, now: Mapping[int, int], ours: Mapping[int, int]) -> bool:
        """Whether this is no set any more: the memory of a weight is here alone, or a tensor of it lies elsewhere.

        One that lies elsewhere may come back (``p.data = ...``), and what was written to the memory meanwhile was not
        counted by its version.

        Args:
            now: the addresses of the weights of now, by the ``id`` of the tensor.
            ours: what ``_held_by_sessions`` returned.
        """
        if any(self._places.get(tensor, address) != address for tensor, address in now.items()):
            return True
        storages = (tensor.untyped_storage() for tensor in self.tensors)
        return any(uses_of(storage) <= 1 + ours[storage._cdata] for storage in storages)  # 1: ``storage`` itself


_USES = 3
"""How often a state holds the storage of a weight: as its tensor, in its watch, and by ``on_same_memory``. The session
and ONNX Runtime hold what that returned, as often as their versions do."""


def _held_by_sessions() -> collections.Counter[int]:
    """How often the states of this process hold each storage."""
    with _states_lock:
        states = list(_states)
    held: collections.Counter[int] = collections.Counter()
    for tensor in (tensor for state in states for tensor in state.tensors):
        held[tensor.untyped_storage()._cdata] += _USES
    return held


class FrozenSession:
    """Runs an executable with weights as constants.

    Several sets of weights may share an executable: those of the layers of a model that are compiled one by one, of an
    average of the weights and of the weights themselves. Each set has a session from its second call on; in the first
    one its weights are inputs, as it may not come again.

    Args:
        executable: the model, and how it is run.
        weights: those that are constants, by the position of the argument.
        complete: whether every byte of the weights is looked at in each call.

    Attributes:
        sets: the sets of weights that have a session, by their addresses.

    Raises:
        SessionError: ONNX Runtime refused the model.
    """

    def __init__(self, executable: Executable, weights: Mapping[int, Weight], *, complete: bool = False) -> None:
        self._executable = executable
        self._names = {position: weight.name for position, weight in weights.items()}
        self._statistics = {position for position, weight in weights.items() if weight.is_statistic}
        self._complete = complete
        self._lock = Lock()
        self._positions = tuple(weights)
        self.sets: dict[Addresses, _State] = {}
        self._most_sets = 0  # there ever were
        self._unpaid = 0  # sessions that were made anew before they were worth it; those that were count against it
        self._seen: set[int] = set()  # hashes of addresses
        self._without_constants: _State | None = None  # for sets that came once, or are too many
        self._is_full = False
        self._made([weight.tensor for weight in weights.values()])

    @property
    def bound(self) -> BoundSession:
        """A session of it, with whichever weights."""
        with self._lock:
            state = next(iter(self.sets.values()), None) or self._inputs_only()
            return state.bound

    def chosen(self, args: Sequence[torch.Tensor | int | bool], *, complete: bool = False) -> BoundSession:
        """The session with the weights of now.

        Args:
            args: all arguments of a call.
            complete: whether every byte of the weights is looked at.
        """
        tensors = [args[i] for i in self._positions]
        state = self.sets.get(addresses_of(tensors))
        if state is None or complete or not state.watch.is_unchanged(tensors):
            state = self._state_of(args)
        next(state.calls)
        return state.bound

    def __call__(self, args: Sequence[torch.Tensor | int | bool]) -> list[torch.Tensor | int | bool]:
        """Runs the model, see ``BoundSession.__call__``.

        Args:
            args: all arguments, with the weights as they are now.
        """
        return self.chosen(args)(args)

    def stale(self, args: Sequence[torch.Tensor | int | bool]) -> dict[int, str]:
        """The weights that the session which takes these arguments has other values of: position and name.

        ``chosen`` does not let that happen; who finds a session wrong asks.
        """
        tensors = [args[i] for i in self._positions]
        with self._lock:
            state = self.sets.get(addresses_of(tensors))
        found = state.watch.differing(tensors) if state is not None else []
        return {self._positions[i]: self._name(i) for i in found}

    def _state_of(self, args: Sequence[torch.Tensor | int | bool]) -> _State:
        """The state with the weights of now."""
        with self._lock:
            tensors: list[torch.Tensor] = [args[i] for i in self._positions]
            addresses = addresses_of(tensors)
            state = self.sets.get(addresses)
            if state is not None:
                changed, unseen = state.watch.changed(tensors)
                return self._renewed(args, [state], changed, unseen) if changed else state
            gone = self._let_go(dict(zip(map(id, tensors), addresses, strict=True)))
            if not gone and all(map(can_be_watched, tensors)):
                return self._further(addresses, tensors)
            before = [state.watch.addresses for state in gone] + list(self.sets)
            changed = [i for i, address in enumerate(addresses) if all(one[i] != address for one in before)]
            return self._renewed(args, gone, changed or range(len(addresses)), [])  # old ones may be mixed anew

    def _renewed(
        self,
        args: Sequence[torch.Tensor | int | bool],
        replaced: Sequence[_State],
        changed: Sequence[int],
        unseen: Sequence[int],
    ) -> _State:
        """A state in the place of others, as some weights, by their index among the constants, changed."""
        by_user = [i for i in unseen if self._positions[i] not in self._statistics]
        self._tell([self._name(i) for i in changed], [self._name(i) for i in by_user])
        for state in replaced:
            self.sets.pop(state.watch.addresses, None)  # not to be tried in each call, should no other be made
            self._unpaid = self._unpaid + 1 if next(state.calls) < WORTH_CALLS else max(0, self._unpaid - 1)
        keep_changing = self._unpaid > FREE_REFRESHES * self._most_sets
        tensors: list[torch.Tensor] = [args[i] for i in self._positions]
        inputs = [i for i in range(len(tensors)) if keep_changing and i in changed or not can_be_watched(tensors[i])]
        if inputs:
            self._tell_of_inputs([self._name(i) for i in inputs])
            self.sets.clear()
            self._unpaid = 0
            self._positions = tuple(p for i, p in enumerate(self._positions) if i not in inputs)
            tensors = [args[i] for i in self._positions]
        return self._made_if_possible(tensors)

    def _further(self, addresses: Addresses, tensors: Sequence[torch.Tensor]) -> _State:
        """The state of a further set of weights, beside those that are still in use."""
        name = hash(addresses)
        if name in self._seen and not self._is_full:
            if len(self.sets) < MOST_SETS and _fit(tensors):
                made = self._made_if_possible(tensors)
                if made is not self._without_constants:
                    count("weight_sets")
                return made
            self._is_full = True
        if len(self._seen) >= _MOST_SEEN:
            self._seen.clear()
        self._seen.add(name)
        return self._inputs_only()

    def _let_go(self, now: Mapping[int, int]) -> list[_State]:
        """Lets go of the states that are none any more, and returns them.

        Args:
            now: the addresses of the weights of now, by the ``id`` of the tensor.
        """
        ours = _held_by_sessions()
        gone = {addresses: state for addresses, state in self.sets.items() if state.is_out_of_use(now, ours)}
        for addresses in gone:
            del self.sets[addresses]
        self._is_full = self._is_full and not gone
        return list(gone.values())

    def _inputs_only(self) -> _State:
        """The state without constants."""
        if self._without_constants is None:
            self._without_constants = _State(self._executable, {}, complete=False)
        return self._without_constants

    def _made_if_possible(self, tensors: Sequence[torch.Tensor]) -> _State:
        """A new state, which is kept; the one without constants where ONNX Runtime has no memory for another."""
        try:
            return self._made(tensors)
        except SessionError as error:
            logger.warning("weights are inputs, which is slower: %s", first_line(str(error)))
            self._is_full = True
            return self._inputs_only()

    def _made(self, tensors: Sequence[torch.Tensor]) -> _State:
        """A new state, which is kept.

        Raises:
            SessionError: ONNX Runtime refused the model.
        """
        state = _State(self._executable, dict(zip(self._positions, tensors, strict=True)), complete=self._complete)
        self.sets[state.watch.addresses] = state
        self._most_sets = max(self._most_sets, len(self.sets))
        give_back()
        return state

    def _name(self, index: int) -> str:
        return self._names[self._positions[index]]

    def _tell(self, names: Sequence[str], unseen: Sequence[str]) -> None:
        count("weight_refreshes")
        logger.info("weights changed, and their session is made anew: %s", _listed(names))
        if unseen:
            count("weights_written_unseen", len(unseen))
            logger.warning(
                "%s changed without PyTorch's knowledge (through .data, numpy() or DLPack). Results since that write, "
                "of up to %d calls, may have used the old values; write under torch.no_grad() instead, or use "
                "options={'weights': 'checked'}",
                _listed(unseen),
                CALLS,
            )

    def _tell_of_inputs(self, names: Sequence[str]) -> None:
        count("weights_made_inputs", len(names))
        logger.info(
            "weights that keep changing, or cannot be watched, are inputs of their session from now on: %s",
            _listed(names),
        )


def load_session(
    executable: Executable, constants: Mapping[int, Weight], *, complete: bool
) -> BoundSession | FrozenSession:
    """What runs an executable with these weights as constants, of which there may be none.

    They stay inputs where there is not memory enough for their copies, or where ONNX Runtime refuses the model with
    constants alone.

    Raises:
        SessionError: ONNX Runtime refused the model.
    """
    if not constants:
        return executable.load()
    refused = ""
    if _fit([weight.tensor for weight in constants.values()]):
        try:
            session = FrozenSession(executable, constants, complete=complete)
        except SessionError as error:
            refused = first_line(str(error))
        else:
            count("constant_weights", len(constants))
            return session
    bound = executable.load()
    if refused:
        logger.warning("weights are inputs, which is slower: %s", refused)
    count("weights_left_inputs", len(constants))
    return bound


def _fit(weights: Sequence[torch.Tensor]) -> bool:
    """Whether there is memory enough for the copies of weights."""
    size, free = sum(weight.nbytes for weight in weights), available()
    if free is None or _COPIES * size <= free:
        return True
    logger.warning(
        "weights of %.1f GB stay inputs, which is slower: as constants they would take %.1f GB more; %.1f GB are free",
        size / 1e9,
        _COPIES * size / 1e9,
        free / 1e9,
    )
    return False


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MOST_NAMES])
    return shown if len(names) <= _MOST_NAMES else f"{shown} and {len(names) - _MOST_NAMES} more"
