"""What a pass did to a graph, and where it nearly fired: for a report, in a dump. Needs nothing but Python."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A near miss: where a pass began to match and stopped.

    Attributes:
        node: the name of the node where it stopped.
        reason: the condition that did not hold.
        matched: how many nodes of the pattern had matched; with all of them, an extra check refused.
        of: how many nodes the pattern has.
        pattern: the pattern's name, where the pass has several.
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
        nodes_before, nodes_after: nodes of the graph, inputs and outputs not counted.
        milliseconds: how long it took, with what the manager does around it, but without the numeric check.
        matches: where it fired, as far as it says so.
        refusals: its near misses, if they were asked for.
        undone: why it was left out: it failed, spoiled the graph, or changed its results; empty if it stands.
        note: how what the pass says of itself differs from what it did; ``fired`` is put right.
    """

    name: str
    fired: int
    nodes_before: int
    nodes_after: int
    milliseconds: float
    matches: list[str] = dataclasses.field(default_factory=list)
    refusals: list[Refusal] = dataclasses.field(default_factory=list)
    undone: str = ""
    note: str = ""
