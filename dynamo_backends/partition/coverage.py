"""Counts and logs how much of a compiled or cached graph runs on ONNX Runtime."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Hashable, Sequence

from passes.engine.origins import described

from ..errors import Reason
from ..events import FallbackCount, GraphSummary, count, warn
from ..exporter.registration import registered_converter
from ..graphs.artifacts import GraphName, Split
from ..graphs.locations import where

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class CoverageCounts:
    """A ``Coverage`` without its nodes: how many operators run on ONNX Runtime and in PyTorch. Stored in the cache.

    Attributes:
        regions: number of regions.
        on_onnx: number of operators that run on ONNX Runtime.
        fallbacks: the operators that run in PyTorch: name (``aten.sort.default``), reason, number.
    """

    regions: int
    on_onnx: int
    fallbacks: Sequence[tuple[str, Reason, int]]

    @classmethod
    def of(cls, split: Split) -> CoverageCounts:
        """The counts of a split graph."""
        coverage = split.coverage
        fallbacks = tuple((target, reason, number) for (target, reason), number in coverage.fallbacks.items())
        return cls(len(split.regions), coverage.on_onnx, fallbacks)

    def of_calls(self, name: GraphName) -> GraphSummary:
        """What statistics of calls keep."""
        unintended = [(target, reason, number) for target, reason, number in self.fallbacks if not reason.by_design]
        fallbacks = [FallbackCount(target, str(reason), number) for target, reason, number in unintended]
        return GraphSummary(str(name), self.on_onnx, sum(number for _, _, number in self.fallbacks), fallbacks)

    def log(self, name: GraphName, place: str) -> None:
        """Adds to the counters, and logs the operators that run in PyTorch: a warning if some should not.

        Args:
            name: of the graph.
            place: the user's code that it is of, or ``""``. An operator is logged once for each place and reason, so
                that a recompile does not repeat what its first compile logged.
        """
        in_pytorch = sum(number for _, _, number in self.fallbacks)
        if not self.on_onnx + in_pytorch:
            return
        count("regions", self.regions)
        count("nodes_on_onnx", self.on_onnx)
        count("nodes_in_pytorch", in_pytorch)
        for target, _, number in self.fallbacks:
            count(f"fallback {target}", number)
        regions = f"{self.regions} region{'' if self.regions == 1 else 's'}"
        rest = f"the rest on ONNX Runtime in {regions}" if self.regions else "none on ONNX Runtime"
        meant = ", ".join(f"{target} x{number} ({why})" for target, why, number in self.fallbacks if why.by_design)
        unintended: dict[Hashable, str] = {
            (place, target, str(why)): f"{target} x{number} ({why})"
            for target, why, number in self.fallbacks
            if not why.by_design
        }
        meant = f"{meant} by design; " if meant and unintended else meant
        text = f"{name}: {in_pytorch} of {self.on_onnx + in_pytorch} operators run in PyTorch, {rest}: {meant}"
        if unintended:
            warn(logger, text, unintended)
        elif meant:
            logger.info("%s by design", text)


def warn_of_unused_converters(split: Split) -> None:
    """Logs each operator whose registered converter is not used, with the user's line and the reason."""
    for node, reason in split.coverage.in_pytorch.items():
        converter = registered_converter(node.target)
        if converter is not None and not reason.by_design:
            line = where(node) or "an unknown line"
            text = f"the converter {described(converter)} of {node.target} at {line} is not used: {reason}"
            warn(logger, "", {text: text})
