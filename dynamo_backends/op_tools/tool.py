"""The base class of the operator tools: starting and stopping, the choice of calls, and errors inside of a tool."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TextIO

import torch

from ..common.operator_watchers import watchers_disabled
from ..common.text_table import fit_table
from ..errors import first_line
from ..numerics.function_runs import version_of
from ..partition.runnable_region import RunnableRegion
from .call import Call, CallText, named_results
from .dispatch_modes import InstalledMode, in_transform, without_modes
from .gradients import CallHooks, Gradients
from .names import function_name, is_query
from .operator_filter import Names, OperatorFilter

if TYPE_CHECKING:
    from typing import Self

logger = logging.getLogger(__name__)


class OpTool:
    """A tool that is applied to each operator called in a block.

    Args:
        include: names of operators with wildcards, a list or a string with commas: ``"*gelu*,torch.Tensor.add"``;
            ``None`` for all. The environment variable ``OP_<TOOL>_LIST`` overrides it.
        exclude: names to leave out. ``OP_<TOOL>_DISABLE_LIST`` adds to them.
        predicate: a function of a ``Call``, called for operators chosen by name; returns whether to apply the tool.
        level: ``"torch"`` for the functions that users call, ``torch.Tensor.add``; ``"aten"`` for the dispatcher's
            operators, in the backward too, ``aten.add.Tensor``. Both levels see what compiled graphs run in PyTorch, by
            the dispatcher's names, and each ONNX Runtime region as one call,
            ``onnxruntime.graph_000.inference.region_0``.
        stream: where to print; ``None`` for standard output.
        quiet: print nothing. Results stay available as attributes.

    A tool sees the operators of the threads that started it. A stopped tool can be started again; it keeps its results.
    """

    _computes = True
    """Whether ``_before`` and ``_after`` compute with tensors."""

    _sees_gradients = False
    """Whether ``_after`` reads ``call.results``, and may return a callback for the call's gradients."""

    def __init__(
        self,
        *,
        include: Names = None,
        exclude: Names = None,
        predicate: Callable[[Call], bool] | None = None,
        level: str = "torch",
        stream: TextIO | None = None,
        quiet: bool = False,
    ) -> None:
        if level not in ("torch", "aten"):
            raise ValueError(f"level must be 'torch' or 'aten', not {level!r}")
        self.level = level
        self._patterns = (include, exclude)
        self._predicate = predicate
        self._filter = OperatorFilter(type(self).__name__, *self._patterns)
        self._stream = stream
        self._quiet = quiet
        self._lock = threading.RLock()
        self._counts: Counter[str] = Counter()
        self._chosen_names: dict[Callable[..., Any], str] = {}
        self._logged: set[tuple[str, str]] = set()
        self._skipped: dict[str, str] = {}  # the reason, and the line of the first call
        self._skipped_calls: Counter[str] = Counter()
        self._local = threading.local()
        self._threads = 0
        self._handles: list[Any] = []  # of hooks
        self._clean_up_at = 2_000

    def start(self) -> Self:
        """Applies the tool to this thread.

        Raises:
            RuntimeError: it is applied to this thread already.
        """
        if getattr(self._local, "mode", None) is not None:
            raise RuntimeError(f"this {type(self).__name__} is started already")
        with self._lock:
            if not self._threads:
                self._filter = OperatorFilter(type(self).__name__, *self._patterns)
                self._chosen_names.clear()
                self._begin()
            self._threads += 1
        self._local.mode = InstalledMode(self._handle, self.level)
        return self

    def stop(self) -> None:
        """Stops the tool in this thread, and prints a summary if no other thread uses it.

        Raises:
            RuntimeError: an operator that the tool sees is running, as in a hook of ``backward()``; the tool stays on.
        """
        mode = getattr(self._local, "mode", None)
        if mode is None:
            return
        mode.remove()
        self._local.mode = None
        with self._lock:
            self._threads -= 1
            is_last = not self._threads
        if is_last:
            for handle in self._handles:
                handle.remove()
            self._handles.clear()
            self._guard("its summary", self._end)
            for text in self._filter.unmatched():
                logger.warning("%s: %s", type(self).__name__, text)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.stop()

    @property
    def is_running(self) -> bool:
        """Whether any thread uses it."""
        return self._threads > 0

    # Methods that tools override

    def _summary(self) -> tuple[Sequence[str], Sequence[Sequence[object]]]:
        """The headers and rows of the printed summary."""
        raise NotImplementedError

    def _begin(self) -> None:
        """Called when the first thread starts."""

    def _end(self) -> None:
        """Called when the last thread stops: prints a summary."""
        headers, rows = self._summary()
        if rows:
            self._print("\n" + fit_table(rows, headers))

    def _before(self, call: Call) -> Any:
        """Called before a chosen call; the result is passed to ``_after``. No tool sees the operators in it."""

    def _after(self, call: Call, before: Any, result: Any) -> Callable[[Gradients], None] | None:
        """Called after a chosen call that returned. No tool sees the operators in it.

        Returns:
            A callback for the gradients of the call, if it has a backward. The callback must not hold results, or
            arguments that the call changed.
        """

    def _execute(self, call: Call, before: Any) -> Any:
        """Runs a chosen call. ``before`` is the result of ``_before``, ``None`` if it failed."""
        return call.function(*call.args, **call.kwargs)

    # How calls reach them

    def _handle(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # A region is one call; hide the operators that allocate its results
        with watchers_disabled() if type(function) is RunnableRegion else contextlib.nullcontext():
            return self._apply(function, args, kwargs)

    def _apply(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = self._chosen_names.get(function)
        if name is None:
            name = self._chosen_names[function] = self._chosen_name(function)
        if not name:
            return function(*args, **kwargs)
        if self._computes and in_transform():
            self._skip(name, "it is called inside a transform of torch.func or forward-mode AD")
            return function(*args, **kwargs)
        with self._lock:
            number = self._counts[name]
            self._counts[name] = number + 1
        has_gradients = self.level == "torch" and torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        call = Call(name, function, args, kwargs, number, has_gradients)
        if self._predicate is not None and not self._guard(f"the predicate on {name}", self._predicate, call):
            return function(*args, **kwargs)
        hooks = self._guard(name, CallHooks, call, lambda: self.is_running) if self._sees_gradients else None
        before = self._guard(name, self._before, call)
        result = self._execute(call, before)
        self._guard(name, self._finish, call, hooks, before, result)
        return result

    def _finish(self, call: Call, hooks: CallHooks | None, before: Any, result: Any) -> None:
        if hooks is not None:
            written, tensors = call.written, call.tensors.items()
            changed = {
                name: value
                for (name, value), version in zip(tensors, hooks.versions, strict=True)
                if version_of(value) != version or name in written
            }
            call.results = named_results(result, changed)
        callback = self._after(call, before, result)
        if hooks is None or callback is None:
            return
        hooks.add(call.results, functools.partial(self._guard, f"the gradients of {call.name}", callback))
        self._handles += hooks.handles
        if len(self._handles) > self._clean_up_at:  # drop handles of freed graphs
            self._handles = [handle for handle in self._handles if handle.hooks_dict_ref() is not None]
            self._clean_up_at = max(self._clean_up_at, 2 * len(self._handles))

    def _chosen_name(self, function: Callable[..., Any]) -> str:
        """The name of an operator that the filter accepts; else ``""``."""
        name = self._name(function)
        is_ignored = is_query(function) and not self._filter.includes_exactly(name)
        return name if not is_ignored and self._filter.accepts(name) else ""

    def _name(self, function: Callable[..., Any]) -> str:
        if isinstance(function, RunnableRegion):
            graph = function.graph
            return f"onnxruntime.graph_{graph.index:03d}.{graph.direction}.{function.__name__}"
        return function_name(function) if self.level == "torch" else str(function)

    def _skip(self, name: str, reason: str, call: Call | CallText | None = None) -> None:
        """Records, and logs once for each operator, why the tool was not applied to a call."""
        self._skipped_calls[name] += 1
        if name not in self._skipped:
            source = call.source if call is not None else ""
            reason = self._skipped[name] = f"{reason} ({source})" if source else reason
            logger.info("%s skips a call of %s: %s", type(self).__name__, name, reason)

    def _guard(self, what: str, work: Callable[..., Any], *arguments: Any) -> Any:
        """Runs a part of the tool. An error in it is logged once, and the model runs on."""
        try:
            with without_modes() if self._computes else contextlib.nullcontext():
                return work(*arguments)
        except Exception as error:
            text = f"{type(error).__name__}: {first_line(str(error))}"
            if (what, text) not in self._logged:
                self._logged.add((what, text))
                logger.warning("%s failed on %s: %s", type(self).__name__, what, text)
                logger.debug("the traceback", exc_info=True)
            return None

    def _print(self, text: str) -> None:
        if not self._quiet:
            print(text, file=self._stream or sys.stdout)
