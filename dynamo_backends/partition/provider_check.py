"""Runs a region on the first execution provider whose results agree with PyTorch's.

Wrong kernels of the CPU provider are listed in tables (``runtime/kernel_faults.py``, ``exporter/upstream_faults.py``).
Other providers have no such tables, and their errors depend on the processor. So a region's results on such a provider
are compared with PyTorch's once for each of the first few sets of sizes, with float64 as the reference. If the provider
fails or is wrong, the next one runs the region, and after the last one PyTorch. A provider that is wrong, or rejects
the model, is given up; one that fails is tried again, see ``common.backoff``.

``onnx_debug`` turns the check off: it compares every node, and reports which ones the provider computes wrongly.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import fx

from passes.engine.locks import Lock

from ..common.backoff import Backoff, sizes_of
from ..errors import SessionError, first_line, is_out_of_memory
from ..events import count, warn
from ..numerics.whole_graph import difference_of_results, graph_check
from ..runtime.providers import float32_precision, only_cpu, provider_name

if TYPE_CHECKING:
    from ..runtime.binding import BoundSession
    from ..runtime.executable import Executable
    from ..weights.frozen_session import FrozenSession

    Session: TypeAlias = BoundSession | FrozenSession

logger = logging.getLogger(__name__)

MOST_CHECKED = 8
"""Sets of argument sizes that are checked. Sizes that grow at each call would otherwise be checked at each call."""


@dataclasses.dataclass(eq=False)
class _OnProvider:
    """A region on one execution provider, and on further ones for nodes that it does not support.

    Attributes:
        executable: the model and its providers.
        session: made at first use.
        checked: the sizes with which its results were right.
        backoff: when it is tried, after failures.
    """

    executable: Executable
    session: Session | None = None
    checked: set[Hashable] = dataclasses.field(default_factory=set)
    backoff: Backoff = dataclasses.field(default_factory=Backoff)

    @property
    def name(self) -> str:
        return provider_name(self.executable.settings.providers[0])

    @property
    def is_trusted(self) -> bool:
        """Whether no results need be checked any more."""
        is_cpu = only_cpu(self.executable.settings.providers)
        return self.session is not None and (is_cpu or len(self.checked) >= MOST_CHECKED)


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
        self._providers = [_OnProvider(executable, session), *map(_OnProvider, others)]  # that are not given up
        self._build = build
        self._region = region
        self._float32_as = float32_precision()
        self._lock = Lock()
        self._session: Session | None = session  # that ran last; ``None`` if all providers failed
        self._trusted: Session | None = None
        self._failures: dict[str, str] = {}  # of providers that did not run the last call
        self._told: set[str] = set()

    @property
    def bound(self) -> BoundSession:
        """See ``FrozenSession.bound``."""
        return self._last_session.bound

    def chosen(self, args: Sequence[torch.Tensor | int | bool], *, complete: bool = False) -> BoundSession:
        """See ``FrozenSession.chosen``."""
        return self._last_session.chosen(args, complete=complete)

    def stale(self, args: Sequence[torch.Tensor | int | bool]) -> dict[int, str]:
        """See ``FrozenSession.stale``."""
        return self._last_session.stale(args)

    def __call__(self, args: Sequence[torch.Tensor | int | bool]) -> list[torch.Tensor | int | bool]:
        """Runs the region, see ``BoundSession.__call__``.

        Raises:
            SessionError: no provider's results are correct, or ONNX Runtime failed in a call that is not checked.
        """
        if self._trusted is not None:
            return self._trusted(args)
        sizes = sizes_of(args)
        due = [provider for provider in self._providers if provider.backoff.is_due()]
        for provider in due or tuple(self._providers):  # if all wait: the caller waits too, and chose to try
            if provider.session is not None and (provider.is_trusted or sizes in provider.checked):
                self._session = provider.session
                return provider.session(args)
            with self._lock:
                results = self._checked(provider, args, sizes)
            if results is not None:
                return results
        self._session = None
        raise SessionError(self._failure)

    @property
    def _last_session(self) -> Session:
        """The session that ran last.

        Raises:
            SessionError: all providers failed.
        """
        if self._session is None:
            raise SessionError(self._failure)
        return self._session

    @property
    def _failure(self) -> str:
        return f"{self._name}: {'; '.join(f'{name} {why}' for name, why in self._failures.items())}"

    def _checked(
        self, provider: _OnProvider, args: Sequence[torch.Tensor | int | bool], sizes: Hashable
    ) -> list[torch.Tensor | int | bool] | None:
        """The results of a provider; ``None`` if they are wrong or it failed.

        Raises:
            SessionError: there is not enough memory.
        """
        if provider not in self._providers:  # another thread gave it up
            return None
        if provider.session is None:
            try:
                provider.session = self._build(provider.executable)
            except SessionError as error:
                self._give_up(provider, f"rejects it: {first_line(str(error))}")
                return None
        session = provider.session
        if provider.is_trusted:
            results = session(args)
        else:
            expected = self._region(*args)
            try:
                results = session(args)
            except SessionError as error:
                if is_out_of_memory(error):
                    raise
                provider.backoff.failed()
                count(f"failed_on_provider {provider.name}")
                self._failures[provider.name] = f"failed: {first_line(str(error))}"
                return None
            if difference := self._difference(expected, results, args):
                count(f"wrong_on_provider {provider.name}")
                self._give_up(provider, f"differs from PyTorch: {difference}")
                return None
            provider.checked.add(sizes)
            if provider.backoff.succeeded():
                logger.info("%s runs on %s again", self._name, provider.name)
        self._failures.pop(provider.name, None)
        self._tell(provider)
        self._session = session
        if provider.is_trusted and provider is self._providers[0]:
            self._trusted = session
        return results

    def _give_up(self, provider: _OnProvider, why: str) -> None:
        self._providers.remove(provider)
        self._failures[provider.name] = why

    def _tell(self, provider: _OnProvider) -> None:
        """Warns once of each provider that failed, or is given up."""
        if new := self._failures.keys() - self._told:
            self._told |= new
            warn(logger, f"{self._failure}; {provider.name} runs it")

    def _difference(self, expected: Sequence[object], results: Sequence[object], args: Sequence[object]) -> str:
        """The first difference that is not rounding; empty if there is none."""
        state = torch.get_rng_state()
        return difference_of_results(
            expected, results, lambda: graph_check(self._region, args, state, coarser=self._float32_as)
        )
