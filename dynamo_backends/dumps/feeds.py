"""What models are run with: inputs that were stored, or made-up ones.

::

    feeds = read_feeds(["graph_000/forward/region_0/test_data_set_0"], model)
    feeds = made_up(model, sizes={"batch": 3}, seed=0)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .differences import OnnxValue, kind_of
from .models import InputType, OnnxModel
from .reading import DumpError, read_data_set, read_tensor

if TYPE_CHECKING:
    import numpy as np
    import onnx

DATA_SET = "test_data_set_0"
DEFAULT_SIZE = 3
"""Of a symbolic dimension that is given no size."""


def read_feeds(paths: Sequence[str | Path], model: OnnxModel) -> dict[str, OnnxValue]:
    """Stored inputs.

    Args:
        paths: a folder with ``input_0.pb`` … (ONNX's test layout) or with a ``test_data_set_0`` in it; ``.pb`` files;
            or one ``.npz``.
        model: whose inputs they may be. Where no name is that of an input, they are its inputs in their order.

    Raises:
        DumpError: a file is not there, damaged, or of no known kind.
    """
    import numpy as np

    found: list[tuple[str, OnnxValue]] = []
    for path in map(Path, paths):
        if path.is_dir():
            found += _of_data_set(path)
        elif path.suffix == ".pb":
            found.append(_tensor(path))
        elif path.suffix == ".npz":
            try:
                with np.load(path, allow_pickle=False) as arrays:
                    found += [(name, arrays[name]) for name in arrays.files]
            except (OSError, ValueError) as error:
                raise DumpError(f"{path} cannot be read: {error}") from None
        else:
            raise DumpError(f"{path}: inputs are .pb files, an .npz file, or a folder with input_0.pb …")
    names = [item.name for item in model.inputs]
    feeds = {}
    for i, (name, value) in enumerate(found):
        by_place = not any(given in names for given, _ in found) and i < len(names)
        feeds[names[i] if by_place else name] = value
    return feeds


def _of_data_set(folder: Path) -> list[tuple[str, np.ndarray]]:
    inner = folder / DATA_SET
    folder = inner if inner.is_dir() else folder
    found = read_data_set(folder, "input")
    if not found:
        raise DumpError(f"{folder} holds no input_0.pb")
    return found


def _tensor(path: Path) -> tuple[str, np.ndarray]:
    if not path.exists():
        raise DumpError(f"{path} does not exist")
    return read_tensor(path)


def made_up(
    model: OnnxModel, *, sizes: Mapping[str, int], seed: int, wanted: Sequence[InputType] | None = None
) -> dict[str, OnnxValue]:
    """Random inputs: normal numbers; indices in the range of what they index; 0 and 1 for other integers.

    Args:
        model: the model.
        sizes: of symbolic dimensions; others are 3.
        seed: of the random numbers.
        wanted: the inputs; all by default.

    Raises:
        DumpError: an input is no tensor, or its values are a shape.
    """
    import numpy as np

    uses = _Uses(model)
    generator = np.random.default_rng(seed)
    feeds: dict[str, OnnxValue] = {}
    for item in model.inputs if wanted is None else wanted:
        if item.dtype is None or item.shape is None:
            raise DumpError(f"{model.name}: the input {item.name} ({item.described}) cannot be made up; use --inputs")
        shape = tuple(size if isinstance(size, int) else sizes.get(size or "", DEFAULT_SIZE) for size in item.shape)
        kind = kind_of(item.dtype)
        if kind == "float":
            value = generator.standard_normal(shape).astype(item.dtype)
        elif kind == "complex":
            value = (generator.standard_normal(shape) + 1j * generator.standard_normal(shape)).astype(item.dtype)
        elif kind == "string":
            value = generator.choice(np.array(["a", "b", "c"], dtype=object), shape)
        elif kind == "bool":
            value = generator.integers(0, 2, shape).astype(bool)
        else:
            if uses.is_shape(item.name):
                raise DumpError(
                    f"{model.name}: the values of {item.name} are a shape and cannot be made up; use --inputs"
                )
            value = generator.integers(0, uses.bound(item.name) or 2, shape).astype(item.dtype)
        feeds[item.name] = value
    return feeds


_PASSES_ON = {
    "Identity": (0,), "Cast": (0,), "Reshape": (0,), "Unsqueeze": (0,), "Squeeze": (0,), "Transpose": (0,),
    "Flatten": (0,), "Slice": (0,), "Expand": (0,), "Where": (1, 2), "Gather": (0,), "Mod": (0,), "Clip": (0,),
}  # fmt: skip
"""Operators whose result holds values of these inputs."""

_INDICES = {"Gather": (1, "axis", 0), "GatherElements": (1, "axis", 0), "ScatterElements": (1, "axis", 0)}
"""Operators with an input of indices, the attribute with the axis of their first input, and its default."""

_SHAPES = {
    ("Reshape", 1), ("Expand", 1), ("ConstantOfShape", 0), ("Tile", 1), ("Range", 0), ("Range", 1), ("Range", 2),
    ("Slice", 1), ("Slice", 2), ("Slice", 3), ("Slice", 4), ("Resize", 3), ("TopK", 1), ("Split", 1), ("Squeeze", 1),
    ("Unsqueeze", 1), ("Pad", 1),
}  # fmt: skip
"""Inputs, by operator and position, whose values are sizes, positions or axes."""


class _Uses:
    """What the nodes of a model do with its inputs."""

    def __init__(self, model: OnnxModel) -> None:
        self._readers: dict[str, list[tuple[onnx.NodeProto, int]]] = {}
        for node in model.proto.graph.node:
            for i, name in enumerate(node.input):
                self._readers.setdefault(name, []).append((node, i))
        graph = model.proto.graph
        self._shapes: dict[str, list[int]] = {item.name: list(item.dims) for item in graph.initializer}
        for item in (*graph.input, *graph.value_info):
            self._shapes.setdefault(item.name, [size.dim_value for size in item.type.tensor_type.shape.dim])

    def bound(self, name: str) -> int | None:
        """The size of the smallest axis that an input indexes; ``None`` if it indexes nothing known."""
        found = []
        for node, i in self._reached(name):
            position, attribute, default = _INDICES.get(node.op_type, (None, "", 0))
            if i == position:
                axis = next((item.i for item in node.attribute if item.name == attribute), default)
                shape = self._shapes.get(node.input[0], [])
                found += [shape[axis]] if -len(shape) <= axis < len(shape) and shape[axis] else []
            elif node.op_type in ("GatherND", "ScatterND") and i == 1:
                found += [size for size in self._shapes.get(node.input[0], []) if size]
        return min(found, default=None)

    def is_shape(self, name: str) -> bool:
        """Whether an input's values are sizes, positions or axes."""
        return any((node.op_type, i) in _SHAPES for node, i in self._reached(name))

    def _reached(self, name: str) -> Iterator[tuple[onnx.NodeProto, int]]:
        """The nodes, and which of their inputs, that the values of an input come to."""
        waiting, seen = [name], {name}
        while waiting:
            for node, i in self._readers.get(waiting.pop(), []):
                yield node, i
                if i in _PASSES_ON.get(node.op_type, ()):
                    waiting += [item for item in node.output if item not in seen]
                    seen.update(node.output)
