"""When every node is right by itself and the session is not: which rewrite of the model makes the fault.

Two kinds of rewrites lie between the exported model and the session: our passes of the stage ``onnx``, and ONNX
Runtime's graph optimizers. The first is tried by running the models before and after it with ONNX Runtime's optimizers
off; the second by switching its optimizers off, half of the list at a time.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import onnx_ir as ir
import torch
from torch import fx

from ..artifacts import CompiledRegion
from ..dumps.blame import Cause, Kind
from ..numerics.differences import discrete_difference, is_discrete
from ..numerics.distance import EQUAL, distance, is_explained
from ..runtime.binding import BoundSession, OutputSpec
from ..runtime.optimizers import OPTIMIZERS
from .repeat import repeat_node
from .replay import tensors, values_of_model, values_of_session


@dataclasses.dataclass(frozen=True)
class Rewrite:
    """What made a region's session compute something else than its exported model.

    Attributes:
        cause: a pass or an optimizer, or the session where no other session shows it.
        value: name of the first value that it changed.
    """

    cause: Cause
    value: str


@dataclasses.dataclass(frozen=True)
class ModelStep:
    """A region's model after a pass of the stage ``onnx`` that fired."""

    name: str
    model: ir.Model


def find_rewrite(
    compiled: CompiledRegion,
    bound: BoundSession,
    steps: Sequence[ModelStep],
    actual: Mapping[fx.Node, object],
    value: str,
) -> Rewrite:
    """Names the rewrite that makes ``value`` wrong.

    Args:
        compiled: the region.
        bound: its session that ran.
        steps: its model after each pass of the stage ``onnx`` that fired, in order.
        actual: the values of the run, by node.
        value: name of a tensor that is wrong in the session that ran, and right in the exported model.
    """
    search = _Search(compiled, bound, actual, value)
    if search.is_right(compiled.optimized_model):
        return Rewrite(Cause(Kind.SESSION), value)
    before = compiled.model
    for step in [*steps, ModelStep("", compiled.optimized_model)]:
        if search.is_right(step.model, optimize=False) is False:
            return Rewrite(Cause(Kind.PASS, step.name), search.first_changed(before, step.model) or value)
        before = step.model
    return Rewrite(Cause(Kind.OPTIMIZER, _wrong_optimizer(search, compiled)), value)


def _wrong_optimizer(search: _Search, compiled: CompiledRegion) -> str:
    """The name of ONNX Runtime's optimizer that makes the fault; ``""`` where no single one does."""
    if not search.is_right(compiled.optimized_model, disabled=OPTIMIZERS):
        return ""
    suspects = list(OPTIMIZERS)
    while len(suspects) > 1:
        half = suspects[: len(suspects) // 2]
        suspects = half if search.is_right(compiled.optimized_model, disabled=half) else suspects[len(half) :]
    return suspects[0] if search.is_right(compiled.optimized_model, disabled=suspects) else ""


def find_unstable_rewrite(
    compiled: CompiledRegion, bound: BoundSession, steps: Sequence[ModelStep], actual: Mapping[fx.Node, object]
) -> str:
    """Says where a region's results become others from run to run or with other threads, though those of its nodes do
    not.

    Args:
        compiled: the region.
        bound: its session that ran.
        steps: its model after each pass of the stage ``onnx`` that fired, in order.
        actual: the values of the run, by node.
    """
    arguments = [actual[item.node] for item in compiled.region.inputs]
    for model, culprit in (
        (compiled.model, "the exported model as a whole"),
        *((step.model, f"pass {step.name}") for step in steps),
        (compiled.optimized_model, "the passes of the stage onnx"),
    ):
        session = bound.session.variant(model, optimize=False)
        variant = BoundSession(session, bound.inputs, bound.outputs)
        if any(not found.is_rounding(None) for found in repeat_node(variant, arguments).values()):
            return culprit
    return "ONNX Runtime's optimizers, or a race that did not show again"


class _Search:
    """Runs variants of one region's session and says whether a value comes out as in the exported model."""

    def __init__(
        self, compiled: CompiledRegion, bound: BoundSession, actual: Mapping[fx.Node, object], value: str
    ) -> None:
        self._bound = bound
        self._arguments = [actual[item.node] for item in compiled.region.inputs]
        self._value = value
        names = [spec.name.removesuffix("__memory") for spec in self._bound.outputs]
        self._position = names.index(value) if value in names else None
        plain = self._run(compiled.model, optimize=False)
        wrong = self._run(compiled.optimized_model)
        assert plain is not None
        self._wrong_by = distance(wrong, plain.double()) if wrong is not None else EQUAL
        self._plain = plain

    def is_right(self, model: ir.Model, *, optimize: bool = True, disabled: Sequence[str] = ()) -> bool | None:
        """``None`` if the variant does not have the value."""
        found = self._run(model, optimize=optimize, disabled=disabled)
        if found is None:
            return None
        error = distance(found, self._plain.double())
        if is_explained(error, EQUAL, found.dtype):
            return True
        return error.nonfinite <= self._wrong_by.nonfinite / 2 and error.max_abs <= self._wrong_by.max_abs / 2

    def first_changed(self, before: ir.Model, after: ir.Model) -> str | None:
        """The first value of ``after``, in execution order, that is not what it is in ``before``."""
        wanted = [
            OutputSpec(str(value.name), ir.tensor_adapters.to_torch_dtype(value.dtype))
            for node in before.graph
            for value in node.outputs
            if value.name and value.dtype is not None
        ]
        old, new = (
            tensors(values_of_model(self._bound, self._bound.session, model, self._arguments, wanted))
            for model in (before, after)
        )
        for node in after.graph:
            for name in (str(value.name) for value in node.outputs):
                if name not in old or name not in new or old[name].shape != new[name].shape:
                    continue
                if _is_changed(new[name], old[name]):
                    return name
        return None

    def _run(self, model: ir.Model, *, optimize: bool = True, disabled: Sequence[str] = ()) -> torch.Tensor | None:
        session = self._bound.session.variant(model, optimize=optimize, also_disabled=disabled)
        if self._position is None:
            wanted = [OutputSpec(self._value, _dtype_of(model, self._value))]
            return tensors(values_of_session(self._bound, session, self._arguments, wanted)).get(self._value)
        bound = BoundSession(session, self._bound.inputs, self._bound.outputs)
        result = bound(self._arguments)[self._position]
        assert isinstance(result, torch.Tensor)
        return result


def _is_changed(new: torch.Tensor, old: torch.Tensor) -> bool:
    """Whether a value is another by more than rounding, which may turn a few comparisons and indices."""
    if is_discrete(old):
        return bool(discrete_difference(old, new))
    return not is_explained(distance(new, old.double()), EQUAL, old.dtype)


def _dtype_of(model: ir.Model, name: str) -> torch.dtype:
    found = next((v.dtype for node in model.graph for v in node.outputs if v.name == name), None)
    return ir.tensor_adapters.to_torch_dtype(found) if found is not None else torch.float32
