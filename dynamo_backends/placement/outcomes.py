"""Outcomes of searches on disk, so that the next process runs the winners at once."""

from __future__ import annotations

from collections.abc import Sequence

from ..cache.graphs import CachedGraphs
from ..cache.store import Record
from .search import Outcome

_PROCESSES = 20
"""How many processes an outcome is for; then the engines are tried again, as the machine may be another by then."""


class Outcomes:
    """The outcome of one frame.

    Args:
        kept: the cache that keeps it.
        frame: what tells the frame from others.
        directions: of its graphs.
        engines: those that are tried.
    """

    def __init__(self, kept: CachedGraphs, frame: str, directions: Sequence[str], engines: Sequence[str]) -> None:
        self._kept = kept
        self._question = {
            "what": "outcome",
            "frame": frame,
            "directions": list(directions),
            "engines": list(engines),
        }

    def known(self) -> Outcome | None:
        """What an earlier process found out; ``None`` if that is not known, or served as many processes as it may."""
        found = self._kept.fact(self._question, _read)
        if found is None:
            return None
        outcome, processes = found
        if processes >= _PROCESSES:
            return None
        self._keep(outcome, processes + 1)
        return outcome

    def keep(self, outcome: Outcome) -> None:
        """Keeps what ``known`` returns in later processes."""
        self._keep(outcome, 0)

    def forget(self) -> None:
        """Lets the next process find out anew."""
        self._kept.forget_fact(self._question)

    def _keep(self, outcome: Outcome, processes: int) -> None:
        answer = {
            "winner": list(outcome.winner),
            "milliseconds": [[list(engines), time] for engines, time in outcome.milliseconds.items()],
            "rejected": dict(outcome.rejected),
            "processes": processes,
        }
        self._kept.keep_fact(self._question, answer)


def _read(record: Record) -> tuple[Outcome, int]:
    """What was kept.

    Raises:
        TypeError, ValueError, LookupError, AttributeError: it is no outcome.
    """
    answer = record.header
    milliseconds = {tuple(map(str, engines)): float(time) for engines, time in answer["milliseconds"]}
    rejected = {str(engine): str(why) for engine, why in answer["rejected"].items()}
    return Outcome(tuple(map(str, answer["winner"])), milliseconds, rejected), int(answer["processes"])
