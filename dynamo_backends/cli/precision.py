"""``dynamo-backends precision GRAPH``: the nodes of a float16 or bfloat16 graph that must stay in float32."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..common.text_table import fit_table
from .common import add_graph_arguments, for_each_graph, say, try_again, try_next

if TYPE_CHECKING:
    from ..dumps.precision import RegionPrecision, ResultError
    from ..dumps.reading import DumpedGraph


DESCRIPTION = (
    "For a float16 or bfloat16 graph whose verdict is not ok: the smallest set of nodes that must "
    "compute in float32 for its results to be right. Exit code 1 if there is one, or if precision does not explain "
    "the verdict."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the subcommand's arguments."""
    add_graph_arguments(parser)
    parser.add_argument(
        "--strict",
        action="store_true",
        help="also where the verdict is ok because eager is as inaccurate: results must be those of float64, rounded",
    )


def run(arguments: argparse.Namespace) -> int:
    """Shows the nodes; returns the exit code."""
    from ..dumps.precision import find_precision

    return for_each_graph(
        arguments,
        lambda graph: find_precision(graph, strict=arguments.strict, progress=say),
        text=lambda graph, regions: _text(graph, regions, arguments),
        is_wrong=lambda regions: any(item.outcome not in ("ok", "not low") for item in regions),
    )


def _text(graph: DumpedGraph, regions: Sequence[RegionPrecision], arguments: argparse.Namespace) -> str:
    if all(item.outcome == "not low" for item in regions):
        return f"{graph.name}: nothing of it is in float16 or bfloat16 on ONNX Runtime\n"
    return "\n".join(_region(graph, item, arguments) for item in regions if item.outcome != "not low")


def _region(graph: DumpedGraph, found: RegionPrecision, arguments: argparse.Namespace) -> str:
    where = f"{graph.name}, region_{found.region}"
    if found.outcome == "ok":
        hint = "" if arguments.strict else "\n" + try_again(arguments, "--strict")
        number = f"{found.candidates} node{'s' if found.candidates != 1 else ''}"
        return f"{where}: no node needs float32, the outputs are right with {number} in low precision{hint}\n"
    if found.outcome == "not precision":
        lines = [f"{where}: precision does not explain it: the results are wrong with all nodes in float32"]
    else:
        least = "there may be a smaller set" if found.outcome == "unfinished" else "and none of them can be left out"
        number = f"{len(found.nodes)} of {found.candidates}"
        lines = [f"{where}: {number} nodes must stay in float32, {least} ({found.tried} tried)"]
        rows = [(item.fx_node, item.operator.removeprefix("aten."), item.module, item.source) for item in found.nodes]
        lines += ["", fit_table(rows, ["node", "operator", "module", "source"])]
    lines += ["", _errors(found.before, found.after, found.reference), ""]
    if found.nodes:
        modules = list(dict.fromkeys(item.module for item in found.nodes))
        named = ", ".join(module or "the model itself" for module in modules)
        lines += [
            f"to apply: compute these lines in float32, in {named}:",
            "of values and weights take .float(), give the result its dtype back with .to(dtype), and under autocast",
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
    return fit_table(rows, ["result", "type", f"error to {reference}", "then", "allowed"])


def _number(error: float) -> str:
    return f"{error:.2e}" if math.isfinite(error) else "NaN/Inf"
