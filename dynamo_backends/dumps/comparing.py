"""Compares two ONNX models side by side: both run on the same inputs, their values aligned, the differences judged.

::

    first, second = load_model("before.onnx"), load_model("after.onnx")
    comparison = compare(first, second, made_up(first, sizes={}, seed=0), Runtime())
    comparison.verdict          # "ok", or "diverges at gelu (Gelu): …"
    comparison.rows             # a row for each value, aligned

**Alignment.** Inputs, initializers and constants are matched by name, content, type and shape (``feeds.match``). The
results of nodes are matched by name where the values agree, or where names can be believed; what lies between two such
matches is aligned by onnx-array-api's edit distance (``DistanceExecution``), here with values as the main cost; what is
left of equal values, computed in another order, is matched at last. Outputs: by name, then by value and type.

**Judgement.** Neither model is the truth. By how much rounding may move each value is measured: the first model runs
once more with every floating-point input and weight moved by one unit of rounding. A difference of more than ten times
that, plus 64 units of the dtype (4 of float16 and bfloat16) at the value's largest magnitude, is not explained by
rounding. The models diverge if that is so for an output.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .differences import Difference, OnnxValue, described, difference, epsilon, kind_of
from .feeds import DATA_SET, Matched, made_up, match, read_feeds
from .models import InputType, OnnxModel, load_model, type_name
from .reading import DumpError, find_run
from .running import RANDOM_OPERATORS, ModelRun, NodeValue, Runtime, moved_by_rounding, operators, run_model

if TYPE_CHECKING:
    import numpy as np

EQUAL, ROUNDING, DIFFERENT, UNSURE, ONLY_FIRST, ONLY_SECOND = "=", "~", "!", "?", "-", "+"
LEGEND = {
    EQUAL: "the same in both",
    ROUNDING: "different by no more than rounding explains",
    DIFFERENT: "different by more",
    UNSURE: "different, aligned by operator and place only: maybe not meant to be the same",
    ONLY_FIRST: "only in the first model",
    ONLY_SECOND: "only in the second model",
}

_SUMMARIZED = 2**24
"""Elements of which the digest of a value is made; of a larger one the first."""

_NEAR = 1e-3
"""How near the sums of two values are, relative to the sum of the magnitudes, that may be the same."""

_RELIABLE = 0.8
"""The share of common names with the same type, from which on names are believed."""

_GAP = 4_000_000
"""Pairs that the edit distance looks at; a larger gap between two matches is left to names and values."""


@dataclasses.dataclass(frozen=True)
class Side:
    """A value of one of the models.

    Attributes:
        kind: ``initializer``, ``constant``, ``input``, ``result`` or ``output``.
        name: its name.
        operator: of its node, or ``""``.
        type: ``float32``.
        shape: its sizes; ``None`` if it is no tensor.
        digest: four letters, see ``digest``.
        source: the user's line that it comes from, where the model says so.
    """

    kind: str
    name: str
    operator: str
    type: str
    shape: tuple[int, ...] | None
    digest: str
    source: str = ""


@dataclasses.dataclass(frozen=True)
class Row:
    """A value of the first model beside that of the second.

    Attributes:
        mark: a key of ``LEGEND``.
        first, second: ``None`` where only the other model has it.
        difference: of the two.
        limit: the largest difference that rounding explains.
    """

    mark: str
    first: Side | None
    second: Side | None
    difference: Difference | None = None
    limit: float = 0.0

    @property
    def name(self) -> str:
        """The first model's name of it, or the second's."""
        side = self.first or self.second
        assert side is not None
        return side.name


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
        what = difference_text(row.difference, row.limit)
        return f"diverges at {side.name} ({side.operator or side.kind}{where}): {what}"


def difference_text(item: Difference, limit: float) -> str:
    """In words, how far two values are apart, and how far rounding would explain."""
    if item.what:
        return item.what
    if item.nonfinite:
        return f"{item.nonfinite} elements are NaN or infinite in one only"
    if not item.dtype:
        return f"{item.differing} elements differ"
    return f"off by {item.max_abs:.2g} at values up to {item.scale:.2g}; rounding explains {limit:.1g}"


def compare(
    first: OnnxModel,
    second: OnnxModel,
    feeds: Mapping[str, OnnxValue],
    runtime: Runtime,
    *,
    sizes: Mapping[str, int] | None = None,
    seed: int = 0,
) -> Comparison:
    """Runs two models on the same inputs and compares their values.

    Args:
        first, second: the models.
        feeds: inputs of the first, or of the second, by name; what neither says is taken from the other's initializers,
            and else made up.
        runtime: what runs both.
        sizes: of symbolic dimensions, for inputs that are made up.
        seed: of made-up inputs, and of the directions of rounding.

    Raises:
        DumpError: an input has no value, or the runtime cannot run a model.
    """
    ours, theirs, matched, notes = _same_inputs(first, second, feeds, sizes or {}, seed)
    one, other = run_model(first, ours, runtime), run_model(second, theirs, runtime)
    drawn = sorted({name for model in (first, second) for name in operators(model) if name in RANDOM_OPERATORS})
    if drawn:
        notes.append(f"{', '.join(drawn)} draws other numbers in each run: what follows differs")
    movements, reason = _movements(first, ours, runtime, one, other, seed)
    if reason:
        notes.append(f"what rounding makes was not measured ({reason}), only units of the dtype count")
    rows = _rows(one, other, matched, movements)
    return Comparison((first.name, second.name), rows, _first_different(rows), notes, measured=not reason)


def _same_inputs(
    first: OnnxModel, second: OnnxModel, feeds: Mapping[str, OnnxValue], sizes: Mapping[str, int], seed: int
) -> tuple[dict[str, OnnxValue], dict[str, OnnxValue], list[Matched], list[str]]:
    """The inputs of both models, how they were matched, and what to know of it."""
    matched = match(first, feeds, second)
    notes = []
    by_partner = {item.partner: item.name for item in matched}
    stored = dict(second.initializers)
    ours: dict[str, OnnxValue] = {}
    for item in first.inputs:
        name = by_partner.get(item.name, "")
        if item.name in feeds:
            ours[item.name] = feeds[item.name]
        elif name in stored:
            ours[item.name] = stored[name]
        elif name in feeds:
            ours[item.name] = _as(feeds[name], item.dtype)
    if given := [item.name for item in first.inputs if item.name in by_partner and by_partner[item.name] in stored]:
        notes.append(f"inputs of the first model that the second has as initializers: {_listed(given)}")
    missing = [item for item in first.inputs if item.name not in ours]
    if missing:
        known = _sizes_of(first, ours) | dict(sizes)
        partners = {item.name: item for item in second.inputs}
        sized = []
        for item in missing:
            partner = partners.get(by_partner.get(item.name, ""))
            sized.append(_with_sizes_of(item, partner) if partner is not None else item)
        ours |= made_up(first, sizes=known, seed=seed, wanted=sized)
        notes.append(f"made up (seed {seed}): {_listed(item.name for item in missing)}")
    kept = dict(first.initializers)
    by_name = {item.name: item for item in matched}
    theirs: dict[str, OnnxValue] = {}
    for item in second.inputs:
        found = by_name.get(item.name)
        if found is not None:
            value = ours[found.partner] if found.partner in ours else kept[found.partner]
            theirs[item.name] = _as(value, item.dtype)
        elif item.name in feeds:
            theirs[item.name] = feeds[item.name]
    if given := [item.name for item in second.inputs if item.name in by_name and by_name[item.name].partner in kept]:
        notes.append(f"inputs of the second model that the first has as initializers: {_listed(given)}")
    missing = [item for item in second.inputs if item.name not in theirs]
    if missing:
        known = _sizes_of(second, theirs) | dict(sizes)
        theirs |= made_up(second, sizes=known, seed=seed + 1, wanted=missing)
        names = _listed(item.name for item in missing)
        notes.append(f"inputs of the second model that the first does not have, made up: {names}")
    for how in ("content", "type and shape"):
        pairs = [f"{item.partner} and {item.name}" for item in matched if item.how == how and item.name in theirs]
        if pairs:
            notes.append(f"matched by {how}: {_listed(pairs)}")
    return ours, theirs, matched, notes


def _listed(names: Iterable[str], most: int = 6) -> str:
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _as(value: OnnxValue, dtype: np.dtype | None) -> OnnxValue:
    """A value in the precision of another model."""
    import numpy as np

    if isinstance(value, np.ndarray) and dtype is not None and kind_of(dtype) == kind_of(value.dtype):
        return value.astype(dtype, copy=False)
    return value


def _sizes_of(model: OnnxModel, feeds: Mapping[str, OnnxValue]) -> dict[str, int]:
    """The sizes of the symbolic dimensions that given inputs tell."""
    import numpy as np

    found = {}
    for item in model.inputs:
        value = feeds.get(item.name)
        if isinstance(value, np.ndarray) and item.shape is not None and len(item.shape) == value.ndim:
            found.update(
                {name: size for name, size in zip(item.shape, value.shape, strict=True) if isinstance(name, str)}
            )
    return found


def _with_sizes_of(item: InputType, partner: InputType) -> InputType:
    """An input whose sizes are those of its partner where it has none of its own."""
    if item.shape is None or partner.shape is None or len(item.shape) != len(partner.shape):
        return item
    shape = tuple(b if isinstance(b, int) else a for a, b in zip(item.shape, partner.shape, strict=True))
    return dataclasses.replace(item, shape=shape)


def _movements(
    model: OnnxModel, feeds: Mapping[str, OnnxValue], runtime: Runtime, one: ModelRun, other: ModelRun, seed: int
) -> tuple[dict[str, Difference], str]:
    """By how much each value of the first model moves under one unit of rounding; why that is not known, or ``""``.

    The unit is that of the coarsest dtype either model computes in: where one is in float16, its rounding is in all.
    """
    unit = coarsest_unit(item.value for run in (one, other) for item in run.values if item.kind == "result")
    if not unit:
        return {}, ""
    try:
        # The optimized form, where that is looked at: the same nodes, so that each value finds its own movement.
        moved, inputs = moved_by_rounding(one.model if not runtime.optimize else model, feeds, unit, seed)
        found = run_model(moved, inputs, runtime)
    except DumpError as error:
        return {}, str(error)
    before = {item.name: item.value for item in one.values}
    movements = {
        item.name: difference(item.value, before[item.name])
        for item in found.values
        if item.name in before and item.kind == "result"
    }
    movements.update({f"output {name}": difference(value, one.outputs[name]) for name, value in found.outputs.items()})
    return movements, ""


def coarsest_unit(values: Iterable[OnnxValue]) -> float:
    """The largest epsilon of floating-point values, but of those of eight bits, which are stored and not computed."""
    import numpy as np

    dtypes = {value.dtype for value in values if isinstance(value, np.ndarray)}
    return max((epsilon(dtype) for dtype in dtypes if kind_of(dtype) == "float" and dtype.itemsize > 1), default=0.0)


def _rows(one: ModelRun, other: ModelRun, matched: Sequence[Matched], movements: Mapping[str, Difference]) -> list[Row]:
    stored = [item for item in one.values if item.kind != "result"]
    theirs_stored = [item for item in other.values if item.kind != "result"]
    results = [item for item in one.values if item.kind == "result"]
    theirs = [item for item in other.values if item.kind == "result"]
    by_their_names = _names_mean_the_same([item for item in results if item.name not in one.outputs], theirs)
    partners = {item.partner: item.name for item in matched}
    _match_stored(stored, theirs_stored, partners, by_their_names)
    by_name = {item.name: item for item in other.values}
    rows = []
    for item in stored:
        partner = by_name.get(partners.get(item.name, ""))
        rows.append(_row(item, partner, movements, trusted=True))
    used = set(partners.values())
    rows += [_row(None, item, movements) for item in theirs_stored if item.name not in used]
    pairs, order = _aligned(results, theirs, partners, by_their_names)
    partners |= {results[i].name: theirs[j].name for i, j in pairs.items()}
    for i, j in order:
        a = results[i] if i is not None else None
        b = theirs[j] if j is not None else None
        trusted = a is not None and b is not None and _are_the_same(a, b, partners, by_their_names)
        rows.append(_row(a, b, movements, trusted=trusted))
    return rows + _output_rows(one, other, movements)


def _match_stored(
    ours: Sequence[NodeValue], theirs: Sequence[NodeValue], partners: dict[str, str], by_their_names: bool
) -> None:
    """Adds constants of nodes and small ones to the matched initializers: by name if names are believed, by content."""
    used = set(partners.values())
    left = [item for item in ours if item.name not in partners and item.kind != "input"]
    free = {item.name: item for item in theirs if item.name not in used and item.kind != "input"}
    for item in left:
        same = free.get(item.name)
        if same is None or described(same.value) != described(item.value):
            continue
        if by_their_names or difference(item.value, same.value).is_equal:
            partners[item.name] = free.pop(item.name).name
    by_content: dict[object, list[str]] = {}
    for name, item in free.items():
        by_content.setdefault(_content(item.value), []).append(name)
    for item in left:
        names = by_content.get(_content(item.value), [])
        if item.name not in partners and names:
            partners[item.name] = names.pop(0)


def _content(value: OnnxValue) -> object:
    """What equal values have in common."""
    import hashlib

    import numpy as np

    if not isinstance(value, np.ndarray) or value.dtype.kind == "O" or value.nbytes > 2**26:
        return object()
    return value.dtype.name, value.shape, hashlib.blake2b(np.ascontiguousarray(value).tobytes()).digest()


def _names_mean_the_same(ours: Sequence[NodeValue], theirs: Sequence[NodeValue]) -> bool:
    """Whether results of one name are the same in both models: most have the same type and shape.

    Exporters count their values (``val_12``): then a name that both have says nothing.
    """
    by_name = {item.name: described(item.value) for item in theirs}
    common = [item for item in ours if item.name in by_name]
    same = sum(by_name[item.name] == described(item.value) for item in common)
    return bool(common) and same >= _RELIABLE * len(common)


def _are_the_same(a: NodeValue, b: NodeValue, partners: Mapping[str, str], by_their_names: bool) -> bool:
    """Whether two results must be equal: by their names, or as one operator of matched values."""
    if by_their_names and a.name == b.name:
        return True
    ours = [partners.get(name) for name in a.inputs if name]
    return a.operator == b.operator and ours == [name for name in b.inputs if name]


def _row(
    a: NodeValue | None, b: NodeValue | None, movements: Mapping[str, Difference], *, trusted: bool = False
) -> Row:
    first, second = _side(a), _side(b)
    if a is None or b is None:
        return Row(ONLY_FIRST if b is None else ONLY_SECOND, first, second)
    found = difference(a.value, b.value)
    movement = movements.get(f"output {a.name}" if a.kind == "output" else a.name, Difference())
    mark = EQUAL if found.is_equal else ROUNDING if found.is_explained(movement) else DIFFERENT if trusted else UNSURE
    return Row(mark, first, second, found, found.limit(movement))


def _side(item: NodeValue | None) -> Side | None:
    import numpy as np

    if item is None:
        return None
    if not isinstance(item.value, np.ndarray):
        return Side(item.kind, item.name, item.operator, described(item.value), None, "", item.source)
    value = item.value
    dtype = type_name(value.dtype)
    return Side(item.kind, item.name, item.operator, dtype, value.shape, digest(value), item.source)


def digest(value: np.ndarray) -> str:
    """Four letters that tell of a value, the same for nearly equal ones; ``????`` for text.

    Each is onnx-array-api's of the sum of a quarter of the elements, here to four digits of the largest.
    """
    import numpy as np
    from onnx_array_api.reference.evaluator_yield import make_summary

    if kind_of(value.dtype) == "string":
        return "????"
    sums = np.array(_quarters(value.reshape(-1)[:_SUMMARIZED])[0])
    largest = float(np.abs(sums).max(initial=0.0))
    scaled = sums * 10.0 ** (3 - math.floor(math.log10(largest))) if largest else sums
    letters: str = make_summary(np.round(scaled))
    return letters


def _quarters(flat: np.ndarray) -> tuple[tuple[float, ...], float]:
    """The sums of each quarter of the elements, and of all magnitudes; NaN and infinities as large numbers."""
    import numpy as np

    flat = flat.real + flat.imag if kind_of(flat.dtype) == "complex" else flat
    with np.errstate(all="ignore"):
        wide = np.nan_to_num(flat.astype(np.float64), nan=1e9, posinf=1e10, neginf=-1e10)
        wide = np.clip(wide, -1e30, 1e30)
    return tuple(float(part.sum()) for part in np.array_split(wide, 4)), float(np.abs(wide).sum())


def _output_rows(one: ModelRun, other: ModelRun, movements: Mapping[str, Difference]) -> list[Row]:
    """The outputs, matched by name; those of other names by value, then by type and place."""
    values = {
        (side, name): NodeValue("output", name, _operator_of(run, name), (), value)
        for side, run in ((0, one), (1, other))
        for name, value in run.outputs.items()
    }
    pairs = {name: name for name in one.outputs if name in other.outputs}
    free = [name for name in other.outputs if name not in pairs]
    for is_alike in (_are_near, _have_one_type, _have_one_kind):
        for name in one.outputs:
            partner = next((item for item in free if is_alike(values[0, name], values[1, item])), None)
            if name not in pairs and partner is not None:
                pairs[name] = partner
                free.remove(partner)
    rows = [
        _row(values[0, name], values.get((1, pairs.get(name, ""))), movements, trusted=name in pairs)
        for name in one.outputs
    ]
    return rows + [_row(None, values[1, name], movements) for name in free]


def _operator_of(run: ModelRun, name: str) -> str:
    return next((item.operator for item in run.values if item.name == name), "")


def _are_near(a: NodeValue, b: NodeValue) -> bool:
    return _have_one_type(a, b) and _Summary.of(a).is_near(_Summary.of(b))


def _have_one_type(a: NodeValue, b: NodeValue) -> bool:
    return described(a.value) == described(b.value)


def _have_one_kind(a: NodeValue, b: NodeValue) -> bool:
    """Whether both are tensors of the same shape, one in another precision maybe."""
    import numpy as np

    if not isinstance(a.value, np.ndarray) or not isinstance(b.value, np.ndarray):
        return type(a.value) is type(b.value)
    return a.value.shape == b.value.shape and kind_of(a.value.dtype) == kind_of(b.value.dtype)


def _first_different(rows: Sequence[Row]) -> Row | None:
    """The first row, in the order of the first model, that differs.

    ``None`` if all outputs agree: then what differs on the way is computed otherwise, and no fault.
    """
    outputs = [row for row in rows if row.first is not None and row.first.kind == "output"]
    if not any(row.mark == DIFFERENT for row in outputs):
        return None
    return next(row for row in rows if row.mark == DIFFERENT)


def _aligned(
    ours: Sequence[NodeValue], theirs: Sequence[NodeValue], partners: Mapping[str, str], by_their_names: bool
) -> tuple[dict[int, int], list[tuple[int | None, int | None]]]:
    """Which results are each other's, and the order of all rows."""
    one, other = [_Summary.of(item) for item in ours], [_Summary.of(item) for item in theirs]
    pairs: dict[int, int] = {}
    place = {item.name: j for j, item in enumerate(theirs)}
    for i, item in enumerate(ours):
        same = place.get(item.name)
        if same is not None and (one[i].is_near(other[same]) or (by_their_names and one[i].shape == other[same].shape)):
            pairs[i] = same
    _align_gaps(ours, theirs, one, other, pairs)
    _match_moved(one, other, pairs)
    _match_by_operator(ours, theirs, one, other, pairs, partners)
    return pairs, _order(len(ours), len(theirs), pairs)


def _align_gaps(
    ours: Sequence[NodeValue],
    theirs: Sequence[NodeValue],
    one: Sequence[_Summary],
    other: Sequence[_Summary],
    pairs: dict[int, int],
) -> None:
    """Aligns what lies between two matches by the edit distance."""
    fixed = _increasing(sorted(pairs.items()))
    used = set(pairs.values())
    edges = [(-1, -1), *fixed, (len(ours), len(theirs))]
    for (i0, j0), (i1, j1) in zip(edges, edges[1:], strict=False):
        mine = [i for i in range(i0 + 1, i1) if i not in pairs]
        its = [j for j in range(j0 + 1, j1) if j not in used]
        if not mine or not its or len(mine) * min(len(its), 2 * max(50, abs(len(mine) - len(its)) + 1)) > _GAP:
            continue
        for i, j in _edit_distance([one[i] for i in mine], [other[j] for j in its]):
            pairs[mine[i]] = its[j]


def _edit_distance(one: Sequence[_Summary], other: Sequence[_Summary]) -> list[tuple[int, int]]:
    """The pairs of the best alignment of two sequences, by onnx-array-api's ``DistanceExecution``."""
    from onnx_array_api.reference import DistanceExecution, ResultExecution, ResultType

    class ByValue(DistanceExecution):
        """The edit distance with values as the main cost: what cannot be the same costs more than to leave out both."""

        def distance_pair(self, r1: ResultExecution, r2: ResultExecution) -> float:
            a, b = r1.value, r2.value
            cost = float(self._cost_type(r1.dtype, r2.dtype) * self.type_cost)
            cost += self.op_type_cost * (r1.op_type != r2.op_type)
            if a.is_near(b):
                return cost + self.op_type_cost * (a.shape != b.shape)
            if a.shape == b.shape and r1.op_type == r2.op_type:
                return cost + self.insert_cost
            return 3.0 * self.insert_cost

    def results(items: Sequence[_Summary]) -> list[ResultExecution]:
        # onnx-array-api always pairs the first of both: so the first is one that is in both.
        start = ResultExecution(ResultType.RESULT, None, (), "", "", "", _START)
        return [
            start,
            *(ResultExecution(ResultType.RESULT, i.dtype, i.shape, "", i.operator, "", i) for i in items),
        ]

    _, way = ByValue().distance_sequence(results(one), results(other))
    found = []
    last = (0, 0)
    for i, j in way[1:]:
        if (i, j) == (last[0] + 1, last[1] + 1):
            a, b = one[i - 1], other[j - 1]
            if a.is_near(b) or (a.shape == b.shape and a.operator == b.operator):
                found.append((i - 1, j - 1))
        last = (i, j)
    return found


def _match_moved(one: Sequence[_Summary], other: Sequence[_Summary], pairs: dict[int, int]) -> None:
    """Matches equal values that the models compute in another order; constant ones tell nothing."""
    import bisect

    used = set(pairs.values())
    by_shape: dict[object, list[tuple[float, int]]] = {}
    for j, item in enumerate(other):
        if j not in used and item.tells:
            by_shape.setdefault(item.shape, []).append((item.magnitude, j))
    for candidates in by_shape.values():
        candidates.sort()
    for i, item in enumerate(one):
        candidates = by_shape.get(item.shape, [])
        if i in pairs or not item.tells or not candidates:
            continue
        start = bisect.bisect_left(candidates, (item.magnitude * (1 - 2 * _NEAR), -1))
        end = bisect.bisect_right(candidates, (item.magnitude * (1 + 2 * _NEAR), len(other)))
        near = [k for k in range(start, end) if item.is_near(other[candidates[k][1]])]
        if near:
            best = min(near, key=lambda k: _unlike(i, item, candidates[k][1], other[candidates[k][1]]))
            pairs[i] = candidates.pop(best)[1]


def _unlike(i: int, item: _Summary, j: int, partner: _Summary) -> tuple[bool, int]:
    """Which of several near values is the worse partner: of another operator, further away."""
    return item.operator != partner.operator, abs(j - i)


def _match_by_operator(
    ours: Sequence[NodeValue],
    theirs: Sequence[NodeValue],
    one: Sequence[_Summary],
    other: Sequence[_Summary],
    pairs: dict[int, int],
    partners: Mapping[str, str],
) -> None:
    """Matches what the same operator makes of matched values, however different: there a fault begins."""
    known = dict(partners) | {ours[i].name: theirs[j].name for i, j in pairs.items()}
    used = set(pairs.values())
    free = {}
    for j, item in enumerate(theirs):
        if j not in used:
            free[(item.operator, tuple(item.inputs))] = j
    for i, item in enumerate(ours):
        if i in pairs:
            continue
        same = free.get((item.operator, tuple(known.get(name, "") for name in item.inputs)))
        if same is not None and same not in used and one[i].shape == other[same].shape:
            pairs[i] = same
            used.add(same)
            known[item.name] = theirs[same].name


def _increasing(pairs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The longest part of pairs, sorted by the first, in which the second increases too."""
    import bisect

    ends: list[int] = []
    last: list[int] = []
    before: list[int] = []
    for k, (_, j) in enumerate(pairs):
        at = bisect.bisect_left(ends, j)
        if at == len(ends):
            ends.append(j)
            last.append(k)
        else:
            ends[at], last[at] = j, k
        before.append(last[at - 1] if at else -1)
    k = last[-1] if last else -1
    found = []
    while k >= 0:
        found.append(pairs[k])
        k = before[k]
    return found[::-1]


def _order(ours: int, theirs: int, pairs: Mapping[int, int]) -> list[tuple[int | None, int | None]]:
    """The rows in the order of the first model; what only the second has, behind what is before it there."""
    used = {j: i for i, j in pairs.items()}
    behind: dict[int, list[int]] = {}
    at = -1
    for j in range(theirs):
        if j in used:
            at = used[j]
        else:
            behind.setdefault(at, []).append(j)
    rows: list[tuple[int | None, int | None]] = [(None, j) for j in behind.get(-1, [])]
    for i in range(ours):
        rows.append((i, pairs.get(i)))
        rows += [(None, j) for j in behind.get(i, [])]
    return rows


@dataclasses.dataclass(frozen=True)
class _Summary:
    """What is looked at of a value to find its partner.

    Attributes:
        operator, dtype, shape, size: of the value.
        sums: of each quarter of the elements.
        magnitude: the sum of all magnitudes; ``nan`` if there is none to compare.
        tells: whether the elements are not all alike.
    """

    operator: str
    dtype: object
    shape: tuple[int, ...] | None
    size: int
    sums: tuple[float, ...] = ()
    magnitude: float = math.nan
    tells: bool = False

    @classmethod
    def of(cls, item: NodeValue) -> _Summary:
        """The summary of a value."""
        import numpy as np

        value = item.value
        if not isinstance(value, np.ndarray) or kind_of(value.dtype) == "string":
            shape = value.shape if isinstance(value, np.ndarray) else None
            return cls(item.operator, None, shape, -1 if shape is None else int(value.size))  # type: ignore[union-attr]
        flat = value.reshape(-1)
        sums, magnitude = _quarters(flat)
        tells = bool(flat.size > 1 and (flat != flat[0]).any())
        return cls(item.operator, value.dtype, value.shape, int(value.size), sums, magnitude, tells)

    def is_near(self, other: _Summary) -> bool:
        """Whether the values may be the same."""
        if self.size != other.size or not self.sums or not other.sums:
            return False
        room = _NEAR * max(self.magnitude, other.magnitude)
        return all(
            abs(a - b) <= room
            for a, b in zip((*self.sums, self.magnitude), (*other.sums, other.magnitude), strict=True)
        )


_START = _Summary("", None, (), 0, (0.0,), 0.0)


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


def _data_set(folder: Path) -> Path | None:
    inner = folder / DATA_SET
    return inner if inner.is_dir() else None


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

    Args:
        first, second: the models.
        runtime: what runs both.
        inputs: see ``read_feeds``.
        sizes, seed: see ``compare``.

    Raises:
        DumpError: a file cannot be read, or a model not run.
    """
    names = (first.name, second.name) if first.name != second.name else (f"{first.path}", f"{second.path}")
    one, other = load_model(first.path, names[0]), load_model(second.path, names[1])
    if inputs:
        feeds = read_feeds(inputs, one)
    elif first.data is not None:
        feeds = read_feeds([first.data], one)
    elif second.data is not None:
        feeds = read_feeds([second.data], other)
    else:
        feeds = {}
    return compare(one, other, feeds, runtime, sizes=sizes, seed=seed)
