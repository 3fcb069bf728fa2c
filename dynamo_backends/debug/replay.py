"""Sessions that explain a region: one that exposes every node's value, and one for each node alone."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx

from ..artifacts import Input, Output, Region
from ..errors import SessionError, TranslationError
from ..exporter.translate import fold_constants, translate
from ..regions import results_of, signature
from ..runtime.binding import BoundSession, InputSpec, OutputSpec
from ..runtime.providers import Provider
from ..runtime.session import Session, SessionSettings
from .repeat import Instability, repeat_node


class Replay:
    """Makes and keeps the sessions; alike nodes share one. ONNX Runtime's optimizations are off in all of them.

    Args:
        opset: the ONNX opset of the models.
        providers: in the order of preference.
        threads: of a session; ``None`` for what PyTorch has at the time of the call.
    """

    def __init__(self, opset: int, providers: Sequence[Provider], threads: int | None = None) -> None:
        self._opset = opset
        self._providers = tuple(providers)
        self._threads = threads
        self._node_sessions: dict[object, BoundSession | None] = {}

    def region_values(self, region: Region, args: Sequence[object]) -> dict[tuple[fx.Node, int | None], object]:
        """The value of every node of a region, computed from the region's arguments in one session.

        Returns:
            From a node, and the index of the result if it has several, to the value.

        Raises:
            SessionError: the runtime refuses the model with all values exposed.
        """
        outputs = [output for node in region.nodes if "val" in node.meta for output in _own_results(node)]
        session = self._bind(region.nodes, [item.node for item in region.inputs], outputs)
        values = session(args)
        return {(output.node, output.index): value for output, value in zip(outputs, values, strict=True)}

    def node_values(self, node: fx.Node, args: Sequence[object]) -> list[object] | None:
        """A node's results computed by a session of that node alone; ``None`` if it does not run alone.

        Args:
            node: a call_function node of a region.
            args: the values of ``node.all_input_nodes``.
        """
        session = self._node_session(node)
        if session is None:
            return None
        try:
            return session(args)
        except SessionError:
            return None

    def repeat_node(self, node: fx.Node, args: Sequence[object]) -> dict[int, Instability]:
        """How a node's results differ from run to run and with other threads, see ``repeat_node`` of ``repeat``."""
        session = self._node_session(node)
        try:
            return {} if session is None else repeat_node(session, args)
        except SessionError:
            return {}

    def _node_session(self, node: fx.Node) -> BoundSession | None:
        key = signature(node)
        if key not in self._node_sessions:
            try:
                self._node_sessions[key] = self._bind([node], list(node.all_input_nodes), results_of(node))
            except (SessionError, TranslationError):
                self._node_sessions[key] = None
        return self._node_sessions[key]

    def _bind(self, nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[Output]) -> BoundSession:
        model = translate(nodes, [Input(node) for node in inputs], outputs, opset=self._opset, name="replay")
        fold_constants(model)
        session = Session(model, SessionSettings(self._providers, self._threads, optimize=False))
        input_specs = [
            _input_spec(node, str(value.name)) for node, value in zip(inputs, model.graph.inputs, strict=True)
        ]
        output_specs = [
            _output_spec(output, str(value.name)) for output, value in zip(outputs, model.graph.outputs, strict=True)
        ]
        return BoundSession(session, input_specs, output_specs)


def _own_results(node: fx.Node) -> list[Output]:
    """A node's results, unless it only unpacks another's."""
    return [] if node.target is operator.getitem else results_of(node)


def _input_spec(node: fx.Node, name: str) -> InputSpec:
    value = node.meta["val"]
    if isinstance(value, torch.Tensor):
        return InputSpec(name, value.dtype, device=value.device)
    return InputSpec(name, None)


def _output_spec(output: Output, name: str) -> OutputSpec:
    value = output.node.meta["val"]
    if output.index is not None:
        value = value[output.index]
    if isinstance(value, torch.Tensor):
        return OutputSpec(name, value.dtype, device=value.device)
    return OutputSpec(name, torch.bool if isinstance(value, (bool, torch.SymBool)) else torch.int64, is_number=True)
