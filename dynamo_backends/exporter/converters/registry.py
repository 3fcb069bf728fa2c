"""The table of our converters and the decorator that fills it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from ...errors import TranslationError

Function = TypeVar("Function", bound=Callable[..., object])

CONVERTERS: dict[object, Callable[..., object]] = {}
"""By FX target: an ATen overload, a Python function, or the name of an overload that another library registers."""


class NotTranslatable(TranslationError):
    """Raised by a converter for arguments that it does not support; the message is reported as the reason."""


def converter_of(target: object) -> Callable[..., object] | None:
    """Our converter of an FX target, or ``None``."""
    found = CONVERTERS.get(target)
    if found is None and isinstance(target, torch._ops.OpOverload):
        return CONVERTERS.get(target.name())
    return found


def converter(*targets: object) -> Callable[[Function], Function]:
    """A decorator that registers a function as the converter of operators, in place of torchlib's."""

    def register(function: Function) -> Function:
        CONVERTERS.update(dict.fromkeys(targets, function))
        return function

    return register
