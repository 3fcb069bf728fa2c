"""Judges whether a compiled function returns the same, right result at each call and with each number of threads.

``judge`` runs a ``Subject`` repeatedly and returns one of ``OUTCOMES``. The order of summation may change with the
number of threads, and even from run to run; then results differ by rounding. The tolerance is measured: the error
against float64, compared with eager's, by ``dynamo_backends.numerics.rule``.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch.utils import _pytree as pytree

from dynamo_backends.numerics import rule
from dynamo_backends.numerics.arrays import as_array, dtype_name
from dynamo_backends.numerics.function_runs import Recording, Rerun
from dynamo_backends.numerics.rule import Measure, spread
from dynamo_backends.numerics.whole_graph import measure

IDENTICAL = "identical"
BETWEEN_THREADS = "rounding between threads"
BETWEEN_RUNS = "rounding between runs"
WRONG = "WRONG"
UNDEFINED = "undefined"

_CHAOTIC = 1e-3
"""Eager's error relative to the largest value, from which on its elements have no right digits to compare with: the
compiled function may then have twice as many elements that are off as eager."""

_ROUNDING_UNITS = 64.0
_TIMES = 3
"""How often float64 runs with rounding at random."""

_KEPT = 2
"""How many results that differ from the first are measured against float64, for each number of threads."""

Results = list[torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Subject:
    """What is judged. Each function takes its own copy of the inputs at each call, and returns the result's tensors.

    Attributes:
        compiled: through the backend.
        eager: in PyTorch.
        exact: in PyTorch with float64; may raise where the operator has no float64 kernel.
        undefined: positions of the results that PyTorch does not define.
    """

    compiled: Callable[[], Results]
    eager: Callable[[], Results]
    exact: Callable[[], Results]
    undefined: frozenset[int] = frozenset()


@dataclasses.dataclass
class Verdict:
    """The result of judging a subject.

    Attributes:
        outcome: one of ``OUTCOMES``.
        runs: how often it ran with each number of threads.
        bad: number of wrong results among those measured, by number of threads.
        different: number of runs with other bits than the first, by number of threads; ``"at once"`` for calls from two
            Python threads at the same time.
        error: largest error against float64, relative to the largest value.
        eager_error: eager's.
        spread: largest difference between two runs with one number of threads, relative to the largest value.
        spread_threads: largest difference between numbers of threads.
        eager_varies: whether eager's bits differ in a second run, or with another number of threads.
        text: what is wrong, for people.
    """

    outcome: str
    runs: int = 0
    bad: dict[str, int] = dataclasses.field(default_factory=dict)
    different: dict[str, int] = dataclasses.field(default_factory=dict)
    error: float = 0.0
    eager_error: float = 0.0
    spread: float = 0.0
    spread_threads: float = 0.0
    eager_varies: str = ""
    text: str = ""


def flat(results: object) -> Results:
    """The tensors of a result as strided tensors, numbers included."""
    found = []
    for leaf in pytree.tree_leaves(results):
        if isinstance(leaf, (bool, int, float, complex)):
            found.append(torch.tensor(leaf))
        elif isinstance(leaf, torch.Tensor):
            dense = leaf if leaf.layout is torch.strided else leaf.to_dense()
            found.append(dense.detach().resolve_conj().resolve_neg())
    return found


def same_bits(first: Results, second: Results) -> bool:
    """Whether two results are equal bit by bit, NaN payloads and signs of zero too."""
    return len(first) == len(second) and all(
        a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bits(a), _bits(b))
        for a, b in zip(first, second, strict=True)
    )


def _bits(value: torch.Tensor) -> torch.Tensor:
    if value.is_complex():
        value = torch.view_as_real(value)
    if not value.is_floating_point():
        return value
    return value.contiguous().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[value.element_size()])


def judge(subject: Subject, *, runs: int, threads: Sequence[int], seconds: float = 6.0) -> Verdict:
    """Runs a subject with each number of threads, and twice at once, and compares all results.

    Args:
        subject: what is run.
        runs: how often with each number of threads; fewer, but at least 3, if these take longer than ``seconds``.
        threads: numbers of threads.
        seconds: about how long the runs may take together.
    """
    before = torch.get_num_threads()
    try:
        return _Judge(subject, runs, tuple(threads), seconds).verdict()
    finally:
        torch.set_num_threads(before)


class _Judge:
    """The state of one call of ``judge``: the first result with each number of threads, and all that differ from it."""

    def __init__(self, subject: Subject, runs: int, threads: tuple[int, ...], seconds: float) -> None:
        self.subject = subject
        self.threads = threads
        self.firsts: dict[str, Results] = {}
        self.others: dict[str, list[Results]] = {}
        self.found = Verdict(IDENTICAL)
        self._undefined_varies = False
        self._has_exact = True
        self._runs = runs
        self._seconds = seconds

    def verdict(self) -> Verdict:
        eager = self._eager_results()
        self._run_alone()
        self._run_at_once()
        torch.set_num_threads(1)  # many small operators: threads would only wait for each other
        exact = self._exact(eager[0])
        faults = self._measure(eager, exact)
        self._measure_spread()
        found = self.found
        if faults:
            found.outcome = WRONG
            found.text = faults[0]
        elif any(found.different.values()):
            found.outcome = BETWEEN_RUNS
        elif found.spread_threads > 0:
            found.outcome = BETWEEN_THREADS
        elif self._undefined_varies:
            found.outcome = UNDEFINED
        return found

    def _eager_results(self) -> list[Results]:
        """Eager's with the least and the most threads, and whether it varies."""
        results, varies = [], []
        for number in (min(self.threads), max(self.threads)):
            torch.set_num_threads(number)
            results.append(self.subject.eager())
            if not all(same_bits(results[-1], self.subject.eager()) for _ in range(2)):
                varies.append(f"between runs with {number} threads")
        if not same_bits(*results):
            varies.append("between numbers of threads")
        self.found.eager_varies = ", ".join(varies)
        return results

    def _run_alone(self) -> None:
        for number in self.threads:
            torch.set_num_threads(number)
            label = str(number)
            self.firsts[label] = self.subject.compiled()
            started = time.perf_counter()
            same = int(self._compare(label, self.subject.compiled()))
            once = time.perf_counter() - started
            allowed = int(self._seconds / len(self.threads) / max(once, 1e-6))
            self.found.runs = max(min(self._runs, allowed), 3)
            same += sum(self._compare(label, self.subject.compiled()) for _ in range(self.found.runs - 2))
            self.found.different[label] = self.found.runs - 1 - same

    def _compare(self, label: str, results: Results) -> bool:
        """Compares a run with the first one; keeps a few of those that differ."""
        if self._same(self.firsts[label], results):
            return True
        kept = self.others.setdefault(label, [])
        if len(kept) < _KEPT:
            kept.append(results)
        return False

    def _run_at_once(self) -> None:
        """Two Python threads call the compiled function at the same time."""
        number = max(self.threads) // 2 or 1
        calls = max(min(self.found.runs // 4, 4), 2)
        found: list[Results] = []
        errors: list[BaseException] = []
        grad = torch.is_grad_enabled()

        def work() -> None:
            try:
                torch.set_num_threads(number)  # the numbers of threads and the mode are each Python thread's own
                with torch.set_grad_enabled(grad):
                    for _ in range(calls):
                        found.append(self.subject.compiled())
            except BaseException as error:
                errors.append(error)

        workers = [threading.Thread(target=work) for _ in range(2)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        if errors:
            raise errors[0]
        label = "at once"
        self.firsts[label] = self.firsts.get(str(number), found[0])
        self.found.different[label] = sum(not self._compare(label, results) for results in found)

    def _exact(self, eager: Results) -> Results:
        """The results in float64, or eager's own where there are none."""
        try:
            exact = self.subject.exact()
        except Exception:
            exact = []
        alike = len(exact) == len(eager) and all(a.shape == b.shape for a, b in zip(exact, eager, strict=True))
        if not alike:
            self.found.text = "no float64 result: compared with eager's"
            self._has_exact = False
            return [_widened(value) for value in eager]
        return exact

    def _rounded(self) -> list[Results]:
        """The results in float64 with the rounding of float32 at random, a few times: for sums that cancel."""
        found = []
        for seed in range(_TIMES):
            with Rerun(Recording(), seed):
                found.append(self.subject.exact())
        return found

    def _measure(self, eager: list[Results], exact: Results) -> list[str]:
        """The errors of all results that were kept; returns a line for each that is wrong."""
        faults = []
        bounds = [
            _Bound.of(value, [results[i] for results in eager], i in self.subject.undefined)
            for i, value in enumerate(exact)
        ]
        self.found.eager_error = max((bound.eager_relative for bound in bounds), default=0.0)
        seen: list[Results] = []
        for label, first in self.firsts.items():
            for results in [first, *self.others.get(label, [])]:
                self._undefined_varies |= not same_bits(results, eager[0]) and self._same(results, eager[0])
                if any(self._same(results, other) for other in seen):
                    continue
                seen.append(results)
                said = self._fault(results, bounds)
                if said is not None:
                    self.found.bad[label] = self.found.bad.get(label, 0) + 1
                    faults.append(f"{label} threads: {said}")
        return faults

    def _same(self, first: Results, second: Results) -> bool:
        """Whether the defined results of two runs have the same bits; records whether undefined ones differ."""
        if same_bits(first, second):
            return True
        positions = self.subject.undefined
        if not positions or not same_bits(_without(first, positions), _without(second, positions)):
            return False
        self._undefined_varies = True
        return True

    def _fault(self, results: Results, bounds: list[_Bound]) -> str | None:
        if len(results) != len(bounds):
            return f"{len(results)} results instead of {len(bounds)}"
        said = None
        for position, (value, bound) in enumerate(zip(results, bounds, strict=True)):
            text, relative = bound.fault(value)
            if text is not None and self._has_exact:
                text, relative = bound.fault(value, [results[position] for results in self._rounded()])
            self.found.error = max(self.found.error, relative)
            if text is not None and said is None:
                said = f"result {position}: {text}"
        return said

    def _measure_spread(self) -> None:
        for label, kept in self.others.items():
            for results in kept:
                self.found.spread = max(self.found.spread, _relative(results, self.firsts[label]))
        alone = [self.firsts[str(number)] for number in self.threads]
        for results in alone[1:]:
            if not self._same(results, alone[0]):
                # Signs of zero and NaN differ in bits and not in size; they are told apart all the same.
                spread = max(_relative(results, alone[0]), 1e-30)
                self.found.spread_threads = max(self.found.spread_threads, spread)


def _without(results: Results, positions: frozenset[int]) -> Results:
    return [value for position, value in enumerate(results) if position not in positions]


def _widened(value: torch.Tensor) -> torch.Tensor:
    if value.is_complex():
        return value.to(torch.complex128)
    return value.double() if value.is_floating_point() else value


def _relative(results: Results, others: Results) -> float:
    """The largest difference of two results, relative to the largest value of each tensor."""
    worst = 0.0
    for a, b in zip(results, others, strict=True):
        if same_bits([a], [b]):
            continue
        measured = measure(a, _widened(b))
        worst = max(worst, measured.max_abs / measured.scale if measured.scale else measured.max_abs)
        if measured.nonfinite:
            return float("inf")
    return worst


@dataclasses.dataclass(frozen=True)
class _Bound:
    """What one tensor of a result may be: ``exact`` within what eager's distance and rounding account for."""

    exact: torch.Tensor
    eager: torch.Tensor
    eager_distance: Measure
    off: int
    undefined: bool

    @classmethod
    def of(cls, exact: torch.Tensor, eager: Sequence[torch.Tensor], undefined: bool) -> _Bound:
        found = [measure(value, exact) for value in eager]
        worst = max(range(len(found)), key=lambda i: (found[i].nonfinite, found[i].max_abs, found[i].max_ulp))
        off = max(_elements_off(value, exact) for value in eager)
        return cls(exact, eager[worst], found[worst], off, undefined)

    @property
    def eager_relative(self) -> float:
        return 0.0 if self.undefined else _error(self.eager_distance)

    def fault(self, value: torch.Tensor, rounded: Sequence[torch.Tensor] = ()) -> tuple[str | None, float]:
        """What is wrong with a value, if anything is, and its error relative to the largest value.

        Args:
            value: what is judged.
            rounded: what float64 gives with rounding at random.
        """
        if value.shape != self.exact.shape:
            return f"shape {tuple(value.shape)} instead of {tuple(self.exact.shape)}", 0.0
        if value.dtype != self.eager.dtype:
            return f"dtype {value.dtype} instead of {self.eager.dtype}", 0.0
        if self.undefined:
            return None, 0.0
        if same_bits([value], [self.eager]):
            return None, _error(self.eager_distance)
        right = [_widened(self.eager), *rounded]
        off_by = max((float((item - self.exact).abs().nan_to_num(0.0, 0.0, 0.0).max()) for item in right), default=0.0)
        more = np.full(tuple(self.exact.shape), spread(value.numel()) * off_by)  # a running sum may come back to 0
        # Elements equal to eager's are right: both may overflow where float64 does not.
        exact = torch.where((value == self.eager) | (value.isnan() & self.eager.isnan()), _widened(value), self.exact)
        ours, _ = rule.judge(as_array(value), as_array(exact), dtype_name(value.dtype), more)
        off = _elements_off(value, exact)
        chaotic = _error(self.eager_distance) > _CHAOTIC
        if off <= 2 * self.off if chaotic and not ours.nonfinite else ours.is_rounding:
            return None, _error(ours)
        if measure(value, _widened(self.eager)).is_rounding:  # eager's jump, with eager's rounding
            return None, _error(ours)
        return (
            f"largest error {ours.max_abs:.3g} of {ours.scale:.3g} ({ours.nonfinite} not finite, {off} of "
            f"{value.numel()} elements beyond rounding); eager's {self.eager_distance.max_abs:.3g} "
            f"({self.eager_distance.nonfinite} not finite, {self.off} elements)"
        ), _error(ours)


def _error(measured: Measure) -> float:
    if measured.scale:
        return measured.max_abs / measured.scale
    return measured.max_abs


def _elements_off(value: torch.Tensor, exact: torch.Tensor) -> int:
    """The elements further from float64 than rounding accounts for."""
    if not (value.is_floating_point() or value.is_complex()):
        return int((value != exact.to(value.dtype)).sum())
    ours, theirs = value.to(exact.dtype), exact
    if ours.is_complex():
        ours, theirs = torch.view_as_real(ours), torch.view_as_real(theirs)
    sizes = theirs.abs()
    sizes = sizes[sizes.isfinite() & (sizes < 1e30)]
    if not sizes.numel():
        return 0
    rounding = _ROUNDING_UNITS * torch.finfo(value.dtype).eps * float(sizes.max())
    return int(((ours - theirs).abs() > rounding).sum())
