"""What happened, counted: ``torch._dynamo.utils.counters["dynamo_backends"]``."""

from __future__ import annotations

import contextlib
import contextvars
import logging
from collections.abc import Iterator

from torch._dynamo.utils import counters

_tried: contextvars.ContextVar[list[str] | None] = contextvars.ContextVar("tried", default=None)


@contextlib.contextmanager
def trying(told: list[str]) -> Iterator[None]:
    """What is compiled or run inside is tried, and may never be used.

    Args:
        told: takes what ``tell`` would warn of.
    """
    token = _tried.set(told)
    try:
        yield
    finally:
        _tried.reset(token)


def is_tried() -> bool:
    """Whether what runs is only tried: it fails rather than let PyTorch help out."""
    return _tried.get() is not None


def tell(logger: logging.Logger, text: str) -> None:
    """Warns of something, of what is only tried not before it is used."""
    told = _tried.get()
    if told is None:
        logger.warning("%s", text)
    else:
        told.append(text)


def count(event: str, number: int = 1) -> None:
    """Counts an event under ``torch._dynamo.utils.counters["dynamo_backends"]``."""
    counters["dynamo_backends"][event] += number
