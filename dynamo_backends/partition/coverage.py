"""How much of a graph runs on ONNX Runtime, counted and said in the log: of a graph that was compiled, or is cached."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

from ..errors import Reason
from ..events import count, tell
from ..graphs.artifacts import GraphName, Split

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Report:
    """What runs where, without the graph.

    Attributes:
        regions: how many there are.
        on_onnx: operators that run on ONNX Runtime.
        fallbacks: for operators that run in PyTorch what they are (``aten.sort.default``), why, and how many.
    """

    regions: int
    on_onnx: int
    fallbacks: Sequence[tuple[str, Reason, int]]

    @classmethod
    def of(cls, split: Split) -> Report:
        """The report on a graph that was split."""
        coverage = split.coverage
        fallbacks = tuple((target, reason, number) for (target, reason), number in coverage.fallbacks.items())
        return cls(len(split.regions), coverage.on_onnx, fallbacks)

    def tell(self, name: GraphName) -> None:
        """Counts how much of a graph runs on ONNX Runtime, and says in the log what does not and should."""
        in_pytorch = sum(number for _, _, number in self.fallbacks)
        if not self.on_onnx + in_pytorch:
            return
        count("regions", self.regions)
        count("nodes_on_onnx", self.on_onnx)
        count("nodes_in_pytorch", in_pytorch)
        for target, _, number in self.fallbacks:
            count(f"fallback {target}", number)
        telling = [
            f"{target} x{number} ({reason})" for target, reason, number in self.fallbacks if not reason.by_design
        ]
        if telling:
            plural = "" if self.regions == 1 else "s"
            rest = (
                f"the rest on ONNX Runtime in {self.regions} region{plural}" if self.regions else "none on ONNX Runtime"
            )
            operators = f"{in_pytorch} of {self.on_onnx + in_pytorch} operators"
            tell(logger, f"{name}: {operators} run in PyTorch, {rest}: {'; '.join(telling)}")
