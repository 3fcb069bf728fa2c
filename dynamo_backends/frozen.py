"""A session whose weights are constants, and never stale.

Before each call a ``Watch`` says whether a weight changed. If one did, a session with the new values takes the place of
the old one. A weight that keeps changing becomes an input: making sessions must not take longer than they run.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence

import torch

from passes.engine.locks import Lock

from .events import count
from .runtime.binding import BoundSession
from .runtime.executable import Executable
from .runtime.heap import available, give_back
from .runtime.tensors import uses_of
from .runtime.watch import MOST_CALLS, Addresses, Watch, addresses_of, can_be_watched

logger = logging.getLogger(__name__)

_MOST_NAMES = 8

_COPIES = 2
"""How often ONNX Runtime holds a constant at most, while it makes a session: as it was given, and packed."""

FREE_REFRESHES = 3
"""How often weights may change before it is asked whether a session was called often enough to be worth its making."""

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


class _State:
    """A session and what its constants were; it is replaced as a whole, and calls in other threads may go on with it.

    Args:
        executable: the model, and how it is run.
        weights: the constants, by the position of the argument.
        complete: whether every byte of them is looked at in each call.
    """

    def __init__(self, executable: Executable, weights: Mapping[int, torch.Tensor], *, complete: bool) -> None:
        tensors = list(weights.values())
        self._storages = [tensor.untyped_storage() for tensor in tensors]
        before = list(map(uses_of, self._storages))
        self.watch = Watch(tensors, complete=complete)  # before the session reads them: see there
        self.bound = executable.load(weights)
        self._places = dict(zip(map(id, tensors), self.watch.addresses, strict=True))
        self._own_uses = [1 + uses_of(one) - others for one, others in zip(self._storages, before, strict=True)]

    def is_out_of_use(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether this is no set any more: the memory of a weight is here alone, or a tensor of it lies elsewhere.

        One that lies elsewhere may come back (``p.data = ...``), and what was written to the memory meanwhile was not
        counted by its version.

        Args:
            tensors: the weights of now.
        """
        if any(self._places.get(id(tensor), address) != address for tensor, address in _with_addresses(tensors)):
            return True
        return any(uses_of(one) <= own for one, own in zip(self._storages, self._own_uses, strict=True))


def _with_addresses(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, int]]:
    return zip(tensors, addresses_of(tensors), strict=True)


class FrozenSession:
    """Runs an executable with weights as constants.

    Several sets of weights may share an executable: those of the layers of a model that are compiled one by one, of an
    average of the weights and of the weights themselves. Each set has a session from its second call on; in the first
    one its weights are inputs, as it may not come again.

    Args:
        executable: the model, and how it is run.
        weights: those that are constants, by the position of the argument.
        complete: whether every byte of the weights is looked at in each call.

    Raises:
        SessionError: ONNX Runtime refused the model.
    """

    def __init__(self, executable: Executable, weights: Mapping[int, Weight], *, complete: bool = False) -> None:
        self._executable = executable
        self._names = {position: weight.name for position, weight in weights.items()}
        self._statistics = {position for position, weight in weights.items() if weight.is_statistic}
        self._complete = complete
        self._lock = Lock()
        self._refreshes = 0
        self._positions = tuple(weights)
        self._sets: dict[Addresses, _State] = {}
        self._seen: set[Addresses] = set()
        self._without_constants: _State | None = None  # for sets that came once, or are too many
        self._is_full = False
        self._last = self._made([weight.tensor for weight in weights.values()])

    @property
    def bound(self) -> BoundSession:
        """The session that the last call ran."""
        return self._last.bound

    def __call__(self, args: Sequence[torch.Tensor | int | bool]) -> list[torch.Tensor | int | bool]:
        """Runs the model, see ``BoundSession.__call__``.

        Args:
            args: all arguments, with the weights as they are now.
        """
        next(self._calls)
        tensors = [args[i] for i in self._positions]
        state = self._sets.get(addresses_of(tensors))
        if state is None or not state.watch.is_unchanged(tensors):
            state = self._state_of(args)
        self._last = state
        return state.bound(args)

    def _state_of(self, args: Sequence[torch.Tensor | int | bool]) -> _State:
        """The state with the weights of now."""
        with self._lock:
            tensors: list[torch.Tensor] = [args[i] for i in self._positions]
            addresses = addresses_of(tensors)
            state = self._sets.get(addresses)
            if state is not None:
                changed, unseen = state.watch.changed(tensors)
                if not changed:
                    return state
                return self._refreshed(args, changed, unseen)
            known = {address for one in self._sets for address in one}
            if not self._forget_what_is_out_of_use(tensors) and all(map(can_be_watched, tensors)):
                return self._further(addresses, tensors)
            new = [i for i, address in enumerate(addresses) if address not in known]
            return self._refreshed(args, new or list(range(len(addresses))), [])  # old ones may have changed places

    def _refreshed(
        self, args: Sequence[torch.Tensor | int | bool], changed: Sequence[int], unseen: Sequence[int]
    ) -> _State:
        """The state of a set in which some weights changed, by their index among the constants."""
        by_user = [i for i in unseen if self._positions[i] not in self._statistics]
        self._tell([self._name(i) for i in changed], [self._name(i) for i in by_user])
        self._refreshes += 1
        keep_changing = self._refreshes > FREE_REFRESHES and next(self._calls) < WORTH_CALLS
        tensors: list[torch.Tensor] = [args[i] for i in self._positions]
        inputs = [i for i in range(len(tensors)) if keep_changing and i in changed or not can_be_watched(tensors[i])]
        if inputs:
            self._tell_of_inputs([self._name(i) for i in inputs])
            self._sets.clear()
            self._positions = tuple(p for i, p in enumerate(self._positions) if i not in inputs)
            tensors = [args[i] for i in self._positions]
        return self._made(tensors)

    def _further(self, addresses: Addresses, tensors: Sequence[torch.Tensor]) -> _State:
        """The state of a further set of weights, beside those that are still in use."""
        if addresses in self._seen and not self._is_full:
            if len(self._sets) < MOST_SETS and _fit(tensors):
                count("weight_sets")
                return self._made(tensors)
            self._is_full = True
        if len(self._seen) < _MOST_SEEN:
            self._seen.add(addresses)
        if self._without_constants is None:
            self._without_constants = _State(self._executable, {}, complete=False)
        return self._without_constants

    def _forget_what_is_out_of_use(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Lets go of sets that are none any more, now that the weights are these; returns whether there were any."""
        gone = [addresses for addresses, state in self._sets.items() if state.is_out_of_use(tensors)]
        for addresses in gone:
            del self._sets[addresses]
        self._is_full = self._is_full and not gone
        return bool(gone)

    def _made(self, tensors: Sequence[torch.Tensor]) -> _State:
        """A new state, which is kept."""
        state = _State(self._executable, dict(zip(self._positions, tensors, strict=True)), complete=self._complete)
        self._sets[state.watch.addresses] = state
        self._calls = itertools.count()  # since a session was made
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
                MOST_CALLS,
            )

    def _tell_of_inputs(self, names: Sequence[str]) -> None:
        count("weights_made_inputs", len(names))
        logger.info(
            "weights that keep changing, or cannot be watched, are inputs of their session from now on: %s",
            _listed(names),
        )


def load(executable: Executable, constants: Mapping[int, Weight], *, complete: bool) -> BoundSession | FrozenSession:
    """What runs an executable with these weights as constants, of which there may be none.

    They stay inputs where there is not memory enough for their copies.

    Raises:
        SessionError: ONNX Runtime refused the model.
    """
    if not constants:
        return executable.load()
    if not _fit([weight.tensor for weight in constants.values()]):
        count("weights_too_large")
        return executable.load()
    count("constant_weights", len(constants))
    return FrozenSession(executable, constants, complete=complete)


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
