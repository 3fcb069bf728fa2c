"""The error that a node makes by itself: its result against PyTorch's on the same arguments.

What rounding may do at each element is found in steps, each only where the one before does not explain the result:

1. units in the last place;
2. the numbers inside of the computation: the sum of the magnitudes of what is added up, the numbers near one that some
   functions are computed of;
3. eager's own error against float64;
4. by how much float64's result changes if all arguments are perturbed by up to a unit in their last place.

What is selected, compared or rounded once (``where``, ``argmax``, ``add``) has only the first and the third: on the
same arguments another result is no matter of rounding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from .distance import dense, distance
from .exact import REFUSALS, Environment, run_eager, run_exact, run_only_exact, widen
from .measure import Measure
from .randomness import MOST_PERTURBATIONS, PERTURBATIONS, perturbed, size_near_one
from .verdicts import RIGHT, Verdict, index_of, is_discrete, verdict

SUMS = frozenset(
    {
        "mm", "addmm", "bmm", "baddbmm", "matmul", "linear",
        "mv", "addmv", "dot", "convolution", "convolution_backward", "sum",
        "mean", "cumsum", "index_add", "scatter_add", "scatter_reduce", "embedding_dense_backward",
        "_embedding_bag", "avg_pool1d", "avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d",
        "upsample_bilinear2d", "upsample_linear1d", "upsample_trilinear3d",
    }
)  # fmt: skip
"""Operators that add products of their arguments: of the magnitudes they make the sum of the magnitudes."""

_ROUNDED_ONCE = frozenset(
    {
        "add", "sub", "rsub", "mul", "div", "neg",
        "abs", "sign", "sgn", "floor", "ceil", "round",
        "trunc", "where", "masked_fill", "fill", "clamp", "clamp_min",
        "clamp_max", "minimum", "maximum", "relu", "threshold", "eq",
        "ne", "lt", "le", "gt", "ge", "argmax",
        "argmin", "sort", "topk", "max", "min", "amax",
        "amin", "any", "all", "isnan", "isinf", "logical_and",
        "logical_or", "logical_not", "logical_xor", "bitwise_and", "bitwise_or", "bitwise_not",
        "signbit", "_to_copy",
    }
)  # fmt: skip
"""Operators that select, compare, or round one exact result."""


_OF_ONE = frozenset({"expm1", "log1p", "erfc", "asinh", "acosh", "atanh", "logit", "logaddexp", "logaddexp2"})
"""Functions that ONNX has to make of others, of numbers near one."""


def name_of(node: fx.Node) -> str:
    """The name that all overloads of a node's operator have; ``""`` if it calls none."""
    return node.target.overloadpacket.__name__ if isinstance(node.target, torch._ops.OpOverload) else ""


@dataclasses.dataclass(frozen=True)
class Segment:
    """Nodes of a graph that are computed together.

    Attributes:
        nodes: in order; the last one's results are compared. Several where what it reads is no value of the model.
        given: the values of what else they read, as they were where the results were computed.
    """

    nodes: Sequence[fx.Node]
    given: Environment

    def results(self, run: Callable[[fx.Node, Environment], object], given: Environment) -> object:
        """What the last node computes, each run by ``run`` on the values before it."""
        values = dict(given)
        for node in self.nodes:
            values[node] = run(node, values)
        return values[self.nodes[-1]]


class NodeCheck:
    """Judges the results of a segment, mostly of one node.

    Attributes:
        eager: PyTorch's results.
        inexact: by a node's name, why PyTorch has no float64 of it.

    Raises:
        REFUSALS, IndexError: PyTorch does not take what was given.
    """

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._node = segment.nodes[-1]
        self._name = name_of(self._node)
        self._generator = torch.Generator().manual_seed(0)
        self._exact: list[object] | None = None
        self._perturbed: list[list[object]] = []
        self.inexact: dict[str, str] = {}
        self._by_eager: Environment = {}
        self.eager = _leaves(segment.results(self._run_eager, segment.given))

    def verdicts(self, actual: Sequence[object]) -> list[Verdict]:
        """The verdicts on the results; of what was not computed, ``None``, there is none to make."""
        return [self._verdict(i, value) for i, value in enumerate(actual)]

    def eager_error(self, i: int) -> Measure:
        """PyTorch's own distance to float64, where that was asked for; else none."""
        eager, exact = self.eager[i], None if self._exact is None else self._exact[i]
        both = isinstance(eager, torch.Tensor) and isinstance(exact, torch.Tensor)
        return distance(dense(eager), dense(exact)) if both else Measure()

    def _verdict(self, i: int, value: object) -> Verdict:
        eager = self.eager[i]
        if not isinstance(value, torch.Tensor) or not isinstance(eager, torch.Tensor):
            return RIGHT
        return self._tensor_verdict(i, dense(value), dense(eager))

    def _tensor_verdict(self, i: int, value: torch.Tensor, eager: torch.Tensor) -> Verdict:
        if value.dtype != eager.dtype or value.shape != eager.shape or is_discrete(value):
            found = verdict(value, eager, eager)
            if found.is_wrong and is_discrete(value) and value.dtype == eager.dtype and not self._is_rounded_once:
                return verdict(value, eager, eager, self._perturbed_results(i))
            return found
        if torch.equal(value, eager):
            return Verdict(ours=Measure(), eager=Measure())
        near, inner = distance(value, eager), None
        if not near.is_rounding and not self._is_rounded_once:
            inner = self._inner(i)
            near = near if inner is None else distance(value, eager, inner=inner)
        if near.is_rounding:
            return Verdict(ours=near, eager=Measure(scale=near.scale), index=index_of(near, value))
        row = 1 if self._is_pointwise or not value.dim() else value.shape[-1]
        found = verdict(value, eager, self._exact_results()[i], group=row, inner=inner)
        if not found.is_wrong or self._is_rounded_once:
            return found
        return verdict(value, eager, self._exact_results()[i], self._perturbed_results(i), group=row, inner=inner)

    @property
    def _is_pointwise(self) -> bool:
        """Whether an element of the result depends on one of each argument: the errors of others say nothing of it."""
        tags = self._node.target.tags if isinstance(self._node.target, torch._ops.OpOverload) else ()
        return self._is_rounded_once or (torch.Tag.pointwise in tags and len(self._segment.nodes) == 1)

    def _run_eager(self, node: fx.Node, values: Environment) -> object:
        self._by_eager[node] = run_eager(node, values)
        return self._by_eager[node]

    @property
    def _is_rounded_once(self) -> bool:
        """Whether nothing but one rounding, or none, is between the arguments and the result.

        Not in float16: ONNX Runtime computes it in float32, and leaves out the rounding between two nodes. A number
        among the arguments may be rounded to half precision before it takes part.
        """
        if self._name not in _ROUNDED_ONCE or "alpha" in self._node.kwargs or len(self._segment.nodes) > 1:
            return False
        dtypes = {item.dtype for item in self._tensors() if item.is_floating_point()}
        numbers = [leaf for leaf in pytree.tree_leaves((self._node.args, self._node.kwargs)) if isinstance(leaf, float)]
        return torch.float16 not in dtypes and (torch.bfloat16 not in dtypes or all(map(_is_bfloat16, numbers)))

    def _tensors(self) -> list[torch.Tensor]:
        leaves = pytree.tree_leaves(list(self._segment.given.values()))
        return [item for item in leaves if isinstance(item, torch.Tensor)]

    def _inner(self, i: int) -> torch.Tensor | None:
        """For each element, the magnitude of the numbers inside of the computation; ``None`` if it is not known."""
        eager = self.eager[i]
        assert isinstance(eager, torch.Tensor)
        if self._name in SUMS:
            absolute = {arg: pytree.tree_map(_magnitude, value) for arg, value in self._segment.given.items()}
            try:
                size = _leaves(self._segment.results(run_eager, absolute))[i]
            except REFUSALS:  # it has no float32 of these
                return None
            return size.abs().float() if isinstance(size, torch.Tensor) else None
        if len(self._segment.nodes) > 1:
            return None
        read = [self._segment.given[arg] for arg in self._node.all_input_nodes]
        floats = [dense(item) for item in read if isinstance(item, torch.Tensor) and item.is_floating_point()]
        if self._name in ("add", "sub", "rsub", "lerp"):  # of several roundings, or in half precision
            return sum((_finite(item).expand(eager.shape) for item in floats), torch.zeros(eager.shape))
        if self._name in _OF_ONE:
            return torch.ones(eager.shape)
        return size_near_one(self._name, [item.float() for item in floats])

    def _exact_results(self) -> list[object]:
        if self._exact is None:
            wide = {arg: pytree.tree_map(widen, value) for arg, value in self._segment.given.items()}

            def run(node: fx.Node, values: Environment) -> object:
                return run_exact(node, values, self._by_eager[node], self.inexact)

            self._exact = _leaves(self._segment.results(run, wide))
        return self._exact

    def _perturbed_results(self, i: int) -> list[object]:
        """Float64's i-th result where each argument is perturbed by up to a unit in its last place."""
        is_double = any(item.dtype is torch.float64 for item in self._tensors())
        # In float64 a perturbation is a whole unit or none, and what cancels stays 0 more often
        times = MOST_PERTURBATIONS if is_double or self._is_pointwise else PERTURBATIONS
        for _ in range(times - len(self._perturbed)):
            values = pytree.tree_map(self._perturb, dict(self._segment.given))
            try:
                self._perturbed.append(_leaves(self._segment.results(self._run_perturbed, values)))
            except REFUSALS:  # float64 has not the operator
                self._perturbed.append(self._exact_results())
        return [results[i] for results in self._perturbed]

    def _perturb(self, value: object) -> object:
        return perturbed(value, self._generator, zeros_stay=all(map(is_discrete, self.eager)))

    def _run_perturbed(self, node: fx.Node, values: Environment) -> object:
        """In float64; between two nodes of the segment there is rounding, too."""
        result = run_only_exact(node, values)
        fake = self._by_eager[node]
        if node is self._node or not isinstance(result, torch.Tensor) or not isinstance(fake, torch.Tensor):
            return result
        return perturbed(result, self._generator, dtype=fake.dtype) if fake.is_floating_point() else result


def is_broadcast(shape: Sequence[int], to: Sequence[int]) -> bool:
    """Whether a tensor of one shape is expanded to another one."""
    pairs = zip(reversed(shape), reversed(to), strict=False)
    return len(shape) <= len(to) and all(size in (1, other) for size, other in pairs)


def _magnitude(value: object) -> Any:
    """The magnitudes of floating-point elements, in float32 at least; anything else as it is."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return value.abs() if value.dtype is torch.float64 else value.float().abs()


def _finite(value: torch.Tensor) -> torch.Tensor:
    """The magnitudes of the elements; 0 where they are not finite."""
    return dense(value).float().abs().nan_to_num(0.0, 0.0, 0.0)


def _leaves(results: object) -> list[object]:
    return list(results) if isinstance(results, (tuple, list)) else [results]


def _is_bfloat16(number: float) -> bool:
    return float(torch.tensor(number).to(torch.bfloat16)) == number
