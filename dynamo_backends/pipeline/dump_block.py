"""``dump``: a context manager in which our backends dump and compare graphs, as ``onnx_debug`` does.

::

    with dynamo_backends.dump("folder"):
        compiled(x).sum().backward()       # torch.compile(model, backend="onnxrt")

The backends call ``current_block`` for each graph that they compile. So the module is here, and not in ``debug``: it
imports nothing of the debugger, which ``onnxrt`` loads only if there is a block.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol


class Closable(Protocol):
    """An observer of the graphs that are compiled in a block."""

    def close(self) -> object:
        """See ``Observer.close``."""


class Block:
    """One ``with dump(...)``.

    Attributes:
        folder: the absolute path of the dump folder.
        observers: closed at the end of the block.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = os.path.abspath(folder)
        self.observers: list[Closable] = []


_current: contextvars.ContextVar[Block | None] = contextvars.ContextVar("dynamo_backends_dump", default=None)


def current_block() -> Block | None:
    """The innermost block of this thread, if any."""
    return _current.get()


@contextlib.contextmanager
def dump(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """Dumps and compares graphs that our backends compile in the block, as ``onnx_debug`` does.

    A graph must be compiled inside the block: call the model there for the first time, or after
    ``torch._dynamo.reset()``. After the block, the compiled graphs still run, without dump and comparison. A block
    applies to the thread that enters it, and the innermost block wins.

    Args:
        folder: the dump folder, which replaces the option ``dump_dir``. Each run is a subfolder; ``latest`` points to
            the last.

    Yields:
        The dump folder. If it cannot be written, a warning is logged and the model runs.

    Raises:
        TypeError: ``folder`` is not a path.
    """
    block = Block(folder)
    token = _current.set(block)
    try:
        yield Path(block.folder)
    finally:
        _current.reset(token)
        with contextlib.ExitStack() as closing:  # closes all, even if one fails
            for observer in reversed(block.observers):
                closing.callback(observer.close)
        block.observers.clear()
