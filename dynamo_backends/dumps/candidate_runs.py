"""Runs models that may be wrong, be rejected, or crash: each in a subprocess.

::

    with CandidateRunner() as runner:
        outcome = runner.run(model, {"x": x}, settings)
        outcome.kind         # "ran", "rejected", "failed" or "crashed"

The subprocess runs ``main()`` of this module. A request is a line of JSON; tensors go through files of ONNX's.
"""

from __future__ import annotations

import dataclasses
import logging
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np
import onnx
import onnx_ir as ir

from ..common.python_process import Worker, WorkerExit, WorkerStartError, answer_requests, exit_code_text
from ..numerics.rule import FORMATS, INSIDE, RUNS
from .model_sessions import PLAIN, ExecutionError, ModelSession
from .models import OnnxModel
from .reading import DATA_SET, PROTOBUF_LIMIT, DumpError, read_data_set, write_data_set
from .schema import Settings
from .value_differences import difference_from_reference

logger = logging.getLogger(__name__)

Feeds: TypeAlias = "Mapping[str, np.ndarray]"  # tensors by name, of any dtype that ONNX has

LONGEST = 600.0  # timeout of a candidate, in seconds

_HOPELESS = 64.0
"""A value that is so many times its tolerance after a perturbed run is wrong: more runs do not add as much."""

_MOST_NODES = 64  # larger models are too slow for onnx's reference evaluator, which is written in Python


@dataclasses.dataclass(frozen=True)
class CandidateOutcome:
    """The result of a candidate."""

    kind: str  # ``built`` (session only), ``ran``, ``rejected`` (no session), ``failed`` (run error), ``crashed``
    message: str = ""  # ONNX Runtime's error, or the signal or exit code of the process
    outputs: Feeds = dataclasses.field(default_factory=dict)  # by name, in the model's order, if it ran


class CandidateRunner:
    """Runs candidates in one worker process, which is restarted after a crash. ``count`` is how many ran."""

    def __init__(self) -> None:
        self._worker = Worker(f"{__package__}.candidate_runs")
        self.count = 0

    def __enter__(self) -> CandidateRunner:
        return self

    def __exit__(self, *error: object) -> None:
        self._worker.stop()

    def run(self, model: ir.Model | Path, feeds: Feeds | None, settings: Settings) -> CandidateOutcome:
        """Creates a session of a model, or of a file, and runs it.

        ``feeds`` are the inputs, and may hold other values; with ``None`` the session is created but not run.

        Raises:
            DumpError: the worker does not start.
        """
        self.count += 1
        with tempfile.TemporaryDirectory(prefix="dynamo_backends_bisect_") as name:
            folder = Path(name)
            path = model if isinstance(model, Path) else write_model(model, folder)
            request: dict[str, Any] = {"model": str(path), "settings": settings.as_json(), "data": ""}
            if isinstance(model, ir.Model):
                request["external_data"] = _external_data(model) or name
                taken = {value.name for value in model.graph.inputs}
                feeds = None if feeds is None else {name: feeds[name] for name in feeds if name in taken}
            if feeds is not None:
                write_data_set(folder / DATA_SET, "input", feeds)
                request["data"] = str(folder / DATA_SET)
            try:
                answer = self._worker.ask(request, LONGEST)
            except WorkerStartError as error:  # not the model's fault
                raise DumpError(str(error)) from error
            if isinstance(answer, WorkerExit):
                timeout = f"timeout after {LONGEST:g} seconds"
                return CandidateOutcome("crashed", timeout if answer.timed_out else exit_code_text(answer.code))
            return CandidateOutcome(answer["kind"], answer["message"], dict(read_data_set(folder / DATA_SET, "output")))

    def exact(self, model: ir.Model, feeds: Feeds) -> Feeds | None:
        """The outputs of a model computed in float64, by name; ``None`` if that fails.

        onnx's reference evaluator comes first, since a kernel of ONNX Runtime that is wrong in float32 may be wrong in
        float64 too. ONNX Runtime runs large models and operators that the evaluator lacks. The model must have no
        local functions.
        """
        wide = in_float64(model)
        wanted = {str(value.name): value.dtype == ir.DataType.DOUBLE for value in wide.graph.inputs}
        arrays = {name: feeds[name].astype(np.float64) if is_wide else feeds[name] for name, is_wide in wanted.items()}
        found = evaluated(wide, arrays) if len(wide.graph) <= _MOST_NODES else None
        if found is not None:
            return found
        outcome = self.run(wide, arrays, PLAIN)
        return outcome.outputs if outcome.kind == "ran" else None

    def error(
        self,
        model: ir.Model,
        known: Feeds,
        name: str,
        value: np.ndarray,
        exact: np.ndarray,
        others: Sequence[np.ndarray],
    ) -> float | None:
        """The error of a value of a model; ``None`` if inputs and weights that are off by a rounding explain it.

        Args:
            model: computes the value from inputs among ``known``.
            name: of the value.
            value, exact: the value, and its reference.
            others: other right values.
        """
        from .model_values import perturbed

        model, weights = _weights_as_inputs(model)
        given = {str(item.name): known[str(item.name)] for item in model.graph.inputs if item.name not in weights}
        given |= weights
        others = list(others)
        inside = _inside(model, given)
        error = difference_from_reference(value, exact, others, more=inside)
        for seed in range(RUNS):
            if error.is_rounding:
                return None
            generator = np.random.default_rng(seed)
            changed = {key: np.asarray(perturbed(item, 0.0, generator)) for key, item in given.items()}
            results = self.exact(model, changed) or self.run(model, changed, PLAIN).outputs
            others += [results[name]] if name in results and results[name].shape == value.shape else []
            error = difference_from_reference(value, exact, others, more=inside)
            if error.measured.share > _HOPELESS:
                break
        return None if error.is_rounding else error.error


def main() -> None:
    """Entry point of the worker: answers the requests of a ``CandidateRunner``."""
    answer_requests(_answer)


def _answer(request: dict[str, Any]) -> dict[str, str]:
    path = Path(request["model"])
    model: OnnxModel | Path = path
    if "external_data" in request:
        proto = onnx.load_model(path, load_external_data=False)
        model = OnnxModel(proto, Path(request["external_data"]), str(path))
    try:
        session = ModelSession(model, msgspec.convert(request["settings"], Settings))
        if not request["data"]:
            return {"kind": "built", "message": ""}
        outputs = session(dict(read_data_set(Path(request["data"]), "input")))
    except ExecutionError as error:
        return {"kind": error.kind, "message": error.said}
    tensors = {name: value for name, value in outputs.items() if isinstance(value, np.ndarray)}
    write_data_set(Path(request["data"]), "output", tensors)
    return {"kind": "ran", "message": ""}


def write_model(model: ir.Model, folder: Path, name: str = "model.onnx", *, whole: bool = False) -> Path:
    """Writes a model; weights go to a second file if protobuf's 2 GB limit requires it.

    Weights that are in a file already stay there, unless ``whole`` is set.
    """
    path = folder / name
    values = [value.const_value for value in model.graph.initializers.values() if value.const_value is not None]
    external = [value for value in values if isinstance(value, ir.ExternalTensor)]
    size = sum(value.nbytes for value in values if whole or not isinstance(value, ir.ExternalTensor))
    if size > PROTOBUF_LIMIT:
        ir.save(model, path, external_data=f"{name}.data")
        return path
    if whole and external:
        model = model.clone()
        ir.external_data.load_to_model(model)
    path.write_bytes(ir.to_proto(model).SerializeToString())
    return path


def evaluated(model: ir.Model, feeds: Feeds) -> Feeds | None:
    """The outputs of a model by name, computed by onnx's evaluator; ``None`` if that fails."""
    from .model_values import reference_evaluator  # not at the top: the worker does not need it

    try:
        with np.errstate(all="ignore"):
            results = reference_evaluator(_for_reference(model)).run(None, dict(feeds))
    except Exception as error:  # whatever an operator's Python raises
        logger.info("the reference evaluator fails, ONNX Runtime runs the model instead: %r", error)
        return None
    names = [str(value.name) for value in model.graph.outputs]
    return {name: np.asarray(item) for name, item in zip(names, results, strict=True)}


def in_float64(model: ir.Model) -> ir.Model:
    """A copy in which all floating-point values are float64, including inputs, constants and subgraphs."""
    copy = model.clone()
    for graph in copy.graphs():
        values = [*graph.inputs, *graph.initializers.values()]
        for node in graph:
            values.extend(node.outputs)
            _widen_attributes(node)
        for value in values:
            if value.dtype in _NARROW:
                value.type = ir.TensorType(ir.DataType.DOUBLE)  # a new type: the copy shares the old one with the model
            if value.const_value is not None and value.const_value.dtype in _NARROW:
                value.const_value = ir.tensor(value.const_value.numpy().astype(np.float64), name=value.name)
    return copy


_NARROW = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.FLOAT)

_DTYPE_ATTRIBUTES = ("to", "dtype", "stash_type", "softmax_precision")  # dtypes of results or intermediate values


def _widen_attributes(node: ir.Node) -> None:
    """Widens the dtypes and tensors in a node's attributes."""
    for name, attribute in list(node.attributes.items()):
        if attribute.is_ref():
            continue
        if attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype in _NARROW:
            value = attribute.as_tensor().numpy().astype(np.float64)
            node.attributes[name] = ir.AttrTensor(name, ir.tensor(value))
        elif name in _DTYPE_ATTRIBUTES and attribute.type == ir.AttributeType.INT and attribute.as_int() in _NARROW:
            node.attributes[name] = ir.AttrInt64(name, int(ir.DataType.DOUBLE))
        elif name in ("value_float", "value_floats") and node.op_type == "Constant":
            del node.attributes[name]
            node.attributes["value"] = ir.AttrTensor("value", ir.tensor(np.asarray(attribute.value, np.float64)))


def _weights_as_inputs(model: ir.Model) -> tuple[ir.Model, dict[str, np.ndarray]]:
    """A copy with its floating-point initializers as inputs, and their values. Single numbers and scales stay."""
    copy, values = model.clone(), dict[str, np.ndarray]()
    shapes = {value for node in copy.graph if node.op_type == "Resize" for value in node.inputs[1:]}
    for name, value in list(copy.graph.initializers.items()):
        tensor = value.const_value
        if value in shapes or tensor is None:
            continue
        if tensor.dtype.is_floating_point() and tensor.size > 1:
            values[name] = tensor.numpy()
            value.type, value.shape = ir.TensorType(tensor.dtype), ir.Shape(values[name].shape)
            value.const_value = None
            del copy.graph.initializers[name]
            if value not in copy.graph.inputs:
                copy.graph.inputs.append(value)
    return copy, values


def _inside(model: ir.Model, given: Feeds) -> np.ndarray | float:
    """What an activation rounds inside, for each element."""
    import torch  # not at the top: the worker does not need it

    from ..numerics.operator_facts import size_inside_named

    nodes = list(model.graph)
    argument = given.get(str(nodes[0].inputs[0].name)) if len(nodes) == 1 and nodes[0].inputs[:1] != (None,) else None
    if argument is None or argument.dtype.name not in ("float16", "float32", "float64"):
        return 0.0
    size = size_inside_named(nodes[0].op_type.lower(), torch.from_numpy(argument.astype(np.float64)))
    return 0.0 if size is None else size.numpy() * (INSIDE * FORMATS[argument.dtype.name].computed)


def _for_reference(model: ir.Model) -> onnx.ModelProto:
    """For onnx's evaluator, which computes in the dtype of the inputs, and rejects another ``stash_type``."""
    proto = ir.to_proto(model)
    for node in proto.graph.node:
        kept = [item for item in node.attribute if item.name != "stash_type"]
        del node.attribute[:]
        node.attribute.extend(kept)
    return proto


def _external_data(model: ir.Model) -> str:
    """The folder of a model's external weights, or ``""``."""
    values = (value.const_value for value in model.graph.initializers.values())
    return next((str(value.base_dir) for value in values if isinstance(value, ir.ExternalTensor)), "")
