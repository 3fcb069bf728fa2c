"""Compiling at a call, after Dynamo has compiled and written its guards: in one thread, and without new assumptions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from ..errors import CandidateError
from . import aot
from .artifacts import GraphName, Runner
from .size_assumptions import Assumptions


@contextlib.contextmanager
def at_a_call(name: GraphName, assumptions: Assumptions) -> Iterator[None]:
    """What is compiled inside, at a call, is compiled in one thread at a time, since FX traces with variables of the
    process; and nothing may be assumed on symbolic sizes, since Dynamo has its guards by now.

    Args:
        name: which graph.
        assumptions: those that may hold.

    Raises:
        CandidateError: more was assumed.
    """
    with aot.as_dynamo_compiles():
        yield
        if growth := assumptions.growth():
            raise CandidateError(f"{name}, compiled at a call, would hold for some sizes only: {growth}")


def at_first_call(build: Callable[[Sequence[object]], Runner]) -> Runner:
    """A runner that is built from the arguments of its first call, in one thread.

    Dynamo's lock is the only one: who compiles may call what waits for its first call, and has that lock already.

    Args:
        build: compiles on real arguments, and returns what runs.
    """
    waiting = [build]
    built: list[Runner] = []

    def run(args: list[object]) -> object:
        if not built:
            with aot.as_dynamo_compiles():
                if not built:
                    built.append(waiting[0](tuple(args)))
                    waiting.clear()  # it keeps the graph
        return built[0](args)

    return run
