"""The error of a single node: its result against PyTorch's on the same inputs.

The tolerance of each element is found in steps; each step is taken only if the result is not yet within it:

1. units in the last place;
2. numbers inside the computation: the sum of the magnitudes of the terms of a sum, numbers near one;
3. eager's own error against float64;
4. the change of float64's result when all inputs are perturbed by up to a unit in their last place.

For operators that select, compare or round once (``where``, ``argmax``, ``add``) only steps 1 and 3 apply: on the same
inputs, rounding cannot change their results.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ..graphs.locations import user_name
from .exact import KERNEL_ERRORS, Environment, floats, run_eager, run_exact, run_only_exact, widened
from .measure import Measure
from .randomness import MOST_PERTURBATIONS, PERTURBATIONS, perturbed, size_near_one
from .tensor_measure import dense, measure_tensor
from .verdicts import RIGHT, Verdict, index_of, is_discrete, verdict

SUMS = frozenset(
    {
        "mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "mv", "addmv", "dot", "convolution",
        "convolution_backward", "sum", "mean", "cumsum", "index_add", "scatter_add", "scatter_reduce",
        "embedding_dense_backward", "_embedding_bag", "avg_pool1d", "avg_pool2d", "avg_pool3d",
        "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "upsample_bilinear2d", "_upsample_bilinear2d_aa",
        "upsample_linear1d", "upsample_trilinear3d", "conv1d", "conv2d", "conv3d", "conv_transpose1d",
        "conv_transpose2d", "conv_transpose3d", "einsum",
    }
)  # fmt: skip
"""Operators that add products of their arguments: applied to magnitudes, they return the sum of the magnitudes."""

_MEANS = {
    "var_mean": {1}, "std_mean": {1}, "native_layer_norm": {1}, "native_group_norm": {1}, "native_batch_norm": {1},
    "_native_batch_norm_legit": {1}, "_native_batch_norm_legit_functional": {1, 3},
}  # fmt: skip
"""By operator, the positions of results that are means, of a batch or running: in them terms of both signs cancel."""

_ROUNDED_ONCE = frozenset(
    {
        "add", "sub", "rsub", "mul", "div", "neg", "abs", "sign", "sgn", "floor", "ceil", "round", "trunc", "where",
        "masked_fill", "fill", "clamp", "clamp_min", "clamp_max", "minimum", "maximum", "relu", "threshold", "eq",
        "ne", "lt", "le", "gt", "ge", "argmax", "argmin", "sort", "topk", "max", "min", "amax", "amin", "any", "all",
        "isnan", "isinf", "logical_and", "logical_or", "logical_not", "logical_xor", "bitwise_and", "bitwise_or",
        "bitwise_not", "signbit", "_to_copy",
    }
)  # fmt: skip
"""Operators that select, compare, or round an exact result once."""

_OF_ONE = frozenset({"expm1", "log1p", "erfc", "asinh", "acosh", "atanh", "logit", "logaddexp", "logaddexp2"})
"""Functions that ONNX composes of others, with numbers near one."""


def name_without_overload(node: fx.Node) -> str:
    """The name that all overloads of a node's operator have; ``""`` if it calls none."""
    return node.target.overloadpacket.__name__ if isinstance(node.target, torch._ops.OpOverload) else ""


def is_quantization(node: fx.Node) -> bool:
    """Whether a node rounds to whole numbers: ``round``, and ``quantize_per_tensor`` and the like."""
    name = name_without_overload(node)
    return name == "round" or name.startswith("quantize_per_")


@dataclasses.dataclass(frozen=True)
class Segment:
    """Nodes of a graph that are computed together: several if the inputs of the last one are no values of the model."""

    nodes: Sequence[fx.Node]  # in order; the results of the last one are compared
    given: Environment  # the other values that they read, as they were when the results were computed

    def results(self, run: Callable[[fx.Node, Environment], object], given: Environment) -> object:
        """The results of the last node, if each node is run by ``run``."""
        values = dict(given)
        for node in self.nodes:
            values[node] = run(node, values)
        return values[self.nodes[-1]]


class NodeCheck:
    """Compares the results of a segment, which is usually one node.

    Attributes:
        eager: PyTorch's results.
        inexact: by node name, why PyTorch has no float64 kernel.

    Raises:
        KERNEL_ERRORS, IndexError: PyTorch does not accept the inputs.
    """

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._node = segment.nodes[-1]
        self._name = name_without_overload(self._node)
        self._generator = torch.Generator().manual_seed(0)
        self._exact: list[object] | None = None
        self._perturbed: list[list[object]] = []
        self.inexact: dict[str, str] = {}
        self._by_eager: Environment = {}
        self.eager = self._results(self._run_eager, segment.given)

    def _results(self, run: Callable[[fx.Node, Environment], object], given: Environment) -> list[object]:
        results = self._segment.results(run, given)
        return list(results) if isinstance(results, (tuple, list)) else [results]

    def verdicts(self, actual: Sequence[object]) -> list[Verdict]:
        """The verdicts on the results; a result that was not computed is ``None``, and is not compared."""
        return [
            self._verdict(i, dense(value), dense(eager))
            if isinstance(value, torch.Tensor) and isinstance(eager := self.eager[i], torch.Tensor)
            else RIGHT
            for i, value in enumerate(actual)
        ]

    def eager_error(self, i: int) -> Measure:
        """The error of PyTorch's result, if float64 was needed for a verdict; else zero."""
        eager, exact = self.eager[i], None if self._exact is None else self._exact[i]
        both = isinstance(eager, torch.Tensor) and isinstance(exact, torch.Tensor)
        return measure_tensor(dense(eager), dense(exact)) if both else Measure()

    def _verdict(self, i: int, value: torch.Tensor, eager: torch.Tensor) -> Verdict:
        if value.dtype != eager.dtype or value.shape != eager.shape or is_discrete(value):
            found = verdict(value, eager, eager, inputs=self._elementwise_inputs)
            if found.is_wrong and found.is_of_size and is_discrete(value) and not self._is_rounded_once:
                others = self._perturbed_results(i)
                if not is_quantization(self._node):
                    return verdict(value, eager, eager, others, inputs=self._elementwise_inputs)
                for other in others:  # only these elements may differ, and only so
                    value = torch.where(value == other, eager, value)
                return verdict(value, eager, eager, inputs=self._elementwise_inputs)
            return found
        if torch.equal(value, eager):
            return Verdict(ours=Measure(), eager=Measure())
        near, inner_size = measure_tensor(value, eager), None
        if not near.is_rounding and not self._is_rounded_once:
            inner_size = self._inner(i)
            near = near if inner_size is None else measure_tensor(value, eager, inner_size=inner_size)
        if near.is_rounding:
            return Verdict(ours=near, eager=Measure(scale=near.scale), index=index_of(near, value))
        row = 1 if self._is_pointwise or not value.dim() else value.shape[-1]
        judge = functools.partial(
            verdict, value, eager, self._exact_results()[i], group_size=row, inner_size=inner_size,
            inputs=self._elementwise_inputs,
        )  # fmt: skip
        found = judge()
        return found if not found.is_wrong or self._is_rounded_once else judge(self._perturbed_results(i))

    @functools.cached_property
    def _elementwise_inputs(self) -> dict[str, torch.Tensor]:
        """By the user's name, or else the node's, the inputs of an elementwise operator; none of another one."""
        if not self._has_tag_pointwise:
            return {}
        read = ((user_name(node) or node.name, self._segment.given[node]) for node in self._node.all_input_nodes)
        return {name: dense(item) for name, item in read if isinstance(item, torch.Tensor)}

    @property
    def _is_pointwise(self) -> bool:
        """Whether an element of the result depends on one of each input: errors of other elements do not count."""
        return self._is_rounded_once or self._has_tag_pointwise

    @property
    def _has_tag_pointwise(self) -> bool:
        tags = self._node.target.tags if isinstance(self._node.target, torch._ops.OpOverload) else ()
        return torch.Tag.pointwise in tags and len(self._segment.nodes) == 1

    def _run_eager(self, node: fx.Node, values: Environment) -> object:
        self._by_eager[node] = run_eager(node, values)
        return self._by_eager[node]

    @property
    def _is_rounded_once(self) -> bool:
        """Whether there is at most one rounding between the inputs and the result.

        Not in float16: ONNX Runtime computes in float32, and omits the rounding between two nodes. A Python number
        among the arguments may be rounded to half precision first.
        """
        if self._name not in _ROUNDED_ONCE or "alpha" in self._node.kwargs or len(self._segment.nodes) > 1:
            return False
        dtypes = self._dtypes()
        numbers = [leaf for leaf in pytree.tree_leaves((self._node.args, self._node.kwargs)) if isinstance(leaf, float)]
        return torch.float16 not in dtypes and (torch.bfloat16 not in dtypes or all(map(_is_bfloat16, numbers)))

    def _dtypes(self) -> set[torch.dtype]:
        """The floating-point dtypes that the segment reads."""
        return {item.dtype for item in floats(list(self._segment.given.values()))}

    def _inner(self, i: int) -> torch.Tensor | None:
        """For each element, the magnitude of the numbers inside the computation; ``None`` if it is not known."""
        eager = self.eager[i]
        assert isinstance(eager, torch.Tensor)
        if self._name in SUMS or i in _MEANS.get(self._name, ()):
            absolute = pytree.tree_map(_magnitude, dict(self._segment.given))
            try:
                size = self._results(run_eager, absolute)[i]
            except KERNEL_ERRORS:  # no float32 kernel
                return None
            return size.abs().float() if isinstance(size, torch.Tensor) else None
        if len(self._segment.nodes) > 1:
            return None
        read = [self._segment.given[arg] for arg in self._node.all_input_nodes]
        inputs = [dense(item).float() for item in read if isinstance(item, torch.Tensor) and item.is_floating_point()]
        if self._name in ("add", "sub", "rsub", "lerp"):  # of several roundings, or in half precision
            sizes = (item.abs().nan_to_num(0.0, 0.0, 0.0).expand(eager.shape) for item in inputs)
            return sum(sizes, torch.zeros(eager.shape))
        return torch.ones(eager.shape) if self._name in _OF_ONE else size_near_one(self._name, inputs)

    def _exact_results(self) -> list[object]:
        if self._exact is None:

            def run(node: fx.Node, values: Environment) -> object:
                return run_exact(node, values, self._by_eager[node], self.inexact)

            self._exact = self._results(run, widened(dict(self._segment.given)))
        return self._exact

    def _perturbed_results(self, i: int) -> list[object]:
        """Float64's i-th result with each input perturbed by up to a unit in its last place, several times."""
        # In float64 a perturbation is a whole unit or none, and terms that cancel more often remain 0
        is_sparse = torch.float64 in self._dtypes() or self._is_pointwise or is_quantization(self._node)
        zeros_stay = not floats(self.eager)
        while len(self._perturbed) < (MOST_PERTURBATIONS if is_sparse else PERTURBATIONS):
            given = {
                node: pytree.tree_map(lambda item: perturbed(item, self._generator, zeros_stay=zeros_stay), value)
                for node, value in self._segment.given.items()
            }
            try:
                self._perturbed.append(self._results(self._run_perturbed, given))
            except KERNEL_ERRORS:  # no float64 kernel
                self._perturbed.append(self._exact_results())
        return [results[i] for results in self._perturbed]

    def _run_perturbed(self, node: fx.Node, values: Environment) -> object:
        """Runs a node in float64. Results that other nodes of the segment read are perturbed too.

        An operator without float64 that rounds to integers runs in the model's dtype: near a tie, the perturbation is
        larger than the rounding of the arguments.
        """
        try:
            result = run_only_exact(node, values)
        except KERNEL_ERRORS:
            if floats(self._by_eager[node]):
                raise
            known = {**self._segment.given, **self._by_eager}
            given = {arg: _as(known[arg], values[arg]) for arg in node.all_input_nodes}
            result = run_eager(node, given)
        fake = self._by_eager[node]
        if node is self._node or not isinstance(result, torch.Tensor) or not isinstance(fake, torch.Tensor):
            return result
        return perturbed(result, self._generator, dtype=fake.dtype) if fake.is_floating_point() else result


def _magnitude(value: object) -> Any:
    """The magnitudes of floating-point elements, in float32 at least; others unchanged."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    return value.abs() if value.dtype is torch.float64 else value.float().abs()


def _as(known: object, value: object) -> object:
    """A value in the dtype of the known one."""
    return value.to(known.dtype) if isinstance(known, torch.Tensor) and isinstance(value, torch.Tensor) else value


def _is_bfloat16(number: float) -> bool:
    return float(torch.tensor(number).to(torch.bfloat16)) == number
