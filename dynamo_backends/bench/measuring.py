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

SCHEMA = 3
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
    again: bool = False  # whether to time the first result of another process that finds filled compiler caches
    timeout: float = 600.0  # seconds for each request to a worker


@dataclasses.dataclass
class Measurement:
    """The measurement of one backend on one case; fields that were not measured are ``None``."""

    status: str = RIGHT  # see ``TIMED``
    message: str = ""  # the reason if it is not ``right``
    first_seconds: float | None = None  # to the first result
    again_seconds: float | None = None  # to the first result of a process with filled caches
    milliseconds: float | None = None  # of a call: the mean over the sizes, the median of the rounds
    spread: float | None = None  # the interquartile range of the rounds
    rounds: list[float] = dataclasses.field(default_factory=list)  # milliseconds of a call in each round
    prefills: list[float] = dataclasses.field(default_factory=list)  # milliseconds to the first token in each round
    tokens_per_second: float | None = None  # of generation, over all rows of the batch
    prefill_tokens_per_second: float | None = None  # of the prompts, until the first token
    decode_tokens_per_second: float | None = None  # of the tokens after the first
    times_as_fast: float | None = None  # as the baseline: the median of the ratios within rounds
    peak_bytes: int | None = None  # peak_bytes, steady_bytes: above the memory before compilation
    steady_bytes: int | None = None
    gpu_bytes: int | None = None  # of the GPU, that the first results added
    graphs: int | None = None  # graphs, graph_breaks: of Dynamo
    graph_breaks: int | None = None
    events: dict[str, int] = dataclasses.field(default_factory=dict)  # the counters of our backends

    @property
    def is_timed(self) -> bool:
        return self.status in TIMED

    def fail(self, status: str, message: str) -> None:
        """Discards the measurements; the counters stay."""
        failed = Measurement(status, message, graphs=self.graphs, graph_breaks=self.graph_breaks, events=self.events)
        vars(self).update(vars(failed))

    def take(self, turn: Json) -> None:
        """Adds the times of a turn."""
        self.rounds.append(turn["milliseconds"])
        if "prefill_milliseconds" in turn:
            self.prefills.append(turn["prefill_milliseconds"])

    def summarize(self, result: CaseResult, baseline: Measurement) -> None:
        """Sets the medians."""
        tokens = result.case.tokens * result.batch if result.case.mode == "decode" else None
        if self.is_timed and self.rounds:
            self.milliseconds = statistics.median(self.rounds)
            self.spread = spread(self.rounds)
            self.tokens_per_second = None if tokens is None else tokens / self.milliseconds * 1e3
            if self.prefills and tokens is not None and result.prompt_tokens is not None:
                prefill = statistics.median(self.prefills)
                decode = statistics.median(a - b for a, b in zip(self.rounds, self.prefills, strict=True))
                self.prefill_tokens_per_second = result.prompt_tokens / prefill * 1e3
                self.decode_tokens_per_second = (tokens - result.batch) / decode * 1e3 if decode > 0 else None
            if len(baseline.rounds) == len(self.rounds):
                self.times_as_fast = median_ratio(baseline.rounds, self.rounds)


@dataclasses.dataclass
class CaseResult:
    """The measurements of one case."""

    case: Case
    message: str = ""  # the reason if nothing was measured
    parameters: int = 0
    batch: int = 1
    prompt_tokens: int | None = None  # of generation, in all rows
    sizes: list[str] = dataclasses.field(default_factory=list)  # of the inputs
    threads: int = 0  # of PyTorch in the workers
    rows: dict[str, Measurement] = dataclasses.field(default_factory=dict)  # by backend

    def summarize(self) -> None:
        """Sets the medians of the rows; the first is the baseline."""
        for row in self.rows.values():
            row.summarize(self, next(iter(self.rows.values())))


@dataclasses.dataclass
class Bench:
    """Measures cases."""

    settings: BenchSettings
    say: Callable[[str], None]  # called with the current activity
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
            "cases": [{"label": result.case.label, **dataclasses.asdict(result)} for result in results],
            "times_as_fast": geometric_means(results, self.settings.backends),
        }

    def measure(self, case: Case, label: str) -> CaseResult:
        """Measures one case.

        Raises:
            UsageError: the model, a backend or an option does not exist.
        """
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dynamo_backends_bench_")))
            result = CaseResult(case)
            try:
                judge = stack.enter_context(self._worker("reference", folder / "reference"))
                self.say(f"{label}: eager and float64")
                facts = judge.ask("load", case=dataclasses.asdict(case), backend="eager")
                fingerprint = facts.pop("fingerprint")
                result = CaseResult(case, **facts)
                judge.ask("expect", backends=self.settings.backends)
            except WorkerError as error:
                if error.kind == "usage":
                    raise UsageError(str(error)) from None
                return dataclasses.replace(result, message=f"{error.kind}: {error}")
            rows = result.rows = {backend: Measurement() for backend in self.settings.backends}
            workers: dict[str, Process] = {}

            def ask(backend: str, worker: Process, what: str) -> Json:
                """The answer of a worker, whose results must be right."""
                results = folder / f"{what}.pt"
                answer = worker.ask(what, results=str(results))
                self._judge(judge, rows[backend], results)
                return answer

            def first(backend: str, worker: Process) -> Json:
                loaded = worker.ask("load", case=dataclasses.asdict(case), backend=backend)
                if loaded["fingerprint"] != fingerprint:
                    message = "its process built other weights or inputs than the reference process"
                    raise WorkerError("failed", f"{message}: seed all random numbers in {case.model}")
                return ask(backend, worker, "first")

            def each(what: str, step: Callable[[str, Measurement], None]) -> None:
                """A step of each backend that is right so far; an error of its worker is its status."""
                for backend, row in rows.items():
                    if row.is_timed:
                        self.say(f"{label}: {backend}, {what}")
                        try:
                            step(backend, row)
                        except WorkerError as error:
                            row.fail(error.kind, str(error))
                            workers[backend].close()

            def start(backend: str, row: Measurement) -> None:
                workers[backend] = stack.enter_context(
                    self._worker(backend, folder / str(self.settings.backends.index(backend)))
                )
                vars(row).update(first(backend, workers[backend]))

            def start_again(backend: str, row: Measurement) -> None:
                with self._worker(backend, folder / str(self.settings.backends.index(backend))) as worker:
                    row.again_seconds = first(backend, worker)["first_seconds"]

            each("first result", start)
            if self.settings.again:
                each("first result with filled caches", start_again)
            for number in range(self.settings.rounds):
                what = f"round {number + 1} of {self.settings.rounds}"
                each(what, lambda backend, row: row.take(workers[backend].ask("turn")))
            each("last result", lambda backend, row: vars(row).update(ask(backend, workers[backend], "finish")))
        result.summarize()
        return result

    @contextlib.contextmanager
    def _worker(self, name: str, caches: Path) -> Iterator[Process]:
        caches.mkdir(parents=True, exist_ok=True)
        process = Process(self.settings.timeout, fresh_caches(str(caches)), lambda errors: self.keep(name, errors))
        with contextlib.closing(process):
            yield process

    @staticmethod
    def _judge(judge: Process, row: Measurement, results: Path) -> None:
        """Raises ``WorkerError`` if the results are wrong."""
        try:
            answer = judge.ask("judge", results=str(results))
        except WorkerError as error:
            row.status, row.message = NOT_CHECKED, f"the reference process: {error.kind}: {error}"
            return
        wrong, unchecked = answer["wrong"], answer["unchecked"]
        if wrong and not unchecked:
            raise WorkerError("wrong", wrong)
        if wrong:
            row.status, row.message = NOT_CHECKED, f"{unchecked}; {wrong}"


def geometric_means(results: Sequence[CaseResult], backends: Sequence[str]) -> dict[str, Json]:
    """How many times as fast each backend is as the baseline, over the cases on which both have a time.

    Returns:
        ``geometric_mean``, ``worst``, ``worst_case`` (its label) and ``cases`` (how many), by backend.
    """
    means: dict[str, Json] = {}
    for backend in backends[1:]:
        rows = [(result.rows[backend].times_as_fast, result.case.label) for result in results if result.rows]
        ratios = [(ratio, label) for ratio, label in rows if ratio is not None]
        if ratios:
            worst, label = min(ratios)
            mean = statistics.geometric_mean(ratio for ratio, _ in ratios)
            means[backend] = {"geometric_mean": mean, "worst": worst, "worst_case": label, "cases": len(ratios)}
    return means
