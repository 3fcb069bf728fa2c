"""Finds converters and passes that the user registered and that no graph used, which is often a mistake.

``onnx_debug`` lists them in the manifest and in one warning at the end of a run; ``explain`` lists them too. Those of
installed packages are left out, because they may be meant for other models.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Iterator

from torch import fx

from passes.engine.origins import described, position_of
from passes.engine.registry import added_passes
from passes.engine.results import PassResult

from ..exporter.registration import registered_converter, registered_targets
from ..graphs.artifacts import Split, operator_name
from ..graphs.locations import is_user_file


@dataclasses.dataclass
class ExtensionUsage:
    """The operators that graphs have on ONNX Runtime and in PyTorch, and the passes that fired on them."""

    _on_onnx: set[object] = dataclasses.field(default_factory=set)  # operators
    _in_pytorch: dict[object, str] = dataclasses.field(default_factory=dict)  # operators, and why
    _in_subgraphs: dict[object, str] = dataclasses.field(default_factory=dict)  # operators, and what calls the subgraph
    _fired: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)  # by pass that ran
    _near_misses: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)

    def add_graph(self, split: Split) -> None:
        self._on_onnx.update(node.target for region in split.regions for node in region.operators)
        for node, reason in split.coverage.in_pytorch.items():
            self._in_pytorch.setdefault(node.target, str(reason))
            for target in _in_subgraphs(node):
                self._in_subgraphs.setdefault(target, f"it is in a subgraph of {operator_name(node)}")

    def add_passes(self, results: Iterable[PassResult]) -> None:
        for result in results:
            self._fired[result.name] += result.fired or bool(result.undone)
            self._near_misses[result.name] += len(result.near_misses)

    def unused(self) -> list[str]:
        """The user's converters of operators that no graph has on ONNX Runtime, and the user's passes that ran and
        never fired, each with the reason."""
        return [*self._unused_converters(), *self._unused_passes()]

    def _unused_converters(self) -> Iterable[str]:
        by_function: dict[Callable[..., object], list[object]] = {}  # a function may be for all overloads
        for target in sorted(registered_targets(), key=str):
            function = registered_converter(target)
            if function is not None and is_user_file(position_of(function)[0]):
                by_function.setdefault(function, []).append(target)
        for function, targets in by_function.items():
            if self._on_onnx.isdisjoint(targets):
                reasons = self._in_subgraphs | self._in_pytorch
                reason = next((reasons[target] for target in targets if target in reasons), "")
                why = f"the operator runs in PyTorch: {reason}" if reason else "no compiled graph has the operator"
                yield f"the converter of {targets[0]}, {described(function)}: {why}"

    def _unused_passes(self) -> Iterable[str]:
        for item in added_passes():
            if item.name in self._fired and not self._fired[item.name] and is_user_file(position_of(item.written)[0]):
                misses = self._near_misses[item.name]
                why = f"it never fired, with {misses} near misses" if misses else "it never fired"
                yield f"the pass {item.name}, {described(item.written)}: {why}"


def _in_subgraphs(node: fx.Node) -> Iterator[object]:
    """The operators in the subgraphs that a node runs, such as the branches of ``cond``."""
    for argument in node.all_input_nodes:
        owner = node.graph.owning_module
        part = getattr(owner, str(argument.target), None) if argument.op == "get_attr" else None
        for inner in part.graph.nodes if isinstance(part, fx.GraphModule) else ():
            yield inner.target
            yield from _in_subgraphs(inner)
