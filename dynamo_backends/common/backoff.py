"""When what failed is tried again: ``Backoff``, and ``BackoffBySizes`` for calls with arguments of several sizes.

Nothing is given up, and nothing is tried in each call. After failures in a row, 1, 2, 4, 8, ... calls pass without a
try; a success ends the row. So

- of ``n`` calls of what always fails, about ``log2(n)`` are failing tries, and never more than every second call;
- what fails for ``n`` calls and then works is tried at the latest after ``n + 1`` calls more.

There are no locks: threads that call at once may cost a try, or a call without one.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

_MOST_SIZES = 1_000
"""Sets of sizes that are remembered as failing; a memory limit."""


class Backoff:
    """Decides in which calls something is tried that failed."""

    __slots__ = ("_in_a_row", "_left")

    def __init__(self) -> None:
        self._in_a_row = 0
        self._left = 0  # calls to pass without a try

    def is_due(self) -> bool:
        """Whether to try in this call; called once in each call."""
        if self._left > 0:
            self._left -= 1
            return False
        return True

    def failed(self) -> None:
        """Notes that a try failed."""
        self._left = 1 << self._in_a_row
        self._in_a_row += 1

    def succeeded(self) -> bool:
        """Notes that a try succeeded; returns whether the one before it failed."""
        recovered = self._in_a_row > 0
        self._in_a_row = self._left = 0
        return recovered


class BackoffBySizes:
    """A ``Backoff`` for calls whose failure may depend on the sizes of the arguments, as for want of memory.

    Sizes that failed wait for themselves, so that they do not keep other sizes waiting. Sizes that are not known to
    fail wait together: they are tried less and less if new sizes fail each time.

    Attributes:
        is_failing: whether some sizes failed in their last try. While there are none, no other method need be called.
    """

    def __init__(self) -> None:
        self.is_failing = False
        self._failing: dict[int, Backoff] = {}  # by hashes, to take little memory: a collision costs a try
        self._others = Backoff()

    def is_due(self, sizes: Hashable) -> bool:
        """Whether to try in this call; called once in each call."""
        return self._failing.get(hash(sizes), self._others).is_due()

    def failed(self, sizes: Hashable) -> None:
        """Notes that a try with these sizes failed."""
        known = self._failing.get(hash(sizes))
        if known is None:
            if len(self._failing) >= _MOST_SIZES:
                self._failing.clear()
            known = self._failing[hash(sizes)] = Backoff()
            self._others.failed()
        known.failed()
        self.is_failing = True

    def succeeded(self, sizes: Hashable) -> bool:
        """Notes that a try succeeded; returns whether the last one with these sizes failed."""
        self._others.succeeded()
        recovered = self._failing.pop(hash(sizes), None) is not None
        self.is_failing = bool(self._failing)
        return recovered


def sizes_of(args: Sequence[object]) -> Hashable:
    """The sizes of the arguments of a call: shapes of tensors, and numbers."""
    return tuple([arg.shape if isinstance(arg, torch.Tensor) else arg for arg in args])
