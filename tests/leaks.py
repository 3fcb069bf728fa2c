"""Checks that nothing grows with compiles and resets, calls, and freed results: memory, threads, files, objects.

::

    python tests/leaks.py                                   # 2,000 compiles, a million calls; about an hour
    python tests/leaks.py --compiles 200 --calls 100000

Each line is one measurement: resident memory in MB, threads, open files, Python objects. The first tenth is not judged,
since caches fill. PyTorch itself keeps some 500 objects of each compile (2.13), as ``aot_eager`` shows; the growth by
compiles is compared with that. Exit code 1: something grew by more than its limit.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import conftest  # noqa: F401  the settings of the tests
import torch

from dynamo_backends.runtime.system_memory import give_back


@dataclasses.dataclass(frozen=True)
class Moment:
    """The memory, threads, files and objects of a process after some rounds."""

    rounds: int
    megabytes: float
    threads: int
    files: int
    objects: int

    def __str__(self) -> str:
        return (
            f"{self.rounds:>9} rounds  {self.megabytes:8.1f} MB  {self.threads:3} threads  {self.files:3} files  "
            f"{self.objects:8} objects"
        )


def now(rounds: int) -> Moment:
    gc.collect()
    give_back()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    files, threads = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
    return Moment(rounds, pages * os.sysconf("SC_PAGESIZE") / 2**20, threads, files, len(gc.get_objects()))


def watched(work: Callable[[int], object], rounds: int, looks: int = 10) -> Iterator[Moment]:
    """Runs ``work`` repeatedly, and measures the process ten times."""
    for i in range(rounds):
        work(i)
        if (i + 1) % max(rounds // looks, 1) == 0:
            yield now(i + 1)


def compile_and_reset(backend: str = "onnxrt") -> Callable[[int], object]:
    """Compiles a new model in each round, trains it for a step, and resets."""

    def work(i: int) -> None:
        layer = torch.nn.Linear(4, 3 + i % 3)
        function = torch.compile(lambda x: torch.nn.functional.gelu(layer(x)), backend=backend, dynamic=False)
        function(torch.ones(2, 4)).sum().backward()
        with torch.no_grad():
            function(torch.ones(2, 4))
        torch._dynamo.reset()

    return work


def call_a_model() -> Callable[[int], object]:
    layer = torch.nn.Linear(4, 4)
    function = torch.compile(lambda x: torch.nn.functional.gelu(layer(x)), backend="onnxrt", dynamic=False)
    x = torch.ones(2, 4)

    def work(i: int) -> None:
        with torch.no_grad():
            function(x)

    return work


def rates(moments: Sequence[Moment]) -> tuple[float, float]:
    """The growth by each round in megabytes and objects, after the first measurement."""
    first, last = moments[min(1, len(moments) - 2)], moments[-1]
    rounds = last.rounds - first.rounds
    return (last.megabytes - first.megabytes) / rounds, (last.objects - first.objects) / rounds


def growth(moments: Sequence[Moment], beside: Sequence[Moment] = ()) -> list[str]:
    """A message about what grew more than its limit.

    Args:
        moments: the measurements.
        beside: those without our backends; by default nothing may grow.
    """
    first, last = moments[min(1, len(moments) - 2)], moments[-1]
    rounds = last.rounds - first.rounds
    megabytes, objects = rates(beside) if beside else (0.0, 0.0)
    found = []
    if last.threads > first.threads:
        found.append(f"{last.threads - first.threads} threads")
    if last.files > first.files:
        found.append(f"{last.files - first.files} files")
    if last.megabytes - first.megabytes > 8 + 1.2 * megabytes * rounds:
        found.append(f"{last.megabytes - first.megabytes:.1f} MB, where PyTorch grows by {megabytes * rounds:.1f}")
    if last.objects - first.objects > 500 + 1.2 * objects * rounds:
        found.append(f"{last.objects - first.objects} objects, where PyTorch keeps {objects * rounds:.0f}")
    return found


def memory_of_results() -> tuple[float, float]:
    """The megabytes of 64 results of 4 MB, and those left after they are freed and no session runs."""
    function = torch.compile(lambda x: x.exp() * 2, backend="onnxrt", dynamic=False)
    x = torch.ones(2**20)
    function(x)
    before = now(0).megabytes
    results = [function(x) for _ in range(64)]
    held = now(1).megabytes - before
    del results
    for _ in range(40):  # the arena is given back when nothing has run for half a second
        time.sleep(0.1)
        if now(2).megabytes - before < 8:
            break
    return held, now(2).megabytes - before


def told(what: str, moments: Iterator[Moment]) -> Iterator[Moment]:
    """The measurements, each printed."""
    for moment in moments:
        print(f"{what:10}{moment}", flush=True)
        yield moment


def main() -> int:
    parser = argparse.ArgumentParser(description="Does anything grow?")
    parser.add_argument("--compiles", type=int, default=2_000)
    parser.add_argument("--calls", type=int, default=1_000_000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    beside, compiles, calls = (
        list(told(what, watched(work, rounds)))
        for what, work, rounds in (
            ("aot_eager", compile_and_reset("aot_eager"), max(arguments.compiles // 5, 20)),
            ("compiles", compile_and_reset(), arguments.compiles),
            ("calls", call_a_model(), arguments.calls),
        )
    )
    grew = [f"compiles: {text}" for text in growth(compiles, beside)] + [f"calls: {text}" for text in growth(calls)]
    held, left = memory_of_results()
    print(f"results of 256 MB: {held:.0f} MB held, {left:.0f} MB left when they are let go")
    if left > 16:
        grew.append(f"results: {left:.0f} MB")
    print("\n".join(f"GREW {text}" for text in grew) or "nothing grew")
    print(f"threads of Python: {[thread.name for thread in threading.enumerate()]}")
    return int(bool(grew))


if __name__ == "__main__":
    sys.exit(main())
