"""Runs an ONNX model on ONNX Runtime or the reference evaluator, and gives the value of each node. Needs no PyTorch.

::

    run = run_model(load_model("model.onnx"), {"x": x}, Runtime())
    for item in run.values:
        print(item.kind, item.operator, item.name, item.value.shape)

Every node's value is the model's own: ONNX Runtime's optimizations are off, as they would fuse nodes. With ``optimize``
it is the optimized form that is shown: ONNX Runtime writes it, and that model's values are looked at in the same way.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx

from ..errors import first_line
from .model_sessions import Session, operator_of
from .models import OnnxModel, is_external, load_model
from .reading import DumpError
from .schema import Settings
from .value_differences import OnnxValue, described, epsilon, kind_of

_LARGEST_MOVED = 2**28  # bytes of weights that are moved by rounding at most; those of larger models in part


@dataclasses.dataclass(frozen=True)
class Runtime:
    """What runs models."""

    name: str = "ort"  # ``ort`` for ONNX Runtime, ``reference`` for onnx's evaluator in Python
    settings: Settings = dataclasses.field(default_factory=Settings)  # of ONNX Runtime's sessions
    optimize: bool = False  # whether the model is shown as ONNX Runtime optimizes it


@dataclasses.dataclass(frozen=True)
class NodeValue:
    """A value of a model that ran."""

    kind: str  # ``initializer``, ``constant``, ``input`` or ``result``
    name: str  # of the value
    operator: str = ""  # of its node, with the domain where it is not ONNX's own; else ``""``
    inputs: tuple[str, ...] = ()  # the names of what its node reads
    value: OnnxValue = None  # the value; ``None`` if it is an empty optional
    source: str = ""  # the user's line that the node comes from, ``model.py:12``, or ``""``


@dataclasses.dataclass(frozen=True)
class ModelRun:
    """A model that ran."""

    model: OnnxModel  # what ran; with ``optimize`` the form that ONNX Runtime made
    values: Sequence[NodeValue]  # in the order they are computed; initializers and inputs first
    outputs: Mapping[str, OnnxValue]  # by name, in order

    @property
    def computed(self) -> dict[str, OnnxValue]:
        """The results of its nodes and, as ``output NAME``, its outputs."""
        found = {item.name: item.value for item in self.values if item.kind == "result"}
        return found | {f"output {name}": value for name, value in self.outputs.items()}


def run_model(model: OnnxModel, feeds: Mapping[str, OnnxValue], runtime: Runtime) -> ModelRun:
    """Runs a model, and keeps the value of each node.

    Raises:
        DumpError: an input has no value or one of another type, or the runtime cannot run the model.
    """
    _check_feeds(model, feeds)
    feeds = {item.name: feeds[item.name] for item in model.inputs}
    if not runtime.optimize:
        return _run_exposed(model, feeds, runtime)
    with tempfile.TemporaryDirectory() as folder:
        session = Session(model, runtime.settings, write=Path(folder))
        optimized = load_model(f"{folder}/model.onnx", f"{model.name} (optimized)")
        run = _run_exposed(optimized, feeds, runtime)
        # Exposing values stops fusions, so the outputs are those of the session itself.
        outputs = run.outputs if runtime.name == "reference" else session(feeds)
        # The file with the initializers is about to be removed.
        kept = [np.array(item.value) if item.kind == "initializer" else item.value for item in run.values]
        values = [dataclasses.replace(item, value=value) for item, value in zip(run.values, kept, strict=True)]
        return ModelRun(optimized, values, outputs)


def _check_feeds(model: OnnxModel, feeds: Mapping[str, OnnxValue]) -> None:
    missing = [f"{item.name} ({item.described})" for item in model.inputs if item.name not in feeds]
    if missing:
        raise DumpError(f"{model.name}: no value for {', '.join(missing)}")
    for item in model.inputs:
        value = feeds[item.name]
        if item.dtype is None or not isinstance(value, np.ndarray):
            raise DumpError(f"{model.name}: the input {item.name} is a {item.described}; only tensors can be given")
        fits = item.shape is None or (
            len(item.shape) == value.ndim
            and all(size == given for size, given in zip(item.shape, value.shape, strict=True) if isinstance(size, int))
        )
        if not fits or kind_of(value.dtype) != kind_of(item.dtype) or value.dtype.itemsize != item.dtype.itemsize:
            raise DumpError(f"{model.name}: the input {item.name} is {item.described}, its value {described(value)}")


def exposing(model: OnnxModel) -> OnnxModel:
    """A copy of a model that returns the value of every node."""
    exposed = model.copy()
    names = [name for node in model.proto.graph.node for name in node.output if name]
    returned = {item.name for item in model.proto.graph.output}
    exposed.proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in returned)
    return exposed


def _run_exposed(model: OnnxModel, feeds: Mapping[str, OnnxValue], runtime: Runtime) -> ModelRun:
    exposed = exposing(model)
    if runtime.name == "reference":
        found = _reference_results(exposed, feeds)
    else:
        found = Session(exposed, runtime.settings.unoptimized)(feeds)
    values = [NodeValue("initializer", name, value=value) for name, value in model.initializers.items()]
    values += [NodeValue("input", name, value=value) for name, value in feeds.items()]
    for node in model.proto.graph.node:
        kind = "constant" if node.op_type == "Constant" else "result"
        source = next((item.value for item in node.metadata_props if item.key == "source"), "")
        for name in filter(None, node.output):
            values.append(NodeValue(kind, name, operator_of(node), tuple(node.input), found[name], source))
    return ModelRun(model, values, {item.name: found[item.name] for item in model.proto.graph.output})


def _reference_results(model: OnnxModel, feeds: Mapping[str, OnnxValue]) -> dict[str, OnnxValue]:
    """The outputs of a model on onnx's evaluator; what is in other files becomes an input, and is not loaded."""
    inner = model.copy().proto
    stored = model.initializers
    external = {item.name: stored[item.name] for item in inner.graph.initializer if is_external(item)}
    kept = [item for item in inner.graph.initializer if not is_external(item)]
    del inner.graph.initializer[:]
    inner.graph.initializer.extend(kept)
    known = {item.name for item in inner.graph.input}
    inner.graph.input.extend(onnx.ValueInfoProto(name=name) for name in external if name not in known)
    try:
        evaluator = reference_evaluator(inner)
        return dict(zip(evaluator.output_names, evaluator.run(None, {**external, **feeds}), strict=True))
    except NotImplementedError as error:
        raise DumpError(f"{model.name}: {first_line(str(error))}; use --runtime ort") from error
    except Exception as error:  # whatever an operator's Python raises
        said = f"{type(error).__name__}: {first_line(str(error))}"
        raise DumpError(f"{model.name}: the reference evaluator fails: {said}") from error


def reference_evaluator(model: onnx.ModelProto) -> onnx.reference.ReferenceEvaluator:
    """onnx-array-api's evaluator, without two operators that do not do what ONNX says.

    onnx-array-api 0.3's ``ScatterElements`` takes the reduction ``mul`` for none: onnx's own is used. onnx 1.23's
    ``GatherElements`` fails on more than 64 rows, and where there are fewer indices along another axis.
    """
    from onnx.reference import ReferenceEvaluator
    from onnx.reference.op_run import OpRun
    from onnx_array_api.reference import ExtendedReferenceEvaluator

    class GatherElements(OpRun):
        """``data`` may be larger than ``indices`` along the other axes."""

        def _run(self, data: np.ndarray, indices: np.ndarray, axis: int = 0) -> tuple[np.ndarray]:
            axis %= data.ndim
            within = tuple(slice(None if i == axis else size) for i, size in enumerate(indices.shape))
            return (np.take_along_axis(data[within], indices.astype(np.int64), axis),)

    known = [item for item in ExtendedReferenceEvaluator.default_ops if item.__name__ != "ScatterElements"]
    known.append(GatherElements)
    return ReferenceEvaluator(model, new_ops=ExtendedReferenceEvaluator.filter_ops(model, known, opsets=None))


def moved_values(
    model: OnnxModel,
    feeds: Mapping[str, OnnxValue],
    run: Callable[[OnnxModel, Mapping[str, OnnxValue]], Mapping[str, OnnxValue]],
    unit: float,
    seed: int = 0,
) -> dict[str, OnnxValue]:
    """The values of a model where all floating-point inputs and weights are moved by one unit of rounding.

    Args:
        run: runs a model on inputs; its values by name.
        unit: of rounding, relative, see ``coarsest_unit``; a value of a coarser dtype moves by that of its own.
        seed: of the directions.
    """
    generator = np.random.default_rng(seed)

    def moved(value: OnnxValue) -> OnnxValue:
        return moved_by_rounding(value, unit, generator)

    changed, values = model.copy(), model.initializers
    room = _LARGEST_MOVED
    for item in changed.proto.graph.initializer:
        value = values[item.name]
        if kind_of(value.dtype) == "float" and value.nbytes <= room:
            room -= value.nbytes
            item.CopyFrom(onnx.numpy_helper.from_array(moved(value), item.name))
    return dict(run(changed, {name: moved(value) for name, value in feeds.items()}))


def moved_by_rounding(value: OnnxValue, unit: float, generator: np.random.Generator) -> OnnxValue:
    """A floating-point tensor whose elements are moved, up or down at random, by ``unit`` of themselves, or by a unit
    of its dtype if that is larger; anything else as it is."""
    if not isinstance(value, np.ndarray) or kind_of(value.dtype) != "float":
        return value
    relative = max(unit, epsilon(value.dtype))
    signs = generator.integers(0, 2, value.shape) * 2 - 1
    with np.errstate(all="ignore"):
        shifted = (value.astype(np.float64) * (1 + relative * signs)).astype(value.dtype)
        return np.where(np.isfinite(shifted.astype(np.float64)), shifted, value)


def coarsest_unit(values: Iterable[OnnxValue]) -> float:
    """The largest epsilon of floating-point values, but of those of eight bits, which are stored and not computed."""
    dtypes = {value.dtype for value in values if isinstance(value, np.ndarray)}
    return max((epsilon(dtype) for dtype in dtypes if kind_of(dtype) == "float" and dtype.itemsize > 1), default=0.0)
