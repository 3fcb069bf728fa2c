"""A progress bar on a terminal, for work that takes longer than two seconds."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator

_SECONDS_WITHOUT_BAR = 2.0


@contextlib.contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[], None]]:
    """Shows a bar on stderr after two seconds, if that is a terminal.

    Args:
        title: what is being done.
        total: how many steps are expected.

    Yields:
        A function to call after each step.
    """
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console  # imported lazily: most programs that serve have no terminal
    from rich.progress import Progress

    bar = Progress(console=Console(stderr=True), transient=True)
    task = bar.add_task(title, total=total)
    timer = threading.Timer(_SECONDS_WITHOUT_BAR, bar.start)
    timer.start()
    try:
        yield lambda: bar.advance(task)
    finally:
        timer.cancel()
        timer.join()
        bar.stop()
