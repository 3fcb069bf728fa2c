"""Implements ``passes.Target``: tells passes what ONNX Runtime supports."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

from passes.engine.fx.editing import value_in
from passes.engine.manager import Target, register_backend

from ..errors import KernelFaultError, Reason
from ..exporter.decompositions import decomposition_table
from ..exporter.registration import registered_targets
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
        keeps=operator_with_own_converter,
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


def operator_with_own_converter(node: object) -> str | None:
    """The ATen operator of an FX or ONNX node if a user registered its converter, else ``None``."""
    registered = registered_targets()
    if not registered:
        return None
    if isinstance(node, ir.Node):
        name = node.metadata_props.get("aten_op") if node.op_type != "Constant" else None
        return name if name in {str(target) for target in registered} else None
    if not isinstance(node, fx.Node) or node.op not in ("call_function", "call_method"):
        return None
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target) if node.target in registered else None
    return next((str(target) for target in _operators_called(node) if target in registered), None)


def _operators_called(node: fx.Node) -> Sequence[object]:
    """The operators that a function or method of torch IR calls; none if it does not run on the node's fake values."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda arg: value_in(arg.meta))
    call = node.target if callable(node.target) else getattr(args[0], str(node.target), None)
    recorder = _OperatorRecorder()
    with contextlib.suppress(Exception), torch.no_grad(), recorder:  # a function of a library may raise anything
        call(*args, **kwargs)  # type: ignore[misc]
    return recorder.called


class _OperatorRecorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.called: list[object] = []

    def __torch_dispatch__(self, func: object, types: object, args: Any = (), kwargs: Any = None) -> object:
        self.called.append(func)
        return func(*args, **(kwargs or {}))  # type: ignore[operator]


def _rejects_operator(support: Support, node: fx.Node) -> str | None:
    return _text(support.reason_against(node))


def _rejects(providers: Sequence[Provider], opset: int, node: ir.Node) -> str | None:
    return _text(reason_against_node(node, providers, opset))


def _text(reason: Reason | None) -> str | None:
    return None if reason is None else reason.text
