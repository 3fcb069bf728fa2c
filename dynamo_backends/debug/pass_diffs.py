"""The graph before and after each pass that fired, as a unified diff in the dump: ``passes/joint.remove_noops.diff``.

::

    --- before onnx.remove_unused
    +++ after onnx.remove_unused: fired 1, nodes 3 -> 2
     relu: f32[2, 3] = Relu(x)  # model.py:17
    -dead: f32[2, 3] = Neg(relu)  # model.py:18
     tanh: f32[2, 3] = Tanh(relu)  # model.py:19
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Sequence

import onnx_ir as ir
from torch import fx

from passes.engine.manager import Listener
from passes.engine.results import PassResult

from ..graphs.graph_text import model_text, without_freeing
from .dump_folder import DumpFolder
from .stage_files import stage_text


@dataclasses.dataclass(eq=False)
class PassDiffs:
    """Writes the diffs of one graph's passes into a folder of the dump, and tells another listener, the keeper of a
    stage,
    of them; the pass manager tells it of each.
    """

    folder: DumpFolder
    relative: str
    keeper_of: Callable[[str], Listener | None]
    _keeper: Listener | None = None
    _before: Sequence[str] = ()

    def start(self, stage: str, graph: object) -> None:
        self._before = graph_text(graph).splitlines()
        self._keeper = self.keeper_of(stage)
        if self._keeper is not None:
            self._keeper.start(stage, graph)

    def fired(self, result: PassResult, graph: object) -> None:
        after = graph_text(graph).splitlines()
        said = f"after {result.name}: fired {result.fired}, nodes {result.nodes_before} -> {result.nodes_after}"
        if result.undone:
            said += f"; undone: {result.undone}"
        lines = difflib.unified_diff(self._before, after, f"before {result.name}", said, n=3, lineterm="")
        self.folder.write_text(f"{self.relative}/passes/{result.name}.diff", "\n".join(lines) + "\n")
        if not result.undone:
            self._before = after
        if self._keeper is not None:
            self._keeper.fired(result, graph)


def graph_text(graph: object) -> str:
    """A graph as text, one line or a few for each node: Python for FX, ``model_text`` for ONNX."""
    if isinstance(graph, fx.GraphModule):
        return without_freeing(stage_text(graph))
    assert isinstance(graph, ir.Model)
    return model_text(graph)
