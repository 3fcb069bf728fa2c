"""Sessions that explain a region: one that exposes every node's value, and one for each node alone."""

from __future__ import annotations

import collections
import dataclasses
import operator
from collections.abc import Mapping, Sequence

import onnx_ir as ir
import torch
from torch import fx

from ..artifacts import CompiledRegion, Input, Output
from ..errors import SessionError, TranslationError, first_line
from ..exporter.signature import signature
from ..exporter.translate import fold_constants, translate, value_names
from ..regions import results_of
from ..runtime.binding import BoundSession, InputSpec, OutputSpec
from ..runtime.providers import Provider, as_precise_as_pytorch
from ..runtime.session import Session, final_session
from ..runtime.settings import SessionSettings
from .repeat import Instability, repeat_node

_MOST_SESSIONS = 1_024
"""Sessions of one node that are kept, those that were used last; each holds a hundred kilobytes or so."""


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
        self._node_sessions: collections.OrderedDict[object, BoundSession] = collections.OrderedDict()

    def region_values(
        self, compiled: CompiledRegion, args: Sequence[object]
    ) -> dict[tuple[fx.Node, int | None], object]:
        """The value of every node of a region in its exported model, nothing optimized.

        Returns:
            From a node, and the index of the result if it has several, to the value. What was folded to a constant is
            among them.

        Raises:
            SessionError: the runtime refuses the model with all values exposed.
        """
        nodes = [node for node in compiled.region.nodes if "val" in node.meta]
        outputs = {_name(output): output for node in nodes for output in _own_results(node)}
        specs = [_output_spec(output, name) for name, output in outputs.items()]
        values = values_of_model(compiled.bound, compiled.bound.session, compiled.model, args, specs)
        values.update(_folded(compiled.model, specs))
        return {(outputs[name].node, outputs[name].index): value for name, value in values.items()}

    def session_values(
        self, compiled: CompiledRegion, bound: BoundSession, args: Sequence[object]
    ) -> dict[str, torch.Tensor]:
        """The values inside the session that ran, by name: those of the model that ONNX Runtime made of it.

        That model is run with all its values as outputs and nothing left to optimize, so that its fusions stay.

        Args:
            compiled: the region.
            bound: the session that ran.
            args: what it was called with.

        Raises:
            SessionError: the runtime does not write the model, or refuses it with all values exposed.
        """
        nodes = [node for node in compiled.region.nodes if "val" in node.meta]
        specs = [_output_spec(output, _name(output)) for node in nodes for output in _own_results(node)]
        specs = [spec for spec in specs if not spec.is_number]
        return tensors(values_of_session(bound, bound.session, args, specs))

    def node_values(self, node: fx.Node, args: Sequence[object]) -> list[object] | str:
        """A node's results computed by a session of that node alone; in words, why it does not run alone.

        Args:
            node: a call_function node of a region.
            args: the values of ``node.all_input_nodes``.
        """
        session = self._node_session(node)
        if isinstance(session, str):
            return session
        try:
            return session(args)
        except SessionError as error:
            return first_line(str(error))

    def repeat_node(self, node: fx.Node, args: Sequence[object]) -> dict[int, Instability]:
        """How a node's results differ from run to run and with other threads, see ``repeat_node`` of ``repeat``."""
        session = self._node_session(node)
        if isinstance(session, str):
            return {}
        try:
            return repeat_node(session.with_threads(self._threads or torch.get_num_threads()), args)
        except SessionError:
            return {}

    def _node_session(self, node: fx.Node) -> BoundSession | str:
        key = signature(node)
        if key in self._node_sessions:
            self._node_sessions.move_to_end(key)
            return self._node_sessions[key]
        try:
            session = self._bind([node], list(node.all_input_nodes), results_of(node), threads=1)
        except (SessionError, TranslationError) as error:
            return first_line(str(error))
        self._node_sessions[key] = session
        if len(self._node_sessions) > _MOST_SESSIONS:
            self._node_sessions.popitem(last=False)
        return session

    def _bind(
        self, nodes: Sequence[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[Output], *, threads: int | None
    ) -> BoundSession:
        model = translate(nodes, [Input(node) for node in inputs], outputs, opset=self._opset, name="replay")
        fold_constants(model)
        settings = SessionSettings(as_precise_as_pytorch(self._providers), threads, shares_graph=True, optimize=False)
        session = Session(model, settings)
        input_specs = [
            _input_spec(node, str(value.name)) for node, value in zip(inputs, model.graph.inputs, strict=True)
        ]
        output_specs = [
            _output_spec(output, str(value.name)) for output, value in zip(outputs, model.graph.outputs, strict=True)
        ]
        return BoundSession(session, input_specs, output_specs)


def values_of_session(
    bound: BoundSession, session: Session, args: Sequence[object], wanted: Sequence[OutputSpec]
) -> dict[str, object]:
    """Values inside a session, by name: those that the model ONNX Runtime made of it still has.

    Args:
        bound: how the arguments are bound.
        session: the session; it is not run itself.
        args: of the region.
        wanted: the values.

    Raises:
        SessionError: the runtime does not write the model, or refuses it with the values exposed.
    """
    model, constants = session.optimized()
    return _exposed_values(bound, session, model, args, wanted, constants)


def values_of_model(
    bound: BoundSession, session: Session, model: ir.Model, args: Sequence[object], wanted: Sequence[OutputSpec]
) -> dict[str, object]:
    """Values inside a model of a region, by name, with nothing optimized; constants are not among them.

    Args:
        bound: how the arguments are bound.
        session: of whose settings the model's session is.
        model: the model; left as it is.
        args: of the region.
        wanted: the values.

    Raises:
        SessionError: the runtime refuses the model with the values exposed.
    """
    return _exposed_values(bound, session, model.clone(), args, wanted)


def _exposed_values(
    bound: BoundSession,
    session: Session,
    model: ir.Model,
    args: Sequence[object],
    wanted: Sequence[OutputSpec],
    constants: Mapping[str, torch.Tensor] | None = None,
) -> dict[str, object]:
    """The values of a model, which is changed; with ``constants`` it is given to ONNX Runtime as it is."""
    values = {str(value.name): value for node in model.graph for value in node.outputs}
    specs = [spec for spec in wanted if spec.name in values]
    if not specs:
        return {}
    model.graph.outputs.clear()
    for spec in specs:
        value = values[spec.name]
        value.dtype = ir.tensor_adapters.from_torch_dtype(spec.dtype)
        model.graph.outputs.append(value)
    settings = dataclasses.replace(session.settings, optimize=False, shares_graph=True, arena=False)
    exposed = Session(model, settings) if constants is None else final_session(model, settings, constants)
    results = BoundSession(exposed, bound.inputs, specs)(args)
    return {spec.name: value for spec, value in zip(specs, results, strict=True)}


def _folded(model: ir.Model, wanted: Sequence[OutputSpec]) -> dict[str, torch.Tensor]:
    """Those of the wanted values that are constants of a model."""
    constants = {spec.name: model.graph.initializers.get(spec.name) for spec in wanted if not spec.is_number}
    return {
        name: _as_torch(value.const_value)
        for name, value in constants.items()
        if value is not None and value.const_value is not None
    }


def _as_torch(tensor: ir.TensorProtocol) -> torch.Tensor:
    """A copy of a constant, of any dtype."""
    dtype, sizes = ir.tensor_adapters.to_torch_dtype(tensor.dtype), list(tensor.shape.numpy())
    if not tensor.size:
        return torch.empty(sizes, dtype=dtype)
    return torch.frombuffer(bytearray(tensor.tobytes()), dtype=dtype).reshape(sizes)


def tensors(values: Mapping[str, object]) -> dict[str, torch.Tensor]:
    """Those of the values that are tensors."""
    return {name: value for name, value in values.items() if isinstance(value, torch.Tensor)}


def _name(output: Output) -> str:
    """The name of the ONNX value that holds a result."""
    return value_names(output.node)[output.index or 0]


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
