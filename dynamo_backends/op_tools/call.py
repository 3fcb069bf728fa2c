"""One call of an operator; its arguments and results as text and JSON."""

from __future__ import annotations

import dataclasses
import itertools
import sys
import weakref
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._dtype_abbrs import dtype_abbrs

from ..graphs.locations import is_of_pytorch_or_ours, is_user_file, location_text, short_file
from ..numerics.function_runs import version_of
from ..partition.runnable_region import RunnableRegion
from .call_execution import named_tensors
from .names import may_write


@dataclasses.dataclass(eq=False)
class Call:
    """One call."""

    name: str  # "torch.Tensor.add", or at the level ``aten`` "aten.add.Tensor"
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    number: int = 0  # how many calls of this operator the tool saw before
    level: str = "torch"  # or "aten"
    has_gradients: bool = False  # autograd records the call
    results: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)  # see ``results_of``; set after the call
    _place: Place | None = None

    @property
    def place(self) -> Place:
        """Where it is called. Read it first while the call runs."""
        if self._place is None:
            self._place = Place()
        return self._place

    @property
    def source(self) -> str:
        """See ``Place.source``."""
        return self.place.source

    @property
    def in_pytorch(self) -> Callable[..., Any]:
        """The function, or for a region on ONNX Runtime the same computation in PyTorch."""
        return self.function.in_pytorch if isinstance(self.function, RunnableRegion) else self.function

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensor arguments by position: ``args[0]``, ``args[1][2]``, ``kwargs[weight]``."""
        return dict(named_tensors(self.args, "args")) | dict(named_tensors(self.kwargs, "kwargs"))

    @property
    def written(self) -> set[str]:
        """The names of arguments that the call writes, by its schema or name.

        Version counters cannot be used: the dispatcher's level and inference mode do not update them.
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


_CALL_OF_A_MODULE = torch.nn.Module._call_impl.__code__


class Place:
    """Where a call is made, found on the stack; text is made where it is read."""

    def __init__(self) -> None:
        self._frames: list[tuple[str, int]] = []  # the line that called the layer, and the user's
        self._modules: list[torch.nn.Module] = []  # innermost first
        is_user = False
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            file = frame.f_code.co_filename
            if frame.f_code is _CALL_OF_A_MODULE:
                self._modules.append(frame.f_locals["self"])
            if not is_user and not is_of_pytorch_or_ours(file):
                is_user = is_user_file(file)
                if is_user or not self._frames:
                    self._frames.append((file, frame.f_lineno))
            frame = frame.f_back

    @property
    def source(self) -> str:
        """The user's innermost line, ``model.py:12``, and the library's that it leads to; see ``location_text``."""
        lines = [f"{short_file(file)}:{line}" for file, line in self._frames]
        return location_text(lines[-1], lines[0]) if lines else ""

    @property
    def module(self) -> str:
        """The path of the module that made the call, ``layers.0.mlp``; ``""`` in the outermost."""
        names = [_name_in(outer, inner) for inner, outer in itertools.pairwise(self._modules)]
        return ".".join(reversed(names))


_names_in: MutableMapping[torch.nn.Module, MutableMapping[torch.nn.Module, str]] = weakref.WeakKeyDictionary()
"""The names of the modules in a module."""


def _name_in(outer: torch.nn.Module, inner: torch.nn.Module) -> str:
    """The name of a module in another, or of its class if it has none."""
    names = _names_in.get(outer, {})
    if inner not in names:
        found = {module: name for name, module in outer.named_modules()}
        names = _names_in[outer] = weakref.WeakKeyDictionary({inner: type(inner).__name__} | found)
    return names[inner]


def is_readable(value: object) -> bool:
    """Whether a value is not a tensor, or a tensor whose elements can be read: not fake, of a subclass, wrapped by
    ``torch.func``, or one of autograd's zeros without memory."""
    if not isinstance(value, torch.Tensor):
        return True
    if type(value) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) or value.is_meta:
        return False
    return not (torch._C._functorch.is_functorch_wrapped_tensor(value) or value._is_zerotensor())


def are_readable(values: object) -> bool:
    """Whether all leaves are plain, see ``is_readable``."""
    return all(map(is_readable, pytree.tree_leaves(values)))


def describe(value: object) -> str:
    """A value as short text: ``f32[2, 768]``, ``0.5``, ``(f32[2], None)``."""
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
    """A key of a value: dtype, shape and device of tensors, the value of everything else."""
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


def as_json(value: object) -> Any:
    """A value for JSON: of tensors shape, stride, dtype, device, layout and ``requires_grad``."""
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
    """The tensors that a call returned, and the arguments that it changed and did not return, by name.

    ``versions`` are the version counters of ``call.tensors`` before the call.
    """
    found = dict(named_tensors(result, "output"))
    returned = {id(value) for value in found.values()}
    for (name, value), version in zip(call.tensors.items(), versions, strict=True):
        is_written = version_of(value) != version or name in call.written
        if id(value) not in returned and is_written:
            found[f"{name} after it"] = value
    return found
