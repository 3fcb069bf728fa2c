"""Checks that a converter's results have the dtypes and shapes of eager's results.

They are inferred from the converter's ONNX nodes and compared with the fake tensors. What inference does not know (a
shape computed from data, a symbolic size) is checked at run time (``runtime/binding.py``).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import onnx
import onnx_ir as ir
import sympy
import torch
from torch import fx
from torch.utils._sympy.printers import PythonPrinter

from ..errors import TranslationError
from . import torch_internals
from .signature import signature

Size: TypeAlias = "int | str"
"""The size of a dimension: a number, or a symbolic size as a Python expression."""

Functions: TypeAlias = Mapping[ir.OperatorIdentifier, ir.Function]

MAXIMUM_COMPARISONS = 50_000
"""The cache is cleared when it has this many entries."""

_MAXIMUM_ELEMENTS = 2**20
"""The largest tensor of a node for which shape inference propagates computed shapes."""


@dataclasses.dataclass(frozen=True)
class _Comparison:
    difference: str | None  # from eager's dtypes and shapes; None if there is none
    is_inferred: bool  # whether inference knew all dtypes and shapes


comparisons: dict[object, _Comparison] = {}
"""By opset, converter and ``signature`` of the node."""


def expected_dtype(meta: object) -> ir.DataType | None:
    """The ONNX dtype of a fake tensor or (symbolic) number; ``None`` for other values."""
    dtype = meta.dtype if isinstance(meta, torch.Tensor) else number_dtype(meta)
    return None if dtype is None else torch_internals.onnx_dtype(dtype)


def number_dtype(meta: object) -> torch.dtype | None:
    """The dtype in which a (symbolic) number is passed to a session, and returned; ``None`` for other values."""
    kinds = {
        torch.bool: (bool, torch.SymBool),
        torch.int64: (int, torch.SymInt),
        torch.float64: (float, torch.SymFloat),
    }
    return next((dtype for dtype, types in kinds.items() if isinstance(meta, types)), None)


def expected_shape(meta: object) -> tuple[Size, ...]:
    """The shape of a fake tensor; a symbolic number is a scalar."""
    return tuple([_size(dim) for dim in meta.shape]) if isinstance(meta, torch.Tensor) else ()


def sizes_of(meta: object) -> tuple[Size, ...]:
    """The shape of a fake tensor, or a (symbolic) integer itself as the only element."""
    if isinstance(meta, torch.Tensor):
        return expected_shape(meta)
    return (_size(meta),) if isinstance(meta, (int, torch.SymInt)) else ()


def _size(dim: int | torch.SymInt) -> Size:
    if isinstance(dim, int):
        return dim
    number = dim.node.maybe_as_int()
    return _expression(dim.node.expr) if number is None else number


@functools.lru_cache(maxsize=10_000)
def _expression(expression: sympy.Expr) -> str:
    return PythonPrinter().doprint(expression)


def check_results(
    node: fx.Node,
    converter: object,
    onnx_nodes: Sequence[ir.Node],
    functions: Functions,
    results: Sequence[ir.Value | None],
    opset: int,
) -> None:
    """Compares the results of a node's converter with the fake tensors; equal nodes are compared once.

    Args:
        node: the FX node.
        converter: its converter.
        onnx_nodes: the nodes it emitted, in execution order.
        functions: the model's functions, which ``onnx_nodes`` may call.
        results: the node's results; ``None`` where eager returns ``None``.
        opset: the ONNX opset.

    Raises:
        TranslationError: a result has another dtype or shape than in eager.
    """
    key = (opset, converter, signature(node))
    comparison = comparisons.get(key)
    if comparison is None:
        if len(comparisons) >= MAXIMUM_COMPARISONS:
            comparisons.clear()
        comparison = comparisons[key] = _compare(node, onnx_nodes, functions, results, opset)
    if comparison.difference is not None:
        raise TranslationError(comparison.difference)


def is_inferred(node: fx.Node, converter: object, opset: int) -> bool:
    """Whether inference knew the dtypes and shapes of all results of a node that ``check_results`` accepted."""
    comparison = comparisons.get((opset, converter, signature(node)))
    return comparison is not None and comparison.is_inferred


def _compare(
    node: fx.Node, onnx_nodes: Sequence[ir.Node], functions: Functions, results: Sequence[ir.Value | None], opset: int
) -> _Comparison:
    meta = node.meta["val"]
    metas = meta if isinstance(meta, (tuple, list)) else [meta]
    tensors = [*metas, *(arg.meta["val"] for arg in node.all_input_nodes)]
    is_small = all(
        math.prod(size for size in expected_shape(item) if isinstance(size, int)) <= _MAXIMUM_ELEMENTS
        for item in tensors
    )
    inferred = _infer(onnx_nodes, functions, results, opset, is_small=is_small)
    is_inferred = True
    for i, (value, item) in enumerate(zip(results, metas, strict=True)):
        if value is None:
            continue
        where = f" as result {i}" if len(metas) > 1 else ""
        dtype, shape = inferred.get(str(value.name), (None, None))
        expected, sizes = expected_dtype(item), expected_shape(item)
        if dtype is not None and expected is not None and dtype != expected:
            return _Comparison(f"its translation returns {dtype.name}{where} where eager returns {expected.name}", True)
        if shape is not None and not _may_be_equal(shape, sizes):
            text = f"its translation returns shape {_shape_text(shape)}{where} where eager returns {_shape_text(sizes)}"
            return _Comparison(text, True)
        is_inferred &= dtype is not None and shape is not None and tuple(shape) == sizes
    return _Comparison(None, is_inferred)


def _may_be_equal(inferred: Sequence[Size | None], expected: Sequence[Size]) -> bool:
    """Whether two shapes may be equal."""
    return len(inferred) == len(expected) and not any(map(_is_different, inferred, expected))


def _is_different(inferred: Size | None, expected: Size) -> bool:
    """Whether two sizes certainly differ.

    A number differs from a symbol, which takes several values, but may equal an expression of symbols.
    """
    if not isinstance(inferred, int) or inferred < 0:  # onnx 1.23 infers size -1 from a -1 in the shape of Expand
        return False
    return inferred != expected if isinstance(expected, int) else expected.isidentifier()


def _shape_text(shape: Sequence[Size | None]) -> str:
    sizes = ["?" if item is None else str(item) for item in shape]
    return f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"


def _infer(
    onnx_nodes: Sequence[ir.Node],
    functions: Functions,
    results: Iterable[ir.Value | None],
    opset: int,
    *,
    is_small: bool,
) -> dict[str, tuple[ir.DataType | None, list[Size | None] | None]]:
    """The dtype and shape of each result by its name; ``None`` where ONNX's shape inference does not know them.

    Computed shapes are propagated (``data_prop``) only if ``is_small``, as onnx 1.23 creates an object for each element
    of a vector.
    """
    produced = {value for onnx_node in onnx_nodes for value in onnx_node.outputs}
    constants: dict[ir.Node, None] = {}
    inputs: dict[ir.Value, None] = {}
    for onnx_node in onnx_nodes:
        for value in onnx_node.inputs:
            if value is None or value in produced:
                continue
            producer = value.producer()
            if producer is not None and producer.op_type == "Constant":
                constants[producer] = None  # of an earlier node of the region
            else:
                inputs[value] = None
    graph = onnx.GraphProto(
        name="translation",
        node=[ir.serde.serialize_node(item) for item in (*constants, *onnx_nodes)],
        input=[ir.serde.serialize_value(value) for value in inputs],
        output=[onnx.ValueInfoProto(name=value.name) for value in results if value is not None],
    )
    model = onnx.ModelProto(ir_version=onnx.IR_VERSION, graph=graph)
    called = {onnx_node.op_identifier() for onnx_node in onnx_nodes} & functions.keys()
    model.functions.extend(ir.serde.serialize_function(functions[identifier]) for identifier in called)
    domains = {"": opset} | {item.domain: item.version or 1 for item in onnx_nodes if item.domain}
    model.opset_import.extend(
        onnx.OperatorSetIdProto(domain=name, version=version) for name, version in domains.items()
    )
    computes_shapes = any(item.domain or item.op_type in ("Shape", "Size") for item in onnx_nodes)
    try:
        completed = onnx.shape_inference.infer_shapes(model, data_prop=computes_shapes and is_small)
    except onnx.shape_inference.InferenceError:
        return {}  # ONNX Runtime rejects the model and reports the reason
    return {output.name: _type(output.type.tensor_type) for output in completed.graph.output}


def _type(tensor: onnx.TypeProto.Tensor) -> tuple[ir.DataType | None, list[Size | None] | None]:
    dtype = ir.DataType(tensor.elem_type) if tensor.elem_type else None
    if not tensor.HasField("shape"):
        return dtype, None
    return dtype, [dim.dim_value if dim.HasField("dim_value") else dim.dim_param or None for dim in tensor.shape.dim]
