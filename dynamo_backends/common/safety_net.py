"""The safety net: whatever fails in our own part, PyTorch runs the graph.

Every place that catches an exception nobody foresaw calls ``caught``: it counts the failure, warns once for each cause,
and logs the traceback at debug level. The places are

    a graph of Dynamo's        ``or_captured``                  PyTorch runs the graph as it was captured
    a graph of AOTAutograd's   ``Runners.or_in_pytorch``        PyTorch runs the graph as AOTAutograd made it
    the partitioner            ``Pipeline.partitioner``         PyTorch's own partitioner, without our passes
    a call of a region         ``RunnableRegion``               PyTorch runs the region
    autotuning                 ``TunedGraph``                   PyTorch runs the graph
    the cache                  ``CachedGraphs``                 as if there were no entry
    an observer                ``GuardedObserver``              the graph runs, and its verdict is not "ok"

With ``fallback="error"`` the first five raise instead.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import traceback
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

import torch
from torch import fx
from torch._dynamo.exc import BackendCompilerFailed, InternalTorchDynamoError, TorchDynamoException

from passes.engine.fx.snapshot import FxSnapshot
from passes.engine.locks import Lock

from ..errors import AheadOfTimeError, CandidateError, UnsupportedOperatorError, first_line
from ..events import count

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
U = TypeVar("U")

told_causes: set[tuple[object, ...]] = set()
"""The causes that the log has a warning of."""

_told_lock = Lock()


def is_for_others(error: BaseException) -> bool:
    """Whether an exception is no failure of ours: Dynamo reads it, or the user is meant to."""
    if isinstance(error, (UnsupportedOperatorError, AheadOfTimeError)):
        return True
    is_failed_compile = isinstance(error, (BackendCompilerFailed, InternalTorchDynamoError))
    return isinstance(error, TorchDynamoException) and not is_failed_compile


def caught(what: str, error: BaseException, instead: str) -> None:
    """Counts an internal failure that the net caught, and tells of it.

    Args:
        what: what failed, ``the compile of graph 0 forward``.
        error: what it raised.
        instead: what happens now, ``PyTorch runs the graph``.
    """
    count("internal_failures")
    logger.debug("%s failed", what, exc_info=error)
    frames = traceback.extract_tb(error.__traceback__)
    cause = (type(error), frames[-1].filename, frames[-1].lineno) if frames else (type(error), what)
    with _told_lock:
        is_new = cause not in told_causes
        told_causes.add(cause)
    if is_new:
        logger.warning(
            "%s failed: %s: %s. %s. Unless backend='aot_eager' fails too, this is a bug of dynamo-backends: please "
            "report it as docs/bug_report.md says, with the traceback that TORCH_LOGS='+dynamo_backends' shows. "
            "options={'fallback': 'error'} raises such errors",
            what,
            type(error).__name__,
            first_line(str(error)),
            instead,
        )


@contextlib.contextmanager
def net(what: str, instead: str) -> Iterator[None]:
    """An exception inside ends the block, see ``caught``."""
    try:
        yield
    except Exception as error:
        caught(what, error, instead)


def never_fails(what: str, instead: str, otherwise: Callable[[], U]) -> Callable[[Callable[P, T]], Callable[P, T | U]]:
    """A decorator: where the function raises, it returns what ``otherwise`` makes."""

    def decorate(function: Callable[P, T]) -> Callable[P, T | U]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T | U:
            try:
                return function(*args, **kwargs)
            except Exception as error:
                caught(what, error, instead)
                return otherwise()

        return call

    return decorate


def or_as_it_was(
    module: fx.GraphModule,
    compile_it: Callable[[], T],
    in_pytorch: Callable[[fx.GraphModule], U],
    *,
    what: str,
    instead: str,
    must_compile: Callable[[], bool],
    failed: Callable[[Exception], object] = lambda error: None,
) -> T | U:
    """What is compiled of a graph; if that fails, what ``in_pytorch`` makes of the graph as it was.

    Args:
        module: the graph; ``compile_it`` may change it in place.
        compile_it: compiles it.
        in_pytorch: makes something of it that PyTorch runs.
        what: what may fail, for the log.
        instead: what happens then, for the log.
        must_compile: asked after a failure; whether it is raised (``fallback="error"``).
        failed: is told of a failure that is not raised.
    """
    recorded: FxSnapshot | None = None
    levels = torch._C._functorch.get_dynamic_layer_stack_depth()
    try:
        recorded = FxSnapshot(module)
        return compile_it()
    except Exception as error:
        torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth(levels)  # a trace of vmap or grad ended half-way
        if is_for_others(error) or must_compile():
            raise
        if isinstance(error, CandidateError):
            count("not_compiled_at_a_call")
            logger.warning("%s; %s", error, instead)
        else:
            caught(what, error, instead)
        failed(error)
        return in_pytorch(module if recorded is None else recorded.before())


def or_captured(
    module: fx.GraphModule, compile_it: Callable[[], Callable[..., object]], *, must_compile: Callable[[], bool]
) -> Callable[..., object]:
    """What Dynamo calls instead of its graph: what is compiled, or the graph as captured, see ``or_as_it_was``."""
    return or_as_it_was(
        module,
        compile_it,
        lambda captured: captured.forward,
        what="the compile of a graph",
        instead="PyTorch runs the graph as the backend 'eager' does",
        must_compile=must_compile,
    )
