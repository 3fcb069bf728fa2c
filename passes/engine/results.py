"""What a pass did to a graph, and its near misses, as data for dumps and reports. Imports only the standard library."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class NearMiss:
    """A near miss: a partial match, or a match that a check rejected.

    Attributes:
        node: the name of the node where it stopped.
        reason: the condition that did not hold.
        matched: how many nodes of the pattern matched; all of them if a check rejected the match.
        of: how many nodes the pattern has.
        pattern: the pattern's name, if the pass has several.
    """

    node: str
    reason: str
    matched: int = 0
    of: int = 0
    pattern: str = ""


@dataclasses.dataclass(frozen=True)
class PassResult:
    """What one pass did to one graph.

    Attributes:
        name: the pass.
        fired: how many times it changed the graph.
        nodes_before, nodes_after: number of nodes, without inputs and outputs.
        milliseconds: duration, including the manager's own checks, without the numeric check.
        matches: names of the nodes where it fired.
        near_misses: its near misses, if they were recorded.
        undone: why its changes were undone (it failed, broke the graph, or changed results); else empty.
        note: how the number of changes it returned differs from what it did; ``fired`` is corrected.
    """

    name: str
    fired: int
    nodes_before: int
    nodes_after: int
    milliseconds: float
    matches: list[str] = dataclasses.field(default_factory=list)
    near_misses: list[NearMiss] = dataclasses.field(default_factory=list)
    undone: str = ""
    note: str = ""
