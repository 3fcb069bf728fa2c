"""Traces a model to graphs with ``torch.jit.trace``, ``torch.jit.script``, ``torch.export`` or Dynamo.

Also exports a model to one ONNX file. Both are for the command ``dynamo-backends trace``.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from onnx_ir import tensor_adapters
from torch import fx
from torch.utils import _pytree as pytree

from ..errors import TranslationError
from ..exporter.translate import fold_constants, translate
from ..graphs.artifacts import Region
from ..graphs.fx_table import graph_table
from ..graphs.locations import user_name
from ..options import Options
from ..partition.regions import Support, split_graph
from ..pipeline.lowering import Lowering, PostGradGraph
from ..pipeline.observer import Observer
from ..pipeline.pipeline import Pipeline
from ..weights.frozen_session import Weight
from .functions import fallbacks_of

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""


class TracingError(ValueError):
    """PyTorch cannot trace the model; the message is PyTorch's."""


@dataclasses.dataclass(frozen=True)
class Traced:
    """A traced model."""

    graphs: Sequence[str]  # as text
    run: Callable[..., object]


def trace(method: str, model: torch.nn.Module, call: Call) -> Traced:
    """Traces a model with one of ``METHODS``.

    Raises:
        TracingError: PyTorch cannot trace the model.
    """
    torch._dynamo.reset()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.jit is deprecated
            return METHODS[method](model, call)
    except Exception as error:  # the model and four compilers raise any type
        raise TracingError(summary_of(error)) from error


def summary_of(error: BaseException) -> str:
    """The type of an error and the first paragraph of its message, at most five lines."""
    lines = str(error).strip().splitlines()
    end = next((i for i, line in enumerate(lines) if not line.strip()), len(lines))
    return f"{type(error).__name__}: " + "\n  ".join(lines[: min(end, 5)])


def _jit_trace(model: torch.nn.Module, call: Call) -> Traced:
    args, kwargs = call
    given = {"example_kwarg_inputs": kwargs} if kwargs else {"example_inputs": args}
    if args and kwargs:
        raise TypeError("torch.jit.trace takes positional or keyword arguments, not both")
    traced = torch.jit.trace(model, strict=False, check_trace=False, **given)
    return Traced([str(traced.graph)], traced)


def _jit_script(model: torch.nn.Module, call: Call) -> Traced:
    scripted = torch.jit.script(model)
    return Traced([str(scripted.graph)], scripted)


def _export(model: torch.nn.Module, call: Call) -> Traced:
    exported = torch.export.export(model, *call)
    return Traced([graph_table(exported.graph_module)], exported.module())


def _compile(model: torch.nn.Module, call: Call) -> Traced:
    graphs: list[str] = []

    def keep(module: fx.GraphModule, example_inputs: Sequence[object]) -> Callable[..., object]:
        graphs.append(graph_table(module))
        return module.forward

    compiled = torch.compile(model, backend=keep)
    args, kwargs = call
    with torch.no_grad():
        compiled(*args, **kwargs)
    return Traced(graphs, compiled)


METHODS: Mapping[str, Callable[[torch.nn.Module, Call], Traced]] = {
    "trace": _jit_trace,
    "script": _jit_script,
    "export": _export,
    "compile": _compile,
}


def dtypes_of(results: object) -> list[str]:
    """The dtypes of all tensors of a result, in order: ``torch.float32``."""
    return [str(leaf.dtype) for leaf in pytree.tree_leaves(results) if isinstance(leaf, torch.Tensor)]


def export_model(model: torch.nn.Module, call: Call, path: Path, options: Options) -> None:
    """Exports a model to one ONNX file, with its weights, and with constants folded.

    Weights of more than a gigabyte are saved to ``<name>.data``.

    Args:
        model: in the mode in which it is to run.
        call: arguments with the sizes and dtypes of the ONNX model.
        path: the file.
        options: options of the backend; only ``opset`` and ``providers`` matter.

    Raises:
        TranslationError: there is a graph break, or an operator is not available in ONNX.
        OSError: the file cannot be written.
    """
    torch._dynamo.reset()
    lowering = _ModelLowering(options)
    compiled = torch.compile(model, backend=Pipeline(options, Observer(), lowering).compile_dynamo_graph)
    args, kwargs = call
    with torch.no_grad():
        compiled(*args, **kwargs)
    torch._dynamo.reset()
    if lowering.missing:
        raise TranslationError(f"some operators cannot be in an ONNX model: {'; '.join(lowering.missing)}")
    if len(lowering.models) != 1:
        raise TranslationError(
            f"an ONNX file has one graph, but torch.compile makes {len(lowering.models)} of the model; "
            "dynamo-backends explain shows the graph breaks"
        )
    [exported] = lowering.models
    size = sum(value.const_value.nbytes for value in exported.graph.initializers.values() if value.const_value)
    ir.save(exported, path, external_data=f"{path.name}.data" if size > 2**30 else None)


class _ModelLowering(Lowering):
    """Translates whole graphs to ONNX, and runs them in PyTorch."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._support = Support(options.opset, options.providers)
        self.models: list[ir.Model] = []
        self.missing: list[str] = []

    def record(self, graph: PostGradGraph) -> None:
        split = split_graph(graph.module, self._support, {})
        if split.coverage.in_pytorch or len(split.regions) != 1:
            texts = [
                f"{item.operator} at {next(iter(item.lines), 'an unknown line')}: {item.reason}"
                for item in fallbacks_of(split)
            ]
            self.missing.append("; ".join(texts or ["it has no operators"]))
        else:
            self.models.append(self._model(split.regions[0], graph.weights))

    def _model(self, region: Region, weights: Mapping[fx.Node, Weight]) -> ir.Model:
        """The ONNX model of a region, with weights as initializers, and the user's names for other inputs."""
        model = translate(region.nodes, region.inputs, region.outputs, opset=self._options.opset, name="main")
        taken = {value.name for node in model.graph for value in node.outputs}
        for item, value in zip(region.inputs, list(model.graph.inputs), strict=True):
            name = user_name(item.node)
            if name and name not in taken:
                value.name = name
            if item.node in weights and item.permutation is None:
                tensor = weights[item.node].tensor.detach().contiguous()
                value.const_value = tensor_adapters.TorchTensor(tensor, name=value.name)
                model.graph.inputs.remove(value)
                model.graph.register_initializer(value)
        return fold_constants(model)
