"""What passes may ask of the place their graphs will run in: the bridge from ``passes.Target`` to the runtime."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import onnx_ir as ir
import torch
from torch import fx

from passes.engine.manager import Target, register_backend

from ..errors import KernelFaultError, Reason
from ..exporter.decompositions import decomposition_table
from ..options import Options
from ..partition.regions import Support
from ..runtime.kernel_faults import check, refusal_of_node, result_types
from ..runtime.providers import Provider, only_cpu, provider_name

BACKEND = "onnxrt"
"""The name PyTorch's bisector knows our backends by."""

register_backend(BACKEND)


def pass_target(options: Options, support: Support) -> Target:
    """The target of a pipeline's passes."""
    return Target(
        backend=BACKEND,
        providers=tuple(provider_name(provider) for provider in options.providers),
        opset=options.opset,
        multiplies_bfloat16=only_cpu(options.providers) and has_units_for_bfloat16(),
        threads=options.threads,
        decompositions=functools.partial(decomposition_table, options.opset),
        refuses=functools.partial(_refuses, options.providers, options.opset),
        refuses_operator=functools.partial(_refuses_operator, support),
        infers=functools.partial(result_types, options.providers, options.opset),
        objection=functools.partial(_objection, options.providers),
    )


def has_units_for_bfloat16() -> bool:
    """Whether this processor has matrix units for bfloat16 (AMX), with which PyTorch is 1.6 to 2.5 times as fast as
    ONNX Runtime in float32; with AVX-512's instructions for bfloat16 ONNX Runtime is 1.2 to 1.35 times as fast, with
    neither 3 to 25 times."""
    return bool(torch.cpu.get_capabilities().get("amx_bf16"))


def _objection(providers: Sequence[Provider], model: ir.Model) -> str | None:
    try:
        check(model, providers)
    except KernelFaultError as error:
        return str(error)
    return None


def _refuses_operator(support: Support, node: fx.Node) -> str | None:
    return _text(support.reason_against(node))


def _refuses(providers: Sequence[Provider], opset: int, node: ir.Node) -> str | None:
    return _text(refusal_of_node(node, providers, opset))


def _text(reason: Reason | None) -> str | None:
    return None if reason is None else reason.text
