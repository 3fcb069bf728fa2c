"""What happened, counted: ``torch._dynamo.utils.counters["dynamo_backends"]``."""

from __future__ import annotations

from torch._dynamo.utils import counters


def count(event: str, number: int = 1) -> None:
    """Counts an event under ``torch._dynamo.utils.counters["dynamo_backends"]``."""
    counters["dynamo_backends"][event] += number
