"""Compiles graphs during a call, when Dynamo has already compiled the frame and written its guards.

Some graphs are compiled late: AOTAutograd compiles a backward at its first call, and others need the values of their
weights. Such a compile takes Dynamo's lock, because FX traces with global variables, and may not rely on new
assumptions about symbolic sizes, because no guard would check them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from ..errors import CandidateError
from . import aot
from .artifacts import GraphName, Runner
from .size_assumptions import Assumptions


@contextlib.contextmanager
def compile_after_guards(name: GraphName, assumptions: Assumptions) -> Iterator[None]:
    """A context for a late compile: takes the lock, and at its end checks for new assumptions.

    Args:
        name: the graph.
        assumptions: those that Dynamo's guards check.

    Raises:
        CandidateError: the compile made a new assumption.
    """
    with aot.dynamo_compile_lock():
        yield
        if growth := assumptions.growth():
            raise CandidateError(f"{name} was compiled after its guards, and needs a new one: {growth}")


def compile_at_first_call(build: Callable[[Sequence[object]], Runner]) -> Runner:
    """A runner that compiles itself at its first call.

    It holds only Dynamo's lock: a thread that compiles may call a runner, and with a second lock two threads could
    deadlock.

    Args:
        build: takes the arguments of the first call and returns what runs; called once, unless it raises.
    """
    waiting = [build]
    built: list[Runner] = []

    def run(args: list[object]) -> object:
        if not built:
            with aot.dynamo_compile_lock():
                if not built:
                    built.append(waiting[0](tuple(args)))
                    waiting.clear()  # frees the graph
        return built[0](args)

    return run
