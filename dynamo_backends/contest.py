"""Finds out in a graph's first calls where it runs fastest, and runs it there from then on.

The *candidates* are ways to run one graph: PyTorch, ONNX Runtime, Inductor. The first of them, the *reference*, gives
the results of these calls; the others get the same arguments and must compute the same. Who watches operators sees one
run of the reference a call, as the program makes it, and nothing of what is tried::

    call 1          the reference is built, and runs alone: the first result does not wait for the others
    call 2          the others are built, and run; one that fails, or returns something else, is out
    calls 2 to 5    all are timed, in turn; one that takes half as long again as the reference is out;
                    call 3 is the last if one is far ahead
    then            the fastest runs, if it is faster than the reference by some margin
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from passes.engine.locks import Lock

from .artifacts import GraphName, Runner
from .errors import CandidateError, SessionError, TranslationError, first_line
from .events import count, trying
from .layout import significant_strides
from .numerics.distance import dense, distance, is_carried, is_explained
from .runtime.heap import give_back
from .safety_net import caught, net
from .watchers import unseen, watch_this_thread

logger = logging.getLogger(__name__)

Build = Callable[[], Runner]

_ROUNDS = 4
"""Calls in which all candidates are timed; two, if the fastest is far ahead."""

_FAR_AHEAD = 0.85
"""The share of the time of the next that the fastest takes then, at most."""

_PAUSE = 0.003
"""Seconds before each: the threads of what ran before go on looking for work for a while."""

_SHORT, _LONG, _MOST_RUNS = 1.0, 200.0, 10
"""Milliseconds: a candidate is run until its timed runs took the first; what takes the second is run once."""

_HOPELESS = 1.5
"""How many times as long as the reference a candidate may take and stay."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a contest ended.

    Attributes:
        winner: the name of the candidate that runs.
        milliseconds: the median of each that was timed.
        out: why the others are out, by name.
    """

    winner: str
    milliseconds: Mapping[str, float]
    out: Mapping[str, str]

    def __str__(self) -> str:
        times = [f"{name} {time:.3g} ms" for name, time in sorted(self.milliseconds.items(), key=lambda item: item[1])]
        return "; ".join([*times, *(f"{name} is out: {why}" for name, why in self.out.items())])


@dataclasses.dataclass(frozen=True)
class _Measured:
    """A call before the reference runs.

    Attributes:
        new: the candidates that ran for the first time.
        given: what they were given; empty if there are none.
        results: what they returned, and then what they wrote, by name.
        arguments: those of the reference, for further runs.
        written: what the reference writes to.
        state: of PyTorch's generator, where the graph draws random numbers.
    """

    new: Sequence[str]
    given: Sequence[object]
    results: Mapping[str, list[object]]
    arguments: Sequence[object]
    written: Sequence[object]
    state: torch.Tensor | None


def _nobody_hears(outcome: Outcome) -> None:
    pass


class Contest:
    """Runs a graph, see above. It takes its arguments boxed.

    Args:
        graph: which graph.
        candidates: what makes a callable of the graph, by name; the reference comes first.
        margin: the share of the reference's time that a winner may take at most.
        written: positions of the arguments that the graph writes to; the others get copies of these.
        draws: whether it draws random numbers: the others draw the same.
        exact: gives the float64 results for arguments, and a state of PyTorch's generator where it ``draws``, and
            after them what it writes to each of ``written``; by it those are judged whose results differ by more than
            rounding usually grows to.
        ended: is told of the outcome.
        in_pytorch: makes what runs where the reference cannot be built; by default that is an error.
        foreign: candidates whose failures are another library's.
    """

    def __init__(
        self,
        graph: GraphName,
        candidates: Mapping[str, Build],
        *,
        margin: float = 0.97,
        written: Sequence[int] = (),
        draws: bool = False,
        exact: Callable[[Sequence[object], torch.Tensor | None], Sequence[object]] | None = None,
        ended: Callable[[Outcome], None] = _nobody_hears,
        in_pytorch: Build | None = None,
        foreign: Sequence[str] = (),
    ) -> None:
        self._graph = graph
        self._waiting = dict(candidates)
        self._reference = next(iter(candidates))
        self._margin = margin
        self._written = tuple(written)
        self._draws = draws
        self._exact = exact
        self._ended = ended
        self._in_pytorch = in_pytorch
        self._foreign = frozenset(foreign)
        self._failed: dict[str, Exception] = {}
        self._lock = Lock()
        self._runners: dict[str, Runner] = {}
        self._times: dict[str, list[float]] = {}
        self._out: dict[str, str] = {}
        self._told: dict[str, list[str]] = {name: [] for name in candidates}
        self._compared: set[str] = set()
        self._winner: Runner | None = None

    def __call__(self, args: list[object]) -> object:
        if self._winner is not None:
            return self._winner(args)
        if not self._lock.acquire(blocking=self._reference not in self._runners):
            return self._runners[self._reference](args)  # another thread measures
        try:
            if self._winner is not None:
                return self._winner(args)
            return self._call(args)
        finally:
            self._lock.release()

    def _call(self, args: list[object]) -> object:
        if not self._runners:
            self._build_reference()
            return self._runners[self._reference](args)
        try:
            before = self._before(args)
        except Exception as error:
            self._give_up(error)
            return self._runners[self._reference](args)
        result, milliseconds = self._clocked(self._reference, args, before.state)  # what PyTorch raises is the user's
        try:
            self._after(before, result, milliseconds)
        except Exception as error:
            self._give_up(error)
        return result

    def _build_reference(self) -> None:
        try:
            with unseen(while_compiling=True):
                self._runners[self._reference] = self._waiting[self._reference]()
            del self._waiting[self._reference]
        except Exception as error:
            if self._in_pytorch is None:
                raise
            self._runners[self._reference] = self._in_pytorch()
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """The reference runs from now on, after an exception that is no candidate's own."""
        caught(f"autotuning of {self._graph}", error, "PyTorch runs the graph")
        self._winner = self._runners[self._reference]
        self._runners = {self._reference: self._winner}
        self._waiting = {}
        self._exact, self._ended, self._in_pytorch = None, _nobody_hears, None  # they hold the graph

    def _before(self, args: list[object]) -> _Measured:
        """What the other candidates return and take on these arguments, and what the reference starts from."""
        if self._waiting:
            with unseen(while_compiling=True):
                self._build()
        state = torch.get_rng_state() if self._draws else None
        with unseen():
            return self._run_others(args, state)

    def _run_others(self, args: list[object], state: torch.Tensor | None) -> _Measured:
        """Times all candidates but the reference, with what the new ones gave and wrote into their arguments."""
        try:
            new = [name for name in self._runners if name != self._reference and name not in self._compared]
            given = self._copied(args) if new else []
            results: dict[str, list[object]] = {}
            for name in [name for name in self._runners if name != self._reference]:
                if name in new:  # its first run makes what it keeps, and is not timed
                    copied = self._copied(args)
                    written = [copied[i] for i in self._written]
                    results[name] = [*_leaves(self._run(name, copied, state)), *written]
                if name in self._runners:
                    self._timed(name, self._copied(args), state)
            measured = _Measured(new, given, results, self._copied(args), [args[i] for i in self._written], state)
            time.sleep(_PAUSE)
        except BaseException:
            if state is not None:
                torch.set_rng_state(state)
            raise
        return measured

    def _after(self, measured: _Measured, result: object, milliseconds: float) -> None:
        """Compares the other candidates with the result of the reference, and judges."""
        self._tell_of_failures()
        self._time_again(self._reference, measured.arguments, measured.state, milliseconds)
        with unseen():
            expected = [*_leaves(result), *measured.written]
            for name, other in measured.results.items():
                if name in self._runners and (wrong := self._wrong(expected, other, measured.given, measured.state)):
                    self._drop(name, f"it computes something else: {wrong}")
            self._compared.update(measured.new)
            self._judge()

    def _build(self) -> None:
        for name, build in self._waiting.items():
            logger.info("%s: %s compiles it", self._graph, name)
            started = time.perf_counter()
            try:
                with trying(self._told[name]):
                    self._runners[name] = build()
            except Exception as error:  # whatever a compiler raises: the model runs without it
                said = "" if isinstance(error, CandidateError) else f"{type(error).__name__}: "
                self._drop(name, f"it cannot be compiled: {said}{first_line(str(error))}")
                self._failed[name] = error
            else:
                seconds = time.perf_counter() - started
                logger.info("%s: %s is compiled, %.1f s", self._graph, name, seconds)
        self._waiting = {}

    def _wrong(self, result: object, other: object, args: Sequence[object], state: torch.Tensor | None) -> str:
        """What is wrong about the results of another candidate; empty if nothing is."""
        try:
            wrong = difference_of_results(result, other)
        except Exception as error:  # whatever a kind of tensors lacks: the call has its result all the same
            return f"its results cannot be compared: {type(error).__name__}: {first_line(str(error))}"
        if not wrong or self._exact is None:
            return wrong
        try:
            exact = self._exact(args, state)
        except Exception as error:  # float64 takes more memory, and PyTorch has not all of it
            return f"{wrong}, and float64 cannot be computed: {type(error).__name__}: {first_line(str(error))}"
        return difference_of_results(result, other, exact)

    def _copied(self, args: Sequence[object]) -> list[object]:
        copied = list(args)
        for i in self._written:
            value = copied[i]
            if isinstance(value, torch.Tensor):
                copied[i] = value.clone()
        return copied

    def _run(self, name: str, args: list[object], state: torch.Tensor | None) -> object:
        if state is not None:
            torch.set_rng_state(state)
        if name == self._reference:
            return self._runners[name](args)
        try:
            with trying(self._told[name]):
                return self._runners[name](args)
        except Exception as error:  # whatever it raises: the reference runs the model, and may raise its own
            self._drop(name, f"it failed: {type(error).__name__}: {first_line(str(error))}")
            self._failed[name] = error
            return None

    def _tell_of_failures(self) -> None:
        """Tells of the candidates that failed, if that is our fault: the reference ran, so it is not the user's."""
        failed, self._failed = self._failed, {}
        for name, error in failed.items():
            if name not in self._foreign and not isinstance(error, (SessionError, TranslationError, CandidateError)):
                caught(f"{self._graph} by {name}", error, "The candidate is out")

    def _timed(self, name: str, args: list[object], state: torch.Tensor | None) -> object:
        """The result of a run, after which further ones are timed, of which the least counts.

        A program calls one thing again and again, and so finds caches and threads as its last call left them: what ran
        before was another candidate. A long run does not depend on that, and is timed itself, unless it is watched.
        """
        with unseen():
            before = self._copied(args)
        time.sleep(_PAUSE)
        first, milliseconds = self._clocked(name, args, state)
        self._time_again(name, before, state, milliseconds)
        return first

    def _time_again(self, name: str, before: Sequence[object], state: torch.Tensor | None, milliseconds: float) -> None:
        """The further runs, after a first one of ``milliseconds``; the random state stays as that left it."""
        after = torch.get_rng_state() if state is not None else None
        try:
            times = [milliseconds] if milliseconds > _LONG and not watch_this_thread() else []
            with unseen():
                while name in self._runners and sum(times) < _SHORT and len(times) < _MOST_RUNS:
                    times.append(self._clocked(name, self._copied(before), state)[1])
        finally:
            if after is not None:
                torch.set_rng_state(after)
        if name in self._runners:
            self._times.setdefault(name, []).append(min(times))

    def _clocked(self, name: str, args: list[object], state: torch.Tensor | None) -> tuple[object, float]:
        started = time.perf_counter()
        result = self._run(name, args, state)
        return result, (time.perf_counter() - started) * 1e3

    def _drop(self, name: str, why: str) -> None:
        self._runners.pop(name, None)
        self._out[name] = why
        count(f"contest_out {name}")

    def _judge(self) -> None:
        medians = {name: statistics.median(self._times[name]) for name in self._runners}
        reference = medians[self._reference]
        for name, median in medians.items():
            if median > _HOPELESS * reference:
                del self._runners[name]
        fastest, *others = sorted(medians[name] for name in self._runners)
        rounds = len(self._times[self._reference])
        is_clear = rounds > 1 and bool(others) and fastest < _FAR_AHEAD * others[0]
        if others and rounds < _ROUNDS and not is_clear:
            return
        winner = min(self._runners, key=medians.__getitem__)
        if medians[winner] > self._margin * reference:
            winner = self._reference
        times = {name: statistics.median(found) for name, found in self._times.items() if name not in self._out}
        outcome = Outcome(winner, times, dict(self._out))
        self._runners = {self._reference: self._runners[winner]}  # for threads that are on their way
        self._winner = self._after_the_contest
        count(f"contest_won {winner}")
        logger.info("%s runs by %s: %s", self._graph, winner, outcome)
        for text in self._told[winner]:
            logger.warning("%s", text)
        self._ended(outcome)
        self._exact, self._ended, self._in_pytorch = None, _nobody_hears, None  # they hold the graph

    def _after_the_contest(self, args: list[object]) -> object:
        """The first call by the winner alone: what the others had is free now, and goes back."""
        self._winner = self._runners[self._reference]
        with net("giving memory back", "The graph runs"):
            gc.collect(0)
            give_back()
        return self._winner(args)


def difference_of_results(
    expected: object, actual: object, exact: Sequence[object] | None = None, *, float32_as: torch.dtype = torch.float32
) -> str:
    """What distinguishes the results of two candidates beyond rounding; empty if nothing does.

    Args:
        expected: those of the reference.
        actual: those of the other.
        exact: those of float64, which tells what rounding accounts for; without it, half of the dtype's digits do.
        float32_as: the dtype by whose rounding float32 is judged.
    """
    ours, theirs = _leaves(actual), _leaves(expected)
    if len(ours) != len(theirs):
        return f"{len(ours)} results, not {len(theirs)}"
    largest = max((_largest(value) for value in theirs), default=0.0)
    for i, (our, their) in enumerate(zip(ours, theirs, strict=True)):
        if not isinstance(our, torch.Tensor) or not isinstance(their, torch.Tensor):
            if type(our) is not type(their) or our != their:
                return f"result {i} is {our!r}, not {their!r}"
            continue
        for ours_is, theirs_is in ((our.dtype, their.dtype), (our.shape, their.shape), (our.layout, their.layout)):
            if ours_is != theirs_is:
                return f"result {i} is {ours_is}, not {theirs_is}"
        if significant_strides(our) != significant_strides(their):
            return f"result {i} is laid out in another way"
        rounded_to = float32_as if our.dtype is torch.float32 else our.dtype
        if not _is_near(our, their, largest, None if exact is None else exact[i], rounded_to):
            return f"result {i} has other values"
    return ""


def _is_near(ours: torch.Tensor, theirs: torch.Tensor, largest: float, exact: object, rounded_to: torch.dtype) -> bool:
    between = distance(ours, theirs)
    if not isinstance(exact, torch.Tensor):
        return is_carried(between, rounded_to, largest)
    return is_carried(between, rounded_to, largest) or is_explained(
        distance(ours, exact), distance(theirs, exact), rounded_to, largest
    )


def _leaves(results: object) -> list[object]:
    return list(results) if isinstance(results, (list, tuple)) else [results]


def _largest(value: object) -> float:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.numel() == 0:
        return 0.0
    whole = dense(value.detach())
    whole = whole.float() if whole.itemsize == 1 else whole  # PyTorch has no largest of those
    largest = float(whole.abs().max())
    return largest if largest < float("inf") else 0.0
