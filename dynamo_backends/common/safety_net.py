"""The safety net: when our own code fails, PyTorch runs the graph.

All handlers of unexpected exceptions call ``caught``, which counts the failure, warns once for each cause, and logs the
traceback at debug level. They are

    a graph of Dynamo          ``or_captured``                  PyTorch runs the captured graph
    a graph of AOTAutograd     ``Runners.or_in_pytorch``        PyTorch runs AOTAutograd's graph
    the partitioner            ``Pipeline.partitioner``         PyTorch's own partitioner, without our passes
    a call of a region         ``RunnableRegion``               PyTorch runs the region
    autotuning                 ``TunedGraph``                   PyTorch runs the graph
    the cache                  ``CachedGraphs``, ``Store``      a cache miss, a lock that shows no progress
    the registry of backends   ``backend_registry``             PyTorch's function runs alone
    an observer                ``GuardedObserver``              the graph runs, and its verdict is not "ok"

With ``fallback="error"`` the first four raise instead, and nothing is autotuned.

The warning says whose fault it is: what fails in AOTAutograd fails with PyTorch's backend ``aot_eager`` too, which
``or_captured`` finds out. All other code that fails here is ours.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import ParamSpec, TypeVar

import torch
from torch import fx
from torch._dynamo.exc import BackendCompilerFailed, InternalTorchDynamoError, TorchDynamoException
from torch._guards import detect_fake_mode

from passes.engine.fx.snapshot import FxSnapshot, with_subgraphs

from ..errors import AheadOfTimeError, CandidateError, UnsupportedOperatorError, first_line
from ..events import FallbackCount, GraphSummary, count, is_new
from .call_statistics import reporting
from .random_state import RandomState

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
U = TypeVar("U")


def is_meant_for_caller(error: BaseException) -> bool:
    """Whether an exception is meant for Dynamo or the user, and is not an internal failure."""
    if isinstance(error, (UnsupportedOperatorError, AheadOfTimeError)):
        return True
    is_failed_compile = isinstance(error, (BackendCompilerFailed, InternalTorchDynamoError))
    return isinstance(error, TorchDynamoException) and not is_failed_compile


_OURS = (
    "this is a bug of dynamo-backends: please report it as docs/bug_report.md says, with the traceback that "
    "TORCH_LOGS='+dynamo_backends' shows"
)


def _ours() -> str:
    return f"PyTorch's backend 'aot_eager' does not run the code that failed: {_OURS}"


def caught(what: str, error: BaseException, instead: str, whose: Callable[[], str] = _ours) -> None:
    """Counts and logs an internal failure.

    Args:
        what: what failed, ``the compile of graph 0 forward``.
        error: the exception.
        instead: the consequence, ``PyTorch runs the graph``.
        whose: says in a sentence whose fault it is; called the first time for each cause.
    """
    count("internal_failures", reason=f"{what} failed: {type(error).__name__}: {first_line(str(error))}")
    logger.debug("%s failed", what, exc_info=error)
    frames = traceback.extract_tb(error.__traceback__)
    cause = (type(error), frames[-1].filename, frames[-1].lineno) if frames else (type(error), what)
    if is_new(cause):
        try:
            fault = whose()
        except Exception as failure:
            logger.debug("whose fault it is cannot be found out", exc_info=failure)
            fault = _ours()
        logger.warning(
            "%s failed: %s: %s. %s. %s. options={'fallback': 'error'} raises such errors",
            what,
            type(error).__name__,
            first_line(str(error)),
            instead,
            fault,
        )


@contextlib.contextmanager
def net(what: str, instead: str) -> Iterator[None]:
    """A context that suppresses exceptions and passes them to ``caught``."""
    try:
        yield
    except Exception as error:
        caught(what, error, instead)


def never_fails(what: str, instead: str, otherwise: Callable[[], U]) -> Callable[[Callable[P, T]], Callable[P, T | U]]:
    """A decorator: if the function fails, it returns ``otherwise()``, see ``caught``."""

    def decorate(function: Callable[P, T]) -> Callable[P, T | U]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T | U:
            with net(what, instead):
                return function(*args, **kwargs)
            return otherwise()

        return call

    return decorate


def or_original(
    module: fx.GraphModule,
    compile_it: Callable[[], T],
    in_pytorch: Callable[[fx.GraphModule], U],
    *,
    what: str,
    instead: str,
    must_compile: Callable[[], bool],
    failed: Callable[[Exception], object] = lambda error: None,
    whose: Callable[[fx.GraphModule, Exception], str] = lambda module, error: _ours(),
) -> T | U:
    """Compiles a graph. If that fails, the original graph runs in PyTorch.

    Args:
        module: the graph; ``compile_it`` may change it in place.
        compile_it: compiles it.
        in_pytorch: takes the original graph and returns what PyTorch runs.
        what, instead: see ``caught``.
        must_compile: called after a failure; ``True`` raises it (``fallback="error"``).
        failed: called with a failure that is not raised.
        whose: takes the original graph and the failure, see ``caught``.
    """
    snapshot: FxSnapshot | None = None
    levels = torch._C._functorch.get_dynamic_layer_stack_depth()
    try:
        snapshot = FxSnapshot(module)
        return compile_it()
    except Exception as error:
        torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth(levels)  # left by a failed trace of vmap or grad
        if is_meant_for_caller(error) or must_compile():
            raise
        original = module if snapshot is None else snapshot.before()
        if isinstance(error, CandidateError):
            count("not_compiled_at_a_call", reason=str(error))
            logger.warning("%s; %s", error, instead)
        else:
            caught(what, error, instead, functools.partial(whose, original, error))
        failed(error)
        return in_pytorch(original)


def or_captured(
    module: fx.GraphModule,
    inputs: Sequence[object],
    compile_it: Callable[[], Callable[..., object]],
    *,
    must_compile: Callable[[], bool],
) -> Callable[..., object]:
    """The compiled graph for Dynamo, or if that fails the captured graph, see ``or_original``. ``inputs`` are Dynamo's
    example inputs."""
    return or_original(
        module,
        compile_it,
        _captured,
        what="the compile of a graph",
        instead="PyTorch runs the graph as the backend 'eager' does",
        must_compile=must_compile,
        whose=lambda original, error: _by_aot_eager(original, inputs, error),
    )


def _by_aot_eager(module: fx.GraphModule, inputs: Sequence[object], failure: Exception) -> str:
    """Says whether PyTorch's backend ``aot_eager`` compiles a graph whose compile failed here.

    It traces the graph with fake tensors, as the failed compile did. Guards, random numbers and warnings are those of
    before. A graph that calls other code than PyTorch's is not tried, because that code might notice.
    """
    if foreign := next(
        filter(_is_foreign, (node for part in with_subgraphs(module) for node in part.graph.nodes)), None
    ):
        return f"Unless PyTorch's backend 'aot_eager', which was not tried as it calls {foreign}, fails too, {_OURS}"
    mode = detect_fake_mode(inputs)
    shapes = mode.shape_env if mode is not None else None
    levels, random_state = torch._C._functorch.get_dynamic_layer_stack_depth(), RandomState.now()
    try:
        with warnings.catch_warnings(), shapes.suppress_guards() if shapes is not None else contextlib.nullcontext():
            warnings.simplefilter("ignore")
            torch._dynamo.lookup_backend("aot_eager")(module, list(inputs))
    except Exception as error:
        torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth(levels)
        if is_meant_for_caller(error):
            return f"Unless PyTorch's backend 'aot_eager' fails too, {_OURS}"
        what = f"{type(error).__name__}: {first_line(str(error))}"
        is_same = what == f"{type(failure).__name__}: {first_line(str(failure))}"
        how = "in the same way" if is_same else f"too, with {what}"
        return f"PyTorch's backend 'aot_eager' fails {how}: this is PyTorch's own"
    finally:
        random_state.restore()
    return f"PyTorch's backend 'aot_eager' compiles the graph: {_OURS}"


def _is_foreign(node: fx.Node) -> bool:
    """Whether a node of Dynamo's graph calls code that is not PyTorch's."""
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target.namespace not in ("aten", "prims")
    module = getattr(node.target, "__module__", None) or "torch"
    return node.op == "call_function" and module.split(".")[0] not in ("torch", "_operator", "math", "builtins")


def _captured(module: fx.GraphModule) -> Callable[..., object]:
    number = sum(node.op.startswith("call_") for node in module.graph.nodes)
    fallback = FallbackCount("all operators", "the compile of the graph failed", number)
    return reporting(module.forward, GraphSummary("a graph", 0, number, [fallback]))
