"""Compiles graphs during a call, when Dynamo has already compiled the frame and written its guards.

A backward may be compiled at its first call, as may a graph that needs the values of its weights. Such a compile takes
Dynamo's lock, and may make no new assumptions about symbolic sizes, because no guard would check them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from torch._dynamo.convert_frame import compile_lock
from torch.compiler import _compile_session_context

from ..errors import CandidateError
from .artifacts import GraphName, Runner
from .size_assumptions import Assumptions


@contextlib.contextmanager
def dynamo_compile_lock() -> Iterator[None]:
    """A context for a compile during a call: one thread at a time, because FX traces with global variables."""
    with compile_lock, _compile_session_context():
        yield


@contextlib.contextmanager
def compile_after_guards(name: GraphName, assumptions: Assumptions) -> Iterator[None]:
    """A context for compiling a graph during a call; ``assumptions`` are those that Dynamo's guards check.

    Raises:
        CandidateError: the compile made a new assumption.
    """
    with dynamo_compile_lock():
        yield
        if growth := assumptions.growth():
            raise CandidateError(f"{name} assumes what Dynamo's guards do not check: {growth}")


def compile_at_first_call(build: Callable[[Sequence[object]], Runner]) -> Runner:
    """A runner that calls ``build`` with the arguments of its first call, and then runs what that returns.

    It takes no lock besides Dynamo's: a thread that compiles holds that one and may call a runner, so a second lock
    could deadlock.
    """
    waiting = [build]
    built: list[Runner] = []

    def run(args: list[object]) -> object:
        if not built:
            with dynamo_compile_lock():
                if not built:
                    built.append(waiting[0](tuple(args)))
                    waiting.clear()  # frees the graph
        return built[0](args)

    return run
