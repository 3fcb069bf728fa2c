"""Runs some nodes as a model of their own, without optimizations."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from ..exporter.translate import fold_constants, translate
from ..graphs.artifacts import RegionInput, is_operator
from ..partition.needed_passes import with_needed_passes
from ..partition.regions import results_of
from ..runtime.binding import InputSpec
from ..runtime.providers import Provider, as_precise_as_pytorch
from ..runtime.session import Session
from ..runtime.settings import SessionSettings
from .session_values import ShownSessions, output_spec


@dataclasses.dataclass(eq=False)
class NodeSessions:
    """Runs some nodes of a graph alone, without ONNX Runtime's optimizations."""

    opset: int  # of the models
    providers: Sequence[Provider]  # in order of preference
    threads: int | None  # of a session; ``None`` for PyTorch's number at the time of the call
    shown: ShownSessions = dataclasses.field(default_factory=ShownSessions)

    def values_of(
        self, nodes: Sequence[fx.Node], given: Mapping[fx.Node, object]
    ) -> dict[tuple[fx.Node, int | None], object]:
        """The results of some nodes that are read, by node and index; ``given`` are the values that they read.

        Raises:
            TranslationError: a node has no translation.
            SessionError: the runtime rejects the model, or fails.
        """
        inputs = [node for node, value in given.items() if isinstance(value, (torch.Tensor, int, float))]
        operators = [node for node in nodes if is_operator(node) and "val" in node.meta]
        outputs = [output for node in operators for output in results_of(node)]
        read = [RegionInput(node) for node in inputs]
        model = translate(list(nodes), read, outputs, opset=self.opset, name="replay")
        fold_constants(model)
        settings = SessionSettings(
            as_precise_as_pytorch(self.providers), self.threads, shares_graph=True, optimize=False
        )
        session = Session(
            with_needed_passes(model),
            settings,
            [_input_spec(item, str(value.name)) for item, value in zip(inputs, model.graph.inputs, strict=True)],
            [output_spec(item, str(value.name)) for item, value in zip(outputs, model.graph.outputs, strict=True)],
        )
        results = session([given[node] for node in inputs])
        return {(item.node, item.index): value for item, value in zip(outputs, results, strict=True)}


def _input_spec(node: fx.Node, name: str) -> InputSpec:
    value = node.meta["val"]
    if isinstance(value, torch.Tensor):
        return InputSpec(name, value.dtype, device=value.device)
    return InputSpec(name, None)
