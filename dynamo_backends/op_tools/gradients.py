"""The gradients that go into and come out of a call in the backward, by hooks on the nodes of autograd's graph.

A call makes one node of that graph or, if it is made of several operators, some. Those that the gradients of its
results enter and those that pass the gradients of its arguments on have hooks: so what this call adds to the gradient
of an argument is told from what others add, and the graph stays as it is.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.autograd import Variable

from ..numerics.program_execution import version_of
from .call import Call
from .clocks import Clock, device_of
from .dispatch_modes import aside

_ACCUMULATES = 2**64 - 1
"""The number of the nodes that accumulate the gradient of a leaf."""

Names: TypeAlias = dict[tuple[Any, int], list[str]]
"""The names of arguments, by the edge of autograd's graph at which their gradients arrive."""


class Before:
    """What has to be known of a call's arguments before it is made, for its results and gradients.

    Attributes:
        versions: how often each of ``call.tensors`` was changed in place.
        edges: where gradients of the arguments go; empty if there is no backward that can be seen.
    """

    def __init__(self, call: Call) -> None:
        self.versions = [version_of(value) for value in call.tensors.values()]
        self.edges: Names = {}
        self._first_node = torch.autograd._get_sequence_nr()
        for name, value in call.tensors.items() if call.has_gradients else ():
            if value.requires_grad:
                edge = torch.autograd.graph.get_gradient_edge(value)
                self.edges.setdefault((edge.node, edge.output_nr), []).append(name)

    def made_after(self, node: Any) -> bool:
        """Whether the call made a node of autograd's graph."""
        return self._first_node <= node._sequence_nr() < _ACCUMULATES


@dataclasses.dataclass
class Gradients:
    """The gradients of one call, as one backward has them.

    Attributes:
        outputs: the gradient of each result, by its name, as it enters the call's backward.
        inputs: what the call adds to the gradient of each argument, by its name; of one given twice, by the first.
        alike: for each of these names, all names of that argument.
        clocks: how long each node of the call ran, where that was asked for.
        are_mixed: whether the gradient of one result contains what another's brings.
    """

    outputs: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    inputs: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    alike: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    clocks: list[Clock] = dataclasses.field(default_factory=list)
    are_mixed: bool = False


class Hooks:
    """The hooks of one tool: made for calls that have a backward, and all taken off when the tool stops."""

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self._most = 2_000
        self.is_on = False

    def end(self) -> None:
        """Takes the hooks off; no gradients are wanted from now on."""
        self.is_on = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def watch(
        self,
        before: Before,
        results: Mapping[str, torch.Tensor],
        finished: Callable[[Gradients], None],
        *,
        with_times: bool = False,
    ) -> None:
        """After a call: puts hooks on its backward, if it has one.

        Args:
            before: of the call.
            results: the tensors that it gave, by name; not kept, as a node that holds its own hooks' tensors is never
                freed.
            finished: is given the gradients of the call as soon as all are there, or else at the end of the backward.
            with_times: whether each node of the call is timed.
        """
        if not before.edges:
            return
        self._handles += _Watch(self, before, results, finished, with_times=with_times).handles
        if len(self._handles) > self._most:  # those of graphs that are gone
            self._handles = [handle for handle in self._handles if handle.hooks_dict_ref() is not None]
            self._most = max(self._most, 2 * len(self._handles))


class _Watch:
    """Hooks on the nodes of one call."""

    def __init__(
        self,
        hooks: Hooks,
        before: Before,
        results: Mapping[str, torch.Tensor],
        finished: Callable[[Gradients], None],
        *,
        with_times: bool,
    ) -> None:
        self._hooks = hooks
        self._finished = finished
        self._current: Gradients | None = None
        self._missing = 0
        self._with_times = with_times
        self._clock: Clock | None = None
        self.handles: list[Any] = []
        entries: dict[Any, dict[int, str]] = {}
        for name, value in results.items():
            node = value.grad_fn
            if node is not None and before.made_after(node):
                entries.setdefault(node, {})[value.output_nr] = name
        nodes, leaving, self._are_mixed = _nodes_of(entries, before)
        for node in nodes:
            if node in entries or with_times:
                self.handles.append(node.register_prehook(functools.partial(self._enter, entries.get(node, {}))))
            if node in leaving or with_times:
                self.handles.append(node.register_hook(functools.partial(self._leave, leaving.get(node, {}))))

    def _enter(self, names: Mapping[int, str], gradients: Sequence[torch.Tensor | None]) -> None:
        if not self._hooks.is_on:
            return
        record = self._record()
        for position, name in names.items():
            if (gradient := gradients[position]) is not None:
                record.outputs[name] = gradient.detach()
        if self._with_times:
            self._clock = Clock(device_of(gradients)).__enter__()
        self._count(record)

    def _leave(self, names: Mapping[int, list[str]], gradients: Sequence[torch.Tensor | None], entered: object) -> None:
        if not self._hooks.is_on:
            return
        record = self._record()
        if self._clock is not None:
            self._clock.__exit__()
            record.clocks.append(self._clock)
            self._clock = None
        for position, alike in names.items():
            if (gradient := gradients[position]) is not None:
                record.alike[alike[0]] = alike
                with aside():
                    known = record.inputs.get(alike[0])
                    record.inputs[alike[0]] = gradient.detach() if known is None else known + gradient.detach()
        self._count(record)

    def _record(self) -> Gradients:
        """The gradients of the backward that runs; the first hook of it asks for its end to be told."""
        if self._current is None:
            record = self._current = Gradients(are_mixed=self._are_mixed)
            self._missing = len(self.handles)
            Variable._execution_engine.queue_callback(functools.partial(self._end, record))
        return self._current

    def _count(self, record: Gradients) -> None:
        self._missing -= 1
        if not self._missing:
            self._end(record)

    def _end(self, record: Gradients) -> None:
        if record is not self._current:
            return
        if self._hooks.is_on:
            self._finished(record)
        self._current = None


def _nodes_of(entries: Mapping[Any, object], before: Before) -> tuple[list[Any], dict[Any, dict[int, list[str]]], bool]:
    """The nodes that a call made, the positions at which they pass gradients of arguments on, and whether a node that
    a result's gradient enters is reached from another's."""
    found = list(entries)
    seen = set(entries)
    leaving: dict[Any, dict[int, list[str]]] = {}
    entered = False
    for node in found:
        for position, edge in enumerate(node.next_functions):
            following = edge[0]
            if following is None:
                continue
            if edge in before.edges:
                leaving.setdefault(node, {})[position] = before.edges[edge]
            elif following in entries:
                entered = True
            elif following not in seen and before.made_after(following):
                seen.add(following)
                found.append(following)
    return found, leaving, entered
