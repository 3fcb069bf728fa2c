"""Worker processes for the sweeps: a case that crashes or hangs its worker is reported, and the worker replaced."""

from __future__ import annotations

import collections
import gc
import multiprocessing
import multiprocessing.connection
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

Case = TypeVar("Case")
Answer = TypeVar("Answer")

_START = 300
"""Seconds that a process may take to import everything, on a machine with other work."""


@dataclass(frozen=True)
class Ended:
    """The reason why there is no answer: a crash, an exception of the judge, or the timeout."""

    why: str


def _work(connection: multiprocessing.connection.Connection, judge: Callable[[Case], Answer]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    connection.send(None)  # the imports are done; from here the time of the case counts
    while True:
        case = connection.recv()
        try:
            connection.send(judge(case))
        except Exception as error:
            connection.send(Ended(f"{type(error).__name__}: {error}"))
        torch._dynamo.reset()
        gc.collect()  # sessions have threads of their own


class _Worker(Generic[Case, Answer]):
    """A process that judges one case after the other; replaced after a crash or timeout."""

    def __init__(self, judge: Callable[[Case], Answer], limit: float) -> None:
        self._judge, self._limit = judge, limit
        self._process: multiprocessing.process.BaseProcess | None = None
        self.case: Case | None = None

    def give(self, case: Case) -> None:
        if self._process is None:
            context = multiprocessing.get_context("spawn")
            self.connection, theirs = context.Pipe()
            self._ready = False
            self._process = context.Process(target=_work, args=(theirs, self._judge), daemon=True)
            self._process.start()
            theirs.close()
        self.case, self._start = case, time.monotonic()
        self.connection.send(case)

    def answer(self) -> tuple[Answer | Ended, float] | None:
        """The answer on the case it has and the seconds it took, if there is one by now."""
        seconds = round(time.monotonic() - self._start, 2)
        try:
            if self.connection.poll():
                found: Answer | Ended | None = self.connection.recv()
                if found is None:
                    self._ready, self._start = True, time.monotonic()
                    return None
                self.case = None
                return found, seconds
        except (EOFError, ConnectionResetError):
            return self._ended("the process died"), seconds
        limit = self._limit if self._ready else max(self._limit, _START)
        return (self._ended(f"no answer in {limit:.0f} s"), seconds) if seconds > limit else None

    def _ended(self, why: str) -> Ended:
        self.stop()
        return Ended(why)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self.connection.close()
        self._process = self.case = None


def judged(
    cases: Sequence[Case], judge: Callable[[Case], Answer], *, processes: int, limit: float
) -> Iterator[tuple[Case, Answer | Ended, float]]:
    """Each case with its answer and its seconds, as they end.

    Args:
        cases: what can be sent to a process.
        judge: a module-level function that does not return ``None``.
        processes: how many at once, of one thread each.
        limit: seconds for a case.
    """
    waiting = collections.deque(cases)
    workers: list[_Worker[Case, Answer]] = [_Worker(judge, limit) for _ in range(max(1, min(processes, len(waiting))))]
    try:
        while waiting or any(worker.case is not None for worker in workers):
            for worker in workers:
                if worker.case is None and waiting:
                    worker.give(waiting.popleft())
            busy = [worker for worker in workers if worker.case is not None]
            multiprocessing.connection.wait([worker.connection for worker in busy], timeout=1)
            for worker in busy:
                case, answer = worker.case, worker.answer()
                if answer is not None and case is not None:
                    yield case, *answer
    finally:
        for worker in workers:
            worker.stop()
