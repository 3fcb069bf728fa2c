"""The one module that touches private parts of ``torch.onnx``: torchlib's registry and the op recorder.

Everything else in the exporter works on what is defined here, so that a new PyTorch needs one file read again.
Written against ``torch/onnx/_internal/exporter/_building.py``, ``_registration.py``, ``_core.py`` of the versions in
``versions.py``, which do not differ in what is used here.

Several threads may translate at once, and others may export or run onnxscript functions meanwhile. onnxscript keeps
what interprets a function's operators (its default evaluator) in a variable of the process; while a ``Recorder``
records, its thread alone sees it there, and the variable itself is left alone.
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


class _OfThisThread(threading.local):
    recorder: Recorder | None = None


_of_this_thread = _OfThisThread()
_default_of_the_process = evaluator.default


def _default_evaluator() -> evaluator.Evaluator:
    """In the place of ``onnxscript.evaluator.default``: the recorder of this thread, else the process's evaluator."""
    return _of_this_thread.recorder or _default_of_the_process()


evaluator.default = _default_evaluator


@functools.cache
def _torchlib(opset: int) -> dict[object, Callable[..., object]]:
    """Torchlib's translations of operators on real-valued tensors at ``opset``.

    They are by the name of the operator (``aten::add.Tensor``), of functions of ``operator`` and ``math`` by these.
    PyTorch's ``ONNXRegistry.from_torchlib`` has the same; but it looks up each operator and parses the source of each
    function, which takes most of a second.
    """
    found: dict[object, tuple[int, Callable[..., object]]] = {}
    entries = [
        (_key(meta.fx_target), meta.onnx_function, meta.is_complex, meta.opset_introduced)
        for meta in _registration._torchlib_registry.get_torchlib_ops()
    ]
    entries += [
        (_key_of_name(name), function, False, _FIRST_OPSET)
        for name, functions in registration.default_registry.items()
        for function in functions.overloads
    ]
    for key, function, is_complex, introduced in entries:
        if introduced > opset or is_complex or needs_the_exporter(function):
            continue
        if key not in found or introduced > found[key][0]:
            found[key] = introduced, function
    return {key: function for key, (_, function) in found.items()}


_FIRST_OPSET = 18
"""Of torchlib's functions in onnxscript."""


def _key(target: object) -> object:
    return target.name() if isinstance(target, torch._ops.OpOverload) else target


def _key_of_name(name: str) -> object:
    module, _, function = name.partition("::")
    modules = {"_operator": operator, "math": math}
    return getattr(modules[module], function, name) if module in modules else name


def torchlib_function(target: object, opset: int) -> Callable[..., object] | None:
    """Torchlib's translation of an operator on real-valued tensors, or ``None``."""
    return _torchlib(opset).get(_key(target))


def needs_the_exporter(function: Callable[..., object]) -> bool:
    """Whether a function of torchlib is of those that read the exporter that calls them from a variable of the process.

    They are those of ``torch.onnx.ops.symbolic``, whose operators only an exporter gives a meaning (eager returns
    zeros), and of higher-order operators, which stay in PyTorch.
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
    """The constants of one model by number and type, as PyTorch's recorder shares them; but ``-0.0`` is not ``0.0``.

    The recorder of PyTorch 2.13 takes one for the other, as they are equal keys; here each ``-0.0`` is a new constant.
    """

    def get(self, key: Any, default: Any = None) -> Any:
        return default if _is_negative_zero(key[0]) else super().get(key, default)

    def __setitem__(self, key: Any, value: ir.Value) -> None:
        if not _is_negative_zero(key[0]):
            super().__setitem__(key, value)


def _is_negative_zero(number: object) -> bool:
    return isinstance(number, float) and number == 0 and math.copysign(1, number) < 0


class Recorder(_building.OpRecorder):
    """Records the ONNX nodes that a translation function emits, and infers the element type of each result.

    PyTorch's recorder leaves intermediate results untyped, so that a Python constant next to one becomes float32
    whatever the computation's dtype is; with the types known it becomes a constant of the right dtype.
    """

    def eval(self, schema: Any, args: Sequence[object], kwargs: Mapping[str, object]) -> object:
        """Records one operator. PyTorch's makes the signature anew for each call, a fifth of a translation's time."""
        signature = _signature(schema.domain, schema.name, schema.since_version)
        named_inputs, named_attrs = _building._construct_named_inputs_and_attrs(signature, args, kwargs)
        for name, value in named_attrs.items():
            if isinstance(value, (list, tuple)) and all(type(item) is int for item in value):
                named_attrs[name] = ir.AttrInt64s(name, value)  # onnx_ir guesses the type, slowly, and of [] not at all
            elif isinstance(value, ir.Tensor):
                named_attrs[name] = ir.AttrTensor(name, value)
        num_outputs = _building._determine_output_number(signature, named_attrs)
        outputs = self._call_op(signature, named_inputs, named_attrs, num_outputs)
        return outputs[0] if len(outputs) == 1 else outputs

    def _call_op(
        self,
        op_signature: Any,
        named_inputs: dict[str, Any],
        named_attrs: dict[str, Any],
        num_outputs: int,
    ) -> Sequence[ir.Value]:
        exact = self._exact_constant(op_signature.name, named_inputs, named_attrs)
        if exact is not None:
            return [exact]
        outputs = super()._call_op(op_signature, named_inputs, named_attrs, num_outputs)
        node = self.nodes[-1]
        _infer_types(op_signature, node, outputs)
        return outputs

    def eval_function(self, function: Any, args: Sequence[object], kwargs: Mapping[str, object]) -> Any:
        """Records the call of an onnxscript function. PyTorch's counts results by annotations, which few write."""
        if not hasattr(function, "_pt_onnx_signature") and not function.traceable:
            function._pt_onnx_signature = _signature_of_function(function)
        return super().eval_function(function, args, kwargs)

    def add(
        self, domain: str, version: int, name: str, inputs: Sequence[object], attributes: Mapping[str, Any], number: int
    ) -> Sequence[ir.Value]:
        """Records a node of an operator whose schema is not known here; see ``operator_set``."""
        values = [self._as_value(item) for item in inputs]
        given = [
            item if isinstance(item, ir.Attr) else ir.convenience.convert_attribute(key, item)
            for key, item in attributes.items()
        ]
        outputs = [SymbolicTensor(self.opset) for _ in range(number)]
        self.nodes.append(ir.Node(domain, name, values, given, outputs=outputs, version=version))
        return outputs

    def _as_value(self, item: object) -> ir.Value | None:
        if item is None or isinstance(item, ir.Value):
            return item
        return self.opset.Constant(value=ir.tensor(item))

    def model_functions(self) -> Iterator[ir.Function]:
        """The onnxscript functions that the recorded nodes call, and those that these call."""
        for function in self.functions.values():
            if isinstance(function, ir.Function):
                yield function
                continue
            for called in (function, *function.function_ir.get_called_functions().values()):
                yield ir.serde.deserialize_function(called.to_function_proto())

    def _exact_constant(
        self, operator: str, inputs: Mapping[str, Any], attributes: Mapping[str, Any]
    ) -> ir.Value | None:
        """A float64 constant, where a translation casts a Python number to float64.

        The recorder makes a float32 constant of a number before the function it is an argument of sees it, and
        the cast then keeps float32's rounding (``aten.full`` of 0.1, PyTorch 2.13).
        """
        target = None
        if operator == "Cast":
            target = attributes.get("to")
        elif operator == "CastLike" and isinstance(inputs.get("target_type"), ir.Value):
            target = inputs["target_type"].dtype
        if target != ir.DataType.DOUBLE:
            return None
        number = inputs.get("input")
        if isinstance(number, ir.Value):
            number = self._python_number(number)
        if not isinstance(number, float):
            return None
        return self.opset.Constant(value=ir.tensor(number, dtype=ir.DataType.DOUBLE))

    def _python_number(self, value: ir.Value) -> object:
        """The Python number a constant was made of, or ``None``."""
        for (number, _), constant in self.constant_farm.items():
            if constant is value:
                return number
        producer = value.producer()
        if producer is not None and producer.op_type == "Constant" and "value_float" in producer.attributes:
            return producer.attributes["value_float"].value
        return None

    def rounded_number(self) -> float | None:
        """A number that the recorded nodes hold in float32 though it needs more, or ``None``.

        For a float64 result that is a loss: attributes such as ``Gemm``'s ``alpha`` are float32 in ONNX whatever the
        tensors are, and torchlib makes float32 constants of some numbers.
        """
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
        """Calls a translation function; the nodes it emitted are in ``self.nodes``."""
        outer, _of_this_thread.recorder = _of_this_thread.recorder, self
        try:
            return function(*args, **kwargs)
        finally:
            _of_this_thread.recorder = outer


class OperatorSet:
    """The operators of a domain that ONNX knows no schemas of; see ``operator_set``."""

    def __init__(self, domain: str, version: int) -> None:
        self._domain, self._version = domain, version

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)

        def operator(*inputs: object, _outputs: int = 1, **attributes: object) -> Any:
            recorder = _of_this_thread.recorder
            if recorder is None:
                raise RuntimeError(f"{self._domain}::{name} writes a node, and is called in a converter only")
            outputs = recorder.add(self._domain, self._version, name, inputs, attributes, _outputs)
            return outputs[0] if _outputs == 1 else tuple(outputs)

        operator.__name__ = name
        return operator

    def __repr__(self) -> str:
        return f"operator_set({self._domain!r}, {self._version})"


def operator_set(domain: str, version: int = 1) -> OperatorSet:
    """The operators of another domain than ONNX's, to be called in a converter as those of an ``onnxscript`` opset::

        microsoft = operator_set("com.microsoft")
        microsoft.QuickGelu(x, alpha=1.0)
        normalized, mean, deviation, total = microsoft.SkipLayerNormalization(x, skip, scale, bias, _outputs=4)

    Args:
        domain: such as ``com.microsoft``, ``ai.onnx.contrib``, or that of a library of custom operators.
        version: of the domain.

    Returns:
        An object whose attributes are functions. Each takes the node's inputs by position (an ``onnx_ir.Value``,
        ``None`` for one that is left out, or a number or an array, which becomes a constant), its attributes by name,
        and ``_outputs``, how many results the node has; it returns a value, or a tuple of them.

    Raises:
        TypeError: the domain is no text.
        ValueError: the domain is empty: ONNX's operators are in ``onnxscript``.
    """
    if not isinstance(domain, str):
        raise TypeError(f"the domain must be text, not {domain!r}")
    if not domain or domain == "ai.onnx":
        raise ValueError("ONNX's own operators are in onnxscript: from onnxscript import opset18 as op")
    return OperatorSet(domain, version)


def is_of_torchlib(function: ir.Function) -> bool:
    """Whether an onnxscript function is a part of torchlib's translations, and no function of a user's."""
    return function.domain.startswith(("pkg.onnxscript.torch_lib", "pkg.torch"))


def _fits_float32(number: float) -> bool:
    return math.isnan(number) or ctypes.c_float(number).value == number


@functools.cache
def _signature(domain: str, name: str, version: int) -> ir.schemas.OpSignature:
    return ir.schemas.OpSignature.from_op_schema(onnx.defs.get_schema(name, version, domain))


def _signature_of_function(function: Any) -> ir.schemas.OpSignature:
    """That of an onnxscript function, with as many results as it returns."""
    signature = function.op_signature
    returned = function.function_ir.outputs
    if len(signature.outputs) == len(returned):
        return signature
    outputs = [
        ir.schemas.Parameter(
            f"result_{i}", ir.schemas.TypeConstraintParam.any_value(f"T_{i}"), required=True, variadic=False
        )
        for i in range(len(returned))
    ]
    return dataclasses.replace(signature, outputs=outputs)


def _infer_types(signature: Any, node: ir.Node, outputs: Sequence[ir.Value]) -> None:
    if node.op_type in ("Constant", "Cast", "ConstantOfShape"):
        dtype = _explicit_dtype(node)
        if dtype is not None:
            outputs[0].type = ir.TensorType(dtype)
        return
    bound: dict[str, ir.TypeProtocol] = {}
    parameters = [param for param in signature.params if hasattr(param, "type_constraint")]
    for position, value in enumerate(node.inputs):
        if value is None or value.type is None or not parameters:
            continue
        param = parameters[min(position, len(parameters) - 1)]
        bound.setdefault(param.type_constraint.name, value.type)
    for output, param in zip(outputs, signature.outputs, strict=False):
        if output.type is not None:
            continue
        constraint = param.type_constraint
        if constraint.name in bound:
            output.type = bound[constraint.name]
        elif len(constraint.allowed_types) == 1:
            output.type = next(iter(constraint.allowed_types))


def _explicit_dtype(node: ir.Node) -> ir.DataType | None:
    if node.op_type == "Cast":
        return ir.DataType(node.attributes["to"].as_int())
    for name in ("value", "value_ints", "value_int", "value_floats", "value_float"):
        attribute = node.attributes.get(name)
        if attribute is None:
            continue
        if name == "value":
            return attribute.value.dtype
        return ir.DataType.INT64 if "int" in name else ir.DataType.FLOAT
    return ir.DataType.FLOAT if node.op_type == "ConstantOfShape" else None
