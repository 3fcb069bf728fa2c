"""Kernels of ONNX Runtime that compute something wrong, and the check that keeps them from running.

A session is only made of a model that went through ``check``. It asks by the kernel: whoever wrote the
node, a translation of ours, torchlib's, a pass of another package, it does not run. ``docs/upstream.md`` has each
fault; ``tests/project/test_upstream.py`` shows each, and fails where it is gone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np
import onnx
import onnx_ir as ir
import torch

from ..common.upstream_faults import Fault
from ..errors import KernelFaultError, Reason, SessionError
from .constants import TABLE, computed_from
from .node_support import ORACLE, model_of, signature
from .providers import Provider, only_cpu, provider_name
from .settings import SessionSettings, create_session
from .subprocess_session import check_apart


def _reduces(node: ir.Node) -> bool:
    """Whether a scatter adds, multiplies or compares; a reduction that a function's caller chooses may."""
    reduction = node.attributes.get("reduction")
    return reduction is not None and (reduction.is_ref() or reduction.as_string() not in ("", "none"))


FAULTS: tuple[Fault[ir.Node], ...] = (
    Fault(
        "a sum at repeated indices loses updates",
        {"ScatterND"},
        "ONNX Runtime's ScatterND with a reduction gives its indices to several threads, and where two name one place "
        "a sum is lost",
        _reduces,
    ),
    Fault(
        "the logarithm of a sum of exponentials underflows",
        {"ReduceLogSumExp"},
        "ONNX Runtime's ReduceLogSumExp takes 0 for the largest number where -inf comes first: the rest may underflow",
        lambda node: node.inputs[0] is None or node.inputs[0].dtype != ir.DataType.DOUBLE,
    ),
    Fault(
        "repeated indices are written in any order",
        {"ScatterND"},
        "torch.use_deterministic_algorithms(True), and ONNX Runtime's ScatterND writes repeated indices in any order",
        lambda _: torch.are_deterministic_algorithms_enabled(),
    ),
)
"""Seen in ONNX Runtime 1.31 and 1.32, assumed in all versions that the package may be installed with, until one is
shown to be mended."""

_GRAPHS = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)


def _has_doubles(model: ir.Model) -> bool:
    values = (value for graph in model.graphs() for node in graph for value in node.outputs)
    return any(value.dtype == ir.DataType.DOUBLE for value in values)


def _has_a_root_of_an_unknown_sum(model: ir.Model) -> bool:
    """Whether a root is taken of a sum with no constant in it, as of a variance and an epsilon that is computed."""
    for node in _all_nodes(model):
        total = node.inputs[0].producer() if node.op_type == "Sqrt" and node.inputs[0] is not None else None
        known = () if total is None else (value and ir.convenience.get_const_tensor(value) for value in total.inputs)
        if total is not None and total.op_type == "Add" and all(tensor is None for tensor in known):
            return True
    return False


def _has_a_power_that_is_nearly_a_square(model: ir.Model) -> bool:
    """Whether an exponent is nearly 2, or not known, as that of a weight. ONNX Runtime takes a relative 1e-5 for
    nearly."""
    for node in _all_nodes(model):
        if node.op_type == "Pow" and node.inputs[1] is not None:
            tensor = ir.convenience.get_const_tensor(node.inputs[1])
            distances = None if tensor is None else abs(tensor.numpy().astype(np.float64) - 2)
            if distances is None or ((distances > 0) & (distances < 0.01)).any():
                return True
    return False


OPTIMIZER_FAULTS: tuple[Fault[ir.Model], ...] = (
    Fault(
        "the sum of -0 and 0",
        {"NoopElimination"},
        "makes x of x + 0, where -0.0 + 0 is 0.0; joint.remove_noops removes the rest of what it does",
    ),
    Fault(
        "a scaled product in double precision",
        {"MatMulScaleFusion"},
        "moves a float64 scale into the float32 attribute alpha of FusedMatMul, rounded",
        _has_doubles,
        versions=">=1.24,<1.32",
    ),
    Fault(
        "an epsilon of a higher rank than what is normalized",
        {"SimplifiedLayerNormFusion"},
        "forgets the rank of the epsilon; our pass onnx.layer_norm does not",
    ),
    Fault(
        "an epsilon that is computed",
        {"LayerNormFusionL1", "LayerNormFusionL2"},
        "takes 1e-5 for an epsilon that is no constant",
        _has_a_root_of_an_unknown_sum,
        versions=">=1.24,<1.32",
    ),
    Fault(
        "a choice between zeros by a negated condition",
        {"NotWhereFusion"},
        "exchanges the sides of Where, which makes 0.0 of the -0.0 that it takes where the condition is true",
    ),
    Fault(
        "a product with dequantized weights",
        {"QDQSelectorActionTransformer"},
        "quantizes the float32 factor of a product with dequantized constant weights to int8, for MatMulNBits",
    ),
    Fault(
        "float32 weights between quantized activations",
        {"WeightBiasQuantization"},
        "quantizes the float32 weights of Conv, ConvTranspose and Gemm to int8, their bias to int32, where what they "
        "take was dequantized and what they return is quantized",
    ),
    Fault(
        "two quantizations in a row",
        {"DoubleQDQPairsRemover"},
        "makes one quantization of two, with another scale",
    ),
    Fault(
        "a normalization in double precision",
        {"LayerNormFusionL1", "LayerNormFusionL2"},
        "drops the casts around a layer normalization of float64, and rounds its epsilon to float32",
        _has_doubles,
    ),
    Fault(
        "a power that is nearly a square",
        {"LayerNormFusionL1", "LayerNormFusionL2"},
        "takes 2 for an exponent within 1e-5 of it",
        _has_a_power_that_is_nearly_a_square,
    ),
    Fault(
        "constants that are nearly those of gelu",
        {"GeluFusionL1", "GeluFusionL2"},
        "makes Gelu of a formula whose constants are within 1e-5 of gelu's; our pass onnx.gelu compares them exactly",
    ),
    Fault(
        "the largest of padded numbers",
        {"Pad_Fusion"},
        "makes the zeros of a Pad the padding of the MaxPool after it, which takes no part in the maximum",
        versions=">=1.24,<1.32",
    ),
    Fault(
        "Relu and Clip in double precision",
        {"FuseReluClip"},
        "fails on a Relu before a Clip of float64, and so the session",
        _has_doubles,
    ),
)
"""Graph optimizers of ONNX Runtime that change results, or compute with fewer bits than the graph has; they run before
nodes are given to providers, or on what the CPU provider was given."""

SLOW_OPTIMIZERS = ("SkipLayerNormFusion", "BiasSkipLayerNormFusion")
"""They put a kernel there that takes five times as long as the ``Add`` and the ``LayerNormalization`` it replaces (182
and 34 microseconds for 128 rows of 256, AMD EPYC, one thread)."""


def optimizers_to_disable(model: ir.Model) -> tuple[str, ...]:
    """The names of ONNX Runtime's optimizers that must not see a model, and of those that only cost time."""
    faults = (fault for fault in OPTIMIZER_FAULTS if fault.is_installed and fault.applies(model))
    return tuple(sorted({*(str(name) for fault in faults for name in fault.operators), *SLOW_OPTIMIZERS}))


def fault_in(model: ir.Model, providers: Sequence[Provider]) -> tuple[ir.Node, Fault[ir.Node]] | None:
    """The first node of a model that would run on a kernel that is known to be wrong, with the fault.

    The CPU provider takes the nodes that another leaves. So its faults hold for a node, unless a provider before it has
    a kernel for that node, which is asked of the runtime.

    Args:
        model: its subgraphs and functions are searched too.
        providers: in the order of preference.
    """
    names = [provider_name(provider) for provider in providers]
    faulty = _faulty_operators()
    for node in _all_nodes(model):
        if node.op_type not in faulty or node.domain not in ("", "ai.onnx"):
            continue
        for fault in FAULTS:
            if node.op_type not in fault.operators or not fault.is_installed or not fault.applies(node):
                continue
            are_known = all(value is None or value.dtype is not None for value in node.inputs)
            opset = model.opset_imports.get("", 1)
            if fault.is_of(names) or not are_known or _first_provider_refuses(node, providers, opset) is not None:
                return node, fault
    return None


def _faulty_operators() -> set[str]:
    return {str(operator) for fault in FAULTS for operator in fault.operators}


def _all_nodes(model: ir.Model) -> Iterator[ir.Node]:
    yield from ir.traversal.RecursiveGraphIterator(model.graph)
    for function in model.functions.values():
        yield from ir.traversal.RecursiveGraphIterator(function)


def check(model: ir.Model, providers: Sequence[Provider]) -> None:
    """Checks that no kernel that is known to be wrong would run.

    Raises:
        KernelFaultError: one would; the message names the node.
    """
    found = fault_in(model, providers)
    if found is not None:
        node, fault = found
        raise KernelFaultError(node.name or node.op_type, fault.reason, node.metadata_props.get("fx_node"))


def serialized(model: ir.Model, *, without: Sequence[str] = ()) -> bytes:
    """A model as ONNX Runtime loads it.

    Args:
        model: the model; ``check`` says on which providers it may run.
        without: names of inputs that are left out: they are declared later (``constants.declared``).
    """
    proto = ir.to_proto(model)
    if without:
        names = set(without)
        _with_tables(proto.graph, names, computed_from(model.graph, names))
        inputs = [item for item in proto.graph.input if item.name not in names]
        del proto.graph.input[:]
        proto.graph.input.extend(inputs)
    return proto.SerializeToString()


def _with_tables(graph: onnx.GraphProto, constants: Collection[str], constant: Collection[str]) -> None:
    """Lets the lookups of a graph read inputs of their own instead of what will be constants; in place.

    Args:
        graph: the graph.
        constants: inputs that will be constants.
        constant: all values that will be; lookups at such indices are left to be computed when the session is made.
    """
    lookups = [
        node
        for node in graph.node
        if node.op_type == "Gather" and node.input[0] in constants and node.input[1] not in constant
    ]
    looked_up = dict.fromkeys(node.input[0] for node in lookups)
    declared_inputs = {item.name: item for item in graph.input}
    for node in lookups:
        node.input[0] += TABLE
    for name in looked_up:
        table = graph.input.add()
        table.CopyFrom(declared_inputs[name])
        table.name = name + TABLE


def refusal(
    model: ir.Model,
    providers: Sequence[Provider],
    *,
    only_first: bool = False,
    sizes: Mapping[str, Sequence[int]] | None = None,
) -> SessionError | None:
    """What speaks against running a model, or ``None`` if the runtime would run it unoptimized on one thread, right.

    Args:
        model: the model.
        providers: in the order of preference.
        only_first: whether all nodes must be the first provider's; without it the CPU provider may take some.
        sizes: of its inputs, by name: on another provider than the CPU's it is run too, which must not crash.
    """
    try:
        check(model, providers)
        _load(model, providers, only_first=only_first, sizes=sizes)
    except SessionError as error:
        return error
    return None


def refusal_of_node(node: ir.Node, providers: Sequence[Provider], opset: int) -> Reason | None:
    """Why the first provider must not run a node, whose inputs have types; ``None`` if it may.

    Args:
        node: of an ONNX graph, or of none.
        providers: in the order of preference.
        opset: of the model that it is for.
    """
    if node.op_type in _faulty_operators() or any(attribute.type in _GRAPHS for attribute in node.attributes.values()):
        try:
            check(model_of(node, opset), providers)
        except SessionError as error:
            return error.reason
    return _first_provider_refuses(node, providers, opset)


def _first_provider_refuses(node: ir.Node, providers: Sequence[Provider], opset: int) -> Reason | None:
    """What the first provider has against a node; its answers are kept for alike ones."""

    def find_out() -> Reason | None:
        try:
            _load(model_of(node, opset), providers, only_first=True)
        except SessionError as error:
            return error.reason
        return None

    return ORACLE.ask(("ONNX node", repr(providers), opset, signature(node)), find_out)


def _load(
    model: ir.Model,
    providers: Sequence[Provider],
    *,
    only_first: bool,
    sizes: Mapping[str, Sequence[int]] | None = None,
) -> None:
    """Makes a session of a model, and drops it; on another provider than the CPU's it runs too, apart, if ``sizes`` are
    given.

    Raises:
        SessionError: the runtime refused it.
    """
    content, settings = serialized(model), _settings(providers)
    if only_cpu(providers):
        create_session(content, settings, settings.options(threads=1))
    else:
        check_apart(content, settings, sizes, {"session.disable_cpu_ep_fallback": "1"} if only_first else {})


def _settings(providers: Sequence[Provider]) -> SessionSettings:
    return SessionSettings(tuple(providers), threads=1, optimize=False)


_DTYPES = {
    "tensor(float)": ir.DataType.FLOAT,
    "tensor(double)": ir.DataType.DOUBLE,
    **{f"tensor({item.name.lower()})": item for item in ir.DataType},
}
"""ONNX Runtime's names of types."""

ResultType = tuple[ir.DataType, Sequence["int | str | None"] | None]
"""A result's dtype and shape; ``None`` for what is not known."""


def result_types(providers: Sequence[Provider], opset: int, node: ir.Node) -> list[ResultType | None] | None:
    """What ONNX Runtime says of the types of a node's results, for passes that put new nodes in a model; ``None`` if it
    does not run the node.

    Args:
        providers: in the order of preference.
        opset: of the model that it is for.
        node: its inputs have types and shapes, as far as they are known.
    """

    def find_out() -> dict[str, ResultType] | Reason:
        content, settings = serialized(model_of(node, opset, with_sizes=True)), _settings(providers)
        try:
            outputs = create_session(content, settings, settings.options(threads=1)).get_outputs()
        except SessionError as error:
            return error.reason
        return {item.name: (_DTYPES[item.type], _sizes(item.shape)) for item in outputs if item.type in _DTYPES}

    shapes = tuple(None if value is None else str(value.shape) for value in node.inputs)
    found = ORACLE.ask(("result types", repr(providers), opset, signature(node), shapes), find_out)
    return None if isinstance(found, Reason) else [found.get(f"output_{i}") for i in range(len(node.outputs))]


def _sizes(shape: Sequence[int | str | None]) -> Sequence[int | str | None] | None:
    """A shape as ONNX Runtime tells it, for which one that is not known is like that of a number: empty."""
    return [size if isinstance(size, (int, str)) else None for size in shape] if shape else None
