"""The guards of a saved graph: which are kept, and what they compare in the process that loads it."""

from __future__ import annotations

import copyreg
import json
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C._dynamo.guards import GlobalStateGuard
from torch._dynamo.utils import get_metrics_context

_OF_IDENTITY = {"CLASS_MATCH", "CLOSURE_MATCH", "FUNCTION_MATCH", "ID_MATCH", "MODULE_MATCH", "WEAKREF_ALIVE"}


def keep_value_guards_unsafe(guards: Sequence[Any]) -> list[bool]:
    """For ``options={"guard_filter_fn": ...}``: keeps guards on values, such as tensors, sizes and the grad mode.

    It leaves out those on the identity of functions, classes and modules, which mean nothing in another process and
    which PyTorch cannot save, and those on global variables. It is unsafe as PyTorch's filters are: if one of those
    changes, such as ``transformers``'s attention function, the compiled function does not notice. A guard on the
    identity of anything else, such as a member of an ``Enum``, is kept, so that PyTorch's error names it.

    Args:
        guards: of type ``torch._dynamo.guards.GuardFilterEntry``.

    Returns:
        Whether to keep each guard.
    """
    return [not guard.is_global and not _is_on_code(guard) for guard in guards]


def _is_on_code(guard: Any) -> bool:
    """Whether a guard is on the identity of a function, class or module; builtins are compared by name."""
    kinds = {guard.guard_type, *(guard.derived_guard_types if guard.guard_type != "BUILTIN_MATCH" else ())}
    if _OF_IDENTITY.isdisjoint(kinds):
        return False
    return not guard.has_value or callable(guard.value) or isinstance(guard.value, (types.ModuleType, types.CodeType))


def take_thread_count_from_loader() -> None:
    """The guards that Dynamo saves in this compile compare the number of threads with that of the loading process.

    PyTorch compares it with that of the process that compiled, because Inductor's kernels contain it.
    """
    _ours.metrics = get_metrics_context()._metrics


_ours = threading.local()
"""The last compile of this thread that saves a graph of ours, by its metrics: Dynamo makes a new dict of them when it
starts to compile, in ``aot_compile`` too, and saves guards before it leaves their context."""


def _reduce(guard: GlobalStateGuard) -> str | tuple[Any, ...]:
    """How ``guard`` is pickled; only one of a graph of ours differs from PyTorch's."""
    context = get_metrics_context()
    if not context.in_progress() or context._metrics is not getattr(_ours, "metrics", None):
        return object.__reduce_ex__(guard, 2)
    loader: Callable[[str], GlobalStateGuard] = _with_own_thread_count
    return loader, (guard.__getstate__(),)


copyreg.pickle(GlobalStateGuard, _reduce)


def _with_own_thread_count(state: str) -> GlobalStateGuard:
    guard = GlobalStateGuard()
    guard.__setstate__(json.dumps({**json.loads(state), "num_threads": torch.get_num_threads()}))  # type: ignore[attr-defined]
    return guard
