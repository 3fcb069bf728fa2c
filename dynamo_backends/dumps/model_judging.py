"""Judges the values of a run by an ONNX model: each is compared with what the model computes on the run's own numbers.

::

    reference = ModelReference(model, run_model(model, feeds, runtime), runtime)
    for name, found in reference.judge({"gelu": ComputedValue(value_of_another_model)}).items():
        found.is_wrong, str(found)

The values that correspond become inputs of the model, so that one run computes each from the nearest ones before it:
its *segment*. An error of one node is not carried to the next. What differs by more than rounding is computed in
float64, and from perturbed inputs, by the rule of ``numerics.whole_graph``.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeAlias

import numpy as np
import onnx
import onnx_ir as ir
import torch

from ..numerics.arrays import as_array, is_equal
from ..numerics.exact import is_floating, widen
from ..numerics.operator_facts import size_inside_named
from ..numerics.randomness import perturbed
from ..numerics.verdicts import RIGHT, Verdict
from ..numerics.whole_graph import ResultCheck, Values
from .candidate_runs import evaluated, in_float64
from .model_sessions import PLAIN, ModelSession
from .model_values import ModelRun, NodeValue, Runtime, computed_by
from .models import OnnxModel, read_by
from .reading import DumpError
from .value_differences import OnnxValue, kind_of

logger = logging.getLogger(__name__)

_COMPUTED = "__computed"


@dataclasses.dataclass(frozen=True)
class ComputedValue:
    """A value of the run that is judged."""

    array: np.ndarray
    coarsest: torch.dtype = torch.float64  # the dtype of least precision that it was computed in or from


@dataclasses.dataclass(frozen=True)
class LocalDifference:
    """How a value differs from what the reference computes on the same numbers.

    Attributes:
        verdict: whether it is more than rounding.
        is_equal: whether all elements are equal.
        noise: the size of the difference, relative to that of the value: the root of the quotient of both sums of
            squares.
        segment: the names of the reference's values that are computed together with it.
    """

    verdict: Verdict
    is_equal: bool
    noise: float = 0.0
    segment: Sequence[str] = ()

    @property
    def is_wrong(self) -> bool:
        return self.verdict.is_wrong

    def __str__(self) -> str:
        return str(self.verdict)


class ModelReference:
    """A model that judges the values of another run.

    Args:
        model: the model; that which ran, if the runtime optimizes.
        run: of the model.
        runtime: what runs it.
        is_exact: whether what differs by more than rounding is computed in float64; without, it is wrong.

    Attributes:
        notes: what could not be measured.
    """

    def __init__(self, model: OnnxModel, run: ModelRun, runtime: Runtime, *, is_exact: bool = True) -> None:
        self._model, self._runtime, self._is_exact = model, runtime, is_exact
        self._known = {item.name: item for item in run.values}
        self._producers = {name: node for node in model.proto.graph.node for name in node.output if name}
        self._order = {id(node): i for i, node in enumerate(self._producers.values())}

    def can_judge(self, name: str, value: np.ndarray) -> bool:
        """Whether a node computes a value with as many elements of the same kind."""
        own = self._known[name].value if name in self._producers and name in self._known else None
        if not isinstance(own, np.ndarray) or kind_of(own.dtype) == "string":
            return False
        return own.size == value.size and kind_of(own.dtype) == kind_of(value.dtype)

    def judge(
        self, values: Mapping[str, ComputedValue], constants: Mapping[str, np.ndarray] | None = None
    ) -> dict[str, LocalDifference]:
        """Judges values by the names of those in the model that they correspond to.

        Args:
            values: what is judged.
            constants: initializers that are used instead of the model's.

        Raises:
            DumpError: the runtime cannot run the model.
        """
        arrays = {**{name: item.array for name, item in values.items()}, **(constants or {})}
        given = {name: self._fitting(name, value) for name, value in arrays.items()}
        stored = {name: item.value for name, item in self._known.items() if item.kind == "input"}
        results = computed_by(self._cut(given, values), {**stored, **given}, self._runtime)
        return {name: self._judge(name, value, results[name + _COMPUTED], given) for name, value in values.items()}

    def _fitting(self, name: str, value: np.ndarray) -> np.ndarray:
        """A value in the shape and dtype of the reference's."""
        like = self._known[name].value
        assert isinstance(like, np.ndarray)
        return value.reshape(like.shape).astype(like.dtype, copy=False)

    def _cut(self, given: Collection[str], names: Collection[str]) -> OnnxModel:
        """The model with given values as inputs; as outputs, it computes those in ``names`` from the others."""
        model = self._model.copy()
        graph = model.proto.graph
        for node in graph.node:
            node.output[:] = [name + _COMPUTED if name in names else name for name in node.output]
        for items in (graph.value_info, graph.output):
            kept = [item for item in items if items is graph.value_info and item.name not in names]
            del items[:]
            items.extend(kept)
        for name in given:
            value = self._known[name].value
            assert isinstance(value, np.ndarray)
            number = onnx.helper.np_dtype_to_tensor_dtype(value.dtype)
            graph.input.append(onnx.helper.make_tensor_value_info(name, number, [None] * value.ndim))
        graph.output.extend(onnx.ValueInfoProto(name=name + _COMPUTED) for name in names)
        return model

    def _judge(
        self, name: str, value: ComputedValue, expected: OnnxValue, given: Mapping[str, np.ndarray]
    ) -> LocalDifference:
        assert isinstance(expected, np.ndarray)
        segment = self._segment(name, given)
        others = [item for item in segment.names if item != name]
        read = [self._known[item] for item in (*segment.inputs, *segment.names) if item in self._known]
        coarsest = coarser(value.coarsest, coarsest_of(item.value for item in read))
        again = functools.partial(self._again, segment, given, as_tensor(expected)) if self._is_exact else None
        terms, inside = segment.terms(self._known), segment.inside(given, self._known)
        return judge(value.array, as_tensor(expected), coarsest, again, lambda: terms, others, inside)

    def _segment(self, name: str, known: Collection[str]) -> _Segment:
        """The nodes that compute a value from known ones."""
        nodes: dict[int, onnx.NodeProto] = {}
        inputs: dict[str, None] = {}
        waiting = [name]
        while waiting:
            node = self._producers[waiting.pop()]
            if id(node) in nodes:
                continue
            nodes[id(node)] = node
            for item in read_by(node):
                if item in known or item not in self._producers:
                    inputs[item] = None
                else:
                    waiting.append(item)
        return _Segment(name, [nodes[key] for key in sorted(nodes, key=self._order.__getitem__)], list(inputs))

    def _again(
        self,
        segment: _Segment,
        given: Mapping[str, np.ndarray],
        expected: torch.Tensor,
        change: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """What a segment computes in float64 from changed numbers."""
        read = {name: given[name] if name in given else self._known[name].value for name in segment.inputs}
        wide = {name: change(widen(as_tensor(item))) for name, item in read.items() if isinstance(item, np.ndarray)}
        found = segment.computed(self._model, {name: as_array(item) for name, item in wide.items()})
        return expected if found is None else as_tensor(found)


Again: TypeAlias = "Callable[[Callable[[torch.Tensor], torch.Tensor]], torch.Tensor]"
"""Computes a value in float64, with each of the numbers that it is computed from changed by a function."""


def judge(
    value: np.ndarray,
    expected: torch.Tensor,
    coarsest: torch.dtype,
    again: Again | None,
    terms: Callable[[], int],
    segment: Sequence[str],
    inside: torch.Tensor | None = None,
) -> LocalDifference:
    """Judges a value by the reference's.

    Args:
        value: with as many elements as ``expected``, and of its kind.
        expected: what the reference computes from the same numbers.
        coarsest: the dtype of least precision that either of them is computed in.
        again: computes it in float64; if it is not given, ``expected`` counts.
        terms: the most terms of a sum in it.
        segment: for the result.
        inside: the largest number inside the computation of each element, see ``operator_facts.size_inside``.
    """
    ours, theirs = as_tensor(value).reshape(expected.shape), expected
    dtype = coarser(coarsest, coarser(ours.dtype, theirs.dtype)) if is_floating(theirs) else torch.int64
    if ours.dtype != theirs.dtype or is_floating(theirs):
        dtype = dtype if not theirs.is_complex() else theirs.dtype
        ours, theirs = ours.to(dtype), theirs.to(dtype)
    if is_equal(ours, theirs):
        return LocalDifference(RIGHT, True, 0.0, segment)

    def run(seed: int | None) -> Values:
        if again is None:
            return {0: _wide(theirs)}
        if seed is None:
            return {0: _wide(again(lambda item: item))}
        generator = torch.Generator().manual_seed(seed)
        unit = torch.finfo(dtype).eps if is_floating(theirs) else torch.finfo(torch.float32).eps
        return {0: _wide(again(lambda item: perturbed(item, unit, generator)))}

    magnitudes = (dict) if inside is None else (lambda: {0: inside})
    verdict = ResultCheck({0: theirs}, run, terms=terms, magnitudes=magnitudes).judge(0, ours)
    return LocalDifference(verdict, False, noise_of(ours, theirs), segment)


def coarser(first: torch.dtype, second: torch.dtype) -> torch.dtype:
    """The floating-point dtype of less precision."""
    return max(first, second, key=lambda dtype: torch.finfo(dtype).eps if dtype.is_floating_point else 0.0)


def coarsest_of(values: Iterable[OnnxValue]) -> torch.dtype:
    """The floating-point dtype of least precision. Those of 8 bits do not count: they are for storage only."""
    dtypes = {value.dtype for value in values if isinstance(value, np.ndarray)}
    floats = [
        as_tensor(np.zeros(0, dtype)).dtype for dtype in dtypes if kind_of(dtype) == "float" and dtype.itemsize > 1
    ]
    return functools.reduce(coarser, floats, torch.float64)


@dataclasses.dataclass(frozen=True)
class _Segment:
    """Some nodes that compute a value."""

    name: str
    nodes: Sequence[onnx.NodeProto]  # in execution order
    inputs: Sequence[str]

    @property
    def names(self) -> list[str]:
        """The first results of its nodes."""
        return [node.output[0] for node in self.nodes]

    def terms(self, known: Mapping[str, NodeValue]) -> int:
        """The most terms that a sum in it can have."""
        values = (known[name].value for name in self.inputs if name in known)
        return max((value.size for value in values if isinstance(value, np.ndarray)), default=1)

    def inside(self, given: Mapping[str, np.ndarray], known: Mapping[str, NodeValue]) -> torch.Tensor | None:
        """For each element, the largest number inside its computation, if it is a single activation."""
        if len(self.nodes) != 1 or not self.inputs:
            return None
        name = self.inputs[0]
        argument = given[name] if name in given else known[name].value
        if not isinstance(argument, np.ndarray) or kind_of(argument.dtype) != "float":
            return None
        return size_inside_named(self.nodes[0].op_type.lower(), as_tensor(argument))

    def computed(self, model: OnnxModel, feeds: Mapping[str, np.ndarray]) -> np.ndarray | None:
        """Its value in float64; ``None`` if nothing can compute that."""
        inputs = [
            onnx.helper.make_tensor_value_info(name, onnx.helper.np_dtype_to_tensor_dtype(item.dtype), item.shape)
            for name, item in feeds.items()
        ]
        graph = onnx.helper.make_graph(self.nodes, "segment", inputs, [onnx.ValueInfoProto(name=self.name)])
        proto = onnx.helper.make_model(graph, ir_version=model.proto.ir_version, opset_imports=model.proto.opset_import)
        wide = in_float64(ir.from_proto(proto))
        found = evaluated(wide, feeds)  # first: a kernel that is wrong in float32 may be wrong in float64 too
        try:
            given = found or ModelSession(OnnxModel(ir.to_proto(wide), model.folder, self.name), PLAIN)(feeds)
        except DumpError as error:
            logger.info("%s has no float64: %s", self.name, error)
            return None
        value = given[self.name]
        return value if isinstance(value, np.ndarray) else None


def _wide(value: torch.Tensor) -> torch.Tensor:
    value = value.detach()
    return value.double() if value.is_floating_point() else value


def noise_of(value: torch.Tensor, expected: torch.Tensor) -> float:
    """See ``LocalDifference``; 0 for discrete values."""
    if not is_floating(expected) or value.shape != expected.shape:
        return 0.0
    wide = _wide(expected)
    size = float(torch.linalg.vector_norm(wide))
    difference = float(torch.linalg.vector_norm(_wide(value) - wide))
    return difference / size if size else math.inf if difference else 0.0


def decibels(noise: float) -> float:
    """The ratio of signal to noise."""
    return -20 * math.log10(noise) if noise else math.inf


def as_tensor(value: np.ndarray) -> torch.Tensor:
    """A tensor with the elements of an array; those of ``ml_dtypes`` in PyTorch's dtype of this name."""
    value = np.require(value, requirements=["C_CONTIGUOUS", "WRITEABLE"])
    if value.dtype.isbuiltin == 1:
        return torch.from_numpy(value)
    dtype = getattr(torch, value.dtype.name, None)
    if dtype is None or dtype.itemsize != value.dtype.itemsize or "int" in value.dtype.name:
        return torch.from_numpy(value.astype(np.int64 if kind_of(value.dtype) == "integer" else np.float32))
    return torch.from_numpy(value.view(f"u{value.dtype.itemsize}")).view(dtype)
