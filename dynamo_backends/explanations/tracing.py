"""Traces a model to graphs with ``torch.jit.trace``, ``torch.jit.script``, ``torch.export`` or Dynamo.

For the command ``dynamo-backends trace``.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ..graphs.fx_table import graph_table

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""


class TracingError(ValueError):
    """PyTorch cannot trace the model; the message is PyTorch's."""


@dataclasses.dataclass(frozen=True)
class Traced:
    """A traced model."""

    graphs: Sequence[str]  # as text
    run: Callable[..., object]


def trace(method: str, model: torch.nn.Module, call: Call) -> Traced:
    """Traces a model with one of ``METHODS``.

    Raises:
        TracingError: PyTorch cannot trace the model.
    """
    torch._dynamo.reset()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch.jit is deprecated
            return METHODS[method](model, call)
    except Exception as error:  # the model and four compilers raise any type
        raise TracingError(summary_of(error)) from error


def summary_of(error: BaseException) -> str:
    """The type of an error and the first paragraph of its message, at most five lines."""
    lines = str(error).strip().splitlines()
    end = next((i for i, line in enumerate(lines) if not line.strip()), len(lines))
    return f"{type(error).__name__}: " + "\n  ".join(lines[: min(end, 5)])


def _jit_trace(model: torch.nn.Module, call: Call) -> Traced:
    args, kwargs = call
    given = {"example_kwarg_inputs": kwargs} if kwargs else {"example_inputs": args}
    if args and kwargs:
        raise TypeError("torch.jit.trace takes positional or keyword arguments, not both")
    traced = torch.jit.trace(model, strict=False, check_trace=False, **given)
    return Traced([str(traced.graph)], traced)


def _jit_script(model: torch.nn.Module, call: Call) -> Traced:
    scripted = torch.jit.script(model)
    return Traced([str(scripted.graph)], scripted)


def _export(model: torch.nn.Module, call: Call) -> Traced:
    exported = torch.export.export(model, *call)
    return Traced([graph_table(exported.graph_module)], exported.module())


def _compile(model: torch.nn.Module, call: Call) -> Traced:
    graphs: list[str] = []

    def keep(module: fx.GraphModule, example_inputs: Sequence[object]) -> Callable[..., object]:
        graphs.append(graph_table(module))
        return module.forward

    compiled = torch.compile(model, backend=keep)
    args, kwargs = call
    with torch.no_grad():
        compiled(*args, **kwargs)
    return Traced(graphs, compiled)


METHODS: Mapping[str, Callable[[torch.nn.Module, Call], Traced]] = {
    "trace": _jit_trace,
    "script": _jit_script,
    "export": _export,
    "compile": _compile,
}


def dtypes_of(results: object) -> list[str]:
    """The dtypes of all tensors of a result, in order: ``torch.float32``."""
    return [str(leaf.dtype) for leaf in pytree.tree_leaves(results) if isinstance(leaf, torch.Tensor)]
