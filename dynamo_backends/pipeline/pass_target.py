"""Implements ``passes.Target``: tells passes what ONNX Runtime supports."""

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
from ..runtime.integer_kernels import is_for_any_processor, mixed_signs_are_exact
from ..runtime.kernel_faults import check, reason_against_node, result_types
from ..runtime.providers import Provider, only_cpu, provider_name

BACKEND = "onnxrt"
"""The name of our backends in PyTorch's bisector (``CompilerBisector``)."""

register_backend(BACKEND)


def pass_target(options: Options, support: Support) -> Target:
    """The target of the passes of one pipeline."""
    return Target(
        backend=BACKEND,
        providers=tuple(provider_name(provider) for provider in options.providers),
        opset=options.opset,
        multiplies_bfloat16=not is_for_any_processor() and only_cpu(options.providers) and has_units_for_bfloat16(),
        multiplies_mixed_signs=mixed_signs_are_exact,
        threads=options.threads,
        decompositions=functools.partial(decomposition_table, options.opset),
        rejects=functools.partial(_rejects, options.providers, options.opset),
        rejects_operator=functools.partial(_rejects_operator, support),
        infers=functools.partial(result_types, options.providers, options.opset),
        objection=functools.partial(_objection, options.providers),
    )


def has_units_for_bfloat16() -> bool:
    """Whether this processor has matrix units for bfloat16 (AMX).

    With them, PyTorch in bfloat16 is 1.6 to 2.5 times as fast as ONNX Runtime in float32. With AVX-512's bfloat16
    instructions, ONNX Runtime is 1.2 to 1.35 times as fast as PyTorch; with neither, 3 to 25 times.
    """
    return bool(torch.cpu.get_capabilities().get("amx_bf16"))


def _objection(providers: Sequence[Provider], model: ir.Model) -> str | None:
    try:
        check(model, providers)
    except KernelFaultError as error:
        return str(error)
    return None


def _rejects_operator(support: Support, node: fx.Node) -> str | None:
    return _text(support.reason_against(node))


def _rejects(providers: Sequence[Provider], opset: int, node: ir.Node) -> str | None:
    return _text(reason_against_node(node, providers, opset))


def _text(reason: Reason | None) -> str | None:
    return None if reason is None else reason.text
