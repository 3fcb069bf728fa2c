"""``dynamo-backends precision GRAPH``: the nodes of a float16 or bfloat16 graph that must compute in float32."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..common.text_table import fit_table
from .common import add_graph_arguments, count_text, for_each_graph, say, try_next

if TYPE_CHECKING:
    from ..dumps.precision import Precision, ResultError
    from ..dumps.reading import DumpedGraph

DETAILS = (
    "The set is minimal. All nodes run in PyTorch, on the recorded arguments. Exit code 1: a result needs such nodes, "
    "is wrong in float32 too, or is not finite in float64."
)

add_arguments = add_graph_arguments


def run(arguments: argparse.Namespace) -> int:
    from ..dumps.precision import find_precision

    return for_each_graph(
        arguments,
        lambda graph: find_precision(graph, progress=say),
        text=lambda graph, found: _text(graph, found, arguments),
        is_wrong=lambda found: found.outcome not in ("ok", "not low"),
    )


def _text(graph: DumpedGraph, found: Precision, arguments: argparse.Namespace) -> str:
    number = f"{count_text(found.candidates, 'node')} in low precision, {found.in_pytorch} of them in PyTorch"
    if found.outcome == "not low":
        return f"{graph.name}: no node computes in float16 or bfloat16\n"
    if found.outcome == "ok":
        lines = [f"{graph.name}: no node needs float32; the results are right with {number}"]
    elif found.outcome == "not finite":
        lines = [f"{graph.name}: not a matter of precision; the results are NaN or infinite in float64, too"]
    elif found.outcome == "not precision":
        lines = [f"{graph.name}: float32 is not enough; the results are wrong with all nodes in float32, too"]
    else:
        needed = f"{len(found.nodes)} of {number}"
        lines = [f"{graph.name}: {needed}, must compute in float32; none can be left out"]
        rows = [(node.name, node.operator.removeprefix("aten."), node.module, node.source) for node in found.nodes]
        lines += ["", fit_table(rows, ["node", "operator", "module", "source"])]
    lines += ["", _errors(found.before, found.after), ""]
    if found.nodes:
        modules = ", ".join(dict.fromkeys(node.module or "the model itself" for node in found.nodes))
        lines += [
            f"to fix: compute these lines in float32, in {modules}:",
            "convert inputs and weights with .float() and the result with .to(dtype); under autocast, inside",
            "    with torch.autocast(device_type, enabled=False):",
        ]
    elif found.outcome != "ok":
        lines.append(try_next(arguments, "nan" if found.outcome == "not finite" else "bisect", graph.reference))
    return "\n".join(lines) + "\n"


def _errors(before: Sequence[ResultError], after: Sequence[ResultError]) -> str:
    rows = [
        (old.name, old.dtype, _number(old.error), _number(new.error), f"{old.allowed:.2e}")
        for old, new in zip(before, after, strict=True)
    ]
    return fit_table(rows, ["result", "type", "error to float64", "with these in float32", "tolerance"])


def _number(error: float | None) -> str:
    return "NaN/Inf" if error is None else f"{error:.2e}"
