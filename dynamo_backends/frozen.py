"""A session whose weights are constants, and never stale.

Before each call a ``Watch`` says whether a weight changed. If one did, a session with the new values takes the place of
the old one. A weight that keeps changing becomes an input: making sessions must not take longer than they run.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Mapping, Sequence

import torch

from passes.engine.locks import Lock

from .events import count
from .runtime.binding import BoundSession
from .runtime.executable import Executable
from .runtime.heap import available, give_back
from .runtime.watch import MOST_CALLS, Watch, can_be_watched

logger = logging.getLogger(__name__)

_MOST_NAMES = 8

_COPIES = 2
"""How often ONNX Runtime holds a constant at most, while it makes a session: as it was given, and packed."""

FREE_REFRESHES = 3
"""How often weights may change before it is asked whether a session was called often enough to be worth its making."""

WORTH_CALLS = 50
"""Calls that pay for making a session: it takes 0.2 to 1 s, and constants save some 20 % of 5 to 100 ms."""


@dataclasses.dataclass(frozen=True)
class Weight:
    """A parameter or buffer of the user's model.

    Attributes:
        name: as the user calls it, ``encoder.layer.0.weight``.
        tensor: its value when the graph was compiled.
    """

    name: str
    tensor: torch.Tensor


class _State:
    """What a call needs; it is replaced as a whole, and calls in other threads may go on with the one before."""

    def __init__(self, executable: Executable, weights: Mapping[int, torch.Tensor], *, complete: bool) -> None:
        self.positions = tuple(weights)
        self.watch = Watch(list(weights.values()), complete=complete)  # before the session reads them: see there
        self.bound = executable.load(weights)
        self.calls = itertools.count()


class FrozenSession:
    """Runs an executable with weights as constants.

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
        self._complete = complete
        self._lock = Lock()
        self._refreshes = 0
        tensors = {position: weight.tensor for position, weight in weights.items()}
        self._state = _State(executable, tensors, complete=complete)

    @property
    def bound(self) -> BoundSession:
        """The session that the last call ran."""
        return self._state.bound

    def __call__(self, args: Sequence[torch.Tensor | int | bool]) -> list[torch.Tensor | int | bool]:
        """Runs the model, see ``BoundSession.__call__``.

        Args:
            args: all arguments, with the weights as they are now.
        """
        state = self._state
        next(state.calls)
        if not state.watch.is_unchanged([args[i] for i in state.positions]):
            state = self._refreshed(args)
        return state.bound(args)

    def _refreshed(self, args: Sequence[torch.Tensor | int | bool]) -> _State:
        """The state with the weights of now."""
        with self._lock:
            state = self._state
            weights: dict[int, torch.Tensor] = {i: args[i] for i in state.positions}
            changed, unseen = state.watch.changed(list(weights.values()))
            if changed:
                names = [self._names[state.positions[i]] for i in changed]
                self._tell(names, [self._names[state.positions[i]] for i in unseen])
                self._refreshes += 1
                keep_changing = self._refreshes > FREE_REFRESHES and next(state.calls) < WORTH_CALLS
                inputs = [i for i in changed if keep_changing or not can_be_watched(weights[state.positions[i]])]
                if inputs:
                    for i in inputs:
                        del weights[state.positions[i]]
                    self._tell_of_inputs([self._names[state.positions[i]] for i in inputs])
                self._state = _State(self._executable, weights, complete=self._complete)
                give_back()
            return self._state

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
    if not constants or not _fit(constants):
        return executable.load()
    count("constant_weights", len(constants))
    return FrozenSession(executable, constants, complete=complete)


def _fit(constants: Mapping[int, Weight]) -> bool:
    size, free = sum(weight.tensor.nbytes for weight in constants.values()), available()
    if free is None or _COPIES * size <= free:
        return True
    count("weights_too_large")
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
