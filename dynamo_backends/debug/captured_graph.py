"""Dynamo's graph as it was captured, and whether AOTAutograd's compiled function computes the same.

Once per graph, and per set of sizes that is compared, both run in float64 on copies of a call's arguments: results,
changed arguments and gradients must be equal but for float64's rounding. The compiled function is that of the user's
call, with all wrappers of AOTAutograd; instead of the sessions, an interpreter runs its graphs after ``post_grad``. So
what is compared are all stages up to ``post_grad``, and their values are those that the passes, decompositions and
wrappers should not change. Only if they differ, each stage and pass is looked at (``_Search``).

Casts are not seen in float64: a pass that adds some to a lower precision is compared in the model's dtypes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass
from xxhash import xxh3_64_intdigest

from ..dumps.blame import Cause, CauseKind
from ..exporter.decompositions import decomposition_table
from ..graphs.artifacts import GraphName
from ..graphs.layout import significant_strides
from ..graphs.locations import Place, place_of
from ..numerics.arrays import as_array
from ..numerics.exact import KERNEL_ERRORS
from ..numerics.function_runs import NotRepeatableError, copies, is_strided
from ..numerics.verdicts import Verdict
from .chosen_runs import SelectedRun
from .first_changed_node import ChangedNode, difference, first_changed_node
from .rows import Blame, Finding, exception_text
from .stage_graphs import PreGradGraphs, StageGraphs, Step, place_of_result
from .wide_runs import (
    CallRuns,
    Key,
    Outcome,
    Program,
    WideInterpreter,
    WideMode,
    interpreted,
    is_close,
    is_of_backward,
    memory_of,
    storage_of,
)
from .wrong_decomposition import DecompositionCheck, NodeTracker

FORWARD, BACKWARD = "forward", "backward"


@dataclasses.dataclass
class Interpretation:
    """Runs AOTAutograd's graphs by an interpreter, while the compiled function is called for a comparison.

    Attributes:
        mode: what runs them in float64, or in their dtypes.
        attributes: the copies of tensors that are attributes of Dynamo's graph, by the memory of the originals.
        arguments: copies of what the graphs got, by direction; ``None`` if they are not needed.
        graphs: the directions that ran.
    """

    mode: WideMode
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
            return WideInterpreter(module, self.mode).run(*given, enable_io_processing=False)

    def _copy(self, value: object) -> object:
        copied = self.attributes.get(storage_of(value)) if isinstance(value, torch.Tensor) else None
        if copied is None:
            return value
        assert isinstance(value, torch.Tensor)
        return memory_of(copied).as_strided(value.size(), value.stride(), value.storage_offset())


class CapturedGraph:
    """One of Dynamo's graphs, with the stages up to ``post_grad``.

    Args:
        opset: decides which operators are decomposed.

    Attributes:
        pre_grad, joint: the graphs of these stages.
        post_grad: those of that stage, by direction; an inference graph is a forward.
        findings: the result of ``check``, by direction.
        written: the positions of the arguments that eager was seen to write.
        has_run: whether eager ran.
    """

    def __init__(self, opset: int) -> None:
        self.pre_grad = PreGradGraphs()
        self.joint = StageGraphs()
        self.post_grad: dict[str, StageGraphs] = {}
        self.findings: dict[str, Finding] = {}
        self.written: set[int] = set()
        self.has_run = False
        self._opset = opset
        self._active = threading.local()

    @property
    def current_call(self) -> ComparedCall | None:
        """The compared call that runs in this thread."""
        return getattr(self._active, "call", None)

    def run_in_call(self, compiled: Callable[..., Any], arguments: Sequence[object], call: ComparedCall | None) -> Any:
        """Runs the compiled graph as part of a compared call, if there is one."""
        self._active.call = call
        try:
            return compiled(*arguments)
        finally:
            self._active.call = None

    @property
    def interpretation(self) -> Interpretation | None:
        """What runs AOTAutograd's graphs in this thread, instead of their compiled form."""
        return getattr(self._active, "interpretation", None)

    def decompositions(self) -> Mapping[object, Callable[..., Any]]:
        return decomposition_table(self._opset)

    def all_arguments(self, arguments: Sequence[object]) -> list[object]:
        """The arguments of AOTAutograd's graph, from those of Dynamo's graph."""
        return [*self.pre_grad.attributes, *arguments]

    def drop(self) -> None:
        """Frees the graphs; no further call is compared."""
        for graphs in (self.pre_grad, self.joint, *self.post_grad.values()):
            graphs.drop()

    def check(self, compiled: Callable[..., object], arguments: Sequence[object]) -> None:
        """Compares AOTAutograd's compiled function with the captured graph; sets ``findings``.

        Must be called before the call itself, in its grad mode and autocast.

        Raises:
            NotRepeatableError: the graph must run once only.
        """
        search = _Search(self, compiled, self.all_arguments(arguments))
        try:
            self.findings = search.findings()
        except (*KERNEL_ERRORS, IndexError) as error:
            if isinstance(error, NotRepeatableError):
                raise
            blames = search.in_passes(casts=False)  # on the model's own values: float64 may have had another index
            unchecked = f"the stages in float64: {_why(error, arguments)}"
            self.findings = {direction: Finding(blame) for direction, blame in blames.items()}
            self.findings[FORWARD] = Finding(blames.get(FORWARD), unchecked=[unchecked])

    def take_finding(self, direction: str) -> Finding:
        """The finding on the stages of one direction, once."""
        return self.findings.pop(BACKWARD if direction == BACKWARD else FORWARD, Finding())

    def program(self, compiled: Callable[..., object], arguments: dict[str, Sequence[object]] | None = None) -> Program:
        """The compiled function, whose graphs are interpreted; ``arguments`` receives what they get."""

        def run(given: Sequence[object], mode: WideMode) -> tuple[object, contextlib.AbstractContextManager[None]]:
            attributes = self.pre_grad.attributes
            copied = {storage_of(own): value for own, value in zip(attributes, given, strict=False)}
            interpretation = Interpretation(mode, copied, arguments)
            with self._interpreting(interpretation), mode.alone():
                results = compiled(*given[len(attributes) :])
            if FORWARD not in interpretation.graphs:
                raise NotRepeatableError("AOTAutograd's graph is not run by the backend")
            return results, self._interpreting(interpretation)

        return run

    @contextlib.contextmanager
    def _interpreting(self, interpretation: Interpretation) -> Iterator[None]:
        self._active.interpretation = interpretation
        try:
            yield
        finally:
            self._active.interpretation = None


class _Search:
    """Compares one call, and finds what is to blame."""

    def __init__(self, captured: CapturedGraph, compiled: Callable[..., object], arguments: Sequence[object]) -> None:
        self._captured, self._compiled = captured, compiled
        self._arguments = arguments
        self._runs = CallRuns(arguments)

    def findings(self) -> dict[str, Finding]:
        captured, runs = self._captured, self._runs
        program = interpreted(captured.pre_grad.first)
        expected = runs.run(program)
        self._refuse_changed_attributes(expected)
        actual = runs.run(captured.program(self._compiled))
        unchecked = list(dict.fromkeys(expected.not_float64 + actual.not_float64))
        gradients = expected.unchecked or actual.unchecked
        found = {FORWARD: Finding(unchecked=unchecked), BACKWARD: Finding()}
        if gradients:
            found[BACKWARD] = Finding(unchecked=[f"the gradients: {gradients}"])
        keys = runs.differing(program, expected, actual)
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
        captured, state = self._captured, self._runs.state
        blame = first_wrong_step(self._runs, captured.pre_grad, self._arguments) or self._wrong_decomposition()
        if blame is not None:
            return dict.fromkeys(directions, blame)
        wide: dict[str, Sequence[object]] = {}
        self._runs.run(captured.program(self._compiled, wide))
        narrow = self._graph_arguments
        given = self._joint_arguments(narrow), self._joint_arguments(wide)
        if given[0] is not None:
            blame = wrong_step(captured.joint, given[0], state, given[1])
            if blame is not None:
                return dict.fromkeys(directions, blame)
        found = (
            (direction, wrong_step(graphs, narrow[direction], state, wide[direction]))
            for direction, graphs in captured.post_grad.items()
            if direction in wide and direction in narrow
        )
        blames = {direction: blame for direction, blame in found if blame is not None}
        if blames:
            return blames
        graph, dtype = captured.pre_grad.first, captured.pre_grad.steps[0].dtype
        rounded = self._runs.differing(interpreted(graph), expected, actual, rounding=dtype)
        if rounded:  # decompositions compute constants, such as positions between pixels, in the model's dtype
            again = self._runs.differing(captured.program(self._compiled), actual, expected, rounding=dtype)
            rounded = [key for key in rounded if key in again]
        if not rounded:  # a pass rounded a constant
            return {}
        keys = rounded
        key = next((key for key in keys if is_of_backward(key) == (directions[0] == BACKWARD)), keys[0])
        place = place_of_result(captured.pre_grad.last, key)
        found_difference = difference(*self._runs.pair_of(key, expected, actual))
        return {directions[0]: _blame(place, Cause(CauseKind.TRACE), found_difference)}

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

        def run(given: Sequence[object], mode: WideMode) -> tuple[object, contextlib.AbstractContextManager[None]]:
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
        captured, state = self._captured, self._runs.state
        blame = changing_step(captured.pre_grad, self._arguments, state, casts=casts)
        if blame is not None:
            return {FORWARD: blame}
        later = captured.joint, *captured.post_grad.values()
        if not any(graphs.lowering_steps if casts else graphs.has_passes for graphs in later):
            return {}
        given = self._joint_arguments(self._graph_arguments)
        blame = changing_step(captured.joint, given, state, casts=casts) if given is not None else None
        if blame is not None:
            return {FORWARD: blame}
        found = (
            (direction, changing_step(graphs, self._graph_arguments[direction], state, casts=casts))
            for direction, graphs in captured.post_grad.items()
            if direction in self._graph_arguments
        )
        return {direction: blame for direction, blame in found if blame is not None}


def wrong_step(
    graphs: StageGraphs, arguments: Sequence[object], state: torch.Tensor, wide: Sequence[object] | None = None
) -> Blame | None:
    """The first pass of a stage after AOTAutograd's trace that changed what the graph computes in float64.

    Args:
        graphs: of the stage.
        arguments: of its graphs, in the model's dtypes.
        state: of the CPU's random numbers.
        wide: the arguments in float64, if they are not those in the model's dtypes.
    """
    with torch.no_grad():
        return first_wrong_step(CallRuns(wide or arguments, state), graphs, arguments)


def first_wrong_step(runs: CallRuns, graphs: StageGraphs, narrow: Sequence[object]) -> Blame | None:
    """The first pass of a stage that changed what the graph computes; ``narrow``: arguments in the model's dtypes."""
    if graphs.is_unchanged:
        return None
    before, old = graphs.steps[0], runs.run(interpreted(graphs.first))
    if not runs.differing(interpreted(graphs.first), old, runs.run(interpreted(graphs.last))):
        return None
    for step in graphs.steps[1:]:
        new = runs.run(interpreted(step.graph))
        keys = runs.differing(interpreted(before.graph), old, new)
        found = _changed_place(runs, before, step, narrow, keys, old, new) if keys else None
        if found is not None:
            return _blame(found.place, step.cause, found.difference)
        before, old = step, new
    return None


def _changed_place(
    runs: CallRuns,
    before: Step,
    step: Step,
    arguments: Sequence[object],
    keys: Sequence[Key],
    old: Outcome,
    new: Outcome,
) -> ChangedNode | None:
    """The node that a pass changed, or else the result; ``None`` if it rounded a constant to the model's dtype."""
    with contextlib.suppress(*KERNEL_ERRORS, IndexError):
        node = first_changed_node(before.graph, step.graph, arguments, runs.state, casts=False)
        if node is not None:
            return node
    keys = runs.differing(interpreted(before.graph), old, new, rounding=before.dtype)
    if not keys:
        return None
    found = difference(*runs.pair_of(keys[0], old, new))
    matched = next((node for node in before.graph.graph.nodes if node.name in step.matches), None)
    if matched is None:
        return ChangedNode(place_of_result(before.graph, keys[0]), found)
    return ChangedNode(place_of(matched), dataclasses.replace(found, elements=None))  # they are those of the result


def changing_step(
    graphs: StageGraphs, arguments: Sequence[object], state: torch.Tensor, *, casts: bool
) -> Blame | None:
    """The first pass of a stage that changed a node, see ``first_changed_node``.

    With ``casts``, the first of those that added casts to a lower precision, if these made a value less precise.
    ``arguments`` are those of the stage's graphs, in the model's dtypes.
    """
    if graphs.is_unchanged:
        return None
    for before, step in graphs.lowering_steps if casts else itertools.pairwise(graphs.steps):
        node = first_changed_node(before.graph, step.graph, arguments, state, casts=casts)
        if node is not None:
            return _blame(node.place, step.cause, node.difference)
    return None


def _blame(place: Place, cause: Cause, found: Verdict) -> Blame:
    if not found.is_wrong:  # less than the rounding of single operators
        found = dataclasses.replace(found, complaint="differs in float64")
    return Blame(place.name, cause, source=place.source, module=place.module, difference=found)


class ComparedCall:
    """One compared call of a captured graph: what it returns and changes, beside the values of its graphs.

    Args:
        captured: the graph.
        compiled: AOTAutograd's compiled function.
        arguments: of the call, which was not made yet.
        checks: whether the stages are compared, and the layout of the results: once for each set of sizes.

    Attributes:
        finish: makes the verdict on the compiled graph, with the finding on its results.
        selected: the call as it was selected.
    """

    def __init__(
        self, captured: CapturedGraph, compiled: Callable[..., object], arguments: Sequence[object], *, checks: bool
    ) -> None:
        self._captured, self._arguments = captured, captured.all_arguments(arguments)
        self.finish: Callable[[Finding], None] | None = None
        self.selected: SelectedRun | None = None
        self._eager: Outcome | None = None
        self._changed: set[int] = set()
        self._unchecked: list[str] = []
        if checks:
            self._try("the stages", lambda: captured.check(compiled, arguments))
            self._try("the captured graph", self._run_in_eager)
        self._hashes = hashes(self._arguments)
        unknown = [item for item, found in zip(self._arguments, self._hashes, strict=True) if found is None]
        if unknown:
            kinds = ", ".join(sorted({type(item).__name__ for item in unknown}))
            self._unchecked.append(f"whether {len(unknown)} arguments are changed: {kinds} without memory to read")

    def _try(self, what: str, compare: Callable[[], None]) -> None:
        try:
            compare()
        except NotRepeatableError as error:
            self._unchecked.append(f"{what}: {error}")
        except (*KERNEL_ERRORS, IndexError) as error:  # also in the user's call, or in float64 only
            self._unchecked.append(f"{what}: {_why(error, self._arguments)}")

    def _run_in_eager(self) -> None:
        runs = CallRuns(self._arguments, wide=False)
        eager = runs.run(interpreted(self._captured.pre_grad.first), gradients=False)
        written = [key for key in eager.values if isinstance(key, tuple)]
        self._captured.written |= {j for _, j in written}
        self._captured.has_run = True
        self._changed = {key[1] for key in written if not is_close(*runs.pair_of(key, _NOTHING, eager))}
        self._eager = dataclasses.replace(eager, values={key: _layout(value) for key, value in eager.values.items()})

    def finding(self, results: Sequence[object]) -> Finding:
        """Compares the results and the arguments after the call with eager's."""
        graph = self._captured.pre_grad.first
        complaints: dict[Key, str] = {}
        if self._eager is not None:
            for key, value in enumerate(results):
                complaints[key] = _complaint(self._eager.values.get(key), value)
        is_changed = [
            before is not None and before != after
            for before, after in zip(self._hashes, hashes(self._arguments), strict=True)
        ]
        tensors = [(j, value) for j, value in enumerate(self._arguments) if isinstance(value, torch.Tensor)]
        first = {storage_of(value): j for j, value in reversed(tensors) if self._hashes[j] is not None}
        for j in first.values() if self._captured.has_run else ():
            if is_changed[j] and j not in self._captured.written:
                complaints["argument", j] = "changed, and eager does not change it"
            elif j in self._changed and not is_changed[j]:
                complaints["argument", j] = "not changed, and eager changes it"
        wrong = [
            _blame(place_of_result(graph, key), Cause(CauseKind.RESULT), Verdict(text))
            for key, text in complaints.items()
            if text
        ]
        return Finding(wrong=wrong, unchecked=self._unchecked)


_NOTHING = Outcome({}, {})


def _why(error: Exception, arguments: Sequence[object]) -> str:
    """Why a call could not be run again."""
    classes = {type(item) for item in arguments if isinstance(item, torch.Tensor)}
    subclasses = sorted(item.__name__ for item in classes - {torch.Tensor, torch.nn.Parameter})
    if subclasses and isinstance(error, KERNEL_ERRORS):
        return f"{', '.join(subclasses)} does not run in float64"
    return exception_text(error)


def hashes(values: Sequence[object]) -> list[int | None]:
    """For each value, a hash of the memory that its elements are in, which is read once; 0 of a value that is no
    tensor, ``None`` if the memory cannot be read."""
    known: dict[int, int] = {}

    def hash_of(value: torch.Tensor) -> int | None:
        if is_strided(value):
            storage = storage_of(value)
            if storage not in known and value.device.type != "meta":
                memory: Any = as_array(_bytes_of(value).cpu())  # ``Tensor.numpy`` would keep the user from resizing it
                known[storage] = xxh3_64_intdigest(memory)
            return known.get(storage)
        parts = list(map(hash_of, _parts_of(value)))
        return None if not parts or None in parts else hash(tuple(parts))

    with torch.no_grad():
        return [hash_of(value) if isinstance(value, torch.Tensor) else 0 for value in values]


def _bytes_of(value: torch.Tensor) -> torch.Tensor:
    storage = value.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=value.device).set_(storage, 0, (storage.nbytes(),), (1,))


def _parts_of(value: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that a sparse tensor or one of a subclass consists of; empty if they are not known."""
    if is_traceable_wrapper_subclass(value):
        return [getattr(value, name) for name in value.__tensor_flatten__()[0]]
    if value.layout is torch.sparse_coo:
        return [value._indices(), value._values()]
    if value.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [value.crow_indices(), value.col_indices(), value.values()]
    if value.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [value.ccol_indices(), value.row_indices(), value.values()]
    return []


def _layout(value: object) -> object:
    """A tensor without its numbers."""
    if not is_strided(value):
        return value
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")


def _complaint(expected: object, actual: object) -> str:
    """How a result differs from eager's, but for the numbers in tensors."""
    if not isinstance(expected, torch.Tensor) or not isinstance(actual, torch.Tensor):
        return "" if is_close(expected, actual) else f"{_in_words(actual)} instead of {_in_words(expected)}"
    if expected.dtype != actual.dtype:
        return f"dtype {actual.dtype} instead of {expected.dtype}"
    if expected.shape != actual.shape:
        return f"shape {tuple(actual.shape)} instead of {tuple(expected.shape)}"
    if significant_strides(expected) != significant_strides(actual):
        return f"strides {tuple(actual.stride())} instead of {tuple(expected.stride())}"
    return ""


def _in_words(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else str(value)
