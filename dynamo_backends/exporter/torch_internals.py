"""Finds torchlib's converters and records the ONNX nodes that a converter emits.

The only module that uses private parts of ``torch.onnx``: ``_building.py``, ``_registration.py`` and ``_core.py`` of
``torch/onnx/_internal/exporter``. What is used is the same in all versions listed in ``versions.py``.

onnxscript executes operators by an evaluator that is a global variable. Other threads may translate, export or run
onnxscript functions at the same time, so a ``NodeRecorder`` is the evaluator of its own thread only.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
import operator
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import onnx
import onnx_ir as ir
import onnxscript
import torch
from onnxscript._internal import evaluator
from onnxscript.function_libs.torch_lib import ops as _torchlib_operators  # noqa: F401  it fills the registry
from onnxscript.function_libs.torch_lib import registration
from torch.onnx._internal.exporter import _building, _core, _registration, _tensors

from ..errors import TranslationError

SymbolicTensor = _tensors.SymbolicTensor


class _ThreadState(threading.local):
    recorder: NodeRecorder | None = None


_thread = _ThreadState()
_original_default = evaluator.default


def _default_evaluator() -> evaluator.Evaluator:
    """Replaces ``onnxscript.evaluator.default``: the recorder of this thread, or the original evaluator."""
    return _thread.recorder or _original_default()


evaluator.default = _default_evaluator


@functools.cache
def _torchlib(opset: int) -> dict[object, Callable[..., object]]:
    """Torchlib's converters of real-valued operators at ``opset``.

    The key is an operator's name (``aten::add.Tensor``) or a function of ``operator`` or ``math``. PyTorch's
    ``ONNXRegistry.from_torchlib`` gives the same, but takes most of a second, as it parses the source of each function.
    """
    entries = [
        (_key(meta.fx_target), meta.onnx_function, meta.is_complex, meta.opset_introduced)
        for meta in _registration._torchlib_registry.get_torchlib_ops()
    ]
    entries += [
        (_key_of_name(name), function, False, 18)
        for name, functions in registration.default_registry.items()
        for function in functions.overloads
    ]
    newest: dict[object, tuple[int, Callable[..., object]]] = {}
    for key, function, is_complex, introduced in entries:
        if introduced > opset or is_complex or needs_the_exporter(function):
            continue
        if key not in newest or introduced > newest[key][0]:
            newest[key] = introduced, function
    return {key: function for key, (_, function) in newest.items()}


def _key(target: object) -> object:
    return target.name() if isinstance(target, torch._ops.OpOverload) else target


def _key_of_name(name: str) -> object:
    module, _, function = name.partition("::")
    modules = {"_operator": operator, "math": math}
    return getattr(modules[module], function, name) if module in modules else name


def torchlib_function(target: object, opset: int) -> Callable[..., object] | None:
    """Torchlib's converter of a real-valued operator, or ``None``."""
    return _torchlib(opset).get(_key(target))


def needs_the_exporter(function: Callable[..., object]) -> bool:
    """Whether a torchlib function needs ``torch.onnx``'s exporter, which it reads from a global variable.

    These convert ``torch.onnx.ops.symbolic`` (eager returns zeros) and higher-order operators, which stay in PyTorch.
    """
    return getattr(function, "__globals__", {}).get("_core") is _core


def onnx_dtype(dtype: torch.dtype) -> ir.DataType:
    """The ONNX element type of a torch dtype.

    Raises:
        TranslationError: ONNX has no such type.
    """
    try:
        return _core.torch_dtype_to_onnx_dtype(dtype)
    except KeyError:
        raise TranslationError(f"ONNX has no element type for {dtype}") from None


def opset_object(opset: int) -> onnxscript.values.Opset:
    return onnxscript.values.Opset("", opset)


class Constants(dict[Any, ir.Value]):
    """The shared constants of one model, by number and dtype, without -0.0.

    PyTorch's recorder (2.13) would use the constant 0.0 for -0.0, as the keys are equal.
    """

    def get(self, key: Any, default: Any = None) -> Any:
        return default if _is_negative_zero(key[0]) else super().get(key, default)

    def __setitem__(self, key: Any, value: ir.Value) -> None:
        if not _is_negative_zero(key[0]):
            super().__setitem__(key, value)


def _is_negative_zero(number: object) -> bool:
    return isinstance(number, float) and number == 0 and math.copysign(1, number) < 0


class NodeRecorder(_building.OpRecorder):
    """Records the ONNX nodes that a converter emits, and infers the dtype of each result.

    PyTorch's recorder does not infer dtypes: a Python number that is combined with an intermediate result becomes
    float32.
    """

    def eval(self, schema: Any, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        """Records one operator. PyTorch's recorder builds a signature at each call, a fifth of a translation's time."""
        signature = _signature(schema.domain, schema.name, schema.since_version)
        named_inputs, named_attrs = _building._construct_named_inputs_and_attrs(signature, args, kwargs)
        for name, value in named_attrs.items():
            if isinstance(value, (list, tuple)) and all(type(item) is int for item in value):
                named_attrs[name] = ir.AttrInt64s(name, value)  # onnx_ir infers it slowly, and fails for []
            elif isinstance(value, ir.Tensor):
                named_attrs[name] = ir.AttrTensor(name, value)
        num_outputs = _building._determine_output_number(signature, named_attrs)
        outputs = self._call_op(signature, named_inputs, named_attrs, num_outputs)
        return outputs[0] if len(outputs) == 1 else outputs

    def _call_op(
        self, op_signature: Any, named_inputs: dict[str, Any], named_attrs: dict[str, Any], num_outputs: int
    ) -> Sequence[ir.Value]:
        exact = self._exact_constant(op_signature.name, named_inputs, named_attrs)
        if exact is not None:
            return [exact]
        outputs = super()._call_op(op_signature, named_inputs, named_attrs, num_outputs)
        _infer_types(op_signature, self.nodes[-1], outputs)
        return outputs

    def eval_function(self, function: Any, args: Sequence[object], kwargs: Mapping[str, object]) -> Any:
        """Records the call of an onnxscript function. PyTorch's recorder needs annotations to count its results."""
        if not hasattr(function, "_pt_onnx_signature") and not function.traceable:
            function._pt_onnx_signature = _signature_of_function(function)
        return super().eval_function(function, args, kwargs)

    def add(
        self, domain: str, version: int, name: str, inputs: Sequence[object], attributes: Mapping[str, Any], number: int
    ) -> Sequence[ir.Value]:
        """Records a node of an operator without a schema; see ``operator_set``."""
        values = [self._as_value(item) for item in inputs]
        given = [ir.convenience.convert_attribute(key, item) for key, item in attributes.items()]
        outputs = [SymbolicTensor(self.opset) for _ in range(number)]
        self.nodes.append(ir.Node(domain, name, values, given, outputs=outputs, version=version))
        return outputs

    def _as_value(self, item: object) -> ir.Value | None:
        if item is None or isinstance(item, ir.Value):
            return item
        return self.opset.Constant(value=ir.tensor(item))

    def model_functions(self) -> Iterator[ir.Function]:
        """The onnxscript functions that the recorded nodes call, directly or indirectly."""
        for function in self.functions.values():
            if isinstance(function, ir.Function):
                yield function
                continue
            for called in (function, *function.function_ir.get_called_functions().values()):
                yield ir.serde.deserialize_function(called.to_function_proto())

    def _exact_constant(
        self, operator: str, inputs: Mapping[str, Any], attributes: Mapping[str, Any]
    ) -> ir.Value | None:
        """A float64 constant in place of a cast of a Python number to float64, else ``None``.

        PyTorch's recorder (2.13) makes the number a float32 constant first, which rounds it (``aten.full`` of 0.1).
        """
        target = None
        if operator == "Cast":
            target = attributes.get("to")
        elif operator == "CastLike" and isinstance(inputs.get("target_type"), ir.Value):
            target = inputs["target_type"].dtype
        number = inputs.get("input") if target == ir.DataType.DOUBLE else None
        if isinstance(number, ir.Value):
            number = self._python_number(number)
        return self.opset.Constant(value=ir.tensor(number, dtype=target)) if isinstance(number, float) else None

    def _python_number(self, value: ir.Value) -> object:
        """The Python number of a constant, or ``None``."""
        for (number, _), constant in self.constant_farm.items():
            if constant is value:
                return number
        producer = value.producer()
        if producer is not None and producer.op_type == "Constant" and "value_float" in producer.attributes:
            return producer.attributes["value_float"].value
        return None

    def rounded_number(self) -> float | None:
        """A number that a node rounds to float32, as an attribute (``Gemm``'s alpha) or a constant; else ``None``."""
        rounded = {
            constant: number
            for (number, dtype), constant in self.constant_farm.items()
            if isinstance(number, float) and dtype == ir.DataType.FLOAT and not _fits_float32(number)
        }
        for node in self.nodes:
            for value in node.inputs:
                if value in rounded:
                    return rounded[value]
            for attribute in node.attributes.values():
                if attribute.type == ir.AttributeType.FLOAT and not _fits_float32(attribute.value):
                    return attribute.value
        return None

    def record(self, function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        """Calls a converter and appends its nodes to ``self.nodes``; returns what the converter returns."""
        outer, _thread.recorder = _thread.recorder, self
        try:
            return function(*args, **kwargs)
        finally:
            _thread.recorder = outer


class OperatorSet:
    """See ``operator_set``."""

    def __init__(self, domain: str, version: int) -> None:
        self._domain, self._version = domain, version

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)

        def operator(*inputs: object, _outputs: int = 1, **attributes: object) -> Any:
            recorder = _thread.recorder
            if recorder is None:
                raise RuntimeError(f"{self._domain}::{name} can only be called in a converter")
            outputs = recorder.add(self._domain, self._version, name, inputs, attributes, _outputs)
            return outputs[0] if _outputs == 1 else tuple(outputs)

        operator.__name__ = name
        return operator

    def __repr__(self) -> str:
        return f"operator_set({self._domain!r}, {self._version})"


def operator_set(domain: str, version: int = 1) -> OperatorSet:
    """The operators of a domain other than ONNX's, used in a converter like an ``onnxscript`` opset::

        microsoft = operator_set("com.microsoft")
        microsoft.QuickGelu(x, alpha=1.0)
        normalized, mean, deviation, total = microsoft.SkipLayerNormalization(x, skip, scale, bias, _outputs=4)

    Args:
        domain: such as ``com.microsoft``, ``ai.onnx.contrib``, or that of a library of custom operators.
        version: of the domain.

    Returns:
        An object with a function for each operator. Its positional arguments are the node's inputs: an
        ``onnx_ir.Value``, ``None`` for an omitted input, or a number or array, which becomes a constant. Its keyword
        arguments are the node's attributes, and ``_outputs``, the number of results. It returns a value, or a tuple of
        values if there are several.

    Raises:
        TypeError: the domain is not a string.
        ValueError: the domain is ONNX's, whose operators are in ``onnxscript``.
    """
    if not isinstance(domain, str):
        raise TypeError(f"the domain must be a string, not {domain!r}")
    if not domain or domain == "ai.onnx":
        raise ValueError("ONNX's own operators are in onnxscript: from onnxscript import opset18 as op")
    return OperatorSet(domain, version)


def is_of_torchlib(function: ir.Function) -> bool:
    """Whether an onnxscript function belongs to torchlib."""
    return function.domain.startswith(("pkg.onnxscript.torch_lib", "pkg.torch"))


def _fits_float32(number: float) -> bool:
    return math.isnan(number) or ctypes.c_float(number).value == number


@functools.cache
def _signature(domain: str, name: str, version: int) -> ir.schemas.OpSignature:
    return ir.schemas.OpSignature.from_op_schema(onnx.defs.get_schema(name, version, domain))


def _signature_of_function(function: Any) -> ir.schemas.OpSignature:
    """The signature of an onnxscript function, with the number of results that it returns."""
    signature = function.op_signature
    count = len(function.function_ir.outputs)
    if len(signature.outputs) == count:
        return signature
    types = [ir.schemas.TypeConstraintParam.any_value(f"T_{i}") for i in range(count)]
    outputs = [ir.schemas.Parameter(f"result_{i}", item, required=True, variadic=False) for i, item in enumerate(types)]
    return dataclasses.replace(signature, outputs=outputs)


def _infer_types(signature: Any, node: ir.Node, outputs: Sequence[ir.Value]) -> None:
    if node.op_type in ("Constant", "Cast", "ConstantOfShape"):
        dtype = _explicit_dtype(node)
        if dtype is not None:
            outputs[0].type = ir.TensorType(dtype)
        return
    types: dict[str, ir.TypeProtocol] = {}  # by the name of the type constraint
    parameters = [param for param in signature.params if hasattr(param, "type_constraint")]
    for position, value in enumerate(node.inputs):
        if value is not None and value.type is not None and parameters:
            param = parameters[min(position, len(parameters) - 1)]
            types.setdefault(param.type_constraint.name, value.type)
    for output, param in zip(outputs, signature.outputs, strict=False):
        if output.type is None:
            allowed = param.type_constraint.allowed_types
            only = next(iter(allowed)) if len(allowed) == 1 else None
            output.type = types.get(param.type_constraint.name, only)


def _explicit_dtype(node: ir.Node) -> ir.DataType | None:
    if node.op_type == "Cast":
        return ir.DataType(node.attributes["to"].as_int())
    if "value" in node.attributes:
        return node.attributes["value"].value.dtype
    if "value_ints" in node.attributes or "value_int" in node.attributes:
        return ir.DataType.INT64
    is_float = "value_floats" in node.attributes or "value_float" in node.attributes
    return ir.DataType.FLOAT if is_float or node.op_type == "ConstantOfShape" else None
