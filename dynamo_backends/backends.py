"""The backends that ``torch.compile`` finds by name: ``onnxrt``, ``onnx_debug``, ``fx_debug``.

Each checks its options and makes a pipeline; ``onnx_debug`` is ``onnxrt`` with an observer::

    torch.compile(model, backend="onnxrt", options={"fallback": "error"})
    torch.compile(model, backend="onnx_debug", options={"dump_dir": "dump"})
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, cast

from torch import fx

from . import installation as installation  # first: it says what is wrong if the imports below would not work
from .artifacts import Runner
from .observer import Observer
from .options import parse_options
from .pipeline import Pipeline


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
        ValueError: an unknown option or an impossible value.
        UnsupportedOperatorError: with ``options={"fallback": "error"}``, for a node that needs PyTorch.
    """
    return Pipeline(parse_options(options, mode), Observer()).compile_dynamo_graph(gm, example_inputs)


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
    from .debug.observer import DebugObserver

    checked = parse_options(options, mode)
    return Pipeline(checked, DebugObserver(checked)).compile_dynamo_graph(gm, example_inputs)


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
    from .debug.fx_debug import compile_in_pytorch

    return compile_in_pytorch(gm, example_inputs, parse_options(options, mode))


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
    from .debug.observer import DebugObserver
    from .debug.record import RecordObserver

    checked = parse_options(options)
    if record is not None and not isinstance(record, list):
        raise TypeError(f"record: expected a list, which gets one record for each graph, not {record!r}")
    observer: Observer = Observer()
    if debug:
        observer = DebugObserver(checked, record)
    elif record is not None:
        observer = RecordObserver(record)
    pipeline = Pipeline(checked, observer)

    # Functions, as ``copy.deepcopy`` of a compiled module copies the backend too, and does not copy functions.
    def compiler(module: fx.GraphModule, example_inputs: Sequence[object]) -> Runner:
        return pipeline.compile_for_aot_autograd(module)

    def partition(joint: fx.GraphModule, inputs: object, **kwargs: object) -> tuple[fx.GraphModule, fx.GraphModule]:
        return pipeline.partition_for_aot_autograd(joint, inputs, **kwargs)

    compiler.partition_fn = partition  # type: ignore[attr-defined]
    return cast(AotCompiler, compiler)
