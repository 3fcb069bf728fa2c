"""One call of an operator, and its arguments and results in words."""

from __future__ import annotations

import dataclasses
import functools
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._dtype_abbrs import dtype_abbrs

from ..graphs.artifacts import RunnableRegion
from ..graphs.locations import Frame, function_name, is_user_file
from ..numerics.call_execution import named_tensors
from ..numerics.program_execution import version_of
from .names import may_write

_OWN = __name__.partition(".")[0]


@dataclasses.dataclass(eq=False)
class Call:
    """One call.

    Attributes:
        name: the operator's, ``torch.Tensor.add``, or at the level ``aten`` ``aten.add.Tensor``.
        function: the operator.
        args, kwargs: of the call.
        number: how many calls of this operator the tool saw before.
        level: ``torch`` or ``aten``.
        has_gradients: whether autograd records the call, so that gradients of the arguments may come.
        results: after the call, for a tool that sees gradients: the tensors that it gave, see ``results_of``.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    number: int = 0
    level: str = "torch"
    has_gradients: bool = False
    results: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def source(self) -> str:
        """The innermost of the user's lines, ``model.py:12``, or ``""``. To be asked for while the call is made."""
        for frame, line in traceback.walk_stack(sys._getframe()):
            own = str(frame.f_globals.get("__name__", "")).partition(".")[0] == _OWN
            if is_user_file(frame.f_code.co_filename) and not own:
                return str(Frame(frame.f_code.co_filename, line, function_name(frame.f_code.co_name), ""))
        return ""

    @property
    def in_pytorch(self) -> Callable[..., Any]:
        """What computes the same in PyTorch: the function, or the code of a region."""
        return self.function.in_pytorch if isinstance(self.function, RunnableRegion) else self.function

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors among the arguments, by where they are: ``args[0]``, ``args[1][2]``, ``kwargs[weight]``."""
        return dict(named_tensors(self.args, "args")) | dict(named_tensors(self.kwargs, "kwargs"))

    @property
    def written(self) -> set[str]:
        """The arguments that the call writes, as far as that can be told without its having been made.

        PyTorch counts changes of a tensor only above the dispatcher's level, and not in inference mode.
        """
        if isinstance(self.function, torch._ops.OpOverload):
            schema = self.function._schema.arguments
            names = {i: item.name for i, item in enumerate(schema) if item.alias_info and item.alias_info.is_write}
            return {f"args[{i}]" for i in names if i < len(self.args)} | {f"kwargs[{name}]" for name in names.values()}
        found = {"kwargs[out]"} if self.kwargs.get("out") is not None else set()
        return found | ({"args[0]"} if may_write(self.function, self.kwargs) and not found else set())

    def __str__(self) -> str:
        named = [f"{key}={describe(item)}" for key, item in self.kwargs.items()]
        return f"{self.name}({', '.join([*map(describe, self.args), *named])})"


def is_plain(value: object) -> bool:
    """Whether a value is no tensor, or a tensor with values that can be read: no fake one, none of a transform of
    ``torch.func``, none of a class of its own, no zero of autograd's that has no memory."""
    if not isinstance(value, torch.Tensor):
        return True
    if type(value) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) or value.is_meta:
        return False
    return not (torch._C._functorch.is_functorch_wrapped_tensor(value) or value._is_zerotensor())


def are_plain(values: object) -> bool:
    """Whether all leaves are."""
    return all(map(is_plain, pytree.tree_leaves(values)))


def describe(value: object) -> str:
    """A value in short: ``f32[2, 768]``, ``0.5``, ``(f32[2], None)``."""
    if isinstance(value, torch.Tensor):
        sizes = ", ".join(map(str, value.shape))
        device = "" if value.device.type == "cpu" else f" {value.device}"
        return f"{dtype_abbrs.get(value.dtype, value.dtype)}[{sizes}]{device}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {describe(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        inside = ", ".join(map(describe, value))
        return f"[{inside}]" if isinstance(value, list) else f"({inside}{',' if len(value) == 1 else ''})"
    text = repr(value)
    return text if len(text) <= 60 else text[:59] + "…"


def signature(value: Any) -> object:
    """What makes two calls alike: dtypes, shapes and devices of tensors, and the values of everything else."""
    if isinstance(value, torch.Tensor):
        return (value.dtype, value.shape, value.device.type)
    kind = type(value)
    if kind is tuple or kind is list:
        return (kind, *[signature(item) for item in value])
    if isinstance(value, Mapping):
        return tuple([(key, signature(item)) for key, item in value.items()])
    if kind in _VALUES:
        return (kind, value)  # 1, 1.0 and True are equal
    return repr(value)


_VALUES = frozenset({int, bool, float, str, type(None), torch.dtype, torch.device})


def as_json(value: object) -> object:
    """A value for JSON: of a tensor shape, stride, dtype, device and whether it requires a gradient, without values."""
    if isinstance(value, torch.Tensor):
        strided = value.layout is torch.strided and not value.is_nested
        return {
            "shape": list(value.shape) if not value.is_nested else "nested",
            "stride": list(value.stride()) if strided else None,
            "dtype": str(value.dtype).removeprefix("torch."),
            "device": str(value.device),
            "requires_grad": value.requires_grad,
            "layout": str(value.layout).removeprefix("torch."),
        }
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(item) for item in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return repr(value)


def results_of(call: Call, result: object, versions: Sequence[int]) -> dict[str, torch.Tensor]:
    """The tensors that a call gave: what it returned, and the arguments that it changed and did not return.

    Args:
        call: after it was made.
        result: what it returned.
        versions: of ``call.tensors`` before it.
    """
    found = {name: value for name, value in named_tensors(result, "output") if not value._is_zerotensor()}
    returned = {id(value) for value in found.values()}
    for (name, value), version in zip(call.tensors.items(), versions, strict=True):
        is_written = version_of(value) != version or name in call.written
        if id(value) not in returned and is_written:
            found[f"{name} after it"] = value
    return found
