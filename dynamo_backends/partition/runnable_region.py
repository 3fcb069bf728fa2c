"""Runs a region on the first execution provider that does not fail and is right, or in PyTorch.

One policy for all that fails in a call, whether ONNX Runtime, a provider or our own code: the next provider runs the
region, after the last one PyTorch, and what failed is tried again, see ``common.backoff``.

Wrong kernels of the CPU provider are listed in tables (``runtime/kernel_faults.py``, ``exporter/upstream_faults.py``).
Other providers have no such tables, and their errors depend on the processor. So their results are compared with
PyTorch's once for each of the first few sets of sizes, with float64 as the reference. A provider that is wrong, or
rejects the model, is given up. ``onnx_debug`` turns this off: it compares every node, and says which are wrong.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import fx
from torch.autograd import forward_ad

from ..common import operator_watchers
from ..common.backoff import BackoffBySizes, sizes_of
from ..common.fork_safety import Lock
from ..common.random_state import RandomState
from ..common.safety_net import caught
from ..errors import SessionError, WrongResultError, first_line, is_out_of_memory
from ..events import count, is_candidate_run, warn
from ..graphs.artifacts import GraphName, region_name
from ..graphs.fake_tensors import unlike_fake
from ..runtime.executable import Executable
from ..runtime.providers import float32_precision, only_cpu, provider_name
from ..runtime.session import Session
from ..weights.region_session import RegionSession

logger = logging.getLogger(__name__)

_FAKE = torch._C._TorchDispatchModeKey.FAKE

MOST_CHECKED = 8
"""Sets of argument sizes that are checked. Sizes that grow at each call would otherwise be checked at each call."""


class _GivenUpError(SessionError):
    """A provider is wrong, or rejects the model."""


@dataclasses.dataclass(eq=False)
class OnProvider:
    """A region on one execution provider, and on further ones for nodes that it does not support.

    Attributes:
        executable: the model and its providers.
        session: made at first use.
        checked: the sizes with which its results were right.
        backoff: when it is tried, after failures.
    """

    executable: Executable
    session: RegionSession | None = None
    checked: set[Hashable] = dataclasses.field(default_factory=set)
    backoff: BackoffBySizes = dataclasses.field(default_factory=BackoffBySizes)

    @property
    def name(self) -> str:
        return provider_name(self.executable.settings.providers[0])

    @property
    def is_trusted(self) -> bool:
        """Whether no results need be compared any more."""
        is_cpu = only_cpu(self.executable.settings.providers)
        return self.session is not None and (is_cpu or len(self.checked) >= MOST_CHECKED)


class RunnableRegion:
    """Runs a region. It keeps no FX graph but one that results are compared with, and only serialized models.

    Args:
        graph: the graph that it is a part of.
        index: position among the graph's regions.
        providers: where it runs, in order of preference. The first has a session; it may be rebuilt when weights
            change.
        in_pytorch: the same in PyTorch.
        build: makes a session of an executable, for the arguments of a call; may raise ``SessionError``.
        checked: the region in PyTorch, with which results of other providers than the CPU's are compared; ``None`` if
            they are not.
        must_run_on_onnx: whether failures are raised (``fallback="error"``).

    Attributes:
        failures: the number of calls that PyTorch ran because of failures.
        last_failure: the last failure, in a line.
    """

    def __init__(
        self,
        graph: GraphName,
        index: int,
        providers: Sequence[OnProvider],
        in_pytorch: Callable[..., Sequence[object]],
        build: Callable[[Executable, Sequence[object]], RegionSession],
        *,
        checked: fx.GraphModule | None = None,
        must_run_on_onnx: bool = False,
    ) -> None:
        self.__name__ = region_name(index)  # shown by tools
        self.graph, self.index = graph, index
        self.in_pytorch = in_pytorch
        self.must_run_on_onnx = must_run_on_onnx
        self.failures = 0
        self.last_failure = ""
        self._providers = list(providers)  # that are not given up
        self._build = build
        self._checked = checked
        # what PyTorch allows now, as the sessions are made by it
        self._float32_as = {item.name: float32_precision(item.executable.settings.providers) for item in providers}
        self._lock = Lock()  # held while results are compared, a session is made, or the providers change
        self._given_up: dict[str, str] = {}  # why, by the provider's name
        self._told: set[str] = set()
        self._last = providers[0]  # that ran last
        self._trusted: RegionSession | None = None  # runs a call if nothing failed and nothing is to be compared
        self._trust(self._last)

    @property
    def session(self) -> RegionSession:
        """The session that ran last."""
        assert self._last.session is not None
        return self._last.session

    def __call__(self, *args: object) -> Sequence[object]:
        if operator_watchers.is_watched and operator_watchers.has_watchers():
            return operator_watchers.call(self, args)
        if forward_ad._current_level >= 0:
            return self._with_tangents(args)
        if torch._C._get_dispatch_mode(_FAKE) is not None:
            return self.in_pytorch(*args)  # fake tensors have no memory
        trusted = self._trusted
        if trusted is None:
            return self._on_next(args, [])
        try:
            return trusted(args)
        except Exception as error:
            return self._on_next(args, [(self._providers[0], error)])

    def run_to_compare(self, args: Sequence[object]) -> tuple[Sequence[object], Session | None]:
        """A call that first checks every byte of the weights, so that no node is blamed for a stale weight.

        It always tries ONNX Runtime. Returns the results and the session that ran; ``None`` if there is none for these
        weights.
        """
        bound = None
        try:
            bound = self.session.chosen(args, complete=True)
            return bound(args), bound
        except Exception as error:
            return self._after_failures(args, [(self._last, error)]), bound

    def _trust(self, provider: OnProvider) -> None:
        """Makes later calls use a provider at once, if it is the first and need not be watched."""
        with self._lock:
            is_first = self._providers[:1] == [provider] and not provider.backoff.is_failing
            self._trusted = provider.session if is_first and (self._checked is None or provider.is_trusted) else None
            if self._trusted is not None:
                for other in self._providers[1:]:  # that ran while this one failed
                    other.session = None

    def _on_next(self, args: Sequence[object], failures: list[tuple[OnProvider, Exception]]) -> Sequence[object]:
        """Runs the region on the first provider that is to be tried and does not fail, else in PyTorch.

        ``failures`` are those of this call; what failed is not tried again in it.
        """
        sizes = sizes_of(args)
        tried = [provider for provider, _ in failures]
        for provider in tuple(self._providers):
            is_ours = bool(failures) and not isinstance(failures[-1][1], SessionError)
            if provider in tried or is_ours or not provider.backoff.is_due(sizes):
                continue
            try:
                results = self._compared(provider, args, sizes)
            except Exception as error:
                failures.append((provider, error))
                continue
            self._note(failures, sizes)
            self._tell(failures, provider.name)
            self._last = provider
            if provider.backoff.is_failing and provider.backoff.succeeded(sizes):
                count("recovered_regions")
                logger.info("%s region %d runs on %s again", self.graph, self.index, provider.name)
            self._trust(provider)
            return results
        return self._after_failures(args, failures)

    def _compared(self, provider: OnProvider, args: Sequence[object], sizes: Hashable) -> Sequence[object]:
        """The results of a provider, compared with PyTorch's if needed.

        Raises:
            SessionError: it fails, or is given up.
        """
        session = provider.session
        if session is None or self._must_be_compared(provider, sizes):
            with self._lock:
                session = self._session_of(provider, args)
                if self._must_be_compared(provider, sizes):
                    return self._compare(provider, session, args, sizes)
        return session(args)

    def _must_be_compared(self, provider: OnProvider, sizes: Hashable) -> bool:
        return self._checked is not None and not provider.is_trusted and sizes not in provider.checked

    def _compare(
        self, provider: OnProvider, session: RegionSession, args: Sequence[object], sizes: Hashable
    ) -> Sequence[object]:
        """See ``_compared``; the lock is held."""
        from ..numerics.whole_graph import difference_of_results, graph_check  # imported lazily: rarely used

        state, region = RandomState.now(), self._checked
        assert region is not None
        coarser = self._float32_as[provider.name]
        expected = region(*args)
        results = session(args)
        # The layouts of its results are those that the graph was compiled with, on whatever provider.
        difference = difference_of_results(
            expected, results, lambda: graph_check(region, args, state, coarser=coarser), layouts=False
        )
        if difference:
            count(f"wrong_on_provider {provider.name}")
            raise _GivenUpError(f"differs from PyTorch: {difference}")
        provider.checked.add(sizes)
        return results

    def _session_of(self, provider: OnProvider, args: Sequence[object]) -> RegionSession:
        """Its session, made at first use; the lock is held."""
        if provider not in self._providers:  # another thread gave it up
            raise _GivenUpError(self._given_up[provider.name])
        if provider.session is None:
            try:
                provider.session = self._build(provider.executable, args)
            except SessionError as error:
                if is_out_of_memory(error):  # it may accept it in a later call
                    raise
                raise _GivenUpError(f"rejects it: {first_line(str(error))}") from error
        return provider.session

    def _note(self, failures: Sequence[tuple[OnProvider, Exception]], sizes: Hashable) -> None:
        """Remembers failures of a call that PyTorch or another provider ran."""
        with self._lock:
            for provider, error in failures:
                if not isinstance(error, _GivenUpError):
                    provider.backoff.failed(sizes)
                elif provider in self._providers:
                    self._given_up[provider.name] = str(error)
                    self._providers.remove(provider)
                    provider.session = None
            if failures:
                self._trusted = None

    def _tell(self, failures: Sequence[tuple[OnProvider, Exception]], instead: str) -> None:
        """Warns once of each provider that failed or is given up, when another one or PyTorch ran the region."""
        new: list[str] = []
        for provider, error in failures:
            is_given_up = isinstance(error, _GivenUpError)
            if not is_given_up:
                count(f"failed_on_provider {provider.name}")
            if provider.name not in self._told:
                self._told.add(provider.name)
                new.append(f"{provider.name} {'' if is_given_up else 'failed: '}{first_line(str(error))}")
        if new:
            warn(logger, f"{self.graph} region {self.index}: {'; '.join(new)}; {instead} runs it")

    def _with_tangents(self, args: Sequence[object]) -> Sequence[object]:
        """Runs the region in PyTorch, because tensors may carry tangents of forward-mode AD."""
        if self.must_run_on_onnx:
            raise SessionError(
                f"{self.graph} region {self.index} is called inside forward-mode AD, which ONNX Runtime does not "
                "support. Remove options={'fallback': 'error'} to run it in PyTorch."
            )
        count("calls_inside_forward_ad", reason="forward-mode AD, which ONNX Runtime does not support")
        if "tangents" not in self._told:
            self._told.add("tangents")
            logger.warning("%s region %d: inside forward-mode AD, PyTorch runs it", self.graph, self.index)
        return self.in_pytorch(*args)

    def _after_failures(
        self, args: Sequence[object], failures: Sequence[tuple[OnProvider, Exception]]
    ) -> Sequence[object]:
        """Runs the region in PyTorch after ONNX Runtime or our code failed in this call or before; if PyTorch fails
        too, its error is raised."""
        if failures and is_candidate_run():
            raise failures[-1][1]
        results = self.in_pytorch(*args)
        self.failures += 1
        if not failures:
            if self.must_run_on_onnx:
                raise SessionError(f"{self.graph} region {self.index}: {self.last_failure}")
            count("calls_after_failures", reason=self.last_failure)
            return results
        error = failures[-1][1]
        is_ours, is_wrong = not isinstance(error, SessionError), isinstance(error, WrongResultError)
        what = "ONNX Runtime returned a wrong shape or dtype" if is_wrong else "ONNX Runtime failed in this call"
        if is_ours:
            what = f"internal error in this call: {type(error).__name__}"
        self.last_failure = f"{what}: {self._wrong_fake(args) or first_line(str(error))}"
        if not self.must_run_on_onnx:
            self._note(failures, sizes_of(args))
        elif is_ours:
            count("internal_failures")
            raise error
        instead = "PyTorch ran the region; ONNX Runtime is tried again in later calls"
        if is_ours:
            caught(f"a call of {self.graph} region {self.index}", error, instead)
            return results
        count("wrong_results" if is_wrong else "runtime_failures", reason=self.last_failure)
        if self.must_run_on_onnx:
            raise SessionError(
                f"{self.graph} region {self.index}: {what}: {error}. "
                "Remove options={'fallback': 'error'} to run the region in PyTorch."
            )
        self._tell(failures[:-1], "PyTorch")
        if self.failures == 1:
            logger.warning("%s region %d: %s: %s", self.graph, self.index, instead, self.last_failure)
        return results

    def _wrong_fake(self, args: Sequence[object]) -> str:
        """Which argument is not as the region was compiled for, because of an operator's fake implementation; or
        ``""``."""
        pairs = zip(self._last.executable.inputs, args, strict=False)
        unlike = ((spec.name, unlike_fake(arg, spec.dtype, spec.sizes or ())) for spec, arg in pairs)
        return next((f"the operator of {name} returned {text}" for name, text in unlike if text), "")
