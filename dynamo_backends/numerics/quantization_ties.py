"""Runs a graph in eager and in float64, with each tie of a quantization rounded as in another run.

A quantization rounds to whole numbers. If its argument is on a tie, such as 127.5, the rounding of earlier nodes
decides which neighbor it becomes, and all later values differ by the effect of one step. torchao's scale of a row is
the row's extreme over 127.5: each extreme is on a tie. Neither neighbor is a fault, and float64 may choose either::

    execution = TieExecution(module, arguments, state, recorded={}, actual=values)  # of the other run, by node
    execution.run(node)
    execution.eager[node], execution.exact_of(node)  # with the other run's side of each tie
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx

from .exact import KERNEL_ERRORS, Environment, floats, widened_copies
from .graph_execution import FxExecution
from .local_error import NodeCheck, Segment, is_quantization
from .verdicts import verdict

_STEP = 1.0


class TieExecution(FxExecution):
    """An execution that takes another run's result of a quantization if the results differ only at ties.

    That is so if

    - the other run's arguments are within the tolerance for rounding of this execution's,
    - its result is right for its arguments, and
    - the results differ by at most one step.

    Then wherever the results differ, a tie lies between the arguments. With a wrong scale, zero point, axis or bound
    one condition fails, and eager's result stays, so that the values that follow show the fault.

    Args:
        module, arguments, state, recorded: see ``FxExecution``.
        actual: the other run's values. Without the result or an argument of a quantization, eager's result stays.

    Attributes:
        decided: the results, by node, that random rounding must not change: of the quantizations that ``actual`` has,
            and of conversions of whole numbers to integers.
        turned: by the name of a quantization, the number of elements that eager rounds to the other side of a tie.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        arguments: Sequence[object],
        state: torch.Tensor,
        *,
        recorded: Mapping[fx.Node, object],
        actual: Environment,
    ) -> None:
        super().__init__(module, arguments, state, recorded=recorded)
        self._actual = actual
        self.decided: Environment = {}
        self.turned: dict[str, int] = {}

    def run(self, node: fx.Node) -> None:
        """See ``FxExecution.run``."""
        super().run(node)
        eager, actual = self.eager[node], self._actual.get(node)
        if is_quantization(node) and isinstance(eager, torch.Tensor) and isinstance(actual, torch.Tensor):
            if self._differs_at_ties(node, eager, actual):
                if count := int((actual != eager).sum()):
                    self.turned[node.name] = count
                self.eager[node], self.exact[node] = actual, widened_copies(actual)
            self.decided[node] = self.eager[node]
        elif node in self.decisions and all(map(_is_whole, floats([self.eager[arg] for arg in node.all_input_nodes]))):
            self.decided[node] = eager

    def _differs_at_ties(self, node: fx.Node, eager: torch.Tensor, actual: torch.Tensor) -> bool:
        if actual.shape != eager.shape or bool(((actual.double() - eager.double()).abs() > _STEP).any()):
            return False
        given: Environment = {}
        for arg in node.all_input_nodes:
            given[arg] = self.eager[arg] if arg.op in ("placeholder", "get_attr") else self._actual.get(arg)
            if verdict(given[arg], self.eager[arg], self.exact_of(arg)).is_wrong:
                return False
        try:
            return not any(found.is_wrong for found in NodeCheck(Segment([node], given)).verdicts([actual]))
        except KERNEL_ERRORS:  # the arguments have another dtype or shape
            return False


def _is_whole(value: torch.Tensor) -> bool:
    return torch.equal(value, value.round())
