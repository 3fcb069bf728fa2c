"""Measures cases: starts the workers, sends them requests in turn, and collects the results."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from .case import Case, UsageError
from .machine import machine
from .processes import Process, WorkerError, fresh_caches
from .timing import median_ratio, spread

Json: TypeAlias = "dict[str, Any]"

SCHEMA = 2
"""The version of the JSON. It grows when a field is removed or changes its meaning."""

RIGHT = "right"
NOT_CHECKED = "not checked"
TIMED = (RIGHT, NOT_CHECKED)
"""The status of a row that has a time. The others are the kinds of ``WorkerError``."""


@dataclasses.dataclass(frozen=True)
class BenchSettings:
    """How to measure."""

    backends: Sequence[str]  # in the order of the table; the first is the baseline
    rounds: int = 9  # timed rounds
    starts: int = 1  # processes of each backend whose first result is timed; the last one runs the rounds
    again: bool = False  # whether to time the first result of another process that finds filled compiler caches
    saved: bool = False  # whether to time the first result of a process that loads what another one compiled and saved
    timeout: float = 600.0  # seconds for each request to a worker


@dataclasses.dataclass
class Measurement:
    """The measurement of one backend on one case; fields that were not measured are ``None``."""

    status: str = RIGHT  # see ``TIMED``
    message: str = ""  # the reason if it is not ``right``
    first_seconds: float | None = None  # the median of ``first_each``
    first_each: list[float] = dataclasses.field(default_factory=list)  # to the first result, of each process
    other_sizes_seconds: list[float] = dataclasses.field(default_factory=list)  # to the first result of further sizes
    again_seconds: float | None = None  # to the first result of a process with filled caches
    saved_seconds: float | None = None  # to the first result of a process that loads a saved compile
    relative_error: float | None = None  # with ``quantize``: against the model before it
    milliseconds: float | None = None  # of a call: the mean over the sizes, the median of the rounds
    spread: float | None = None  # the interquartile range of the rounds
    rounds: list[float] = dataclasses.field(default_factory=list)  # milliseconds of a call in each round
    tokens_per_second: float | None = None  # of generation, over all rows of the batch
    microseconds_outside_sessions: float | None = None  # of a call; in generation, of a token
    peak_bytes: int | None = None  # peak_bytes, steady_bytes: above the memory before compilation
    steady_bytes: int | None = None
    graphs: int | None = None  # graphs, graph_breaks: of Dynamo
    graph_breaks: int | None = None
    events: dict[str, int] = dataclasses.field(default_factory=dict)  # the counters of our backends

    @property
    def is_timed(self) -> bool:
        return self.status in TIMED

    def fill(self, fields: Json) -> None:
        vars(self).update(fields)

    def fail(self, status: str, message: str) -> None:
        """Discards the measurements; the counters stay."""
        failed = Measurement(status, message, graphs=self.graphs, graph_breaks=self.graph_breaks, events=self.events)
        self.fill(vars(failed))

    def summarize(self, tokens: int | None) -> None:
        """Sets the medians; ``tokens`` is how many a call generates."""
        if self.is_timed and self.rounds:
            self.first_seconds = statistics.median(self.first_each)
            self.milliseconds = statistics.median(self.rounds)
            self.spread = spread(self.rounds)
            self.tokens_per_second = None if tokens is None else tokens / self.milliseconds * 1e3


@dataclasses.dataclass
class CaseResult:
    """The measurements of one case."""

    case: Case
    message: str = ""  # the reason if nothing was measured
    parameters: int = 0
    bytes_of_weights: int = 0
    bytes_quantized: int | None = None  # of the weights with ``quantize``
    batch: int = 1
    sizes: list[str] = dataclasses.field(default_factory=list)  # of the inputs
    threads: int = 0  # of PyTorch in the workers
    rows: dict[str, Measurement] = dataclasses.field(default_factory=dict)  # by backend

    @property
    def summary(self) -> str:
        """The times in one line."""
        times = (
            f"{name} {row.status if row.milliseconds is None else f'{row.milliseconds:.4g} ms'}"
            for name, row in self.rows.items()
        )
        return self.message or ", ".join(times)

    def times_as_fast(self, backend: str, other: str) -> float | None:
        """The time of ``other`` by that of ``backend``, the median over the rounds; ``None`` if one has no time."""
        ours, theirs = self.rows[backend], self.rows[other]
        if not ours.rounds or len(ours.rounds) != len(theirs.rounds):
            return None
        return median_ratio(theirs.rounds, ours.rounds)

    def as_json(self) -> Json:
        ratios = {
            backend: {other: self.times_as_fast(backend, other) for other in self.rows if other != backend}
            for backend in self.rows
        }
        return {"label": self.case.label, **dataclasses.asdict(self), "times_as_fast": ratios}


@dataclasses.dataclass
class Bench:
    """Measures cases."""

    settings: BenchSettings
    say: Callable[[str], None]  # called with the current activity
    done: Callable[[str], None] = lambda text: None  # called with a line about each finished case
    keep: Callable[[str, str], None] = lambda name, text: None  # called with each worker's name and standard error

    def run(self, cases: Sequence[Case]) -> Json:
        """Measures the cases one after the other and returns JSON, see ``CaseResult`` and ``Measurement``.

        After ``KeyboardInterrupt`` it returns the finished cases, if there are any.

        Raises:
            UsageError: a backend, an option or the first model does not exist. For a later model, its result says so.
        """
        start = time.time()
        results: list[CaseResult] = []
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
                self.done(f"{label}: {result.summary}")
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
            "cases": [result.as_json() for result in results],
            "times_as_fast": geometric_means(results, self.settings.backends),
        }

    def measure(self, case: Case, label: str) -> CaseResult:
        """Measures one case.

        Raises:
            UsageError: the model, a backend or an option does not exist.
        """
        result = CaseResult(case)
        case_as_json = dataclasses.asdict(case)
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dynamo_backends_bench_")))
            try:
                judge = stack.enter_context(self._process("reference", folder / "reference"))
                self.say(f"{label}: eager and float64")
                facts = judge.ask("load", case=case_as_json, backend="eager")
                fingerprint = facts.pop("fingerprint")
                result = CaseResult(case, **facts)
                judge.ask("expect", backends=self.settings.backends)
            except WorkerError as error:
                if error.kind == "usage":
                    raise UsageError(str(error)) from None
                return dataclasses.replace(result, message=f"{error.kind}: {error}")
            rows = result.rows = {backend: Measurement() for backend in self.settings.backends}
            workers: dict[str, Process] = {}

            @contextlib.contextmanager
            def worker_of(backend: str) -> Iterator[tuple[Measurement, Process]]:
                """Puts an error of the worker into its row and closes it."""
                try:
                    yield rows[backend], workers[backend]
                except WorkerError as error:
                    rows[backend].fail(error.kind, str(error))
                    workers[backend].close()

            def timed_backends() -> list[str]:
                return [backend for backend, row in rows.items() if row.is_timed]

            for number in range(self.settings.starts):
                for backend in timed_backends():
                    self.say(f"{label}: {backend}, first result")
                    if backend in workers:
                        workers[backend].close()
                    process = self._process(backend, folder / f"{_file_name(backend)}_{number}")
                    workers[backend] = stack.enter_context(process)
                    with worker_of(backend) as (row, worker):
                        if worker.ask("load", case=case_as_json, backend=backend)["fingerprint"] != fingerprint:
                            message = "its process built other weights or inputs than the reference process"
                            raise WorkerError("failed", f"{message}: seed all random numbers in {case.model}")
                        first = worker.ask("first", results=str(folder / "first.pt"))
                        row.first_each.append(first.pop("seconds"))
                        row.fill(first)
                        self._judge(judge, backend, row, folder / "first.pt")
            for backend in timed_backends() if self.settings.again else ():
                self.say(f"{label}: {backend}, first result with filled caches")
                with self._extra(rows[backend], "with filled caches"):
                    rows[backend].again_seconds = self._first_seconds(
                        case, backend, folder / f"{_file_name(backend)}_0"
                    )
            for backend in timed_backends() if self.settings.saved else ():
                self.say(f"{label}: {backend}, first result of a saved compile")
                saved, results = str(folder / "saved"), folder / "saved.pt"
                with self._extra(rows[backend], "saved"):
                    with self._loaded(case, backend, folder / "saving") as worker:
                        worker.ask("save", path=saved)
                    seconds = self._first_seconds(case, backend, folder / "loading", results=str(results), saved=saved)
                    self._judge(judge, backend, rows[backend], results)
                    rows[backend].saved_seconds = seconds
            for number in range(self.settings.rounds):
                self.say(f"{label}: round {number + 1} of {self.settings.rounds}")
                for backend in timed_backends():
                    with worker_of(backend) as (row, worker):
                        row.rounds.append(worker.ask("turn")["milliseconds"])
            for backend in timed_backends():
                with worker_of(backend) as (row, worker):
                    row.fill(worker.ask("finish", results=str(folder / "last.pt")))
                    self._judge(judge, backend, row, folder / "last.pt")
        for row in rows.values():
            row.summarize(case.tokens * result.batch if case.mode == "decode" else None)
        return result

    def _first_seconds(self, case: Case, backend: str, caches: Path, **arguments: str) -> float:
        """The time to the first result of another process."""
        with self._loaded(case, backend, caches) as worker:
            seconds: float = worker.ask("first", **{"results": str(caches / "first.pt"), **arguments})["seconds"]
            return seconds

    @staticmethod
    @contextlib.contextmanager
    def _extra(row: Measurement, what: str) -> Iterator[None]:
        """What fails inside is a message of the row, except a wrong result."""
        try:
            yield
        except WorkerError as error:
            if error.kind == "wrong":
                row.fail(error.kind, f"{what}: {error}")
            elif error.kind != "not supported":
                row.message = f"{what}: {error.kind}: {error}"

    @contextlib.contextmanager
    def _loaded(self, case: Case, backend: str, caches: Path) -> Iterator[Process]:
        """A process that has the model and its inputs."""
        with self._process(backend, caches) as worker:
            worker.ask("load", case=dataclasses.asdict(case), backend=backend)
            yield worker

    @contextlib.contextmanager
    def _process(self, name: str, caches: Path) -> Iterator[Process]:
        caches.mkdir(parents=True, exist_ok=True)
        process = Process(self.settings.timeout, fresh_caches(str(caches)), lambda errors: self.keep(name, errors))
        with contextlib.closing(process):
            yield process

    @staticmethod
    def _judge(judge: Process, backend: str, row: Measurement, results: Path) -> None:
        """Raises ``WorkerError`` if the results are wrong."""
        try:
            answer = judge.ask("judge", results=str(results), backend=backend)
        except WorkerError as error:
            row.status, row.message = NOT_CHECKED, f"the reference process: {error.kind}: {error}"
            return
        wrong, unchecked = answer["wrong"], answer["unchecked"]
        row.relative_error = answer.get("relative_error")
        if wrong and not unchecked:
            raise WorkerError("wrong", wrong)
        if wrong:
            row.status, row.message = NOT_CHECKED, f"{unchecked}; {wrong}"


def _file_name(backend: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in backend)


def geometric_means(results: Sequence[CaseResult], backends: Sequence[str]) -> dict[str, dict[str, Json]]:
    """How many times as fast each backend is as each other, over the cases on which both have a time.

    Returns:
        ``geometric_mean``, ``worst``, ``worst_case`` (its label) and ``cases`` (how many), by backend and other.
    """
    means: dict[str, dict[str, Json]] = {}
    for backend in backends:
        for other in (name for name in backends if name != backend):
            ratios = [
                (ratio, result.case.label)
                for result in results
                if result.rows and (ratio := result.times_as_fast(backend, other)) is not None
            ]
            if ratios:
                worst, label = min(ratios)
                means.setdefault(backend, {})[other] = {
                    "geometric_mean": statistics.geometric_mean(ratio for ratio, _ in ratios),
                    "worst": worst,
                    "worst_case": label,
                    "cases": len(ratios),
                }
    return means
