"""One call of an operator: its arguments, its results, its place; and values as text."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._dtype_abbrs import dtype_abbrs

from ..graphs.locations import is_of_pytorch_or_ours, is_user_file, location_text, short_file
from ..partition.runnable_region import RunnableRegion
from .names import may_write


@dataclasses.dataclass(kw_only=True)
class CallText:
    """A call in words."""

    name: str = ""  # of the operator
    number: int = 0  # of the call, counted for each operator
    call: str = ""  # the operator and its arguments: ``torch.Tensor.add(f32[2, 3], 1)``
    source: str = ""  # see ``Place.source``
    module: str = ""  # see ``Place.module``


@dataclasses.dataclass(eq=False)
class Call:
    """One call."""

    name: str  # "torch.Tensor.add", or at the level ``aten`` "aten.add.Tensor"
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    number: int = 0  # how many calls of this operator the tool saw before
    has_gradients: bool = False  # autograd records the call
    results: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)  # set after the call, if tools need it
    _place: Place | None = None

    @property
    def place(self) -> Place:
        """Where it is called. Read it first while the call runs."""
        self._place = self._place or Place()
        return self._place

    @property
    def source(self) -> str:
        """See ``Place.source``."""
        return self.place.source

    @property
    def text(self) -> CallText:
        """The call in words. Read it first while the call runs."""
        source, module = self.place.source, self.place.module
        return CallText(name=self.name, number=self.number, call=str(self), source=source, module=module)

    @property
    def in_pytorch(self) -> Callable[..., Any]:
        """The function, or for a region on ONNX Runtime the same computation in PyTorch."""
        return self.function.in_pytorch if isinstance(self.function, RunnableRegion) else self.function

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """See ``named_arguments``."""
        return named_arguments(self.args, self.kwargs)

    @property
    def written(self) -> set[str]:
        """The names of arguments that the call writes, by its schema or name.

        Version counters cannot be used: the dispatcher's level and inference mode do not update them.
        """
        if isinstance(self.function, torch._ops.OpOverload):
            schema = self.function._schema.arguments
            names = {i: item.name for i, item in enumerate(schema) if item.alias_info and item.alias_info.is_write}
            return {f"args[{i}]" for i in names if i < len(self.args)} | {f"kwargs[{name}]" for name in names.values()}
        if self.kwargs.get("out") is not None:
            return {"kwargs[out]"}
        return {"args[0]"} if may_write(self.function, self.kwargs) else set()

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
        named = self._modules[-1].named_modules() if self._modules else ()
        return next((name for name, module in named if module is self._modules[0]), "")


def named_tensors(value: object, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in nested lists, tuples and dictionaries, with their names: ``output``, ``output[1]``. Autograd's
    zeros without memory are left out: PyTorch crashes where they are read."""
    if isinstance(value, torch.Tensor):
        if not value._is_zerotensor():
            yield name, value
    elif isinstance(value, (Mapping, list, tuple)):
        for key, item in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from named_tensors(item, f"{name}[{key}]")


def named_arguments(args: object, kwargs: object) -> dict[str, torch.Tensor]:
    """The tensors of arguments, by name: ``args[0]``, ``args[1][2]``, ``kwargs[weight]``."""
    return dict(named_tensors(args, "args")) | dict(named_tensors(kwargs, "kwargs"))


AFTER = " after it"


def named_results(returned: object, changed: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What a call returned, and the arguments that it changed and did not return: ``args[0] after it``."""
    found = dict(named_tensors(returned, "output"))
    known = set(map(id, found.values()))
    return found | {name + AFTER: value for name, value in changed.items() if id(value) not in known}


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
