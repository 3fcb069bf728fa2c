"""Operators and their names, in users' code and in PyTorch's dispatcher, and properties that follow from them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch
import torch.overrides

from ..exporter.upstream_faults import UNINITIALIZED
from ..graphs.operators import operator_named, packet_named

_OPS = "torch.ops."

_COMPUTING_GETTERS = ("T", "H", "mT", "mH", "real", "imag")
"""Attributes of a tensor that compute; the others are queries."""

_QUERIES = frozenset(
    {
        "dim", "ndimension", "size", "numel", "nelement", "element_size", "stride", "storage_offset",
        "storage", "untyped_storage", "data_ptr", "get_device", "type", "__len__", "__hash__", "__dlpack_device__",
        "has_names", "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "retain_grad", "backward",
        "sym_size", "sym_stride", "sym_numel", "result_type", "promote_types", "can_cast", "broadcast_shapes",
        "manual_seed", "set_",
    }
)  # fmt: skip
"""Functions that return a property of a tensor or change a setting, and compute nothing."""


@functools.cache
def function_name(function: Callable[..., object]) -> str:
    """The name of a function in users' code: ``torch.Tensor.add``, ``torch.nn.functional.linear``,
    ``torch.ops.aten.add``."""
    if isinstance(function, (torch._ops.OpOverload, torch._ops.OpOverloadPacket, torch._ops.HigherOrderOperator)):
        return _OPS + str(function)
    owner = getattr(function, "__self__", None)
    if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
        return f"{owner.__module__}.{owner.__qualname__}.apply"
    known = torch.overrides.resolve_name(function)
    if known:
        return known
    module = getattr(function, "__module__", None) or "torch"
    name = str(getattr(function, "__qualname__", None) or getattr(function, "__name__", repr(function)))
    return f"{module}.{name.removeprefix('_VariableFunctionsClass.')}"


@functools.cache
def is_query(function: Callable[..., object]) -> bool:
    """Whether a function returns a property of a tensor or changes a setting, and computes nothing."""
    if isinstance(function, torch._ops.OpOverload):
        namespace, _, name = function._schema.name.partition("::")
        return namespace == "profiler" or name in _QUERIES
    parts = function_name(function).split(".")
    if parts[:3] == ["torch", "ops", "profiler"]:  # torch.profiler marks ranges with them
        return True
    if parts[-1] in ("__get__", "__set__", "__delete__"):
        return parts[-1] != "__get__" or parts[-2] not in _COMPUTING_GETTERS
    last = parts[-1]
    if last in _QUERIES or last.startswith(("is_", "_is_", "_has_", "_set_", "__torch_", "_autograd")):
        return last not in ("is_nonzero", "is_same_size")
    return parts[:2] in (["torch", "_C"], ["torch", "autograd"], ["torch", "jit"])


def is_of_pytorch(function: Callable[..., object]) -> bool:
    """Whether a function is PyTorch's own and so has no unknown side effects."""
    if isinstance(function, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return function_name(function).removeprefix(_OPS).split(".")[0] in ("aten", "prims")
    return function_name(function) in _functions()


@functools.cache
def _functions() -> Mapping[str, Callable[..., object]]:
    """All functions that PyTorch lists as overridable, by name."""
    found: dict[str, Callable[..., object]] = {}
    for functions in torch.overrides.get_overridable_functions().values():
        for function in functions:
            found.setdefault(function_name(function), function)
    return found


def function_of(name: str) -> Callable[..., object]:
    """The function of a name. Only PyTorch's functions and registered operators are found.

    Args:
        name: a result of ``function_name``, or the dispatcher's name, ``aten.add.Tensor``.

    Raises:
        LookupError: no operator has the name, or the library that registers it is not imported.
    """
    if name in _functions():
        return _functions()[name]
    # Functions without tensor arguments, such as randn, and those of optimizers, such as _foreach_norm
    native = getattr(torch._C._VariableFunctions, name.removeprefix("torch."), None)
    if callable(native) and not name.startswith(("torch.__", "torch.from_file")) and name.count(".") == 1:
        return native
    parts = name.removeprefix(_OPS).split(".")
    found: Callable[..., object] | None = None
    if parts[0] == "higher_order" and len(parts) == 2:
        found = getattr(torch.ops.higher_order, parts[1], None)
        found = found if isinstance(found, torch._ops.HigherOrderOperator) else None
    elif len(parts) == 3:
        found = operator_named(*parts)
    elif len(parts) == 2 and name.startswith(_OPS):
        found = packet_named(*parts)
    if found is not None:
        return found
    is_of_dispatcher = name.startswith(_OPS) or (len(parts) == 3 and parts[0] != "torch")
    if is_of_dispatcher and parts[0] not in ("aten", "prims", "higher_order"):
        raise LookupError(f"no operator {name!r}; a library that registers it must be imported first")
    raise LookupError(f"{name!r} is neither a registered operator nor a function of PyTorch that computes with tensors")


def last_name(function: Callable[..., object]) -> str:
    """``add`` of ``torch.Tensor.add`` and of ``aten.add.Tensor``, ``T`` of ``torch.Tensor.T.__get__``."""
    if isinstance(function, torch._ops.OpOverload):
        function = function.overloadpacket
    parts = function_name(function).split(".")
    return parts[-2] if parts[-1] == "__get__" else parts[-1]


@functools.cache
def has_no_values(function: Callable[..., object]) -> bool:
    """Whether an operator returns uninitialized memory."""
    return last_name(function) in {target.overloadpacket.__name__ for target in UNINITIALIZED}


def why_not_comparable(function: Callable[..., object]) -> str:
    """The reason why two calls of a function on the same arguments may differ; ``""`` if they may not."""
    if has_no_values(function):
        return "it returns memory without values"
    if last_name(function) == "_ctc_loss":  # log_alpha past the end of an input or target that is shorter than others
        return "it leaves elements of its results unset"
    return "its result is not unique" if last_name(function) in _NOT_UNIQUE else ""


_NOT_UNIQUE = frozenset(
    {
        "eig", "eigh", "linalg_eig", "linalg_eigh", "_linalg_eigh", "lobpcg", "pca_lowrank", "svd", "svd_lowrank",
        "linalg_svd", "_linalg_svd",
    }
)  # fmt: skip
"""Eigenvectors and singular vectors have an arbitrary sign or phase."""


def may_write(function: Callable[..., object], kwargs: Mapping[str, object]) -> bool:
    """Whether a call may write into its arguments."""
    return kwargs.get("out") is not None or kwargs.get("inplace") is True or _is_in_place(function)


@functools.cache
def _is_in_place(function: Callable[..., object]) -> bool:
    if isinstance(function, torch._ops.OpOverload):
        return function._schema.is_mutable
    if isinstance(function, torch._ops.OpOverloadPacket):
        return any(getattr(function, overload)._schema.is_mutable for overload in function.overloads())
    last = function_name(function).split(".")[-1]
    if last.startswith("__"):
        return last == "__setitem__" or (last.startswith("__i") and last not in ("__invert__", "__index__", "__int__"))
    return last.endswith("_")
