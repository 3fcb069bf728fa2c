"""Compares two ONNX models on the same inputs: each value of the second is judged by the first, and the first wrong one
is named.

::

    first, second = load_model("before.onnx"), load_model("after.onnx")
    comparison = compare(first, second, generated_inputs(first, sizes={}, seed=0), Runtime())
    comparison.verdict          # "ok", or "diverges at gelu (Gelu): …"
    comparison.rows             # a row for each value, aligned

**Alignment.** Inputs, initializers and constants correspond by name, content, or type and shape
(``model_inputs.py``); results by name, value, or operator; outputs by name, value, or type (``model_rows.py``).

**Judgement.** The first model is the reference. A value of the second is right if the first model computes it from the
values that the second computed before it (``model_judging.py``), so that the error of one node is not that of the next.
Values that correspond only by chance are not judged: one that is wrong is taken for another value, and the nodes that
compute it are judged together with those that read it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from ..common.suggestions import unknown_name
from ..common.text_table import listed
from ..numerics.arrays import dtype_name
from ..numerics.verdicts import Verdict, epsilon
from .model_inputs import DEFAULT_SIZE, computed_inputs, read_feeds, same_inputs
from .model_judging import (
    DIFFERENT,
    ONLY_FIRST,
    ONLY_SECOND,
    UNSURE,
    ComputedValue,
    ModelReference,
    ValueDifference,
    coarsest_of,
    decibels,
    difference,
    epsilon_of,
)
from .model_rows import AlignedRow, Alignment, aligned
from .model_sessions import random_operators
from .model_values import ModelRun, NodeValue, Runtime, run_model, runs_of
from .models import OnnxModel, OnnxValue, kind_of, load_model
from .reading import DATA_SET, DumpError, find_run

_QUANTIZED = (
    "QuantizeLinear", "DynamicQuantizeLinear", "DequantizeLinear", "QLinear", "MatMulInteger", "ConvInteger",
    "MatMulNBits",
)  # fmt: skip
"""How the operators of quantized models begin."""


_NAMED = 3
"""Nodes of a segment that a verdict names."""


class Reference(Protocol):
    """What judges the values of another run."""

    def can_judge(self, name: str, value: np.ndarray) -> bool:
        """Whether it computes a value that can be compared with another one element by element."""

    def judge(
        self, values: Mapping[str, ComputedValue], constants: Mapping[str, np.ndarray] | None = None
    ) -> dict[str, ValueDifference]:
        """Judges values, by the names of its own that they correspond to; with other ``constants`` than its own."""


@dataclasses.dataclass(frozen=True)
class ModelComparison:
    """The result of comparing two models."""

    names: tuple[str, str]  # of the models
    rows: Sequence[AlignedRow]  # initializers and inputs, then results in the order of the first model, then outputs
    first_different: AlignedRow | None  # the row at which they begin to diverge
    notes: Sequence[str]  # such as how inputs were matched, or which were generated
    is_quantized: bool = False  # whether the second alone is quantized
    failure: str = ""  # why the models do not run with other sizes, though they agree with the first

    @property
    def outputs(self) -> list[AlignedRow]:
        """The rows of the outputs."""
        return [row for row in self.rows if row.is_output]

    @property
    def ok(self) -> bool:
        """Whether both have the same outputs, and each value of the second is right."""
        return self.first_different is None and not self.failure and not any(row.is_alone for row in self.outputs)

    @property
    def ranked(self) -> list[AlignedRow]:
        """The results with an error of their own, the largest first, relative to the values."""
        rows = [row for row in self.rows if row.local is not None and row.local.noise and not row.is_output]
        return sorted(rows, key=lambda row: -row.local.noise if row.local is not None else 0.0)

    @property
    def verdict(self) -> str:
        """``ok``, or ``diverges at NODE (operator): …``."""
        if self.ok:
            return "ok"
        if self.failure:
            return f"diverges {self.failure}"
        row = self.first_different
        if row is None:
            alone = [row for row in self.outputs if row.is_alone]
            names = ", ".join(item.name for item in alone)
            both = len(self.outputs) - len(alone)
            return f"diverges: outputs that one model alone has: {names}; {both} that both have agree"
        if self.is_quantized and self.ranked:
            most, outputs = self.ranked[0], max((item.total.noise for item in self.outputs if item.total), default=0.0)
            assert most.first is not None and most.local is not None
            return (
                f"quantized: outputs differ by {percent(outputs)}; by itself, {most.first.described} differs most, by "
                f"{percent(most.local.noise)}"
            )
        side = row.first
        assert side is not None
        reader = next((item for item in self.rows if item.mark == row.mark and item.local), None)
        of = f", read by {reader.first.described}" if not row.local and reader and reader.first else ""
        nodes = row.local.segment[::-1] if row.local is not None else ()  # the nearest first
        together = f"; computed together with {listed(nodes, _NAMED)}" if nodes else ""
        return f"diverges at {side.described}{of}: {row.local or row.total}{together}"


def percent(noise: float) -> str:
    """A relative size: ``0.68 % (43 dB)``, with the ratio of signal to noise."""
    return f"{100 * noise:.{2 if noise < 0.1 else 3}g} % ({decibels(noise):.0f} dB)"


def compare(
    first: OnnxModel,
    second: OnnxModel,
    feeds: Mapping[str, OnnxValue],
    runtime: Runtime,
    *,
    runtime_of_second: Runtime | None = None,
    sizes: Mapping[str, int] | None = None,
    seed: int = 0,
    spare: Mapping[str, OnnxValue] | None = None,
    runs: int = 1,
) -> ModelComparison:
    """Runs two models on the same inputs and compares their values.

    Args:
        first: the reference.
        second: the model that is judged.
        feeds: inputs of either model, by name. Others are taken from the other model's initializers, or generated.
        runtime: what runs the first, and the second by default.
        runtime_of_second: what runs the second.
        sizes: of symbolic dimensions, for generated inputs.
        seed: of generated inputs.
        spare: inputs of the second model that the first neither has nor computes, by name.
        runs: how often the second runs, until it differs.

    Raises:
        DumpError: an input has no value, or the runtime cannot run a model.
    """
    runtime_of_second = runtime_of_second or runtime
    ours, theirs, matched, notes = same_inputs(first, second, feeds, sizes or {}, seed)
    if any(item.name not in ours for item in first.inputs):
        others = runs_of(second, theirs, runtime_of_second)
        other = next(others)
        ours |= computed_inputs(first, ours, other, notes, {})
        one = run_model(first, ours, runtime)
    else:
        one = run_model(first, ours, runtime)
        theirs |= computed_inputs(second, theirs, one, notes, spare or {})
        others = runs_of(second, theirs, runtime_of_second)
        other = next(others)
    notes += random_operators(first, second)
    quantized = is_quantized(second) and not is_quantized(first)
    assert one.model is not None
    reference = ModelReference(one.model, one, runtime, is_exact=not quantized)
    rows, culprit = judged_rows(reference, aligned(one, other, matched), one, other)
    for _ in range(runs - 1):
        if culprit is None:
            other = next(others)
            rows, culprit = judged_rows(reference, aligned(one, other, matched), one, other)
    notes += notes_on(rows)
    return ModelComparison((first.name, second.name), rows, culprit, notes, quantized)


def is_quantized(model: OnnxModel) -> bool:
    """Whether a model computes with quantized numbers."""
    return any(node.op_type.startswith(_QUANTIZED) for node in model.model.graph)


def judged_rows(
    reference: Reference, found: Alignment, one: ModelRun, other: ModelRun
) -> tuple[list[AlignedRow], AlignedRow | None]:
    """The rows of inputs and constants, of results, and of outputs; and the one at which both begin to diverge.

    That is the first wrong result, or a constant that differs and is read there. Other constants may differ: a weight
    may have been folded into another.
    """
    read = _as_read(other)
    pairs = {a.name: read.get(b.name, b) for a, b in found.results if a is not None and b is not None}
    sure = set(found.sure)
    for a, b in found.outputs:  # these are what the session without more outputs returned
        if a is not None and b is not None:
            pairs[a.name] = b
            sure.add(a.name)
    computed = _computed(reference, pairs, other)
    judged = _judged(reference, computed, sure)

    def row(a: NodeValue | None, b: NodeValue | None) -> AlignedRow:
        if a is None or b is None:
            return AlignedRow(ONLY_SECOND if a is None else ONLY_FIRST, a, b)
        if a.kind == "output" and a.shape != b.shape and None not in (a.shape, b.shape):  # others may be kept otherwise
            return AlignedRow(DIFFERENT, a, b, ValueDifference(Verdict(f"shape {b.shape} instead of {a.shape}")))
        is_stored = a.kind not in ("result", "output")
        if a.name in judged and not is_stored:
            local = dataclasses.replace(judged[a.name], inside=computed[a.name].inside)
            return AlignedRow(local.mark(), a, b, local)
        # What could be judged and was left out, and constants that may have been folded into others.
        is_left_out = isinstance(b.value, np.ndarray) and reference.can_judge(a.name, b.value)
        is_unsure = a.name not in of_wrong if is_stored else is_left_out or a.name not in sure
        mark = difference(a.value, b.value).mark(UNSURE if is_unsure else DIFFERENT)
        return AlignedRow(mark, a, b)

    of_wrong: set[str] = set()
    results = [row(a, b) for a, b in (*found.results, *found.outputs)]
    inputs = {item.name: item.inputs for item in one.values}

    def read_by(item: AlignedRow) -> list[str]:
        """What the nodes of a result read."""
        nodes = item.local.segment if item.local is not None else ()
        return [name for node in (*nodes, item.name) for name in inputs.get(node, ())]

    wrong = [item for item in results if item.mark == DIFFERENT]
    of_wrong.update(name for item in wrong for name in read_by(item))
    stored = [row(a, b) for a, b in found.stored]
    different = {item.name: item for item in stored if item.mark == DIFFERENT}
    of_first = [name for name in read_by(wrong[0]) if name in different] if wrong else []
    constants = {name: side.value for name in of_first if (side := different[name].second) is not None}
    if of_first:  # whether the value is right if the reference has the other model's constants
        arrays = {name: value for name, value in constants.items() if isinstance(value, np.ndarray)}
        again = reference.judge(computed, arrays).get(wrong[0].name)
        if again is None or not again.is_wrong:
            return [*stored, *results], different[of_first[0]]
    return [*stored, *results], wrong[0] if wrong else None


def notes_on(rows: Sequence[AlignedRow]) -> list[str]:
    """Notes on what is not judged: outputs of another dtype, nodes that compute in a lower precision than the first
    model's, constants that differ though no value is wrong, and outputs that are NaN or infinite in both models."""
    pairs = [(row.first, row.second) for row in rows if row.first and row.second and row.first.type != row.second.type]
    notes = [f"the output {b.name} is {b.type} instead of {a.type}" for a, b in pairs if a.kind == "output"]
    lower = _of_lower_precision(rows)
    if lower:
        more = f", and {len(lower) - 1} more" * (len(lower) > 1)
        notes.append(f"of lower precision in the second: {lower[0]}{more}")
    if all(row.mark != DIFFERENT for row in rows):
        alone = [row.first for row in rows if row.first and row.local is not None and not row.local.segment]
        read = {name for item in alone for name in item.inputs}  # others may have been folded into one another
        stored = [row for row in rows if row.first is not None and row.first.kind in ("initializer", "constant")]
        other = [f"{row.name} ({row.total})" for row in stored if row.mark == UNSURE and row.name in read]
        notes += (
            [f"constants differ, and all values that are computed with them are right: {listed(other)}"]
            if other
            else []
        )
    for row in rows:
        value = row.first.value if row.first is not None and row.is_output and not row.is_alone else None
        if isinstance(value, np.ndarray) and kind_of(value.dtype) == "float" and row.mark != DIFFERENT:
            count = int((~np.isfinite(value)).sum())
            notes += [f"{count} of {value.size} elements of {row.name} are NaN or infinite in both"] if count else []
    return notes


def _of_lower_precision(rows: Sequence[AlignedRow]) -> list[str]:
    """The nodes that the second computes in a lower precision than the first: it returns such a value, or has one
    between the values that correspond, and the first does not even read one."""
    nodes = {row.first.name: row.first for row in rows if row.first is not None and row.first.kind != "output"}
    found = []
    for row in rows:
        a, b = row.first, row.second
        if a is None or b is None or not a.kind == b.kind == "result":
            continue
        if 0 < epsilon_of(a.value) < epsilon_of(b.value):
            found.append(f"{a.described} is {b.type} instead of {a.type}")
        elif row.local is not None:
            own = [nodes[name] for name in (*row.local.segment, a.name) if name in nodes]
            read = [nodes[name] for item in own for name in item.inputs if name in nodes]
            values = [item.value for item in (*own, *read) if epsilon_of(item.value)]
            if values and epsilon(row.local.inside) > epsilon(coarsest := coarsest_of(values)):
                names = dtype_name(row.local.inside), dtype_name(coarsest)
                found.append(f"{a.described} is computed in {names[0]} instead of {names[1]}")
    return found


def _as_read(run: ModelRun) -> dict[str, NodeValue]:
    """Values that are quantized, as the next nodes read them, by name: what was fused into a quantization, such as a
    Relu, is missing before it."""
    values = {item.name: item for item in run.values}
    found: dict[str, NodeValue] = {}
    for item in run.values:
        quantized = values.get(item.inputs[0]) if item.operator == "DequantizeLinear" else None
        if quantized is not None and quantized.operator == "QuantizeLinear" and quantized.inputs[0] in values:
            source = values[quantized.inputs[0]]
            found[source.name] = dataclasses.replace(source, value=item.value)
    return found


def _judged(
    reference: Reference, computed: Mapping[str, ComputedValue], sure: Collection[str]
) -> dict[str, ValueDifference]:
    """The judgement of values by name; those that are not sure to correspond are left out if they are wrong."""
    left = dict(computed)
    while True:
        judged = reference.judge(left)
        wrong = {name for name, item in judged.items() if item.is_wrong and name not in sure}
        if not wrong:
            return judged
        left = {name: value for name, value in left.items() if name not in wrong}


def _computed(reference: Reference, pairs: Mapping[str, NodeValue], other: ModelRun) -> dict[str, ComputedValue]:
    """The values that can be judged, by the names of those in the reference that they correspond to."""
    values = {item.name: item for item in other.values}
    known = {item.name for item in pairs.values()}
    found: dict[str, ComputedValue] = {}
    for name, item in pairs.items():
        if not isinstance(item.value, np.ndarray) or not reference.can_judge(name, item.value):
            continue
        read, waiting = {item.name: item}, [*item.inputs, *values[item.name].inputs]
        while waiting:
            source = waiting.pop()
            if source in values and source not in read:
                read[source] = values[source]
                waiting += values[source].inputs if source not in known else ()
        inside = coarsest_of(part.value for part in read.values() if part is not item and part.name not in known)
        found[name] = ComputedValue(item.value, coarsest_of(part.value for part in read.values()), inside)
    return found


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
    runtime_of_second: Runtime | None = None,
    inputs: Sequence[str] = (),
    sizes: Mapping[str, int] | None = None,
    seed: int = 0,
    runs: int = 1,
) -> ModelComparison:
    """Compares two models on ``inputs`` (see ``read_feeds``), by default on those stored with the first or the second,
    else on generated ones. Where inputs are generated and have symbolic dimensions, a second size of these is run.

    Raises:
        DumpError: a file cannot be read, or a model cannot be run.
    """
    names = (first.name, second.name) if first.name != second.name else (f"{first.path}", f"{second.path}")
    one, other = load_model(first.path, names[0]), load_model(second.path, names[1])
    if inputs:
        feeds, spare = read_feeds(inputs, one), {}
    else:
        feeds = read_feeds([first.data], one) if first.data is not None and one.inputs else {}
        spare = read_feeds([second.data], other) if second.data is not None and other.inputs else {}
        feeds = feeds or spare
    shapes = [item.shape or () for model in (one, other) for item in model.inputs]
    known = {size for shape in shapes for size in shape if isinstance(size, str)}
    unknown = [name for name in sizes or {} if name not in known]
    if unknown:
        raise DumpError(unknown_name("symbolic dimension", unknown[0], sorted(known)))
    run = functools.partial(
        compare, one, other, feeds, runtime, runtime_of_second=runtime_of_second, seed=seed, runs=runs
    )
    found = run(sizes=sizes, spare=spare)
    free = known - (sizes or {}).keys()
    if feeds or not free or not found.ok:
        return found
    larger = dict.fromkeys(free, DEFAULT_SIZE + 2)
    text = ", ".join(f"{name}={size}" for name, size in sorted(larger.items()))
    try:
        again = run(sizes={**larger, **(sizes or {})})
    except DumpError as error:  # a size is part of one of them
        return dataclasses.replace(found, failure=f"with {text}: {error}")
    return dataclasses.replace(again, notes=[*again.notes, f"compared with {text}, and with sizes of {DEFAULT_SIZE}"])


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
