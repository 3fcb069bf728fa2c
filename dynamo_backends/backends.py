"""The backends that ``torch.compile`` finds by name: ``onnxrt``, ``onnx_debug``, ``fx_debug``.

Each checks its options and makes a pipeline; ``onnx_debug`` is ``onnxrt`` with an observer::

    torch.compile(model, backend="onnxrt", options={"fallback": "error"})
    torch.compile(model, backend="onnx_debug", options={"dump_dir": "dump"})
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, cast

from torch import fx
from torch._dynamo.exc import ShortenTraceback

from .common import installation as installation  # first: it says what is wrong if the imports below would not work
from .common.safety_net import caught, never_fails, or_captured
from .graphs.artifacts import Runner
from .options import Options, parse_options
from .pipeline.dump_block import Block, current_block
from .pipeline.observer import GuardedObserver, Observer
from .pipeline.pipeline import Pipeline
from .runtime.custom_operators import load_libraries


class OptionError(ValueError, ShortenTraceback):
    """An unknown option or an impossible value, raised at the caller's line.

    Any other error of a backend becomes a ``BackendCompilerFailed``, whose first line names the backend, at the end of
    a traceback through Dynamo; errors of this kind are let through, and their traceback is theirs.
    """

    def __init__(self, message: str) -> None:
        ShortenTraceback.__init__(self, message, first_useful_frame=None)

    def remove_dynamo_frames(self) -> OptionError:
        return self.with_traceback(None)


@contextlib.contextmanager
def option_errors() -> Iterator[None]:
    """A ``ValueError`` inside, which is one of an option, becomes an ``OptionError``."""
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
    """Runs the graph on ONNX Runtime, and in PyTorch what ONNX Runtime cannot run.

    Args:
        gm: Dynamo's graph.
        example_inputs: what it will be called with.
        options: see ``dynamo_backends.options.Options``.
        mode: sets options: ``max-autotune`` ``placement``, ``reduce-overhead`` ``spin``.

    Raises:
        OptionError: a ``ValueError``, of an unknown option or an impossible value.
        UnsupportedOperatorError: with ``options={"fallback": "error"}``, for a node that needs PyTorch.
    """

    def compile_it(options: Options) -> Callable[..., object]:
        return _pipeline(options, current_block(), debug=False).compile_dynamo_graph(gm, example_inputs)

    return _compiled(gm, options, mode, compile_it)


def onnx_debug(
    gm: fx.GraphModule,
    example_inputs: Sequence[object],
    *,
    options: Mapping[str, object] | None = None,
    mode: str | None = None,
) -> Callable[..., object]:
    """``onnxrt``, and a folder that says of each stage what came out and of each node whether it is right.

    Same arguments and errors as ``onnxrt``; the options ``dump_dir``, ``compare`` and ``tensor_limit`` are for it.
    """

    def compile_it(options: Options) -> Callable[..., object]:
        return _pipeline(options, current_block(), debug=True).compile_dynamo_graph(gm, example_inputs)

    return _compiled(gm, options, mode, compile_it)


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

        return compile_in_pytorch(gm, example_inputs, _in_block(options, current_block()))

    return _compiled(gm, options, mode, compile_it)


def _compiled(
    gm: fx.GraphModule,
    options: Mapping[str, object] | None,
    mode: str | None,
    compile_it: Callable[[Options], Callable[..., object]],
) -> Callable[..., object]:
    """What Dynamo calls instead of its graph; nothing of ours that fails ends the compile."""
    known: list[Options] = []

    def compile_checked() -> Callable[..., object]:
        with option_errors():
            checked = parse_options(options, mode)
            load_libraries(checked.custom_op_libraries)
        known.append(checked)
        return compile_it(checked)

    return or_captured(gm, compile_checked, must_compile=lambda: any(item.fallback == "error" for item in known))


def _in_block(options: Options, block: Block | None) -> Options:
    """The options, with the dump folder of a ``with dump(...)``."""
    return options if block is None else dataclasses.replace(options, dump_dir=block.folder)


def _pipeline(
    options: Options, block: Block | None, *, debug: bool = False, record: list[object] | None = None
) -> Pipeline:
    """A pipeline; that of a block ``with dump(...)`` is watched until its end."""
    if not debug and block is None:
        return Pipeline(options, _unwatching(record))
    options = _in_block(options, block)
    try:
        from .debug.observer import DebugObserver

        observer: Observer = GuardedObserver(DebugObserver(options, record))
    except Exception as error:
        caught("the debug backend", error, "Graphs run, and are neither dumped nor compared")
        observer = _unwatching(record)
    if block is not None:
        block.observers.append(observer)
    return Pipeline(options, observer)


def _unwatching(record: list[object] | None) -> Observer:
    """An observer that dumps and compares nothing."""
    if record is None:
        return Observer()
    from .debug.record import RecordObserver

    return GuardedObserver(RecordObserver(record))


class AotCompiler(Protocol):
    """What ``onnx_compiler`` returns: a compiler for ``aot_autograd``, and the partitioner that belongs to it."""

    partition_fn: Callable[..., tuple[fx.GraphModule, fx.GraphModule]]
    """The stage ``joint``, with the options and the observer of the compiler: our joint passes, then PyTorch's min-cut
    partitioner. Arguments and results are those of AOTAutograd's ``partition_fn``."""

    def __call__(self, module: fx.GraphModule, example_inputs: Sequence[object]) -> Runner:
        """Compiles a forward, backward or inference graph, which is changed in place; what it returns takes its
        arguments boxed."""
        ...


def onnx_compiler(*, debug: bool = False, record: list[object] | None = None, **options: object) -> AotCompiler:
    """The pipeline from the stage ``joint`` on, as ``fw_compiler`` of ``aot_autograd``; it serves the backward too.

    ::

        compiler = onnx_compiler(debug=True, opset=18, record=records)
        backend = aot_autograd(
            fw_compiler=compiler,
            partition_fn=compiler.partition_fn,
            decompositions=decomposition_table(18),
        )

    The passes of the stage ``pre_grad`` do not run: AOTAutograd starts after it. Without ``partition_fn``, a graph that
    is trained is partitioned by AOTAutograd's default partitioner, and the passes of the stage ``joint`` do not run.

    Args:
        debug: dump and compare as ``onnx_debug`` does.
        record: a list that gets one ``Record`` for each compiled graph.
        **options: the options of ``onnxrt``, by name.

    Raises:
        ValueError: an unknown option or an impossible value.
        TypeError: ``record`` is not a list.
    """
    checked = parse_options(options)
    if record is not None and not isinstance(record, list):
        raise TypeError(f"record: expected a list, which gets one record for each graph, not {record!r}")
    load_libraries(checked.custom_op_libraries)
    outside = _pipeline(checked, None, debug=debug, record=record)
    inside: weakref.WeakKeyDictionary[Block, Pipeline] = weakref.WeakKeyDictionary()

    @never_fails("with dump(...)", "It is as if there were no such block", lambda: outside)
    def pipeline() -> Pipeline:
        block = current_block()
        if block is None:
            return outside
        if block not in inside:
            inside[block] = _pipeline(checked, block, debug=debug, record=record)
        return inside[block]

    # Functions, as ``copy.deepcopy`` of a compiled module copies the backend too, and does not copy functions.
    def compiler(module: fx.GraphModule, example_inputs: Sequence[object]) -> Runner:
        return pipeline().compile_for_aot_autograd(module)

    def partition(joint: fx.GraphModule, inputs: object, **kwargs: object) -> tuple[fx.GraphModule, fx.GraphModule]:
        return pipeline().partition_for_aot_autograd(joint, inputs, **kwargs)

    compiler.partition_fn = partition  # type: ignore[attr-defined]
    return cast(AotCompiler, compiler)
