"""The gradients that go into and come out of a call in the backward, by hooks on the nodes of autograd's graph.

A call makes one node of that graph or, if it is made of several operators, some. Those that the gradients of its
results enter and those that pass the gradients of its arguments on have hooks: so what this call adds to the gradient
of an argument is told from what others add, and the graph stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.autograd import Variable

from .call import Call
from .clocks import Clock, device_of
from .modes import aside

_Edge = tuple[Any, int]


class Edges:
    """Where the gradients of a call's arguments go; made before the call.

    Args:
        call: the call.
    """

    def __init__(self, call: Call) -> None:
        self.first_node = torch.autograd._get_sequence_nr()
        self.names: dict[_Edge, list[str]] = {}
        for name, value in call.tensors.items():
            if value.requires_grad:
                edge = torch.autograd.graph.get_gradient_edge(value)
                self.names.setdefault((edge.node, edge.output_nr), []).append(name)


class Gradients:
    """The gradients of one call, as one backward has them.

    Attributes:
        outputs: the gradient of each result, by its name, as it enters the call's backward.
        inputs: what the call adds to the gradient of each argument, by its name; of one given twice, by the first.
        alike: for each of these names, all names of that argument.
        clocks: how long each node of the call ran, where that was asked for.
    """

    def __init__(self) -> None:
        self.outputs: dict[str, torch.Tensor] = {}
        self.inputs: dict[str, torch.Tensor] = {}
        self.alike: dict[str, list[str]] = {}
        self.clocks: list[Clock] = []


class Watch:
    """Hooks on the nodes of one call.

    What is given to it must not hold the call's results, nor arguments that the call changed: a node that holds its own
    hooks' tensors is never freed.

    Args:
        edges: of its arguments.
        results: the tensors that it gave, by name.
        is_wanted: whether gradients are still asked for; not after the tool was stopped.
        finished: is given the gradients of the call as soon as they are all there, or else at the end of the backward.
        with_times: whether each node of the call is timed.

    Attributes:
        handles: of the hooks; none if the call has no backward.
        results_depend_on_each_other: whether the gradient of one result contains what another's brings.
    """

    def __init__(
        self,
        edges: Edges,
        results: Mapping[str, torch.Tensor],
        is_wanted: Callable[[], bool],
        finished: Callable[[Gradients], None],
        *,
        with_times: bool = False,
    ) -> None:
        self._is_wanted = is_wanted
        self._finished = finished
        self._current: Gradients | None = None
        self._missing = 0
        self._with_times = with_times
        self._clock: Clock | None = None
        self.handles: list[Any] = []
        entries: dict[Any, dict[int, str]] = {}
        for name, value in results.items():
            node = value.grad_fn
            if node is not None and _is_of_call(node, edges):
                entries.setdefault(node, {})[value.output_nr] = name
        nodes, leaving, self.results_depend_on_each_other = _nodes_of(entries, edges)
        for node in nodes:
            if node in entries or with_times:
                self.handles.append(node.register_prehook(self._enter(entries.get(node, {}))))
            if node in leaving or with_times:
                self.handles.append(node.register_hook(self._leave(leaving.get(node, {}))))

    def _enter(self, names: Mapping[int, str]) -> Callable[..., None]:
        def hook(gradients: tuple[torch.Tensor | None, ...]) -> None:
            if not self._is_wanted():
                return
            record = self._record()
            for position, name in names.items():
                if (gradient := gradients[position]) is not None:
                    record.outputs[name] = gradient.detach()
            if self._with_times:
                self._clock = Clock(device_of(gradients)).start()
            self._count(record)

        return hook

    def _leave(self, names: Mapping[int, list[str]]) -> Callable[..., None]:
        def hook(gradients: tuple[torch.Tensor | None, ...], _: object) -> None:
            if not self._is_wanted():
                return
            record = self._record()
            if self._clock is not None:
                self._clock.stop()
                record.clocks.append(self._clock)
                self._clock = None
            for position, alike in names.items():
                name = alike[0]
                if (gradient := gradients[position]) is not None:
                    record.alike[name] = alike
                    with aside():
                        known = record.inputs.get(name)
                        record.inputs[name] = gradient.detach() if known is None else known + gradient.detach()
            self._count(record)

        return hook

    def _record(self) -> Gradients:
        """The gradients of the backward that runs; the first hook of it asks for its end to be told."""
        if self._current is None:
            self._current, self._missing = Gradients(), len(self.handles)
            record = self._current
            Variable._execution_engine.queue_callback(lambda: self._end(record))
        return self._current

    def _count(self, record: Gradients) -> None:
        self._missing -= 1
        if not self._missing:
            self._end(record)

    def _end(self, record: Gradients) -> None:
        if record is self._current and self._is_wanted():
            self._finished(record)
        if record is self._current:
            self._current = None


def _is_of_call(node: Any, edges: Edges) -> bool:
    return edges.first_node <= node._sequence_nr() < _ACCUMULATES


_ACCUMULATES = 2**64 - 1
"""The number of the nodes that accumulate the gradient of a leaf."""


def _nodes_of(entries: Mapping[Any, object], edges: Edges) -> tuple[list[Any], dict[Any, dict[int, list[str]]], bool]:
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
            if edge in edges.names:
                leaving.setdefault(node, {})[position] = edges.names[edge]
            elif following in entries:
                entered = True
            elif following not in seen and _is_of_call(following, edges):
                seen.add(following)
                found.append(following)
    return found, leaving, entered


class Watches:
    """The hooks of one tool: made for calls that have a backward, and all taken off when the tool stops.

    Args:
        guard: does a part of the tool's work, see ``OpTool``.
    """

    def __init__(self, guard: Callable[..., Any]) -> None:
        self._guard = guard
        self._handles: list[Any] = []
        self._kept = 1_000
        self._is_on = False

    def begin(self) -> None:
        """From now on gradients are wanted."""
        self._is_on = True

    def end(self) -> None:
        """Takes the hooks off."""
        self._is_on = False
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    @staticmethod
    def edges(call: Call) -> Edges | None:
        """Before a call: where gradients of its arguments will go; ``None`` if it has no backward that can be seen."""
        if not call.has_gradients or not any(value.requires_grad for value in call.tensors.values()):
            return None
        return Edges(call)

    def watch(
        self,
        name: str,
        edges: Edges | None,
        results: Mapping[str, torch.Tensor],
        finished: Callable[[Gradients], None],
        *,
        with_times: bool = False,
    ) -> Watch | None:
        """After a call: puts hooks on its backward; ``None`` if it has none.

        Args:
            name: of the call.
            edges: of its arguments.
            results: that it gave.
            finished: see ``Watch``.
            with_times: see ``Watch``.
        """
        if edges is None:
            return None

        def finish(record: Gradients) -> None:
            with aside():
                self._guard(f"the gradients of {name}", finished, record)

        watch = Watch(edges, results, lambda: self._is_on, finish, with_times=with_times)
        if not watch.handles:
            return None
        self._handles.extend(watch.handles)
        if len(self._handles) > 2 * self._kept:  # those of graphs that are gone
            self._handles = [handle for handle in self._handles if handle.hooks_dict_ref() is not None]
            self._kept = max(self._kept, len(self._handles))
        return watch
