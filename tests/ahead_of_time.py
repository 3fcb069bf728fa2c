"""A compiled model in a file: what one process saves, and another loads without tracing; see docs/saving.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from dynamo_backends.bench.loading import Inputs
from dynamo_backends.graphs.guard_filter import keep_value_guards_unsafe


class TensorResults(torch.nn.Module):
    """A model that returns the tensors of its results, in a list.

    PyTorch 2.13 can save neither a ``forward`` that is decorated nor one that makes instances of other classes, as the
    models of ``transformers`` do.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
        return _tensors(self.model(*args, **kwargs))


def _tensors(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    items = list(value.values()) if isinstance(value, dict) else value
    return [tensor for item in items for tensor in _tensors(item)] if isinstance(items, (list, tuple)) else []


def save(model: torch.nn.Module, inputs: Inputs, settings: Mapping[str, Any], path: Path) -> None:
    """Compiles a model ahead of time and writes it to a file; ``settings`` are arguments of ``torch.compile``."""
    options = {**settings.get("options", {}), "guard_filter_fn": keep_value_guards_unsafe}
    compiled = torch.compile(TensorResults(model).forward, fullgraph=True, **{**settings, "options": options})
    compiled.aot_compile((inputs.args, inputs.kwargs)).save_compiled_function(str(path))


def load(model: torch.nn.Module, path: Path) -> Callable[..., list[torch.Tensor]]:
    """The function of a file, with this model's weights."""
    with path.open("rb") as file:
        function = torch.compiler.load_compiled_function(file)
    results = TensorResults(model)
    return lambda *args, **kwargs: function(results, *args, **kwargs)
