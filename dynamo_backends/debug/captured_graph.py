"""Dynamo's graph as it was captured, and whether AOTAutograd's compiled function computes the same.

Once per graph, and per set of sizes that is compared, both run in float64 on copies of a call's arguments: results,
changed arguments and gradients must be equal but for float64's rounding. The compiled function is that of the user's
call, with all wrappers of AOTAutograd; instead of the sessions, an interpreter runs its graphs after ``post_grad``.
This covers all stages up to ``post_grad``: passes, decompositions and wrappers. Only if the results differ, ``_Search``
compares each stage and pass.

Casts are not seen in float64: a pass that adds some to a lower precision is compared in the model's dtypes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes

from ..dumps.blame import Cause, CauseKind
from ..exporter.decompositions import decomposition_table
from ..graphs.artifacts import GraphName
from ..numerics.exact import KERNEL_ERRORS, is_floating
from ..numerics.function_runs import NotRepeatableError, UnstableError, copies, is_strided, memory_of, storage_of
from .call_runs import (
    CallInterpreter,
    CallMode,
    CallRuns,
    Key,
    KnownProducts,
    Outcome,
    Program,
    interpreted,
    is_of_backward,
)
from .rows import Blame, Finding, exception_text
from .stage_graphs import PreGradGraphs, StageGraphs, place_of_result
from .wrong_decomposition import DecompositionCheck, NodeTracker
from .wrong_step import blame_of, changing_step, first_wrong_step, wrong_step

FORWARD, BACKWARD = "forward", "backward"


class _Thread(threading.local):
    doing: object = None


_thread = _Thread()


@contextlib.contextmanager
def doing(what: object) -> Iterator[None]:
    """Sets, for this thread and block, how graphs run; ``what_is_done`` returns it."""
    before, _thread.doing = _thread.doing, what
    try:
        yield
    finally:
        _thread.doing = before


def what_is_done() -> object:
    """How graphs run in this thread.

    ``Interpretation``: by an interpreter; ``run_comparison.RecordedForwards``: recorded and judged; ``COMPARING`` or
    ``None``: as usual.
    """
    return _thread.doing


COMPARING = "comparing"
"""Values are compared: what a custom operator calls meanwhile is not compared."""


@dataclasses.dataclass
class Interpretation:
    """Runs AOTAutograd's graphs by an interpreter, while the compiled function is called for a comparison.

    Attributes:
        captured: the graph whose compiled function is called.
        mode: what runs them in float64, or in their dtypes.
        attributes: the copies of tensors that are attributes of Dynamo's graph, by the memory of the originals.
        arguments: copies of what the graphs got, by direction; ``None`` if they are not needed.
        graphs: the directions that ran.
    """

    captured: CapturedGraph
    mode: CallMode
    attributes: Mapping[int, torch.Tensor]
    arguments: dict[str, Sequence[object]] | None
    graphs: set[str] = dataclasses.field(default_factory=set)

    def run(self, name: GraphName, module: fx.GraphModule, args: list[object]) -> object:
        """Runs a graph instead of its compiled form; ``args`` is emptied."""
        given = [self._copy(value) for value in args]
        args.clear()
        direction = BACKWARD if name.direction == BACKWARD else FORWARD
        self.graphs.add(direction)
        if self.arguments is not None:
            with _disable_current_modes():
                self.arguments[direction] = copies(given)
        with torch.no_grad(), self.mode.alone():
            return CallInterpreter(module, self.mode).run(*given, enable_io_processing=False)

    def _copy(self, value: object) -> object:
        copied = self.attributes.get(storage_of(value)) if isinstance(value, torch.Tensor) else None
        if copied is None:
            return value
        assert isinstance(value, torch.Tensor)
        return memory_of(copied).as_strided(value.size(), value.stride(), value.storage_offset())


@dataclasses.dataclass(frozen=True)
class EagerCall:
    """What eager does with the arguments of a call.

    Attributes:
        results: by key; of tensors without floating-point numbers, only their layout.
        changed: the positions of the arguments that it changes.
        unchecked: why it is not known.
    """

    results: Mapping[Key, object] | None = None
    changed: frozenset[int] = frozenset()
    unchecked: str = ""


class CapturedGraph:
    """One of Dynamo's graphs, with the stages up to ``post_grad``.

    Args:
        opset: decides which operators are decomposed.

    Attributes:
        pre_grad, joint: the graphs of these stages.
        post_grad: those of that stage, by direction; an inference graph is a forward.
        gradients: what ``check`` found about the gradients of each call. A wrong gradient is a fault of the backward
            graph, whichever of its runs is compared, or none.
        written: the positions of the arguments that eager was seen to write.
        has_run: whether eager ran.
    """

    def __init__(self, opset: int) -> None:
        self.pre_grad = PreGradGraphs()
        self.joint = StageGraphs()
        self.post_grad: dict[str, StageGraphs] = {}
        self.gradients: list[Finding] = []
        self.written: set[int] = set()
        self.has_run = False
        self._opset = opset

    def decompositions(self) -> Mapping[object, Callable[..., Any]]:
        return decomposition_table(self._opset)

    def all_arguments(self, arguments: Sequence[object]) -> list[object]:
        """The arguments of AOTAutograd's graph, from those of Dynamo's graph."""
        return [*self.pre_grad.attributes, *arguments]

    def drop(self) -> None:
        """Frees the graphs; no further call is compared."""
        for graphs in (self.pre_grad, self.joint, *self.post_grad.values()):
            graphs.drop()

    def check(
        self, compiled: Callable[..., object], arguments: Sequence[object]
    ) -> tuple[dict[str, Finding], EagerCall]:
        """Compares AOTAutograd's compiled function with the captured graph: the findings by direction, and what eager
        does; adds to ``written``.

        Must be called before the call itself, in its grad mode and autocast.
        """
        search = _Search(self, compiled, self.all_arguments(arguments))
        found = self._findings(search, arguments)
        eager = search.eager
        if eager.results is None and not eager.unchecked:  # float64 has failed before
            search.run_eager()
        return found, search.eager

    def _findings(self, search: _Search, arguments: Sequence[object]) -> dict[str, Finding]:
        try:
            return search.findings()
        except UnstableError as error:
            unchecked = [f"the stages in float64: {error}"]
        except NotRepeatableError as error:
            return {FORWARD: Finding(unchecked=[f"the stages: {error}"]), BACKWARD: Finding()}
        except (*KERNEL_ERRORS, IndexError) as error:
            unchecked = [f"the stages in float64: {why(error, arguments)}"]
        try:
            blames = search.in_passes(casts=False)  # on the model's own values: float64 may have had another index
        except (*KERNEL_ERRORS, NotRepeatableError, IndexError) as error:
            blames = {}
            unchecked.append(f"the stages: {why(error, arguments)}")
        found = {direction: Finding(blames.get(direction)) for direction in (FORWARD, BACKWARD)}
        return found | {FORWARD: Finding(blames.get(FORWARD), unchecked=unchecked)}

    def program(self, compiled: Callable[..., object], arguments: dict[str, Sequence[object]] | None = None) -> Program:
        """The compiled function, whose graphs are interpreted; ``arguments`` receives what they get."""

        def run(given: Sequence[object], mode: CallMode) -> tuple[object, contextlib.AbstractContextManager[None]]:
            attributes = self.pre_grad.attributes
            copied = {storage_of(own): value for own, value in zip(attributes, given, strict=False)}
            interpretation = Interpretation(self, mode, copied, arguments)
            with doing(interpretation), mode.alone():
                results = compiled(*given[len(attributes) :])
            if FORWARD not in interpretation.graphs:
                raise NotRepeatableError("AOTAutograd's graph is not run by the backend")
            return results, doing(interpretation)

        return run


class _Search:
    """Compares one call, and finds what is to blame."""

    def __init__(self, captured: CapturedGraph, compiled: Callable[..., object], arguments: Sequence[object]) -> None:
        self._captured, self._compiled = captured, compiled
        self._arguments = arguments
        self._runs = CallRuns(arguments)
        self.eager = EagerCall()

    def run_eager(self, expected: Outcome | None = None) -> dict[Key, torch.Tensor]:
        """Runs the captured graph in eager, for the attribute ``eager``, and with gradients if there is an outcome in
        float64. Returns what rounding changes, see ``CallRuns.rounding``."""
        captured, runs = self._captured, CallRuns(self._arguments, self._runs.state, wide=False)
        try:
            narrow = runs.run(interpreted(captured.pre_grad.first), gradients=expected is not None)
        except (NotRepeatableError, *KERNEL_ERRORS, IndexError) as error:  # also in the user's call
            self.eager = EagerCall(unchecked=f"the captured graph: {why(error, self._arguments)}")
            return {}
        values = {key: value for key, value in narrow.values.items() if not is_of_backward(key)}
        changed = frozenset(key[1] for key in values if isinstance(key, tuple))
        captured.written |= changed
        captured.has_run = True
        kept = {key: value if is_floating(value) else _layout(value) for key, value in values.items()}
        self.eager = EagerCall(kept, changed)
        return {} if expected is None else runs.rounding(expected, narrow)

    def findings(self) -> dict[str, Finding]:
        captured, runs = self._captured, self._runs
        program = interpreted(captured.pre_grad.first)
        products = KnownProducts()
        expected = runs.run(program, products=products)
        rounding = self.run_eager(expected)
        self._refuse_changed_attributes(expected)
        actual = runs.run(captured.program(self._compiled), products=products)
        del products  # what it keeps may be large
        unchecked = list(dict.fromkeys(expected.not_float64 + actual.not_float64))
        gradients = expected.unchecked or actual.unchecked
        found = {FORWARD: Finding(unchecked=unchecked), BACKWARD: Finding()}
        if gradients:
            found[BACKWARD] = Finding(unchecked=[f"the gradients: {gradients}"])
        keys = list(runs.differing(program, expected, actual, known=rounding))
        blames = self._blames(keys, expected, actual) if keys else self.in_passes(casts=True)
        for direction, blame in blames.items():
            found[direction] = dataclasses.replace(found[direction], culprit=blame)
        return found

    def _refuse_changed_attributes(self, expected: Outcome) -> None:
        """AOTAutograd's wrappers hold the attributes of a graph: what these change is not a copy."""
        count = len(self._captured.pre_grad.attributes)
        keys = [key for key in expected.values if isinstance(key, tuple) and key[1] < count]
        if torch.is_grad_enabled() and keys:
            place = place_of_result(self._captured.pre_grad.first, keys[0])
            raise NotRepeatableError(f"{place.name} is an attribute of the graph")

    def _blames(self, keys: Sequence[Key], expected: Outcome, actual: Outcome) -> dict[str, Blame]:
        """What is to blame for wrong values, by direction."""
        directions = list(dict.fromkeys(BACKWARD if is_of_backward(key) else FORWARD for key in keys))
        captured, runs = self._captured, self._runs
        blame = first_wrong_step(runs, captured.pre_grad, self._arguments) or self._wrong_decomposition()
        if blame is not None:
            return dict.fromkeys(directions, blame)
        wide: dict[str, Sequence[object]] = {}
        runs.run(captured.program(self._compiled, wide))
        blames = self._in_later_stages(functools.partial(wrong_step, runs.state), directions, wide)
        if blames:
            return blames
        wrong = runs.beyond_model(interpreted(captured.pre_grad.first), expected, actual)
        if wrong:
            again = runs.beyond_model(captured.program(self._compiled), actual, expected)
            wrong = {key: found for key, found in wrong.items() if key in again}
        if not wrong:
            return {}
        key = next((key for key in wrong if is_of_backward(key) == (directions[0] == BACKWARD)), next(iter(wrong)))
        place = place_of_result(captured.pre_grad.last, key)
        return {directions[0]: blame_of(place, Cause(CauseKind.TRACE), wrong[key])}

    @functools.cached_property
    def _graph_arguments(self) -> Mapping[str, Sequence[object]]:
        """The arguments of AOTAutograd's graphs in the model's dtypes, by direction."""
        arguments: dict[str, Sequence[object]] = {}
        runs = CallRuns(self._arguments, self._runs.state, wide=False)
        runs.run(self._captured.program(self._compiled, arguments))
        return arguments

    def _joint_arguments(self, arguments: Mapping[str, Sequence[object]]) -> list[object] | None:
        """The arguments of the joint graph, by name; ``None`` if it has others."""
        joint = self._captured.joint
        if not joint.steps:
            return None
        known: dict[str, object] = {}
        for direction, graphs in self._captured.post_grad.items():
            known |= zip(graphs.placeholders, arguments.get(direction, ()), strict=False)
        nodes = joint.first.graph.find_nodes(op="placeholder")
        if any(node.users and node.name not in known for node in nodes):
            return None
        return [known.get(node.name) for node in nodes]

    def _wrong_decomposition(self) -> Blame | None:
        checks: list[DecompositionCheck] = []

        def run(given: Sequence[object], mode: CallMode) -> tuple[object, contextlib.AbstractContextManager[None]]:
            tracker = NodeTracker(self._captured.pre_grad.last, mode)
            check = DecompositionCheck(self._captured.decompositions(), tracker, self._runs.state)
            checks.append(check)

            @contextlib.contextmanager
            def checking() -> Iterator[None]:
                with mode.alone(), check:
                    yield

            with checking():
                results = tracker.run(*given, enable_io_processing=False)
            return results, checking()

        self._runs.run(run)
        return checks[0].culprit

    def in_passes(self, *, casts: bool) -> dict[str, Blame]:
        """The first pass that changed a node, by direction; ``casts``: of those that added some, by these."""
        captured, find = self._captured, functools.partial(changing_step, self._runs.state, casts=casts)
        blame = find(captured.pre_grad, self._arguments)
        if blame is not None:
            return {FORWARD: blame}
        later = captured.joint, *captured.post_grad.values()
        if not any(graphs.narrowing_steps if casts else graphs.has_passes for graphs in later):
            return {}
        return self._in_later_stages(find, [FORWARD], {})

    def _in_later_stages(
        self, find: Callable[..., Blame | None], directions: Sequence[str], wide: Mapping[str, Sequence[object]]
    ) -> dict[str, Blame]:
        """What is to blame in the joint graph, or else in the graphs after it, by direction.

        ``find`` gets the graphs of a stage and their arguments, in the model's dtypes and as they are in ``wide``.
        """
        captured, narrow = self._captured, self._graph_arguments
        given = self._joint_arguments(narrow)
        blame = find(captured.joint, given, self._joint_arguments(wide)) if given is not None else None
        if blame is not None:
            return dict.fromkeys(directions, blame)
        found = (
            (direction, find(graphs, narrow[direction], wide.get(direction)))
            for direction, graphs in captured.post_grad.items()
            if direction in narrow
        )
        return {direction: blame for direction, blame in found if blame is not None}


def _layout(value: object) -> object:
    """A tensor without its numbers."""
    if not is_strided(value):
        return value
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")


def why(error: Exception, arguments: Sequence[object]) -> str:
    """Why a call could not be run again."""
    classes = {type(item) for item in arguments if isinstance(item, torch.Tensor)}
    subclasses = sorted(item.__name__ for item in classes - {torch.Tensor, torch.nn.Parameter})
    if subclasses and isinstance(error, KERNEL_ERRORS):
        return f"{', '.join(subclasses)} does not run in float64"
    return exception_text(error)
