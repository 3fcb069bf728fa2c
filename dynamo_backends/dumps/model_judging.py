"""Judges values of ONNX models: each is compared with what a model computes from the same numbers.

::

    Part(lambda: model, feeds, "gelu", run).judge(value).is_wrong      # by a model, such as a single node, in float64

    reference = ModelReference(model, run_model(model, feeds, runtime), runtime)
    for name, found in reference.judge({"gelu": ComputedValue(value_of_another_model)}).items():
        found.is_wrong, str(found)

In a ``ModelReference``, the values that correspond become inputs of the model, so that one run computes each from the
nearest ones before it: its *segment*. An error of one node is not carried to the next. What differs by more than
rounding is computed in float64, and from perturbed inputs, by the rule of ``numerics.whole_graph``.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TypeAlias

import ml_dtypes
import numpy as np
import onnx_ir as ir
import torch

from ..numerics import rule
from ..numerics.arrays import as_array
from ..numerics.exact import is_floating
from ..numerics.randomness import perturbed
from ..numerics.verdicts import RIGHT, Verdict
from ..numerics.whole_graph import ResultCheck, Values
from . import rounding_inside
from .model_sessions import PLAIN, RANDOM, ModelSession
from .model_values import ModelRun, Runtime, computed_by
from .models import OnnxModel, OnnxValue, described, kind_of
from .reading import DumpError
from .reference_evaluator import Change, computed_in_float64, widened
from .repro import known_to_numpy
from .submodels import Feeds, Parts

logger = logging.getLogger(__name__)

_COMPUTED = "__computed"

EQUAL, ROUNDING, DIFFERENT, UNSURE, ONLY_FIRST, ONLY_SECOND = "=", "~", "!", "?", "-", "+"
LEGEND = {
    EQUAL: "equal",
    ROUNDING: "different, within the tolerance",
    DIFFERENT: "different beyond the tolerance",
    UNSURE: "different, and may not correspond: judged with the value that it computes",
    ONLY_FIRST: "only in the first model",
    ONLY_SECOND: "only in the second model",
}


@dataclasses.dataclass(frozen=True)
class ComputedValue:
    """A value of the run that is judged."""

    array: np.ndarray
    coarsest: torch.dtype = torch.float64  # the dtype of least precision that it was computed in or from
    inside: torch.dtype = torch.float64  # that of the values between it and those that are judged


@dataclasses.dataclass(frozen=True)
class ValueDifference:
    """How a value differs from its reference.

    Attributes:
        verdict: whether it is more than rounding.
        noise: the size of the difference, relative to that of the value: the root of the quotient of both sums of
            squares.
        segment: the names of the reference's values that are computed together with it.
        inside: the dtype of least precision of what is between it and the values that it is judged with.
    """

    verdict: Verdict = RIGHT
    noise: float = 0.0
    segment: Sequence[str] = ()
    inside: torch.dtype = torch.float64

    @property
    def is_wrong(self) -> bool:
        return self.verdict.is_wrong

    @property
    def is_equal(self) -> bool:
        """Whether all elements are equal, or both NaN."""
        return not self.verdict.complaint and (self.verdict.ours is None or not self.verdict.ours.differs)

    @property
    def error(self) -> float:
        """The largest error; infinite if elements are NaN or infinite in one value only, or cannot be compared."""
        ours = self.verdict.ours
        return math.inf if ours is None or ours.nonfinite else ours.max_abs

    def mark(self, otherwise: str = DIFFERENT) -> str:
        """``=``, ``~``, or ``otherwise`` if it is not rounding; keys of ``LEGEND``."""
        return EQUAL if self.is_equal else otherwise if self.is_wrong else ROUNDING

    def __str__(self) -> str:
        return str(self.verdict)

    def as_json(self) -> dict[str, object]:
        return {
            "complaint": self.verdict.complaint,
            "measure": self.verdict.ours,
            "noise": self.noise,
            "together_with": list(self.segment),
        }


def difference(first: OnnxValue, second: OnnxValue) -> ValueDifference:
    """The difference of the second value from the first, within the rounding of single operators.

    Tensors of different shapes with equally many elements are compared flat.
    """
    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
        kinds = {kind_of(first.dtype), kind_of(second.dtype)}
        if first.size == second.size and not ("float" in kinds and len(kinds) > 1):
            return _of_tensors(first.reshape(-1), second.reshape(-1))
    elif isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)) and len(first) == len(second):
        parts = [difference(*items) for items in zip(first, second, strict=True)]
        return max(parts, key=lambda item: (item.is_wrong, not item.is_equal), default=ValueDifference())
    elif isinstance(first, dict) and isinstance(second, dict) and first.keys() == second.keys():
        return difference([np.asarray(first[key]) for key in first], [np.asarray(second[key]) for key in first])
    elif first is None and second is None:
        return ValueDifference()
    return ValueDifference(Verdict(f"{described(first)} and {described(second)}"))


def _of_tensors(first: np.ndarray, second: np.ndarray) -> ValueDifference:
    if "string" in (kind_of(first.dtype), kind_of(second.dtype)):
        return ValueDifference(Verdict("" if np.array_equal(first, second) else "other text"))
    name = max((first.dtype, second.dtype), key=_epsilon).name
    first, second = map(known_to_numpy, (first, second))
    found, _ = rule.judge(second, first, name)
    if first.dtype.kind in "biu":
        differing = f"{found.max_ulp:.0f} differ" if found.differs else ""
        return ValueDifference(Verdict(differing))
    noise = noise_of(torch.from_numpy(second.copy()), torch.from_numpy(first.copy())) if found.differs else 0.0
    return ValueDifference(Verdict(ours=found), noise)


def _epsilon(dtype: np.dtype) -> float:
    if kind_of(dtype) == "float":
        return float(ml_dtypes.finfo(dtype).eps)
    return float(np.finfo(dtype).eps) if kind_of(dtype) == "complex" else 0.0


def epsilon_of(value: OnnxValue) -> float:
    """The relative rounding of a tensor's dtype; 0 for anything else."""
    return _epsilon(value.dtype) if isinstance(value, np.ndarray) else 0.0


class ModelReference:
    """A model that judges the values of another run.

    Args:
        model: the model; that which ran, if the runtime optimizes.
        run: of the model.
        runtime: what runs it.
        is_exact: whether what differs by more than rounding is computed in float64; without, it is wrong.
    """

    def __init__(self, model: OnnxModel, run: ModelRun, runtime: Runtime, *, is_exact: bool = True) -> None:
        self._model, self._runtime, self._is_exact = model, runtime, is_exact
        self._known = {item.name: item for item in run.values}
        self._arrays = {name: item.value for name, item in self._known.items() if isinstance(item.value, np.ndarray)}
        self._parts = Parts(model.model)

    def can_judge(self, name: str, value: np.ndarray) -> bool:
        """Whether a node computes a value with as many elements of the same kind."""
        own = self._arrays.get(name) if name in self._parts.by_name else None
        if own is None or kind_of(own.dtype) == "string":
            return False
        return own.size == value.size and kind_of(own.dtype) == kind_of(value.dtype)

    def judge(
        self, values: Mapping[str, ComputedValue], constants: Mapping[str, np.ndarray] | None = None
    ) -> dict[str, ValueDifference]:
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
        results = computed_by(self._cut(given, values), self._runtime)({**stored, **given})
        return {name: self._judge(name, value, results[name + _COMPUTED], given) for name, value in values.items()}

    def _fitting(self, name: str, value: np.ndarray) -> np.ndarray:
        """A value in the shape and dtype of the reference's."""
        like = self._arrays[name]
        return value.reshape(like.shape).astype(like.dtype, copy=False)

    def _cut(self, given: Collection[str], names: Collection[str]) -> OnnxModel:
        """The model with given values as inputs; as outputs, it computes those in ``names`` from the others."""
        model = self._model.model.clone()
        graph = model.graph
        graph.outputs.clear()
        values = {str(value.name): value for node in graph for value in node.outputs} | dict(graph.initializers)
        for name in given:
            like, old = self._arrays[name], values[name]
            shape = ir.Shape([None] * like.ndim)
            new = ir.Value(name=name, type=ir.TensorType(ir.DataType.from_numpy(like.dtype)), shape=shape)
            old.replace_all_uses_with(new)
            graph.initializers.pop(name, None)
            graph.inputs.append(new)
            if name in names:
                old.name = name + _COMPUTED
                graph.outputs.append(old)
        return OnnxModel(model, self._model.name)

    def _judge(
        self, name: str, value: ComputedValue, expected: OnnxValue, given: Mapping[str, np.ndarray]
    ) -> ValueDifference:
        assert isinstance(expected, np.ndarray)
        kept = self._parts.before([name], given)
        read = [str(item.name) for item in self._parts.inputs_of(kept)]
        inside = [str(item.name) for i in kept for item in self._parts.nodes[i].outputs if item.name]
        values = {**self._arrays, **given}
        coarsest = coarsest_of([self._arrays[item] for item in (*read, *inside) if item in self._arrays])
        coarsest = coarser(value.coarsest, coarsest)
        names = [str(self._parts.nodes[i].outputs[0].name) for i in kept]
        if self._is_exact and not any(self._parts.nodes[i].op_type in RANDOM for i in kept):
            part = Part(lambda: self._part(kept, name, values), values, name, self._run)
            found = part.judge(value.array, expected, coarsest)
            assert found is not None
        else:
            found = judge(value.array, as_tensor(expected), coarsest)
        return dataclasses.replace(found, segment=[item for item in names if item != name])

    def _part(self, kept: Collection[int], name: str, values: Feeds) -> ir.Model | None:
        """Some nodes as a model, with the initializers of ``values``."""
        part = self._parts.cut(kept, values, outputs=[name])
        for key, item in part.graph.initializers.items() if part is not None else ():
            if values[key] is not self._arrays[key]:
                item.const_value = ir.tensor(values[key], name=key)
        return part

    def _run(self, model: ir.Model, feeds: Feeds) -> Feeds | None:
        """The outputs of a part of the model on ONNX Runtime; ``None`` if it does not run."""
        try:
            found = ModelSession(OnnxModel(model, self._model.name), PLAIN)(feeds)
        except DumpError as error:
            logger.info("a part of %s does not run: %s", self._model.name, error)
            return None
        return {name: item for name, item in found.items() if isinstance(item, np.ndarray)}


class Part:
    """A model that computes a value in float64, again from changed numbers.

    Args:
        model: returns it; ``None`` if it cannot be cut. Called when it is needed.
        feeds: its inputs; others are ignored.
        name: of the value.
        run: see ``computed_in_float64``.
    """

    def __init__(
        self,
        model: Callable[[], ir.Model | None],
        feeds: Feeds,
        name: str,
        run: Callable[[ir.Model, Feeds], Feeds | None],
    ) -> None:
        self._model, self._feeds, self._name, self._run = functools.cache(model), feeds, name, run
        self._has_float64 = True  # as far as is known

    def __call__(self, change: Change = widened) -> torch.Tensor | None:
        """The value; ``None`` if nothing can compute it. Where there is no float64, changed numbers run as they are."""
        model = self._model()
        if model is None:
            return None
        found = computed_in_float64(model, self._feeds, self._run, change) if self._has_float64 else None
        self._has_float64 = found is not None
        if found is None and change is not widened:
            arrays = {str(item.name): self._feeds[str(item.name)] for item in model.graph.inputs}
            is_float = {name: kind_of(item.dtype) == "float" for name, item in arrays.items()}
            changed = {name: change(item).astype(item.dtype) for name, item in arrays.items() if is_float[name]}
            found = self._run(model, arrays | changed)
        return as_tensor(found[self._name]) if found is not None and self._name in found else None

    def judge(
        self, value: np.ndarray, expected: np.ndarray | None = None, coarsest: torch.dtype = torch.float64
    ) -> ValueDifference | None:
        """Judges a value, see ``judge``; ``expected`` is float64's by default, ``None`` if there is none."""
        reference = self() if expected is None else as_tensor(expected)
        return None if reference is None else judge(value, reference, coarsest, self, self._terms, self._magnitudes)

    def _terms(self) -> int:
        model = self._model()
        return 1 if model is None else rounding_inside.terms(model, self._feeds)

    def _magnitudes(self) -> Values:
        """What the value may round, see ``rounding_inside.magnitudes``."""
        model = self._model()
        return {} if model is None else {0: rounding_inside.magnitudes(model, self._feeds, self._name, self)}


Again: TypeAlias = "Callable[[Change], torch.Tensor | None]"
"""Computes a value in float64, with each of the numbers that it is computed from changed by a function."""


def judge(
    value: np.ndarray,
    expected: torch.Tensor,
    coarsest: torch.dtype,
    again: Again | None = None,
    terms: Callable[[], int] = lambda: 1,
    magnitudes: Callable[[], Values] = dict,
) -> ValueDifference:
    """Judges a value by the reference's.

    Args:
        value: with as many elements as ``expected``, and of its kind.
        expected: what the reference computes from the same numbers.
        coarsest: the dtype of least precision that either of them is computed in.
        again: computes it in float64; where that is not given or fails, ``expected`` counts.
        terms: the most terms of a sum in it.
        magnitudes: under 0, of what each element may round, see ``ResultCheck``.
    """
    ours, theirs = as_tensor(value).reshape(expected.shape), expected
    dtype = coarser(coarsest, coarser(ours.dtype, theirs.dtype)) if is_floating(theirs) else torch.int64
    if ours.dtype != theirs.dtype or is_floating(theirs):
        dtype = dtype if not theirs.is_complex() else theirs.dtype
        ours, theirs = ours.to(dtype), theirs.to(dtype)
    if np.array_equal(as_array(ours), as_array(theirs), equal_nan=is_floating(theirs)):
        return ValueDifference()

    def run(seed: int | None) -> Values:
        change = widened if seed is None else _off_by_a_rounding(seed, dtype if is_floating(theirs) else torch.float32)
        found = None if again is None else again(change)
        found = theirs if found is None else found
        return {0: found.double() if found.is_floating_point() else found}

    verdict = ResultCheck({0: theirs}, run, terms=terms, magnitudes=magnitudes).judge(0, ours)
    return ValueDifference(verdict, noise_of(ours, theirs))


def _off_by_a_rounding(seed: int, coarsest: torch.dtype) -> Change:
    """Changes floating-point numbers by a rounding of their dtype, or of a coarser one."""
    generator = torch.Generator().manual_seed(seed)

    def change(array: np.ndarray) -> np.ndarray:
        unit = max(_epsilon(array.dtype), torch.finfo(coarsest).eps)
        return as_array(perturbed(torch.from_numpy(widened(array)), unit, generator))

    return change


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


def noise_of(value: torch.Tensor, expected: torch.Tensor) -> float:
    """See ``ValueDifference``; 0 for discrete values."""
    if not is_floating(expected) or value.shape != expected.shape:
        return 0.0
    wide = expected.detach().to(torch.complex128 if expected.is_complex() else torch.float64)
    size, off = (float(torch.linalg.vector_norm(item)) for item in (wide, value.detach().to(wide.dtype) - wide))
    return off / size if size else math.inf if off else 0.0


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
