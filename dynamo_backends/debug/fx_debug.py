"""The backend ``fx_debug``: shows what ``torch.compile`` made of a model, and runs it in PyTorch.

It is the pipeline of ``onnxrt`` up to the stage ``post_grad``. Dynamo's graph and each ATen graph are printed
as a table, and every stage's graph is written to the dump folder::

    graph 0, stage dynamo
    opcode         name    target                    args    value      source
    -------------  ------  ------------------------  ------  ---------  ----------
    placeholder    l_x_    L_x_                              f32[2, 3]  model.py:6
    call_function  relu    torch.nn.functional.relu  l_x_    f32[2, 3]  model.py:6
    output         output  output                    [relu]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence

import tabulate
import torch
from torch import fx
from torch.utils._dtype_abbrs import dtype_abbrs

from passes.engine.manager import PassResult

from ..artifacts import GraphName, Runner, Split
from ..exporter.locations import where
from ..frozen import Weight
from ..observer import Observer
from ..options import Options
from ..pipeline import Pipeline
from ..regions import assemble
from ..verification import Evaluation
from .dump_folder import DumpFolder, dump_folder, graph_folder
from .stage_files import stage_text

_PRINTED_STAGES = ("dynamo", "post_grad")
_WIDTH = 72
"""Longest text of a cell; the files of the dump folder hold all of it."""


def compile_in_pytorch(
    module: fx.GraphModule, example_inputs: Sequence[object], options: Options
) -> Callable[..., object]:
    """Prints and writes the stages ``dynamo`` to ``post_grad`` of one of Dynamo's graphs.

    Args:
        module: the graph, in torch IR.
        example_inputs: what it will be called with, tensors and symbolic integers.
        options: ``dump_dir`` is where the graphs are written; ``opset`` decides what AOTAutograd decomposes.

    Returns:
        What Dynamo calls instead of the graph: PyTorch on the graphs of the stage ``post_grad``.
    """
    folder = dump_folder(options.dump_dir)
    run = Pipeline(options, _Printer(folder), PyTorchLowering()).compile_dynamo_graph(module, example_inputs)
    if folder.is_enabled:
        _show(f"graphs are in {folder.location}\n")
    return run


def graph_table(module: fx.GraphModule) -> str:
    """The nodes of a graph as a table: opcode, name, target, arguments, dtype and shape, the user's line."""
    rows = [
        (node.op, node.name, _target(node), _arguments(node), _value(node), where(node)) for node in module.graph.nodes
    ]
    cells = [[_shorten(cell) for cell in row] for row in rows]
    headers = ["opcode", "name", "target", "args", "value", "source"]
    return tabulate.tabulate(cells, headers=headers, disable_numparse=True)


class PyTorchLowering:
    """Runs the graphs of the stage ``post_grad`` in PyTorch."""

    def lower(
        self,
        name: GraphName,
        module: fx.GraphModule,
        passes: list[PassResult],
        evaluation: Evaluation | None,
        weights: Mapping[fx.Node, Weight],
    ) -> Runner:
        """See ``Lowering.lower``."""
        return assemble(module, Split([], {}), []).forward


class _Printer(Observer):
    def __init__(self, folder: DumpFolder) -> None:
        self._folder = folder
        self._shown: set[str] = set()

    def stage(self, name: str, graph: GraphName, artifact: object) -> None:
        assert isinstance(artifact, fx.GraphModule)  # the stages after post_grad are not reached
        super().stage(name, graph, artifact)
        self._folder.write_text(f"{graph_folder(graph)}/{name}.py", stage_text(artifact))
        if name in _PRINTED_STAGES:
            text = f"{graph}, stage {name}\n{graph_table(artifact)}\n\n"
            if text not in self._shown:  # a dynamic backward is compiled twice
                self._shown.add(text)
                _show(text)


def _show(text: str) -> None:
    """Prints; in this backend that is the product. The one place that does."""
    sys.stdout.write(text)


def _target(node: fx.Node) -> str:
    if isinstance(node.target, (str, torch._ops.OpOverload)):
        return str(node.target)
    module = getattr(node.target, "__module__", None)
    name = getattr(node.target, "__qualname__", None) or str(node.target)
    return f"{module.lstrip('_')}.{name}" if module else name


def _arguments(node: fx.Node) -> str:
    keywords = [f"{name}={_argument(arg)}" for name, arg in node.kwargs.items()]
    return ", ".join([*map(_argument, node.args), *keywords])


def _argument(arg: object) -> str:
    if isinstance(arg, Mapping):
        return "{" + ", ".join(f"{key!r}: {_argument(value)}" for key, value in arg.items()) + "}"
    if isinstance(arg, (list, tuple)):
        return "[" + ", ".join(map(_argument, arg)) + "]"
    return str(arg)


def _value(node: fx.Node) -> str:
    """``f32[2, 3]``; AOTAutograd keeps a node's fake result under ``val``, Dynamo under ``example_value``."""
    value = node.meta.get("val", node.meta.get("example_value"))
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_describe, value))
    return "" if value is None else _describe(value)


def _describe(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{dtype_abbrs.get(value.dtype, value.dtype)}[{', '.join(map(str, value.shape))}]"
    return str(value)


def _shorten(text: str) -> str:
    return text if len(text) <= _WIDTH else text[: _WIDTH - 3] + "..."
