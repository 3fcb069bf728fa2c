"""Measures the verdicts of ``onnx_debug``: right models that it must not accuse, and planted faults that it must name.

::

    python tests/verification_sweep.py --processes 2            # right models and training steps
    python tests/verification_sweep.py --only "llama;training" --sample 5 --seed 7
    python tests/verification_sweep.py --planted                # faults, planted one at a time
    python tests/verification_sweep.py --list

Right models (``verification_models.py``) run with ``compare="every"``: of each graph the verdict and what was not
checked, of each model the processor seconds of the fastest compared step after the first against eager's of seven, and
the peak of the process' memory in both (of the whole process, with libraries). A model is *accused* if a graph
diverges, else *not comparable*, *not compared* or *unchecked* if a graph is, else *ok*.

Planted faults (``verification_faults.py``) run once. A fault is *found* if the verdict names its cause and the line of
the node, *misnamed* if a graph diverges for another cause or at another line, *unchecked* if nothing diverges but
something was not comparable or not checked, else *missed*; *not planted* if the graph does not have what it changes.
What is no fault must be *ok*.

Only ``torch.compile``, its options and the manifest of the dump are used. Exit code 1: a right model is accused or
fails, or a fault is missed or misnamed that is not known to be too small.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import json
import logging
import random
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import torch
from verification_faults import FAULTS, Fault
from verification_models import MODELS, Program
from workers import Ended, judged

from dynamo_backends.dumps.reading import find_run
from dynamo_backends.pipeline import pass_target

OK, UNCHECKED, NOT_COMPARABLE, NOT_COMPARED = "ok", "unchecked", "not comparable", "not compared"
ACCUSED, ERROR, NO_GRAPH = "accused", "error", "no graph"
FOUND, MISNAMED, MISSED, NOT_PLANTED = "found", "misnamed", "missed", "not planted"

EAGER_CALLS = 7
COMPARED_CALLS = 3
"""The first compiles, and checks what is checked once per graph."""


@dataclasses.dataclass(frozen=True)
class GraphVerdict:
    """What the manifest says of a graph: the kind and name of the cause, the values and lines that are blamed,
    and the operators that run in PyTorch."""

    name: str
    verdict: str
    unchecked: tuple[str, ...] = ()
    note: str = ""
    cause: tuple[str, str] = ("", "")
    blamed: tuple[tuple[str, str], ...] = ()
    in_pytorch: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Report:
    """What became of a case.

    Attributes:
        name, kind: of the case.
        outcome: see the module.
        text: the accusations, or why there is no answer.
        expected: of a planted fault, what the verdict must name.
        graphs: the graphs.
        eager_seconds, first_seconds, compared_seconds: processor time of the process, which other work on the machine
            changes little: of a step of eager, the first compiled step with its compile time,
            the fastest later one.
        eager_megabytes, compared_megabytes: the peak of the process' memory.
        seconds: of the case.
    """

    name: str
    kind: str
    outcome: str
    text: str = ""
    graphs: tuple[GraphVerdict, ...] = ()
    expected: str = ""
    eager_seconds: float = 0.0
    first_seconds: float = 0.0
    compared_seconds: float = 0.0
    eager_megabytes: float = 0.0
    compared_megabytes: float = 0.0
    seconds: float = 0.0

    @property
    def ratio(self) -> float:
        return self.compared_seconds / self.eager_seconds if self.eager_seconds else 0.0

    def line(self) -> str:
        """A row of the table."""
        graphs, unchecked = len(self.graphs), sum(len(graph.unchecked) for graph in self.graphs)
        row = f"{self.outcome:14} {self.name:46} {self.kind:26} {graphs:3} graphs {unchecked:3} unchecked"
        if self.eager_seconds:
            row += (
                f" {self.eager_seconds * 1e3:8.1f} ms eager {self.compared_seconds:8.2f} s compared {self.ratio:7.1f}x"
                f" {self.eager_megabytes:6.0f} MB {self.compared_megabytes:6.0f} MB"
            )
        expected = f"[{self.expected}] " if self.expected else ""
        return f"{row} {self.seconds:6.0f} s  {expected}{self.text}".rstrip()


class Peak:
    """The peak of the resident memory since it was reset, in MB; of the whole process where it cannot be."""

    def __init__(self) -> None:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")

    @property
    def megabytes(self) -> float:
        try:
            lines = Path("/proc/self/status").read_text().splitlines()
        except OSError:
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
        return next(float(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 2**10


def _seconds(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def _severity(verdict: str) -> int:
    """How bad a verdict is; smaller is worse."""
    starts = ("diverges", "not comparable", "None", "ok")
    return next((i for i, start in enumerate(starts) if verdict.startswith(start)), 1)


def worst(known: Mapping[str, GraphVerdict], dump: Path) -> dict[str, GraphVerdict]:
    """The graphs of a dump, each with the worst of its verdict now and the one ``known``."""
    found = dict(known)
    graphs = find_run(dump).graphs if (dump / "latest").exists() else []
    first = min((graph.index for graph in graphs), default=0)  # graphs are numbered in the process
    for graph in graphs:
        entry = graph.entry
        blame = entry.blame
        blamed = [(blame.value, blame.source)] if blame else []
        blamed += [(item.value, item.source) for item in entry.wrong_nodes]
        new = GraphVerdict(
            f"{graph.index - first}/{graph.direction}",
            str(graph.verdict),
            tuple(entry.unchecked),
            entry.note,
            (blame.kind, blame.name) if blame else ("", ""),
            tuple(dict.fromkeys(blamed)),
            tuple(dict.fromkeys(item.operator for item in entry.in_pytorch)),
        )
        old = found.get(new.name)
        if old is None or _severity(new.verdict) < _severity(old.verdict) or old.verdict == "None":
            found[new.name] = new
        unchecked = (*(old.unchecked if old else ()), *new.unchecked)
        found[new.name] = dataclasses.replace(found[new.name], unchecked=tuple(dict.fromkeys(unchecked)))
    return found


def of_right(graphs: Sequence[GraphVerdict]) -> tuple[str, str]:
    """The outcome of a right program, and the verdicts that are not ``ok``."""
    if not graphs:
        return NO_GRAPH, ""
    text = "; ".join(f"{graph.name}: {graph.verdict}" for graph in graphs if graph.verdict != "ok")
    bad = min(_severity(graph.verdict) for graph in graphs)
    if bad < 3:
        return (ACCUSED, NOT_COMPARABLE, NOT_COMPARED)[bad], text
    return (UNCHECKED if any(graph.unchecked for graph in graphs) else OK), ""


def of_fault(fault: Fault, graphs: Sequence[GraphVerdict], planted: int) -> tuple[str, str]:
    """The outcome of a planted fault, and what was said."""
    said = "; ".join(f"{graph.name}: {graph.verdict}" for graph in graphs)
    diverging = [graph for graph in graphs if _severity(graph.verdict) == 0]
    if not planted or any(fault.operator in graph.in_pytorch for graph in graphs):
        return NOT_PLANTED, said
    if not fault.causes:
        return (ACCUSED if diverging else OK), said
    for graph in diverging:
        if graph.cause in fault.causes and any(fault.is_at(*place) for place in graph.blamed):
            return FOUND, said
    if diverging:
        return MISNAMED, said
    unchecked = [item for graph in graphs for item in graph.unchecked]
    if unchecked or any(graph.verdict != "ok" for graph in graphs):
        return UNCHECKED, "; ".join([said, *unchecked])
    return MISSED, said


def _debugged(program: Program, dump: str) -> Callable[..., object]:
    options = {"dump_dir": dump, "compare": "every", "tensor_limit": 0, "cache": False, "placement": "onnx"}
    return torch.compile(
        program.target, backend="onnx_debug", options={**options, **program.options}, dynamic=program.dynamic
    )


def _prepare(has_units: bool) -> None:
    logging.getLogger("dynamo_backends").setLevel(logging.ERROR)  # what falls back is no fault
    pass_target.has_units_for_bfloat16 = lambda: has_units  # the same on every processor
    torch.manual_seed(0)


def judge_right(name: str) -> Report:
    """Runs a right program in eager and with ``onnx_debug``."""
    start, entry = time.monotonic(), MODELS[name]
    _prepare(entry.has_units)
    program = entry.build()
    peak = Peak()
    eager = [_seconds(lambda: program.step(program.target)) for _ in range(EAGER_CALLS)]
    eager_peak, peak = peak.megabytes, Peak()
    graphs: dict[str, GraphVerdict] = {}
    seconds = []
    with tempfile.TemporaryDirectory() as folder:
        function = _debugged(program, folder)
        for _ in range(COMPARED_CALLS):
            seconds.append(_seconds(lambda: program.step(function)))
            graphs = worst(graphs, Path(folder))
        compared_peak = peak.megabytes
    found = tuple(graphs.values())
    times = (min(eager), seconds[0], min(seconds[1:]), eager_peak, compared_peak, time.monotonic() - start)
    return Report(name, entry.kind, *of_right(found), found, "", *times)


def judge_planted(name: str) -> Report:
    """Plants a fault, and reads whether the verdict names it."""
    start, fault = time.monotonic(), FAULTS[name]
    _prepare(has_units=False)
    program = fault.build()
    graphs: dict[str, GraphVerdict] = {}
    with tempfile.TemporaryDirectory() as folder, fault.plant() as planted:
        function = _debugged(program, folder)
        for _ in range(fault.calls):
            program.step(function)
            graphs = worst(graphs, Path(folder))
        found = tuple(graphs.values())
        text = of_fault(fault, found, planted.count)
    return Report(name, fault.kind, *text, found, fault.expected, seconds=time.monotonic() - start)


def sweep(names: Sequence[str], judge: Callable[[str], Report], processes: int, limit: float) -> Iterator[Report]:
    """The reports on the cases, as they come."""
    for name, answer, seconds in judged(names, judge, processes=processes, limit=limit):
        yield Report(name, "", ERROR, answer.why, seconds=seconds) if isinstance(answer, Ended) else answer


def summary(reports: Sequence[Report]) -> str:
    """What is not right, and the counts."""
    unchecked = collections.Counter(item for report in reports for graph in report.graphs for item in graph.unchecked)
    lines = [f"{count:4} x unchecked: {item}" for item, count in unchecked.most_common()]
    for outcome in (ACCUSED, ERROR, NOT_COMPARABLE, NOT_COMPARED, NO_GRAPH, MISSED, MISNAMED, UNCHECKED, NOT_PLANTED):
        lines += [f"{outcome}: {r.name}: {r.text}".rstrip(": ") for r in reports if r.outcome == outcome]
    ratios = sorted(report.ratio for report in reports if report.ratio)
    if ratios:
        growth = max(r.compared_megabytes / r.eager_megabytes for r in reports if r.eager_megabytes)
        median = statistics.median(ratios)
        lines.append(f"compared / eager: {ratios[0]:.1f} to {ratios[-1]:.1f}, median {median:.1f}; peak: {growth:.1f}")
    graphs = sum(len(report.graphs) for report in reports)
    counts = collections.Counter(report.outcome for report in reports)
    lines.append(f"{len(reports)} cases, {graphs} graphs: {', '.join(f'{n} {o}' for o, n in counts.most_common())}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--planted", action="store_true", help="plant faults")
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    parser.add_argument(
        "--only", default="", help="parts of names or kinds, with semicolons between; = before a whole name"
    )
    parser.add_argument("--sample", type=int, help="how many, chosen at random")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--limit", type=float, default=900, help="seconds for a case")
    parser.add_argument("--out", type=Path, help="JSON with all reports; the cases already in it are not run again")
    parser.add_argument("--again", action="store_true", help="with --out: run what is in it again")
    settings = parser.parse_args(arguments)

    kinds = {name: case.kind for name, case in (FAULTS if settings.planted else MODELS).items()}
    chosen = list(kinds)
    if settings.only:
        parts = settings.only.split(";")
        chosen = [name for name in kinds if any(_matches(part.strip(), name, kinds[name]) for part in parts)]
        if not chosen:
            parser.error(f"no such case: {settings.only}")
    if settings.sample is not None and settings.sample < len(chosen):
        chosen = random.Random(settings.seed).sample(chosen, settings.sample)
    if settings.list:
        print("\n".join(f"{name:48} {kinds[name]}" for name in chosen))
        return 0

    stored: dict[str, Report] = {}
    if settings.out and settings.out.exists() and not settings.again:
        found = [msgspec.convert(each, Report) for each in json.loads(settings.out.read_text())]
        stored = {report.name: report for report in found}
    start, reports = time.monotonic(), [stored[name] for name in chosen if name in stored]
    for report in reports:
        print(report.line())
    judge = judge_planted if settings.planted else judge_right
    for report in sweep([name for name in chosen if name not in stored], judge, settings.processes, settings.limit):
        reports.append(report)
        print(report.line(), flush=True)
        if settings.out:
            kept = {**stored, **{each.name: each for each in reports}}
            settings.out.write_text(json.dumps([dataclasses.asdict(each) for each in kept.values()], indent=1))
    print(summary(reports), f"{time.monotonic() - start:.0f} s", sep="\n")
    may_be_missed = {name for name, fault in FAULTS.items() if fault.is_below_the_unit}
    wrong = {ACCUSED, ERROR, MISSED, MISNAMED}
    return int(any(r.outcome in wrong and not (settings.planted and r.name in may_be_missed) for r in reports))


def _matches(part: str, name: str, kind: str) -> bool:
    return name == part[1:] if part.startswith("=") else part in name or part in kind


if __name__ == "__main__":
    sys.exit(main())
