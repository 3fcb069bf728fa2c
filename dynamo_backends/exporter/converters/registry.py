"""The table of our converters and the decorator that fills it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ...errors import TranslationError

Function = TypeVar("Function", bound=Callable[..., object])

CONVERTERS: dict[object, Callable[..., object]] = {}
"""From an FX target (an ATen overload or a Python function) to its converter."""


class NotTranslatable(TranslationError):
    """Raised by a converter for arguments it does not handle; the user sees its message as the reason."""


def converter(*targets: object) -> Callable[[Function], Function]:
    """Registers a function as the converter of operators, in place of torchlib's."""

    def register(function: Function) -> Function:
        CONVERTERS.update(dict.fromkeys(targets, function))
        return function

    return register
