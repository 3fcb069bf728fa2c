"""Compares two ONNX models side by side: both run on the same inputs, their values aligned, the differences judged.

::

    first, second = load_model("before.onnx"), load_model("after.onnx")
    comparison = compare(first, second, made_up(first, sizes={}, seed=0), Runtime())
    comparison.verdict          # "ok", or "diverges at gelu (Gelu): …"
    comparison.rows             # a row for each value, aligned

**Alignment.** Inputs, initializers and constants are matched by name, content, type and shape (``matching.py``). The
results of nodes are matched by name where the values agree, or where names can be believed; then by value, in whatever
order the models compute them; then as the same operator of matched values (``aligning.py``). Outputs: by name, then by
value and type.

**Judgement.** Neither model is the truth. By how much rounding may move each value is measured: the first model runs
once more with every floating-point input and weight moved by one unit of rounding. A difference of more than ten times
that, plus 64 units of the dtype (4 of float16 and bfloat16) at the value's largest magnitude, is not explained by
rounding. The models diverge if that is so for an output.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from .differences import EQUAL, ONLY_FIRST, ONLY_SECOND, ROUNDING, Difference, OnnxValue
from .execution import drawing
from .feeds import read_feeds
from .matching import computed_inputs, same_inputs
from .models import OnnxModel, load_model
from .reading import DumpError
from .rows import Row, aligned_rows, first_different
from .running import ModelRun, Runtime, coarsest_unit, movements, run_model
from .targets import Target


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two models side by side.

    Attributes:
        names: of the models.
        rows: initializers and inputs, then the results in the order of the first model, then the outputs.
        first_different: the row at which they begin to diverge, or ``None``.
        notes: what else to know: how inputs were matched, what was made up.
        measured: whether what rounding makes was measured; if not, only the fixed units count.
    """

    names: tuple[str, str]
    rows: Sequence[Row]
    first_different: Row | None
    notes: Sequence[str]
    measured: bool

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
        what = row.difference.text(row.limit)
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
        first, second: the models.
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
    moved, reason = _movements(first, ours, runtime, one, other, seed)
    if reason:
        notes.append(f"what rounding makes was not measured ({reason}), only units of the dtype count")
    rows = aligned_rows(one, other, matched, moved)
    return Comparison((first.name, second.name), rows, first_different(rows), notes, measured=not reason)


def _movements(
    model: OnnxModel, feeds: Mapping[str, OnnxValue], runtime: Runtime, one: ModelRun, other: ModelRun, seed: int
) -> tuple[dict[str, Difference], str]:
    """By how much each value of the first model moves under one unit of rounding; why that is not known, or ``""``.

    The unit is that of the coarsest dtype either model computes in: where one is in float16, its rounding is in all.
    """
    unit = coarsest_unit(item.value for run in (one, other) for item in run.values if item.kind == "result")
    if not unit:
        return {}, ""

    def run(model: OnnxModel, feeds: Mapping[str, OnnxValue]) -> Mapping[str, OnnxValue]:
        return run_model(model, feeds, runtime).computed

    # The optimized form, where that is looked at: the same nodes, so that each value finds its own movement.
    moved = model if runtime.optimize else one.model
    try:
        return movements(moved, feeds, run, one.computed, unit, seed), ""
    except DumpError as error:
        return {}, str(error)


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
