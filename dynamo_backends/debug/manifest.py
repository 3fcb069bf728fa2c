"""``manifest.json``: what was compiled and compared, for a person's first look and for programs."""

from __future__ import annotations

import dataclasses
import datetime
import json
import platform
import threading
from collections.abc import Mapping, Sequence
from importlib import metadata

from torch._dynamo.utils import counters

from passes.engine.manager import PassResult

from ..exporter.locations import source_line
from ..observer import GraphName
from ..options import Options
from ..pipeline import CompiledGraph
from ..regions import is_operator
from .dump_folder import DumpFolder, graph_folder
from .repeat import RepeatedRegion
from .rows import OK, GraphComparison

SCHEMA_VERSION = 1

_PACKAGES = ("dynamo-backends", "torch", "onnx", "onnxruntime", "onnxscript", "onnx-ir", "numpy", "transformers")


@dataclasses.dataclass(frozen=True)
class Cost:
    """Where one run spent its time, and what crossed between ONNX Runtime and PyTorch.

    Attributes:
        region_milliseconds: wall time of each region's call, by its index.
        pytorch_milliseconds: wall time of all nodes in PyTorch.
        crossing_tensors: values that one region computes and another or PyTorch reads, or the reverse.
        crossing_bytes: their size.
    """

    region_milliseconds: dict[int, float]
    pytorch_milliseconds: float
    crossing_tensors: int
    crossing_bytes: int


class Manifest:
    """The manifest of one dump folder; written anew, atomically, at each change."""

    def __init__(self, folder: DumpFolder) -> None:
        self._folder = folder
        self._lock = threading.RLock()
        self._started = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        self._graphs: dict[GraphName, dict[str, object]] = {}
        self._options: dict[str, object] = {}
        self._dynamo_graphs: dict[int, list[dict[str, object]]] = {}

    def add_passes(self, graph: GraphName, results: Sequence[PassResult]) -> None:
        """What the passes of ``pre_grad`` or ``joint`` did to a Dynamo graph; it is in the file with the next write."""
        with self._lock:
            self._dynamo_graphs.setdefault(graph.index, []).extend(map(_pass_as_json, results))

    def add_graph(self, graph: CompiledGraph, options: Options) -> None:
        """A graph that compiled, not yet run."""
        split = graph.split
        on_onnx = sum(1 for region in split.regions for node in region.nodes if is_operator(node))
        in_pytorch = [(node, reason) for node, reason in split.in_pytorch.items() if is_operator(node)]
        folder = graph_folder(graph.name)
        entry: dict[str, object] = {
            "index": graph.name.index,
            "direction": graph.name.direction,
            "folder": folder,
            "nodes": on_onnx + len(in_pytorch),
            "nodes_on_onnx": on_onnx,
            "share_on_onnx": split.share,
            "regions": [
                {
                    "index": item.region.index,
                    "folder": f"{folder}/region_{item.region.index}",
                    "nodes": sum(1 for node in item.region.nodes if is_operator(node)),
                    "onnx_nodes": len(item.model.graph),
                    "onnx_nodes_optimized": len(item.optimized_model.graph) if item.optimized_model else None,
                    "passes": [_pass_as_json(result) for result in item.passes],
                }
                for item in graph.regions
            ],
            "in_pytorch": [
                {"node": node.name, "operator": str(node.target), "reason": reason, "source": source_line(node)}
                for node, reason in in_pytorch
            ],
            "passes": [_pass_as_json(result) for result in graph.passes],
            "runs": 0,
            "status": "compiled",
            "verdict": None,
            "note": "",
            "worst": None,
        }
        with self._lock:
            self._options = _options_as_json(options)
            self._graphs[graph.name] = entry
            self._write()

    def count_run(self, name: GraphName) -> None:
        """A run that was not compared; it is in the file with the next write."""
        with self._lock:
            entry = self._graphs[name]
            entry["runs"] = int(entry["runs"]) + 1  # type: ignore[call-overload]

    def add_comparison(
        self, name: GraphName, comparison: GraphComparison, repeated: Mapping[int, RepeatedRegion], cost: Cost
    ) -> None:
        """A compared run and its cost. A verdict that is not ``ok`` stays: a later run does not hide it."""
        with self._lock:
            entry = self._graphs[name]
            entry["status"] = "compared"
            entry["cost"] = dataclasses.asdict(cost)
            entry["repeated"] = {
                str(index): {"differing_outputs": len(item.unstable), "failure": item.failure}
                for index, item in repeated.items()
            }
            if entry["verdict"] in (None, OK):
                entry.update(verdict=comparison.verdict, note=comparison.note, worst=comparison.worst_as_json())
            self._write()

    def _write(self) -> None:
        content = {
            "schema_version": SCHEMA_VERSION,
            "started": self._started,
            "versions": {"python": platform.python_version(), **_versions()},
            "options": self._options,
            "dynamo_graphs": [
                {"index": index, "passes": passes} for index, passes in sorted(self._dynamo_graphs.items())
            ],
            "graphs": [self._graphs[name] for name in sorted(self._graphs, key=lambda name: (name.index, _rank(name)))],
            "counters": dict(counters["dynamo_backends"]),
        }
        self._folder.write_text("manifest.json", json.dumps(content, indent=1))


def _rank(name: GraphName) -> int:
    return ("", "inference", "forward", "backward").index(name.direction)


def _pass_as_json(result: PassResult) -> dict[str, object]:
    return {**dataclasses.asdict(result), "milliseconds": round(result.milliseconds, 3)}


def _options_as_json(options: Options) -> dict[str, object]:
    return dataclasses.asdict(options)


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:  # transformers is optional, onnxruntime has other names
            continue
    return found
