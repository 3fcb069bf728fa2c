"""The stages of a dumped graph: which there are, their files, and their graphs as text and as nodes.

::

    run = find_run()
    (graph,) = run.graphs_of("0/forward")
    for stage in stages_of(run, graph):
        print(stage.name, stage.nodes, stage.same_as)
    print(stage_graphs(run, graph, "onnx")[0].text)
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

from ..common.suggestions import unknown_name
from ..graphs.graph_text import GraphNode, model_text, onnx_nodes, without_freeing
from .models import load_ir
from .reading import DumpedGraph, DumpedRun, DumpError, read_json
from .schema import StageEntry, stage_named

FX_STAGES = ("dynamo", "pre_grad", "joint", "aten", "post_grad")
"""Stages with FX graphs. The first three are of Dynamo's graph, and shared by forward and backward."""

ONNX_STAGES = ("onnx", "onnx_optimized", "session")  # stages with one ONNX model per region

STAGES = (*FX_STAGES, *ONNX_STAGES)  # in order


@dataclasses.dataclass(frozen=True)
class StageGraph:
    """The graph of a stage, or of a region in an ONNX stage."""

    path: Path
    file: str  # the path in the run folder
    text: str  # Python for FX
    region: int | None = None  # ``None`` for an FX graph
    names: dict[str, str] = dataclasses.field(default_factory=dict)  # the user's names of arguments, by FX name

    @functools.cached_property
    def nodes(self) -> list[GraphNode]:
        """Its nodes, including inputs, initializers and outputs."""
        if self.region is None:
            return read_json(self.path.with_suffix(".json"), list[GraphNode])
        known = self.names | {name: name for name in self.names.values()}  # weights of a model have the user's names
        nodes = onnx_nodes(_model(self.path))
        of_user = {node.name: known.get(node.name, "") for node in nodes if node.kind in ("input", "initializer")}
        return [dataclasses.replace(node, user_name=of_user.get(node.name, node.user_name)) for node in nodes]

    @property
    def operators(self) -> int:
        """The number of its nodes without inputs, initializers and outputs."""
        return sum(node.kind == "node" for node in self.nodes)


def stages_of(run: DumpedRun, graph: DumpedGraph) -> list[StageEntry]:
    """The stages of a graph, in order; ``DumpError`` if the manifest is damaged."""
    found = [entry for name in FX_STAGES if (entry := _entry(run, graph, name)) is not None]
    for name in ONNX_STAGES:
        entries = [entry for region in graph.regions if (entry := stage_named(region.entry.stages, name)) is not None]
        if not entries or len(entries) < len(graph.regions):
            continue
        nodes, same_as = sum(entry.nodes for entry in entries), {entry.same_as for entry in entries}
        if len(same_as) == 1 and None not in same_as:
            found.append(StageEntry(name, nodes, None, same_as.pop()))
            continue
        indices = ",".join(str(region.index) for region in graph.regions)
        places = f"region_{{{indices}}}" if len(entries) > 1 else f"region_{indices}"
        file = next((Path(entry.file).name for entry in entries if entry.file is not None), "")
        found.append(StageEntry(name, nodes, f"{graph.reference}/{places}/{file}"))
    return found


def stage_graphs(run: DumpedRun, graph: DumpedGraph, name: str) -> list[StageGraph]:
    """The graph of a stage, or those of its regions. A stage that changed nothing has the graph of an earlier stage.

    Raises ``DumpError`` if the graph has no such stage, or its file cannot be read.
    """
    if name not in STAGES:
        raise DumpError(unknown_name("stage", name, STAGES))
    if name in ONNX_STAGES:
        if not graph.regions:
            why = f"none of it ran on ONNX Runtime: {graph.entry.why_in_pytorch}"
            raise DumpError(f"{graph.reference} has no stage {name}: {why}")
        found = []
        for region in graph.regions:
            path = region.model_of(name)
            file = f"{graph.reference}/region_{region.index}/{path.name}"
            found.append(StageGraph(path, file, model_text(_model(path)), region.index, dict(graph.entry.names)))
        return found
    entry = _entry(run, graph, name)
    if entry is not None and entry.same_as is not None:
        entry = _entry(run, graph, entry.same_as)
    if entry is None or entry.file is None:
        have = [stage for stage in FX_STAGES if _entry(run, graph, stage) is not None]
        raise DumpError(f"{graph.reference} has no stage {name}, only {', '.join(have)}")
    path = run.file_of(graph, entry.file)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise DumpError(f"{path} cannot be read: {error}; dump again") from None
    return [StageGraph(path, entry.file, without_freeing(text))]


def _entry(run: DumpedRun, graph: DumpedGraph, name: str) -> StageEntry | None:
    if name not in ("dynamo", "pre_grad", "joint"):
        return stage_named(graph.entry.stages, name)
    of_dynamo = next((entry for entry in run.dynamo_graphs if entry.index == graph.index), None)
    return stage_named(of_dynamo.stages, name) if of_dynamo else None


_model = functools.lru_cache(maxsize=16)(load_ir)  # read once for the text and the nodes
