"""Implements ``passes.Target``: tells passes what ONNX Runtime supports."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch.utils._python_dispatch import TorchDispatchMode

from passes.engine.fx.editing import fake_result, value_of
from passes.engine.manager import Target, register_backend

from ..errors import KernelFaultError, Reason
from ..exporter.decompositions import decomposition_table
from ..exporter.registration import registered_names
from ..options import Options
from ..partition.regions import Support
from ..runtime.integer_kernels import is_for_any_processor, mixed_signs_are_exact
from ..runtime.kernel_faults import check, reason_against_node, result_types
from ..runtime.providers import Provider, only_cpu, provider_name, runs_on_gpu

BACKEND = "onnxrt"
"""The name of our backends in PyTorch's bisector (``CompilerBisector``)."""

register_backend(BACKEND)


def pass_target(options: Options, support: Support) -> Target:
    """The target of the passes of one pipeline."""
    return Target(
        backend=BACKEND,
        providers=tuple(provider_name(provider) for provider in options.providers),
        opset=options.opset,
        multiplies_bfloat16=_multiplies_bfloat16(options.providers),
        multiplies_mixed_signs=mixed_signs_are_exact,
        threads=1 if runs_on_gpu(options.providers) else options.threads,
        decompositions=functools.partial(decomposition_table, options.opset),
        rejects=functools.partial(_rejects, options.providers, options.opset),
        rejects_operator=functools.partial(_rejects_operator, support),
        infers=functools.partial(result_types, options.providers, options.opset),
        objection=functools.partial(_objection, options.providers),
        keeps=operator_with_own_converter,
    )


def _multiplies_bfloat16(providers: Sequence[Provider]) -> bool:
    if runs_on_gpu(providers):
        return True
    return not is_for_any_processor() and only_cpu(providers) and has_units_for_bfloat16()


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
    names = registered_names()
    if not names:
        return None
    operators: Sequence[str] = ()
    if isinstance(node, ir.Node) and node.op_type != "Constant":
        operators = [node.metadata_props.get("aten_op", "")]
    elif isinstance(node, fx.Node) and isinstance(node.target, torch._ops.OpOverload):
        operators = [str(node.target)]
    elif isinstance(node, fx.Node) and node.op in ("call_function", "call_method"):
        if _OPERATORS not in node.meta:
            node.meta[_OPERATORS] = _operators_called(node)
        operators = node.meta[_OPERATORS]
    return next((name for name in operators if name in names), None)


_OPERATORS = "operators_called"
"""Key in the ``meta`` of a node of torch IR: the operators that its function calls."""


def _operators_called(node: fx.Node) -> list[str]:
    """The operators that a function or method of PyTorch's calls; none if it may have side effects, or does not run on
    fake tensors."""
    target, name = node.target, getattr(node.target, "__name__", str(node.target))
    is_of_torch = isinstance(target, str) or (getattr(target, "__module__", None) or "torch").startswith("torch")
    if not is_of_torch or name.startswith("_") or name.endswith("_") or value_of(node) is None:
        return []
    recorder = _OperatorRecorder()

    def call(*args: Any, **kwargs: Any) -> object:
        function = getattr(args[0], target) if isinstance(target, str) else target
        with recorder:
            return function(*args[isinstance(target, str) :], **kwargs)

    mode = detect_fake_mode([value_of(item) for item in (node, *node.all_input_nodes)])
    shapes = mode.shape_env if mode is not None else None
    unguarded = shapes.suppress_guards() if shapes is not None else contextlib.nullcontext()  # it is not the user's run
    with contextlib.suppress(Exception), torch.no_grad(), unguarded:  # of a function that needs more than fake tensors
        fake_result(call, node.args, dict(node.kwargs))
    return recorder.called


class _OperatorRecorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    def __torch_dispatch__(self, func: object, types: object, args: Any = (), kwargs: Any = None) -> object:
        self.called.append(str(func))
        return func(*args, **(kwargs or {}))  # type: ignore[operator]


def _rejects_operator(support: Support, node: fx.Node) -> str | None:
    return _text(support.reason_against(node))


def _rejects(providers: Sequence[Provider], opset: int, node: ir.Node) -> str | None:
    return _text(reason_against_node(node, providers, opset))


def _text(reason: Reason | None) -> str | None:
    return None if reason is None else reason.text
