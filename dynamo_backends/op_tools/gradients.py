"""Collects the incoming and outgoing gradients of one call during the backward, with hooks on autograd's nodes.

A call adds one node or several to autograd's graph. Only the nodes where gradients of its results enter, and those
where gradients of its arguments leave, have hooks. So the gradients that this call adds are separate from those that
other calls add to the same argument, and the graph does not change.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.autograd import Variable

from ..numerics.function_runs import version_of
from .call import Call
from .clocks import Clock, device_of
from .dispatch_modes import without_modes

_ACCUMULATES = 2**64 - 1
"""The sequence number of the nodes that accumulate the gradient of a leaf."""

_Edges: TypeAlias = dict[tuple[Any, int], str]
"""The first name of each argument, by the edge of autograd's graph that carries its gradient."""


class CallStart:
    """The state of a call's arguments before the call."""

    def __init__(self, call: Call) -> None:
        self.versions = [version_of(value) for value in call.tensors.values()]
        self.edges: _Edges = {}  # where gradients of the arguments leave
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
    clocks: list[Clock] = dataclasses.field(default_factory=list)  # of each node, if nodes are timed
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
        self,
        start: CallStart,
        results: Mapping[str, torch.Tensor],
        finished: Callable[[Gradients], None],
        *,
        with_times: bool = False,
    ) -> None:
        """Adds hooks to the backward of a call, if it has one.

        ``finished`` is called when all gradients are there, at the latest when the backward ends. ``results`` are not
        kept: a node whose hooks hold its tensors is never freed.
        """
        if not start.edges:
            return
        self._handles += _CallHooks(self, start, results, finished, with_times=with_times).handles
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
            if node is not None and start.is_of_call(node):
                entries.setdefault(node, {})[value.output_nr] = name
        nodes, exits, self._are_mixed = _nodes_of(entries, start)
        for node in nodes:
            if node in entries or with_times:
                self.handles.append(node.register_prehook(functools.partial(self._enter, entries.get(node, {}))))
            if node in exits or with_times:
                self.handles.append(node.register_hook(functools.partial(self._leave, exits.get(node, {}))))

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

    def _leave(self, names: Mapping[int, str], gradients: Sequence[torch.Tensor | None], _: object) -> None:
        if not self._hooks.is_on:
            return
        record = self._record()
        if self._clock is not None:
            self._clock.__exit__()
            record.clocks.append(self._clock)
            self._clock = None
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
        if record is not self._current:
            return
        if self._hooks.is_on:
            self._finished(record)
        self._current = None


def _nodes_of(entries: Mapping[Any, object], start: CallStart) -> tuple[list[Any], dict[Any, dict[int, str]], bool]:
    """The nodes of a call, the positions where gradients of arguments leave them, and whether one entry leads to
    another."""
    nodes = list(entries)
    seen = set(entries)
    exits: dict[Any, dict[int, str]] = {}
    are_mixed = False
    for node in nodes:
        for position, edge in enumerate(node.next_functions):
            following = edge[0]
            if following is None:
                continue
            if edge in start.edges:
                exits.setdefault(node, {})[position] = start.edges[edge]
            elif following in entries:
                are_mixed = True
            elif following not in seen and start.is_of_call(following):
                seen.add(following)
                nodes.append(following)
    return nodes, exits, are_mixed
