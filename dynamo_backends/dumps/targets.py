"""The models that a reference on the command line names: files, and regions of graphs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from .models import load_model
from .reading import DATA_SET, DumpError, find_run


@dataclasses.dataclass(frozen=True)
class Target:
    """A model to compare: its file, its name for messages, and a folder with stored inputs or ``None``."""

    path: Path
    name: str
    data: Path | None

    @classmethod
    def of(cls, path: Path, name: str, folder: Path) -> Target:
        """A model with the data in a folder, if there are any."""
        return cls(path, name, folder / DATA_SET if (folder / DATA_SET).is_dir() else None)


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
        return [Target.of(path, reference, path.parent)]
    if path.suffix == ".onnx":
        raise DumpError(f"{reference} does not exist")
    run = find_run(path if path.is_dir() else dump)
    found = []
    for graph, region in run.regions_of(reference):
        model = {"onnx": region.model, "onnx_optimized": region.optimized_model, "session": region.session_model}[stage]
        found.append(Target.of(model, f"{graph.reference}/region_{region.index}", region.folder))
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
    names = {}
    for target in (*first, *second):
        nodes = load_model(target.path).proto.graph.node
        names[target] = {name for node in nodes for name in node.output if name}
    alike = {
        (one, other): len(names[one] & names[other]) / max(1, len(names[one] | names[other]))
        for one in first
        for other in second
    }
    pairs: list[tuple[Target, Target]] = []
    left = [*first, *second]
    for one, other in sorted(alike, key=lambda pair: -alike[pair]):  # of equals the first
        if one in left and other in left:
            pairs.append((one, other))
            left = [target for target in left if target not in (one, other)]
    return sorted(pairs, key=lambda pair: first.index(pair[0])), left
