"""Runs a region on the first execution provider whose results agree with PyTorch's.

Wrong kernels of the CPU provider are listed in tables (``runtime/kernel_faults.py``, ``exporter/upstream_faults.py``).
Other providers have no such tables, and their errors depend on the processor. So a region's results on such a provider
are compared with PyTorch's once for each of the first few sets of sizes, with float64 as the reference. If the provider
fails or is wrong, the next one runs the region, and after the last one PyTorch.

``onnx_debug`` turns the check off: it compares every node, and reports which ones the provider computes wrongly.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import fx

from passes.engine.locks import Lock

from ..errors import Kind, SessionError, first_line
from ..events import count, warn
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
"""Sets of argument sizes that are checked. Sizes that grow at each call would otherwise be checked at each call."""


class CheckedSession:
    """A region's session, which is replaced if its results are wrong. It is thread-safe.

    Args:
        name: of the region, for messages.
        session: of the executable.
        executable: the model and its providers.
        others: the executable on the providers to try next, in order. The CPU provider is not checked.
        build: creates a session of an executable; may raise SessionError.
        region: the region in PyTorch; returns the list of its results.
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
        return self._current_session.bound

    def chosen(self, args: Sequence[torch.Tensor | int | bool], *, complete: bool = False) -> BoundSession:
        """See ``FrozenSession.chosen``."""
        return self._current_session.chosen(args, complete=complete)

    def stale(self, args: Sequence[torch.Tensor | int | bool]) -> dict[int, str]:
        """See ``FrozenSession.stale``."""
        return self._current_session.stale(args)

    def __call__(self, args: Sequence[torch.Tensor | int | bool]) -> list[torch.Tensor | int | bool]:
        """Runs the region, see ``BoundSession.__call__``.

        Raises:
            SessionError: no provider's results are correct, or ONNX Runtime failed in a call that is not checked.
        """
        if self._is_trusted:
            return self._current_session(args)
        sizes = tuple(tuple(arg.shape) if isinstance(arg, torch.Tensor) else arg for arg in args)
        if sizes in self._checked:
            return self._current_session(args)
        with self._lock:
            if self._is_trusted or sizes in self._checked:
                return self._current_session(args)
            results = self._run_checked(args)
            self._checked.add(sizes)
            self._is_trusted = only_cpu(self._providers) or len(self._checked) >= MOST_CHECKED
            return results

    @property
    def _current_session(self) -> Session:
        """The session that runs the region.

        Raises:
            SessionError: all providers failed.
        """
        if self._session is None:
            raise SessionError(self._failure)
        return self._session

    def _run_checked(self, args: Sequence[torch.Tensor | int | bool]) -> list[torch.Tensor | int | bool]:
        """Runs the region, and replaces the session until its results agree with PyTorch's.

        Raises:
            SessionError: none agrees.
        """
        expected = self._region(*args) if not only_cpu(self._providers) else []
        while not only_cpu(self._providers):
            try:
                results = self._current_session(args)
            except SessionError as error:
                if error.reason.kind is Kind.OUT_OF_MEMORY:
                    raise
                failure = f"failed: {first_line(str(error))}"
            else:
                difference = self._difference(expected, results, args)
                if not difference:
                    return results
                failure = f"differs from PyTorch: {difference}"
            self._use_next_provider(failure)
        return self._current_session(args)

    def _use_next_provider(self, failure: str) -> None:
        """Replaces the session by one on the next providers that support the region.

        Raises:
            SessionError: no more providers support it.
        """
        failed = provider_name(self._providers[0])
        count(f"wrong_on_provider {failed}")
        self._session, self._failure = None, f"{self._name}: {failed} {failure}"
        for executable in self._others:
            providers = executable.settings.providers
            try:
                self._session = self._build(executable)
            except SessionError as error:
                self._failure += f"; {provider_name(providers[0])} rejects it: {first_line(str(error))}"
                continue
            self._providers = providers
            warn(logger, f"{self._failure}; {provider_name(providers[0])} runs it from now on")
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
