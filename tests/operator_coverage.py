"""Where each operator of PyTorch's database runs: on ONNX Runtime, partly, or in PyTorch, and why.

The first sample of each entry whose tensors have elements runs as an inference graph with ``placement="onnx"``, in
float32, or in its first dtype if it has no float32. As a script it writes the table of the documentation::

    python tests/operator_coverage.py                    # writes docs/operators.md
    python tests/operator_coverage.py --only sort,fmod   # prints these rows

A node in PyTorch has a class, by its schema, tags and dtypes: ``random`` (also uninitialized memory), ``complex``,
``view``, ``in place``, ``linear algebra`` (decompositions and solvers, which ONNX does not have). If all nodes of an
entry that run in PyTorch have such a class, the entry has it too. ``graph break`` is an operator that Dynamo passes to
no backend, since its result is not a tensor or its shape depends on values. The other nodes have no class: operators
without a converter of ours, such as special functions, which no model of ``architectures.py`` uses.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import logging
import multiprocessing
import sys
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path

import onnxruntime
import tabulate
import torch
from operators import call, copy_of, entries, first_dtype, is_random, samples, seed
from torch import fx
from torch._dynamo.utils import counters
from torch.utils import _pytree as pytree

from dynamo_backends.errors import Kind, Reason
from dynamo_backends.graphs.artifacts import GraphName, Split
from dynamo_backends.options import Options
from dynamo_backends.pipeline.observer import Observer
from dynamo_backends.pipeline.pipeline import Pipeline
from passes.engine.fx.editing import is_view

DOCUMENT = Path(__file__).parents[1] / "docs" / "operators.md"

_LINEAR_ALGEBRA = {
    "_linalg_check_errors",
    "_linalg_det",
    "_linalg_eigh",
    "_linalg_eigvals",
    "_linalg_slogdet",
    "_linalg_solve_ex",
    "_linalg_svd",
    "cholesky",
    "cholesky_inverse",
    "cholesky_solve",
    "geqrf",
    "linalg_cholesky_ex",
    "linalg_eig",
    "linalg_householder_product",
    "linalg_inv_ex",
    "linalg_ldl_factor_ex",
    "linalg_ldl_solve",
    "linalg_lstsq",
    "linalg_lu",
    "linalg_lu_factor_ex",
    "linalg_lu_solve",
    "linalg_matrix_exp",
    "linalg_pinv",
    "linalg_qr",
    "linalg_solve_triangular",
    "lu_unpack",
    "ormqr",
    "triangular_solve",
}
"""ATen operators that factorize a matrix or solve with one; ONNX has ``Det`` alone, which ONNX Runtime computes in
float32 by another order of operations than LAPACK."""


@dataclasses.dataclass(frozen=True)
class Row:
    """Where the operators of an entry run.

    Attributes:
        name: of the entry.
        dtype: of the sample, as ``float32``.
        where: ``ONNX``, ``in part``, ``PyTorch``, or ``nothing to compute``.
        kind: of what runs in PyTorch: a class that is left out of the share, or an empty text.
        why: what runs in PyTorch, with the reasons.
    """

    name: str
    dtype: str
    where: str
    kind: str
    why: str


class _Splits(Observer):
    """Keeps the split of each graph."""

    def __init__(self) -> None:
        self.splits: list[Split] = []

    def stage(self, name: str, graph: GraphName, artifact: object) -> None:
        if name == "regions":
            assert isinstance(artifact, Split)
            self.splits.append(artifact)


def measure(name: str) -> Row:
    """Compiles a sample of an entry, and says where its operators run."""
    op = entries()[name]
    if "jiterator" in name or not op.supported_dtypes("cpu"):
        return Row(name, "", "PyTorch", "not on the CPU", "eager has no kernel for the CPU")
    dtype = first_dtype(op)
    text = str(dtype).removeprefix("torch.")
    sample = next((item for item in samples(op, dtype, None) if _has_elements(item)), None)
    if sample is None:
        sample = next(samples(op, dtype))
    arguments = copy_of((sample.input, sample.args, sample.kwargs))
    observer = _Splits()
    pipeline = Pipeline(Options(placement="onnx", cache=False), observer)
    torch._dynamo.reset()
    counters.clear()
    seed()
    with torch.no_grad():
        compiled = torch.compile(lambda given: call(op, given), backend=pipeline.compile_dynamo_graph, dynamic=False)
        compiled(arguments)
    in_pytorch: dict[tuple[str, str], str] = {}
    on_onnx = 0
    for split in observer.splits:
        on_onnx += split.coverage.on_onnx
        for node, reason in split.coverage.in_pytorch.items():
            target = _target(node)
            in_pytorch[str(target).removeprefix("aten."), str(reason)] = _class(node, reason)
    kinds = sorted(set(in_pytorch.values()))
    why = "; ".join(f"`{target}`: {reason}" for target, reason in in_pytorch)
    if not in_pytorch and not on_onnx:
        if is_random(op, sample):
            return Row(name, text, "PyTorch", "random", "random numbers come from PyTorch's generator")
        breaks = [_sentence(reason) for reason in counters["graph_break"]]
        if breaks:
            return Row(name, text, "PyTorch", "graph break", "; ".join(breaks))
        return Row(name, text, "nothing to compute", "nothing to compute", "")
    where = "ONNX" if not in_pytorch else "in part" if on_onnx else "PyTorch"
    return Row(name, text, where, "" if "" in kinds else " and ".join(kinds), why)


def _has_elements(value: object) -> bool:
    arguments = (value.input, value.args, value.kwargs)  # type: ignore[attr-defined]
    return all(leaf.numel() for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor))


def _sentence(graph_break: str) -> str:
    """What Dynamo says of a graph break, without its advice."""
    lines = [line.strip() for line in graph_break.splitlines()]
    explained = [line.removeprefix("Explanation: ") for line in lines if line.startswith("Explanation: ")]
    return explained[0] if explained else lines[0]


def _target(node: fx.Node) -> object:
    """The operator of a node; what a wrapper of PyTorch for side effects calls."""
    return node.args[1] if node.target is torch.ops.higher_order.with_effects else node.target


def _class(node: fx.Node, reason: Reason) -> str:
    """The class of a node that runs in PyTorch; an empty text if it has none."""
    target = _target(node)
    if reason.kind in (Kind.RANDOM, Kind.UNINITIALIZED):
        return "random"
    if any(value.is_complex() for value in _tensors(node)):
        return "complex"
    if reason.kind is Kind.SHARED_MEMORY or is_view(target):
        return "view"
    if isinstance(target, torch._ops.OpOverload):
        if target._schema.is_mutable:
            return "in place"
        if target._schema.name.partition("::")[2] in _LINEAR_ALGEBRA:
            return "linear algebra"
    return ""


def _tensors(node: fx.Node) -> Iterable[torch.Tensor]:
    values = [node.meta.get("val"), *(arg.meta.get("val") for arg in node.all_input_nodes)]
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def measure_all(names: Sequence[str], jobs: int) -> list[Row]:
    """The rows of entries, in the order of their names."""
    context = multiprocessing.get_context("fork")
    with concurrent.futures.ProcessPoolExecutor(jobs, context, initializer=_start) as pool:
        return list(pool.map(_measure, sorted(names)))


def _start() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


def _measure(name: str) -> Row:
    try:
        return measure(name)
    except Exception as error:
        text = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        return Row(name, "", "error", "", text)


def summary(rows: Sequence[Row]) -> str:
    """How many entries run where, and of which classes those are that run in PyTorch."""
    counts = collections.Counter(row.where for row in rows)
    kinds = collections.Counter(row.kind or "of no class" for row in rows if row.where in ("PyTorch", "in part"))
    classes = ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items()))
    return (
        f"Of {len(rows)} entries {counts['ONNX']} run whole on ONNX Runtime, {counts['in part']} in part, "
        f"{counts['PyTorch']} in PyTorch, and {counts['nothing to compute']} compute nothing.\n"
        f"In PyTorch or in part: {classes or 'none'}.\n"
    )


def document(rows: Sequence[Row]) -> str:
    """The page of the documentation."""
    cells = [
        (f"`{row.name}`", row.dtype, row.where, row.kind, " ".join(row.why.replace("|", "\\|").split())[:300])
        for row in rows
    ]
    headers = ["entry", "dtype", "runs on", "class", "in PyTorch, and why"]
    table = tabulate.tabulate(cells, headers=headers, tablefmt="pipe")
    lines = (" ".join(line.split()) for line in table.splitlines())
    versions = f"PyTorch {torch.__version__.split('+')[0]}, ONNX Runtime {onnxruntime.__version__}"
    return f"""# Where each operator runs

For users who ask where an operator runs: each entry of PyTorch's operator database (`op_db`), as inference with
`placement="onnx"`, with {versions}. `in part` means that some nodes run in PyTorch; the last column
names them. Operators that models hardly use, such as special functions, cumulative maxima and medians, run in PyTorch
because it is faster. `python tests/operator_coverage.py` writes this page, and defines the classes.

{summary(rows)}
{chr(10).join(lines)}
"""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    names = options.only.split(",") if options.only else list(entries())
    rows = measure_all(names, options.jobs)
    for row in rows:
        if options.only or (row.where != "ONNX" and not row.kind):
            print(f"{row.name} ({row.dtype}): {row.where} {row.kind} {row.why}")
    print(summary(rows))
    if not options.only:
        DOCUMENT.write_text(document(rows))


if __name__ == "__main__":
    sys.exit(main())
