"""Translates FX nodes to one ONNX model, by the converter of each node's operator.

An ONNX value has the name of the FX node it is the result of, or ``name__0``, ``name__1`` if the node has several
results. A parameter or buffer has the user's name, ``encoder.layer.0.weight``. Each ONNX node has the metadata::

    fx_node      the FX node
    aten_op      its operator, aten.addmm.default
    module       the path of the nn.Module that called it, layers.0.mlp.up_proj
    source       the user's line, model.py:17
"""

from __future__ import annotations

import operator
import traceback
from collections.abc import Collection, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import onnx
import onnx_ir as ir
import torch
from onnx_ir.passes import common as ir_passes
from onnxscript import optimizer
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..errors import TranslationError, first_line
from ..graphs.artifacts import RegionInput, RegionOutput, operator_name
from ..graphs.locations import (
    is_of_pytorch_or_ours,
    is_user_file,
    module_path,
    short_file,
    source_line,
    user_name,
)
from ..versions import IR_VERSION
from . import torch_internals
from .converters import converter_of
from .converters.symbolic_numbers import IS_NONNEGATIVE
from .indices import INDEX_ARGUMENT, reject_negative
from .known_constants import KNOWN_VALUE, known_value
from .promotion import promoted_dtypes
from .registration import registered_converter
from .results import check_results, expected_dtype, expected_shape
from .scalar_range import converted_fill
from .signature import used_results

Values: TypeAlias = "ir.Value | None | Sequence[ir.Value | None]"


def find_translation(target: object, opset: int) -> object | None:
    """The converter of an operator at ``opset``: the user's, else ours, else torchlib's, else ``None``."""
    ours = registered_converter(target) or converter_of(target)
    return ours if ours is not None else torch_internals.torchlib_function(target, opset)


def value_names(node: fx.Node) -> list[str]:
    """The names of the ONNX values of a node's results."""
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        return [f"{node.args[0].name}__{node.args[1]}"]
    meta = node.meta.get("val")
    if isinstance(meta, (tuple, list)):
        return [f"{node.name}__{i}" for i in range(len(meta))]
    return [node.name]


def translate(
    nodes: Sequence[fx.Node],
    inputs: Sequence[RegionInput],
    outputs: Sequence[RegionOutput],
    *,
    opset: int,
    name: str = "region",
) -> ir.Model:
    """An ONNX model that computes ``outputs`` from ``inputs`` by ``nodes``. Constants are not folded.

    Args:
        nodes: call_function nodes of one graph in execution order, each with ``meta["val"]``.
        inputs: the model's inputs in order: nodes outside ``nodes`` whose value is a tensor or a symbolic integer.
        outputs: the model's outputs in order.
        opset: the ONNX opset of the model.
        name: the name of the ONNX graph.

    Raises:
        TranslationError: a node cannot be translated; the error has the node and the reason.
    """
    return _Translation(opset, name).run(nodes, inputs, outputs)


def fold_constants(model: ir.Model) -> ir.Model:
    """Folds constants and removes unused nodes, in place. The result is dumped as ``model.onnx``.

    Raises:
        TranslationError: onnxscript cannot compute a node with constant inputs.
    """
    try:
        with np.errstate(all="ignore"):  # infinities and NaN may be intended
            optimizer.fold_constants(model)
    except RuntimeError as error:
        raise TranslationError(f"its constants cannot be folded: {_root_cause(error)}") from error
    ir_passes.RemoveUnusedNodesPass()(model)
    return model


def serialize(model: ir.Model) -> bytes:
    """The model as a serialized ``ModelProto``."""
    return ir.to_proto(model).SerializeToString()


class _Translation:
    """The state of one call of ``translate``."""

    def __init__(self, opset: int, name: str) -> None:
        self.opset = opset
        graph = ir.Graph([], [], nodes=[], opset_imports={"": opset}, name=name)
        self.model = ir.Model(graph, ir_version=IR_VERSION, producer_name="dynamo-backends")
        self.graph = graph
        self.values: dict[fx.Node, Values] = {}
        self.constants = torch_internals.Constants()

    def run(self, nodes: Sequence[fx.Node], inputs: Sequence[RegionInput], outputs: Sequence[RegionOutput]) -> ir.Model:
        taken = {name for node in nodes for name in value_names(node)} | {item.node.name for item in inputs}
        for item in inputs:
            name = user_name(item.node, static_only=True)
            self._add_input(item, name if name and name not in taken else item.node.name)
            taken.add(name)
        for node in nodes:
            try:
                self._add_node(node)
            except TranslationError as error:
                raise error.of(node.name, operator_name(node)) from error
        for output in outputs:
            self._add_output(output)
        self._add_opset_imports()
        if self.model.functions:
            ir_passes.InlinePass(torch_internals.is_of_torchlib)(self.model)
        return self.model

    def _add_input(self, item: RegionInput, name: str) -> None:
        value = torch_internals.SymbolicTensor(torch_internals.opset_object(self.opset), name=name)
        _set_type(value, item.node.meta["val"])
        self.values[item.node] = value
        if item.permutation is None:
            self.graph.inputs.append(value)
            return
        memory = _in_memory_order(value, item.permutation)
        self.graph.inputs.append(memory)
        inverse = [item.permutation.index(i) for i in range(len(item.permutation))]
        self.graph.append(_transpose(memory, inverse, value))

    def _add_output(self, output: RegionOutput) -> None:
        value = self._value(output.node)
        if output.index is not None and isinstance(value, Sequence):
            value = value[output.index]
        if not isinstance(value, ir.Value):
            raise TranslationError(f"{output.node.name} has several results, and the output has no index")
        if output.permutation is not None:
            memory = _in_memory_order(value, output.permutation)
            transpose = _transpose(value, output.permutation, memory)
            transpose.metadata_props.update(_origin(output.node))
            self.graph.append(transpose)
            value = memory
        self.graph.outputs.append(value)

    def _value(self, node: fx.Node) -> Values:
        if node in self.values:
            return self.values[node]
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
            results = self._value(node.args[0])
            index = node.args[1]
            if isinstance(results, Sequence) and isinstance(index, int):
                return results[index]
        raise TranslationError(f"{node.name} is used before it is computed")

    def _argument(self, arg: object, casts: Mapping[fx.Node, ir.Value]) -> object:
        if isinstance(arg, fx.Node):
            return casts[arg] if arg in casts else self._value(arg)
        if isinstance(arg, (list, tuple)):
            return [self._argument(item, casts) for item in arg]
        if isinstance(arg, torch.dtype):
            return torch_internals.onnx_dtype(arg)
        if isinstance(arg, (torch.device, torch.memory_format, torch.layout)):
            return str(arg)
        return arg

    def _add_node(self, node: fx.Node) -> None:
        if node.target is operator.getitem and isinstance(node.args[0], fx.Node) and node.args[0] in self.values:
            self.values[node] = self._value(node)
            return
        if node.meta.get(KNOWN_VALUE):
            self._add_known_value(node)
            return
        function = find_translation(node.target, self.opset)
        if function is None:
            raise TranslationError("no translation to ONNX")
        recorder = torch_internals.NodeRecorder(torch_internals.opset_object(self.opset), self.constants)
        casts = {arg: self._cast(arg, dtype, recorder) for arg, dtype in promoted_dtypes(node).items()}
        args = [self._argument(arg, casts) for arg in _with_converted_fills(node)]
        kwargs = {key: self._argument(arg, {}) for key, arg in node.kwargs.items()}
        if "dtype" in kwargs and kwargs["dtype"] is None:
            kwargs["dtype"] = -1  # torchlib's convention for None
        position = INDEX_ARGUMENT.get(node.target)
        if position is not None and position < len(args):
            args[position] = recorder.record(reject_negative, [args[position]], {})
        try:
            results = recorder.record(function, args, kwargs)  # type: ignore[arg-type]
        except TranslationError:
            raise
        except Exception as error:  # converters raise any exception
            raise TranslationError(f"its translation failed: {_root_cause(error)}") from error
        if _is_double(node.meta["val"]) and (number := recorder.rounded_number()) is not None:
            raise TranslationError(f"its translation rounds {number} to float32, and its result is float64")
        promoted = {value.dtype for value in casts.values() if value.dtype is not None}
        named = self._add_results(node, results, promoted, recorder)
        check_results(node, function, recorder.nodes, self.model.functions, named, self.opset)

    def _add_known_value(self, node: fx.Node) -> None:
        try:
            results = known_value(node)
        except Exception as error:  # operators raise any exception; PyTorch raises it at run time
            raise TranslationError(f"its value cannot be computed: {_root_cause(error)}") from error
        metas = node.meta["val"] if isinstance(results, list) else [node.meta["val"]]
        values = results if isinstance(results, list) else [results]
        for value, meta, name in zip(values, metas, value_names(node), strict=True):
            value.name = name
            _set_type(value, meta)
            constant = value.producer()
            assert constant is not None
            constant.name = f"node_{name}"
            constant.metadata_props.update(_origin(node))
            self.graph.append(constant)
        self.values[node] = results

    def _cast(self, node: fx.Node, dtype: torch.dtype, recorder: torch_internals.NodeRecorder) -> ir.Value:
        value = self._value(node)
        if not isinstance(value, ir.Value):
            raise TranslationError(f"{node.name} has several results")
        cast = torch_internals.SymbolicTensor(
            torch_internals.opset_object(self.opset),
            type=ir.TensorType(torch_internals.onnx_dtype(dtype)),
            shape=value.shape,
        )
        target = ir.AttrInt64("to", int(torch_internals.onnx_dtype(dtype)))
        recorder.nodes.append(ir.Node("", "Cast", [value], [target], outputs=[cast]))
        return cast

    def _add_results(
        self, node: fx.Node, results: object, promoted: Collection[ir.DataType], recorder: torch_internals.NodeRecorder
    ) -> list[ir.Value | None]:
        """Adds the recorded ONNX nodes to the graph; returns the results, with the FX node's names, shapes and dtypes.

        Args:
            node: the FX node.
            results: what its converter returned.
            promoted: the dtypes its arguments were cast to. A result with one of these is cast to eager's dtype.
            recorder: has the ONNX nodes of the converter.
        """
        for function in recorder.model_functions():
            present = self.model.functions.setdefault(function.identifier(), function)
            if present is not function and ir.to_proto(present) != ir.to_proto(function):
                raise TranslationError(f"its converter calls another function of the name {function.name}")
        several = isinstance(node.meta["val"], (tuple, list))
        metas = node.meta["val"] if several else [node.meta["val"]]
        values: Sequence[object] = results if isinstance(results, Sequence) else [results]
        if several != isinstance(results, Sequence) or len(values) != len(metas):
            actual, expected = _number_of_results(results), _number_of_results(node.meta["val"])
            raise TranslationError(f"its translation returns {actual} where eager returns {expected}")
        named: list[ir.Value | None] = []
        recorded = set(recorder.nodes)
        returned: set[ir.Value] = set()
        used = used_results(node)
        for i, (value, meta, name) in enumerate(zip(values, metas, value_names(node), strict=True)):
            if meta is None or i not in used:
                named.append(None)
                continue
            if not isinstance(value, ir.Value):
                text = f"a {type(value).__name__}" if isinstance(value, Sequence) else repr(value)
                raise TranslationError(f"its translation returns {text} instead of an ONNX value")
            source = value.producer()
            can_rename = source in recorded and source.op_type != "Constant" and value not in returned
            result = _conform(value, meta, can_rename, promoted, recorder.nodes)
            returned.add(value)
            result.name = name
            _set_type(result, meta)
            producer = result.producer()
            assert producer is not None
            producer.name = f"node_{name}"
            named.append(result)
        origin = _origin(node)
        for i, onnx_node in enumerate(recorder.nodes):
            onnx_node.metadata_props.update(origin)
            if not onnx_node.name:
                onnx_node.name = f"node_{node.name}__part{i}"
        self.graph.extend(recorder.nodes)
        self.values[node] = named if several else named[0]
        return named

    def _add_opset_imports(self) -> None:
        for onnx_node in ir.traversal.RecursiveGraphIterator(self.graph):
            if onnx_node.domain not in ("", "ai.onnx"):
                self.model.opset_imports.setdefault(onnx_node.domain, onnx_node.version or 1)
        for function in self.model.functions.values():
            self._set_opset(function)
            for domain, version in function.opset_imports.items():
                self.model.opset_imports.setdefault(domain, version)

    def _set_opset(self, function: ir.Function) -> None:
        """Changes a function's opset to the model's; raises ``TranslationError`` if they differ for its operators."""
        written = function.opset_imports.get("", self.opset)
        for node in ir.traversal.RecursiveGraphIterator(function) if written != self.opset else ():
            if node.domain in ("", "ai.onnx") and not _is_compatible(node, written, self.opset):
                raise TranslationError(
                    f"the function {function.name} is written for opset {written}, and {node.op_type} differs in the "
                    f"model's opset {self.opset}"
                )
        function.opset_imports[""] = self.opset


def _is_compatible(node: ir.Node, written: int, opset: int) -> bool:
    """Whether a node's inputs and attributes are the same in both opsets. A changed meaning is not detected."""
    before, after = (onnx.defs.get_schema(node.op_type, version) for version in (written, opset))
    names = [[item.name for item in schema.inputs][: len(node.inputs)] for schema in (before, after)]
    required = {name for name, attribute in after.attributes.items() if attribute.required}
    return names[0] == names[1] and required <= node.attributes.keys() <= after.attributes.keys()


def _with_converted_fills(node: fx.Node) -> Sequence[object]:
    """A node's positional arguments, of which a number that fills a tensor is as eager converts it."""
    result = node.meta["val"]
    if not isinstance(node.target, torch._ops.OpOverload) or not isinstance(result, torch.Tensor):
        return node.args
    parameters = node.target._schema.arguments
    return [converted_fill(item.name, arg, result.dtype) for item, arg in zip(parameters, node.args, strict=False)]


def _number_of_results(results: object) -> str:
    if not isinstance(results, Sequence):
        return "a single value"
    return "1 result" if len(results) == 1 else f"{len(results)} results"


def _in_memory_order(value: ir.Value, permutation: Sequence[int]) -> ir.Value:
    """A new value, for the transpose of ``value``."""
    assert value.shape is not None
    shape = ir.Shape([value.shape[i] for i in permutation])
    return ir.Value(name=f"{value.name}__memory", type=value.type, shape=shape)


def _transpose(source: ir.Value, permutation: Sequence[int], target: ir.Value) -> ir.Node:
    perm = ir.AttrInt64s("perm", permutation)
    return ir.Node("", "Transpose", [source], [perm], outputs=[target], name=f"node_{target.name}")


def _conform(
    value: ir.Value, meta: object, can_rename: bool, promoted: Collection[ir.DataType], nodes: list[ir.Node]
) -> ir.Value:
    """``value``; its ``Cast`` to eager's dtype if it was promoted; its ``Identity`` if it cannot be renamed."""
    expected = expected_dtype(meta)
    if expected is not None and value.dtype in promoted and value.dtype != expected:
        nodes.append(ir.Node("", "Cast", [value], [ir.AttrInt64("to", int(expected))]))
    elif can_rename:
        return value
    else:
        nodes.append(ir.Node("", "Identity", [value]))
    return nodes[-1].outputs[0]


def _is_double(meta: object) -> bool:
    results = meta if isinstance(meta, (tuple, list)) else [meta]
    return any(isinstance(item, torch.Tensor) and item.dtype is torch.float64 for item in results)


def _set_type(value: ir.Value, meta: object) -> None:
    dtype = expected_dtype(meta)
    if dtype is None:
        raise TranslationError(f"ONNX has no values of type {type(meta).__name__}")
    value.type = ir.TensorType(dtype)
    value.shape = ir.Shape(expected_shape(meta))
    if isinstance(meta, torch.SymInt):
        value.meta[IS_NONNEGATIVE] = statically_known_true(meta >= 0)


def _origin(node: fx.Node) -> dict[str, str]:
    origin = {
        "fx_node": node.name,
        "aten_op": operator_name(node),
        "module": module_path(node),
        "source": source_line(node),
    }
    return {key: text for key, text in origin.items() if text}


def _root_cause(error: BaseException) -> str:
    """The first exception of a chain, and the line of the user's converter that raised it."""
    while error.__cause__ is not None:
        error = error.__cause__
    files = ((frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__))
    lines = [
        f" ({short_file(file)}:{n})" for file, n in files if is_user_file(file) and not is_of_pytorch_or_ours(file)
    ]
    return f"{type(error).__name__}: {first_line(str(error))}{''.join(lines[-1:])}"
