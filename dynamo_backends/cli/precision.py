"""``dynamo-backends precision GRAPH``: the nodes of a float16 or bfloat16 graph that must compute in float32."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..common.text_table import fit_table
from .common import add_graph_arguments, count_text, for_each_graph, say, try_again, try_next

if TYPE_CHECKING:
    from ..dumps.precision import RegionPrecision, ResultError
    from ..dumps.reading import DumpedGraph

DETAILS = (
    "The set is minimal. Exit code 1: a graph whose verdict is not ok needs such nodes, or is wrong in float32 too."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_graph_arguments(parser)
    parser.add_argument(
        "--strict",
        action="store_true",
        help="also search a graph whose verdict is ok: what low precision adds up to may be far from float64",
    )


def run(arguments: argparse.Namespace) -> int:
    from ..dumps.precision import find_precision

    return for_each_graph(
        arguments,
        lambda graph: find_precision(graph, strict=arguments.strict, progress=say),
        text=lambda graph, regions: _text(graph, regions, arguments),
        is_wrong=lambda regions: any(region.outcome not in ("ok", "not low") for region in regions),
    )


def _text(graph: DumpedGraph, regions: Sequence[RegionPrecision], arguments: argparse.Namespace) -> str:
    low = [region for region in regions if region.outcome != "not low"]
    if not low:
        return f"{graph.name}: no node computes in float16 or bfloat16 on ONNX Runtime\n"
    return "\n".join(_region(graph, region, arguments) for region in low)


def _region(graph: DumpedGraph, region: RegionPrecision, arguments: argparse.Namespace) -> str:
    where = f"{graph.name}, region_{region.region}"
    if region.outcome == "ok":
        hint = "" if arguments.strict else "\n" + try_again(arguments, "--strict")
        number = count_text(region.candidates, "node")
        return f"{where}: no node needs float32; the results are right with {number} in low precision{hint}\n"
    if region.outcome == "not precision":
        lines = [f"{where}: not a matter of precision; the results are wrong with all nodes in float32"]
    else:
        minimal = "a smaller set may exist" if region.outcome == "unfinished" else "none can be left out"
        number = f"{len(region.nodes)} of {region.candidates}"
        lines = [f"{where}: {number} nodes must compute in float32; {minimal} ({region.tried} sets tried)"]
        rows = [(node.fx_node, node.operator.removeprefix("aten."), node.module, node.source) for node in region.nodes]
        lines += ["", fit_table(rows, ["node", "operator", "module", "source"])]
    lines += ["", _errors(region.before, region.after, region.reference), ""]
    if region.nodes:
        modules = ", ".join(dict.fromkeys(node.module or "the model itself" for node in region.nodes))
        lines += [
            f"to fix: compute these lines in float32, in {modules}:",
            "convert inputs and weights with .float() and the result with .to(dtype); under autocast, inside",
            "    with torch.autocast(device_type, enabled=False):",
        ]
    else:
        lines.append(try_next(arguments, "bisect", graph.reference))
    return "\n".join(lines) + "\n"


def _errors(before: Sequence[ResultError], after: Sequence[ResultError], reference: str) -> str:
    rows = [
        (old.name, old.dtype, _number(old.error), _number(new.error), f"{old.allowed:.2e}")
        for old, new in zip(before, after, strict=True)
    ]
    return fit_table(rows, ["result", "type", f"error to {reference}", "in float32", "tolerance"])


def _number(error: float) -> str:
    return f"{error:.2e}" if math.isfinite(error) else "NaN/Inf"
