"""The models that a reference on the command line names: files, and regions of graphs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from .feeds import DATA_SET
from .models import load_model
from .reading import DumpError, find_run


@dataclasses.dataclass(frozen=True)
class Target:
    """A model to compare, and what it was run with.

    Attributes:
        path: its file.
        name: for messages.
        data: a folder with stored inputs, or ``None``.
    """

    path: Path
    name: str
    data: Path | None


def targets_of(reference: str, dump: str | None, stage: str = "onnx") -> list[Target]:
    """The models that a reference names.

    Args:
        reference: a file; a graph or region of the dump (``0/forward``, ``graph_000/forward/region_1``); or the path of
            one in any dump.
        dump: the dump folder; ``None`` for the default one.
        stage: of a dump's models: ``onnx``, ``onnx_optimized`` or ``session``.

    Raises:
        DumpError: there is none.
    """
    path = Path(reference)
    if path.is_file():
        return [Target(path, reference, _data_set(path.parent))]
    if path.suffix == ".onnx":
        raise DumpError(f"{reference} does not exist")
    run = find_run(path if path.is_dir() else dump)
    found = []
    for graph, region in run.regions_of(reference):
        model = {"onnx": region.model, "onnx_optimized": region.optimized_model, "session": region.session_model}[stage]
        found.append(Target(model, f"{graph.reference}/region_{region.index}", _data_set(region.folder)))
    return found


def paired(first: Sequence[Target], second: Sequence[Target]) -> tuple[list[tuple[Target, Target]], list[Target]]:
    """Which models are compared with each other, and those that are left out.

    As many of both are each other's in their order. Else, after a change that splits a graph otherwise, those that
    compute the most values of the same names are, and the rest is left out.

    Raises:
        DumpError: a file cannot be read.
    """
    if len(first) == len(second):
        return list(zip(first, second, strict=True)), []
    names = {target: _computed(target) for target in (*first, *second)}
    shares = {(one, other): _alike(names[one], names[other]) for one in first for other in second}
    left, free = list(first), list(second)
    pairs: list[tuple[Target, Target]] = []
    for one, other in sorted(shares, key=lambda pair: -shares[pair]):  # of equals the first
        if one in left and other in free:
            pairs.append((one, other))
            left.remove(one)
            free.remove(other)
    return sorted(pairs, key=lambda pair: first.index(pair[0])), [*left, *free]


def _computed(target: Target) -> set[str]:
    return {name for node in load_model(target.path).proto.graph.node for name in node.output if name}


def _alike(one: set[str], other: set[str]) -> float:
    """How many of the names are in both."""
    return len(one & other) / len(one | other) if one | other else 0.0


def _data_set(folder: Path) -> Path | None:
    inner = folder / DATA_SET
    return inner if inner.is_dir() else None
