"""The numeric check of passes: ``options={"verify_passes": True}``.

A graph is run on the real inputs before and after a pass, and in float64. The pass is right if each result after it is
as near to float64 as before it, up to another rounding. A pass that is not is undone, and what is said of it names the
first node that differs, its line, and both errors.

Real inputs are known when a graph is called: with this option a forward, backward or inference graph goes through its
passes and is lowered at its first call. The joint graph must be partitioned before; its gradients of the results
(tangents) are drawn at random.
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
from ..graphs.locations import where
from ..graphs.operators import is_collective
from ..numerics.distance import ordinary
from ..numerics.exact import is_floating, widen
from ..numerics.graph_execution import FxExecution
from ..numerics.verdicts import is_changed, verdict
from ..runtime.binding import BoundSession, InputSpec, OutputSpec
from ..runtime.exposed_values import common_values
from ..runtime.session import Session
from ..runtime.settings import SessionSettings
from .needed_passes import with_needed_passes

logger = logging.getLogger(__name__)

_SEED = 0
"""Random operators draw the same numbers in each run of a check."""


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """No fake tensors, and no gradients."""
    with _disable_current_modes(), torch.no_grad():
        yield


class Evaluation(FxExecution):
    """A graph's values on real arguments, with no gradients and on copies of the arguments; none is dropped.

    Args:
        module: a graph of any stage; it is run in PyTorch.
        arguments: one real value for each placeholder; numbers may be symbolic.
        exact: whether float64 runs beside it.
        state: of PyTorch's generator on the CPU, if random operators are to go on from there.
    """

    def __init__(
        self, module: fx.GraphModule, arguments: Sequence[object], *, exact: bool, state: torch.Tensor | None = None
    ) -> None:
        start = torch.Generator().manual_seed(_SEED).get_state() if state is None else state
        with _undisturbed():
            super().__init__(module, [pytree.tree_map(_copy, item) for item in arguments], start, exact=exact)
            for node in module.graph.nodes:
                if node.op != "output":
                    self.run(node)
                    if exact:
                        self.exact_of(node)


def can_be_verified(module: fx.GraphModule) -> bool:
    """Whether a graph may run again; one that may not is counted, and said."""
    if not any(is_collective(node.target) for node in module.graph.nodes):
        return True
    count("graphs_not_verified")
    logger.warning("the passes on a graph are not verified: it has collectives, which run once, in all processes")
    return False


class GraphChecker:
    """The check of the passes on one FX graph."""

    def __init__(self, arguments: Sequence[object]) -> None:
        self._arguments = arguments

    @_undisturbed()
    def problem(self, before: fx.GraphModule, after: fx.GraphModule, *, is_needed: bool = False) -> str | None:
        """What a pass changed, see ``passes.engine.manager.Checker``; nothing where the graph must not run again."""
        if not can_be_verified(before):
            return None
        old = Evaluation(before, self._arguments, exact=True)
        try:
            new = Evaluation(after, self._arguments, exact=False)
        except Exception as error:  # a wrong graph fails in any way; that is what the check is there to find
            return f"the graph does not run any more: {type(error).__name__}: {error}"
        results_before, results_after = (_results(module) for module in (before, after))
        if len(results_before) != len(results_after):
            return f"the graph has {len(results_after)} results, {len(results_before)} before"
        for result_before, result_after in zip(results_before, results_after, strict=True):
            if not isinstance(result_before, fx.Node) or not isinstance(result_after, fx.Node):
                if result_before is not result_after and result_before != result_after:
                    return f"result {result_before} became {result_after}"
                continue
            said = _first_difference(old.eager[result_before], old.exact[result_before], new.eager[result_after])
            if said is not None:
                return self._first_node(old, new) or _at(result_after, said)
        return None

    @staticmethod
    def _first_node(old: Evaluation, new: Evaluation) -> str | None:
        """The first node of both graphs whose value differs, in words."""
        nodes = {node.name: node for node in old.eager}
        for node, value in new.eager.items():
            same = nodes.get(node.name)
            if same is None:
                continue
            said = _first_difference(old.eager[same], old.exact[same], value)
            if said is not None:
                return _at(node, said)
        return None


class ModelChecker:
    """The check of the passes on one region's ONNX model; the runtime's own optimizations are off in it.

    ``evaluation`` is of the graph the region is a part of; ``arguments`` and ``results`` are the nodes of the model's
    inputs and outputs.
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

    @_undisturbed()
    def problem(self, before: ir.Model, after: ir.Model, *, is_needed: bool = False) -> str | None:
        """What a pass changed, see ``passes.engine.manager.Checker``."""
        after = with_needed_passes(after)
        if is_needed:
            old: Sequence[object] = [self._evaluation.eager[node] for node in self._results]
        else:
            before = with_needed_passes(before)
            old = self._bound(before)(self._arguments)
        try:
            new = self._bound(after)(self._arguments)
        except SessionError as error:
            return f"ONNX Runtime refuses the model: {error}"
        for node, ours, theirs in zip(self._results, new, old, strict=True):
            said = _first_difference(theirs, self._evaluation.exact[node], ours)
            if said is not None:
                return (None if is_needed else self.first_value(before, after)) or _at(node, said)
        return None

    def first_value(self, before: ir.Model, after: ir.Model) -> str | None:
        """The first value that both models name and compute differently, in words."""
        try:
            for value, theirs, ours in common_values(self._bound(after), before, after, self._arguments):
                if theirs.shape == ours.shape and is_changed(ours, theirs):
                    said = str(verdict(ours, theirs, widen(theirs))) or "another value"
                    node = value.producer()
                    source = node.metadata_props.get("source") if node is not None else None
                    return f"{value.name}{f' ({source})' if source else ''}: {said}"
        except SessionError:  # refused with its values exposed: the outputs are named instead
            pass
        return None

    def _bound(self, model: ir.Model) -> BoundSession:
        return BoundSession(Session(model, self._settings), self._inputs, self._outputs)


def _first_difference(before: object, exact: object, after: object) -> str | None:
    """In words, the first tensor of a result whose error after a pass exceeds the tolerance; ``None`` if none does."""
    leaves = (pytree.tree_leaves(item) for item in (before, exact, after))
    for old, reference, new in zip(*leaves, strict=False):
        if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor) and old.dtype != new.dtype:
            return f"dtype {new.dtype} instead of {old.dtype}"
        inner = None  # terms as large as the ordinary elements may cancel in each element
        if is_floating(reference):
            inner = torch.full(reference.shape, ordinary(reference), dtype=torch.float64)
        found = verdict(new, old, reference, inner_size=inner)
        if found.is_wrong:
            return str(found)
    return None


def _at(node: fx.Node, said: str) -> str:
    return f"{node.name} ({where(node) or 'no source line'}): {said}"


def _results(module: fx.GraphModule) -> list[object]:
    return pytree.tree_leaves(module.graph.output_node().args[0])


def _copy(value: object) -> object:
    """The same tensor in memory of its own: a graph may write into its arguments."""
    return value.detach().clone() if isinstance(value, torch.Tensor) else synthetic(value)
