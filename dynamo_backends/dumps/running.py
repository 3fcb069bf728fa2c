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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from ..errors import first_line
from .differences import OnnxValue, epsilon, kind_of
from .models import OnnxModel, is_external, load_model
from .reading import DumpError

if TYPE_CHECKING:
    import numpy as np
    import onnx
    import onnxruntime

_SILENT = 4

_LARGEST_MOVED = 2**28
"""Bytes of weights that are moved by rounding at most; those of larger models in part."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a model becomes an ONNX Runtime session.

    Attributes:
        providers: names of execution providers, in the order of preference.
        provider_options: for each of them.
        level: ``all``, ``extended``, ``basic`` or ``disable_all``: ONNX Runtime's graph optimizations.
        disabled_optimizers: names of those that do not run.
        threads: of the session; 0 for as many as there are cores.
        config: entries of the session's configuration.
    """

    providers: tuple[str, ...] = ("CPUExecutionProvider",)
    provider_options: tuple[Mapping[str, str], ...] = ()
    level: str = "all"
    disabled_optimizers: tuple[str, ...] = ()
    threads: int = 0
    config: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def unoptimized(self) -> Settings:
        """The same without graph optimizations."""
        return dataclasses.replace(self, level="disable_all", disabled_optimizers=())


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


def available_provider(name: str) -> str:
    """The execution provider that a user means: ``CPUExecutionProvider``, or ``cpu`` for short.

    Raises:
        DumpError: this ONNX Runtime has none of that name; the message lists those that it has.
    """
    import onnxruntime

    from ..spelling import unknown_name

    available = onnxruntime.get_available_providers()
    by_short_name = {item.removesuffix("ExecutionProvider").lower(): item for item in available}
    found = by_short_name.get(name.removesuffix("ExecutionProvider").lower())
    if found is None:
        raise DumpError(
            f"{unknown_name('execution provider', name, available)}. Other builds of onnxruntime have others"
        )
    return found


def check_feeds(model: OnnxModel, feeds: Mapping[str, OnnxValue]) -> None:
    """Sees that every input of a model has a value of its type.

    Raises:
        DumpError: one has none, or one of another dtype or rank.
    """
    import numpy as np

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
            from .differences import described

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
        outputs = run_session(session, model.name, feeds, model.outputs)
        # Exposing values stops fusions, so the outputs are those of the session itself.
        exposed = _run_exposed(optimized, feeds, runtime.settings.unoptimized)
        values = [_kept(item) if item.kind == "initializer" else item for item in exposed.values]
        return ModelRun(exposed.model, values, outputs)


def _kept(item: NodeValue) -> NodeValue:
    """The same with a value that is not in a file that will be removed."""
    import numpy as np

    return dataclasses.replace(item, value=np.array(item.value))


def make_session(
    model: OnnxModel, settings: Settings, configure: Callable[[onnxruntime.SessionOptions], None] | None = None
) -> onnxruntime.InferenceSession:
    """An ONNX Runtime session of a model; its external data is read from the model's folder.

    Args:
        model: the model.
        settings: of the session.
        configure: sets what else there is to set.

    Raises:
        DumpError: ONNX Runtime refuses the model, with what it said, or does not use the first provider.
    """
    import onnxruntime

    from ..runtime.messages import ORT_ERRORS

    options = onnxruntime.SessionOptions()
    options.log_severity_level = _SILENT
    options.intra_op_num_threads = settings.threads
    options.graph_optimization_level = _levels()[settings.level]
    options.add_session_config_entry(
        "session.model_external_initializers_file_folder_path", str(model.folder.resolve())
    )
    for key, entry in settings.config.items():
        options.add_session_config_entry(key, entry)
    if configure is not None:
        configure(options)
    try:
        session = onnxruntime.InferenceSession(
            _serialized(model),
            options,
            providers=list(settings.providers),
            provider_options=[dict(item) for item in settings.provider_options] or None,
            disabled_optimizers=list(settings.disabled_optimizers) or None,
        )
    except ORT_ERRORS as error:
        raise DumpError(f"{model.name}: ONNX Runtime refuses the model: {first_line(str(error))}") from error
    if settings.providers[0] not in session.get_providers():
        raise DumpError(
            f"{settings.providers[0]} is there, but does not start; ONNX Runtime would take another instead"
        )
    return session


def _levels() -> dict[str, onnxruntime.GraphOptimizationLevel]:
    import onnxruntime

    levels = onnxruntime.GraphOptimizationLevel.__members__
    return {name.removeprefix("ORT_ENABLE_").removeprefix("ORT_").lower(): level for name, level in levels.items()}


LEVELS = ("disable_all", "basic", "extended", "layout", "all")
"""ONNX Runtime's graph optimizations, as ``Settings.level``."""


def _serialized(model: OnnxModel) -> bytes:
    from google.protobuf.message import EncodeError

    try:
        content: bytes = model.proto.SerializeToString()
    except (EncodeError, ValueError) as error:
        raise DumpError(
            f"{model.name} is too large for one file; save it with its weights as external data: {error}"
        ) from None
    return content


def run_session(
    session: onnxruntime.InferenceSession, name: str, feeds: Mapping[str, OnnxValue], wanted: Sequence[str]
) -> dict[str, OnnxValue]:
    """What a session returns, by name; bfloat16, float8 and the like as dtypes of ``ml_dtypes``.

    Args:
        session: the session.
        name: of its model, for messages.
        feeds: a value for each input.
        wanted: names of outputs.

    Raises:
        DumpError: it fails, with what it said.
    """
    from ..runtime.messages import ORT_ERRORS

    taken = {item.name for item in session.get_inputs()}
    feeds = {key: value for key, value in feeds.items() if key in taken}
    types = {item.name: item.type for item in session.get_outputs()}
    # Sequences, maps and optionals have no OrtValue in Python, nor have strings as inputs; bfloat16 has no other way.
    plain = [item for item in wanted if not types[item].startswith("tensor(")]
    if any(kind_of(value.dtype) == "string" for value in feeds.values()):  # type: ignore[union-attr]
        plain = list(wanted)
    bound = [item for item in wanted if item not in set(plain)]
    found: dict[str, OnnxValue] = {}
    try:
        if bound:
            results = session.run_with_ort_values(bound, {key: ort_value(value) for key, value in feeds.items()})
            found.update((item, as_array(result)) for item, result in zip(bound, results, strict=True))
        if plain:
            found.update(zip(plain, session.run(plain, feeds), strict=True))
    except ORT_ERRORS as error:
        raise DumpError(f"{name}: ONNX Runtime fails: {first_line(str(error))}") from error
    return {item: found[item] for item in wanted}


def ort_value(value: OnnxValue) -> onnxruntime.OrtValue:
    """A tensor in ONNX Runtime's form, of any dtype that ONNX has."""
    import numpy as np
    import onnx
    import onnxruntime

    assert isinstance(value, np.ndarray)
    value = np.ascontiguousarray(value)
    if value.dtype.kind in "biufc" and value.dtype.type.__module__ == "numpy":
        return onnxruntime.OrtValue.ortvalue_from_numpy(value)
    number = onnx.helper.np_dtype_to_tensor_dtype(value.dtype)
    bits = value.view({1: np.uint8, 2: np.uint16}[value.dtype.itemsize])
    return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, number)


def as_array(result: onnxruntime.OrtValue) -> np.ndarray:
    """A tensor of ONNX Runtime as an array, also of a dtype that its own conversion has not."""
    import ctypes

    import onnx

    number = result.element_type()
    if number in _NUMPY_OF_ORT:
        array: np.ndarray = result.numpy()
        return array
    content = ctypes.string_at(result.data_ptr(), result.tensor_size_in_bytes())
    proto = onnx.TensorProto(dims=result.shape(), data_type=number, raw_data=content)
    return onnx.numpy_helper.to_array(proto)


_NUMPY_OF_ORT = frozenset((*range(1, 16),))
"""ONNX's numbers of the dtypes that are numpy's too: from float32 (1) to complex128 (15)."""


def _operator(node: onnx.NodeProto) -> str:
    return node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}::{node.op_type}"


def _run_exposed(model: OnnxModel, feeds: Mapping[str, OnnxValue], settings: Settings) -> ModelRun:
    """Runs a model with the value of every node as an output."""
    import onnx

    exposed = model.copy()
    graph = exposed.proto.graph
    known = set(model.outputs)
    for node in model.proto.graph.node:
        for name in node.output:
            if name and name not in known:
                graph.output.append(onnx.ValueInfoProto(name=name))
                known.add(name)
    session = make_session(exposed, settings)
    found = run_session(session, model.name, feeds, [item.name for item in session.get_outputs()])
    return ModelRun(model, _values(model, feeds, found), {name: found[name] for name in model.outputs})


def _values(model: OnnxModel, feeds: Mapping[str, OnnxValue], found: Mapping[str, OnnxValue]) -> list[NodeValue]:
    values = [NodeValue("initializer", name, value=value) for name, value in model.initializers.items()]
    values += [NodeValue("input", name, value=value) for name, value in feeds.items()]
    for node in model.proto.graph.node:
        kind = "constant" if node.op_type == "Constant" else "result"
        source = next((item.value for item in node.metadata_props if item.key == "source"), "")
        for name in node.output:
            if name in found:
                values.append(NodeValue(kind, name, _operator(node), tuple(node.input), found[name], source))
    return values


def _optimized(model: OnnxModel, settings: Settings, folder: str) -> tuple[OnnxModel, onnxruntime.InferenceSession]:
    """The model that ONNX Runtime makes of one, written to a folder, and the session that did it."""
    prefix = "session.optimized_model_external_initializers_"

    def configure(options: onnxruntime.SessionOptions) -> None:
        options.optimized_model_filepath = f"{folder}/optimized.onnx"
        options.add_session_config_entry(f"{prefix}file_name", "optimized.data")
        options.add_session_config_entry(f"{prefix}min_size_in_bytes", "1024")

    session = make_session(model, settings, configure)
    return load_model(f"{folder}/optimized.onnx", f"{model.name} (optimized)"), session


def _run_reference(model: OnnxModel, feeds: Mapping[str, OnnxValue]) -> ModelRun:
    """Runs a model on onnx's evaluator, with the operators that onnx-array-api adds."""
    import onnx
    from onnx_array_api.reference import ResultType, YieldEvaluator

    inner = model.copy()
    external = {name: model.initializers[name] for name in model.external}
    kept = [item for item in inner.proto.graph.initializer if not is_external(item)]
    del inner.proto.graph.initializer[:]
    inner.proto.graph.initializer.extend(kept)
    types = {item.name for item in inner.proto.graph.input}
    inner.proto.graph.input.extend(onnx.ValueInfoProto(name=name) for name in external if name not in types)
    nodes = {name: node for node in model.proto.graph.node for name in node.output if name}
    found: dict[str, OnnxValue] = {}
    outputs: dict[str, OnnxValue] = {}
    order = list(nodes)
    try:
        evaluator = YieldEvaluator(inner.proto, cls=_evaluator)
        for kind, name, value, _ in evaluator.enumerate_results(None, {**external, **feeds}):
            if kind == ResultType.OUTPUT:
                outputs[name] = value
            elif kind == ResultType.RESULT:
                found[name] = value
    except NotImplementedError as error:
        raise DumpError(
            f"{model.name}: the reference evaluator has no {_unknown_operator(model) or first_line(str(error))}; "
            "use --runtime ort"
        ) from error
    except Exception as error:  # whatever an operator's Python raises
        at = next((f"{_operator(nodes[item])} {item}" for item in order if item not in found), "its outputs")
        raise DumpError(
            f"{model.name}: the reference evaluator fails at {at}: {type(error).__name__}: {first_line(str(error))}"
        ) from error
    return ModelRun(model, _values(model, feeds, found), outputs)


def _evaluator(model: onnx.ModelProto) -> onnx.reference.ReferenceEvaluator:
    """onnx-array-api's evaluator, without two operators that do not do what ONNX says.

    onnx-array-api 0.3's ``ScatterElements`` takes the reduction ``mul`` for none: onnx's own is used. onnx 1.23's
    ``GatherElements`` fails on more than 64 rows, and where there are fewer indices along another axis.
    """
    import numpy as np
    from onnx.reference import ReferenceEvaluator
    from onnx.reference.op_run import OpRun
    from onnx_array_api.reference import ExtendedReferenceEvaluator

    class GatherElements(OpRun):
        """``data`` may be larger than ``indices`` along the other axes."""

        def _run(self, data: np.ndarray, indices: np.ndarray, axis: int = 0) -> tuple[np.ndarray]:
            axis %= data.ndim
            within = tuple(slice(None if i == axis else size) for i, size in enumerate(indices.shape))
            return (np.take_along_axis(data[within], indices.astype(np.int64), axis),)

    operators = [item for item in ExtendedReferenceEvaluator.default_ops if item.__name__ != "ScatterElements"]
    operators.append(GatherElements)
    return ReferenceEvaluator(model, new_ops=ExtendedReferenceEvaluator.filter_ops(model, operators, opsets=None))


def _unknown_operator(model: OnnxModel) -> str:
    """The operators of a model that the reference evaluator does not have, or ``""``."""
    import onnx
    from onnx_array_api.reference import ExtendedReferenceEvaluator

    added = {(item.op_domain, item.__name__.split("_")[0]) for item in ExtendedReferenceEvaluator.default_ops}
    unknown = {
        _operator(node)
        for node in model.proto.graph.node
        if not onnx.defs.has(node.op_type, node.domain) and (node.domain, node.op_type) not in added
    }
    return ", ".join(sorted(unknown))


def moved_by_rounding(
    model: OnnxModel, feeds: Mapping[str, OnnxValue], unit: float, seed: int = 0
) -> tuple[OnnxModel, dict[str, OnnxValue]]:
    """A model and its inputs, all floating-point values larger or smaller by one unit of rounding.

    Args:
        model: the model; its weights in files are read if they are not too large together.
        feeds: its inputs.
        unit: of rounding, relative; that of a value's own dtype if that is larger.
        seed: of the directions.
    """
    import numpy as np
    import onnx

    generator = np.random.default_rng(seed)

    def moved(value: np.ndarray) -> np.ndarray:
        relative = max(unit, epsilon(value.dtype))
        signs = generator.integers(0, 2, value.shape) * 2 - 1
        with np.errstate(all="ignore"):
            shifted = (value.astype(np.float64) * (1 + relative * signs)).astype(value.dtype)
            return np.where(np.isfinite(shifted.astype(np.float64)), shifted, value)

    changed = model.copy()
    room = _LARGEST_MOVED
    for item in changed.proto.graph.initializer:
        value = model.initializers[item.name]
        if kind_of(value.dtype) == "float" and value.nbytes <= room:
            room -= value.nbytes
            item.CopyFrom(onnx.numpy_helper.from_array(moved(value), item.name))
    return changed, {
        name: moved(value) if isinstance(value, np.ndarray) and kind_of(value.dtype) == "float" else value
        for name, value in feeds.items()
    }


def operators(model: OnnxModel) -> Iterator[str]:
    """The operator of each node."""
    return map(_operator, model.proto.graph.node)


RANDOM_OPERATORS = frozenset(
    {"RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial", "Bernoulli"}
)
"""Operators that give other values at each run."""
