"""Which of Dynamo's guards a saved compile keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_OF_IDENTITY = {"CLASS_MATCH", "CLOSURE_MATCH", "FUNCTION_MATCH", "ID_MATCH", "MODULE_MATCH", "WEAKREF_ALIVE"}


def keep_value_guards_unsafe(guards: Sequence[Any]) -> list[bool]:
    """For ``options={"guard_filter_fn": ...}``: keeps guards on values, such as tensors, sizes and the grad mode.

    It leaves out those on the identity of functions, classes and modules, which mean nothing in another process and
    which PyTorch cannot save, and those on global variables. It is unsafe as PyTorch's filters are: if one of those
    changes, such as ``transformers``'s attention function, the compiled function does not notice.

    Args:
        guards: of type ``torch._dynamo.guards.GuardFilterEntry``.

    Returns:
        Whether to keep each guard.
    """
    return [
        not guard.is_global and _OF_IDENTITY.isdisjoint([guard.guard_type, *guard.derived_guard_types])
        for guard in guards
    ]
