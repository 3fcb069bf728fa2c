"""Runs an ONNX model on ONNX Runtime or the reference evaluator, and returns the value of each node.

::

    run = run_model(load_model("model.onnx"), {"x": x}, Runtime())
    for item in run.values:
        print(item.kind, item.operator, item.name, item.value.shape)

ONNX Runtime's optimizations are off, since they fuse nodes. With ``optimize``, the values are those of the model that
ONNX Runtime optimized and wrote.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from ..errors import first_line
from ..graphs.locations import frames_of, line_of_layer_in
from .model_sessions import ModelSession, operator_of
from .models import OnnxModel, OnnxValue, described, kind_of, load_model, type_name
from .reading import DumpError
from .reference_evaluator import reference_evaluator
from .schema import Settings


@dataclasses.dataclass(frozen=True)
class Runtime:
    """What runs models: ``ort`` is ONNX Runtime, ``reference`` onnx's evaluator in Python."""

    name: str = "ort"
    settings: Settings = dataclasses.field(default_factory=Settings)  # of ONNX Runtime's sessions
    optimize: bool = False  # whether ONNX Runtime optimizes the model first


@dataclasses.dataclass(frozen=True)
class NodeValue:
    """A value of a model that ran."""

    kind: str  # ``initializer``, ``constant``, ``input``, ``result`` or ``output``
    name: str
    operator: str = ""  # of its node, see ``operator_of``
    inputs: tuple[str, ...] = ()  # the names of its node's inputs
    value: OnnxValue = None
    source: str = ""  # the user's line, ``model.py:12``, or ``""``
    module: str = ""  # the path of the module that computed it, or ``""``

    @property
    def shape(self) -> tuple[int, ...] | None:
        """``None`` if it is not a tensor."""
        return self.value.shape if isinstance(self.value, np.ndarray) else None

    @property
    def size(self) -> int:
        """How many elements it has; -1 if it is not a tensor."""
        return self.value.size if isinstance(self.value, np.ndarray) else -1

    @functools.cached_property
    def sums(self) -> tuple[float, ...]:
        """The sum of each quarter of the elements, and of all magnitudes. NaN and infinities count as large numbers.

        NaN for text and for what is not a tensor.
        """
        if not isinstance(self.value, np.ndarray) or kind_of(self.value.dtype) == "string":
            return (math.nan,) * 5
        flat = self.value.reshape(-1)
        flat = flat.real + flat.imag if kind_of(flat.dtype) == "complex" else flat
        with np.errstate(all="ignore"):
            wide = np.nan_to_num(flat.astype(np.float64), nan=1e9, posinf=1e10, neginf=-1e10).clip(-1e30, 1e30)
        return (*(float(part.sum()) for part in np.array_split(wide, 4)), float(np.abs(wide).sum()))

    @property
    def type(self) -> str:
        """``float32``, ``sequence of 4``."""
        return type_name(self.value.dtype) if isinstance(self.value, np.ndarray) else described(self.value)

    @property
    def described(self) -> str:
        """``gelu (Gelu, model.py:17, in layers.0)``."""
        place = filter(None, (self.operator or self.kind, self.source, self.module and f"in {self.module}"))
        return f"{self.name} ({', '.join(place)})"

    def as_json(self) -> dict[str, object]:
        """What it is, without its elements."""
        names = ("kind", "name", "operator", "type", "shape", "source", "module")
        return {name: getattr(self, name) for name in names}


@dataclasses.dataclass(frozen=True)
class ModelRun:
    """A model that ran."""

    name: str  # of the model
    values: Sequence[NodeValue]  # initializers and inputs, then the results of nodes in execution order
    outputs: Mapping[str, OnnxValue]  # by name, in order
    model: OnnxModel | None = None  # with ``optimize`` the optimized model; ``None`` for a program of PyTorch's
    folder: object = None  # keeps the files of an optimized model


def run_model(model: OnnxModel, feeds: Mapping[str, OnnxValue], runtime: Runtime) -> ModelRun:
    """Runs a model, and returns the value of each node.

    Raises ``DumpError`` if an input has no value or one of another type, or the runtime cannot run the model.
    """
    return next(runs_of(model, feeds, runtime))


def runs_of(model: OnnxModel, feeds: Mapping[str, OnnxValue], runtime: Runtime) -> Iterator[ModelRun]:
    """Runs a model again and again, in the same session."""
    _check_feeds(model, feeds)
    feeds = {item.name: feeds[item.name] for item in model.inputs}
    if not runtime.optimize:
        yield from _exposed_runs(model, feeds, runtime)
    folder = tempfile.TemporaryDirectory(prefix="dynamo_backends_optimized_")  # deleted with the run
    session = ModelSession(model, runtime.settings, write=Path(folder.name))
    optimized = load_model(f"{folder.name}/model.onnx", f"{model.name} (optimized)")
    for run in _exposed_runs(optimized, feeds, runtime):
        # Exposed values prevent fusions, so the outputs come from the session without them.
        outputs = run.outputs if runtime.name == "reference" else session(feeds)
        yield dataclasses.replace(run, outputs=outputs, folder=folder)


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
    """A copy of a model with the value of every node as an output."""
    copy = model.model.clone()
    returned = set(copy.graph.outputs)
    values = [value for node in copy.graph for value in node.outputs if value.name and value not in returned]
    copy.graph.outputs.extend(values)
    return OnnxModel(copy, model.name)


def computed_by(model: OnnxModel, runtime: Runtime) -> Callable[[Mapping[str, OnnxValue]], dict[str, OnnxValue]]:
    """Returns what computes the outputs of a model by name, without optimizations.

    It and what it returns raise ``DumpError`` if the runtime cannot run the model.
    """
    if runtime.name == "reference":
        return functools.partial(_reference_results, model)
    return ModelSession(model, runtime.settings.unoptimized)


def _exposed_runs(model: OnnxModel, feeds: Mapping[str, OnnxValue], runtime: Runtime) -> Iterator[ModelRun]:
    compute = computed_by(exposing(model), runtime)
    stored = [NodeValue("initializer", name, value=value) for name, value in model.initializers.items()]
    stored += [NodeValue("input", name, value=value) for name, value in feeds.items()]
    while True:
        found, values = compute(feeds), list(stored)
        for node in model.model.graph:
            kind, place = "constant" if node.op_type == "Constant" else "result", _place_of(node)
            read = tuple(str(value.name) if value is not None else "" for value in node.inputs)
            for name in (str(value.name) for value in node.outputs if value.name):
                values.append(NodeValue(kind, name, operator_of(node), read, found[name], *place))
        names = [str(value.name) for value in model.model.graph.outputs]
        yield ModelRun(model.name, values, {name: found[name] for name in names}, model)


def _place_of(node: ir.Node) -> tuple[str, str]:
    """The user's line and the module of a node, from the metadata of this package or of PyTorch's exporter."""
    known = node.metadata_props
    if "source" in known:
        return known["source"], known.get("module", "")
    scopes = re.findall(r"'([^']*)'", known.get("pkg.torch.onnx.name_scopes", ""))
    source = line_of_layer_in(frames_of(known.get("pkg.torch.onnx.stack_trace", "")))
    return source, scopes[-2] if len(scopes) > 1 else ""


def _reference_results(model: OnnxModel, feeds: Mapping[str, OnnxValue]) -> dict[str, OnnxValue]:
    """The outputs of a model on onnx's evaluator. External initializers become inputs, so that they are not loaded."""
    copy, stored = model.model.clone(), dict[str, OnnxValue]()
    for name, value in list(copy.graph.initializers.items()):
        if isinstance(value.const_value, ir.ExternalTensor):
            stored[name], value.const_value = value.const_value.numpy(), None
            del copy.graph.initializers[name]
            copy.graph.inputs.extend([] if value in copy.graph.inputs else [value])
    try:
        evaluator = reference_evaluator(ir.to_proto(copy))
        return dict(zip(evaluator.output_names, evaluator.run(None, {**stored, **feeds}), strict=True))
    except NotImplementedError as error:
        raise DumpError(f"{model.name}: {first_line(str(error))}; use --runtime ort") from error
    except Exception as error:  # an operator's Python code may raise anything
        said = f"{type(error).__name__}: {first_line(str(error))}"
        raise DumpError(f"{model.name}: the reference evaluator fails: {said}") from error
