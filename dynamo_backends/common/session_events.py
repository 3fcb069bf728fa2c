"""What the runtime reports about its sessions: how long they ran in the current thread, and events.

It is a module of its own, so that the runtime need not import ``events``, which imports Dynamo. ``events`` counts what
is reported, if the process has imported it; ``call_statistics`` reads the time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class _Clock(threading.local):
    seconds = 0.0


SESSION_CLOCK = _Clock()
"""``seconds`` is the time of all runs so far in this thread."""

receivers: list[Callable[[str, int, str], None]] = []
"""Functions that get each event: its name, how often it happened, and why."""


def count(event: str, reason: str) -> None:
    """Counts one of ``events.EVENTS``."""
    for receive in receivers:
        receive(event, 1, reason)
