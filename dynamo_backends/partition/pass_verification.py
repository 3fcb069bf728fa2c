"""Checks the results of passes numerically: ``options={"verify_passes": True}``.

A graph runs on the real inputs before and after a pass, and in float64. A pass that makes the error of a result larger
than rounding explains is undone, with a message that names the first node that differs, its line, and both errors.

Real inputs are known only at a call: with this option, forward, backward and inference graphs are compiled at their
first call. The joint graph is partitioned earlier, with random gradients of its results (tangents).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import operator
from collections.abc import Iterator, Mapping, Sequence

import onnx_ir as ir
import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from ..common.random_state import RandomState
from ..errors import SessionError
from ..events import count
from ..graphs.artifacts import attribute
from ..graphs.example_values import synthetic
from ..graphs.in_place import write_backs
from ..graphs.locations import changed_nodes, place_of
from ..graphs.operators import is_collective
from ..numerics.arrays import same_number
from ..numerics.exact import Environment
from ..numerics.function_runs import UnstableError
from ..numerics.randomness import PrivateRandomness
from ..numerics.rule import SUM_UNITS, Measure
from ..numerics.segments import Judged, RecordedValues, SegmentCheck
from ..numerics.whole_graph import FunctionCheck, all_values, measure, values_check
from ..runtime.binding import InputSpec, OutputSpec
from ..runtime.session import Session
from ..runtime.settings import SessionSettings
from .exposed_values import values_of_model
from .needed_passes import with_needed_passes

logger = logging.getLogger(__name__)

_SEED = 0
"""Of random operators, in each run of a check."""


@contextlib.contextmanager
def _real_tensors() -> Iterator[None]:
    """Turns off fake tensors and gradients."""
    with _disable_current_modes(), torch.no_grad():
        yield


def _state() -> RandomState:
    return RandomState.of_seed(_SEED)


@_real_tensors()
def evaluate(module: fx.GraphModule, arguments: Sequence[object]) -> dict[fx.Node, object]:
    """All values of a graph on copies of real arguments, computed in PyTorch without gradients; numbers among the
    arguments may be symbolic."""
    interpreter = fx.Interpreter(module, garbage_collect_values=False)
    with PrivateRandomness(_state()):
        interpreter.run(*_copied(arguments), enable_io_processing=False)
    return {node: value for node, value in interpreter.env.items() if node.op != "output"}


def can_be_verified(module: fx.GraphModule) -> bool:
    """Whether a graph may run more than once; if not, counts it and logs a warning."""
    if not any(is_collective(node.target) for node in module.graph.nodes):
        return True
    not_verified("its collectives must run once, in all processes")
    return False


def not_verified(why: str) -> None:
    """Counts a graph whose passes cannot be checked, and logs a warning."""
    count("graphs_not_verified")
    logger.warning("the passes on a graph are not verified: %s", why)


class GraphChecker:
    """Checks the passes on one FX graph; for ``arguments`` see ``evaluate``."""

    def __init__(self, arguments: Sequence[object]) -> None:
        self._arguments = arguments

    @_real_tensors()
    def problem(self, before: fx.GraphModule, after: fx.GraphModule, *, is_needed: bool = False) -> str | None:
        """See ``passes.engine.manager.Checker``; ``None`` if the graph cannot be checked."""
        if not can_be_verified(before):
            return None
        old = values_check(before, _copied(self._arguments), _state())
        try:
            with PrivateRandomness(_state()):
                new = all_values(after, _copied(self._arguments))
        except Exception as error:  # a wrong graph may raise anything
            return f"the graph fails: {type(error).__name__}: {error}"
        results_before, results_after = (_results(module) for module in (before, after))
        if len(results_before) != len(results_after):
            return f"the graph has {len(results_after)} results, {len(results_before)} before"
        unstable: dict[str, None] = {}
        for result_before, result_after in zip(results_before, results_after, strict=True):
            if not isinstance(result_before, fx.Node) or not isinstance(result_after, fx.Node):
                if result_before is not result_after and result_before != result_after:
                    return f"result {result_before} became {result_after}"
                continue
            try:
                difference = _difference(old, result_before.name, new, result_after.name)
            except UnstableError as error:
                unstable[f"{result_before.name}: {error}"] = None
                continue
            if difference:
                nodes = {node.name: node for node in before.graph.nodes}
                first = self._first_node(old, nodes, new, after)
                return first or _located(changed_nodes(result_before, result_after, nodes), difference)
        for reason in unstable:
            not_verified(reason)
        return None

    @staticmethod
    def _first_node(
        old: FunctionCheck, nodes: Mapping[str, fx.Node], new: Mapping[tuple[str, int], object], after: fx.GraphModule
    ) -> str | None:
        """The first node that is in both graphs and has different values, or the added one that it reads."""
        for node in after.graph.nodes:
            with contextlib.suppress(UnstableError):
                if node.name in nodes and (difference := _difference(old, node.name, new, node.name)):
                    return _located(changed_nodes(nodes[node.name], node, nodes), difference)
        return None


class ModelChecker:
    """Checks the passes on one region's ONNX model, with ONNX Runtime's optimizations off.

    Args:
        evaluation: the values of the whole graph, see ``evaluate``.
        arguments, results: the nodes of the model's inputs and outputs.
        inputs, outputs, settings: of the region's session.
    """

    def __init__(
        self,
        evaluation: Environment,
        arguments: Sequence[fx.Node],
        results: Sequence[fx.Node],
        inputs: Sequence[InputSpec],
        outputs: Sequence[OutputSpec],
        settings: SessionSettings,
    ) -> None:
        self._given = {node: evaluation[node] for node in arguments}
        self._arguments = list(self._given.values())
        self._results = results
        self._inputs, self._outputs = inputs, outputs
        self._settings = dataclasses.replace(settings, optimize=False)

    @_real_tensors()
    def problem(self, before: ir.Model, after: ir.Model, *, is_needed: bool = False) -> str | None:
        """See ``passes.engine.manager.Checker``."""
        after = with_needed_passes(after)
        try:
            new = self._session(after)(self._arguments)
        except SessionError as error:
            return f"ONNX Runtime rejects the model: {error}"
        wrong = [item for item in self._judged(new) if item.is_wrong]
        if not wrong:
            return None
        if is_needed:
            return _located((wrong[0].node, wrong[0].node), str(wrong[0].verdict()))
        before = with_needed_passes(before)
        known = {(item.node, item.index): item for item in self._judged(self._session(before)(self._arguments))}
        for item in wrong:
            old = known[item.node, item.index]
            if not old.is_wrong or not _is_same(item.value, old.value):  # not the wrong value of a node
                return self.first_value(before, after) or _located((item.node, item.node), str(item.verdict()))
        return None

    def _judged(self, values: Sequence[object]) -> list[Judged]:
        """The results of a session, judged on its arguments."""
        known = {_key(node): value for node, value in zip(self._results, values, strict=True)}
        given, nodes, waiting = dict(self._given), set[fx.Node](), [node for node, _ in known]
        while waiting:
            node = waiting.pop()
            if node.op == "get_attr":
                assert node.graph.owning_module is not None
                given.setdefault(node, attribute(node.graph.owning_module, str(node.target)))
            if node not in given and node not in nodes:
                nodes.add(node)
                waiting += node.all_input_nodes
        in_order = [node for node in self._results[0].graph.nodes if node in nodes]
        check = SegmentCheck(in_order, given, RecordedValues(known))
        found = list(check.judge())
        for name, reason in check.unchecked.items():
            not_verified(f"{name}: {reason}")
        return found

    def first_value(self, before: ir.Model, after: ir.Model) -> str | None:
        """The first value that is in both models and differs, with the difference."""
        found = first_changed_value(self._session(after), before, after, self._arguments)
        if found is None:
            return None
        value, difference = found
        node = value.producer()
        source = node.metadata_props.get("source") if node is not None else None
        return f"{value.name}{f' ({source})' if source else ''}: {difference.text()}"

    def _session(self, model: ir.Model) -> Session:
        return Session(model, self._settings, self._inputs, self._outputs)


_STEP = "__stage"
"""Marks names that a pass gave to steps inside a node. In another model the same name may be another step."""


def first_changed_value(
    bound: Session, before: ir.Model, after: ir.Model, arguments: Sequence[object]
) -> tuple[ir.Value, Measure] | None:
    """The first value of ``after``, in execution order, that is another in ``before``; ``None`` also if ONNX Runtime
    rejects one of the models with all values as outputs."""
    wanted = [
        OutputSpec(str(value.name), ir.tensor_adapters.to_torch_dtype(value.dtype))
        for node in before.graph
        for value in node.outputs
        if value.name and value.dtype is not None and _STEP not in value.name
    ]
    with contextlib.suppress(SessionError):
        old, new = (values_of_model(bound, model.clone(), arguments, wanted) for model in (before, after))
        for value in (value for node in after.graph for value in node.outputs):
            ours, theirs = new.get(str(value.name)), old.get(str(value.name))
            if ours is None or theirs is None or ours.shape != theirs.shape:
                continue
            if not (found := measure(ours, theirs, SUM_UNITS)).is_rounding:
                return value, found
    return None


def _difference(old: FunctionCheck, name: str, new: Mapping[tuple[str, int], object], name_after: str) -> str:
    """How a node's value differs after a pass; empty if it does not."""
    for i in itertools.count():
        if (name, i) not in old.eager or (name_after, i) not in new:
            return ""
        found = old.judge((name, i), new[name_after, i])
        if found.is_wrong:
            return str(found)
    return ""


def _key(node: fx.Node) -> tuple[fx.Node, int | None]:
    """What a result of a graph is a value of."""
    if node.target is not operator.getitem:
        return node, None
    parent, index = node.args
    assert isinstance(parent, fx.Node) and isinstance(index, int)
    return parent, index


def _is_same(value: object, other: object) -> bool:
    if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
        return (
            value.shape == other.shape and value.dtype == other.dtype and measure(value, other, SUM_UNITS).is_rounding
        )
    return same_number(value, other)


def _located(changed: tuple[fx.Node, fx.Node], difference: str) -> str:
    replaced, new = changed
    return f"{new.name} ({place_of(new, replaced).source or 'no source line'}): {difference}"


def _results(module: fx.GraphModule) -> list[object]:
    """The results of a graph, and the new values of its arguments."""
    return [*pytree.tree_leaves(module.graph.output_node().args[0]), *(new for _, new, _ in write_backs(module))]


def _copied(arguments: Sequence[object]) -> list[object]:
    return [pytree.tree_map(_copy, item) for item in arguments]


def _copy(value: object) -> object:
    """A copy of a tensor, because a graph may write into its arguments; a real value for anything else."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else synthetic(value)
