"""Quantizes a loaded model with torchao, for ``--quantize``; ``case.SCHEMES`` lists the schemes."""

from __future__ import annotations

import dataclasses

import torch
from torchao import quantization
from torchao.quantization.granularity import PerGroup

from .case import Case, UsageError
from .exported import dynamic_shapes
from .loading import LoadedCase

_GROUP = PerGroup(32)
_CONFIGURATIONS = {
    "int8-weights": lambda: quantization.Int8WeightOnlyConfig(),
    "int8-dynamic": lambda: quantization.Int8DynamicActivationInt8WeightConfig(),
    "int4-weights": lambda: quantization.IntxWeightOnlyConfig(torch.int4, _GROUP),
    "int4-dynamic": lambda: quantization.Int8DynamicActivationIntxWeightConfig(torch.int4, _GROUP),
}


@torch.no_grad()
def quantized(loaded: LoadedCase, case: Case) -> tuple[LoadedCase, int]:
    """The case with a quantized model, and the bytes of its weights, integers and scales.

    The model of ``loaded`` must not be used any more.

    Raises:
        UsageError: the model has nothing to quantize.
        RuntimeError: torchao or ``torch.export`` cannot quantize it; its cause says why.
    """
    buffers = {name for name, _ in loaded.model.named_buffers(remove_duplicate=False)}
    try:
        if case.quantize == "int8-static":
            model: torch.nn.Module = _static(loaded)
        else:
            model = loaded.model
            quantization.quantize_(model, _CONFIGURATIONS[case.quantize]())
    except Exception as error:
        raise RuntimeError(f"{case.quantize} cannot be applied to {case.model}.") from error
    weights = [part for tensor in _weights(model, buffers) for part in _parts(tensor)]
    if not any(weight.dtype is torch.int8 for weight in weights):
        layers = "torch.nn.Linear" + " or torch.nn.Conv2d" * (case.quantize == "int8-static")
        raise UsageError(f"--quantize {case.quantize}: {case.model!r} has nothing to quantize, no {layers}")
    storages = {part.untyped_storage().data_ptr(): part for part in weights}
    return dataclasses.replace(loaded, model=model), sum(part.nbytes for part in storages.values())


def _static(loaded: LoadedCase) -> torch.fx.GraphModule:
    """Exports the model, and calibrates the scales of activations with the inputs of all sizes."""
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
        X86InductorQuantizer,
        get_default_x86_inductor_quantization_config,
    )

    first = loaded.inputs[0]
    shapes = dynamic_shapes(loaded)
    exported = torch.export.export(loaded.model, first.args, first.kwargs, dynamic_shapes=shapes).module()
    quantizer = X86InductorQuantizer().set_global(get_default_x86_inductor_quantization_config())
    prepared = prepare_pt2e(exported, quantizer)
    for inputs in loaded.inputs:
        prepared(*inputs.args, **inputs.kwargs)
    converted: torch.fx.GraphModule = convert_pt2e(prepared)
    return converted


def _weights(model: torch.nn.Module, buffers: set[str]) -> list[torch.Tensor]:
    """The parameters; of pt2e's graph what it reads except the model's buffers, as unused float weights stay in it."""
    if not isinstance(model, torch.fx.GraphModule):
        return list(model.parameters())
    names = {str(node.target) for node in model.graph.nodes if node.op == "get_attr"} - buffers
    state = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    return [state[name] for name in names if name in state]


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The plain tensors of a tensor: the integers, scales and zero points of a quantized one."""
    if not hasattr(tensor, "__tensor_flatten__"):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [part for name in names for part in _parts(getattr(tensor, name))]
