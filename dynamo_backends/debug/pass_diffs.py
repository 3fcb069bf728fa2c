"""Writes what each pass changed as a unified diff: ``passes/joint.remove_noops.diff``.

::

    --- before onnx.someone.remove_unused
    +++ after onnx.someone.remove_unused: fired 1, nodes 3 -> 2
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
    """A listener of the pass manager that writes diffs, and forwards to the listener that ``listener_of`` returns for
    the stage."""

    folder: DumpFolder
    relative: str
    listener_of: Callable[[str], Listener | None]
    _listener: Listener | None = None
    _before: Sequence[str] = ()

    def start(self, stage: str, graph: object) -> None:
        self._before = _lines(graph)
        self._listener = self.listener_of(stage)
        if self._listener is not None:
            self._listener.start(stage, graph)

    def fired(self, result: PassResult, graph: object) -> None:
        after = _lines(graph)
        title = f"after {result.name}: fired {result.fired}, nodes {result.nodes_before} -> {result.nodes_after}"
        if result.undone:
            title += f"; undone: {result.undone}"
        lines = difflib.unified_diff(self._before, after, f"before {result.name}", title, n=3, lineterm="")
        self.folder.write_text(f"{self.relative}/passes/{result.name}.diff", "\n".join(lines) + "\n")
        if not result.undone:
            self._before = after
        if self._listener is not None:
            self._listener.fired(result, graph)


def _lines(graph: object) -> list[str]:
    if isinstance(graph, fx.GraphModule):
        return without_freeing(stage_text(graph)).splitlines()
    assert isinstance(graph, ir.Model)
    return model_text(graph).splitlines()
