"""Runs every operator and layer at real sizes repeatedly, with 1, 2 and 4 threads, to find data races.

A kernel with a data race is right on small tensors, and sometimes wrong on large ones, as ONNX Runtime's ``ScatterND``
with a reduction was at repeated indices. This script looks for others::

    python tests/threads_sweep.py                         # all of it, about an hour on two cores
    python tests/threads_sweep.py --sample 1/30 --seed 7  # a random thirtieth
    python tests/threads_sweep.py --only index_add,embedding

The cases are ``value/<entry>`` and ``gradient/<entry>`` for PyTorch's operator database; ``layer/<name>`` and
``function/<name>``, forward and backward, for the tables in ``large_layers.py``; and ``inference/<name>``, both
without gradients. A run of all cases also compiles ``emit/<entry>`` and ``emit/zoo.<name>`` at small sizes: they show
which ONNX operators our converters emit, so that the report can list those that never ran at a real size.

Exit code 1: a result is wrong that is not in ``KNOWN``; a result differs from run to run, except by a little in graphs
with PyTorch's operators of ``VARIES_BETWEEN_RUNS``; a case raises, hangs or crashes; or a layer has no case.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import gc
import itertools
import json
import multiprocessing
import multiprocessing.connection
import os
import queue
import random
import re
import resource
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from large_layers import missing
from large_samples import memory_limit
from threads_cases import (
    EAGER_RAISES,
    EMITTED,
    ERROR,
    NOT_ON_ONNX,
    RANDOM,
    TOO_SMALL,
    Report,
    Settings,
    all_cases,
    emitting_cases,
    line,
    run_case,
)
from threads_judge import BETWEEN_RUNS, BETWEEN_THREADS, IDENTICAL, UNDEFINED, WRONG, Verdict

OUTCOMES = (
    IDENTICAL,
    BETWEEN_THREADS,
    BETWEEN_RUNS,
    WRONG,
    ERROR,
    UNDEFINED,
    TOO_SMALL,
    NOT_ON_ONNX,
    RANDOM,
    EAGER_RAISES,
)

DANGEROUS = (
    "function/index_put accumulate",
    "function/scatter_add",
    "layer/Embedding",
    "layer/MaxPool2d overlapping",
    "value/index_add",
    "value/scatter_reduce.sum",
)
"""In every sample."""

_CASES_PER_WORKER = 150
_MEMORY = 8 << 30
"""Bytes of memory that a case may take, beside what its worker has."""


NEVER_AT_SIZE: dict[str, str] = {"Constant": "becomes an initializer before there is a session"}
"""ONNX operators that no case runs at size, and why."""

KNOWN: dict[str, str] = {
    **dict.fromkeys(
        ("MultiLabelMarginLoss", "nn.functional.multilabel_margin_loss"),
        "PyTorch gives every compiler a formula that also sums over unused places of the target",
    ),
    "linalg.householder_product": "its gradient is a graph that grows with the columns, under aot_eager too: no answer "
    "in time",
}
"""What is wrong or fails, by the name without its kind, and why. What differs from run to run is never excused."""


VARIES_BETWEEN_RUNS = {"aten.index_put.default", "aten._unsafe_index_put.default", "aten.put.default"}
"""Operators of PyTorch that several threads add up in any order: eager varies too. Nothing on ONNX Runtime does."""

LARGEST_VARIATION = 1e-5
"""How far the results of such may lie apart, relative to the largest value; seen are at most 5.6e-6."""


def is_fault(report: Report) -> bool:
    """Whether a report makes the command fail."""
    verdict = report.verdict
    varies = bool(VARIES_BETWEEN_RUNS & set(report.in_pytorch))
    if verdict.outcome == BETWEEN_RUNS:
        return verdict.spread > LARGEST_VARIATION or not varies
    if verdict.outcome == WRONG and varies and max(verdict.spread, verdict.error) <= LARGEST_VARIATION:
        return False  # its sums have another order in each run, eager's too: no elementwise reference
    known = report.case.partition("/")[2] in KNOWN and not any(verdict.different.values())
    return verdict.outcome in (WRONG, ERROR) and not known


def named_in_sources() -> set[str]:
    """ONNX operators that the sources of translations and passes name."""
    root = Path(__file__).parent.parent
    pattern = re.compile(
        r"\bop\w*\.([A-Z]\w+)\(|ir\.[Nn]ode\(\s*\"[\w.]*\",\s*\"([A-Z]\w+)\"|ir\.node\(\s*\"([A-Z]\w+)\""
    )
    found: set[str] = set()
    for path in [*(root / "dynamo_backends" / "exporter").rglob("*.py"), *(root / "passes").rglob("*.py")]:
        for match in pattern.findall(path.read_text()):
            found.update(name for name in match if name)
    return {name for name in found if not name.startswith("Scatter")}


def _work(connection: multiprocessing.connection.Connection, settings: Settings) -> None:
    """Judges the cases that come through the connection."""
    warnings.simplefilter("ignore")
    for stream in (1, 2):  # MKL prints a line for each matrix it cannot factor
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while True:
        case = connection.recv()
        if case is None:
            return
        try:
            with memory_limit(_MEMORY):
                for report in run_case(case, settings):
                    connection.send(report)
        except Exception as error:
            connection.send(Report(case, -1, Verdict(ERROR, text=line(error))))
        torch._dynamo.reset()
        gc.collect()  # sessions have threads of their own
        connection.send(None)


class _Worker:
    """A process that judges cases, one at a time; replaced when it dies, hangs or has done many."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._process: multiprocessing.process.BaseProcess | None = None
        self._done = 0

    def _start(self) -> None:
        # Threads of PyTorch that spin while they wait take the cores from ONNX Runtime's, and from the other worker.
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        context = multiprocessing.get_context("spawn")  # a fork would have no threads, but think it has
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_work, args=(theirs, self._settings), daemon=True)
        self._process.start()
        theirs.close()
        self._done = 0

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._connection.close()
            self._process = None

    def reports(self, case: str) -> list[Report]:
        if self._process is None or self._done >= _CASES_PER_WORKER:
            self.stop()
            self._start()
        assert self._process is not None
        self._done += 1
        found: list[Report] = []
        deadline = time.monotonic() + self._settings.timeout
        try:
            self._connection.send(case)
            while self._connection.poll(max(deadline - time.monotonic(), 0)):
                report = self._connection.recv()
                if report is None:
                    return found
                found.append(report)
            text = f"no answer in {self._settings.timeout:.0f} s"
        except (EOFError, ConnectionError):
            self._process.join()
            text = f"the process ended with exit code {self._process.exitcode}"
        self.stop()
        return [*found, Report(case, -1, Verdict(ERROR, text=text))]


def sweep(cases: Sequence[str], settings: Settings, processes: int) -> Iterator[Report]:
    """Judges the cases in worker processes; yields the reports as they come."""
    waiting: queue.Queue[str] = queue.Queue()
    for case in cases:
        waiting.put(case)
    results: queue.Queue[Report | None] = queue.Queue()

    def drive() -> None:
        worker = _Worker(settings)
        try:
            while True:
                for report in worker.reports(waiting.get_nowait()):
                    results.put(report)
        except queue.Empty:
            pass
        finally:
            worker.stop()
            results.put(None)

    drivers = [threading.Thread(target=drive, daemon=True) for _ in range(processes)]
    for driver in drivers:
        driver.start()
    for _ in drivers:
        yield from iter(results.get, None)


# The command


def chosen_cases(only: str, share: str, number: int) -> list[str]:
    """The cases of this run: those whose name without its kind, or a part of it between dots, is in ``only``; else a
    share of all, with the dangerous ones."""
    cases = all_cases()
    if only:
        wanted = set(only.split(","))
        found = [case for case in cases if {case, case.split("/", 1)[1], *re.split(r"[/. ]", case)} & wanted]
        if not found:
            raise SystemExit(f"no case is named {only}")
        return found
    if not share:
        return cases
    numerator, denominator = (int(part) for part in share.split("/"))
    count = len(cases) * numerator // denominator
    picked = set(random.Random(number).sample(cases, count)) | set(DANGEROUS)
    return [case for case in cases if case in picked]


def _describe(report: Report) -> str:
    verdict = report.verdict
    parts = [f"{report.case}[{report.sample}] {verdict.outcome}"]
    if verdict.outcome in (WRONG, BETWEEN_RUNS, BETWEEN_THREADS, UNDEFINED):
        different = {label: number for label, number in verdict.different.items() if number}
        parts.append(f"runs that differ {different or 0} of {verdict.runs}")
        parts.append(f"between runs {verdict.spread:.2g}, between threads {verdict.spread_threads:.2g}")
        parts.append(f"error {verdict.error:.2g}, eager's {verdict.eager_error:.2g}")
        if verdict.bad:
            parts.append(f"wrong results {verdict.bad}")
        if verdict.eager_varies:
            parts.append(f"eager varies {verdict.eager_varies}")
    if verdict.text:
        parts.append(verdict.text)
    if verdict.outcome in (WRONG, BETWEEN_RUNS):
        parts.append(f"ONNX operators: {' '.join(report.operators)}")
        parts.append(f"in PyTorch: {' '.join(report.in_pytorch) or 'nothing'}")
    return "; ".join(parts)


def _print_coverage(reports: Sequence[Report]) -> None:
    judged = (IDENTICAL, BETWEEN_THREADS, BETWEEN_RUNS, WRONG, UNDEFINED)
    at_size = {name for report in reports if report.verdict.outcome in judged for name in report.operators}
    emitted = {name for report in reports if report.verdict.outcome == EMITTED for name in report.operators}
    known = at_size | emitted | (named_in_sources() - {name.rpartition(".")[2] for name in at_size | emitted})
    never = sorted(known - at_size)
    print(f"ONNX operators run at size: {len(at_size)} of {len(known)}; never: {', '.join(never) or 'none'}")
    for name in never:
        print(f"  {name}: {NEVER_AT_SIZE.get(name, 'no reason known')}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--sample", default="", help="a share of the cases, 1/30")
    parser.add_argument("--seed", type=int, default=0, help="which cases --sample takes")
    parser.add_argument("--only", default="", help="names of cases, with commas between")
    parser.add_argument("--runs", type=int, default=20, help="with each number of threads")
    parser.add_argument("--samples", type=int, default=1, help="of each operator")
    parser.add_argument("--seconds", type=float, default=6.0, help="about how long the runs of a case may take")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--verbose", action="store_true", help="a line for each case, with its time")
    parser.add_argument("--out", default="", help="a JSON file for all reports")
    options = parser.parse_args()
    started = time.perf_counter()
    settings = Settings(runs=options.runs, samples=options.samples, seconds=options.seconds)
    cases = chosen_cases(options.only, options.sample, options.seed)
    complete = not (options.only or options.sample)
    if complete:
        random.Random(options.seed).shuffle(cases)  # alike cases apart: what a broken run has done is a fair share
        cases = cases + emitting_cases()
    print(f"{len(cases)} cases, {options.runs} runs with each of {settings.threads} threads", flush=True)
    without = missing()
    if without:
        print(f"layers without a case: {', '.join(without)}")
    reports: list[Report] = []
    for report in sweep(cases, settings, options.processes):
        reports.append(report)
        if options.verbose or report.verdict.outcome in (WRONG, ERROR, BETWEEN_RUNS):
            print(f"{time.perf_counter() - started:.0f} s: {_describe(report)}", flush=True)
        if options.out and len(reports) % 20 == 0:
            _write(options.out, reports)
    _print_tables(reports)
    if complete:
        _print_coverage(reports)
    if options.out:
        _write(options.out, reports)
    print(f"{time.perf_counter() - started:.0f} s")
    outcomes = collections.defaultdict(set)
    for report in reports:
        outcomes[report.case.partition("/")[2]].add(report.verdict.outcome)
    mended = sorted(name for name in KNOWN if not outcomes[name] & {WRONG, ERROR}) if complete else []
    if mended:
        print(f"no longer wrong, to be taken out of KNOWN: {', '.join(mended)}")
    return 1 if without or any(map(is_fault, reports)) else 0


def _print_tables(reports: Sequence[Report]) -> None:
    counts = collections.Counter(
        (report.case.partition("/")[0], report.verdict.outcome) for report in reports if report.case[:4] != "emit"
    )
    kinds = sorted({kind for kind, _ in counts})
    print(f"{'':26}" + "".join(f"{kind:>10}" for kind in kinds))
    for outcome in OUTCOMES:
        print(f"{outcome:26}" + "".join(f"{counts[kind, outcome]:>10}" for kind in kinds))
    ordered = sorted(reports, key=lambda report: (report.verdict.outcome, report.case, report.sample))
    for outcome, group in itertools.groupby(ordered, key=lambda report: report.verdict.outcome):
        if outcome not in (IDENTICAL, EMITTED, RANDOM):
            print(f"\n{outcome}")
            for report in group:
                print(f"  {_describe(report)}")


def _write(path: str, reports: Sequence[Report]) -> None:
    Path(path).write_text(json.dumps([dataclasses.asdict(report) for report in reports], indent=1))


if __name__ == "__main__":
    sys.exit(main())
