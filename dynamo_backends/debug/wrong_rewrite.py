"""Finds the rewrite that makes a session wrong when every node alone is right.

Two kinds of rewrites lie between the exported model and the session: our passes of the stage ``onnx``, and ONNX
Runtime's graph optimizers. Passes are tested by running the model before and after each, with the optimizers off;
optimizers by disabling half of the list at a time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import onnx_ir as ir
import torch
from torch import fx

from passes.engine.manager import all_passes
from passes.engine.results import PassResult

from ..dumps.blame import Cause, CauseKind
from ..dumps.optimizers import wrong_optimizer
from ..errors import SessionError
from ..numerics.rule import Measure
from ..numerics.whole_graph import measure
from ..partition.exposed_values import values_of_model
from ..partition.needed_passes import with_needed_passes
from ..partition.pass_verification import first_changed_value
from ..pipeline.stage_data import CompiledRegion
from ..runtime.binding import OutputSpec
from ..runtime.session import Session
from .optimized_models import values_of_session
from .rows import Row


@dataclasses.dataclass(frozen=True)
class ModelStep:
    """A region's model after a pass of the stage ``onnx`` that fired."""

    name: str
    model: ir.Model


@dataclasses.dataclass(frozen=True, eq=False)
class ModelSteps:
    """A listener of the pass manager that copies a region's model after each pass that fires."""

    steps: list[ModelStep]

    def start(self, stage: str, graph: object) -> None:
        self.steps.clear()

    def fired(self, result: PassResult, graph: object) -> None:
        assert isinstance(graph, ir.Model)
        if not result.undone:
            self.steps.append(ModelStep(result.name, graph.clone()))


def find_rewrite(
    compiled: CompiledRegion,
    bound: Session,
    steps: Sequence[ModelStep],
    actual: Mapping[fx.Node, object],
    value: str,
) -> tuple[Cause, str]:
    """Finds the pass or optimizer that makes ``value`` wrong, and the first value that it changed.

    The cause is a node if the exported model gives the same wrong value, and the session that ran, ``bound``, if
    another session of the same model is right. ``steps`` are in order; ``actual`` has the values of the run.
    """
    search = _RewriteSearch(compiled, bound, actual, value)
    optimized = compiled.optimized_model
    if not search.differs:
        return Cause(CauseKind.NODE), value
    if search.is_right(optimized):
        return Cause(CauseKind.SESSION), value
    before = with_needed_passes(compiled.model)
    after_passes = ((step.name, with_needed_passes(step.model)) for step in steps)
    for name, after in itertools.chain(after_passes, [("", optimized)]):
        if search.is_right(after, optimize=False) is False:
            return Cause(CauseKind.PASS, name), search.first_changed(before, after)
        before = after
    found = wrong_optimizer(lambda disabled: search.is_right(optimized, disabled=disabled))
    return Cause(CauseKind.OPTIMIZER, found), value


def wrong_needed_pass(compiled: CompiledRegion, bound: Session, actual: Mapping[fx.Node, object], row: Row) -> str:
    """The needed pass that makes a value wrong; ``""`` if the node itself is wrong.

    Leaving out a right pass changes a value a little; leaving out the wrong one changes it by about its error. ``row``
    is of a value that is wrong in the exported model; otherwise as ``find_rewrite``.
    """
    arguments = [actual[item.node] for item in compiled.region.inputs]
    wanted = [OutputSpec(row.name, row.torch_dtype)]
    needed = {item.name for item in all_passes() if item.is_needed}

    def value(without: str = "") -> torch.Tensor | None:
        model = with_needed_passes(compiled.model, without=without)
        return values_of_model(bound, model, arguments, wanted).get(row.name)  # not for a constant

    for name in (result.name for result in compiled.passes if result.fired and result.name in needed):
        with contextlib.suppress(SessionError):  # the runtime may reject the model without the pass
            without, with_all = value(name), value()
            if without is None or with_all is None or row.error is None:
                return ""
            if measure(without, with_all).share > row.error.share / 2:
                return name
    return ""


class _RewriteSearch:
    """Runs variants of one region's session, and compares one value with the exported model's."""

    def __init__(self, compiled: CompiledRegion, bound: Session, actual: Mapping[fx.Node, object], value: str) -> None:
        self._bound = bound
        self._arguments = [actual[item.node] for item in compiled.region.inputs]
        self._value = value
        names = [spec.name.removesuffix("__memory") for spec in self._bound.outputs]
        self._position = names.index(value) if value in names else None
        expected = self._run(with_needed_passes(compiled.model), optimize=False)
        assert expected is not None
        self._expected = expected
        wrong = self._run(compiled.optimized_model)
        self._error = measure(wrong, self._expected) if wrong is not None else Measure()

    @property
    def differs(self) -> bool:
        """Whether the wrong value is another than the exported model's: a rewrite made it."""
        return not self._error.is_rounding

    def is_right(self, model: ir.Model, *, optimize: bool = True, disabled: Sequence[str] = ()) -> bool | None:
        """Whether the error is rounding, or at most half of the wrong session's; ``None`` without the value."""
        found = self._run(model, optimize=optimize, disabled=disabled)
        if found is None:
            return None
        error = measure(found, self._expected)
        is_smaller = error.nonfinite <= self._error.nonfinite / 2 and error.max_abs <= self._error.max_abs / 2
        return error.is_rounding or is_smaller

    def first_changed(self, before: ir.Model, after: ir.Model) -> str:
        """The name of the first value of ``after`` that differs from ``before``; else of the wrong value."""
        found = first_changed_value(self._bound, before, after, self._arguments)
        return str(found[0].name) if found is not None else self._value

    def _run(self, model: ir.Model, *, optimize: bool = True, disabled: Sequence[str] = ()) -> torch.Tensor | None:
        session = self._bound
        disabled = (*session.settings.disabled_optimizers, *disabled)
        session = session.variant(model, optimize=optimize, disabled_optimizers=disabled)
        if self._position is None:
            found = next((v.dtype for node in model.graph for v in node.outputs if v.name == self._value), None)
            dtype = ir.tensor_adapters.to_torch_dtype(found) if found is not None else torch.float32
            wanted = [OutputSpec(self._value, dtype)]
            return values_of_session(session, self._arguments, wanted).get(self._value)
        result = session(self._arguments)[self._position]
        assert isinstance(result, torch.Tensor)
        return result
