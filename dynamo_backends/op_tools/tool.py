"""What the tools have in common: they are started and stopped, choose calls, and never harm the model."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import torch

from ..common.operator_watchers import unseen
from ..common.text_table import fit_table
from ..errors import first_line
from ..graphs.artifacts import RunnableRegion
from ..report.table_page import TablePage, write_table_page
from .call import Call, results_of
from .dispatch_modes import InstalledMode, aside, in_transform
from .gradients import Before, Gradients, Hooks
from .names import is_query, name_of
from .operator_filter import Choice, Names

if TYPE_CHECKING:
    from typing import Self

logger = logging.getLogger(__name__)


class OpTool:
    """A tool that is applied to the operators called in a block.

    Args:
        include: names of operators with wildcards, a list or a string with commas: ``"*gelu*,torch.Tensor.add"``;
            ``None`` for all. The environment variable ``OP_<TOOL>_LIST`` takes its place.
        exclude: names that are left out; ``OP_<TOOL>_DISABLE_LIST`` adds to them.
        predicate: is given each ``Call`` of an operator that was chosen by name, and says whether the tool is applied.
        level: ``"torch"`` for what users call, ``torch.Tensor.add``; ``"aten"`` for what the dispatcher runs, in the
            backward too, ``aten.add.Tensor``. Both see what compiled graphs run in PyTorch, by the dispatcher's names,
            and each region on ONNX Runtime as one call, ``onnxruntime.graph_000.inference.region_0``.
        stream: where lines and tables are printed; ``None`` for standard output.
        quiet: whether nothing is printed. What was found stays to be asked for.

    The tool sees the operators of the threads that start it. It may be started again after it was stopped, and goes on
    with what it has.
    """

    _computes = True
    """Whether ``_before`` and ``_after`` compute with tensors, and do not only look at what they are."""

    _sees_gradients = False
    """Whether ``_after`` reads ``call.results``, and may return what is to be done with the call's gradients."""

    _times_gradients = False
    """Whether the nodes of a call's backward are timed."""

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
            raise ValueError(f"level is 'torch' or 'aten', not {level!r}")
        self.level = level
        self._choosing = (include, exclude)
        self._predicate = predicate
        self._choice = Choice(type(self).__name__, *self._choosing)
        self._stream = stream
        self._quiet = quiet
        self._lock = threading.RLock()
        self._counts: Counter[str] = Counter()
        self._chosen_names: dict[Callable[..., Any], str] = {}
        self._said: set[tuple[str, str]] = set()
        self._skipped: dict[str, str] = {}
        self._local = threading.local()
        self._threads = 0
        self._hooks = Hooks()

    def start(self) -> Self:
        """Applies the tool to what this thread runs from now on.

        Raises:
            RuntimeError: it is applied to this thread already.
        """
        if getattr(self._local, "mode", None) is not None:
            raise RuntimeError(f"this {type(self).__name__} was started already")
        with self._lock:
            if not self._threads:
                self._choice = Choice(type(self).__name__, *self._choosing)
                self._chosen_names.clear()
                self._hooks.is_on = True
                self._begin()
            self._threads += 1
        self._local.mode = InstalledMode(self._handle, self.level)
        return self

    def stop(self) -> None:
        """Ends what ``start`` began in this thread; with the last thread the tool's summary is printed.

        Raises:
            RuntimeError: an operator that the tool sees is just running, as in a hook of ``backward()``; the tool
                goes on.
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
            self._hooks.end()
            self._guard("its summary", self._end)
            for text in self._choice.unmatched():
                logger.warning("%s: %s", type(self).__name__, text)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.stop()

    @property
    def is_running(self) -> bool:
        """Whether it is applied to any thread."""
        return self._threads > 0

    def write_page(self, path: str | os.PathLike[str]) -> Path:
        """Writes what was found as a page to look at in a browser: one file, sorted and filtered there.

        Returns:
            Its path.

        Raises:
            OSError: it cannot be written.
        """
        return write_table_page(self._page(), Path(path))

    # What a tool does

    def _page(self) -> TablePage:
        """What ``write_page`` shows."""
        rows = sorted(self._counts.items(), key=lambda item: -item[1])
        return TablePage(f"{type(self).__name__}: {sum(self._counts.values())} calls", ["operator", "calls"], rows)

    def _begin(self) -> None:
        """Is called when the first thread starts."""

    def _end(self) -> None:
        """Is called when the last thread stops: prints what was found."""
        page = self._page()
        if page.rows:
            rows = [[f"{cell:.4g}" if isinstance(cell, float) else cell for cell in row] for row in page.rows]
            self._print("\n" + fit_table(rows, page.headers))

    def _before(self, call: Call) -> Any:
        """Is called before a chosen call; what it returns is given to ``_after``. Nothing it computes is seen."""

    def _after(self, call: Call, before: Any, result: Any) -> Callable[[Gradients], None] | None:
        """Is called after a chosen call that returned. Nothing it computes is seen.

        What it returns is given the gradients of the call, if it has a backward, and must not hold its results, nor
        arguments that it changed.
        """

    def _execute(self, call: Call, before: Any) -> Any:
        """Makes a chosen call; ``before`` is what ``_before`` returned, ``None`` if it failed."""
        return call.function(*call.args, **call.kwargs)

    # How it comes to do it

    def _handle(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Of a region only the whole is a call, not how its results get their memory
        with unseen() if type(function) is RunnableRegion else contextlib.nullcontext():
            return self._watched(function, args, kwargs)

    def _watched(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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
        call = Call(name, function, args, kwargs, number, self.level, has_gradients)
        if self._predicate is not None and not self._guard(f"the predicate on {name}", self._predicate, call):
            return function(*args, **kwargs)
        known = self._guard(name, Before, call) if self._sees_gradients else None
        before = self._guard(name, self._before, call)
        result = self._execute(call, before)
        self._guard(name, self._finish, call, known, before, result)
        return result

    def _finish(self, call: Call, known: Before | None, before: Any, result: Any) -> None:
        if known is not None:
            call.results = results_of(call, result, known.versions)
        told = self._after(call, before, result)
        if known is None or told is None:
            return
        finished = functools.partial(self._guard, f"the gradients of {call.name}", told)
        self._hooks.watch(known, call.results, finished, with_times=self._times_gradients)

    def _chosen_name(self, function: Callable[..., Any]) -> str:
        """The name of an operator to which the tool is applied, as far as names tell; else ``""``."""
        name = self._name(function)
        if is_query(function) and not self._choice.names_query(name):
            return ""
        return name if self._choice.takes_name(name) else ""

    def _name(self, function: Callable[..., Any]) -> str:
        if isinstance(function, RunnableRegion):
            graph = function.graph
            return f"onnxruntime.graph_{graph.index:03d}.{graph.direction}.{function.__name__}"
        return name_of(function) if self.level == "torch" else str(function)

    def _skip(self, name: str, why: str) -> None:
        """Notes, and says in the log once, why the tool was not applied to a call of an operator."""
        if name not in self._skipped:
            self._skipped[name] = why
            logger.info("%s skips a call of %s: %s", type(self).__name__, name, why)

    def _guard(self, what: str, work: Callable[..., Any], *arguments: Any) -> Any:
        """Does a part of the tool's work. What goes wrong in it must not end the model: it is said, once."""
        try:
            with aside() if self._computes else contextlib.nullcontext():
                return work(*arguments)
        except Exception as error:
            said = f"{type(error).__name__}: {first_line(str(error))}"
            if (what, said) not in self._said:
                self._said.add((what, said))
                logger.warning("%s could not look at %s: %s", type(self).__name__, what, said)
                logger.debug("the traceback", exc_info=True)
            return None

    def _print(self, text: str) -> None:
        if not self._quiet:
            print(text, file=self._stream or sys.stdout)


def dtype_name(dtype: torch.dtype) -> str:
    """``float32``."""
    return str(dtype).removeprefix("torch.")
