"""Inputs of models: stored ones, generated ones, and the same inputs for two models.

::

    feeds = read_feeds(["graph_000/forward/region_0/test_data_set_0"], model)
    feeds = generated_inputs(model, sizes={"batch": 3}, seed=0)
    feeds, other_feeds, matched, notes = same_inputs(model, other, feeds, {"batch": 3}, seed=0)
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from ..common.text_table import listed
from .model_values import ModelRun
from .models import InputType, OnnxModel, OnnxValue, Sizes, kind_of
from .reading import DATA_SET, DumpError, read_data_set, read_tensor

DEFAULT_SIZE = 3  # of symbolic dimensions

_LARGEST_HASHED = 2**26  # bytes; larger weights are not matched by content


def read_feeds(paths: Sequence[str | Path], model: OnnxModel) -> dict[str, OnnxValue]:
    """Stored inputs, from folders with ``input_0.pb`` … (ONNX's test layout) or ``test_data_set_0``, ``.pb`` files, or
    ``.npz`` files. If no name is that of an input of the model, they are assigned in order.

    Raises:
        DumpError: a file is missing, damaged, or of an unknown kind.
    """
    found: list[tuple[str, OnnxValue]] = []
    for path in map(Path, paths):
        if path.is_dir():
            stored = read_data_set(path / DATA_SET if (path / DATA_SET).is_dir() else path, "input")
            if not stored:
                raise DumpError(f"{path} holds no input_0.pb")
            found += stored
        elif not path.exists():
            raise DumpError(f"{path} does not exist")
        elif path.suffix == ".pb":
            found.append(read_tensor(path))
        elif path.suffix == ".npz":
            try:
                with np.load(path, allow_pickle=False) as arrays:
                    found += [(name, arrays[name]) for name in arrays.files]
            except (OSError, ValueError) as error:
                raise DumpError(f"{path} cannot be read: {error}") from None
        else:
            raise DumpError(f"{path}: inputs are .pb files, an .npz file, or a folder with input_0.pb …")
    names = [item.name for item in model.inputs]
    if any(name in names for name, _ in found):
        return dict(found)
    return {names[i] if i < len(names) else name: value for i, (name, value) in enumerate(found)}


def generated_inputs(
    model: OnnxModel, *, sizes: Mapping[str, int], seed: int, wanted: Sequence[InputType] | None = None
) -> dict[str, OnnxValue]:
    """Random inputs: normally distributed numbers; indices within the indexed axis; 0 and 1 for other integers.

    ``sizes`` are of symbolic dimensions, by default ``DEFAULT_SIZE``; ``wanted`` are the inputs, by default all.

    Raises:
        DumpError: an input is not a tensor, or its values are a shape.
    """
    generator = np.random.default_rng(seed)
    feeds: dict[str, OnnxValue] = {}
    for item in model.inputs if wanted is None else wanted:
        if item.dtype is None or item.shape is None:
            raise DumpError(f"{model.name}: the input {item.name} ({item.described}) cannot be generated; use --inputs")
        shape = tuple(size if isinstance(size, int) else sizes.get(size or "", DEFAULT_SIZE) for size in item.shape)
        kind = kind_of(item.dtype)
        if kind == "float":
            value = generator.standard_normal(shape).astype(item.dtype)
        elif kind == "complex":
            value = (generator.standard_normal(shape) + 1j * generator.standard_normal(shape)).astype(item.dtype)
        elif kind == "string":
            value = generator.choice(np.array(["a", "b", "c"], dtype=object), shape)
        else:
            bound = 2 if kind == "bool" else _bound(model, item.name)
            value = generator.integers(0, bound, shape).astype(item.dtype)
        feeds[item.name] = value
    return feeds


# Operators whose result holds elements of these inputs.
_FORWARDS = {
    "Identity": (0,), "Cast": (0,), "Reshape": (0,), "Unsqueeze": (0,), "Squeeze": (0,), "Transpose": (0,),
    "Flatten": (0,), "Slice": (0,), "Expand": (0,), "Where": (1, 2), "Gather": (0,), "Mod": (0,), "Clip": (0,),
}  # fmt: skip

_INDEXING = ("Gather", "GatherElements", "ScatterElements")  # operators whose second input indexes an axis of the first

# Inputs, by operator and position, whose elements are sizes, positions or axes.
_SHAPES = {
    ("Reshape", 1), ("Expand", 1), ("ConstantOfShape", 0), ("Tile", 1), ("Range", 0), ("Range", 1), ("Range", 2),
    ("Slice", 1), ("Slice", 2), ("Slice", 3), ("Slice", 4), ("Resize", 3), ("TopK", 1), ("Split", 1), ("Squeeze", 1),
    ("Unsqueeze", 1), ("Pad", 1),
}  # fmt: skip


def _bound(model: OnnxModel, name: str) -> int:
    """The upper bound of an integer input: the size of the smallest axis that it indexes, else 2.

    Raises ``DumpError`` if its elements are sizes, positions or axes.
    """
    found: list[object] = []
    holding = {name}  # the values with elements of the input
    for node in model.model.graph:
        for i in (i for i, read in enumerate(node.inputs) if read is not None and read.name in holding):
            if (node.op_type, i) in _SHAPES:
                raise DumpError(f"{model.name}: the values of {name} are a shape and cannot be generated; use --inputs")
            data = node.inputs[0]
            shape = list(data.shape) if data is not None and data.shape is not None else []
            if i == 1 and node.op_type in _INDEXING:
                found += shape[node.attributes.get_int("axis", 0) :][:1]
            elif i == 1 and node.op_type in ("GatherND", "ScatterND"):
                found += shape
            if i in _FORWARDS.get(node.op_type, ()):
                holding.update(str(value.name) for value in node.outputs)
    return min((size for size in found if isinstance(size, int) and size), default=2)


@dataclasses.dataclass(frozen=True)
class Matched:
    """Two inputs or initializers that correspond."""

    name: str  # in the second model
    partner: str  # in the first model
    how: str  # ``name``, ``content``, or ``type and shape``


def match(first: OnnxModel, feeds: Mapping[str, OnnxValue], second: OnnxModel) -> list[Matched]:
    """The inputs and initializers of two models that correspond. ``feeds`` are values of inputs of either model.

    They are matched by name, then by content. At last an input without a value is matched with the first remaining one
    of its type and shape, unless either name is that of a value that a model computes.
    """
    ours, theirs, found = _sources(first, feeds), _sources(second, feeds), list[Matched]()
    computed = {*first.computed, *second.computed}

    def pair(how: str, is_pair: Callable[[str, str], bool], candidates: Callable[[str], Iterable[str]]) -> None:
        for name in list(theirs):
            partner = next((item for item in candidates(name) if item in ours and is_pair(name, item)), None)
            if partner is not None:
                found.append(Matched(name, partner, how))
                del theirs[name], ours[partner]

    pair("name", lambda name, partner: theirs[name].has_same_name(ours[partner]), lambda name: [name])
    by_content: dict[object, list[str]] = {}
    for partner, item in ours.items():
        by_content.setdefault(item.content(), []).append(partner)
    pair(
        "content",
        lambda name, _: theirs[name].content() is not None,
        lambda name: by_content.get(theirs[name].content(), ()),
    )
    pair(
        "type and shape",
        lambda name, partner: (
            (theirs[name].value is None or ours[partner].value is None)
            and not computed & {name, partner}
            and theirs[name].may_be(ours[partner])
        ),
        lambda _: list(ours),
    )
    return found


@dataclasses.dataclass(frozen=True)
class _Source:
    """An input or initializer, with its value if that is known."""

    dtype: np.dtype | None
    shape: Sizes | None
    value: np.ndarray | None

    def content(self) -> object:
        """The hash of the value; ``None`` if it is unknown, too large, or a single element."""
        return None if self.value is None or self.value.size < 2 else content(self.value)

    def has_same_name(self, other: _Source) -> bool:
        """Whether a common name means the same; ``val_12`` need not, if the values are different numbers or sizes."""
        a, b = self.value, other.value
        is_sure = a is None or b is None or (a.size > 1 and kind_of(a.dtype) == "float") or np.array_equal(a, b)
        return is_sure and self.may_be(other, cast=True)

    def may_be(self, other: _Source, *, cast: bool = False) -> bool:
        """Whether the types are compatible; with ``cast`` the precision may differ."""
        if self.dtype is None or other.dtype is None:
            return False
        if self.dtype != other.dtype and not (cast and kind_of(self.dtype) == kind_of(other.dtype)):
            return False
        if self.shape is None or other.shape is None:
            return True
        sizes = zip(self.shape, other.shape, strict=False)
        is_same = (a == b or not isinstance(a, int) or not isinstance(b, int) for a, b in sizes)
        return len(self.shape) == len(other.shape) and all(is_same)


def content(value: OnnxValue) -> object:
    """A hash of a tensor; ``None`` for text, for what is not a tensor, and for large tensors."""
    if not isinstance(value, np.ndarray) or value.dtype.kind == "O" or value.nbytes > _LARGEST_HASHED:
        return None
    return value.dtype.name, value.shape, hashlib.blake2b(value.tobytes()).digest()


def _sources(model: OnnxModel, feeds: Mapping[str, OnnxValue]) -> dict[str, _Source]:
    found = {}
    for item in model.inputs:
        value = feeds.get(item.name)
        known = value if isinstance(value, np.ndarray) else None
        found[item.name] = _Source(item.dtype, item.shape if known is None else known.shape, known)
    return found | {name: _Source(array.dtype, array.shape, array) for name, array in model.initializers.items()}


def same_inputs(
    first: OnnxModel, second: OnnxModel, feeds: Mapping[str, OnnxValue], sizes: Mapping[str, int], seed: int
) -> tuple[dict[str, OnnxValue], dict[str, OnnxValue], list[Matched], list[str]]:
    """The inputs of both models, the matches, and notes. Inputs that the other model computes are missing.

    ``feeds`` are values of inputs of either model, ``sizes`` and ``seed`` as for ``generated_inputs``.
    """
    matched, notes = match(first, feeds, second), list[str]()
    name_of = {item.partner: item.name for item in matched}
    partner_of = {item.name: item.partner for item in matched}
    stored, kept = second.initializers, first.initializers
    ours = _values(first, (feeds, None), (stored, name_of), (feeds, name_of))
    missing = [item for item in first.inputs if item.name not in ours and item.name not in second.computed]
    if missing:
        types = {item.name: item for item in second.inputs}
        sized = [_with_sizes_of(item, types.get(name_of.get(item.name, ""), item)) for item in missing]
        ours |= generated_inputs(first, sizes=_sizes_of(first, ours) | dict(sizes), seed=seed, wanted=sized)
        notes.append(f"generated (seed {seed}): {listed([item.name for item in missing])}")
    theirs = _values(second, (ours, partner_of), (kept, partner_of), (feeds, None))
    taken = [name for name in ours if name_of.get(name) in stored]
    taken += [name for name in theirs if partner_of.get(name) in kept]
    notes += [f"inputs that the other model has as initializers: {listed(taken)}"] if taken else []
    for how in ("content", "type and shape"):
        pairs = [f"{item.partner} and {item.name}" for item in matched if item.how == how and item.name in theirs]
        notes += [f"matched by {how}: {listed(pairs)}"] if pairs else []
    return ours, theirs, matched, notes


def _values(
    model: OnnxModel, *places: tuple[Mapping[str, OnnxValue], Mapping[str, str] | None]
) -> dict[str, OnnxValue]:
    """The values of inputs in the first place that has one, by their name or that of another model."""
    found: dict[str, OnnxValue] = {}
    for item in model.inputs:
        for values, names in places:
            key = item.name if names is None else names.get(item.name, "")
            if item.name not in found and key in values:
                found[item.name] = with_precision(values[key], item.dtype)
    return found


def computed_inputs(
    model: OnnxModel, feeds: Mapping[str, OnnxValue], run: ModelRun, notes: list[str], spare: Mapping[str, OnnxValue]
) -> dict[str, OnnxValue]:
    """The inputs that a model lacks, from the ``run`` of the other one: one of them folded constants.

    ``feeds`` are the inputs that it has, ``spare`` values that the other does not compute, such as those that PyTorch
    computed between regions. Adds to ``notes``.

    Raises:
        DumpError: an input has no value.
    """
    missing = [item for item in model.inputs if item.name not in feeds]
    values = {**spare, **{item.name: item.value for item in run.values}}
    unknown = [f"{item.name} ({item.described})" for item in missing if item.name not in values]
    if unknown:
        raise DumpError(f"{model.name} has inputs that {run.name} lacks: {listed(unknown)}; use --inputs")
    if missing:
        notes.append(f"inputs of {model.name} that {run.name} computes, or stored: {listed([i.name for i in missing])}")
    return {item.name: with_precision(values[item.name], item.dtype) for item in missing}


def with_precision(value: OnnxValue, dtype: np.dtype | None) -> OnnxValue:
    """A value in the precision of ``dtype``, if the kind is the same."""
    if isinstance(value, np.ndarray) and dtype is not None and kind_of(dtype) == kind_of(value.dtype):
        return value.astype(dtype, copy=False)
    return value


def _sizes_of(model: OnnxModel, feeds: Mapping[str, OnnxValue]) -> dict[str, int]:
    """The sizes of symbolic dimensions, from the shapes of the given inputs."""
    found = {}
    for item in model.inputs:
        value = feeds.get(item.name)
        if isinstance(value, np.ndarray) and item.shape is not None and len(item.shape) == value.ndim:
            sizes = zip(item.shape, value.shape, strict=True)
            found.update({name: size for name, size in sizes if isinstance(name, str)})
    return found


def _with_sizes_of(item: InputType, partner: InputType) -> InputType:
    """An input with the fixed sizes of its partner."""
    if item.shape is None or partner.shape is None or len(item.shape) != len(partner.shape):
        return item
    shape = tuple(b if isinstance(b, int) else a for a, b in zip(item.shape, partner.shape, strict=True))
    return dataclasses.replace(item, shape=shape)
