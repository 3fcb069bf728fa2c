"""Collects the incoming and outgoing gradients of one call during the backward, with hooks on autograd's nodes.

A call adds one node or several to autograd's graph. Only the nodes where gradients of its results enter, and those
where gradients of its arguments leave, have hooks. So the gradients that this call adds are separate from those that
other calls add to the same argument, and the graph does not change.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd import Variable

from ..numerics.function_runs import version_of
from .call import Call
from .dispatch_modes import without_modes

_ACCUMULATES = 2**64 - 1
"""The sequence number of the nodes that accumulate the gradient of a leaf."""


class Clock:
    """Measures the seconds of a block; waits for the accelerator, if there is one."""

    seconds = 0.0

    def __enter__(self) -> Clock:
        self._began = _now()
        return self

    def __exit__(self, *exception: object) -> None:
        self.seconds = _now() - self._began


def _now() -> float:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    return time.perf_counter()


@dataclasses.dataclass
class Gradients:
    """The gradients of one call in one backward."""

    outputs: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)  # incoming, by the result's name
    inputs: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)  # added by the call, by argument
    seconds: float = 0.0  # of the nodes
    are_mixed: bool = False  # the gradient of one result includes that of another


class CallHooks:
    """Hooks on the nodes of one call. Created before the call.

    Attributes:
        versions: the version counters of the call's tensor arguments.
        handles: of the hooks.
    """

    def __init__(self, call: Call, is_on: Callable[[], bool]) -> None:
        self.versions = [version_of(value) for value in call.tensors.values()]
        self.handles: list[Any] = []
        self._is_on = is_on
        self._first_node = torch.autograd._get_sequence_nr()
        self._edges: dict[tuple[Any, int], str] = {}  # the first name of an argument, by the edge of its gradient
        for name, value in call.tensors.items() if call.has_gradients else ():
            if value.requires_grad:
                edge = torch.autograd.graph.get_gradient_edge(value)
                self._edges.setdefault((edge.node, edge.output_nr), name)
        self._current: Gradients | None = None
        self._missing = 0
        self._clock = Clock()

    def add(self, results: Mapping[str, torch.Tensor], finished: Callable[[Gradients], None]) -> None:
        """Adds hooks to the backward of the call, if it has one.

        ``finished`` is called when all gradients are there, at the latest when the backward ends. ``results`` are not
        kept: a node whose hooks hold its tensors is never freed.
        """
        self._finished = finished
        entries: dict[Any, dict[int, str]] = {}
        for name, value in results.items() if self._edges else ():
            node = value.grad_fn
            if node is not None and self._is_of_call(node):
                entries.setdefault(node, {})[value.output_nr] = name
        exits, self._are_mixed = self._exits_of(entries)
        for node, names in exits.items():
            self.handles.append(node.register_prehook(functools.partial(self._enter, entries.get(node, {}))))
            self.handles.append(node.register_hook(functools.partial(self._leave, names)))

    def _is_of_call(self, node: Any) -> bool:
        """Whether the call made a node of autograd's graph."""
        return self._first_node <= node._sequence_nr() < _ACCUMULATES

    def _exits_of(self, entries: Mapping[Any, object]) -> tuple[dict[Any, dict[int, str]], bool]:
        """The nodes of the call, with the positions where gradients of arguments leave each, and whether one entry
        leads to another."""
        exits: dict[Any, dict[int, str]] = {node: {} for node in entries}
        nodes, are_mixed = list(exits), False
        for node in nodes:
            for position, edge in enumerate(node.next_functions):
                following = edge[0]
                if edge in self._edges:
                    exits[node][position] = self._edges[edge]
                elif following in entries:
                    are_mixed = True
                elif following is not None and following not in exits and self._is_of_call(following):
                    exits[following] = {}
                    nodes.append(following)
        return exits, are_mixed

    def _enter(self, names: Mapping[int, str], gradients: Sequence[torch.Tensor | None]) -> None:
        if not self._is_on():
            return
        record = self._record()
        for position, name in names.items():
            if (gradient := gradients[position]) is not None:
                record.outputs[name] = gradient.detach()
        self._clock = Clock().__enter__()
        self._count(record)

    def _leave(self, names: Mapping[int, str], gradients: Sequence[torch.Tensor | None], _: object) -> None:
        if not self._is_on():
            return
        record = self._record()
        self._clock.__exit__()
        record.seconds += self._clock.seconds
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
            if self._is_on():
                self._finished(record)
            self._current = None
