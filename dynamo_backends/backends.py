"""The backends that ``torch.compile`` finds by name: ``onnxrt``, ``onnx_debug``, ``fx_debug``.

Each checks its options and creates a pipeline; ``onnx_debug`` is ``onnxrt`` with an observer::

    torch.compile(model, backend="onnxrt", options={"fallback": "error"})
    torch.compile(model, backend="onnx_debug", options={"dump_dir": "dump"})
"""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import dataclasses
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol, cast

from torch import fx
from torch._dynamo.exc import ShortenTraceback
from torch._dynamo.utils import counters

from .common import installation as installation  # first: its errors explain why the imports below would fail
from .common.backend_registry import allow_repetition
from .common.safety_net import caught, never_fails, or_captured
from .graphs.artifacts import Runner
from .graphs.dynamo_frames import skipped_functions
from .graphs.saving_mode import is_ahead_of_time, number_apart
from .options import Options, parse_options
from .pipeline.observer import GuardedObserver, Observer
from .pipeline.pipeline import Pipeline
from .runtime.custom_operators import load_libraries
from .runtime.subprocess_session import precise_enough
from .runtime.tensors import device_type_of

logger = logging.getLogger(__name__)

allow_repetition()
number_apart()


class OptionError(ValueError, ShortenTraceback):
    """An unknown option or an invalid value, raised at the caller's line.

    Dynamo wraps any other exception of a backend in ``BackendCompilerFailed``, below a long traceback of its own.
    """

    def __init__(self, message: str) -> None:
        ShortenTraceback.__init__(self, message, first_useful_frame=None)
        self._message = message

    def __str__(self) -> str:
        return self._message  # Dynamo adds advice for its own errors to ``args``

    def remove_dynamo_frames(self) -> OptionError:
        return self.with_traceback(None)


@contextlib.contextmanager
def option_errors() -> Iterator[None]:
    """Raises a ``ValueError`` inside the block as an ``OptionError``."""
    try:
        yield
    except ValueError as error:
        raise OptionError(str(error)) from None


def onnxrt(
    gm: fx.GraphModule,
    example_inputs: Sequence[object],
    *,
    options: Mapping[str, object] | None = None,
    mode: str | None = None,
) -> Callable[..., object]:
    """Compiles a graph for ONNX Runtime. PyTorch runs what ONNX Runtime cannot.

    Args:
        gm: Dynamo's graph.
        example_inputs: its inputs.
        options: see ``dynamo_backends.options.Options``.
        mode: sets options: ``max-autotune`` sets ``placement``, ``reduce-overhead`` sets ``spin``.

    Raises:
        OptionError: a ``ValueError``: an unknown option or an invalid value.
        UnsupportedOperatorError: with ``options={"fallback": "error"}``, for a node that needs PyTorch.
    """

    def compile_it(options: Options) -> Callable[..., object]:
        return _pipeline(options, current_block.get(), debug=False).compile_dynamo_graph(gm, example_inputs)

    return _compiled(gm, example_inputs, options, mode, compile_it)


def onnx_debug(
    gm: fx.GraphModule,
    example_inputs: Sequence[object],
    *,
    options: Mapping[str, object] | None = None,
    mode: str | None = None,
) -> Callable[..., object]:
    """``onnxrt`` that also dumps every stage and compares every node with eager and float64.

    Same arguments and errors as ``onnxrt``. It uses the options ``dump_dir``, ``compare`` and ``tensor_limit``.
    """

    def compile_it(options: Options) -> Callable[..., object]:
        return _pipeline(options, current_block.get(), debug=True).compile_dynamo_graph(gm, example_inputs)

    return _compiled(gm, example_inputs, options, mode, compile_it)


def fx_debug(
    gm: fx.GraphModule,
    example_inputs: Sequence[object],
    *,
    options: Mapping[str, object] | None = None,
    mode: str | None = None,
) -> Callable[..., object]:
    """Prints the graph as a table, writes each stage's graph to ``dump_dir``, and runs in PyTorch.

    Same arguments and errors as ``onnxrt``.
    """

    def compile_it(options: Options) -> Callable[..., object]:
        from .debug.fx_debug import compile_in_pytorch

        return compile_in_pytorch(gm, example_inputs, _in_block(options, current_block.get()))

    return _compiled(gm, example_inputs, options, mode, compile_it)


@atexit.register
def _warn_of_nothing_captured() -> None:
    """Says why, if Dynamo gave our backends no graph at all: it calls them only with graphs."""
    if not counters["frames"]["ok"]:
        for function, why in skipped_functions().items():
            logger.warning("nothing was compiled: Dynamo skipped %s, which runs in Python: %s", function, why)


def _compiled(
    gm: fx.GraphModule,
    example_inputs: Sequence[object],
    options: Mapping[str, object] | None,
    mode: str | None,
    compile_it: Callable[[Options], Callable[..., object]],
) -> Callable[..., object]:
    """Returns what Dynamo calls instead of its graph. If the compile fails, PyTorch runs the graph."""
    known: list[Options] = []

    def compile_checked() -> Callable[..., object]:
        with option_errors():
            checked = _ready(parse_options(options, mode, device=_device_type(gm, example_inputs)))
        known.append(checked)
        return compile_it(checked)

    def must_compile() -> bool:
        return any(item.fallback == "error" for item in known) or is_ahead_of_time()

    return or_captured(gm, example_inputs, compile_checked, must_compile=must_compile)


def _device_type(module: fx.GraphModule, inputs: Sequence[object] = ()) -> str:
    """The type of device of a graph's tensors, see ``device_type_of``."""
    nodes = [node.meta.get("val", node.meta.get("example_value")) for node in module.graph.nodes]
    return device_type_of([list(inputs), nodes])


def _ready(options: Options) -> Options:
    """Loads what the options name. Providers that are not precise enough are left out.

    Raises:
        ValueError: a library cannot be loaded, or the only provider is not precise enough.
    """
    load_libraries(options.custom_op_libraries)
    if not options.check_providers:
        return options
    return dataclasses.replace(options, providers=precise_enough(options.providers))


def _in_block(options: Options, block: Block | None) -> Options:
    """The options with the folder of the surrounding ``with dump(...)``."""
    return options if block is None else dataclasses.replace(options, dump_dir=block.folder)


def _pipeline(
    options: Options, block: Block | None, *, debug: bool = False, record: list[object] | None = None
) -> Pipeline:
    """Creates a pipeline. Inside ``with dump(...)``, it is observed until the block ends."""
    if not debug and block is None:
        return Pipeline(options, _observer_without_dump(record))
    options = _in_block(options, block)
    try:
        from .debug.observer import DebugObserver

        observer: Observer = GuardedObserver(DebugObserver(options, record))
    except Exception as error:
        caught("the debug backend", error, "Graphs run, and are neither dumped nor compared")
        observer = _observer_without_dump(record)
    if block is not None:
        block.observers.append(observer)
    return Pipeline(options, observer)


def _observer_without_dump(record: list[object] | None) -> Observer:
    """An observer that neither dumps nor compares."""
    if record is None:
        return Observer()
    from .debug.record import RecordObserver

    return GuardedObserver(RecordObserver(record))


@dataclasses.dataclass(frozen=True, eq=False)  # by identity, for a weak dictionary
class Block:
    """One ``with dump(...)``.

    Attributes:
        folder: the absolute path of the dump folder.
        observers: closed at the end of the block.
    """

    folder: str
    observers: list[Observer] = dataclasses.field(default_factory=list)


current_block: contextvars.ContextVar[Block | None] = contextvars.ContextVar("dynamo_backends_dump", default=None)
"""The innermost block of this thread."""


@contextlib.contextmanager
def dump(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """Dumps and compares graphs that our backends compile in the block, as ``onnx_debug`` does.

    A graph must be compiled inside the block: call the model there for the first time, or after
    ``torch._dynamo.reset()``. After the block, the compiled graphs still run, without dump and comparison. A block
    applies to the thread that enters it, and the innermost block wins.

    Args:
        folder: the dump folder, which replaces the option ``dump_dir``. Each run is a subfolder; ``latest`` points to
            the last.

    Yields:
        The dump folder. If it cannot be written, a warning is logged and the model runs.

    Raises:
        TypeError: ``folder`` is not a path.
    """
    block = Block(os.path.abspath(folder))
    token = current_block.set(block)
    try:
        yield Path(block.folder)
    finally:
        current_block.reset(token)
        with contextlib.ExitStack() as closing:  # closes all, even if one fails
            for observer in reversed(block.observers):
                closing.callback(observer.close)
        block.observers.clear()


class AotCompiler(Protocol):
    """The result of ``onnx_compiler``: a compiler for ``aot_autograd`` and its partitioner."""

    partition_fn: Callable[..., tuple[fx.GraphModule, fx.GraphModule]]
    """Runs the joint passes, then PyTorch's min-cut partitioner. The signature is AOTAutograd's ``partition_fn``."""

    def __call__(self, module: fx.GraphModule, example_inputs: Sequence[object]) -> Runner:
        """Compiles a forward, backward or inference graph, in place. The result takes its arguments boxed."""
        ...


def onnx_compiler(*, debug: bool = False, record: list[object] | None = None, **options: object) -> AotCompiler:
    """The pipeline from the stage ``joint`` on, as ``fw_compiler`` of ``aot_autograd``, for forward and backward.

    ::

        compiler = onnx_compiler(debug=True, opset=18, record=records)
        backend = aot_autograd(
            fw_compiler=compiler,
            partition_fn=compiler.partition_fn,
            decompositions=decomposition_table(18),
            keep_inference_input_mutations=True,
        )

    ``pre_grad`` passes do not run: AOTAutograd starts after them. Without ``partition_fn``, AOTAutograd's default
    partitioner splits training graphs, and ``joint`` passes do not run on them. Without
    ``keep_inference_input_mutations``, AOTAutograd returns new values of arguments as results of the graph: a parameter
    that is only written, as by a moving average, gets a gradient of zeros where eager has ``None``, and writes into a
    part of an argument copy all of it. A compiler cannot change that.

    Args:
        debug: dump and compare as ``onnx_debug`` does.
        record: a list to which each compiled graph appends a ``Record``.
        **options: the options of ``onnxrt``, by name.

    Raises:
        ValueError: an unknown option or an invalid value.
        TypeError: ``record`` is not a list.
    """
    checked = parse_options(options)
    if record is not None and not isinstance(record, list):
        raise TypeError(f"record: expected a list, which gets one record for each graph, not {record!r}")
    checked = _ready(checked)

    def made(device: str, block: Block | None) -> Pipeline:
        ready = checked if device == "cpu" else _ready(parse_options(options, device=device))
        return _pipeline(ready, block, debug=debug, record=record)

    outside = {"cpu": made("cpu", None)}
    inside: weakref.WeakKeyDictionary[Block, dict[str, Pipeline]] = weakref.WeakKeyDictionary()

    def pipeline(module: fx.GraphModule) -> Pipeline:
        device = _device_type(module)
        if device not in outside:
            outside[device] = made(device, None)

        @never_fails("with dump(...)", "It is as if there were no such block", lambda: outside[device])
        def of_block() -> Pipeline:
            block = current_block.get()
            pipelines = outside if block is None else inside.setdefault(block, {})
            if device not in pipelines:
                pipelines[device] = made(device, block)
            return pipelines[device]

        return of_block()

    # Functions: ``copy.deepcopy`` of a compiled module copies its backend, but not functions.
    def compiler(module: fx.GraphModule, example_inputs: Sequence[object]) -> Runner:
        return pipeline(module).compile_for_aot_autograd(module)

    def partition(joint: fx.GraphModule, inputs: object, **kwargs: object) -> tuple[fx.GraphModule, fx.GraphModule]:
        return pipeline(joint).partition_for_aot_autograd(joint, inputs, **kwargs)

    compiler.partition_fn = partition  # type: ignore[attr-defined]
    return cast(AotCompiler, compiler)
