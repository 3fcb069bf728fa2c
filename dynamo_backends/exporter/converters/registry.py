"""The table of our converters and the decorator that fills it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ...errors import TranslationError

Function = TypeVar("Function", bound=Callable[..., object])

CONVERTERS: dict[object, Callable[..., object]] = {}
"""From an FX target (an ATen overload or a Python function) to our translation of it."""


class NotTranslatable(TranslationError):
    """Raised by a converter for arguments it does not handle; its message is the reason the user reads."""


def converter(*targets: object) -> Callable[[Function], Function]:
    """Registers a function as the translation of one or several operators; it wins over torchlib's."""

    def register(function: Function) -> Function:
        for target in targets:
            CONVERTERS[target] = function
        return function

    return register
