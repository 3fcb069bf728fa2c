"""The rounds: which process does what, in which order; and what was found."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from .case import DYNAMO_EAGER, Case, UsageError
from .machine import machine
from .processes import Process, WorkerError, fresh_caches
from .timing import median_difference, median_ratio, spread

Json: TypeAlias = "dict[str, Any]"

SCHEMA = 1
"""The version of the JSON; another when a field gets another meaning or goes."""

RIGHT = "right"
"""The status of a row that has a time. The others: ``not checked`` (a time too, and why it is not known whether the
result is right), ``wrong``, and what ``WorkerError.kind`` says."""

NOT_CHECKED = "not checked"
TIMED = (RIGHT, NOT_CHECKED)


@dataclasses.dataclass(frozen=True)
class Settings:
    """How it is measured.

    Attributes:
        backends: in the order of the table; the first is what the others are compared with.
        rounds: of timing.
        starts: processes of each backend of which the first result is timed; the rounds are those of the last.
        again: whether another process, which finds what the first one left in the caches on disk, is timed too.
        overhead: whether the overhead of a call is measured, once for each backend.
        timeout: seconds for each thing a process is asked for.
    """

    backends: Sequence[str]
    rounds: int = 9
    starts: int = 1
    again: bool = False
    overhead: bool = True
    timeout: float = 600.0


@dataclasses.dataclass
class Row:
    """What was found of one backend on one case; fields that were not measured are ``None``.

    Attributes:
        status: see ``RIGHT``.
        message: why it is not ``right``; ``""`` if it is.
        first_seconds: the median of ``first_each``.
        first_each: seconds to the first result, of each process.
        other_sizes_seconds: to the first result of each further size, in the last process.
        again_seconds: to the first result of a process that found the caches of another.
        milliseconds: of a call, the median of the rounds; of several sizes the mean.
        spread: the distance between the quartiles of the rounds.
        rounds: milliseconds of a call in each round.
        tokens_per_second: of a generated text, all rows together.
        microseconds_outside_sessions: the part of a call outside ONNX Runtime's sessions; of a text, for each token.
        peak_bytes, steady_bytes: above what the process had before.
        graphs, graph_breaks: of Dynamo.
        events: what our backends counted.
    """

    status: str = RIGHT
    message: str = ""
    first_seconds: float | None = None
    first_each: list[float] = dataclasses.field(default_factory=list)
    other_sizes_seconds: list[float] = dataclasses.field(default_factory=list)
    again_seconds: float | None = None
    milliseconds: float | None = None
    spread: float | None = None
    rounds: list[float] = dataclasses.field(default_factory=list)
    tokens_per_second: float | None = None
    microseconds_outside_sessions: float | None = None
    peak_bytes: int | None = None
    steady_bytes: int | None = None
    graphs: int | None = None
    graph_breaks: int | None = None
    events: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def is_timed(self) -> bool:
        return self.status in TIMED

    def fill(self, found: Json) -> None:
        """Sets fields to what a process measured."""
        vars(self).update(found)

    def fail(self, status: str, message: str) -> None:
        """Nothing that was measured stands."""
        failed = Row(status, message, graphs=self.graphs, graph_breaks=self.graph_breaks, events=self.events)
        self.fill(vars(failed))

    def sum_up(self, tokens: int | None) -> None:
        """Sets the medians; ``tokens`` are those that a call generates."""
        if self.is_timed and self.rounds:
            self.first_seconds = statistics.median(self.first_each)
            self.milliseconds = statistics.median(self.rounds)
            self.spread = spread(self.rounds)
            self.tokens_per_second = None if tokens is None else tokens / self.milliseconds * 1e3


@dataclasses.dataclass
class CaseResult:
    """What was found on one case.

    Attributes:
        message: why nothing was measured; ``""`` if something was.
        parameters, bytes_of_weights, batch, sizes, threads: of the model, its inputs and the processes.
        rows: by backend.
    """

    case: Case
    message: str = ""
    parameters: int = 0
    bytes_of_weights: int = 0
    batch: int = 1
    sizes: list[str] = dataclasses.field(default_factory=list)
    threads: int = 0
    rows: dict[str, Row] = dataclasses.field(default_factory=dict)

    @property
    def summary(self) -> str:
        """The times in a line."""
        times = (
            f"{name} {row.status if row.milliseconds is None else f'{row.milliseconds:.4g} ms'}"
            for name, row in self.rows.items()
        )
        return self.message or ", ".join(times)

    def times_as_fast(self, backend: str, other: str) -> float | None:
        """How many times as fast as another a backend is: the median over the rounds; ``None`` if one has no time."""
        ours, theirs = self.rows[backend], self.rows[other]
        if not ours.rounds or len(ours.rounds) != len(theirs.rounds):
            return None
        return median_ratio(theirs.rounds, ours.rounds)


class Bench:
    """Measures cases.

    Args:
        settings: how.
        say: told what is being done, in a few words.
        done: told what was found of a case, in a line.
        keep: told what processes wrote to standard error, with their name.
    """

    def __init__(
        self,
        settings: Settings,
        say: Callable[[str], None],
        done: Callable[[str], None] = lambda text: None,
        keep: Callable[[str, str], None] = lambda name, text: None,
    ) -> None:
        self.settings = settings
        self._say = say
        self._done = done
        self._keep = keep

    def run(self, cases: Sequence[Case]) -> Json:
        """Measures one case after the other; see ``Row`` and ``CaseResult`` for what comes out, as JSON can hold it.

        Interrupted (``KeyboardInterrupt``), it returns the cases that are done, if there are any.

        Raises:
            UsageError: a backend, an option or the first model is not there; another model is a result that says so.
        """
        start = time.time()
        results: list[CaseResult] = []
        overhead: dict[str, Json] = {}
        is_interrupted = False
        try:
            for position, case in enumerate(cases, 1):
                label = f"{position}/{len(cases)} {case.label}"
                try:
                    result = self.measure(case, label)
                except UsageError as error:
                    if not results:
                        raise
                    result = CaseResult(case, message=str(error))
                results.append(result)
                self._done(f"{label}: {result.summary}")
            if self.settings.overhead:
                overhead = self.overhead(cases[0])
        except KeyboardInterrupt:
            if not results:
                raise
            is_interrupted = True
        return {
            "schema": SCHEMA,
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(start)),
            "seconds": time.time() - start,
            "interrupted": is_interrupted,
            "machine": {**machine(), "threads": max((result.threads for result in results), default=0)},
            "settings": dataclasses.asdict(self.settings),
            "overhead": overhead,
            "cases": [self.case_as_json(result) for result in results],
            "times_as_fast": geometric_means(results, self.settings.backends),
        }

    def case_as_json(self, result: CaseResult) -> Json:
        """What was measured of one case, for programs."""
        ratios = {
            backend: {other: result.times_as_fast(backend, other) for other in result.rows if other != backend}
            for backend in result.rows
        }
        return {"label": result.case.label, **dataclasses.asdict(result), "times_as_fast": ratios}

    def measure(self, case: Case, label: str) -> CaseResult:
        """Measures one case.

        Raises:
            UsageError: the model, a backend or an option is not there.
        """
        result = CaseResult(case)
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dynamo_backends_bench_")))
            try:
                judge = stack.enter_context(self._process("reference", folder / "reference"))
                self._say(f"{label}: eager and float64")
                known = judge.ask("load", case=dataclasses.asdict(case), backend="eager")
                fingerprint = known.pop("fingerprint")
                result = CaseResult(case, **known)
                unchecked = judge.ask("expect", backends=self.settings.backends)["unchecked"]
            except WorkerError as error:
                if error.kind == "usage":
                    raise UsageError(str(error)) from None
                return dataclasses.replace(result, message=f"{error.kind}: {error}")
            rows = result.rows = {backend: Row() for backend in self.settings.backends}
            workers: dict[str, Process] = {}

            @contextlib.contextmanager
            def in_process(backend: str) -> Iterator[tuple[Row, Process]]:
                """What goes wrong in a backend's process goes into its row; the process ends."""
                try:
                    yield rows[backend], workers[backend]
                except WorkerError as error:
                    rows[backend].fail(error.kind, str(error))
                    workers[backend].close()

            def still_timed() -> list[str]:
                return [backend for backend, row in rows.items() if row.is_timed]

            asked = dataclasses.asdict(case)
            for number in range(self.settings.starts):
                for backend in still_timed():
                    self._say(f"{label}: {backend}, first result")
                    if backend in workers:
                        workers[backend].close()
                    process = self._process(backend, folder / f"{backend_file(backend)}_{number}")
                    workers[backend] = stack.enter_context(process)
                    with in_process(backend) as (row, worker):
                        if worker.ask("load", case=asked, backend=backend)["fingerprint"] != fingerprint:
                            said = "its process built other weights or inputs than the one it is compared with"
                            raise WorkerError("failed", f"{said}: seed all random numbers in {case.model}")
                        found = worker.ask("first", results=str(folder / "first.pt"))
                        row.first_each.append(found.pop("seconds"))
                        row.fill(found)
                        self._judge(judge, unchecked, row, folder / "first.pt")
            for backend in still_timed() if self.settings.again else ():
                self._say(f"{label}: {backend}, first result with the caches of before")
                with self._process(backend, folder / f"{backend_file(backend)}_0") as worker:
                    try:
                        worker.ask("load", case=asked, backend=backend)
                        found = worker.ask("first", results=str(folder / "again.pt"))
                        rows[backend].again_seconds = found["seconds"]
                    except WorkerError as error:
                        rows[backend].message = f"with the caches of another process: {error.kind}: {error}"
            for number in range(self.settings.rounds):
                self._say(f"{label}: round {number + 1} of {self.settings.rounds}")
                for backend in still_timed():
                    with in_process(backend) as (row, worker):
                        row.rounds.append(worker.ask("turn")["milliseconds"])
            for backend in still_timed():
                with in_process(backend) as (row, worker):
                    row.fill(worker.ask("finish", results=str(folder / "last.pt")))
                    self._judge(judge, unchecked, row, folder / "last.pt")
        for row in rows.values():
            row.sum_up(case.tokens * result.batch if case.mode == "decode" else None)
        return result

    def overhead(self, case: Case) -> dict[str, Json]:
        """The overhead of a call of each backend: microseconds and standard error, or ``message``.

        Args:
            case: the number of threads and the options are its.

        Raises:
            UsageError: as ``measure``.
        """
        backends = list(dict.fromkeys([DYNAMO_EAGER, *self.settings.backends]))
        settings = Settings(backends, timeout=self.settings.timeout)
        after = case.model if ":" in case.model else ""
        small = Case("mlp", threads=case.threads, options=case.options, after=after)
        rows = Bench(settings, self._say, keep=self._keep).measure(small, "overhead of a call").rows
        found: dict[str, Json] = {}
        for backend in self.settings.backends:
            row, bare = rows[backend], rows[DYNAMO_EAGER]
            if not row.rounds or not bare.rounds:
                found[backend] = {"message": f"{row.status}: {row.message}"}
                continue
            milliseconds, error = median_difference(row.rounds, bare.rounds)
            found[backend] = {"microseconds": milliseconds * 1e3, "standard_error": error * 1e3}
        return found

    @contextlib.contextmanager
    def _process(self, name: str, caches: Path) -> Iterator[Process]:
        caches.mkdir(parents=True, exist_ok=True)
        process = Process(self.settings.timeout, fresh_caches(str(caches)), lambda errors: self._keep(name, errors))
        try:
            yield process
        finally:
            process.close()

    @staticmethod
    def _judge(judge: Process, unchecked: str, row: Row, results: Path) -> None:
        """Raises what ends a row, if its results are wrong."""
        try:
            wrong = judge.ask("judge", results=str(results))["wrong"]
        except WorkerError as error:
            row.status, row.message = NOT_CHECKED, f"the process that judges: {error.kind}: {error}"
            return
        if wrong and not unchecked:
            raise WorkerError("wrong", wrong)
        if wrong:
            row.status, row.message = NOT_CHECKED, f"{unchecked}; {wrong}"


def backend_file(backend: str) -> str:
    """A backend's name as that of a folder."""
    return "".join(letter if letter.isalnum() else "_" for letter in backend)


def geometric_means(results: Sequence[CaseResult], backends: Sequence[str]) -> dict[str, dict[str, Json]]:
    """For each backend and each other, over the cases on which both have a time: how many times as fast it is.

    Returns:
        ``geometric_mean``, ``worst``, ``worst_case`` (its label) and ``cases`` (how many), by backend and other.
    """
    found: dict[str, dict[str, Json]] = {}
    for backend in backends:
        for other in (name for name in backends if name != backend):
            ratios = [
                (ratio, result.case.label)
                for result in results
                if result.rows and (ratio := result.times_as_fast(backend, other)) is not None
            ]
            if ratios:
                worst, label = min(ratios)
                found.setdefault(backend, {})[other] = {
                    "geometric_mean": statistics.geometric_mean(ratio for ratio, _ in ratios),
                    "worst": worst,
                    "worst_case": label,
                    "cases": len(ratios),
                }
    return found
