"""Finds the nodes of a low-precision graph that must compute in float32 for its results to be right.

::

    for found in find_precision(run.graphs[0]):
        for node in found.nodes:
            print(node.fx_node, node.module, node.source)

Variants of the model that ran have some nodes in float32 (``mixed_precision.py``). A variant is right if its results on
the recorded inputs have the errors that ``numerics/rule.py`` allows, against the same model in float64. Delta
debugging finds a smallest set of nodes: none of them can be left out.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from ..numerics.rule import FORMATS, SUM_UNITS
from .bisection import delta_debug
from .mixed_precision import is_low, widened
from .model_sessions import region_settings, session_of_region
from .models import OnnxModel, load_ir
from .reading import DumpedGraph, DumpedRegion, DumpError
from .value_differences import difference_from_reference

_COMPARED = ("float16", "bfloat16", "float32")  # dtypes of the results that are compared

MOST_SESSIONS = 500  # the most variants of a region that are tried


@dataclasses.dataclass(frozen=True)
class WideNode:
    """A node that must compute in float32."""

    fx_node: str
    operator: str  # the ATen operator
    module: str  # the path of the ``nn.Module``
    source: str  # the user's line


@dataclasses.dataclass(frozen=True)
class ResultError:
    """The error of a result of a region."""

    name: str
    dtype: str
    error: float  # the absolute error; infinite if elements overflow that do not in float64
    allowed: float  # the tolerance at the same element

    @property
    def is_right(self) -> bool:
        return self.error <= self.allowed

    def as_json(self) -> dict[str, object]:
        error = self.error if math.isfinite(self.error) else None
        return {**dataclasses.asdict(self), "error": error, "is_right": self.is_right}


@dataclasses.dataclass(frozen=True)
class RegionPrecision:
    """The result for a region."""

    region: int  # its number
    # ``not low``: no node is in low precision; ``ok``: the results, or the verdict of the graph, are right;
    # ``found``; ``not precision``: the results are wrong even with all nodes in float32; ``unfinished``: the set is
    # right, but after ``MOST_SESSIONS`` variants it may not be the smallest
    outcome: str
    nodes: Sequence[WideNode] = ()  # those that must be in float32, in execution order
    candidates: int = 0  # how many nodes are in low precision
    tried: int = 0  # how many variants ran
    reference: str = ""  # ``float64``, or what is in float32 because ONNX Runtime lacks a kernel
    before: Sequence[ResultError] = ()  # the errors in the run
    after: Sequence[ResultError] = ()  # the errors with the set in float32

    def as_json(self) -> dict[str, object]:
        """Infinite errors become ``null``."""
        errors = {name: [item.as_json() for item in getattr(self, name)] for name in ("before", "after")}
        return {**dataclasses.asdict(self), **errors}


def find_precision(
    graph: DumpedGraph, *, strict: bool = False, progress: Callable[[str], None] = lambda said: None
) -> list[RegionPrecision]:
    """Finds the nodes of each region that must compute in float32.

    With ``strict`` also of a graph whose verdict is ``ok``: each of its values is right on the numbers it was computed
    from, but what low precision adds up to may still be far from float64.
    ``progress`` is called with a line of text for each variant.

    Raises:
        DumpError: no run was compared, nothing was recorded, or the model cannot be run.
    """
    return [RegionSearch(graph, region, strict, progress).find() for region in graph.regions]


@dataclasses.dataclass
class RegionSearch:
    """The search in one region."""

    graph: DumpedGraph
    region: DumpedRegion
    strict: bool
    progress: Callable[[str], None]

    def __post_init__(self) -> None:
        self._model = load_ir(self.region.optimized_model)
        self._inputs = self.region.recorded("input")
        self._tried = 0
        self._exact: Mapping[str, np.ndarray] = {}

    def find(self) -> RegionPrecision:
        names = self._candidates()
        if not names:
            return RegionPrecision(self.region.index, "not low")
        self._exact, reference = self._reference()
        before = self.errors([])
        after = before
        found: list[str] = []
        if (self.graph.verdict == "ok" and not self.strict) or _are_right(before):
            outcome = "ok"
        else:
            after = self.errors(names)
            outcome = "not precision"
            if _are_right(after):
                found = delta_debug(names, lambda some: self._tried < MOST_SESSIONS and self._suffices(some))
                outcome = "found" if self._tried < MOST_SESSIONS else "unfinished"
                after = self.errors(found)
        nodes = [self._described(name) for name in found]
        return RegionPrecision(self.region.index, outcome, nodes, len(names), self._tried, reference, before, after)

    def _candidates(self) -> list[str]:
        """The FX nodes that read or return low precision, in execution order."""
        low = [
            _fx_node(node)
            for node in self._model.graph
            if node.op_type != "Constant" and any(map(is_low, [*node.inputs, *node.outputs]))
        ]
        return list(dict.fromkeys(low))

    def _reference(self) -> tuple[dict[str, np.ndarray], str]:
        """The results in float64. Operators without a float64 kernel, or else all nodes, are in float32."""
        single = widened(self._model, lambda node: node.op_type in _SINGLE, ir.DataType.FLOAT)
        attempts: tuple[tuple[ir.Model, ir.DataType, Callable[[ir.Node], bool], str], ...] = (
            (self._model, ir.DataType.DOUBLE, lambda node: True, "float64"),
            (single, ir.DataType.DOUBLE, _has_wide_kernel, "float64, some operators in float32"),
            (self._model, ir.DataType.FLOAT, lambda node: True, "float32"),
        )
        for model, dtype, is_chosen, name in attempts:
            try:
                return self._results(widened(model, is_chosen, dtype, wide_outputs=True), optimize=False), name
            except DumpError as error:
                rejected = error
        raise rejected

    def _results(self, model: ir.Model, *, optimize: bool = True) -> dict[str, Any]:
        content = OnnxModel(ir.to_proto(model), self.region.folder, str(self.region.folder))
        settings = region_settings(self.region)
        settings = settings if optimize else settings.unoptimized
        return session_of_region(self.region, content, settings, self._inputs)(self._inputs)

    def errors(self, names: Sequence[str]) -> list[ResultError]:
        """The errors of the results with these FX nodes in float32."""
        chosen = set(names)
        self._tried += 1
        results = self._results(widened(self._model, lambda node: _fx_node(node) in chosen, ir.DataType.FLOAT))
        return [self._error(name, value) for name, value in results.items() if value.dtype.name in _COMPARED]

    def _error(self, name: str, value: np.ndarray) -> ResultError:
        exact = np.asarray(self._exact[name], np.float64)
        terms = SUM_UNITS * FORMATS[value.dtype.name].epsilon * _ordinary(exact)
        found = difference_from_reference(value, exact, more=terms).measured
        return ResultError(name, value.dtype.name, math.inf if found.nonfinite else found.error, found.limit)

    def _suffices(self, names: Sequence[str]) -> bool:
        right = _are_right(self.errors(names))
        self.progress(f"region_{self.region.index}: {len(names)} nodes in float32: {'right' if right else 'wrong'}")
        return right

    def _described(self, fx_node: str) -> WideNode:
        metadata = [node for node in self._model.graph if _fx_node(node) == fx_node][-1].metadata_props
        return WideNode(fx_node, *(metadata.get(key, "") for key in ("aten_op", "module", "source")))


_FAR = 1e3
"""How many times larger than the lower quartile an outlier is."""


def _ordinary(value: np.ndarray) -> float:
    """The root mean square of the elements that are neither 0 nor far larger than the lower quartile."""
    size = np.abs(value[np.isfinite(value) & (value != 0)]).reshape(-1)
    if not size.size:
        return 0.0
    quartile = np.partition(size, size.size // 4)[size.size // 4]
    return float(np.sqrt(np.square(size[size <= _FAR * quartile]).mean()))


def _are_right(errors: Sequence[ResultError]) -> bool:
    return all(item.is_right for item in errors)


_SINGLE = ("Erf", "Gelu", "FastGelu", "QuickGelu", "BiasGelu", "Conv", "ConvTranspose", "Resize", "GridSample")
"""Operators without a float64 kernel in ONNX Runtime's CPU provider (1.31)."""


def _has_wide_kernel(node: ir.Node) -> bool:
    return node.op_type not in _SINGLE


def _fx_node(node: ir.Node) -> str:
    """The FX node of an ONNX node; its own name if a pass removed the metadata."""
    return node.metadata_props.get("fx_node") or str(node.name)
