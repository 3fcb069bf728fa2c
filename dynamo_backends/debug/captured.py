"""The user's program beside the compiled one: Dynamo's graph as it was captured, run by PyTorch, with autograd.

What a compiled graph returned, wrote into its arguments and gave as gradients is judged by it, in eager and in
float64. Where a result is wrong, or a stage changed what is computed, the stages in between say which: the passes of
``pre_grad``, AOTAutograd's trace and the decompositions, the passes of ``joint``. ``judge`` compares the later ones.
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

from .. import aot
from ..dumps.blame import Cause, Kind
from ..errors import first_line
from ..exporter.decompositions import decomposition_table
from ..exporter.locations import UserName, set_user_name
from ..layout import significant_strides
from ..numerics.differences import Deviation, discrete_difference, is_discrete, value_difference
from ..numerics.distance import distance, is_carried
from ..numerics.products import Products, SharedProducts
from ..numerics.randomness import PrivateRandomness
from ..numerics.twice import Results, Twice, copies
from ..watchers import unseen
from .beside import Beside
from .choice import ChosenRun
from .decomposed import find_wrong_decomposition
from .stages import Culprit, StageGraphs, Step, beside, changed, copy_of, difference, interpret, name_of_result

logger = logging.getLogger(__name__)

KEPT_CALLS = 4
"""Calls whose backward may still come that are kept for it, the latest ones."""

_TURNED = 0.01
_TURNED_IN_HALF = 0.5
"""The share of a result's comparisons and indices that another rounding may turn; in half precision, values tie."""


@dataclasses.dataclass(frozen=True)
class WrongResult:
    """A result that is not right: what it is called, its line or ``""``, and how it is wrong."""

    name: str
    source: str
    said: Deviation

    def __str__(self) -> str:
        return f"{self.name} ({self.source or 'no source line'}): {self.said}"


@dataclasses.dataclass(frozen=True)
class Finding:
    """What the captured graph says of a run.

    Attributes:
        culprit: the stage, pass or decomposition that is wrong, or ``None``.
        wrong: the results that are not right though no stage is to blame.
        because: what explains them, or ``""``.
        unchecked: what could not be compared, with the reason.
    """

    culprit: Culprit | None = None
    wrong: list[WrongResult] = dataclasses.field(default_factory=list)
    because: str = ""
    unchecked: list[str] = dataclasses.field(default_factory=list)


class JointGraphs(StageGraphs):
    """The graphs of the stage ``joint``.

    Attributes:
        arguments, results: what they take and return, see ``aot.keys_of_arguments`` and ``aot.keys_of_results``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.arguments: list[object] = []
        self.results: list[object] = []

    def start(self, stage: str, graph: object) -> None:
        super().start(stage, graph)
        assert isinstance(graph, fx.GraphModule)
        self.arguments, self.results = aot.keys_of_arguments(graph), aot.keys_of_results(graph)

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
        ends: tuple[Beside, Beside] | None = None,
    ) -> tuple[Finding, Results | None]:
        """The first pass that changed the results, or the gradients; and what the first graph gave, by its keys.

        Args:
            values: what placeholders hold, by name, as far as the direction knows them.
            given: the arguments of the captured graph; none where there is no captured graph.
            state: of the CPU's random numbers.
            gradients: whether the gradients are judged, or the results.
            ends: see ``culprit``.
        """
        arguments = self._arguments(values, given, gradients=gradients)
        if arguments is None:
            return Finding(), None
        if isinstance(arguments, str):
            return Finding(unchecked=[arguments]), None
        judged = self._judged(gradients=gradients)
        self.gives_gradients = gradients
        culprit, first = self.culprit(arguments, state, judged, ends)
        by_key = first.under({i: self.results[judged[i]] for i in first.exact if isinstance(i, int)})
        return Finding(culprit, unchecked=self.unchecked), by_key

    def forward_ends(self, values: Mapping[str, object], given: Sequence[object]) -> tuple[Beside, Beside] | None:
        """The first and last graph, for their results, to read along with a forward; see ``judge``."""
        arguments = self._arguments(values, given, gradients=False)
        return self.ends(arguments, self._judged(gradients=False)) if isinstance(arguments, list) else None

    def _judged(self, *, gradients: bool) -> list[int]:
        return [i for i, key in enumerate(self.results) if key is not None and _is_gradient(key) == gradients]

    def _arguments(
        self, values: Mapping[str, object], given: Sequence[object], *, gradients: bool
    ) -> list[object] | str | None:
        """One value for each placeholder; in words, why there is not; ``None`` if there is nothing to judge."""
        if not self.steps or (not given and not any(step.is_pass for step in self.steps)):
            return None  # with nothing before it to compare with, and no pass that fired
        arguments: list[object] = []
        placeholders = self.first.graph.find_nodes(op="placeholder")
        for node, key in zip(placeholders, self.arguments, strict=True):
            kind, position = key if isinstance(key, tuple) else (None, 0)
            if node.name in values:
                arguments.append(values[node.name])
            elif kind == "argument" and given:
                arguments.append(given[position])
            elif kind == "tangent" and not gradients:
                arguments.append(None)  # no result of the forward depends on it
            else:
                return f"the passes of joint: {node.name}, which they were given, is not handed to this graph"
        return arguments


class CapturedGraphs(StageGraphs):
    """The graphs of the stage ``pre_grad``, with the attributes that AOTAutograd makes arguments as arguments.

    As attributes they would be the user's own, and a graph that changes them would change them once more.

    Attributes:
        attributes: the tensors that are the first arguments.
    """

    def __init__(self) -> None:
        super().__init__()
        self.attributes: list[torch.Tensor] = []

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


class Captured:
    """One of Dynamo's graphs, with the stages up to the joint graph.

    Args:
        opset: decides which operators are decomposed.

    Attributes:
        pre_grad, joint: the graphs of these stages.
    """

    def __init__(self, opset: int) -> None:
        self.pre_grad = CapturedGraphs()
        self.joint = JointGraphs()
        self._opset = opset
        self._calls: dict[int, Call] = {}
        self._numbers = itertools.count()
        self._active = threading.local()

    @property
    def call(self) -> Call | None:
        """The call that is running in this thread and is compared."""
        return getattr(self._active, "call", None)

    def call_for(self, arguments: Sequence[object]) -> Call | None:
        """What the captured graph needs to run beside a call of the compiled one; ``None`` if it cannot."""
        try:
            with unseen():
                return Call(self, self.all_arguments(arguments))
        except Exception as error:  # a tensor of another's class may be copied in no way; the user's run goes on
            logger.warning("a call is not compared: %s: %s", type(error).__name__, first_line(str(error)))
            return None

    def called(self, function: Callable[..., Any], arguments: Sequence[object], call: Call | None) -> Any:
        """Calls the compiled graph, whose runs are those of a compared call, if there is one."""
        self._active.call = call
        try:
            return function(*arguments)
        finally:
            self._active.call = None

    def all_arguments(self, arguments: Sequence[object]) -> list[object]:
        """What AOTAutograd's graph takes, where Dynamo's takes these."""
        return [*self.pre_grad.attributes, *arguments]

    def keep_for_backward(self, call: Call, graph: Sequence[torch.autograd.graph.Node]) -> None:
        """Keeps a call as long as its backward may come.

        Args:
            call: the call; its forward is judged.
            graph: the nodes of autograd's graph by which the user can reach the backward. With the last of them the
                call is dropped.
        """
        if not graph:
            return
        for other in list(self._calls.values()):
            call.share_arguments(other)
        while len(self._calls) >= KEPT_CALLS:
            self._calls.pop(next(iter(self._calls)), None)
        number = next(self._numbers)
        self._calls[number] = call
        mark = _Mark()
        for node in graph:
            node.metadata[mark] = None
        weakref.finalize(mark, self._calls.pop, number, None).atexit = False

    def release_references(self) -> None:
        """Drops autograd's graphs, in eager and in float64, of the calls that are kept.

        Where a call follows another whose backward has not come, it may take long or never come; the reference is then
        computed again for it. What is kept until then are the arguments.
        """
        for call in list(self._calls.values()):
            call.release_reference()

    def call_of(self, saved: Mapping[str, object]) -> Call | None:
        """The compared call that handed these values to its backward; each call is found once.

        The partitioner renames states of random numbers in the backward: what has no namesake does not count. A
        backward that was handed nothing does not depend on the call.
        """
        for number, call in list(self._calls.items()):
            handed = call.saved or {}
            common = saved.keys() & handed
            if (common or not saved) and all(_is_handed_over(handed[name], saved[name]) for name in common):
                return self._calls.pop(number, None)
        return None

    def drop(self) -> None:
        """Forgets the graphs and calls; no run will be compared any more."""
        self.pre_grad.drop()
        self.joint.drop()
        self._calls.clear()

    def decompositions(self) -> Mapping[object, Callable[..., Any]]:
        return decomposition_table(self._opset)


class _Mark:
    """Lives in autograd's nodes, as long as one of them does."""


def _nodes_of(values: Sequence[object]) -> list[torch.autograd.graph.Node]:
    """The nodes of autograd's graph that computed tensors, and those that computed what these are views of."""
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    tensors += [value._base for value in tensors if value._base is not None]
    return [value.grad_fn for value in tensors if value.grad_fn is not None]


class _HandedOver:
    """A tensor that a forward saves for its backward, to be known again; its memory is not kept alive.

    An address would not do: the next batch may lie in the same buffer, or in memory that was let go. The reference to
    the storage, though weak, keeps its place from being another storage's.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._version = tensor._version
        self._shape = tensor.shape

    def is_(self, tensor: torch.Tensor) -> bool:
        return (
            self._storage.cdata == tensor.untyped_storage()._cdata
            and self._version == tensor._version
            and self._shape == tensor.shape
        )


def _is_handed_over(saved: object, value: object) -> bool:
    if isinstance(saved, _HandedOver):
        return isinstance(value, torch.Tensor) and saved.is_(value)
    return saved == value


class Call:
    """One compared call of a captured graph: what it was given, and what PyTorch makes of it.

    Attributes:
        saved: by the name of the node, the values that the forward handed to the backward, to be known again.
        traced: what the first joint graph gave, if it was run.
        products: of float64, that several graphs of the call compute.
        finish: makes the verdict on the graph that ran, from what is found in the results.
        fault: the verdict on the forward, if it is not ``ok``.
        chosen: its sizes; ``None`` where nobody chose it.
    """

    def __init__(self, captured: Captured, arguments: Sequence[object]) -> None:
        self._captured = captured
        self._arguments = copies(arguments)
        self._nodes_before = set(_nodes_of(arguments))
        self._state = torch.get_rng_state()
        self._leaves = [not isinstance(item, torch.Tensor) or item.is_leaf for item in arguments]
        self._has_gradients = torch.is_grad_enabled()
        devices = {item.device.type for item in arguments if isinstance(item, torch.Tensor)} | {"cpu"}
        self._autocast = {
            device: torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
            for device in devices
            if torch.amp.is_autocast_available(device)
        }
        self._reference: Twice | None = None
        self._gradients: tuple[Results, list[str]] | None = None
        self.saved: dict[str, object] | None = None
        self.traced: Results | None = None
        self.products = Products()
        self.finish: Callable[[Finding], None] | None = None
        self.fault = ""
        self.chosen: ChosenRun | None = None

    @property
    def state(self) -> torch.Tensor:
        """Of the CPU's random numbers when the call began."""
        return self._state

    def save(self, values: Mapping[str, object]) -> None:
        """The values a forward hands to its backward, by the name of the node."""
        self.saved = {
            name: _HandedOver(value) if isinstance(value, torch.Tensor) and value.layout is torch.strided else value
            for name, value in values.items()
        }

    def new_nodes(self, values: Sequence[object]) -> list[torch.autograd.graph.Node]:
        """The nodes of autograd's graph that the call made; to be asked for once.

        Args:
            values: its results and arguments. Those that it did not write into have nodes that live on without it.
        """
        before, self._nodes_before = self._nodes_before, set()
        return [node for node in _nodes_of(values) if node not in before]

    def share_arguments(self, other: Call) -> None:
        """Takes another call's copies of the arguments that are the same, such as weights that no step changed."""
        ours, theirs = _memories_of_one(self._arguments), _memories_of_one(other._arguments)
        for i in ours.keys() & theirs.keys():
            if _is_same_copy(ours[i], theirs[i]):
                self._arguments[i] = theirs[i]

    def release_reference(self) -> None:
        """Drops what PyTorch computed of the call; ``differentiate`` computes it again."""
        self._reference = None
        self.products.clear()

    def argument(self, position: int) -> object:
        return self._arguments[position]

    def joint_ends(self, values: Mapping[str, object]) -> tuple[Beside, Beside] | None:
        """The joint graph before and after its passes, to read along with a forward; see ``judge_joint``."""
        return self._captured.joint.forward_ends(values, self._arguments)

    def judge_joint(
        self, values: Mapping[str, object], *, gradients: bool, ends: tuple[Beside, Beside] | None = None
    ) -> Finding:
        """Compares the passes of ``joint``, and keeps what the joint graph gave before them.

        Args:
            values: what its placeholders hold, by name, as far as the direction knows them.
            gradients: whether its gradients are judged, or its results.
            ends: what read along with a forward.
        """
        with SharedProducts(self.products, adds=False):
            finding, self.traced = self._captured.joint.judge(
                values, self._arguments, self._state, gradients=gradients, ends=ends
            )
        if gradients:
            self.products.clear()
        return finding

    def judge_forward(self, results: Sequence[object], arguments: Sequence[object]) -> Finding:
        """Compares what the compiled graph returned, and what it left in its arguments."""
        steps = self._captured.pre_grad.steps
        self.products.next_round()
        self._reference = self._run(steps[0].graph, self.products)
        self.products.drop_earlier()
        if self.saved is None:
            self.products.clear()  # there is no backward
        reference = self._reference.outputs
        unchecked = _inexact(self._reference)
        culprit, before = self._pre_grad(steps, reference, self._outputs_of)
        traced, self.traced = self.traced, None
        if culprit is None and traced is not None:
            culprit = self._trace(before, traced, {})
        actual: dict[object, object] = dict(enumerate(results))
        given = self._captured.all_arguments(arguments)
        actual |= {("input", j): given[j] for j in _changed_inputs(reference)}
        wrong = _wrong(reference, actual, steps[0].graph) + self._wrongly_decided(results)
        wrong = wrong or _wrongly_laid_out(reference, results, steps[0].graph)
        return Finding(culprit, wrong, unchecked=unchecked + self._captured.pre_grad.unchecked)

    def _wrongly_decided(self, results: Sequence[object]) -> list[WrongResult]:
        """The results without floating-point values of which more differ than rounding may turn."""
        assert self._reference is not None
        reference, graph = self._reference.outputs.eager, self._captured.pre_grad.first
        pairs = [
            (i, eager, value)
            for i, value in enumerate(results)
            if isinstance(eager := reference.get(i), torch.Tensor) and isinstance(value, torch.Tensor)
            if is_discrete(eager) and eager.shape == value.shape and not torch.equal(eager, value)
        ]
        if not pairs:
            return []
        with self._as_called():
            exact = self._reference.decided_in_float64(lambda *args: interpret(graph, args), self._arguments)
        found = []
        for i, eager, value in pairs:
            sure = eager == exact[i]  # where float64 differs from eager, rounding decides
            said = discrete_difference(eager[sure], value[sure], self._share_turned_by_rounding())
            if said and sure.sum() > 1:
                found.append(WrongResult(*name_of_result(graph, i), Deviation(said)))
        return found

    def _share_turned_by_rounding(self) -> float:
        """How many of the comparisons and indices of a graph another rounding may turn at most."""
        half = (torch.float16, torch.bfloat16)
        is_half = any(dtype in half for dtype in self._autocast.values()) or any(
            isinstance(value, torch.Tensor) and value.dtype in half for value in self._arguments
        )
        return _TURNED_IN_HALF if is_half else _TURNED

    def differentiate(self, tangents: Mapping[object, torch.Tensor], of: Sequence[int]) -> None:
        """Computes the gradients that a backward is judged by, and lets go of what autograd kept for them.

        Args:
            tangents: what the backward was given, see ``Twice.gradients``.
            of: the positions of the captured graph's arguments that require a gradient.

        Raises:
            NotRepeatableError: see ``Twice.gradients``.
        """
        reference, self._reference = self._reference, None
        if reference is None:  # it was released
            reference = self._run(self._captured.pre_grad.steps[0].graph)
        self._gradients = _keyed(reference.gradients(tangents, of)), _inexact(reference)

    def judge_backward(self, tangents: Mapping[object, torch.Tensor], gradients: Mapping[int, object]) -> Finding:
        """Compares the gradients the compiled backward returned.

        Args:
            tangents: what the backward was given, see ``Twice.gradients``.
            gradients: by the position of the captured graph's argument, of those that require one.
        """
        positions = list(gradients)
        if self._gradients is None:
            self.differentiate(tangents, positions)
        assert self._gradients is not None
        reference, unchecked = self._gradients
        self._gradients = None
        steps = self._captured.pre_grad.steps

        def run(step: Step) -> Results:
            return _keyed(self._run(step.graph).gradients(tangents, positions))

        culprit, before = self._pre_grad(steps, reference, run)
        traced, self.traced = self.traced, None
        if culprit is None and traced is not None:
            culprit = self._trace(before, traced, tangents)
        actual: dict[object, object] = {("gradient", j): gradients[j] for j in positions}
        wrong = _wrong(reference, actual, steps[0].graph)
        return Finding(
            culprit, wrong, self.fault and f"its forward {self.fault}", unchecked + self._captured.pre_grad.unchecked
        )

    def _run(self, graph: fx.GraphModule, products: Products | None = None) -> Twice:
        with self._as_called():
            return Twice(lambda *args: interpret(graph, args), self._arguments, self._state, self._leaves, products)

    @contextlib.contextmanager
    def _as_called(self) -> Iterator[None]:
        """The grad mode and autocast of the call."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self._has_gradients))
            for device, dtype in self._autocast.items():
                stack.enter_context(torch.autocast(device, dtype, enabled=dtype is not None))
            yield

    def _outputs_of(self, step: Step) -> Results:
        return self._run(step.graph).outputs

    def _pre_grad(
        self, steps: Sequence[Step], reference: Results, run: Callable[[Step], Results]
    ) -> tuple[Culprit | None, Results]:
        """The culprit among the passes of ``pre_grad``, and the results after them."""
        self._captured.pre_grad.unchecked = []
        if not any(step.is_pass for step in steps):
            return None, reference
        last = run(steps[-1])
        if not changed(reference, last):
            return None, last
        culprit = self._captured.pre_grad.first_wrong(reference, run, self._arguments)
        return culprit, last

    def _trace(self, before: Results, traced: Results, tangents: Mapping[object, torch.Tensor]) -> Culprit | None:
        """What AOTAutograd's trace changed: a decomposition, or the trace as a whole."""
        common = [key for key in before.exact if key in traced.exact]
        before, traced = (item.under({key: key for key in common}) for item in (before, traced))
        if not changed(before, traced):
            return None
        last = self._captured.pre_grad.steps[-1].graph
        culprit = self._wrong_decomposition(last, tangents)
        if culprit is not None:
            return culprit
        for key in common:
            said = difference(before, traced, key)
            if said:
                return Culprit(*name_of_result(last, key), Cause(Kind.TRACE), said)
        return None

    def _wrong_decomposition(self, graph: fx.GraphModule, tangents: Mapping[object, torch.Tensor]) -> Culprit | None:
        arguments = copies(self._arguments)
        given = [
            item.clone() if isinstance(item, torch.Tensor) and item.requires_grad and not is_leaf else item
            for item, is_leaf in zip(arguments, self._leaves, strict=True)
        ]

        def gradients(args: Sequence[object], results: Sequence[object]) -> None:
            ends = [(results[key], grad) for key, grad in tangents.items() if isinstance(key, int)]
            ends = [(end, grad) for end, grad in ends if isinstance(end, torch.Tensor) and end.requires_grad]
            if ends:
                torch.autograd.backward([end for end, _ in ends], [grad for _, grad in ends])

        with PrivateRandomness(self._state), self._as_called():
            return find_wrong_decomposition(graph, self._captured.decompositions(), given, gradients)


def _memories_of_one(values: Sequence[object]) -> dict[int, torch.Tensor]:
    """The strided tensors whose memory no other one has, by position."""
    tensors = {
        i: value
        for i, value in enumerate(values)
        if isinstance(value, torch.Tensor) and type(value) is torch.Tensor and value.layout is torch.strided
    }
    count = collections.Counter(value.untyped_storage()._cdata for value in tensors.values())
    return {i: value for i, value in tensors.items() if count[value.untyped_storage()._cdata] == 1}


def _is_same_copy(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are the same to autograd and bit for bit, also between their elements."""
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


def _is_gradient(key: object) -> bool:
    return isinstance(key, tuple) and key[0] == "gradient"


def _keyed(gradients: Results) -> Results:
    eager: dict[object, object] = {("gradient", j): value for j, value in gradients.eager.items()}
    exact: dict[object, object] = {("gradient", j): value for j, value in gradients.exact.items()}
    return Results(eager, exact)


def _inexact(twice: Twice) -> list[str]:
    return [f"the reference of {name} is not float64: {reason}" for name, reason in twice.inexact.items()]


def _changed_inputs(results: Results) -> Iterator[int]:
    return (key[1] for key in results.eager if isinstance(key, tuple) and key[0] == "input")


def _wrongly_laid_out(reference: Results, results: Sequence[object], graph: fx.GraphModule) -> list[WrongResult]:
    """The results with other strides than eager's, where they address something."""
    found = []
    for i, value in enumerate(results):
        eager = reference.eager.get(i)
        if isinstance(value, torch.Tensor) and isinstance(eager, torch.Tensor) and value.shape == eager.shape:
            ours, theirs = significant_strides(value), significant_strides(eager)
            if ours != theirs:
                said = f"strides {tuple(value.stride())} instead of {tuple(eager.stride())}"
                found.append(WrongResult(*name_of_result(graph, i), Deviation(said)))
    return found


def _wrong(reference: Results, actual: Mapping[object, object], graph: fx.GraphModule) -> list[WrongResult]:
    """The results that are further from float64 than eager, rounding and its growth explain."""
    found = []
    for key, value in actual.items():
        eager, exact = reference.eager.get(key), reference.exact.get(key)
        if is_discrete(eager) and is_discrete(value):
            continue
        said = value_difference(eager, exact, value, beside(reference, key))
        if isinstance(eager, torch.Tensor) and isinstance(value, torch.Tensor) and isinstance(exact, torch.Tensor):
            if eager.dtype != value.dtype:
                said = Deviation(f"dtype {value.dtype} instead of {eager.dtype}")
            elif said and value.shape == exact.shape:
                found_distance = distance(value.detach(), exact)
                if is_carried(found_distance, value.dtype, beside(reference, key)):
                    said = Deviation()
        if said:
            found.append(WrongResult(*name_of_result(graph, key), said))
    return found
