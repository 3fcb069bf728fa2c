"""Where each operator of PyTorch's database runs: on ONNX Runtime, in part there, or in PyTorch, and why.

The first sample of each entry, float32 or, for an entry without it, its first dtype, as an inference graph with
``placement="onnx"``. Run as a script it writes the table of the documentation::

    python tests/operator_coverage.py                    # writes docs/operators.md
    python tests/operator_coverage.py --only sort,fmod   # prints these rows

A node in PyTorch is of a class, by its schema, tags and dtypes: ``random`` (or memory without values), ``complex``,
``view``, ``in place``; ``linear algebra`` are decompositions and solvers, which ONNX does not have. An entry whose nodes
in PyTorch are all of such classes counts as one of them; all others are what should run whole on ONNX Runtime.
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

import torch
from operators import call, copy_of, entries, first_dtype, samples, seed
from torch import fx
from torch.utils import _pytree as pytree

from dynamo_backends.aliases import is_view
from dynamo_backends.artifacts import GraphName, Split, is_operator
from dynamo_backends.observer import Observer
from dynamo_backends.options import Options
from dynamo_backends.pipeline import Pipeline
from dynamo_backends.reasons import Kind, Reason

DOCUMENT = Path(__file__).parents[1] / "docs" / "operators.md"

_LINEAR_ALGEBRA = {
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
    """Compiles the first sample of an entry, and says where its operators run."""
    op = entries()[name]
    if "jiterator" in name or not op.supported_dtypes("cpu"):
        return Row(name, "", "PyTorch", "not on the CPU", "for CUDA alone")
    dtype = first_dtype(op)
    text = str(dtype).removeprefix("torch.")
    sample = next(samples(op, dtype))
    arguments = copy_of((sample.input, sample.args, sample.kwargs))
    observer = _Splits()
    pipeline = Pipeline(Options(placement="onnx", cache=False), observer)
    torch._dynamo.reset()
    seed()
    with torch.no_grad():
        compiled = torch.compile(lambda given: call(op, given), backend=pipeline.compile_dynamo_graph, dynamic=False)
        compiled(arguments)
    in_pytorch: dict[tuple[str, Reason], str] = {}
    on_onnx = 0
    for split in observer.splits:
        on_onnx += split.coverage.on_onnx
        for node, reason in split.coverage.in_pytorch.items():
            in_pytorch[str(node.target).removeprefix("aten."), reason] = _class(node, reason)
    kinds = sorted(set(in_pytorch.values()))
    why = "; ".join(f"`{target}`: {reason}" for target, reason in in_pytorch)
    if not in_pytorch and not on_onnx:
        if observer.splits or not _has_tensors(arguments):
            return Row(name, text, "nothing to compute", "nothing to compute", "")
        return Row(name, text, "PyTorch", "", "Dynamo does not capture it, or captures no operator")
    where = "ONNX" if not in_pytorch else "in part" if on_onnx else "PyTorch"
    return Row(name, text, where, "" if "" in kinds else " and ".join(kinds), why)


def _has_tensors(arguments: object) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(arguments))


def _class(node: fx.Node, reason: Reason) -> str:
    """The class of a node that runs in PyTorch; an empty text if it should not."""
    target = node.target
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
    """How many entries run where, by class."""
    counts = collections.Counter(row.where for row in rows)
    kinds = collections.Counter(row.kind for row in rows if row.kind)
    counted = [row for row in rows if not row.kind]
    whole = sum(row.where == "ONNX" for row in counted)
    left_out = ", ".join(f"{number} {kind}" for kind, number in sorted(kinds.items()))
    return (
        f"Of {len(rows)} entries {counts['ONNX']} run whole on ONNX Runtime, {counts['in part']} in part, "
        f"{counts['PyTorch']} in PyTorch, and {counts['nothing to compute']} compute nothing. Left out of the share are "
        f"{left_out}. Of the other {len(counted)} entries {whole} run whole: {100 * whole / max(len(counted), 1):.1f} %."
    )


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


if __name__ == "__main__":
    sys.exit(main())
