"""``dump``: a block of code in which everything that our backends compile writes its dump, as under ``onnx_debug``.

::

    with dynamo_backends.dump("folder"):
        compiled(x).sum().backward()       # torch.compile(model, backend="onnxrt")

The backends ask ``current_block`` when they compile a graph.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol


class Closable(Protocol):
    """What watches graphs that are compiled in a block."""

    def close(self) -> None:
        """Stops watching, and writes what is not written yet."""


class Block:
    """One ``with dump(...)``.

    Attributes:
        folder: the dump folder, an absolute path.
        observers: what is to be closed at its end.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = os.path.abspath(folder)
        self.observers: list[Closable] = []


_current: contextvars.ContextVar[Block | None] = contextvars.ContextVar("dynamo_backends_dump", default=None)


def current_block() -> Block | None:
    """The innermost block that this thread is in."""
    return _current.get()


@contextlib.contextmanager
def dump(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """Everything that our backends compile in the block writes its dump, and is compared, as under ``onnx_debug``.

    It is for graphs that are compiled in the block: call the model there first, or after ``torch._dynamo.reset()``. The
    options of the backend hold, but ``dump_dir``; inside another block, the inner folder. After the block, what was
    compiled in it runs on, neither dumped nor compared; what is compiled then is as without the block. A block is for
    the thread that enters it.

    Args:
        folder: the dump folder, as the option ``dump_dir``: the run is a folder in it, to which ``latest`` points.

    Yields:
        The dump folder. Where it cannot be written, that is one warning, and the model runs on.

    Raises:
        TypeError: ``folder`` is no path.
    """
    block = Block(folder)
    token = _current.set(block)
    try:
        yield Path(block.folder)
    finally:
        _current.reset(token)
        with contextlib.ExitStack() as closing:  # all are closed, also where one cannot write
            for observer in reversed(block.observers):
                closing.callback(observer.close)
        block.observers.clear()
