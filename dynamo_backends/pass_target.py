"""What passes may ask of the place their graphs will run in: the bridge from ``passes.Target`` to the runtime."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import onnx_ir as ir
import torch
from torch import fx

from passes.engine.manager import Inferred, Target, register_backend

from .errors import KernelFaultError, SessionError
from .exporter.decompositions import decomposition_table
from .exporter.translate import IR_VERSION
from .options import Options
from .regions import Support, first_line
from .runtime.kernels import check
from .runtime.providers import Provider, provider_name
from .runtime.session import Session, refusal

BACKEND = "onnxrt"
"""The name PyTorch's bisector knows our backends by."""

register_backend(BACKEND)

_known: dict[object, str | None] = {}
"""What the runtime said of a node, for all alike."""

_inferred: dict[object, dict[str, Inferred] | None] = {}
"""What the runtime said that a node returns, by the names of its results."""

_MOST_INFERRED = 4096

_DTYPES = {
    "tensor(float)": ir.DataType.FLOAT,
    "tensor(double)": ir.DataType.DOUBLE,
    **{f"tensor({item.name.lower()})": item for item in ir.DataType},
}
"""ONNX Runtime's names of types."""


def pass_target(options: Options, support: Support) -> Target:
    """The target of a pipeline's passes."""
    return Target(
        backend=BACKEND,
        providers=tuple(provider_name(provider) for provider in options.providers),
        opset=options.opset,
        threads=options.threads or torch.get_num_threads(),
        decompositions=functools.partial(decomposition_table, options.opset),
        refuses=functools.partial(_refuses, options.providers, options.opset),
        refuses_operator=_refuses_operator(support),
        infers=functools.partial(_infers, options.providers, options.opset),
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


def _infers(providers: Sequence[Provider], opset: int, node: ir.Node) -> Sequence[Inferred | None] | None:
    """What the runtime says that a node returns; ``None`` if it does not run it. A session of it alone is asked."""
    shapes = tuple(None if value is None else str(value.shape) for value in node.inputs)
    key = (repr(providers), opset, _signature(node), shapes)
    if key not in _inferred:
        if len(_inferred) == _MOST_INFERRED:
            _inferred.clear()
        _inferred[key] = _output_types(_model_of(node, opset, with_sizes=True), providers)
    found = _inferred[key]
    if found is None:
        return None
    return [found.get(f"output_{i}") for i in range(len(node.outputs))]


def _output_types(model: ir.Model, providers: Sequence[Provider]) -> dict[str, Inferred] | None:
    try:
        session = Session(model, providers, threads=1, alone=False, optimize=False)
    except (SessionError, KernelFaultError):
        return None
    return {
        item.name: (_DTYPES[item.type], _sizes(item.shape)) for item in session(1).get_outputs() if item.type in _DTYPES
    }


def _sizes(shape: Sequence[int | str | None]) -> Sequence[int | str | None] | None:
    """A shape as ONNX Runtime tells it, for which one that is not known is like that of a number: empty."""
    return [size if isinstance(size, (int, str)) else None for size in shape] if shape else None


def _signature(node: ir.Node) -> object:
    attributes = tuple(sorted((name, str(attribute.value)) for name, attribute in node.attributes.items()))
    inputs = tuple(None if value is None else (str(value.dtype), _rank(value)) for value in node.inputs)
    outputs = tuple(value.name != "" for value in node.outputs)
    return node.domain, node.op_type, attributes, inputs, outputs


def _rank(value: ir.Value) -> int | None:
    return None if value.shape is None else len(value.shape)


def _model_of(node: ir.Node, opset: int, *, with_sizes: bool = False) -> ir.Model:
    """A model of one node: its inputs become the model's, of the same types and of any size, or of the same sizes."""
    inputs = [None if value is None else _input(f"input_{i}", value, with_sizes) for i, value in enumerate(node.inputs)]
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


def _input(name: str, value: ir.Value, with_sizes: bool) -> ir.Value:
    rank = _rank(value)
    any_size = None if rank is None else ir.Shape([None] * rank)
    return ir.Value(name=name, type=value.type, shape=value.shape if with_sizes else any_size)
