"""Collects the incoming and outgoing gradients of one call during the backward, with hooks on autograd's nodes.

A call adds one node or several to autograd's graph. Only the nodes where gradients of its results enter, and those
where gradients of its arguments leave, have hooks. So the gradients that this call adds are separate from those that
other calls add to the same argument, and the graph does not change.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd import Variable

from ..numerics.function_runs import version_of
from .call import Call
from .clocks import Clock
from .dispatch_modes import without_modes

_ACCUMULATES = 2**64 - 1
"""The sequence number of the nodes that accumulate the gradient of a leaf."""


class CallStart:
    """The state of a call's arguments before the call.

    Attributes:
        versions: the version counters of the tensor arguments.
        edges: by the edge of autograd's graph that carries the gradient of an argument, its first name.
    """

    def __init__(self, call: Call) -> None:
        self.versions = [version_of(value) for value in call.tensors.values()]
        self.edges: dict[tuple[Any, int], str] = {}
        self._first_node = torch.autograd._get_sequence_nr()
        for name, value in call.tensors.items() if call.has_gradients else ():
            if value.requires_grad:
                edge = torch.autograd.graph.get_gradient_edge(value)
                self.edges.setdefault((edge.node, edge.output_nr), name)

    def is_of_call(self, node: Any) -> bool:
        """Whether the call made a node of autograd's graph."""
        return self._first_node <= node._sequence_nr() < _ACCUMULATES


@dataclasses.dataclass
class Gradients:
    """The gradients of one call in one backward."""

    outputs: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)  # incoming, by the result's name
    inputs: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)  # added by the call, by argument
    clocks: list[Clock] = dataclasses.field(default_factory=list)  # of each node
    are_mixed: bool = False  # the gradient of one result includes that of another


class Hooks:
    """The hooks of one tool. ``end`` removes them all."""

    def __init__(self) -> None:
        self._handles: list[Any] = []
        self._clean_up_at = 2_000
        self.is_on = False

    def end(self) -> None:
        """Removes all hooks; backwards that run later report nothing."""
        self.is_on = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def watch(
        self, start: CallStart, results: Mapping[str, torch.Tensor], finished: Callable[[Gradients], None]
    ) -> None:
        """Adds hooks to the backward of a call, if it has one.

        ``finished`` is called when all gradients are there, at the latest when the backward ends. ``results`` are not
        kept: a node whose hooks hold its tensors is never freed.
        """
        if not start.edges:
            return
        self._handles += _CallHooks(self, start, results, finished).handles
        if len(self._handles) > self._clean_up_at:  # drop handles of freed graphs
            self._handles = [handle for handle in self._handles if handle.hooks_dict_ref() is not None]
            self._clean_up_at = max(self._clean_up_at, 2 * len(self._handles))


class _CallHooks:
    """Hooks on the nodes of one call."""

    def __init__(
        self,
        hooks: Hooks,
        start: CallStart,
        results: Mapping[str, torch.Tensor],
        finished: Callable[[Gradients], None],
    ) -> None:
        self._hooks = hooks
        self._finished = finished
        self._current: Gradients | None = None
        self._missing = 0
        self._clock = Clock()
        self.handles: list[Any] = []
        entries: dict[Any, dict[int, str]] = {}
        for name, value in results.items():
            node = value.grad_fn
            if node is not None and start.is_of_call(node):
                entries.setdefault(node, {})[value.output_nr] = name
        exits, self._are_mixed = _exits_of(entries, start)
        for node, names in exits.items():
            self.handles.append(node.register_prehook(functools.partial(self._enter, entries.get(node, {}))))
            self.handles.append(node.register_hook(functools.partial(self._leave, names)))

    def _enter(self, names: Mapping[int, str], gradients: Sequence[torch.Tensor | None]) -> None:
        if not self._hooks.is_on:
            return
        record = self._record()
        for position, name in names.items():
            if (gradient := gradients[position]) is not None:
                record.outputs[name] = gradient.detach()
        self._clock = Clock().__enter__()
        self._count(record)

    def _leave(self, names: Mapping[int, str], gradients: Sequence[torch.Tensor | None], _: object) -> None:
        if not self._hooks.is_on:
            return
        record = self._record()
        self._clock.__exit__()
        record.clocks.append(self._clock)
        for position, name in names.items():
            if (gradient := gradients[position]) is not None:
                with without_modes():
                    known = record.inputs.get(name)
                    record.inputs[name] = gradient.detach() if known is None else known + gradient.detach()
        self._count(record)

    def _record(self) -> Gradients:
        """The gradients of the current backward; its first hook also asks autograd for a callback at its end."""
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
        if record is self._current:
            if self._hooks.is_on:
                self._finished(record)
            self._current = None


def _exits_of(entries: Mapping[Any, object], start: CallStart) -> tuple[dict[Any, dict[int, str]], bool]:
    """The nodes of a call, with the positions where gradients of arguments leave each, and whether one entry leads to
    another."""
    exits: dict[Any, dict[int, str]] = {node: {} for node in entries}
    nodes, are_mixed = list(exits), False
    for node in nodes:
        for position, edge in enumerate(node.next_functions):
            following = edge[0]
            if edge in start.edges:
                exits[node][position] = start.edges[edge]
            elif following in entries:
                are_mixed = True
            elif following is not None and following not in exits and start.is_of_call(following):
                exits[following] = {}
                nodes.append(following)
    return exits, are_mixed
