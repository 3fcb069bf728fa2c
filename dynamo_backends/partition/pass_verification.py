"""Checks the results of passes numerically: ``options={"verify_passes": True}``.

A graph runs on the real inputs before and after a pass, and in float64. A pass that makes the error of a result larger
than rounding explains is undone, with a message that names the first node that differs, its line, and both errors.

Real inputs are known only at a call: with this option, forward, backward and inference graphs are compiled at their
first call. The joint graph is partitioned earlier, with random gradients of its results (tangents).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Sequence

import onnx_ir as ir
import torch
from torch import fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from ..errors import SessionError
from ..events import count
from ..graphs.example_values import synthetic
from ..graphs.in_place import write_backs
from ..graphs.locations import changed_nodes, place_of
from ..graphs.operators import is_collective
from ..numerics.exact import is_floating, widen
from ..numerics.graph_execution import FxExecution
from ..numerics.tensor_measure import ordinary
from ..numerics.verdicts import is_changed, verdict
from ..runtime.binding import BoundSession, InputSpec, OutputSpec
from ..runtime.exposed_values import common_values
from ..runtime.session import Session
from ..runtime.settings import SessionSettings
from .needed_passes import with_needed_passes

logger = logging.getLogger(__name__)

_SEED = 0
"""Of random operators, in each run of a check."""


@contextlib.contextmanager
def _real_tensors() -> Iterator[None]:
    """Turns off fake tensors and gradients."""
    with _disable_current_modes(), torch.no_grad():
        yield


class Evaluation(FxExecution):
    """All values of a graph on copies of real arguments, computed in PyTorch without gradients.

    Args:
        module: a graph of any stage.
        arguments: one real value for each placeholder; numbers may be symbolic.
        exact: whether float64 runs too.
        state: of PyTorch's random generator on the CPU; by default that of a fixed seed.
    """

    def __init__(
        self, module: fx.GraphModule, arguments: Sequence[object], *, exact: bool, state: torch.Tensor | None = None
    ) -> None:
        start = torch.Generator().manual_seed(_SEED).get_state() if state is None else state
        with _real_tensors():
            super().__init__(module, [pytree.tree_map(_copy, item) for item in arguments], start, exact=exact)
            for node in module.graph.nodes:
                if node.op != "output":
                    self.run(node)
                    if exact:
                        self.exact_of(node)


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
    """Checks the passes on one FX graph; for ``arguments`` see ``Evaluation``."""

    def __init__(self, arguments: Sequence[object]) -> None:
        self._arguments = arguments

    @_real_tensors()
    def problem(self, before: fx.GraphModule, after: fx.GraphModule, *, is_needed: bool = False) -> str | None:
        """See ``passes.engine.manager.Checker``; ``None`` if the graph must not run again."""
        if not can_be_verified(before):
            return None
        old = Evaluation(before, self._arguments, exact=True)
        try:
            new = Evaluation(after, self._arguments, exact=False)
        except Exception as error:  # a wrong graph may raise anything
            return f"the graph fails: {type(error).__name__}: {error}"
        results_before, results_after = (_results(module) for module in (before, after))
        if len(results_before) != len(results_after):
            return f"the graph has {len(results_after)} results, {len(results_before)} before"
        for result_before, result_after in zip(results_before, results_after, strict=True):
            if not isinstance(result_before, fx.Node) or not isinstance(result_after, fx.Node):
                if result_before is not result_after and result_before != result_after:
                    return f"result {result_before} became {result_after}"
                continue
            difference = _first_difference(old.eager[result_before], old.exact[result_before], new.eager[result_after])
            if difference is not None:
                names = {node.name for node in old.eager}
                changed = changed_nodes(result_before, result_after, names)
                return self._first_node(old, new) or _located(changed, difference)
        return None

    @staticmethod
    def _first_node(old: Evaluation, new: Evaluation) -> str | None:
        """The first node that is in both graphs and has different values, or the added one that it reads."""
        nodes = {node.name: node for node in old.eager}
        for node, value in new.eager.items():
            same = nodes.get(node.name)
            if same is None:
                continue
            difference = _first_difference(old.eager[same], old.exact[same], value)
            if difference is not None:
                return _located(changed_nodes(same, node, nodes), difference)
        return None


class ModelChecker:
    """Checks the passes on one region's ONNX model, with ONNX Runtime's optimizations off.

    Args:
        evaluation: of the whole graph.
        arguments, results: the nodes of the model's inputs and outputs.
        inputs, outputs, settings: of the region's session.
    """

    def __init__(
        self,
        evaluation: Evaluation,
        arguments: Sequence[fx.Node],
        results: Sequence[fx.Node],
        inputs: Sequence[InputSpec],
        outputs: Sequence[OutputSpec],
        settings: SessionSettings,
    ) -> None:
        self._evaluation = evaluation
        self._arguments = [evaluation.eager[node] for node in arguments]
        self._results = results
        self._inputs, self._outputs = inputs, outputs
        self._settings = dataclasses.replace(settings, optimize=False)

    @_real_tensors()
    def problem(self, before: ir.Model, after: ir.Model, *, is_needed: bool = False) -> str | None:
        """See ``passes.engine.manager.Checker``."""
        after = with_needed_passes(after)
        if is_needed:
            old: Sequence[object] = [self._evaluation.eager[node] for node in self._results]
        else:
            before = with_needed_passes(before)
            old = self._session(before)(self._arguments)
        try:
            new = self._session(after)(self._arguments)
        except SessionError as error:
            return f"ONNX Runtime rejects the model: {error}"
        for node, ours, theirs in zip(self._results, new, old, strict=True):
            difference = _first_difference(theirs, self._evaluation.exact[node], ours)
            if difference is not None:
                first = None if is_needed else self.first_value(before, after)
                return first or _located((node, node), difference)
        return None

    def first_value(self, before: ir.Model, after: ir.Model) -> str | None:
        """The first value that is in both models and differs, with the difference."""
        try:
            for value, theirs, ours in common_values(self._session(after), before, after, self._arguments):
                if theirs.shape == ours.shape and is_changed(ours, theirs):
                    difference = str(verdict(ours, theirs, widen(theirs))) or "another value"
                    node = value.producer()
                    source = node.metadata_props.get("source") if node is not None else None
                    return f"{value.name}{f' ({source})' if source else ''}: {difference}"
        except SessionError:  # rejected with its values as outputs; the caller names a result instead
            pass
        return None

    def _session(self, model: ir.Model) -> BoundSession:
        return BoundSession(Session(model, self._settings), self._inputs, self._outputs)


def _first_difference(before: object, exact: object, after: object) -> str | None:
    """Describes the first tensor of a result that is wrong after a pass; ``None`` if none is."""
    leaves = (pytree.tree_leaves(item) for item in (before, exact, after))
    for old, reference, new in zip(*leaves, strict=False):
        if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor) and old.dtype != new.dtype:
            return f"dtype {new.dtype} instead of {old.dtype}"
        inner = None  # assume that terms as large as ordinary elements cancel in each element
        if is_floating(reference):
            inner = torch.full(reference.shape, ordinary(reference), dtype=torch.float64)
        found = verdict(new, old, reference, inner_size=inner)
        if found.is_wrong:
            return str(found)
    return None


def _located(changed: tuple[fx.Node, fx.Node], difference: str) -> str:
    replaced, new = changed
    return f"{new.name} ({place_of(new, replaced).source or 'no source line'}): {difference}"


def _results(module: fx.GraphModule) -> list[object]:
    """The results of a graph, and the new values of its arguments."""
    return [*pytree.tree_leaves(module.graph.output_node().args[0]), *(new for _, new, _ in write_backs(module))]


def _copy(value: object) -> object:
    """A copy of a tensor, because a graph may write into its arguments; a real value for anything else."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else synthetic(value)
