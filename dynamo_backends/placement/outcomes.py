"""Keeps outcomes of searches on disk, so that the next process runs the winners at once."""

from __future__ import annotations

from collections.abc import Sequence

from ..cache.graphs import CachedGraphs
from ..cache.store import StoredRecord
from .search import SearchOutcome

_PROCESSES = 20
"""Processes that use an outcome before the engines are timed again: the machine may have changed."""


class StoredOutcomes:
    """The outcome of one frame, for the directions of its graphs and the candidate engines."""

    def __init__(self, cache: CachedGraphs, frame: str, directions: Sequence[str], engines: Sequence[str]) -> None:
        self._cache = cache
        what = {"what": "outcome", "frame": frame}
        self._question = {**what, "directions": list(directions), "engines": list(engines)}

    def known(self) -> SearchOutcome | None:
        """The outcome of an earlier process; ``None`` if there is none, or ``_PROCESSES`` used it."""
        found = self._cache.fact(self._question, _read)
        if found is None:
            return None
        outcome, processes = found
        if processes >= _PROCESSES:
            return None
        self._keep(outcome, processes + 1)
        return outcome

    def keep(self, outcome: SearchOutcome) -> None:
        """Keeps an outcome for later processes."""
        self._keep(outcome, 0)

    def forget(self) -> None:
        """Makes the next process search again."""
        self._cache.forget_fact(self._question)

    def _keep(self, outcome: SearchOutcome, processes: int) -> None:
        answer = {
            "winner": list(outcome.winner),
            "milliseconds": [[list(engines), time] for engines, time in outcome.milliseconds.items()],
            "rejected": dict(outcome.rejected),
            "processes": processes,
        }
        self._cache.keep_fact(self._question, answer)


def _read(record: StoredRecord) -> tuple[SearchOutcome, int]:
    """An outcome, and the number of processes that used it.

    Raises:
        TypeError, ValueError, LookupError, AttributeError: the record is not an outcome.
    """
    answer = record.header
    milliseconds = {tuple(map(str, engines)): float(time) for engines, time in answer["milliseconds"]}
    rejected = {str(engine): str(why) for engine, why in answer["rejected"].items()}
    return SearchOutcome(tuple(map(str, answer["winner"])), milliseconds, rejected), int(answer["processes"])
