"""The stages of a graph in a dump: which there are, where their files are, their graphs as text and as nodes.

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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..spelling import unknown_name
from .graph_text import GraphNode, fx_nodes, model_text, onnx_nodes, without_freeing
from .reading import DumpedGraph, DumpError, Run

FX_STAGES = ("dynamo", "pre_grad", "joint", "aten", "post_grad")
"""Stages that are FX graphs; the first three are of Dynamo's graph, which its forward and its backward share."""

ONNX_STAGES = {"onnx": "model.onnx", "onnx_optimized": "model.optimized.onnx", "session": "model.session.onnx"}
"""Stages that are an ONNX model for each region, with the file of the region's folder."""

STAGES = (*FX_STAGES, *ONNX_STAGES)
"""All that can be shown, in order."""


@dataclasses.dataclass(frozen=True)
class Stage:
    """A stage of a graph.

    Attributes:
        name: one of ``STAGES``.
        nodes: how many operators its graph has; of an ONNX stage, of all regions.
        file: its file in the run folder, of an ONNX stage a pattern; ``None`` if it changed nothing.
        same_as: the earlier stage whose file shows it, if it changed nothing.
    """

    name: str
    nodes: int
    file: str | None
    same_as: str | None = None


@dataclasses.dataclass(frozen=True)
class StageGraph:
    """The graph of a stage, or of a region in an ONNX stage.

    Attributes:
        path: the file that it is in.
        file: the same in the run folder, for people.
        text: it as text: Python for FX.
        region: which region; ``None`` for an FX graph.
        names: what the user calls the arguments of the graph, by their FX names.
    """

    path: Path
    file: str
    text: str
    region: int | None = None
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def nodes(self) -> list[GraphNode]:
        """Its nodes, with inputs, initializers and outputs."""
        if self.region is None:
            return fx_nodes(self.text)
        known = {**self.names, **{name: name for name in self.names.values()}}  # a model's weights bear them already
        return [
            dataclasses.replace(node, user_name=known.get(node.name, ""))
            if node.kind in ("input", "initializer")
            else node
            for node in onnx_nodes(_model(self.path))
        ]

    @property
    def operators(self) -> int:
        """How many nodes it has without inputs, initializers and outputs."""
        return sum(node.kind == "node" for node in self.nodes)


def check_stage(name: str) -> str:
    """The name of a stage.

    Raises:
        DumpError: there is none of that name; the message has those that are near.
    """
    if name not in STAGES:
        raise DumpError(unknown_name("stage", name, STAGES))
    return name


def stages_of(run: Run, graph: DumpedGraph) -> list[Stage]:
    """The stages that a graph went through, in order.

    Raises:
        DumpError: a file of one cannot be read.
    """
    found = []
    for name in FX_STAGES:
        entry = _entry(run, graph, name)
        if entry is not None:
            with run.reading_manifest():
                found.append(Stage(name, int(entry["nodes"]), entry["file"], entry["same_as"]))
    for name, file in ONNX_STAGES.items():
        if all((region.folder / file).exists() for region in graph.regions) and graph.regions:
            nodes = sum(item.operators for item in stage_graphs(run, graph, name))
            places = [f"region_{region.index}" for region in graph.regions]
            place = places[0] if len(places) == 1 else f"region_{{{','.join(str(r.index) for r in graph.regions)}}}"
            found.append(Stage(name, nodes, f"{graph.reference}/{place}/{file}"))
    return found


def stage_graphs(run: Run, graph: DumpedGraph, name: str) -> list[StageGraph]:
    """The graph of a stage, or those of the regions.

    Args:
        run: the run.
        graph: a graph of it.
        name: one of ``STAGES``; one that changed nothing gives the graph of the stage before it.

    Raises:
        DumpError: there is no such stage, the graph did not go through it, or its file cannot be read.
    """
    check_stage(name)
    if name in ONNX_STAGES:
        if not graph.regions:
            raise DumpError(
                f"{graph.reference} has no stage {name}: nothing of it ran on ONNX Runtime; "
                f"{graph.folder / 'regions.txt'} says why"
            )
        found = []
        for region in graph.regions:
            path = region.folder / ONNX_STAGES[name]
            file = f"{graph.reference}/region_{region.index}/{path.name}"
            found.append(StageGraph(path, file, model_text(_model(path)), region.index, graph.entry["names"]))
        return found
    entry = _entry(run, graph, name)
    if entry is not None and entry["same_as"] is not None:
        entry = _entry(run, graph, entry["same_as"])
    if entry is None or entry["file"] is None:
        have = [stage for stage in FX_STAGES if _entry(run, graph, stage) is not None]
        raise DumpError(f"{graph.reference} did not go through the stage {name}; it has {', '.join(have)}")
    path = run.folder / entry["file"]
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise DumpError(f"{path} cannot be read: {error}; dump again") from None
    return [StageGraph(path, entry["file"], without_freeing(text))]


def _entry(run: Run, graph: DumpedGraph, name: str) -> Mapping[str, Any] | None:
    """What the manifest says of a stage that is an FX graph."""
    owner: Mapping[str, Any] | None = graph.entry
    if name in ("dynamo", "pre_grad", "joint"):
        with run.reading_manifest():
            owner = next((entry for entry in run.manifest["dynamo_graphs"] if entry["index"] == graph.index), None)
    with run.reading_manifest():
        return next((entry for entry in (owner["stages"] if owner is not None else []) if entry["name"] == name), None)


@functools.lru_cache(maxsize=16)
def _model(path: Path) -> Any:
    """An ONNX model, whose large weights are not read.

    Raises:
        DumpError: it is not there, or damaged.
    """
    import onnx_ir as ir
    from google.protobuf.message import DecodeError

    try:
        return ir.load(path)
    except FileNotFoundError:
        raise DumpError(f"{path} is not there: the dump is incomplete") from None
    except (DecodeError, ValueError, OSError, TypeError) as error:
        raise DumpError(f"{path} is damaged: {error}; dump again") from None
