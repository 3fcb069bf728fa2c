"""What passes may ask of the place their graphs will run in: the bridge from ``passes.Target`` to the runtime."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import onnx_ir as ir
import torch
from torch import fx

from passes.engine.manager import Target, register_backend

from .errors import KernelFaultError
from .exporter.decompositions import decomposition_table
from .exporter.translate import IR_VERSION
from .options import Options
from .regions import Support, first_line
from .runtime.kernels import check
from .runtime.providers import Provider, provider_name
from .runtime.session import refusal

BACKEND = "onnxrt"
"""The name PyTorch's bisector knows our backends by."""

register_backend(BACKEND)

_known: dict[object, str | None] = {}
"""What the runtime said of a node, for all alike."""


def pass_target(options: Options, support: Support) -> Target:
    """The target of a pipeline's passes."""
    return Target(
        backend=BACKEND,
        providers=tuple(provider_name(provider) for provider in options.providers),
        opset=options.opset,
        decompositions=functools.partial(decomposition_table, options.opset),
        refuses=functools.partial(_refuses, options.providers, options.opset),
        refuses_operator=_refuses_operator(support),
        objection=_objection,
    )


def _objection(model: ir.Model) -> str | None:
    try:
        check(model)
    except KernelFaultError as error:
        return str(error)
    return None


def _refuses_operator(support: Support) -> Callable[[fx.Node], str | None]:
    return support.reason_against


def _refuses(providers: Sequence[Provider], opset: int, node: ir.Node) -> str | None:
    """Why the first provider has no kernel for a node whose inputs have types; asked by a session of it alone."""
    key = (repr(providers), opset, torch.are_deterministic_algorithms_enabled(), _signature(node))
    if key not in _known:
        said = refusal(_model_of(node, opset), providers, only_first=True)
        _known[key] = None if said is None else first_line(said)
    return _known[key]


def _signature(node: ir.Node) -> object:
    attributes = tuple(sorted((name, str(attribute.value)) for name, attribute in node.attributes.items()))
    inputs = tuple(None if value is None else (str(value.dtype), _rank(value)) for value in node.inputs)
    outputs = tuple(value.name != "" for value in node.outputs)
    return node.domain, node.op_type, attributes, inputs, outputs


def _rank(value: ir.Value) -> int | None:
    return None if value.shape is None else len(value.shape)


def _model_of(node: ir.Node, opset: int) -> ir.Model:
    """A model of one node: its inputs become the model's, of the same types and of any size."""
    inputs = [None if value is None else _input(f"input_{i}", value) for i, value in enumerate(node.inputs)]
    outputs = [ir.Value(name="" if value.name == "" else f"output_{i}") for i, value in enumerate(node.outputs)]
    alone = ir.Node(node.domain, node.op_type, inputs, list(node.attributes.values()), outputs=outputs)
    imports = {"": opset}
    imports.setdefault(node.domain, 1)
    graph = ir.Graph(
        list({value for value in inputs if value is not None}),
        [value for value in outputs if value.name],
        nodes=[alone],
        opset_imports=imports,
        name="one_node",
    )
    return ir.Model(graph, ir_version=IR_VERSION)


def _input(name: str, value: ir.Value) -> ir.Value:
    rank = _rank(value)
    return ir.Value(name=name, type=value.type, shape=None if rank is None else ir.Shape([None] * rank))
