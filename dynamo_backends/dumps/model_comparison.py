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

from .model_inputs import DEFAULT_SIZE, computed_inputs, read_feeds, same_inputs
from .model_judging import LocalDifference, ModelReference
from .model_rows import AlignedRow, Alignment, aligned, first_different, mark_of, row_of, stored_row
from .model_sessions import random_operators
from .model_values import ModelRun, NodeValue, Runtime, run_model
from .models import OnnxModel, load_model
from .reading import DATA_SET, DumpError, find_run
from .value_differences import ONLY_FIRST, ONLY_SECOND, UNSURE, OnnxValue, difference

_QUANTIZED = (
    "QuantizeLinear", "DynamicQuantizeLinear", "DequantizeLinear", "QLinear", "MatMulInteger", "ConvInteger",
    "MatMulNBits",
)  # fmt: skip
"""How the operators of quantized models begin."""


class Reference(Protocol):
    """What judges the values of another run."""

    def can_judge(self, name: str, value: np.ndarray) -> bool:
        """Whether it computes a value that can be compared with another one element by element."""

    def judge(self, values: Mapping[str, np.ndarray]) -> dict[str, LocalDifference]:
        """Judges values, by the names of its own that they correspond to."""


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
        return [row for row in self.rows if "output" in (row.first and row.first.kind, row.second and row.second.kind)]

    @property
    def ok(self) -> bool:
        """Whether both have the same outputs, and each value of the second is right."""
        is_alone = any(row.mark in (ONLY_FIRST, ONLY_SECOND) for row in self.outputs)
        return self.first_different is None and not is_alone and not self.failure

    @property
    def ranked(self) -> list[AlignedRow]:
        """The results with an error of their own, the largest first, relative to the values."""
        rows = [row for row in self.rows if row.local is not None and row.local.noise and row not in self.outputs]
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
            alone = [row for row in self.outputs if row.mark in (ONLY_FIRST, ONLY_SECOND)]
            both = len(self.outputs) - len(alone)
            return (
                f"not comparable: {len(alone)} outputs are in one model only, such as {alone[0].name}; "
                f"the {both} that both have agree"
            )
        side = row.first
        assert side is not None
        reader = next((item for item in self.rows if item.mark == row.mark and item.local), None)
        of = f", read by {reader.first.described}" if not row.local and reader and reader.first else ""
        together = f"; computed together with {', '.join(row.local.segment)}" if row.local and row.local.segment else ""
        return f"diverges at {side.described}{of}: {row.local or row.total}{together}"


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

    Raises:
        DumpError: an input has no value, or the runtime cannot run a model.
    """
    runtime_of_second = runtime_of_second or runtime
    ours, theirs, matched, notes = same_inputs(first, second, feeds, sizes or {}, seed)
    if any(item.name not in ours for item in first.inputs):
        other = run_model(second, theirs, runtime_of_second)
        ours |= computed_inputs(first, ours, other, "first", notes, {})
        one = run_model(first, ours, runtime)
    else:
        one = run_model(first, ours, runtime)
        theirs |= computed_inputs(second, theirs, one, "second", notes, spare or {})
        other = run_model(second, theirs, runtime_of_second)
    notes += random_operators(first, second)
    is_quantized = _is_quantized(second) and not _is_quantized(first)
    assert one.model is not None
    reference = ModelReference(one.model, one, runtime, is_exact=not is_quantized)
    rows = judged_rows(reference, aligned(one, other, matched), one, other)
    return ModelComparison((first.name, second.name), rows, first_different(rows), notes, is_quantized)


def _is_quantized(model: OnnxModel) -> bool:
    return any(node.op_type.startswith(_QUANTIZED) for node in model.proto.graph.node)


def judged_rows(reference: Reference, found: Alignment, one: ModelRun, other: ModelRun) -> list[AlignedRow]:
    """The rows of inputs and constants, of results, and of outputs."""
    pairs = {a.name: b for a, b in found.results if a is not None and b is not None}
    sure = set(found.sure)
    for a, b in found.outputs:  # these are what the session without more outputs returned
        if a is not None and b is not None:
            pairs[a.name] = b
            sure.add(a.name)
    judged = _judged(reference, pairs, sure)

    def row(a: NodeValue | None, b: NodeValue | None) -> AlignedRow:
        if a is None or b is None:
            return row_of(a, b, "")
        total = difference(a.value, b.value)
        if a.name in judged:
            return row_of(a, b, mark_of(judged[a.name]), judged[a.name], total)
        is_judged = isinstance(b.value, np.ndarray) and reference.can_judge(a.name, b.value)  # and was left out
        return row_of(a, b, UNSURE if is_judged or a.name not in sure else total.mark(), total=total)

    stored = [stored_row(a, b) for a, b in found.stored]
    return [*stored, *(row(a, b) for a, b in found.results), *(row(a, b) for a, b in found.outputs)]


def _judged(reference: Reference, pairs: Mapping[str, NodeValue], sure: Collection[str]) -> dict[str, LocalDifference]:
    """The judgement of values by name; those that are not sure to correspond are left out if they are wrong."""
    left = {name: item.value for name, item in pairs.items() if isinstance(item.value, np.ndarray)}
    left = {name: value for name, value in left.items() if reference.can_judge(name, value)}
    while True:
        judged = reference.judge(left)
        wrong = {name for name, item in judged.items() if item.is_wrong and name not in sure}
        if not wrong:
            return judged
        left = {name: value for name, value in left.items() if name not in wrong}


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
    run = functools.partial(compare, one, other, feeds, runtime, runtime_of_second=runtime_of_second, seed=seed)
    found = run(sizes=sizes, spare=spare)
    dimensions = {
        size for model in (one, other) for item in model.inputs for size in item.shape or () if isinstance(size, str)
    }
    free = dimensions - (sizes or {}).keys()
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
