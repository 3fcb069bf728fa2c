"""Compares the graphs of two stages node by node.

Nodes are matched by name, since values keep their names from stage to stage; inputs also by the user's name. Nodes from
different lines of the user's code never match. The remaining nodes match by operator and arguments. The order of nodes
does not count.

An ONNX value has the name of the FX node whose result it is, or ``name__0``, ``name__1`` for several results. So FX
graphs and ONNX models match in the same way.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from ..graphs.graph_text import GraphNode
from .reading import DumpedGraph, DumpedRun
from .stage_graphs import StageGraph, stage_graphs

ChangeKind = Literal["added", "removed", "changed", "translated", "renamed"]
"""``translated``: an FX node to an ONNX node."""


@dataclasses.dataclass(frozen=True)
class Change:
    """A node that differs between the stages, or that only one of them has."""

    kind: ChangeKind
    before: GraphNode | None
    after: GraphNode | None
    what: tuple[str, ...] = ()  # what changed: ``kind``, ``operator``, ``arguments`` or ``type``
    note: str = ""  # the reason, if known

    @property
    def node(self) -> GraphNode:
        """The node in the later stage, or in the earlier if it was removed."""
        node = self.after or self.before
        assert node is not None
        return node

    @property
    def source(self) -> str:
        """The user's line, ``file:line``, or empty."""
        return next((node.source for node in (self.after, self.before) if node is not None and node.source), "")


@dataclasses.dataclass(frozen=True)
class StageDiff:
    """The differences of two stages."""

    before: str  # before, after: the files
    after: str
    same: int  # how many nodes are the same
    changes: Sequence[Change]  # in the order of the later stage; a removed node follows its predecessor
    region: int | None = None  # for two ONNX stages

    def count(self, kind: str) -> int:
        return sum(change.kind == kind for change in self.changes)

    @property
    def lines(self) -> list[str]:
        """The changes as lines with ``-`` and ``+``, below lines with ``@@`` and the user's line of code."""
        nodes = [node for change in self.changes for node in (change.before, change.after) if node is not None]
        codes = {node.source: node.code for node in nodes if node.code}
        region = "" if self.region is None else f"region_{self.region} "
        lines, header = [], ""
        for change in self.changes:
            code = codes.get(change.source, "")
            before, header = header, f"@@ {region}{change.source or change.node.kind}  {code}".rstrip()
            lines += [header] if header != before else []
            note = f"  ({change.note})" if change.note else ""
            sides = (("-", change.before), ("+", change.after))
            lines += [f"{sign}{node.text}{note}" for sign, node in sides if node is not None]
        return lines


def diff_stages(run: DumpedRun, graph: DumpedGraph, before: str, after: str) -> list[StageDiff]:
    """Compares two stages of a graph, two ONNX stages region by region.

    Raises ``DumpError`` if the graph has no such stage, or a file cannot be read.
    """
    return diff_graphs(graph, stage_graphs(run, graph, before), stage_graphs(run, graph, after))


def diff_graphs(graph: DumpedGraph, left: Sequence[StageGraph], right: Sequence[StageGraph]) -> list[StageDiff]:
    """The same as ``diff_stages``, for graphs that have been read."""
    are_models = [items[0].region is not None for items in (left, right)]
    if all(are_models):
        found = []
        for one, other in zip(left, right, strict=True):
            same, changes = diff_nodes(one.nodes, other.nodes)
            found.append(StageDiff(one.file, other.file, same, changes, one.region))
        return found
    same, changes = diff_nodes(_joined(left), _joined(right))
    if any(are_models):
        reasons = {item.node: f"runs in PyTorch: {item.reason}" for item in graph.entry.in_pytorch}
        for i, change in enumerate(changes):
            if change.kind in ("added", "removed"):
                origin = f"for {change.node.origin}" if change.node.origin else ""
                changes[i] = dataclasses.replace(change, note=reasons.get(change.node.name, origin))
    files = [" and ".join(item.file for item in items) for items in (left, right)]
    return [StageDiff(files[0], files[1], same, changes)]


def _joined(graphs: Sequence[StageGraph]) -> list[GraphNode]:
    """The nodes of all regions as one graph, without the inputs and outputs between regions."""
    if len(graphs) == 1:
        return graphs[0].nodes
    taken: set[str] = set()
    found = []
    computed = {name for graph in graphs for node in graph.nodes if node.kind == "node" for name in node.results}
    for graph in graphs:
        names: dict[str, str] = {}
        for node in graph.nodes:
            if node.kind == "output" or (node.kind == "input" and node.name in computed | taken):
                continue
            names |= {name: f"region_{graph.region}/{name}" if name in taken else name for name in node.results}
            results = tuple(names[name] for name in node.results)
            taken.update(results)
            arguments = tuple(names.get(argument, argument) for argument in node.arguments)
            found.append(dataclasses.replace(node, results=results, arguments=arguments))
    return found


def diff_nodes(before: Sequence[GraphNode], after: Sequence[GraphNode]) -> tuple[int, list[Change]]:
    """The number of nodes that are the same, and the changes."""
    is_translation = any(node.origin for node in before) != any(node.origin for node in after)
    renamed: dict[str, str] = {}
    if is_translation:
        # Regions return values to other regions and PyTorch, not the outputs of the graph.
        before, after = ([node for node in nodes if node.kind != "output"] for nodes in (before, after))
        before, left_out = _without_unpacking(before, after)
        after, right_out = _without_unpacking(after, before)
        renamed = {**left_out, **{name: getitem for getitem, name in right_out.items()}}
    pairs = _by_name(before, after)
    for i, j in pairs.items():
        renamed.update(zip(before[i].results, after[j].results, strict=False))
    _by_content(before, after, pairs, renamed)

    changes: list[Change] = []
    same = 0
    earlier = {j: i for i, j in pairs.items()}
    gone = [i for i in range(len(before)) if i not in pairs]
    for j, node in enumerate(after):
        if j not in earlier:
            changes.append(Change("added", None, node))
            continue
        while gone and gone[0] < earlier[j]:
            changes.append(Change("removed", before[gone.pop(0)], None))
        change = _change(before[earlier[j]], node, renamed, is_translation=is_translation)
        if change is None:
            same += 1
        else:
            changes.append(change)
    return same, [*changes, *(Change("removed", before[i], None) for i in gone)]


def _without_unpacking(
    nodes: Sequence[GraphNode], others: Sequence[GraphNode]
) -> tuple[list[GraphNode], dict[str, str]]:
    """The nodes without ``getitem`` of a result that has a name in the other graph; and the names of these results."""
    names = {name for node in others for name in node.results}
    unpacked = {
        node.name: f"{node.arguments[0]}__{node.arguments[1]}"
        for node in nodes
        if node.operator == "getitem" and f"{node.arguments[0]}__{node.arguments[1]}" in names
    }
    return [node for node in nodes if node.name not in unpacked], unpacked


def _by_name(before: Sequence[GraphNode], after: Sequence[GraphNode]) -> dict[int, int]:
    """The positions of nodes with the same name, from ``before`` to ``after``."""
    places: dict[str, int] = {}
    for i, node in enumerate(before):
        for name in _names(node):
            places.setdefault(name, i)
    found: dict[int, int] = {}
    for j, node in enumerate(after):
        for name in _names(node):
            i = places.get(name, -1)
            if i < 0 or i in found:
                continue
            one = before[i]
            if (one.kind == "output") == (node.kind == "output") and _may_be_same(one, node):
                found[i] = j
                break
    return found


def _names(node: GraphNode) -> Iterator[str]:
    """The names that a node may have in another stage, the most certain first."""
    if node.user_name:
        yield node.user_name
    yield from node.results
    for name in node.results:
        if match := re.fullmatch(r"(.+)__\d+", name):
            yield match[1]


def _may_be_same(one: GraphNode, other: GraphNode) -> bool:
    if one.user_name and other.user_name and one.user_name != other.user_name:
        return False
    return not (one.source and other.source) or one.source == other.source


def _by_content(
    before: Sequence[GraphNode], after: Sequence[GraphNode], pairs: dict[int, int], renamed: dict[str, str]
) -> None:
    """Adds nodes with the same operator and arguments, but another name, to ``pairs`` and ``renamed``."""
    places: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    matched = set(pairs.values())
    for j, node in enumerate(after):
        if j not in matched and node.kind == "node":
            places.setdefault((node.operator, node.arguments), []).append(j)
    for i, node in enumerate(before):  # in order: its arguments are renamed already
        if i in pairs or node.kind != "node":
            continue
        alike = places.get((node.operator, _renamed(node.arguments, renamed)), [])
        for j in alike:
            if _may_be_same(node, after[j]) and len(node.results) == len(after[j].results):
                pairs[i] = j
                renamed.update(zip(node.results, after[j].results, strict=True))
                alike.remove(j)
                break


_WORD = re.compile(r"[A-Za-z_]\w*")
_STRIDES = re.compile(r"\]\[.*\]$")


def _renamed(arguments: Sequence[str], names: Mapping[str, str]) -> tuple[str, ...]:
    """Arguments with the names of the later stage; a name may be inside a list."""
    return tuple(
        names[item] if item in names else _WORD.sub(lambda found: names.get(found[0], found[0]), item)
        for item in arguments
    )


def _change(before: GraphNode, after: GraphNode, renamed: Mapping[str, str], *, is_translation: bool) -> Change | None:
    """The change of a node, or ``None`` if it is the same."""
    types = [(one, other) for one, other in zip(before.types, after.types, strict=False) if one and other]
    if is_translation:
        types = [(_STRIDES.sub("]", one), _STRIDES.sub("]", other)) for one, other in types]
    what = ["type"] if any(one != other for one, other in types) else []
    if is_translation and before.kind == after.kind == "node":
        return Change("translated", before, after, tuple(what))
    if before.kind != after.kind:
        what.insert(0, "kind")
    elif before.operator != after.operator:
        what.insert(0, "operator")
    elif _renamed(before.arguments, renamed) != after.arguments:
        what.insert(0, "arguments")
    if what:
        return Change("changed", before, after, tuple(what))
    return None if before.results == after.results or is_translation else Change("renamed", before, after)
