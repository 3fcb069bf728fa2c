"""Compares two ONNX models side by side: both run on the same inputs, their values aligned, the differences judged.

::

    first, second = load_model("before.onnx"), load_model("after.onnx")
    comparison = compare(first, second, made_up(first, sizes={}, seed=0), Runtime())
    comparison.verdict          # "ok", or "diverges at gelu (Gelu): …"
    comparison.rows             # a row for each value, aligned

**Alignment.** Inputs, initializers and constants are matched by name, content, type and shape (``matching.py``). The
results of nodes are matched by name where the values agree, or where names can be believed; then by value, in whatever
order the models compute them; then as the same operator of matched values (``rows.py``). Outputs: by name, then by
value and type.

**Judgement.** Neither model is the truth. By how much rounding may move each value is measured: the first model runs
once more with every floating-point input and weight moved by one unit of rounding. The models diverge if rounding does
not explain the difference of an output, see ``differences.py``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from .model_inputs import read_feeds
from .model_matching import computed_inputs, same_inputs
from .model_rows import Row, aligned_rows, first_different
from .model_sessions import drawing
from .model_values import Runtime, coarsest_unit, moved_values, run_model
from .models import OnnxModel, load_model
from .reading import DATA_SET, DumpError, find_run
from .value_differences import EQUAL, ONLY_FIRST, ONLY_SECOND, ROUNDING, OnnxValue


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two models side by side."""

    names: tuple[str, str]  # of the models
    rows: Sequence[Row]  # initializers and inputs, then the results in the order of the first model, then the outputs
    first_different: Row | None  # the row at which they begin to diverge, or ``None``
    notes: Sequence[str]  # what else to know: how inputs were matched, what was made up
    measured: bool  # whether what rounding makes was measured; if not, only the fixed units count

    @property
    def outputs(self) -> list[Row]:
        """The rows of the outputs."""
        return [row for row in self.rows if "output" in (row.first and row.first.kind, row.second and row.second.kind)]

    @property
    def ok(self) -> bool:
        """Whether rounding explains the differences of all outputs, and both have the same outputs."""
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
        what = row.difference
        return f"diverges at {side.name} ({side.operator or side.kind}{where}): {what}"


def compare(
    first: OnnxModel,
    second: OnnxModel,
    feeds: Mapping[str, OnnxValue],
    runtime: Runtime,
    *,
    sizes: Mapping[str, int] | None = None,
    seed: int = 0,
    spare: Mapping[str, OnnxValue] | None = None,
) -> Comparison:
    """Runs two models on the same inputs and compares their values.

    Args:
        feeds: inputs of the first, or of the second, by name; what neither says is taken from the other's initializers,
            and else made up.
        runtime: what runs both.
        sizes: of symbolic dimensions, for inputs that are made up.
        seed: of made-up inputs, and of the directions of rounding.
        spare: inputs of the second, by name, for those that the first neither has nor computes.

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
    notes += drawing(first, second)

    def run(model: OnnxModel, feeds: Mapping[str, OnnxValue]) -> Mapping[str, OnnxValue]:
        return run_model(model, feeds, runtime).computed

    # Where one is in float16, its rounding is in all.
    unit = coarsest_unit(item.value for ran in (one, other) for item in ran.values if item.kind == "result")
    moved: Mapping[str, OnnxValue] = {}
    measured = True
    try:
        moved = moved_values(first, ours, run, unit, seed) if unit else {}
    except DumpError as error:
        measured = False
        notes.append(f"what rounding makes was not measured ({error}), only units of the dtype count")
    rows = aligned_rows(one, other, matched, moved)
    return Comparison((first.name, second.name), rows, first_different(rows), notes, measured)


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


def compare_targets(
    first: Target,
    second: Target,
    runtime: Runtime,
    *,
    inputs: Sequence[str] = (),
    sizes: Mapping[str, int] | None = None,
    seed: int = 0,
) -> Comparison:
    """Compares two models on given inputs, else on those stored beside the first, or the second, else on made-up ones.

    ``inputs`` are as of ``read_feeds``, the others as of ``compare``.

    Raises:
        DumpError: a file cannot be read, or a model not run.
    """
    names = (first.name, second.name) if first.name != second.name else (f"{first.path}", f"{second.path}")
    one, other = load_model(first.path, names[0]), load_model(second.path, names[1])
    if inputs:
        return compare(one, other, read_feeds(inputs, one), runtime, sizes=sizes, seed=seed)
    ours = read_feeds([first.data], one) if first.data is not None and one.inputs else {}
    theirs = read_feeds([second.data], other) if second.data is not None and other.inputs else {}
    return compare(one, other, ours or theirs, runtime, sizes=sizes, seed=seed, spare=theirs)


def targets_of(reference: str, dump: str | None, stage: str = "onnx") -> list[Target]:
    """The models that a reference names, those of a dump at a stage; ``DumpError`` if there is none.

    A reference is a file; a graph or region of the dump (``0/forward``, ``graph_000/forward/region_1``), which is the
    default one if it is ``None``; or the path of one in any dump.
    """
    path = Path(reference)
    if path.is_file():
        return [Target.of(path, reference, path.parent)]
    if path.suffix == ".onnx":
        raise DumpError(f"{reference} does not exist")
    run = find_run(path if path.is_dir() else dump)
    found = []
    for graph, region in run.regions_of(reference):
        name = f"{graph.reference}/region_{region.index}"
        found.append(Target.of(region.model_of(stage), name, region.folder))
    return found


def paired(first: Sequence[Target], second: Sequence[Target]) -> tuple[list[tuple[Target, Target]], list[Target]]:
    """Which models are compared with each other, and those that are left out.

    As many of both are each other's in their order. Else, after a change that splits a graph otherwise, those that
    compute the most values of the same names are, and the rest is left out.
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
