"""Runs the graphs of a frame with one engine after another on real steps, and then with the fastest.

Each call runs one engine on the caller's arguments, and is timed. In the first call of an engine PyTorch runs too: its
results are returned, and the engine's must agree with them. Operator watchers see one run in each call.
"""

from __future__ import annotations

import gc
import logging
import time
import weakref
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import fx

from ..common.fork_safety import Lock
from ..common.operator_watchers import watchers_disabled
from ..common.safety_net import caught, net
from ..errors import CandidateError, SessionError, TranslationError, first_line, is_out_of_memory
from ..events import candidate_run, count, is_new
from ..graphs.artifacts import GraphName, Runner
from ..graphs.late_compile import dynamo_compile_lock
from ..numerics.exact import KERNEL_ERRORS
from ..numerics.whole_graph import difference_of_results, graph_check, leaves_of, sampled
from ..runtime.system_memory import give_back
from .graph_facts import draws, symbolic_arguments, written_arguments
from .outcomes import StoredOutcomes
from .search import EngineSearch, SearchOutcome, TrainingSearch

logger = logging.getLogger(__name__)

_TRY_AGAIN_AFTER = 200
"""Calls after which a winner and a challenger that was nearly as fast are timed again; then ten times as many. If an
engine was rejected for want of memory, all engines are."""

_NO_BACKWARD = (
    "a compiled model was called with gradients enabled, as often as a search for the fastest engine takes, and no "
    "backward followed. From now on its forward is timed alone. If you need no gradients, call it under "
    "torch.no_grad() or torch.inference_mode(): its weights are constants then, which is faster and takes less memory"
)

_autotuners: weakref.WeakSet[Autotuner] = weakref.WeakSet()


def is_searching() -> bool:
    """Whether a graph of this process has no final engine yet."""
    return any(tuner.outcome is None and tuner.outcome_of_forwards is None for tuner in list(_autotuners))


class Autotuner:
    """Finds the fastest engines for the graphs of one frame, see ``search``.

    Args:
        engines: their names; the first is the reference, PyTorch.
        directions: of the graphs, in the order in which a step calls them.
        margin: a winner must take at most this share of the reference's time.
        outcomes: keeps the outcome on disk; ``None`` to keep none.
        foreign: engines of other libraries; their failures are not ours.

    Attributes:
        lock: held by a graph's call while engines are tried.
        outcome: which engine runs each graph; ``None`` while searching.
        wanted_memory: whether an engine was rejected for want of memory; then the outcome is not kept on disk.
        outcome_of_forwards: while no backward comes, which engine runs the forward; it is not kept on disk.
        graphs: the frame's graphs, which add themselves.
    """

    def __init__(
        self,
        engines: Sequence[str],
        directions: Sequence[str],
        *,
        margin: float,
        outcomes: StoredOutcomes | None = None,
        foreign: Sequence[str] = (),
    ) -> None:
        self.engines = tuple(engines)
        self.directions = tuple(directions)
        self.foreign = frozenset(foreign)
        self.lock = Lock()
        self._margin = margin
        self.search = self._new_search()
        self.wanted_memory = False
        self.outcome_of_forwards: SearchOutcome | None = None
        self._outcomes = outcomes
        self.graphs: weakref.WeakSet[TunedGraph] = weakref.WeakSet()
        known = outcomes.known() if outcomes is not None else None
        if known is not None and (len(known.winner) != len(directions) or not set(known.winner) <= set(engines)):
            known = None
        self.outcome = self.search.outcome = known
        _autotuners.add(self)

    def _new_search(self) -> EngineSearch:
        if len(self.directions) == 2:
            return TrainingSearch(self.engines, self._margin)
        return EngineSearch(self.engines, 1, self._margin)

    def engine(self, position: int) -> str:
        """The engine of a graph in this call, see ``EngineSearch.engine``; keeps the outcome once the search ends."""
        before = self.search.configuration
        engine = self.search.engine(position)
        if self.search.configuration != before:
            give_back()  # an engine must not profit from memory that another freed
        self._follow_forwards()
        if self.search.outcome is not None and self.outcome is None:
            self.outcome = self.search.outcome
            for direction, winner in zip(self.directions, self.outcome.winner, strict=True):
                count(f"autotuned {direction} {winner}")
            chosen = ", ".join(map(" is run by ".join, zip(self.directions, self.outcome.winner, strict=True)))
            logger.info("%s: %s", chosen, self.outcome)
            if self._outcomes is not None and not self.wanted_memory:
                self._outcomes.keep(self.outcome)
        return engine

    def _follow_forwards(self) -> None:
        """Settles the forward if no backward comes, and unsettles it if one does."""
        if self.search.is_alone and is_new(_NO_BACKWARD):
            logger.warning("%s", _NO_BACKWARD)
        if self.search.outcome_of_forwards is self.outcome_of_forwards:
            return
        self.outcome_of_forwards = self.search.outcome_of_forwards
        for graph in self.graphs:
            graph.unsettle()
        if self.outcome_of_forwards is not None:
            [winner] = self.outcome_of_forwards.winner
            count(f"autotuned forward-only {winner}")
            logger.info("forward is run by %s until a backward comes: %s", winner, self.outcome_of_forwards)

    def try_again(self) -> None:
        """Times the winner and its challenger again, if there is one, or all engines, if one wanted memory."""
        if not self.lock.acquire(blocking=False):  # another thread's call is timed
            return
        try:
            if self.outcome is None:
                return
            if self.wanted_memory:
                self.wanted_memory, self.search = False, self._new_search()
            elif self.outcome.challenger is not None:
                self.search.try_again(self.outcome, self.outcome.challenger)
            else:
                return
            self.outcome = None
            for graph in self.graphs:
                graph.unsettle()
        finally:
            self.lock.release()

    def give_up(self) -> None:
        """Makes the reference run all graphs in this process, and the next process search again."""
        self.outcome = self.search.outcome = SearchOutcome((self.engines[0],) * len(self.directions), {}, {})
        self.wanted_memory = False
        if self._outcomes is not None:
            self._outcomes.forget()


class TunedGraph:
    """One graph of a frame, run by the engine that its autotuner chooses; it takes its arguments boxed.

    Args:
        name: of the graph.
        module: the graph, before its passes; it is not changed.
        builders: for each engine a function that makes a runner of the graph.
        tuner: of the frame.
    """

    def __init__(
        self, name: GraphName, module: fx.GraphModule, builders: Mapping[str, Callable[[], Runner]], tuner: Autotuner
    ) -> None:
        self._name = name
        self._position = tuner.directions.index(name.direction)
        self._builders = dict(builders)
        self._tuner = tuner
        self._reference = tuner.engines[0]
        self._written = written_arguments(module) or []
        self._draws = draws(module)
        self._symbolic = symbolic_arguments(module)
        self._module: fx.GraphModule | None = module  # until the engines are compared
        self._runners: dict[str, Runner] = {}
        self._warnings: dict[str, list[Callable[[], None]]] = {engine: [] for engine in builders}
        self._compared = {self._reference}
        self._settled: Runner | None = None
        self._calls, self._try_again_at = 0, _TRY_AGAIN_AFTER
        tuner.graphs.add(self)
        if tuner.outcome is not None:
            self._build_known_winner(tuner.outcome)

    def __call__(self, args: list[object]) -> object:
        settled = self._settled
        if settled is not None:
            self._calls += 1
            if self._calls != self._try_again_at:
                return settled(args)
            with net(f"autotuning of {self._name}", "The graph runs as before"):
                self._try_again_at *= 10
                if self._position == 0:  # a step begins
                    self._tuner.try_again()
            if self._settled is not None:
                return settled(args)
        try:
            reference = self._built_reference()
        except Exception as error:
            return self._give_up(error)(args)
        if not self._tuner.lock.acquire(blocking=False):  # another thread's call is timed, or compiles
            return reference(args)
        try:
            if self._settled is not None:
                return self._settled(args)
            count("autotuning_calls")
            return self._tuned(args)
        finally:
            self._tuner.lock.release()

    def _built_reference(self) -> Runner:
        """PyTorch's runner, built at first use, in one thread at a time."""
        runner = self._runners.get(self._reference)
        if runner is None:
            with watchers_disabled(while_compiling=True), dynamo_compile_lock():
                runner = self._runners.get(self._reference) or self._builders[self._reference]()
                self._runners[self._reference] = runner
        return runner

    def unsettle(self) -> None:
        """Makes the next calls ask the autotuner again."""
        self._settled = None

    def _build_known_winner(self, outcome: SearchOutcome) -> None:
        """Builds the winner of an earlier process; if that fails, the reference."""
        engine = outcome.winner[self._position]
        logger.info("%s is run by %s, the winner in an earlier process: %s", self._name, engine, outcome)
        try:
            self._runners[engine] = self._builders[engine]()
        except Exception as error:  # whatever a compiler raises, for instance one that was uninstalled
            if engine == self._reference:
                raise
            if engine in self._tuner.foreign or isinstance(error, CandidateError):
                why = first_line(str(error))
                logger.warning("%s is run by %s, as %s cannot compile it: %s", self._name, self._reference, engine, why)
            else:
                caught(f"the compile of {self._name}", error, "PyTorch runs the graph")
            self._tuner.give_up()
            engine = self._reference
            self._runners[engine] = self._builders[engine]()
        if engine == self._reference:
            self._settle(engine)  # any other engine is compared first, in each process

    def _tuned(self, args: list[object]) -> object:
        """A call while engines are tried. PyTorch's exceptions are the caller's; ours end the search.

        An engine is timed, and may win, only after its results agreed with PyTorch's.
        """
        try:
            engine = self._tuner.engine(self._position)
            if engine not in self._runners:
                engine = self._built(engine)
            outcome = self._tuner.outcome or self._tuner.outcome_of_forwards
            if outcome is not None and engine in self._compared:
                return self._settle(engine)(args)
        except Exception as error:
            return self._give_up(error)(args)
        if engine not in self._compared:
            return self._called_and_compared(engine, args)
        return self._timed(engine, args)

    def _built(self, engine: str) -> str:
        """Builds an engine's runner; returns the engine, or the reference if that fails."""
        started = time.perf_counter()
        with watchers_disabled(while_compiling=True):
            logger.info("%s: %s compiles it", self._name, engine)
            try:
                with candidate_run(self._warnings[engine]):
                    self._runners[engine] = self._builders[engine]()
            except Exception as error:  # whatever a compiler raises
                self._reject(engine, f"cannot compile the {self._name.direction}", error)
                return self._reference
        logger.info("%s: %s compiled it in %.1f s", self._name, engine, time.perf_counter() - started)
        return engine

    def _reject(self, engine: str, why: str, error: Exception | None = None) -> None:
        if error is not None:
            self._tuner.wanted_memory |= is_out_of_memory(error)
            kind = "" if isinstance(error, CandidateError) else f"{type(error).__name__}: "
            why = f"{why}: {kind}{first_line(str(error))}"
            expected = (SessionError, TranslationError, CandidateError)
            if engine not in self._tuner.foreign and not isinstance(error, expected):
                caught(f"{self._name} by {engine}", error, "PyTorch runs the graph")
        self._runners.pop(engine, None)
        count(f"autotune_rejected {engine}")
        if self._tuner.outcome is None:
            self._tuner.search.reject(self._position, engine, why)
        else:  # the winner of an earlier process
            logger.warning("%s: %s %s; %s runs it", self._name, engine, why, self._reference)
            self._tuner.give_up()

    def _timed(self, engine: str, args: list[object]) -> object:
        runner, elements, device = self._runners[engine], 1, None
        kept = list(args) if engine != self._reference else []
        before = {i: args[i].clone() for i in self._written} if kept else {}  # type: ignore[attr-defined]
        with net(f"the timing of {self._name}", "The graph runs"):
            elements = sum(args[i].numel() for i in self._symbolic)  # type: ignore[attr-defined]
            tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
            device = next((arg.device for arg in tensors if arg.device.type not in ("cpu", "meta")), None)
            _wait(device)
        state = torch.get_rng_state() if kept and self._draws else None
        started = time.perf_counter()
        try:
            result = runner(args)
        except Exception as error:
            if not kept:
                raise
            if state is not None:
                torch.set_rng_state(state)
            for i, value in before.items():
                kept[i].copy_(value)  # type: ignore[attr-defined]
            result = self._runners[self._reference](list(kept))  # its exceptions are the caller's
            with net(f"autotuning of {self._name}", "PyTorch runs the graph"):
                self._reject(engine, f"failed in the {self._name.direction}", error)
            return result
        with net(f"the timing of {self._name}", "The graph runs"):
            _wait(device)
            self._tuner.search.ran(self._position, (time.perf_counter() - started) * 1e3, max(elements, 1))
        return result

    def _called_and_compared(self, engine: str, args: list[object]) -> object:
        """The first call of an engine: returns PyTorch's results, and compares the engine's with them.

        PyTorch runs after the engine, of whose large results only a sample is kept, so that both need little more
        memory than PyTorch alone.
        """
        actual: list[object] | Exception
        try:
            actual = self._first_results(engine, args)
        except Exception as error:  # whatever it raises
            actual = error.with_traceback(None)  # a traceback would keep the results alive
        kept = [_copy(arg) if i in self._written else arg for i, arg in enumerate(args)]
        written = [args[i] for i in self._written]
        state = torch.get_rng_state()
        result = self._runners[self._reference](args)
        try:
            if isinstance(actual, Exception):
                self._reject(engine, f"failed in the {self._name.direction}", actual)
            elif wrong := self._difference(actual, [*leaves_of(result), *written], kept, state):
                self._reject(engine, f"computes something else in the {self._name.direction}: {wrong}")
            else:
                self._compared.add(engine)
            kept.clear()
            give_back()
        except Exception as error:
            self._give_up(error)
        return result

    def _first_results(self, engine: str, args: Sequence[object]) -> list[object]:
        """An engine's results, then the arguments it writes; the caller's arguments and random state do not change."""
        state = torch.get_rng_state() if self._draws else None
        try:
            copied = [_copy(arg) if i in self._written else arg for i, arg in enumerate(args)]
            written = [copied[i] for i in self._written]
            with watchers_disabled(), candidate_run(self._warnings[engine]):
                return sampled([*leaves_of(self._runners[engine](copied)), *written])
        finally:
            if state is not None:
                torch.set_rng_state(state)
            give_back()

    def _difference(
        self, actual: Sequence[object], expected: Sequence[object], args: Sequence[object], state: torch.Tensor
    ) -> str:
        """How an engine's results differ from PyTorch's by more than rounding, or why that is not known; empty if they
        do not. ``args`` and ``state`` are as they were before the call."""
        module = self._module
        assert module is not None
        with watchers_disabled():
            try:
                return difference_of_results(
                    expected, actual, lambda: graph_check(module, args, state, written=self._written)
                )
            except (*KERNEL_ERRORS, IndexError) as error:  # in float64, for want of memory, too
                return f"it cannot be compared: {type(error).__name__}: {first_line(str(error))}"

    def _settle(self, engine: str) -> Runner:
        """Makes an engine run further calls, and frees the others; the graph is kept if engines may be timed again."""
        for log in self._warnings[engine]:
            log()
        self._warnings[engine] = []
        settled = self._settled = self._runners[engine]
        outcome = self._tuner.outcome
        if outcome is None:  # only until a backward comes
            return settled
        self._runners = {engine: settled}
        if outcome.challenger is None and not self._tuner.wanted_memory:
            self._builders, self._module = {}, None
        with net("giving memory back", "The graph runs"):
            gc.collect(0)
            give_back()
        return settled

    def _give_up(self, error: Exception) -> Runner:
        """Makes the reference run all further calls, after an exception that no engine raised."""
        settled = self._runners.get(self._reference) or self._builders[self._reference]()
        caught(f"autotuning of {self._name}", error, "PyTorch runs the graph")
        self._settled, self._runners, self._builders = settled, {self._reference: settled}, {}
        self._module = None
        self._tuner.give_up()
        return settled


def _wait(device: torch.device | None) -> None:
    if device is not None:
        torch.accelerator.synchronize(device)


def _copy(value: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, on which results' strides depend; those of a clone are without gaps."""
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).copy_(value)
