"""Runs the graphs of a frame with one engine after the other on real steps, and from then on with the fastest.

A call runs one engine, on the caller's arguments, and is timed where the graph is called. Only in the first call of an
engine PyTorch runs too: its results are the caller's, and the engine's must be the same. Who watches operators sees one
run a call.
"""

from __future__ import annotations

import gc
import logging
import time
import weakref
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import fx

from passes.engine.locks import Lock

from ..common.operator_watchers import unseen
from ..common.safety_net import caught, net
from ..errors import CandidateError, SessionError, TranslationError, first_line
from ..events import count, trying
from ..graphs.aot import as_dynamo_compiles, gradients_of_results
from ..graphs.artifacts import GraphName, Runner
from ..numerics.same_results import difference_of_results, sampled
from ..runtime.system_memory import give_back
from .graph_facts import draws, least_precise, symbolic_arguments, written_arguments
from .outcomes import Outcomes
from .search import Outcome, Search

logger = logging.getLogger(__name__)

_TRY_AGAIN_AFTER = 200
"""Calls after which a winner and a challenger that was nearly as fast are timed again; then ten times as many."""


_autotuners: weakref.WeakSet[Autotuner] = weakref.WeakSet()


def is_searching() -> bool:
    """Whether a graph of this process is called with engines that are only tried."""
    return any(tuner.outcome is None for tuner in list(_autotuners))


class Autotuner:
    """Finds out which engines run the graphs of one frame fastest, see ``search``.

    Args:
        engines: their names; the first is the reference, PyTorch.
        directions: of the graphs, in the order in which a step calls them.
        margin: the share of the reference's time that a winner takes at most.
        outcomes: where the outcome is kept; ``None`` to keep none.
        foreign: engines whose failures are another library's.

    Attributes:
        lock: of the graphs' calls while engines are tried.
        outcome: which engine runs each graph, if it is decided.
    """

    def __init__(
        self,
        engines: Sequence[str],
        directions: Sequence[str],
        *,
        margin: float,
        outcomes: Outcomes | None = None,
        foreign: Sequence[str] = (),
    ) -> None:
        self.engines = tuple(engines)
        self.directions = tuple(directions)
        self.foreign = frozenset(foreign)
        self.lock = Lock()
        self.search = Search(engines, len(directions), margin)
        self._outcomes = outcomes
        self._graphs: weakref.WeakSet[TunedGraph] = weakref.WeakSet()
        self.outcome = self.search.outcome = self._known()
        _autotuners.add(self)

    def _known(self) -> Outcome | None:
        found = self._outcomes.known() if self._outcomes is not None else None
        if found is None or len(found.winner) != len(self.directions) or not set(found.winner) <= set(self.engines):
            return None
        return found

    def add(self, graph: TunedGraph) -> None:
        """Adds one of the frame's graphs."""
        self._graphs.add(graph)

    def engine(self, position: int) -> str:
        """The engine of a graph in this call, see ``Search.engine``; decides, tells and keeps the outcome."""
        before = self.search.configuration
        engine = self.search.engine(position)
        if self.search.configuration != before:
            give_back()  # engines do not find what another freed
        if self.search.outcome is not None and self.outcome is None:
            self.outcome = self.search.outcome
            for direction, winner in zip(self.directions, self.outcome.winner, strict=True):
                count(f"autotuned {direction} {winner}")
            logger.info(
                "%s run by %s: %s", " and ".join(self.directions), " and ".join(self.outcome.winner), self.outcome
            )
            if self._outcomes is not None:
                self._outcomes.keep(self.outcome)
        return engine

    def try_again(self) -> None:
        """Times the winner and its challenger again, if there is one."""
        if not self.lock.acquire(blocking=False):  # another thread's call is timed
            return
        try:
            if self.outcome is None or self.outcome.challenger is None:
                return
            self.search.try_again(self.outcome, self.outcome.challenger)
            self.outcome = None
            for graph in self._graphs:
                graph.unsettle()
        finally:
            self.lock.release()

    def give_up(self) -> None:
        """The reference runs all graphs in this process, and the next one finds nothing."""
        self.outcome = self.search.outcome = Outcome((self.engines[0],) * len(self.directions), {}, {})
        if self._outcomes is not None:
            self._outcomes.forget()


class TunedGraph:
    """One graph of a frame, run by the engine that its autotuner says; it takes its arguments boxed.

    Args:
        name: which graph.
        module: the graph, before any of its passes; it stays as it is.
        builders: for each engine, what makes a runner of the graph.
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
        self._gradients = gradients_of_results(module)
        # whether a run on other gradients of the results tells how much rounding grows, and changes nothing
        self._may_be_moved = bool(self._gradients) and not self._draws and not self._written
        self._least_precise = least_precise(module)
        self._runners: dict[str, Runner] = {}
        self._warnings: dict[str, list[str]] = {engine: [] for engine in builders}
        self._compared = {self._reference}
        self._settled: Runner | None = None
        self._calls, self._try_again_at = 0, _TRY_AGAIN_AFTER
        tuner.add(self)
        if tuner.outcome is not None:
            self._settle_as_before(tuner.outcome)

    def __call__(self, args: list[object]) -> object:
        settled = self._settled
        if settled is not None:
            self._calls += 1
            if self._calls != self._try_again_at:
                return settled(args)
            with net(f"autotuning of {self._name}", "The graph runs as before"):
                self._try_again_at *= 10
                if self._position == 0:  # where a step begins
                    self._tuner.try_again()
            if self._settled is not None:
                return settled(args)
        try:
            reference = self._built_reference()
        except Exception as error:
            return self._give_up(error)(args)
        if not self._tuner.lock.acquire(blocking=False):  # who compiles may call this, and waits for nobody
            return reference(args)  # another thread's call is timed
        try:
            return self._tuned(args) if self._settled is None else self._settled(args)
        finally:
            self._tuner.lock.release()

    def _built_reference(self) -> Runner:
        """PyTorch's runner, which is built first, in one thread at a time."""
        found = self._runners.get(self._reference)
        if found is None:
            with unseen(while_compiling=True), as_dynamo_compiles():
                found = self._runners.get(self._reference) or self._builders[self._reference]()
                self._runners[self._reference] = found
        return found

    def unsettle(self) -> None:
        """Asks the autotuner again from the next call on."""
        self._settled = None

    def _settle_as_before(self, outcome: Outcome) -> None:
        """Builds the winner of an earlier process; the reference, where that is not possible any more."""
        engine = outcome.winner[self._position]
        logger.info("%s runs by %s, as was found before: %s", self._name, engine, outcome)
        try:
            self._runners[engine] = self._builders[engine]()
        except Exception as error:  # whatever a compiler raises, one that is no longer there for instance
            if engine == self._reference:
                raise
            if engine in self._tuner.foreign or isinstance(error, CandidateError):
                why = first_line(str(error))
                logger.warning("%s runs by %s, as %s cannot compile it: %s", self._name, self._reference, engine, why)
            else:
                caught(f"the compile of {self._name}", error, "PyTorch runs the graph")
            self._tuner.give_up()
            engine = self._reference
            self._runners[engine] = self._builders[engine]()
        if engine == self._reference:
            self._settle(engine)  # any other is compared first, in this process too

    def _tuned(self, args: list[object]) -> object:
        """A call while engines are tried. What PyTorch raises is the caller's; what we raise ends the search.

        An engine is timed, and may win, only after its results were compared with PyTorch's.
        """
        try:
            engine = self._tuner.engine(self._position)
            if engine not in self._runners:
                engine = self._built(engine)
            if self._tuner.outcome is not None and engine in self._compared:
                return self._settle(engine)(args)
        except Exception as error:
            return self._give_up(error)(args)
        if engine not in self._compared:
            return self._called_and_compared(engine, args)
        return self._timed(engine, args)

    def _built(self, engine: str) -> str:
        """Builds an engine's runner; the engine that runs instead, where it cannot be built."""
        started = time.perf_counter()
        with unseen(while_compiling=True):
            logger.info("%s: %s compiles it", self._name, engine)
            try:
                with trying(self._warnings[engine]):
                    self._runners[engine] = self._builders[engine]()
            except Exception as error:  # whatever a compiler raises: the model runs without it
                self._reject(engine, f"cannot compile the {self._name.direction}", error)
                return self._reference
        logger.info("%s: %s compiled it in %.1f s", self._name, engine, time.perf_counter() - started)
        return engine

    def _reject(self, engine: str, what: str, error: Exception | None = None) -> None:
        said = ""
        if error is not None:
            kind = "" if isinstance(error, CandidateError) else f"{type(error).__name__}: "
            said = f": {kind}{first_line(str(error))}"
            if engine not in self._tuner.foreign and not isinstance(
                error, (SessionError, TranslationError, CandidateError)
            ):
                caught(f"{self._name} by {engine}", error, "PyTorch runs the graph")
        self._runners.pop(engine, None)
        count(f"autotune_rejected {engine}")
        if self._tuner.outcome is None:
            self._tuner.search.reject(self._position, engine, f"{what}{said}")
        else:  # it was found fastest by an earlier process
            logger.warning("%s: %s %s%s; %s runs it", self._name, engine, what, said, self._reference)
            self._tuner.give_up()

    def _timed(self, engine: str, args: list[object]) -> object:
        runner, elements, device = self._runners[engine], 1, None
        kept = list(args) if engine != self._reference and not self._written else []
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
            result = self._runners[self._reference](list(kept))  # what it raises is the caller's
            with net(f"autotuning of {self._name}", "PyTorch runs the graph"):
                self._reject(engine, f"failed in the {self._name.direction}", error)
            return result
        with net(f"the timing of {self._name}", "The graph runs"):
            _wait(device)
            self._tuner.search.ran(self._position, (time.perf_counter() - started) * 1e3, max(elements, 1))
        return result

    def _called_and_compared(self, engine: str, args: list[object]) -> object:
        """The first call of an engine: PyTorch's results, with which those of the engine are compared.

        PyTorch runs after the engine, of whose large results a sample is kept: so both need little more memory than
        PyTorch alone.
        """
        first: list[object] | Exception
        try:
            first = self._first_results(engine, args)
        except Exception as error:  # whatever it raises: PyTorch runs the graph, and may raise its own
            first = error.with_traceback(None)  # which would hold the results
        given = list(args) if self._may_be_moved else []
        written = [args[i] for i in self._written]
        result = self._runners[self._reference](args)
        try:
            if isinstance(first, Exception):
                self._reject(engine, f"failed in the {self._name.direction}", first)
            elif wrong := self._difference(first, sampled([*_leaves(result), *written]), given):
                self._reject(engine, f"computes something else in the {self._name.direction}: {wrong}")
            else:
                self._compared.add(engine)
            given.clear()
            give_back()
        except Exception as error:
            self._give_up(error)
        return result

    def _first_results(self, engine: str, args: Sequence[object]) -> list[object]:
        """What an engine returns, and then what it writes; arguments and random state stay."""
        state = torch.get_rng_state() if self._draws else None
        try:
            copied = [arg.clone() if i in self._written else arg for i, arg in enumerate(args)]  # type: ignore[attr-defined]
            written = [copied[i] for i in self._written]
            with unseen(), trying(self._warnings[engine]):
                return sampled([*_leaves(self._runners[engine](copied)), *written])
        finally:
            if state is not None:
                torch.set_rng_state(state)
            give_back()

    def _difference(self, actual: Sequence[object], expected: Sequence[object], given: Sequence[object]) -> str:
        """How an engine's results differ from PyTorch's by more than rounding; empty if they do not."""
        with unseen():
            wrong = difference_of_results(expected, actual, float32_as=self._least_precise)
            if wrong and given:  # where terms cancel, the results may be nothing but their rounding
                other = sampled(_leaves(self._runners[self._reference](self._perturbed(given))))
                wrong = difference_of_results(expected, actual, other, float32_as=self._least_precise)
        return wrong

    def _perturbed(self, args: Sequence[object]) -> list[object]:
        """Arguments with other gradients of the results: each number is less by a rounding, or as it was, at random."""
        changed, rounding = list(args), torch.finfo(self._least_precise).eps
        for i in self._gradients:
            value = changed[i]
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                generator = torch.Generator(value.device).manual_seed(0)
                is_less = torch.randint(2, value.shape, generator=generator, device=value.device, dtype=torch.bool)
                changed[i] = torch.where(is_less, value * (1 - rounding), value)
        return changed

    def _settle(self, engine: str) -> Runner:
        """The engine runs from now on; what the others had is free. The graph stays, if one is to be tried again."""
        for text in self._warnings[engine]:
            logger.warning("%s", text)
        self._warnings[engine] = []
        settled = self._runners[engine]
        self._settled, self._runners = settled, {engine: settled}
        outcome = self._tuner.outcome
        if outcome is None or outcome.challenger is None:
            self._builders = {}
        with net("giving memory back", "The graph runs"):
            gc.collect(0)
            give_back()
        return settled

    def _give_up(self, error: Exception) -> Runner:
        """The reference runs the frame from now on, after an exception that is no engine's own."""
        settled = self._runners.get(self._reference) or self._builders[self._reference]()
        caught(f"autotuning of {self._name}", error, "PyTorch runs the graph")
        self._settled, self._runners, self._builders = settled, {self._reference: settled}, {}
        self._tuner.give_up()
        return settled


def _wait(device: torch.device | None) -> None:
    if device is not None and device.type != "meta":
        torch.accelerator.synchronize(device)


def _leaves(results: object) -> list[object]:
    return list(results) if isinstance(results, (list, tuple)) else [results]
