"""What a pass is told of where its graph will run, and whom it asks before each change."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from torch._inductor.compiler_bisector import CompilerBisector

from .results import Refusal

if TYPE_CHECKING:
    import onnx_ir as ir
    from torch import fx

_MOST_REFUSALS = 20
"""Refusals kept for each pass and graph: those that got furthest."""


Inferred: TypeAlias = "tuple[ir.DataType, Sequence[int | str | None] | None]"
"""The dtype and the sizes of a result, as far as they are known."""


def _nothing_known(_: object) -> None:
    return None


@dataclasses.dataclass(frozen=True)
class Target:
    """Where the graphs of one compile will run, as far as a pass may depend on it.

    Attributes:
        backend: the name of the backend that compiles, for PyTorch's bisector.
        providers: names of the execution providers, in the order of preference.
        opset: the ONNX opset of the models.
        multiplies_bfloat16: whether PyTorch multiplies matrices of bfloat16 there faster than the provider those of
            float32.
        threads: how many threads a session has; ``None`` if as many as PyTorch has when it is called.
        decompositions: gives the table AOTAutograd uses, from ATen overload to function; patterns are traced with it.
        refuses: says why the providers cannot run an ONNX node, whose inputs have types and shapes, or ``None``.
        refuses_operator: the same for an FX node of the stage ``post_grad``.
        infers: gives dtype and shape of each result of an ONNX node, whose inputs have types and shapes; ``None`` where
            they are not known. It is asked about operators that are not ONNX's own.
        objection: says why a whole ONNX model must not run, or ``None``: asked after each pass of the stage ``onnx``.
    """

    backend: str = ""
    providers: tuple[str, ...] = ("CPUExecutionProvider",)
    opset: int = 23
    multiplies_bfloat16: bool = False
    threads: int | None = None
    decompositions: Callable[[], Mapping[Any, Callable[..., Any]]] = dict
    refuses: Callable[[ir.Node], str | None] = _nothing_known
    infers: Callable[[ir.Node], Sequence[Inferred | None] | None] = _nothing_known
    refuses_operator: Callable[[fx.Node], str | None] = _nothing_known
    objection: Callable[[ir.Model], str | None] = _nothing_known


class PassContext:
    """One run of one pass on one graph.

    Args:
        name: the pass.
        graph: which graph, for people: ``graph 0 forward``.
        target: where the graph will run.
        explain: whether refusals are kept; without it a pass need not look for them.
    """

    def __init__(self, name: str, graph: str = "", target: Target | None = None, *, explain: bool = False) -> None:
        self.name = name
        self.graph = graph
        self.target = target or Target()
        self.explain = explain
        self.matches: list[str] = []
        self._refusals: dict[tuple[str, str, str], Refusal] = {}

    @property
    def stage(self) -> str:
        return self.name.split(".", 1)[0]

    def allows_pass(self) -> bool:
        """Whether the pass runs at all; the manager asks before it."""
        return self._is_wanted(f"{self.name} on {self.graph}")

    def allows(self, node: object) -> bool:
        """Asks, once for each match and right before the change, whether the pass may change the graph at ``node``.

        The answer is no only while PyTorch's ``CompilerBisector`` looks for the match that breaks a model.

        Args:
            node: what is replaced: an FX node, an ONNX node, or a text that names it.
        """
        label = name_of(node)
        if not self._is_wanted(f"{self.name} at {label} of {self.graph}"):
            return False
        self.matches.append(label)
        return True

    def _is_wanted(self, what: str) -> bool:
        return not CompilerBisector.disable_subsystem(self.target.backend, f"{self.stage}_passes", lambda: what)

    def refuse(self, node: object, reason: str, *, matched: int = 0, of: int = 0, pattern: str = "") -> None:
        """Notes a near miss, if someone wants to know: see ``Refusal``."""
        if not self.explain:
            return
        refusal = Refusal(name_of(node), reason, matched, of, pattern)
        self._refusals.setdefault((refusal.node, refusal.reason, pattern), refusal)

    @property
    def refusals(self) -> list[Refusal]:
        """The near misses, those that got furthest first; nodes that matched after all are not among them."""
        missed = [item for item in self._refusals.values() if item.node not in self.matches]
        return sorted(missed, key=lambda item: item.matched / max(item.of, 1), reverse=True)[:_MOST_REFUSALS]


def name_of(node: object) -> str:
    """What a node is called in the files of the dump: an FX node's name, an ONNX node's first result."""
    outputs = getattr(node, "outputs", None)
    if outputs:
        return str(outputs[0].name)
    return str(getattr(node, "name", None) or node)
