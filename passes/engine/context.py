"""What a pass gets besides the graph: where the graph will run (``Target``), and the run of the pass (``PassContext``).

``PassContext`` decides whether a change may be made, and records matches and near misses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from torch._inductor.compiler_bisector import CompilerBisector

from .results import NearMiss

if TYPE_CHECKING:
    import onnx_ir as ir
    from torch import fx

_MOST_NEAR_MISSES = 20
"""Refusals kept for each pass and graph: those with the most matched nodes."""

Inferred: TypeAlias = "tuple[ir.DataType, Sequence[int | str | None] | None]"
"""The dtype and shape of a result, as far as they are known."""


def _nothing_known(_: object) -> None:
    return None


@dataclasses.dataclass(frozen=True)
class Target:
    """Where the graphs of one compile will run.

    Attributes:
        backend: the name of the backend, for PyTorch's bisector.
        providers: names of the execution providers, in the order of preference.
        opset: the ONNX opset of the models.
        multiplies_bfloat16: whether PyTorch's bfloat16 matrix products are faster than the provider's float32 ones.
        multiplies_mixed_signs: whether the CPU provider's products of uint8 with int8 are exact; asked when needed.
        threads: threads of a session; ``None`` for as many as PyTorch has at the call.
        decompositions: returns AOTAutograd's decomposition table, with which patterns are traced.
        rejects: why the providers cannot run an ONNX node, whose inputs have types and shapes, or ``None``.
        rejects_operator: the same for an FX node of the stage ``post_grad``.
        infers: dtype and shape of each result of an ONNX node, whose inputs have types and shapes, or ``None``. Called
            for operators without an ONNX schema.
        objection: why an ONNX model must not run, or ``None``; called after each pass of the stage ``onnx``.
        keeps: the operator of an FX or ONNX node if a user wrote its converter, else ``None``. No pass rewrites such a
            node, except a pass that is needed.
    """

    backend: str = ""
    providers: tuple[str, ...] = ("CPUExecutionProvider",)
    opset: int = 23
    multiplies_bfloat16: bool = False
    multiplies_mixed_signs: Callable[[], bool] = bool
    threads: int | None = None
    decompositions: Callable[[], Mapping[Any, Callable[..., Any]]] = dict
    rejects: Callable[[ir.Node], str | None] = _nothing_known
    infers: Callable[[ir.Node], Sequence[Inferred | None] | None] = _nothing_known
    rejects_operator: Callable[[fx.Node], str | None] = _nothing_known
    objection: Callable[[ir.Model], str | None] = _nothing_known
    keeps: Callable[[object], str | None] = _nothing_known


class PassContext:
    """One run of one pass on one graph.

    Args:
        name: the pass.
        graph: the name of the graph, for messages: ``graph 0 forward``.
        target: where the graph will run.
        explain: whether near_misses are recorded.
    """

    def __init__(self, name: str, graph: str = "", target: Target | None = None, *, explain: bool = False) -> None:
        self.name = name
        self.graph = graph
        self.target = target or Target()
        self.explain = explain
        self.matches: list[str] = []
        self._near_misses: dict[tuple[str, str, str], NearMiss] = {}

    @property
    def stage(self) -> str:
        return self.name.split(".", 1)[0]

    def allows_pass(self) -> bool:
        """Whether the bisector lets the pass run; called by the manager."""
        return self._is_wanted(f"{self.name} on {self.graph}")

    def allows(self, node: object) -> bool:
        """Whether the pass may change the graph at ``node``; a pass calls it once a match, right before the change.

        It returns ``False`` for a node whose operator has a user's converter, and while PyTorch's ``CompilerBisector``
        searches for the match that breaks a model.

        Args:
            node: an FX node, an ONNX node, or a name.
        """
        label = name_of(node)
        kept = self.target.keeps(node)
        if kept is not None:
            self.record_near_miss(node, f"{kept} has a registered converter")
            return False
        if not self._is_wanted(f"{self.name} at {label} of {self.graph}"):
            return False
        self.matches.append(label)
        return True

    def _is_wanted(self, what: str) -> bool:
        return not CompilerBisector.disable_subsystem(self.target.backend, f"{self.stage}_passes", lambda: what)

    def record_near_miss(self, node: object, reason: str, *, matched: int = 0, of: int = 0, pattern: str = "") -> None:
        """Records a near miss if ``explain`` is set; see ``NearMiss``."""
        if not self.explain:
            return
        miss = NearMiss(name_of(node), reason, matched, of, pattern)
        self._near_misses.setdefault((miss.node, miss.reason, pattern), miss)

    @property
    def near_misses(self) -> list[NearMiss]:
        """The near misses, those with the most matched nodes first, without nodes that matched later."""
        missed = [item for item in self._near_misses.values() if item.node not in self.matches]
        return sorted(missed, key=lambda item: item.matched / max(item.of, 1), reverse=True)[:_MOST_NEAR_MISSES]


def name_of(node: object) -> str:
    """A node's name in the dump: of an FX node its name, of an ONNX node that of its first result."""
    outputs = getattr(node, "outputs", None)
    if outputs:
        return str(outputs[0].name)
    return str(getattr(node, "name", None) or node)
