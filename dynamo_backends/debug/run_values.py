"""The values of one compared run: what the graph returned on the way, and what its sessions have inside."""

from __future__ import annotations

import collections
import dataclasses
import operator
from collections.abc import Iterator, Mapping

import torch
from torch import fx

from passes.engine.fx.editing import changes_memory

from ..errors import CompiledNodesError, SessionError, first_line
from ..exporter.translate import value_names
from ..partition.regions import is_ordered
from ..pipeline.stage_data import CompiledGraph, CompiledRegion
from .recorded_run import RecordedRun, bitwise_differing
from .session_values import SessionValues, ShownSessions


def given_values(graph: CompiledGraph, run: RecordedRun) -> dict[fx.Node, object]:
    """The values that are not judged: arguments, random numbers, results of operators with side effects."""
    return {
        node: run.values[node]
        for node in graph.module.graph.nodes
        if node in run.values and (node.op in ("placeholder", "get_attr") or is_ordered(node) or changes_memory(node))
    }


@dataclasses.dataclass
class Hidden:
    """What a run does not show.

    Attributes:
        names: of inner values whose names were guessed, and are wrong.
        regions: whose sessions do not show their values, with the reason.
    """

    names: set[str] = dataclasses.field(default_factory=set)
    regions: dict[int, str] = dataclasses.field(default_factory=dict)


class NotShownError(Exception):
    """A session does not show a value, which was added to ``Hidden``: segments were cut at what is not known."""


class RunValues:
    """The values of a run, as ``KnownValues`` of ``numerics.segments``; ``get`` raises ``NotShownError``."""

    def __init__(self, graph: CompiledGraph, run: RecordedRun, sessions: ShownSessions, hidden: Hidden) -> None:
        self._run = run
        self._region_of = {node: item for item in graph.regions for node in item.region.nodes}
        self._shown: dict[int, SessionValues] = {}
        self._hidden = hidden
        self._inner: dict[str, object] = {}
        self._others: collections.defaultdict[str, list[torch.Tensor]] = collections.defaultdict(list)
        self._of_shown: dict[str, torch.Tensor] = {}
        self._parts: dict[int, Iterator[dict[str, object]]] = {}  # of regions whose session is being shown
        for compiled in graph.regions:
            index = compiled.region.index
            if index in run.sessions and index not in hidden.regions:
                self._add_region(compiled, sessions)
            repeated = run.repeated.get(index)
            for position, values in (repeated.others if repeated is not None else {}).items():
                output = compiled.region.outputs[position]
                self._others[self._name(output.node, output.index)] += values

    def _add_region(self, compiled: CompiledRegion, sessions: ShownSessions) -> None:
        try:
            self._shown[compiled.region.index] = sessions.of(compiled, self._run.session_of(compiled))
        except CompiledNodesError:  # one kernel of a provider: the region is one segment
            return
        except SessionError as error:
            self._hidden.regions[compiled.region.index] = first_line(str(error))

    def _shown_of(self, node: fx.Node) -> SessionValues | None:
        compiled = self._region_of.get(node)
        return self._shown.get(compiled.region.index) if compiled is not None else None

    def has(self, node: fx.Node, index: int | None) -> bool:
        if self._recorded(node, index) is not None:
            return True
        shown, name = self._shown_of(node), self._name(node, index)
        return shown is not None and (name in shown.names - self._hidden.names or name in shown.constants)

    def get(self, node: fx.Node, index: int | None) -> object:
        shown, name, recorded = self._shown_of(node), self._name(node, index), self._recorded(node, index)
        if shown is None:
            return recorded
        if name in shown.constants:
            return shown.constants[name]
        self._show(self._region_of[node], name, is_recorded=recorded is not None)
        inner = self._inner.pop(name, None)
        if recorded is None:
            return inner
        if isinstance(inner, torch.Tensor) and bitwise_differing([recorded], [inner]):
            self._of_shown[name] = inner
        return recorded

    def others(self, node: fx.Node, index: int | None) -> list[torch.Tensor]:
        """The same value in other runs of the session, where bits differ."""
        return self._others.get(self._name(node, index), [])

    def of_shown(self, node: fx.Node, index: int | None) -> torch.Tensor | None:
        """The same value of the model with more outputs, if bits differ: of another session of the same model."""
        return self._of_shown.get(self._name(node, index))

    def reads(self, node: fx.Node, source: fx.Node) -> bool:
        shown = self._shown_of(node)
        if shown is None or self._shown_of(source) is not shown:
            return True
        cuts = [shown.cuts[name] for name in value_names(node) if name in shown.cuts]
        given = {name: shown.cuts.get(name) for name in value_names(source)}
        readers = [cut for cut in cuts if not cut.isdisjoint(given)]
        # of several results of the node, one may be computed from what the others read rounded
        others = (cut for cut in cuts if cut.isdisjoint(given) and any(of and of <= cut for of in given.values()))
        return not cuts or (bool(readers) and next(others, None) is None)

    def is_guessed(self, node: fx.Node) -> bool:
        """Whether the name of an inner value may be another's, see ``SessionValues.guessed``."""
        shown = self._shown_of(node)
        return shown is not None and not shown.guessed.isdisjoint(value_names(node))

    def run_again(self, compiled: CompiledRegion) -> Mapping[str, object]:
        """The values of another run of a region, by name."""
        shown = self._shown.get(compiled.region.index)
        return shown.run(self._arguments(compiled)) if shown is not None else {}

    def _show(self, compiled: CompiledRegion, name: str, *, is_recorded: bool) -> None:
        """Computes the values of a region's session up to a value."""
        region = compiled.region
        if region.index not in self._parts:
            self._parts[region.index] = self._shown[region.index].parts(self._arguments(compiled))
        while name not in self._inner:
            try:
                found = next(self._parts[region.index], None)
            except SessionError as error:
                self._hidden.regions[region.index] = first_line(str(error))
                raise NotShownError from error
            if found is None:
                if is_recorded:
                    return
                self._hidden.names.add(name)
                raise NotShownError
            self._inner.update(found)

    def _arguments(self, compiled: CompiledRegion) -> list[object]:
        return [self._run.values[item.node] for item in compiled.region.inputs]

    def _recorded(self, node: fx.Node, index: int | None) -> object:
        """What the graph returned for a result: a region's output, or a value that PyTorch computed."""
        values = self._run.values
        if node in values:
            found = values[node]
            return found if index is None else found[index]  # type: ignore[index]
        items = (user for user in node.users if index is not None and user.target is operator.getitem)
        return next((values[user] for user in items if user.args[1] == index and user in values), None)

    @staticmethod
    def _name(node: fx.Node, index: int | None) -> str:
        names = value_names(node)
        return names[index or 0] if (index or 0) < len(names) else f"{node.name}__{index}"  # it has no description
