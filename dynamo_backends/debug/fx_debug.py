"""The backend ``fx_debug``: prints and dumps the FX graphs of a model, and runs them in PyTorch.

It is the pipeline of ``onnxrt`` up to the stage ``post_grad``. Dynamo's graph and each ATen graph are printed as a
table; the stages are written to the dump folder as by ``onnx_debug``::

    graph 0, stage dynamo
    opcode         name    target                    args    value      source
    -------------  ------  ------------------------  ------  ---------  ----------
    placeholder    l_x_    L_x_                              f32[2, 3]  model.py:6
    call_function  relu    torch.nn.functional.relu  l_x_    f32[2, 3]  model.py:6
    output         output  output                    [relu]
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence

from torch import fx

from passes.engine.results import PassResult

from ..errors import Kind, Reason
from ..graphs.artifacts import GraphName, Runner, Split
from ..graphs.fx_table import graph_table
from ..options import Options
from ..partition.program import LoadedProgram
from ..pipeline.observer import GuardedObserver, Observer
from ..pipeline.pipeline import Pipeline
from ..pipeline.stage_data import CompiledGraph
from ..pipeline.stages import run_in_pytorch
from .dump_folder import DumpFolder, dump_folder
from .manifest import manifest_of
from .stage_files import StageFiles

_PRINTED_STAGES = ("dynamo", "post_grad")

_IN_PYTORCH = Reason(Kind.FASTER_IN_PYTORCH, "fx_debug runs graphs in PyTorch")


def compile_in_pytorch(
    module: fx.GraphModule, example_inputs: Sequence[object], options: Options
) -> Callable[..., object]:
    """Prints and dumps the stages ``dynamo`` to ``post_grad`` of one Dynamo graph, and runs the last in PyTorch.

    Of the options, ``dump_dir`` is where the graphs are written; ``opset`` decides what AOTAutograd decomposes.
    """
    folder = dump_folder(options.dump_dir)
    printer = GuardedObserver(_Printer(folder, options))
    run = Pipeline(options, printer, run_in_pytorch).compile_dynamo_graph(module, example_inputs)
    if folder.is_enabled:
        sys.stdout.write(f"graphs are in {folder.location}\n")
    return run


class _Printer(Observer):
    def __init__(self, folder: DumpFolder, options: Options) -> None:
        self._options = options
        self._manifest = manifest_of(folder)
        self._stage_files = StageFiles(folder)
        self._printed: set[str] = set()

    def stage(self, name: str, graph: GraphName, artifact: object) -> None:
        assert isinstance(artifact, fx.GraphModule)  # the stages after post_grad are not reached
        super().stage(name, graph, artifact)
        self._manifest.add_stage(graph, self._stage_files.write(name, graph, artifact))
        text = f"{graph}, stage {name}\n{graph_table(artifact)}\n\n"
        if name in _PRINTED_STAGES and text not in self._printed:  # a dynamic backward is compiled twice
            self._printed.add(text)
            sys.stdout.write(text)

    def passes(self, graph: GraphName, results: Sequence[PassResult]) -> None:
        self._manifest.add_passes(graph, results)

    def runner(self, graph: CompiledGraph, loaded: LoadedProgram) -> Runner:
        nodes = [node for node in graph.module.graph.nodes if node.op == "call_function"]
        split = Split([], dict.fromkeys(nodes, _IN_PYTORCH))
        self._manifest.add_graph(dataclasses.replace(graph, split=split), self._options, reference="")
        return loaded.run
