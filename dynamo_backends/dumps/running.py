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
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx

from ..errors import first_line
from .differences import OnnxValue, described, kind_of
from .execution import Session, Settings, operator_of
from .models import OnnxModel, is_external, load_model
from .reading import DumpError
from .reference import reference_evaluator, unknown_to_reference


@dataclasses.dataclass(frozen=True)
class Runtime:
    """What runs models.

    Attributes:
        name: ``ort`` for ONNX Runtime, ``reference`` for onnx's evaluator in Python.
        settings: of ONNX Runtime's sessions.
        optimize: whether the model is shown as ONNX Runtime optimizes it.
    """

    name: str = "ort"
    settings: Settings = dataclasses.field(default_factory=Settings)
    optimize: bool = False


@dataclasses.dataclass(frozen=True)
class NodeValue:
    """A value of a model that ran.

    Attributes:
        kind: ``initializer``, ``constant``, ``input`` or ``result``.
        name: of the value.
        operator: of its node, with the domain where it is not ONNX's own; else ``""``.
        inputs: the names of what its node reads.
        value: the value; ``None`` if it is an empty optional, or was not computed.
        source: the user's line that the node comes from, ``model.py:12``, or ``""``.
    """

    kind: str
    name: str
    operator: str = ""
    inputs: tuple[str, ...] = ()
    value: OnnxValue = None
    source: str = ""


@dataclasses.dataclass(frozen=True)
class ModelRun:
    """A model that ran.

    Attributes:
        model: what ran; with ``optimize`` the form that ONNX Runtime made.
        values: in the order they are computed; initializers and inputs first.
        outputs: by name, in order.
    """

    model: OnnxModel
    values: Sequence[NodeValue]
    outputs: Mapping[str, OnnxValue]


def check_feeds(model: OnnxModel, feeds: Mapping[str, OnnxValue]) -> None:
    """Sees that every input of a model has a value of its type.

    Raises:
        DumpError: one has none, or one of another dtype or rank.
    """
    missing = [item for item in model.inputs if item.name not in feeds]
    if missing:
        raise DumpError(
            f"{model.name}: no value for {', '.join(f'{item.name} ({item.described})' for item in missing)}"
        )
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


def run_model(model: OnnxModel, feeds: Mapping[str, OnnxValue], runtime: Runtime) -> ModelRun:
    """Runs a model, and keeps the value of each node.

    Args:
        model: the model.
        feeds: a value for each input, by name; others are left out.
        runtime: what runs it.

    Raises:
        DumpError: an input has no value, or the runtime cannot run the model, with what it said.
    """
    check_feeds(model, feeds)
    feeds = {item.name: feeds[item.name] for item in model.inputs}
    if runtime.name == "reference":
        if runtime.optimize:
            with tempfile.TemporaryDirectory() as folder:
                return _run_reference(_optimized(model, runtime.settings, folder)[0], feeds)
        return _run_reference(model, feeds)
    if not runtime.optimize:
        return _run_exposed(model, feeds, runtime.settings.unoptimized)
    with tempfile.TemporaryDirectory() as folder:
        optimized, session = _optimized(model, runtime.settings, folder)
        outputs = session(feeds)
        # Exposing values stops fusions, so the outputs are those of the session itself.
        exposed = _run_exposed(optimized, feeds, runtime.settings.unoptimized)
        values = [_kept(item) if item.kind == "initializer" else item for item in exposed.values]
        return ModelRun(exposed.model, values, outputs)


def _kept(item: NodeValue) -> NodeValue:
    """The same with a value that is not in a file that will be removed."""
    return dataclasses.replace(item, value=np.array(item.value))


def _run_exposed(model: OnnxModel, feeds: Mapping[str, OnnxValue], settings: Settings) -> ModelRun:
    """Runs a model with the value of every node as an output."""
    exposed = model.copy()
    graph = exposed.proto.graph
    known = set(model.outputs)
    for node in model.proto.graph.node:
        for name in node.output:
            if name and name not in known:
                graph.output.append(onnx.ValueInfoProto(name=name))
                known.add(name)
    found = Session(exposed, settings)(feeds)
    return ModelRun(model, _values(model, feeds, found), {name: found[name] for name in model.outputs})


def _values(model: OnnxModel, feeds: Mapping[str, OnnxValue], found: Mapping[str, OnnxValue]) -> list[NodeValue]:
    values = [NodeValue("initializer", name, value=value) for name, value in model.initializers.items()]
    values += [NodeValue("input", name, value=value) for name, value in feeds.items()]
    for node in model.proto.graph.node:
        kind = "constant" if node.op_type == "Constant" else "result"
        source = next((item.value for item in node.metadata_props if item.key == "source"), "")
        for name in node.output:
            if name in found:
                values.append(NodeValue(kind, name, operator_of(node), tuple(node.input), found[name], source))
    return values


def _optimized(model: OnnxModel, settings: Settings, folder: str) -> tuple[OnnxModel, Session]:
    """The model that ONNX Runtime makes of one, written to a folder, and the session that did it."""
    session = Session(model, settings, write=Path(folder))
    return load_model(f"{folder}/model.onnx", f"{model.name} (optimized)"), session


def _run_reference(model: OnnxModel, feeds: Mapping[str, OnnxValue]) -> ModelRun:
    """Runs a model on onnx's evaluator, with the operators that onnx-array-api adds."""
    from onnx_array_api.reference import ResultType, YieldEvaluator

    inner = model.copy()
    external = {name: model.initializers[name] for name in model.external}
    kept = [item for item in inner.proto.graph.initializer if not is_external(item)]
    del inner.proto.graph.initializer[:]
    inner.proto.graph.initializer.extend(kept)
    types = {item.name for item in inner.proto.graph.input}
    inner.proto.graph.input.extend(onnx.ValueInfoProto(name=name) for name in external if name not in types)
    nodes = model.proto.graph.node
    makers = {name: node for node in nodes for name in node.output if name}
    found: dict[str, OnnxValue] = {}
    outputs: dict[str, OnnxValue] = {}
    try:
        evaluator = YieldEvaluator(inner.proto, cls=reference_evaluator)
        for kind, name, value, _ in evaluator.enumerate_results(None, {**external, **feeds}):
            if kind == ResultType.OUTPUT:
                outputs[name] = value
            elif kind == ResultType.RESULT:
                found[name] = value
    except NotImplementedError as error:
        raise DumpError(
            f"{model.name}: the reference evaluator has no {unknown_to_reference(nodes) or first_line(str(error))}; "
            "use --runtime ort"
        ) from error
    except Exception as error:  # whatever an operator's Python raises
        at = next((f"{operator_of(node)} {name}" for name, node in makers.items() if name not in found), "its outputs")
        raise DumpError(
            f"{model.name}: the reference evaluator fails at {at}: {type(error).__name__}: {first_line(str(error))}"
        ) from error
    return ModelRun(model, _values(model, feeds, found), outputs)
