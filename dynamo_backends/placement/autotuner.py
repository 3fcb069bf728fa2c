"""Runs the graphs of a frame with one engine after another on real steps, and then with the fastest.

Each call runs one engine on the caller's arguments, and is timed. Before the first one of an engine, its results are
compared with PyTorch's, on copies of what is written; operator watchers do not see that.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ..cache.graphs import CachedGraphs
from ..cache.store import StoredRecord
from ..common.fork_safety import Lock
from ..common.operator_watchers import watchers_disabled
from ..common.random_state import RandomState
from ..common.safety_net import caught, net
from ..errors import CandidateError, SessionError, TranslationError, first_line, is_out_of_memory
from ..events import candidate_run, count, is_new
from ..graphs.artifacts import GraphName, Runner
from ..graphs.in_place import write_backs
from ..numerics.exact import KERNEL_ERRORS
from ..numerics.randomness import is_random
from ..numerics.whole_graph import difference_of_results, graph_check, leaves_of, sampled
from ..runtime.system_memory import give_back
from .search import Search

logger = logging.getLogger(__name__)

_SEARCH_AGAIN_AFTER = 200
"""Calls after which engines are timed again, see ``Autotuner.search_again``; then ten times as many."""

_PROCESSES = 20
"""Processes that use an outcome before the engines are timed again: the machine may have changed."""

_ALONE = 50
"""Forwards are timed alone after so many times as many in a row as were called before a backward until now."""

_NO_BACKWARD = (
    f"a compiled model was called {_ALONE} times with gradients enabled, and no backward followed. From now on its "
    "forward is timed alone. If you need no gradients, call it under torch.no_grad() or torch.inference_mode(): its "
    "weights are constants then, which is faster and takes less memory"
)


class Budget:
    """What this process has spent on searches, and whether that allows more.

    ``backend="eager"`` spends nothing: the trace by AOTAutograd counts too, so that a short job is not searched at all.
    What a part of a search will take is not known before. So it begins if all until now is within the budget, which it
    may then exceed for a while.
    """

    def __init__(self) -> None:
        self._spent, self._started = 0.0, time.perf_counter()

    def begin(self) -> None:
        """The time counts from the first frame on."""
        if not self._spent:
            self._started = time.perf_counter()

    def allows(self, percent: int) -> bool:
        """Whether at most so many percent of the time were spent; 100 allows all."""
        return percent == 100 or 100 * self._spent <= percent * (time.perf_counter() - self._started)

    def spend(self, seconds: float) -> None:
        """Adds what something took."""
        self._spent += seconds

    @contextlib.contextmanager
    def spending(self) -> Iterator[None]:
        """Adds what the context takes."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.spend(time.perf_counter() - started)


BUDGET = Budget()
"""Of this process."""


class Autotuner:
    """Chooses the engine of a frame's graphs: by a ``Search``, or as an earlier process did.

    Whoever evaluates a model and forgets ``torch.no_grad()`` calls forwards alone. After a while they are timed alone,
    which is not kept on disk. With the next backward, whole steps are timed.

    Args:
        engines: the first is the reference, PyTorch.
        directions: of the graphs, in the order in which a step calls them.
        cache: keeps the times on disk.
        frame: identifies the frame there.
        foreign: engines of other libraries; their failures are not ours.
        percent: of the process's time that searches may take.

    Attributes:
        lock: held by a call while engines are tried.
        rejected: why engines were rejected in this process.
    """

    def __init__(
        self,
        engines: Sequence[str],
        directions: Sequence[str],
        cache: CachedGraphs | None = None,
        frame: str = "",
        foreign: Sequence[str] = (),
        percent: int = 100,
    ) -> None:
        self.engines, self.directions, self._foreign = tuple(engines), tuple(directions), tuple(foreign)
        self.lock = Lock()
        self.rejected: dict[str, str] = {}
        self._percent = percent
        self._wanted_memory = self._is_alone = self._is_paused = False
        self._row, self._longest_row = 0, 1  # forwards since the last backward
        self._cache, self._question = cache, {"frame": frame, "directions": directions, "engines": engines}
        self.search = Search(self.engines, len(directions), self._known())

    def is_paused(self, position: int) -> bool:
        """Whether PyTorch runs a graph in this call, untimed, because searches have used up their budget.

        From the graph on that finds this, it runs the rest of the step. What an earlier process found costs no search.
        """
        if position == 0:
            self._is_paused = False
        self._is_paused |= not self.search.is_over and not BUDGET.allows(self._percent)
        if self._is_paused:
            self._follow_forwards(position)
        return self._is_paused

    def engine(self, position: int) -> str:
        """The engine of a graph in this call. If that ends the search, its outcome is logged and kept."""
        self._follow_forwards(position)
        before, was_over = self.search.engine, self.search.is_over
        engine = self.search.begin(position)
        if engine != before:
            give_back()  # an engine must not profit from memory that another freed
        if self.search.is_over and not was_over:
            times = "; ".join(f"{name} {time:.3g} ms" for name, time in self.search.milliseconds.items())
            what = "forward, until a backward comes," if self._is_alone else " and ".join(self.directions)
            logger.info("%s: run by %s: %s", what, engine, times)
            if self._is_alone:
                count(f"autotuned forward-only {engine}")
                return engine
            for direction in self.directions:
                count(f"autotuned {direction} {engine}")
            if not self._wanted_memory:
                self._keep(self.search.milliseconds, 0)
        return engine

    def _follow_forwards(self, position: int) -> None:
        """Times forwards alone if no backward follows them, and whole steps again if one does."""
        if len(self.directions) == 1:
            return
        if position == 1:
            self._longest_row = max(self._longest_row, self._row)
        self._row = self._row + 1 if position == 0 else 0
        if (self._row > _ALONE * self._longest_row) == self._is_alone:
            return
        self._is_alone = not self._is_alone
        self._begin_search(self.engines)
        if self._is_alone and is_new(_NO_BACKWARD):
            logger.warning("%s", _NO_BACKWARD)

    def _begin_search(self, engines: Sequence[str], known: Mapping[str, float] | None = None) -> None:
        candidates = [engine for engine in engines if engine not in self.rejected]
        self.search = Search(candidates, 1 if self._is_alone else len(self.directions), known)

    def search_again(self, position: int) -> None:
        """Times the reference and the engines near the winner again; all engines, if one wanted memory."""
        if position or not self.search.is_over or self._is_alone or not BUDGET.allows(self._percent):
            return
        if not self.lock.acquire(blocking=False):
            return
        try:
            near = self.search.near()
            if self._wanted_memory:
                self._wanted_memory, self.rejected, near = False, {}, list(self.engines)
            if len(near) > 1:
                self._begin_search([self.engines[0], *(engine for engine in self.engines[1:] if engine in near)])
        finally:
            self.lock.release()

    def reject(self, engine: str, why: str, error: Exception | None = None) -> None:
        """Rejects an engine for all graphs of the frame; ``error`` is what it raised."""
        if error is not None:
            kind = "" if isinstance(error, CandidateError) else f"{type(error).__name__}: "
            expected = (SessionError, TranslationError, CandidateError)
            if engine not in self._foreign and not isinstance(error, expected):
                caught(f"{engine} {why}", error, "PyTorch runs the graph")
            why = f"{why}: {kind}{first_line(str(error))}"
            self._wanted_memory |= is_out_of_memory(error)
        count(f"autotune_rejected {engine}")
        logger.info("%s is rejected: %s", engine, why)
        self.rejected[engine] = why
        self.search.reject(engine)
        if self.search.is_over:  # it was the fastest in an earlier process
            self._begin_search(self.engines)

    def give_up(self) -> None:
        """Makes the reference run all graphs in this process."""
        if len(self.engines) > 1:  # for the first of its graphs
            self.engines, self._wanted_memory, self._cache = self.engines[:1], False, None
            self._begin_search(self.engines, known={})

    def _known(self) -> Mapping[str, float] | None:
        """The times of an earlier process."""
        found = self._cache.fact(self._question, _read) if self._cache is not None else None
        if found is None or found[1] >= _PROCESSES or not {self.engines[0]} <= found[0].keys() <= set(self.engines):
            return None
        self._keep(found[0], found[1] + 1)
        logger.info("timed by an earlier process: %s", found[0])
        return found[0]

    def _keep(self, milliseconds: Mapping[str, float], processes: int) -> None:
        if self._cache is not None:
            self._cache.keep_fact(self._question, [milliseconds, processes])


def _read(record: StoredRecord) -> tuple[Mapping[str, float], int]:
    """The times of engines, and the number of processes that used them; raises if the record is something else."""
    milliseconds, processes = record.header
    return {str(engine): float(time) for engine, time in milliseconds.items()}, int(processes)


class TunedGraph:
    """One graph of a frame, run by the engine that its autotuner chooses; it takes its arguments boxed.

    Args:
        name: of the graph.
        module: the graph, before its passes; it is not changed.
        reference: PyTorch's runner.
        builders: for each other engine a function that makes a runner of the graph.
        tuner: of the frame.
    """

    def __init__(
        self,
        name: GraphName,
        module: fx.GraphModule,
        reference: Runner,
        builders: Mapping[str, Callable[[], Runner]],
        tuner: Autotuner,
    ) -> None:
        self._name, self._module, self._builders, self._tuner = name, module, builders, tuner
        self._position = tuner.directions.index(name.direction)
        self._reference, self._runners = reference, {tuner.engines[0]: reference}
        self._compared = {tuner.engines[0]}
        self._warnings: dict[str, list[Callable[[], None]]] = {engine: [] for engine in tuner.engines}
        self._settled: tuple[Search | None, Runner] = (None, reference)
        self._calls, self._search_again_at = 0, _SEARCH_AGAIN_AFTER
        placeholders = list(module.graph.find_nodes(op="placeholder"))
        self._draws = any(map(may_draw, module.graph.nodes))
        self._written = [placeholders.index(argument) for argument, _, _ in write_backs(module)]
        values = {i: node.meta.get("val") for i, node in enumerate(placeholders)}
        tensors = {i: value for i, value in values.items() if isinstance(value, torch.Tensor)}
        self._symbolic = [i for i, item in tensors.items() if any(isinstance(n, torch.SymInt) for n in item.shape)]
        devices = {item.device for item in tensors.values()}
        self._device = next((device for device in devices if device.type not in ("cpu", "meta")), None)

    def __call__(self, args: list[Any]) -> object:
        search, settled = self._settled
        if search is self._tuner.search:
            self._calls += 1
            if self._calls == self._search_again_at:
                self._search_again_at *= 10
                with net(f"autotuning of {self._name}", "The graph runs as before"):
                    self._tuner.search_again(self._position)  # from the next call on
            return settled(args)
        if not self._tuner.lock.acquire(blocking=False):  # another thread's call is timed, or compiles
            return self._reference(args)
        try:
            return self._chosen(args)(args)
        finally:
            self._tuner.lock.release()

    def _chosen(self, args: Sequence[Any]) -> Runner:
        """What runs this call: an engine, with a clock or for good, or PyTorch if an engine was built or compared."""
        try:
            if self._tuner.is_paused(self._position):
                return self._reference
            count("autotuning_calls")
            engine = self._tuner.engine(self._position)
            if engine not in self._compared or engine not in self._runners:
                with BUDGET.spending():
                    if engine not in self._runners:
                        self._build(engine)
                    return self._compared_with_reference(engine, args) if engine in self._runners else self._reference
            if self._tuner.search.is_over:
                return self._settle(engine)
            is_reference = self._runners[engine] is self._reference
            copies = {i: _copy(args[i]) for i in self._written if not is_reference}
            self._wait()
            return functools.partial(self._timed, engine, copies)
        except Exception as error:  # raised by no engine
            caught(f"autotuning of {self._name}", error, "PyTorch runs the graph")
            self._tuner.give_up()
            self._settled = (self._tuner.search, self._reference)
            return self._reference

    def _build(self, engine: str) -> None:
        """Builds an engine's runner, or rejects the engine."""
        self._compared.discard(engine)  # that was another runner
        logger.info("%s: %s compiles it", self._name, engine)
        started = time.perf_counter()
        try:
            with watchers_disabled(while_compiling=True), candidate_run(self._warnings[engine]):
                self._runners[engine] = self._builders[engine]()
            logger.info("%s: %s compiled it in %.1f s", self._name, engine, time.perf_counter() - started)
        except Exception as error:  # whatever a compiler raises
            self._reject(engine, "cannot compile", error)

    def _compared_with_reference(self, engine: str, args: Sequence[Any]) -> Runner:
        """PyTorch's runner. An engine whose results differ from PyTorch's by more than rounding is rejected."""
        state = RandomState.now()
        try:
            expected = self._results(self._reference, args)
            with candidate_run(self._warnings[engine]):
                actual = self._results(self._runners[engine], args)
        except Exception as error:  # whatever it raises; a traceback would keep the results alive
            return functools.partial(self._instead, engine, error.with_traceback(None))
        try:
            with watchers_disabled():
                wrong = difference_of_results(
                    expected, actual, lambda: graph_check(self._module, args, state, written=self._written)
                )
        except (*KERNEL_ERRORS, IndexError) as error:  # in float64, for want of memory, too
            wrong = f"it cannot be compared: {type(error).__name__}: {first_line(str(error))}"
        if wrong:
            self._reject(engine, f"{wrong}, in")
        else:
            self._compared.add(engine)
        return self._reference

    def _instead(self, engine: str, error: Exception, args: list[Any]) -> object:
        """PyTorch's results, as an engine failed. What PyTorch raises too is the caller's."""
        result = self._reference(args)
        with net(f"autotuning of {self._name}", "PyTorch runs the graph"):
            self._reject(engine, "failed in", error)
        return result

    def _results(self, runner: Runner, args: Sequence[Any]) -> list[object]:
        """The results of a runner, then the arguments that it writes, which are copies; of large tensors a sample."""
        state = RandomState.now()
        given = [_copy(arg) if i in self._written else arg for i, arg in enumerate(args)]
        try:
            with watchers_disabled():
                return sampled([*leaves_of(runner(list(given))), *(given[i] for i in self._written)])
        finally:
            if self._draws:
                state.restore()
            give_back()

    def _timed(self, engine: str, copies: Mapping[int, torch.Tensor], args: list[Any]) -> object:
        """Runs an engine; if it fails, PyTorch with the same arguments and random numbers."""
        runner, elements = self._runners[engine], sum(args[i].numel() for i in self._symbolic)
        given = [] if runner is self._reference else list(args)
        state = RandomState.now()
        started = time.perf_counter()
        try:
            result = runner(args)
        except Exception as error:
            if runner is self._reference:
                raise
            if self._draws:
                state.restore()
            for i, value in copies.items():
                given[i].copy_(value)
            return self._instead(engine, error, given)
        with net(f"the timing of {self._name}", "The graph runs"):
            self._wait()
            self._tuner.search.ran(self._position, (time.perf_counter() - started) * 1e3, max(elements, 1))
        return result

    def _wait(self) -> None:
        if self._device is not None:
            torch.accelerator.synchronize(self._device)

    def _settle(self, engine: str) -> Runner:
        """Makes an engine run further calls, and frees the others."""
        for log in self._warnings[engine]:
            log()
        self._warnings[engine].clear()
        runner = self._runners[engine]
        self._runners = {self._tuner.engines[0]: self._reference, engine: runner}
        self._settled = (self._tuner.search, runner)
        gc.collect(0)
        give_back()
        return runner

    def _reject(self, engine: str, why: str, error: Exception | None = None) -> None:
        self._runners.pop(engine, None)
        self._tuner.reject(engine, f"{why} {self._name}", error)


def _copy(value: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, on which results' strides depend; those of a clone are without gaps."""
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).copy_(value)


def may_draw(node: fx.Node) -> bool:
    """Whether a node may draw random numbers, as operators of other libraries may: few are marked as random."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return node.target.namespace not in ("aten", "prims") or is_random(node.target)
