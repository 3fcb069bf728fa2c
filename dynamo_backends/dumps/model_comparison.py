"""Compares two ONNX models: runs both on the same inputs, aligns their values, and names the first that diverges.

::

    first, second = load_model("before.onnx"), load_model("after.onnx")
    comparison = compare(first, second, generated_inputs(first, sizes={}, seed=0), Runtime())
    comparison.verdict          # "ok", or "diverges at gelu (Gelu): …"
    comparison.rows             # a row for each value, aligned

**Alignment.** Inputs, initializers and constants correspond by name, content, or type and shape
(``model_inputs.py``); results by name, value, or operator; outputs by name, value, or type (``model_rows.py``).

**Tolerance.** Neither model is the reference. The rounding error of each value is measured: the first model runs once
more with all floating-point inputs and weights perturbed by one unit of rounding. The models diverge if an output
differs by more than that explains, see ``value_differences.py``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from .model_inputs import computed_inputs, read_feeds, same_inputs
from .model_rows import AlignedRow, aligned_rows, first_different
from .model_sessions import random_operators
from .model_values import Runtime, coarsest_unit, perturbed_values, run_model
from .models import OnnxModel, load_model
from .reading import DATA_SET, DumpError, find_run
from .value_differences import EQUAL, ONLY_FIRST, ONLY_SECOND, ROUNDING, OnnxValue


@dataclasses.dataclass(frozen=True)
class ModelComparison:
    """The result of comparing two models."""

    names: tuple[str, str]  # of the models
    rows: Sequence[AlignedRow]  # initializers and inputs, then results in the order of the first model, then outputs
    first_different: AlignedRow | None  # the row at which they begin to diverge
    notes: Sequence[str]  # such as how inputs were matched, or which were generated
    measured: bool  # whether the rounding error was measured; if not, only the fixed tolerance of the dtype counts

    @property
    def outputs(self) -> list[AlignedRow]:
        """The rows of the outputs."""
        return [row for row in self.rows if "output" in (row.first and row.first.kind, row.second and row.second.kind)]

    @property
    def ok(self) -> bool:
        """Whether both have the same outputs, which differ by rounding only."""
        return all(row.mark in (EQUAL, ROUNDING) for row in self.outputs)

    @property
    def verdict(self) -> str:
        """``ok``, or ``diverges at NODE (operator): …``."""
        if self.ok:
            return "ok"
        row = self.first_different
        if row is None:
            alone = [row for row in self.outputs if row.mark in (ONLY_FIRST, ONLY_SECOND)]
            both = len(self.outputs) - len(alone)
            return (
                f"not comparable: {len(alone)} outputs are in one model only, such as {alone[0].name}; "
                f"the {both} that both have agree"
            )
        side = row.first
        assert side is not None and row.difference is not None
        where = f", {side.source}" if side.source else ""
        return f"diverges at {side.name} ({side.operator or side.kind}{where}): {row.difference}"


def compare(
    first: OnnxModel,
    second: OnnxModel,
    feeds: Mapping[str, OnnxValue],
    runtime: Runtime,
    *,
    sizes: Mapping[str, int] | None = None,
    seed: int = 0,
    spare: Mapping[str, OnnxValue] | None = None,
) -> ModelComparison:
    """Runs two models on the same inputs and compares their values.

    Args:
        feeds: inputs of either model, by name. Others are taken from the other model's initializers, or generated.
        sizes: of symbolic dimensions, for generated inputs.
        seed: of generated inputs and perturbations.
        spare: inputs of the second model that the first neither has nor computes, by name.

    Raises:
        DumpError: an input has no value, or the runtime cannot run a model.
    """
    ours, theirs, matched, notes = same_inputs(first, second, feeds, sizes or {}, seed)
    if any(item.name not in ours for item in first.inputs):
        other = run_model(second, theirs, runtime)
        ours |= computed_inputs(first, ours, other, "first", notes, {})
        one = run_model(first, ours, runtime)
    else:
        one = run_model(first, ours, runtime)
        theirs |= computed_inputs(second, theirs, one, "second", notes, spare or {})
        other = run_model(second, theirs, runtime)
    notes += random_operators(first, second)

    def run(model: OnnxModel, feeds: Mapping[str, OnnxValue]) -> Mapping[str, OnnxValue]:
        return run_model(model, feeds, runtime).computed

    # If one model computes in float16, all values have its rounding error.
    unit = coarsest_unit(item.value for ran in (one, other) for item in ran.values if item.kind == "result")
    rounded: Mapping[str, OnnxValue] = {}
    measured = True
    try:
        rounded = perturbed_values(first, ours, run, unit, seed) if unit else {}
    except DumpError as error:
        measured = False
        notes.append(f"the rounding error was not measured ({error}), only the tolerance of the dtype counts")
    rows = aligned_rows(one, other, matched, rounded)
    return ModelComparison((first.name, second.name), rows, first_different(rows), notes, measured)


@dataclasses.dataclass(frozen=True)
class ComparedModel:
    """A model to compare."""

    path: Path
    name: str  # for messages
    data: Path | None  # a folder with stored inputs

    @classmethod
    def of(cls, path: Path, name: str, folder: Path) -> ComparedModel:
        """A model with the data set of a folder, if there is one."""
        return cls(path, name, folder / DATA_SET if (folder / DATA_SET).is_dir() else None)


def compare_targets(
    first: ComparedModel,
    second: ComparedModel,
    runtime: Runtime,
    *,
    inputs: Sequence[str] = (),
    sizes: Mapping[str, int] | None = None,
    seed: int = 0,
) -> ModelComparison:
    """Compares two models on ``inputs`` (see ``read_feeds``), by default on those stored with the first or the second,
    else on generated ones.

    Raises:
        DumpError: a file cannot be read, or a model cannot be run.
    """
    names = (first.name, second.name) if first.name != second.name else (f"{first.path}", f"{second.path}")
    one, other = load_model(first.path, names[0]), load_model(second.path, names[1])
    if inputs:
        return compare(one, other, read_feeds(inputs, one), runtime, sizes=sizes, seed=seed)
    ours = read_feeds([first.data], one) if first.data is not None and one.inputs else {}
    theirs = read_feeds([second.data], other) if second.data is not None and other.inputs else {}
    return compare(one, other, ours or theirs, runtime, sizes=sizes, seed=seed, spare=theirs)


def targets_of(reference: str, dump: str | None, stage: str = "onnx") -> list[ComparedModel]:
    """The models that a reference names; ``DumpError`` if there is none.

    Args:
        reference: a file; a graph or region of the dump (``0/forward``, ``graph_000/forward/region_1``); or the path of
            one in any dump.
        dump: the dump folder; by default that of ``find_run``.
        stage: which models of a dump, see ``ONNX_STAGES``.
    """
    path = Path(reference)
    if path.is_file():
        return [ComparedModel.of(path, reference, path.parent)]
    if path.suffix == ".onnx":
        raise DumpError(f"{reference} does not exist")
    run = find_run(path if path.is_dir() else dump)
    found = []
    for graph, region in run.regions_of(reference):
        name = f"{graph.reference}/region_{region.index}"
        found.append(ComparedModel.of(region.model_of(stage), name, region.folder))
    return found


def paired(
    first: Sequence[ComparedModel], second: Sequence[ComparedModel]
) -> tuple[list[tuple[ComparedModel, ComparedModel]], list[ComparedModel]]:
    """The pairs of models to compare, and those that are left out.

    Equal numbers of models are paired in order. Otherwise a graph was split differently, and those with the most
    common names of values are paired.
    """
    if len(first) == len(second):
        return list(zip(first, second, strict=True)), []
    names = {}
    for target in (*first, *second):
        nodes = load_model(target.path).proto.graph.node
        names[target] = {name for node in nodes for name in node.output if name}
    similarity = {
        (one, other): len(names[one] & names[other]) / max(1, len(names[one] | names[other]))
        for one in first
        for other in second
    }
    pairs: list[tuple[ComparedModel, ComparedModel]] = []
    left = [*first, *second]
    for one, other in sorted(similarity, key=lambda pair: -similarity[pair]):
        if one in left and other in left:
            pairs.append((one, other))
            left = [target for target in left if target not in (one, other)]
    return sorted(pairs, key=lambda pair: first.index(pair[0])), left
