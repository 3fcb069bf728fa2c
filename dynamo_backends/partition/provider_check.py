"""Runs a region on the first execution provider that computes what PyTorch does.

Wrong kernels of the CPU provider are listed in tables (``runtime/kernel_faults.py``, ``exporter/upstream_faults.py``).
There are no such tables for other providers, and their errors depend on the processor. So the first results of a region
on such a provider, for the first few sets of sizes, are compared with PyTorch's on the same arguments, with float64 as
the reference. A provider that fails or is wrong no longer runs the region: the next one is tried, and after the last
one PyTorch runs it.

``onnx_debug`` leaves the check out: it compares every node, and says which of them the provider computes wrongly.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import fx

from passes.engine.locks import Lock

from ..errors import Kind, SessionError, first_line
from ..events import count, tell
from ..numerics.same_results import difference_of_results
from ..runtime.providers import float32_precision, only_cpu, provider_name
from .pass_verification import Evaluation

if TYPE_CHECKING:
    from ..runtime.binding import BoundSession
    from ..runtime.executable import Executable
    from ..weights.frozen_session import FrozenSession

    Session: TypeAlias = BoundSession | FrozenSession

logger = logging.getLogger(__name__)

MOST_CHECKED = 8
"""Sets of sizes of a region's arguments that are checked: where sizes grow from call to call, PyTorch would run for
ever beside it."""


class CheckedSession:
    """A region's session, and its next one where it is wrong; safe to call from several threads.

    Args:
        name: of the region, for messages.
        session: of the executable.
        executable: the model, and the providers that it runs on.
        others: the same on the providers to try after them, in order; the CPU provider is not checked.
        build: makes a session of an executable. It may raise SessionError.
        region: what PyTorch runs, from the region's arguments to the list of its results.
    """

    def __init__(
        self,
        name: str,
        session: Session,
        executable: Executable,
        others: Iterable[Executable],
        build: Callable[[Executable], Session],
        region: fx.GraphModule,
    ) -> None:
        self._name = name
        self._session: Session | None = session
        self._providers = executable.settings.providers
        self._others = iter(others)
        self._build = build
        self._region = region
        self._float32_as = float32_precision()
        self._lock = Lock()
        self._checked: set[tuple[object, ...]] = set()
        self._is_trusted = False
        self._failure = ""

    @property
    def bound(self) -> BoundSession:
        """See ``FrozenSession.bound``."""
        return self._current.bound

    def chosen(self, args: Sequence[torch.Tensor | int | bool], *, complete: bool = False) -> BoundSession:
        """See ``FrozenSession.chosen``."""
        return self._current.chosen(args, complete=complete)

    def stale(self, args: Sequence[torch.Tensor | int | bool]) -> dict[int, str]:
        """See ``FrozenSession.stale``."""
        return self._current.stale(args)

    def __call__(self, args: Sequence[torch.Tensor | int | bool]) -> list[torch.Tensor | int | bool]:
        """Runs the region, see ``BoundSession.__call__``.

        Raises:
            SessionError: no provider computes what PyTorch does, or ONNX Runtime failed in a call that is not checked.
        """
        if self._is_trusted:
            return self._current(args)
        sizes = tuple(tuple(arg.shape) if isinstance(arg, torch.Tensor) else arg for arg in args)
        if sizes in self._checked:
            return self._current(args)
        with self._lock:
            if self._is_trusted or sizes in self._checked:
                return self._current(args)
            results = self._first_right(args)
            self._checked.add(sizes)
            self._is_trusted = only_cpu(self._providers) or len(self._checked) >= MOST_CHECKED
            return results

    @property
    def _current(self) -> Session:
        """The session of now.

        Raises:
            SessionError: there is none.
        """
        if self._session is None:
            raise SessionError(self._failure)
        return self._session

    def _first_right(self, args: Sequence[torch.Tensor | int | bool]) -> list[torch.Tensor | int | bool]:
        """The results of the first providers that compute what PyTorch does, which stay.

        Raises:
            SessionError: none does.
        """
        expected = self._region(*args) if not only_cpu(self._providers) else []
        while not only_cpu(self._providers):
            try:
                results = self._current(args)
            except SessionError as error:
                if error.reason.kind is Kind.OUT_OF_MEMORY:
                    raise
                wrong = f"failed: {first_line(str(error))}"
            else:
                wrong = self._difference(expected, results, args)
                if not wrong:
                    return results
                wrong = f"computes something else than PyTorch: {wrong}"
            self._leave(wrong)
        return self._current(args)

    def _leave(self, why: str) -> None:
        """Goes on to the next providers that take the region.

        Raises:
            SessionError: there are none.
        """
        left = provider_name(self._providers[0])
        count(f"wrong_on_provider {left}")
        self._session, self._failure = None, f"{self._name}: {left} {why}"
        for executable in self._others:
            providers = executable.settings.providers
            try:
                self._session = self._build(executable)
            except SessionError as error:
                self._failure += f"; {provider_name(providers[0])} does not take it: {first_line(str(error))}"
                continue
            self._providers = providers
            tell(logger, f"{self._failure}; from now on it runs on {provider_name(providers[0])}")
            return
        raise SessionError(self._failure)

    def _difference(self, expected: Sequence[object], results: Sequence[object], args: Sequence[object]) -> str:
        """The first difference that is not rounding; empty if there is none."""

        def exact() -> list[object]:
            values = Evaluation(self._region, args, exact=True).exact
            outputs = self._region.graph.output_node().args[0]
            assert isinstance(outputs, (list, tuple))
            return [values[item] if isinstance(item, fx.Node) else None for item in outputs]

        return difference_of_results(expected, results, exact=exact, float32_as=self._float32_as)
