"""Faults of ONNX Runtime's kernels and graph optimizers, and the check that keeps wrong kernels from running.

A session is made only of a model that passed ``check``. The check looks at ONNX nodes, whoever wrote them: our
converters, torchlib, or another package's pass. ``docs/upstream.md`` describes each fault;
``tests/project/test_upstream.py`` demonstrates each, and fails once it is fixed.
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
from .integer_kernels import PRODUCTS, has_mixed_signs, mixed_signs_are_exact
from .node_support import ANSWERS, model_of, signature
from .providers import Provider, needs_subprocess, on_current_gpu, only_cpu
from .settings import SessionSettings, create_session
from .subprocess_session import WITHOUT_CPU, check_in_subprocess


def _reduces(node: ir.Node) -> bool:
    """Whether a scatter has a reduction. One that the caller of a function chooses counts."""
    reduction = node.attributes.get("reduction")
    return reduction is not None and (reduction.is_ref() or reduction.as_string() not in ("", "none"))


FAULTS: tuple[Fault[ir.Node], ...] = (
    Fault(
        "a sum at repeated indices loses updates",
        {"ScatterND"},
        "ONNX Runtime's ScatterND with a reduction loses updates at repeated indices: its threads race",
        _reduces,
    ),
    Fault(
        "the logarithm of a sum of exponentials underflows",
        {"ReduceLogSumExp"},
        "ONNX Runtime's ReduceLogSumExp uses 0 as the maximum where -inf comes first: the rest may underflow",
        lambda node: node.inputs[0] is None or node.inputs[0].dtype != ir.DataType.DOUBLE,
    ),
    Fault(
        "repeated indices are written in any order",
        {"ScatterND"},
        "ONNX Runtime's ScatterND writes repeated indices in any order, but torch.use_deterministic_algorithms is on",
        lambda _: torch.are_deterministic_algorithms_enabled(),
    ),
    Fault(
        "a product of uint8 with int8 saturates",
        PRODUCTS.keys(),
        "ONNX Runtime's product of uint8 with int8 adds in 16 bits and saturates on this processor, without VNNI",
        lambda node: has_mixed_signs(node) and not mixed_signs_are_exact(),
    ),
)
"""Wrong kernels. Found in ONNX Runtime 1.31 and 1.32, and assumed in every version until one is known to be fixed."""

_GRAPHS = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)


def _has_doubles(model: ir.Model) -> bool:
    values = (value for graph in model.graphs() for node in graph for value in node.outputs)
    return any(value.dtype == ir.DataType.DOUBLE for value in values)


def _has_a_root_of_an_unknown_sum(model: ir.Model) -> bool:
    """Whether a square root is taken of a sum without a constant: a variance and a computed epsilon."""
    for node in _all_nodes(model):
        total = node.inputs[0].producer() if node.op_type == "Sqrt" and node.inputs[0] is not None else None
        if total is not None and total.op_type == "Add":
            terms = (value and ir.convenience.get_const_tensor(value) for value in total.inputs)
            if all(tensor is None for tensor in terms):
                return True
    return False


def _has_a_power_that_is_nearly_a_square(model: ir.Model) -> bool:
    """Whether an exponent is nearly 2 (ONNX Runtime's relative tolerance is 1e-5), or not known, as a weight's."""
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
        "replaces x + 0 by x, but -0.0 + 0 is 0.0; joint.remove_noops does the rest of its work",
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
        "ignores the rank of the epsilon; our pass onnx.layer_norm does not",
    ),
    Fault(
        "an epsilon that is computed",
        {"LayerNormFusionL1", "LayerNormFusionL2"},
        "uses 1e-5 for an epsilon that is not a constant",
        _has_a_root_of_an_unknown_sum,
        versions=">=1.24,<1.32",
    ),
    Fault(
        "a choice between zeros by a negated condition",
        {"NotWhereFusion"},
        "swaps the branches of Where; its kernel then turns -0.0 of the branch for true into 0.0",
    ),
    Fault(
        "a product with dequantized weights",
        {"QDQSelectorActionTransformer"},
        "quantizes the float32 factor of a product with dequantized constant weights to int8, for MatMulNBits",
    ),
    Fault(
        "float32 weights between quantized activations",
        {"WeightBiasQuantization"},
        "quantizes float32 weights of Conv, ConvTranspose and Gemm to int8 and their bias to int32, where their input "
        "was dequantized and their result is quantized",
    ),
    Fault(
        "two quantizations in a row",
        {"DoubleQDQPairsRemover"},
        "merges two quantizations into one with another scale",
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
        "uses 2 for an exponent within 1e-5 of it",
        _has_a_power_that_is_nearly_a_square,
    ),
    Fault(
        "constants that are nearly those of gelu",
        {"GeluFusionL1", "GeluFusionL2"},
        "replaces a formula whose constants are within 1e-5 of gelu's by Gelu; our pass onnx.gelu compares exactly",
    ),
    Fault(
        "the largest of padded numbers",
        {"Pad_Fusion"},
        "moves the zeros of a Pad into the padding of the MaxPool after it, which ignores padding",
        versions=">=1.24,<1.32",
    ),
    Fault(
        "Relu and Clip in double precision",
        {"FuseReluClip"},
        "fails on a Relu before a Clip of float64, so no session can be made",
        _has_doubles,
    ),
)
"""Graph optimizers that change results or reduce precision. They run before nodes are assigned to providers, or on the
CPU provider's nodes."""

SLOW_OPTIMIZERS = ("SkipLayerNormFusion", "BiasSkipLayerNormFusion")
"""Their kernel takes five times as long as the ``Add`` and ``LayerNormalization`` it replaces (182 and 34 microseconds
for 128 rows of 256, AMD EPYC, one thread)."""


def optimizers_to_disable(model: ir.Model, providers: Sequence[Provider]) -> tuple[str, ...]:
    """The names of ONNX Runtime's optimizers that are wrong for a model, or slow on the CPU provider if it is first."""
    faults = (fault for fault in OPTIMIZER_FAULTS if fault.is_installed and fault.applies(model))
    slow = SLOW_OPTIMIZERS if only_cpu(providers) else ()
    return tuple(sorted({*(str(name) for fault in faults for name in fault.operators), *slow}))


def fault_in(model: ir.Model, providers: Sequence[Provider]) -> tuple[ir.Node, Fault[ir.Node]] | None:
    """The first node of a model, its subgraphs and functions that would run on a wrong kernel, with the fault.

    The CPU provider runs the nodes that the others reject. So its faults count, unless the first provider has a kernel
    for the node.
    """
    opset = model.opset_imports.get("", 1)
    for node in _all_nodes(model):
        for fault in _faults_of(node):
            are_typed = all(value is None or value.dtype is not None for value in node.inputs)
            if only_cpu(providers) or not are_typed or _first_provider_rejects(node, providers, opset) is not None:
                return node, fault
    return None


def _faults_of(node: ir.Node) -> Iterator[Fault[ir.Node]]:
    """The faults of the CPU provider's kernel for a node."""
    for fault in FAULTS if node.domain in ("", "ai.onnx", "com.microsoft") else ():
        if node.op_type in fault.operators and fault.is_installed and fault.applies(node):
            yield fault


def _all_nodes(model: ir.Model) -> Iterator[ir.Node]:
    for graph in (model.graph, *model.functions.values()):
        yield from graph.all_nodes()


def check(model: ir.Model, providers: Sequence[Provider]) -> None:
    """Checks that no node would run on a wrong kernel.

    Raises:
        KernelFaultError: one would; the message names it.
    """
    found = fault_in(model, providers)
    if found is not None:
        node, fault = found
        raise KernelFaultError(node.name or node.op_type, fault.reason, node.metadata_props.get("fx_node"))


def serialized(model: ir.Model, *, without: Sequence[str] = ()) -> bytes:
    """A model that passed ``check``, as ONNX Runtime loads it.

    Inputs in ``without`` are left out; they are declared later (``constants.declared``).
    """
    proto = ir.to_proto(model)
    if without:
        names = set(without)
        _add_tables(proto.graph, names, computed_from(model.graph, names))
        inputs = [item for item in proto.graph.input if item.name not in names]
        del proto.graph.input[:]
        proto.graph.input.extend(inputs)
    return proto.SerializeToString()


def _add_tables(graph: onnx.GraphProto, constants: Collection[str], computed: Collection[str]) -> None:
    """Makes lookups in inputs that will be constants read inputs of their own (``constants.TABLE``); in place.

    Lookups at ``computed`` indices, which ONNX Runtime knows when it makes the session, do not change.
    """
    lookups = [
        node
        for node in graph.node
        if node.op_type == "Gather" and node.input[0] in constants and node.input[1] not in computed
    ]
    names = dict.fromkeys(node.input[0] for node in lookups)
    inputs = {item.name: item for item in graph.input}
    for node in lookups:
        node.input[0] += TABLE
    for name in names:
        table = graph.input.add()
        table.CopyFrom(inputs[name])
        table.name = name + TABLE


def reason_against_model(
    model: ir.Model,
    providers: Sequence[Provider],
    *,
    only_first: bool = False,
    sizes: Mapping[str, Sequence[int]] | None = None,
) -> SessionError | None:
    """Why a model cannot run, without optimizations on one thread; ``None`` if it can.

    Args:
        model, providers: the model, and providers in order of preference.
        only_first: whether the first provider must run all nodes; otherwise the CPU provider may run some.
        sizes: the shapes of its inputs, by name; with them a provider other than the CPU's also runs the model.
    """
    try:
        check(model, providers)
        _load(model, providers, only_first=only_first, sizes=sizes)
    except SessionError as error:
        return error
    return None


def reason_against_node(node: ir.Node, providers: Sequence[Provider], opset: int) -> Reason | None:
    """Why the first provider must not run a node, whose inputs have types; ``None`` if it may."""
    if any(_faults_of(node)) or any(attribute.type in _GRAPHS for attribute in node.attributes.values()):
        try:
            check(model_of(node, opset), providers)
        except SessionError as error:
            return error.reason
    return _first_provider_rejects(node, providers, opset)


def _first_provider_rejects(node: ir.Node, providers: Sequence[Provider], opset: int) -> Reason | None:
    def find_out() -> Reason | None:
        try:
            _load(model_of(node, opset), providers, only_first=True)
        except SessionError as error:
            return error.reason
        return None

    return ANSWERS.get(("ONNX node", repr(providers), opset, signature(node)), find_out)


def _load(
    model: ir.Model,
    providers: Sequence[Provider],
    *,
    only_first: bool,
    sizes: Mapping[str, Sequence[int]] | None = None,
) -> None:
    """Makes a session of a model and drops it. A provider other than the CPU's does so in a subprocess, and also runs
    the model if ``sizes`` are given.

    Raises:
        SessionError: ONNX Runtime rejected the model.
    """
    content, settings = serialized(model), _settings(providers[:1] if only_first else providers)
    config = WITHOUT_CPU if only_first and not only_cpu(providers) else {}
    if needs_subprocess(providers):
        check_in_subprocess(content, settings, sizes, config)
        return
    options = settings.options(threads=1)
    for key, value in config.items():
        options.add_session_config_entry(key, value)
    create_session(content, settings, options)


def _settings(providers: Sequence[Provider]) -> SessionSettings:
    return SessionSettings(on_current_gpu(providers), threads=1, optimize=False)


DTYPES_BY_NAME = {
    "tensor(float)": ir.DataType.FLOAT,
    "tensor(double)": ir.DataType.DOUBLE,
    **{f"tensor({item.name.lower()})": item for item in ir.DataType},
}
"""By ONNX Runtime's names of types."""

ResultType = tuple[ir.DataType, Sequence["int | str | None"] | None]
"""A result's dtype and shape; ``None`` for what is not known."""


def result_types(providers: Sequence[Provider], opset: int, node: ir.Node) -> list[ResultType | None] | None:
    """The types that ONNX Runtime infers for a node's results; ``None`` if it rejects the node. Its inputs have types
    and shapes, as far as these are known."""

    def find_out() -> dict[str, ResultType] | Reason:
        content, settings = serialized(model_of(node, opset, with_sizes=True)), _settings(providers)
        try:
            outputs = create_session(content, settings, settings.options(threads=1)).get_outputs()
        except SessionError as error:
            return error.reason
        return {
            item.name: (DTYPES_BY_NAME[item.type], _shape(item.shape))
            for item in outputs
            if item.type in DTYPES_BY_NAME
        }

    shapes = tuple(None if value is None else str(value.shape) for value in node.inputs)
    types = ANSWERS.get(("result types", repr(providers), opset, signature(node), shapes), find_out)
    return None if isinstance(types, Reason) else [types.get(f"output_{i}") for i in range(len(node.outputs))]


def _shape(shape: Sequence[int | str | None]) -> Sequence[int | str | None] | None:
    """ONNX Runtime's shape of a result. It gives ``[]`` both for a scalar and for an unknown shape."""
    return [size if isinstance(size, (int, str)) else None for size in shape] if shape else None
