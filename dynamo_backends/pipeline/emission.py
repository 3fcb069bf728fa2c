"""Emits a region as an ONNX model: translation, passes of the stage ``onnx``, and what a session of it needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

import onnx_ir as ir
import torch
from torch import fx

from passes.engine.fx.editing import owner
from passes.engine.manager import mark_weight

from ..errors import KernelFaultError
from ..exporter.results import number_dtype, sizes_of
from ..exporter.translate import fold_constants, translate
from ..graphs.artifacts import Region
from ..graphs.in_place import PartialWrite
from ..options import Options
from ..partition.pass_verification import ModelChecker
from ..partition.program import RegionCode, RegionProgram
from ..partition.regions import depth_first, region_graph
from ..runtime.binding import InputSpec, OutputSpec
from ..runtime.executable import Executable
from ..runtime.kernel_faults import check, fault_in, optimizers_to_disable, serialized
from ..runtime.providers import as_precise_as_pytorch, fallbacks, only_cpu
from ..runtime.settings import SessionSettings
from ..weights.region_session import Weight
from ..weights.selection import constants_of
from .stage_data import EmittedRegion, PostGradGraph
from .stage_passes import StagePasses

_SCATTERS = ("ScatterND", "ScatterElements")
"""Operators that copy their first input and write a part. ONNX Runtime's kernels for the CPU may work in place
(``MayInplace``): they do not copy if both are the same memory."""

_OF_METADATA = ("Shape", "Size")


def emit(
    graph: PostGradGraph, region: Region, options: Options, passes: StagePasses, *, is_only: bool, checks_results: bool
) -> EmittedRegion:
    """The model of a region.

    Args:
        graph: that it is a part of.
        region: the region.
        options: of the backend.
        passes: runs those of the stage ``onnx``.
        is_only: whether it is the graph's only region.
        checks_results: whether first results of other providers than the CPU's are compared with PyTorch's.

    Raises:
        TranslationError: a node cannot be translated.
    """
    is_inference = graph.name.direction == "inference"
    name = f"{graph.name.direction}_region_{region.index}"  # without the graph's number, for the cache
    nodes = region.nodes if is_inference else depth_first(region)
    with graph.timed("export"):
        model = model_of(region, graph.weights, opset=options.opset, name=name, nodes=nodes)
    inputs, outputs = _input_specs(region, model), list(output_specs(region, model))
    settings = SessionSettings(
        options.providers,
        options.threads,
        shares_graph=not is_only or not is_inference,  # in training, PyTorch continues at once
        spin=options.spin,
        disabled_optimizers=optimizers_to_disable(model, options.providers),
        idle_seconds=options.idle_seconds,
    )
    checker = None
    if graph.evaluation is not None:
        arguments, results = [item.node for item in region.inputs], [item.node for item in region.outputs]
        checker = ModelChecker(graph.evaluation, arguments, results, inputs, outputs, settings)
    optimized = model.clone()
    with graph.timed("onnx_passes"):
        fired = passes.run("onnx", graph.name, optimized, region.index, checker)
    constants = constants_of(region, optimized, graph.weights)
    if only_cpu(options.providers):
        for i, argument in _in_place_results(region, optimized, graph.writes).items():
            outputs[i] = dataclasses.replace(outputs[i], written=argument)
    content = serialized(optimized, without=[inputs[i].name for i in constants])
    executable = Executable(content, inputs, tuple(outputs), settings, tuple(constants))
    first, *others = _on_providers(executable, optimized)
    code = region_graph(region)
    is_checked = checks_results and not only_cpu(options.providers)
    checked = fx.GraphModule({}, region_graph(region), "Region") if is_checked else None
    program = RegionProgram(first, RegionCode.of(code), tuple(others), checked)
    return EmittedRegion(region, model, optimized, fired, constants, _fault(optimized, options), program)


def _on_providers(executable: Executable, model: ir.Model) -> Iterator[Executable]:
    """An executable on its providers, and without the first and so on, where no kernel is wrong."""
    devices = {spec.device.type for specs in (executable.inputs, executable.outputs) for spec in specs}
    operators = {node.op_type for node in model.graph.all_nodes()}
    first, *others = fallbacks(executable.settings.providers, devices)
    yield executable.on(as_precise_as_pytorch(first, operators))
    for providers in others:
        if fault_in(model, providers) is None:
            yield executable.on(as_precise_as_pytorch(providers, operators))


def _fault(model: ir.Model, options: Options) -> KernelFaultError | None:
    try:
        check(model, options.providers)
    except KernelFaultError as error:
        return error
    return None


def model_of(
    region: Region,
    weights: Mapping[fx.Node, Weight],
    *,
    opset: int,
    name: str = "region",
    nodes: Sequence[fx.Node] | None = None,
) -> ir.Model:
    """A region's ONNX model before the passes, with folded constants; inputs that are weights are marked for them.

    Args:
        region: the region.
        weights: the graph's weights, by placeholder.
        opset: of the model.
        name: of the ONNX graph.
        nodes: the region's nodes in another order.

    Raises:
        TranslationError: a node cannot be translated.
    """
    ordered = region.nodes if nodes is None else nodes
    model = fold_constants(translate(ordered, region.inputs, region.outputs, opset=opset, name=name))
    for item, value in zip(region.inputs, model.graph.inputs, strict=True):
        if item.node in weights:
            mark_weight(value)
    return model


def _input_specs(region: Region, model: ir.Model) -> tuple[InputSpec, ...]:
    specs = []
    for item, value in zip(region.inputs, model.graph.inputs, strict=True):
        meta = item.node.meta["val"]
        assert value.name is not None
        if isinstance(meta, torch.Tensor):
            sizes = sizes_of(meta)
            specs.append(InputSpec(value.name, meta.dtype, item.permutation, sizes=sizes, device=meta.device))
        else:
            specs.append(InputSpec(value.name, None, sizes=sizes_of(meta)))
    return tuple(specs)


def output_specs(region: Region, model: ir.Model) -> tuple[OutputSpec, ...]:
    """The dtypes, shapes and strides of a region's results."""
    specs = []
    for item, layout, value in zip(region.outputs, region.layouts, model.graph.outputs, strict=True):
        meta = item.node.meta["val"]
        assert value.name is not None
        if isinstance(meta, torch.Tensor):
            specs.append(
                OutputSpec(
                    value.name,
                    meta.dtype,
                    permutation=layout.permutation,
                    strides=layout.strides,
                    exact=layout.exact_strides(meta),
                    sizes=sizes_of(meta),
                    device=meta.device,
                )
            )
        else:
            dtype = number_dtype(meta)
            assert dtype is not None
            specs.append(OutputSpec(value.name, dtype, is_number=True, sizes=()))
    return tuple(specs)


def _in_place_results(region: Region, model: ir.Model, writes: Iterable[PartialWrite]) -> dict[int, int]:
    """The results that are written in place: position among the region's outputs -> position among its inputs.

    The model must read the argument only where it computes the result, and no view of it, because ONNX Runtime does not
    know that they have the same memory. Running it again on the written argument gives the same result.

    Args:
        region: the region.
        model: its model, after all passes.
        writes: those of the graph.
    """
    inputs = {item.node: i for i, item in enumerate(region.inputs)}
    outputs = {item.node: i for i, item in enumerate(region.outputs)}
    found = {}
    for item in writes:
        to, at = inputs.get(item.argument), outputs.get(item.writes[0])
        if len(item.writes) > 1 or to is None or at is None:
            continue
        if any(owner(node) is item.argument for node in inputs if node is not item.argument):  # views by PyTorch
            continue
        if region.inputs[to].permutation == region.outputs[at].permutation and _may_write(
            model.graph.outputs[at], model.graph.inputs[to]
        ):
            found[at] = to
    return found


def _may_write(result: ir.Value, argument: ir.Value) -> bool:
    scatter = result.producer()
    if scatter is None or scatter.domain not in ("", "ai.onnx") or scatter.op_type not in _SCATTERS:
        return False
    reduction = scatter.attributes.get("reduction")
    if (reduction is not None and reduction.as_string() != "none") or scatter.inputs[0] is not argument:
        return False
    return all(use.node is scatter or use.node.op_type in _OF_METADATA for use in argument.uses())
