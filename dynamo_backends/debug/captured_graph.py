"""Dynamo's graph as it was captured, run by PyTorch with autograd: the reference for the results of a compiled graph.

Results, changed arguments and gradients are compared with it, in eager and in float64. If they differ, the stages in
between are compared too: the passes of ``pre_grad``, AOTAutograd's trace and decompositions, the passes of ``joint``.
``run_comparison`` compares the later stages.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

from ..common.operator_watchers import watchers_disabled
from ..dumps.blame import Cause, CauseKind
from ..exporter.decompositions import decomposition_table
from ..graphs import aot
from ..graphs.layout import significant_strides
from ..graphs.locations import UserName, set_user_name
from ..numerics.randomness import PrivateRandomness
from ..numerics.reference_runs import (
    NotRepeatableError,
    ReferenceRuns,
    Results,
    SharedCopies,
    as_given,
    copies,
    is_strided,
)
from ..numerics.verdicts import Verdict, verdict
from .chosen_runs import SelectedRun
from .interpreter import flat
from .rows import Blame, Finding, exception_text
from .stage_comparison import StageGraphs, Step, changed, copy_of, difference, name_of_result, run_graph
from .wrong_decomposition import DecompositionCheck, NodeTracker

logger = logging.getLogger(__name__)

KEPT_CALLS = 4
"""How many compared calls are kept for their backward."""


@dataclasses.dataclass(eq=False)
class JointGraphs(StageGraphs):
    """The graphs of the stage ``joint``."""

    arguments: list[object] = dataclasses.field(default_factory=list)  # see ``aot.keys_of_arguments``
    results: list[object] = dataclasses.field(default_factory=list)  # see ``aot.keys_of_results``

    def start(self, stage: str, graph: object) -> None:
        super().start(stage, graph)
        assert isinstance(graph, fx.GraphModule)
        self.arguments = aot.keys_of_arguments(graph)
        self.results = [*aot.keys_of_results(graph), *aot.keys_of_writes(graph).values()]

    def end(self, stage: str, graph: fx.GraphModule) -> None:
        if not self.steps:  # no pass is on
            self.start(stage, graph)
        super().end(stage, graph)

    def judge(
        self,
        values: Mapping[str, object],
        given: Sequence[object],
        state: torch.Tensor,
        *,
        gradients: bool,
        final: Results | None = None,
        reference: Results | None = None,
    ) -> tuple[Finding, Results | None]:
        """The first pass that made the gradients wrong, or the other results; and the results of the first graph.

        ``values`` are the known values of placeholders, ``given`` the arguments of the captured graph, if there is one;
        ``final`` and ``reference`` as in ``culprit``.
        """
        arguments = self._arguments(values, given, gradients=gradients)
        if arguments is None:
            return Finding(), None
        if isinstance(arguments, str):
            return Finding(unchecked=[arguments]), None
        kinds = {i: key for i, key in enumerate(self.results) if key is not None}
        keys = {i: key for i, key in kinds.items() if (isinstance(key, tuple) and key[0] == "gradient") == gradients}
        culprit, first = self.culprit(arguments, state, keys, final, reference)
        return Finding(culprit, unchecked=self.unchecked), first

    def _arguments(
        self, values: Mapping[str, object], given: Sequence[object], *, gradients: bool
    ) -> list[object] | str | None:
        """One value for each placeholder, or the reason why one is not known; ``None`` if nothing is compared."""
        if not self.steps or (not given and not any(step.is_pass for step in self.steps)):
            return None  # there is no captured graph to compare with, and no pass fired
        arguments: list[object] = []
        placeholders = self.first.graph.find_nodes(op="placeholder")
        for node, key in zip(placeholders, self.arguments, strict=True):
            kind, position = key if isinstance(key, tuple) else (None, 0)
            if node.name in values:
                arguments.append(values[node.name])
            elif kind == "argument" and given:
                arguments.append(given[position])
            elif kind == "tangent" and not gradients:
                arguments.append(None)  # the results of the forward do not depend on it
            else:
                return f"the passes of joint: the value of their input {node.name} is not known"
        return arguments


@dataclasses.dataclass(eq=False)
class PreGradGraphs(StageGraphs):
    """The graphs of the stage ``pre_grad``, with the same attributes as arguments as in AOTAutograd's graphs.

    A comparison must not change the user's tensors, so a graph that changes attributes gets copies as arguments.
    """

    attributes: list[torch.Tensor] = dataclasses.field(default_factory=list)  # the first arguments

    def end(self, stage: str, graph: fx.GraphModule) -> None:
        super().end(stage, graph)
        attributes = aot.lifted_attributes(graph)
        self.attributes = list(attributes.values())
        if attributes:
            self.steps = [dataclasses.replace(step, graph=_lifted(step.graph, list(attributes))) for step in self.steps]

    def drop(self) -> None:
        super().drop()
        self.attributes = []


def _lifted(module: fx.GraphModule, names: Sequence[str]) -> fx.GraphModule:
    """A copy of a graph that takes these attributes as its first arguments."""
    copied = copy_of(module)
    users: dict[object, list[fx.Node]] = collections.defaultdict(list)
    for node in copied.graph.find_nodes(op="get_attr"):
        users[node.target].append(node)
    with copied.graph.inserting_before(next(iter(copied.graph.nodes))):
        for name in names:
            placeholder = copied.graph.placeholder(name.replace(".", "_"))
            set_user_name(placeholder, UserName(name, is_static=True))
            for node in users[name]:
                node.replace_all_uses_with(placeholder)
                copied.graph.erase_node(node)
    return copied


class CapturedGraph:
    """One of Dynamo's graphs, with the stages up to the joint graph, and its compared calls.

    Args:
        opset: decides which operators are decomposed.

    Attributes:
        pre_grad, joint: the graphs of these stages.
    """

    def __init__(self, opset: int) -> None:
        self.pre_grad = PreGradGraphs()
        self.joint = JointGraphs()
        self._opset = opset
        self._calls: dict[int, ComparedCall] = {}
        self._numbers = itertools.count()
        self._active = threading.local()

    @property
    def current_call(self) -> ComparedCall | None:
        """The compared call that runs in this thread."""
        return getattr(self._active, "call", None)

    def begin_call(self, arguments: Sequence[object]) -> ComparedCall | None:
        """Copies the arguments of a call that is compared; ``None`` if they cannot be copied."""
        try:
            with watchers_disabled():
                return ComparedCall(self, self.all_arguments(arguments))
        except Exception as error:  # a tensor subclass may refuse to be copied; the user's run goes on
            logger.warning("a call is not compared: %s", exception_text(error))
            return None

    def run_in_call(self, compiled: Callable[..., Any], arguments: Sequence[object], call: ComparedCall | None) -> Any:
        """Runs the compiled graph as part of a compared call, if there is one."""
        self._active.call = call
        try:
            return compiled(*arguments)
        finally:
            self._active.call = None

    def all_arguments(self, arguments: Sequence[object]) -> list[object]:
        """The arguments of AOTAutograd's graph, from those of Dynamo's graph."""
        return [*self.pre_grad.attributes, *arguments]

    def keep_for_backward(self, call: ComparedCall, nodes: Sequence[torch.autograd.graph.Node]) -> None:
        """Keeps a compared call as long as one of these autograd nodes lives, so that its backward may run."""
        if not nodes:
            return
        for other in list(self._calls.values()):
            call.share_arguments(other)
        while len(self._calls) >= KEPT_CALLS:
            self._calls.pop(next(iter(self._calls)), None)
        number = next(self._numbers)
        self._calls[number] = call
        mark = _Mark()
        for node in nodes:
            node.metadata[mark] = None
        weakref.finalize(mark, self._calls.pop, number, None).atexit = False

    def find_call(self, saved: Mapping[str, object]) -> ComparedCall | None:
        """Finds the compared call that saved these values for its backward, and removes it.

        Names that only the backward has are ignored: the partitioner renames states of random numbers. A backward that
        reads no saved values belongs to any call.
        """
        for number, call in list(self._calls.items()):
            known = call.saved or {}
            common = saved.keys() & known
            if (common or not saved) and all(known[name] == _identity(saved[name]) for name in common):
                return self._calls.pop(number, None)
        return None

    def drop(self) -> None:
        """Frees the graphs and calls; no further run is compared."""
        self.pre_grad.drop()
        self.joint.drop()
        self._calls.clear()

    def decompositions(self) -> Mapping[object, Callable[..., Any]]:
        return decomposition_table(self._opset)


class _Mark:
    """Lives in the metadata of autograd nodes, as long as one of them does."""


def _nodes_of(values: Sequence[object]) -> list[torch.autograd.graph.Node]:
    """The autograd nodes of tensors, and of the tensors that these are views of."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    tensors += [value._base for value in tensors if value._base is not None]
    return [value.grad_fn for value in tensors if value.grad_fn is not None]


def _identity(value: object) -> object:
    """Identifies a tensor that a forward saves for its backward, without keeping its memory alive.

    An address is not enough: the next batch may be in the same buffer, or in memory that was freed. A weak reference to
    the storage still prevents another storage from getting the same id.
    """
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        return StorageWeakRef(value.untyped_storage()), value._version, value.shape
    return value


class ComparedCall:
    """One compared call of a captured graph, with what is needed to repeat it.

    Attributes:
        arguments: copies of the arguments of AOTAutograd's graph.
        saved: identities of the values that the forward saved for the backward, by node name.
        reference: the results of the captured graph, or its gradients, once they were computed.
        traced: the results of the first joint graph, if it was run.
        finish: makes the verdict on the compiled graph, with the finding on its results.
        fault: the verdict on the forward, if it is not ``ok``.
        selected: the run as it was selected.
    """

    def __init__(self, captured: CapturedGraph, arguments: Sequence[object]) -> None:
        self._captured = captured
        self.arguments = copies(arguments)
        self._nodes_before = set(_nodes_of(arguments))
        self.state = torch.get_rng_state()
        self._leaves = [not isinstance(item, torch.Tensor) or item.is_leaf for item in arguments]
        self._has_gradients = torch.is_grad_enabled()
        devices = {item.device.type for item in arguments if isinstance(item, torch.Tensor)} | {"cpu"}
        self._autocast = {
            device: torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
            for device in devices
            if torch.amp.is_autocast_available(device)
        }
        self.saved: dict[str, object] | None = None
        self.reference: Results | None = None
        self._unchecked: list[str] = []  # of the reference
        self.traced: Results | None = None
        self.finish: Callable[[Finding], None] | None = None
        self.fault = ""
        self.selected: SelectedRun | None = None

    def save(self, values: Mapping[str, object]) -> None:
        """Keeps the identities of the values that a forward saves for its backward, by node name."""
        self.saved = {name: _identity(value) for name, value in values.items()}

    def new_nodes(self, values: Sequence[object]) -> list[torch.autograd.graph.Node]:
        """The autograd nodes of results and arguments that the call created; can be called once."""
        before, self._nodes_before = self._nodes_before, set()
        return [node for node in _nodes_of(values) if node not in before]

    def share_arguments(self, other: ComparedCall) -> None:
        """Replaces copies by another call's equal copies, such as of unchanged weights."""
        tensors = filter(is_strided, [*self.arguments, *other.arguments])
        users = collections.Counter(map(_storage, tensors))
        alone = {storage for storage, count in users.items() if count == 1}
        for i, (ours, theirs) in enumerate(zip(self.arguments, other.arguments, strict=True)):
            if not is_strided(ours) or not is_strided(theirs) or not {_storage(ours), _storage(theirs)} <= alone:
                continue
            if _is_same_copy(ours, theirs):
                self.arguments[i] = theirs

    def run_forward(self) -> Finding:
        """Computes the ``reference``, the results of the captured graph; finds nothing."""
        self._run_reference(ReferenceRuns.outputs_alone)
        return Finding()

    def run_backward(self, tangents: Mapping[object, torch.Tensor], positions: Sequence[int]) -> Finding:
        """Computes the ``reference``, the gradients of the captured graph's arguments at these positions.

        ``tangents`` are the backward's input gradients, see ``ReferenceRuns.gradients``.

        Raises:
            NotRepeatableError: see ``ReferenceRuns.gradients``.
        """
        self._run_reference(lambda runs: _gradients(runs, tangents, positions))
        return Finding()

    def _run_reference(self, results_of: Callable[[ReferenceRuns], Results]) -> None:
        copied = SharedCopies(self.arguments, kept=False)  # runs with random rounding, which need some, are rare
        self.reference, inexact = self._run(self._captured.pre_grad.first, copied, results_of)
        self._unchecked = [f"the reference of {name} is not float64: {reason}" for name, reason in inexact.items()]

    def judge_joint(self, values: Mapping[str, object], *, gradients: bool, final: Results | None) -> Finding:
        """Compares the passes of ``joint``, see ``JointGraphs.judge``, and keeps the results of its first graph."""
        joint, reference = self._captured.joint, self.reference
        finding, self.traced = joint.judge(
            values, self.arguments, self.state, gradients=gradients, final=final, reference=reference
        )
        return finding

    def judge_forward(self, results: Sequence[object], arguments: Sequence[object]) -> Finding:
        """Compares the results of the compiled graph, and the arguments that it changed."""
        if self.reference is None:
            self.run_forward()
        reference, self.reference = self.reference, None
        assert reference is not None
        first, copied = self._captured.pre_grad.first, SharedCopies(self.arguments)
        culprit = self._culprit(
            reference, lambda step: self._run(step.graph, copied, ReferenceRuns.outputs_alone)[0], {}
        )
        returned: dict[object, object] = dict(enumerate(results))
        given = self._captured.all_arguments(arguments)
        written = {key: given[key[1]] for key in reference.eager if isinstance(key, tuple) and key[0] == "input"}
        wrong = _wrong(reference, returned | written, first) or _wrongly_laid_out(reference, returned, first)
        return Finding(culprit, wrong, unchecked=self._unchecked + self._captured.pre_grad.unchecked)

    def judge_backward(self, tangents: Mapping[object, torch.Tensor], gradients: Mapping[int, object]) -> Finding:
        """Compares the gradients that the compiled backward returned, by the position of the captured graph's argument.

        ``tangents`` as in ``run_backward``, which is called if it was not.
        """
        if self.reference is None:
            self.run_backward(tangents, list(gradients))
        first, copied = self._captured.pre_grad.first, SharedCopies(self.arguments)
        reference, self.reference = self.reference, None
        assert reference is not None

        def run(step: Step) -> Results:
            return self._run(step.graph, copied, lambda runs: _gradients(runs, tangents, list(gradients)))[0]

        culprit = self._culprit(reference, run, tangents)
        wrong = _wrong(reference, {("gradient", j): value for j, value in gradients.items()}, first)
        because = self.fault and f"its forward {self.fault}"
        return Finding(culprit, wrong, because, self._unchecked + self._captured.pre_grad.unchecked)

    def _run(
        self, graph: fx.GraphModule, copied: SharedCopies, results_of: Callable[[ReferenceRuns], Results]
    ) -> tuple[Results, Mapping[str, str]]:
        """Some results of a graph, and the operators without float64; see ``ReferenceRuns``."""

        def run(*args: object) -> list[object]:
            with self._as_called():
                return run_graph(graph, args)

        try:
            runs = ReferenceRuns(run, copied, self.state, self._leaves)
            return results_of(runs), runs.inexact
        except NotImplementedError as error:
            classes = {type(item) for item in self.arguments if isinstance(item, torch.Tensor)}
            subclasses = {item.__name__ for item in classes - {torch.Tensor, torch.nn.Parameter}}
            if not subclasses:
                raise
            raise NotRepeatableError(f"{', '.join(sorted(subclasses))} does not run in float64") from error

    @contextlib.contextmanager
    def _as_called(self) -> Iterator[None]:
        """The grad mode and autocast of the call."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self._has_gradients))
            for device, dtype in self._autocast.items():
                stack.enter_context(torch.autocast(device, dtype, enabled=dtype is not None))
            yield

    def _culprit(
        self, reference: Results, run: Callable[[Step], Results], tangents: Mapping[object, torch.Tensor]
    ) -> Blame | None:
        """The wrong pass of ``pre_grad``, or what is wrong in AOTAutograd's trace."""
        graphs, (traced, self.traced) = self._captured.pre_grad, (self.traced, None)
        graphs.unchecked = []
        last = reference
        if any(step.is_pass for step in graphs.steps):
            last = run(graphs.steps[-1])
            if graphs.lowers_precision or changed(reference, last):
                culprit = graphs.first_wrong(reference, run, self.arguments)
                if culprit is not None:
                    return culprit
        return self._trace(last, traced, tangents) if traced is not None else None

    def _trace(self, before: Results, traced: Results, tangents: Mapping[object, torch.Tensor]) -> Blame | None:
        """The wrong decomposition, or else AOTAutograd's trace as a whole."""
        common = [key for key in before.exact if key in traced.exact]
        before, traced = (item.under({key: key for key in common}) for item in (before, traced))
        if not changed(before, traced):
            return None
        last = self._captured.pre_grad.steps[-1].graph
        culprit = self._wrong_decomposition(last, tangents)
        differences = ((key, difference(before, traced, key)) for key in common)
        wrong = (_wrong_result(last, key, found, CauseKind.TRACE) for key, found in differences if found.is_wrong)
        return culprit or next(wrong, None)

    def _wrong_decomposition(self, graph: fx.GraphModule, tangents: Mapping[object, torch.Tensor]) -> Blame | None:
        tracker = NodeTracker(graph)
        check = DecompositionCheck(self._captured.decompositions(), tracker)
        with self._as_called():
            given = list(map(as_given, copies(self.arguments), self._leaves))
            with PrivateRandomness(self.state), check:
                results = flat(tracker.run(*given, enable_io_processing=False))
                ends = [(results[key], grad) for key, grad in tangents.items() if isinstance(key, int)]
                ends = [(end, grad) for end, grad in ends if isinstance(end, torch.Tensor) and end.requires_grad]
                if ends:
                    torch.autograd.backward([end for end, _ in ends], [grad for _, grad in ends])
        return check.culprit


def _gradients(runs: ReferenceRuns, tangents: Mapping[object, torch.Tensor], positions: Sequence[int]) -> Results:
    return runs.gradients(tangents, positions).under({j: ("gradient", j) for j in positions})


def _storage(value: torch.Tensor) -> int:
    return value.untyped_storage()._cdata


def _is_same_copy(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have equal metadata and storages."""
    kinds = [
        (item.dtype, item.device, item.shape, item.stride(), item.storage_offset(), item.requires_grad, item.is_leaf)
        for item in (one, other)
    ]
    if kinds[0] != kinds[1]:
        return False
    first, second = (
        torch.empty(0, dtype=torch.uint8, device=item.device).set_(item.untyped_storage()) for item in (one, other)
    )
    return torch.equal(first, second)


def _wrong_result(graph: fx.GraphModule, key: object, found: Verdict, kind: CauseKind = CauseKind.RESULT) -> Blame:
    name, source = name_of_result(graph, key)
    return Blame(name, Cause(kind), source=source, difference=found)


def _wrongly_laid_out(reference: Results, actual: Mapping[object, object], graph: fx.GraphModule) -> list[Blame]:
    """The results whose significant strides differ from eager's."""
    pairs = ((key, reference.eager.get(key), value) for key, value in actual.items())
    return [
        _wrong_result(graph, key, Verdict(f"strides {tuple(value.stride())} instead of {tuple(eager.stride())}"))
        for key, eager, value in pairs
        if isinstance(eager, torch.Tensor) and isinstance(value, torch.Tensor) and value.shape == eager.shape
        if significant_strides(value) != significant_strides(eager)
    ]


def _wrong(reference: Results, actual: Mapping[object, object], graph: fx.GraphModule) -> list[Blame]:
    """The results with errors that neither eager's error nor random rounding explains."""
    found = {}
    for key, value in actual.items():
        eager = reference.eager.get(key)
        if isinstance(eager, torch.Tensor) and isinstance(value, torch.Tensor) and eager.dtype != value.dtype:
            found[key] = Verdict(f"dtype {value.dtype} instead of {eager.dtype}")
        else:
            found[key] = verdict(value, eager, reference.exact.get(key))
    inaccurate = [key for key, item in found.items() if item.is_wrong and item.is_of_size]
    reference = reference.under({key: key for key in inaccurate})  # random rounding computes no others
    found |= {key: reference.verdict(actual[key], key) for key in inaccurate}
    return [_wrong_result(graph, key, item) for key, item in found.items() if item.is_wrong]
