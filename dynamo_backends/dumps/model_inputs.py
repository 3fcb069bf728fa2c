"""Inputs of models: stored ones, and generated ones.

::

    feeds = read_feeds(["graph_000/forward/region_0/test_data_set_0"], model)
    feeds = made_up(model, sizes={"batch": 3}, seed=0)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from .models import InputType, OnnxModel
from .reading import DATA_SET, DumpError, read_data_set, read_tensor
from .value_differences import OnnxValue, kind_of

DEFAULT_SIZE = 3  # of symbolic dimensions


def read_feeds(paths: Sequence[str | Path], model: OnnxModel) -> dict[str, OnnxValue]:
    """Stored inputs, from folders with ``input_0.pb`` … (ONNX's test layout) or ``test_data_set_0``, ``.pb`` files, or
    ``.npz`` files. If no name is that of an input of the model, they are assigned in order.

    Raises:
        DumpError: a file is missing, damaged, or of an unknown kind.
    """
    import numpy as np

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


def made_up(
    model: OnnxModel, *, sizes: Mapping[str, int], seed: int, wanted: Sequence[InputType] | None = None
) -> dict[str, OnnxValue]:
    """Random inputs: normally distributed numbers; indices within the indexed axis; 0 and 1 for other integers.

    Args:
        model: the model.
        sizes: of symbolic dimensions, by default ``DEFAULT_SIZE``.
        seed: of the random numbers.
        wanted: for which inputs, by default all.

    Raises:
        DumpError: an input is not a tensor, or its values are a shape.
    """
    import numpy as np

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

    Raises:
        DumpError: its elements are sizes, positions or axes.
    """
    graph = model.proto.graph
    shapes: dict[str, list[int]] = {item.name: list(item.dims) for item in graph.initializer}
    for item in (*graph.input, *graph.value_info):
        shapes.setdefault(item.name, [size.dim_value for size in item.type.tensor_type.shape.dim])
    found: list[int] = []
    holding = {name}  # the values with elements of the input
    for node in graph.node:
        for i in (i for i, read in enumerate(node.input) if read in holding):
            if (node.op_type, i) in _SHAPES:
                raise DumpError(f"{model.name}: the values of {name} are a shape and cannot be generated; use --inputs")
            shape = shapes.get(node.input[0], [])
            if i == 1 and node.op_type in _INDEXING:
                axis = next((item.i for item in node.attribute if item.name == "axis"), 0)
                found += shape[axis:][:1]
            elif i == 1 and node.op_type in ("GatherND", "ScatterND"):
                found += shape
            if i in _FORWARDS.get(node.op_type, ()):
                holding.update(node.output)
    return min(filter(None, found), default=2)
