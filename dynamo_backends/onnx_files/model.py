"""Lowers a captured module to one ONNX model: weights are initializers, and inputs, results and sizes have the user's
names.

The stages from ``joint`` to ``onnx_optimized`` are those of ``torch.compile``, see ``pipeline.stages``. But the whole
graph is one region, and an operator that would run in PyTorch is an error.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence

import onnx_ir as ir
import sympy
from onnx_ir import tensor_adapters
from torch import fx

from ..errors import ExportError, KernelFaultError, Kind, Reason, TranslationError
from ..graphs.artifacts import GraphName, Region, is_operator, operator_name
from ..graphs.locations import where
from ..options import Options
from ..partition.regions import whole_graph
from ..pipeline.emission import model_of
from ..pipeline.observer import Observer
from ..pipeline.stage_data import PostGradGraph
from ..pipeline.stages import Context, run_post_grad
from ..runtime.kernel_faults import check
from .capture import TRAINING_MODE, Captured
from .sizes import Size

_MOST_REASONS = 10

_RMS_NORMALIZATION = 23
"""The opset with ``RMSNormalization``. Before, that is left to ONNX Runtime's optimizer."""


def onnx_model(captured: Captured, options: Options, name: str, *, is_training: bool) -> ir.Model:
    """The ONNX model of a captured module; the module's graph is changed.

    Args:
        captured: the module.
        options: of the backend; only ``opset`` and ``passes`` matter.
        name: of the ONNX graph.
        is_training: whether the module is in training mode.

    Raises:
        ExportError: an operator cannot be in an ONNX model.
    """
    context = Context(options, Observer())
    graph = run_post_grad(context, GraphName(0, "inference"), captured.graph, None, captured.weights, is_joint=True)
    region, in_pytorch = whole_graph(graph.module, context.support)
    if in_pytorch:
        is_random = any(reason.kind is Kind.RANDOM for reason in in_pytorch.values())
        raise ExportError(_refusal(in_pytorch) + (TRAINING_MODE if is_random and is_training else ""))
    model = _optimized_model(graph, region, options, name)
    inputs = dict(zip((item.node for item in region.inputs), list(model.graph.inputs), strict=True))
    model.graph.outputs[:] = [model.graph.outputs[i] for i in captured.nodes]
    _name_values(model, [(inputs[node], text) for node, text in captured.inputs.items()], captured.outputs)
    _name_sizes(model, captured.sizes)
    for node, value in inputs.items():
        if node in captured.weights:
            model.graph.inputs.remove(value)
            if value.uses():
                tensor = captured.weights[node].tensor.resolve_conj().resolve_neg().contiguous()
                value.const_value = tensor_adapters.TorchTensor(tensor, name=value.name)
                model.graph.register_initializer(value)
    for unused in [
        item for item in model.graph.initializers.values() if not item.uses() and not item.is_graph_output()
    ]:
        del model.graph.initializers[str(unused.name)]
    return model


def _optimized_model(graph: PostGradGraph, region: Region, options: Options, name: str) -> ir.Model:
    """The model of a whole graph after the passes of ``onnx``; weights are inputs."""
    if options.opset < _RMS_NORMALIZATION:
        disabled = (*options.passes.disable, "onnx.layer_norm")
        options = dataclasses.replace(options, passes=dataclasses.replace(options.passes, disable=disabled))
    try:
        model = model_of(region, graph.weights, opset=options.opset, name=name)
    except TranslationError as error:
        raise ExportError(f"it cannot be translated to ONNX: {error}") from error
    Context(options, Observer()).passes.run("onnx", graph.name, model, 0)
    for node in model.graph.all_nodes():
        if node.op_type == "SimplifiedLayerNormalization":  # ONNX Runtime's name, unknown to ONNX
            node.op_type = "RMSNormalization"
    try:
        check(model, options.providers)
    except KernelFaultError as error:
        raise ExportError(str(error)) from error
    return model


def _refusal(in_pytorch: Mapping[fx.Node, Reason]) -> str:
    """The operators that ONNX Runtime cannot run, each with its line and reason."""
    texts = dict.fromkeys(
        f"{node.name} ({operator_name(node)}) at {where(node) or 'an unknown line'}: {reason}"
        for node, reason in in_pytorch.items()
        if is_operator(node)
    )
    shown = list(texts)[:_MOST_REASONS]
    more = f"; and {len(texts) - len(shown)} more" if len(texts) > len(shown) else ""
    return f"a part must run in PyTorch: {'; '.join(shown)}{more}"


def _name_values(model: ir.Model, inputs: Sequence[tuple[ir.Value, str]], outputs: Sequence[str]) -> None:
    """Names inputs and outputs; other values of these names get another."""
    named = dict(inputs)
    for i, name in enumerate(outputs):
        value = model.graph.outputs[i]
        if value in named or value.producer() is None:  # an input, a weight, or returned before
            node = ir.Node("", "Identity", [value], name=f"node_{name}")
            node.outputs[0].type, node.outputs[0].shape = value.type, value.shape
            model.graph.append(node)
            value = model.graph.outputs[i] = node.outputs[0]
        named[value] = name
    taken = set(named.values())
    values = list(_values(model))
    names = {str(value.name) for value in values}
    for value in values:
        if value not in named and value.name in taken:
            count = 1
            while (free := f"{value.name}_{count}") in names or free in taken:
                count += 1
            value.name = free
            names.add(free)
    for value, name in named.items():
        value.name = name


def _values(model: ir.Model) -> Iterable[ir.Value]:
    for graph in model.graphs():
        yield from graph.inputs
        yield from graph.initializers.values()
    for node in model.graph.all_nodes():
        yield from node.outputs


def _name_sizes(model: ir.Model, sizes: Mapping[sympy.Symbol, Size]) -> None:
    """Replaces the symbols in all shapes by the user's names; a size that is no sum or product of them has no name."""
    names = {str(symbol): size.name for symbol, size in sizes.items()}

    def renamed(size: int | ir.SymbolicDim) -> int | ir.SymbolicDim:
        if isinstance(size, int) or size.value is None:
            return size
        found = re.sub(r"\b[su]\d+\b", lambda symbol: names.get(symbol[0], symbol[0]), size.value)
        return ir.SymbolicDim(None if "(" in found or "." in found else found)

    for value in _values(model):
        if value.shape is not None:
            value.shape = ir.Shape(renamed(size) for size in value.shape)
