"""Sessions for inspection: of a region's model with every value as an output, and of single nodes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import fx

from ..errors import SessionError, TranslationError, first_line
from ..exporter.results import number_dtype
from ..exporter.signature import signature
from ..exporter.translate import fold_constants, translate, value_names
from ..graphs.artifacts import CompiledRegion, RegionInput, RegionOutput
from ..partition.needed_passes import with_needed_passes
from ..partition.regions import results_of
from ..runtime.binding import BoundSession, InputSpec, OutputSpec
from ..runtime.exposed_values import tensors, values_of_model, values_of_session
from ..runtime.providers import Provider, as_precise_as_pytorch
from ..runtime.session import Session, tensor_of
from ..runtime.settings import SessionSettings
from .repeated_runs import Instability, repeat_node

_MOST_SESSIONS = 1_024
"""Cached sessions of single nodes; each takes about a hundred kilobytes."""


@dataclasses.dataclass(eq=False)
class NodeSessions:
    """Runs regions and single nodes without ONNX Runtime's optimizations. Equal nodes share a cached session."""

    opset: int  # of the models
    providers: Sequence[Provider]  # in order of preference
    threads: int | None  # of a session; ``None`` for PyTorch's number at the time of the call
    _cache: dict[object, BoundSession] = dataclasses.field(default_factory=dict)

    def region_values(
        self, compiled: CompiledRegion, args: Sequence[object], nodes: Sequence[fx.Node] | None = None
    ) -> dict[str, object]:
        """The values of nodes of a region in its unoptimized model, by name, folded constants included.

        Of all operators, or of ``nodes``.

        Raises:
            SessionError: the runtime rejects the model with all values as outputs.
        """
        specs = _specs_of(compiled.region.operators if nodes is None else nodes)
        values = values_of_model(compiled.bound, with_needed_passes(compiled.model), args, specs)
        for spec in specs:
            folded = compiled.model.graph.initializers.get(spec.name)
            if folded is not None and folded.const_value is not None and not spec.is_number:
                values[spec.name] = tensor_of(folded.const_value)
        return values

    def session_values(
        self,
        compiled: CompiledRegion,
        bound: BoundSession,
        args: Sequence[object],
        nodes: Sequence[fx.Node] | None = None,
    ) -> dict[str, torch.Tensor]:
        """The tensors inside the session that ran, by name; of all operators, or of ``nodes``.

        ONNX Runtime's optimized model is run with all its values as outputs and no further optimization, so that its
        fusions stay.

        Raises:
            SessionError: the runtime does not write the model, or rejects it with all values as outputs.
        """
        specs = [
            spec for spec in _specs_of(compiled.region.operators if nodes is None else nodes) if not spec.is_number
        ]
        return tensors(values_of_session(bound, bound.session, args, specs))

    def node_values(self, node: fx.Node, args: Sequence[object]) -> list[object] | str:
        """The results of a node in a session of its own, or the reason why it has none.

        ``args`` are the values of ``node.all_input_nodes``.
        """
        try:
            return self._session_of(node)(args)
        except (SessionError, TranslationError) as error:
            return first_line(str(error))

    def repeat_node(self, node: fx.Node, args: Sequence[object]) -> dict[int, Instability]:
        """How a node's results differ between runs, see ``repeated_runs.repeat_node``; empty if it has no session."""
        try:
            session = self._session_of(node).with_threads(self.threads or torch.get_num_threads())
            return repeat_node(session, args)
        except (SessionError, TranslationError):
            return {}

    def _session_of(self, node: fx.Node) -> BoundSession:
        key = signature(node)
        if key not in self._cache:
            self._cache[key] = self._make_session(node)
            if len(self._cache) > _MOST_SESSIONS:
                del self._cache[next(iter(self._cache))]
        return self._cache[key]

    def _make_session(self, node: fx.Node) -> BoundSession:
        inputs, outputs = node.all_input_nodes, results_of(node)
        model = translate([node], [RegionInput(item) for item in inputs], outputs, opset=self.opset, name="replay")
        fold_constants(model)
        settings = SessionSettings(as_precise_as_pytorch(self.providers), 1, shares_graph=True, optimize=False)
        return BoundSession(
            Session(with_needed_passes(model), settings),
            [_input_spec(item, str(value.name)) for item, value in zip(inputs, model.graph.inputs, strict=True)],
            [output_spec(item, str(value.name)) for item, value in zip(outputs, model.graph.outputs, strict=True)],
        )


def _specs_of(nodes: Sequence[fx.Node]) -> list[OutputSpec]:
    """All results of nodes, under their ONNX value names."""
    outputs = [output for node in nodes if "val" in node.meta for output in results_of(node)]
    return [output_spec(output, value_names(output.node)[output.index or 0]) for output in outputs]


def _input_spec(node: fx.Node, name: str) -> InputSpec:
    value = node.meta["val"]
    if isinstance(value, torch.Tensor):
        return InputSpec(name, value.dtype, device=value.device)
    return InputSpec(name, None)


def output_spec(output: RegionOutput, name: str) -> OutputSpec:
    value = output.node.meta["val"]
    value = value if output.index is None else value[output.index]
    if isinstance(value, torch.Tensor):
        return OutputSpec(name, value.dtype, device=value.device)
    dtype = number_dtype(value)
    assert dtype is not None
    return OutputSpec(name, dtype, is_number=True)
