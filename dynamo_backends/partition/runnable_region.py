"""Runs a region on ONNX Runtime, or in PyTorch if that fails."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch.autograd import forward_ad

from ..common import operator_watchers
from ..common.backoff import BackoffBySizes, sizes_of
from ..common.safety_net import caught
from ..errors import SessionError, WrongResultError, first_line
from ..events import count, is_candidate_run
from ..graphs.artifacts import GraphName, region_name, unlike_fake
from ..runtime.binding import BoundSession
from ..weights.frozen_session import FrozenSession

if TYPE_CHECKING:
    from .provider_check import CheckedSession  # imports the libraries that create models

logger = logging.getLogger(__name__)

_FAKE = torch._C._TorchDispatchModeKey.FAKE


@dataclasses.dataclass(eq=False)
class RunnableRegion:
    """Runs a region on ONNX Runtime, or in PyTorch if that fails. It keeps no FX graph, and only a serialized model.

    After a failure PyTorch also runs some of the next calls, see ``common.backoff``.

    Attributes:
        graph: the graph that it is a part of.
        index: position among the graph's regions.
        session: runs it on ONNX Runtime; may rebuild its session when weights change.
        in_pytorch: the same in PyTorch.
        must_run_on_onnx: whether failures are raised (``fallback="error"``).
        failures: the number of calls that PyTorch ran because of failures.
        last_failure: the last failure, in a line.
    """

    graph: GraphName
    index: int
    session: BoundSession | FrozenSession | CheckedSession
    in_pytorch: Callable[..., Sequence[object]]
    must_run_on_onnx: bool = False

    def __post_init__(self) -> None:
        self.__name__ = region_name(self.index)  # shown by tools
        self.failures = 0
        self.last_failure = ""
        self._has_warned_of_tangents = False
        self._backoff = BackoffBySizes()

    def __call__(self, *args: object) -> Sequence[object]:
        if operator_watchers.is_watched and operator_watchers.has_watchers():
            return operator_watchers.call(self, args)
        return self._run(self.session, args)

    def run_to_compare(self, args: Sequence[object]) -> tuple[Sequence[object], BoundSession | None]:
        """A call that first checks every byte of the weights, so that no node is blamed for a stale weight.

        It always tries ONNX Runtime. Returns the results and the session that ran; ``None`` if there is none for these
        weights.
        """
        try:
            bound = self.session.chosen(args, complete=True)
        except Exception as error:
            return self._after_failure(args, error), None
        return self._run(bound, args, always=True), bound

    def _run(
        self,
        session: BoundSession | FrozenSession | CheckedSession,
        args: Sequence[object],
        *,
        always: bool = False,
    ) -> Sequence[object]:
        """``always``: also if the region failed before, and is to be tried in a later call."""
        if forward_ad._current_level >= 0:
            return self._with_tangents(args)
        if torch._C._get_dispatch_mode(_FAKE) is not None:
            return self.in_pytorch(*args)  # fake tensors have no memory
        failed_before = self._backoff.is_failing
        if failed_before and not always and not self._backoff.is_due(sizes_of(args)):
            results = self.in_pytorch(*args)
            self.failures += 1
            count("calls_after_failures", reason=self.last_failure)
            return results
        try:
            results = session(args)
        except Exception as error:
            return self._after_failure(args, error)
        if failed_before and self._backoff.succeeded(sizes_of(args)):
            count("recovered_regions")
            logger.info("%s region %d runs on ONNX Runtime again", self.graph, self.index)
        return results

    def _with_tangents(self, args: Sequence[object]) -> Sequence[object]:
        """Runs the region in PyTorch, because tensors may carry tangents of forward-mode AD."""
        if self.must_run_on_onnx:
            raise SessionError(
                f"{self.graph} region {self.index} is called inside forward-mode AD, which ONNX Runtime does not "
                "support. Remove options={'fallback': 'error'} to run it in PyTorch."
            )
        count("calls_inside_forward_ad", reason="forward-mode AD, which ONNX Runtime does not support")
        if not self._has_warned_of_tangents:
            self._has_warned_of_tangents = True
            logger.warning("%s region %d: inside forward-mode AD, PyTorch runs it", self.graph, self.index)
        return self.in_pytorch(*args)

    def _after_failure(self, args: Sequence[object], error: Exception) -> Sequence[object]:
        """Runs the region in PyTorch after ONNX Runtime or our code failed; if PyTorch fails too, its error is
        raised."""
        if is_candidate_run():
            raise error
        results = self.in_pytorch(*args)
        is_ours, is_wrong = not isinstance(error, SessionError), isinstance(error, WrongResultError)
        what = "ONNX Runtime returned a wrong shape or dtype" if is_wrong else "ONNX Runtime failed in this call"
        if is_ours:
            what = f"internal error in this call: {type(error).__name__}"
        self.failures += 1
        self.last_failure = f"{what}: {self._wrong_fake(args) or first_line(str(error))}"
        if not self.must_run_on_onnx:
            self._backoff.failed(sizes_of(args))
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
        if self.failures == 1:
            logger.warning("%s region %d: %s: %s", self.graph, self.index, instead, self.last_failure)
        return results

    def _wrong_fake(self, args: Sequence[object]) -> str:
        """Which argument is not as the region was compiled for, because of an operator's fake implementation; or
        ``""``."""
        try:
            bound = getattr(self.session, "bound", None)
        except SessionError:  # of all providers
            return ""
        specs = zip(bound.inputs if bound is not None else (), args, strict=False)
        unlike = ((spec.name, unlike_fake(value, spec.dtype, spec.sizes or ())) for spec, value in specs)
        return next((f"the operator of {name} returned {text}" for name, text in unlike if text), "")
