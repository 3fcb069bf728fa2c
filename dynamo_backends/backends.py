"""The backends that ``torch.compile`` finds by name: ``onnxrt``, ``onnx_debug``, ``fx_debug``.

Each checks its options and makes a pipeline; ``onnx_debug`` is ``onnxrt`` with an observer::

    torch.compile(model, backend="onnxrt", options={"fallback": "error"})
    torch.compile(model, backend="onnx_debug", options={"dump_dir": "dump"})
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import fx

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
        mode: accepted for code written for Inductor; changes nothing.

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


def onnx_compiler(
    *, debug: bool = False, record: list[object] | None = None, **options: object
) -> Callable[[fx.GraphModule, Sequence[object]], Runner]:
    """The pipeline from the stage ``aten`` on, as ``fw_compiler`` of ``aot_autograd``; it serves the backward too.

    ::

        compiler = onnx_compiler(debug=True, record=records)
        backend = aot_autograd(fw_compiler=compiler, decompositions=decomposition_table())

    Pre-grad and joint passes have no chance here, and AOTAutograd's default partitioner runs unless
    ``partition_fn=partition_joint_graph`` is given.

    Args:
        debug: dump and compare as ``onnx_debug`` does.
        record: a list that gets one ``Record`` for each compiled graph.
        **options: the options of ``onnxrt``, by name.

    Raises:
        ValueError: an unknown option or an impossible value.
    """
    from .debug.observer import DebugObserver
    from .debug.record import RecordObserver

    checked = parse_options(options)
    observer: Observer = Observer()
    if debug:
        observer = DebugObserver(checked, record)
    elif record is not None:
        observer = RecordObserver(record)
    return Pipeline(checked, observer).compile_for_aot_autograd
