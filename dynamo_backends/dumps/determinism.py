"""Finds the values of a dumped graph that differ from run to run.

::

    for found in find_unstable(run.graphs[0], runs=10):
        for value in found.values:
            print(value.fx_node, value.operator, value.source, value.differing_runs)

Each region runs repeatedly on its recorded inputs: with the session of the run, and with the model as ONNX Runtime
optimized it, all its values exposed and no further optimization, so that its fusions stay. Results are compared bit
for bit; differences within the tolerance of ``numerics/rule.py`` are marked as rounding. A value that differs in a
run in which its inputs do not is the origin of a difference. Its node then runs repeatedly alone, on the values of the
first run.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

from .model_sessions import ModelSession, operator_of, region_settings, session_of_region
from .model_values import exposing
from .models import OnnxModel, load_model
from .reading import DumpedGraph, DumpedRegion
from .schema import Settings
from .submodels import Parts
from .value_differences import NOTHING, Difference, OnnxValue, difference


@dataclasses.dataclass(frozen=True)
class UnstableValue:
    """A value that differs between runs, or between numbers of threads."""

    value: str  # its name
    fx_node: str  # the FX node that it belongs to; ``""`` if unknown
    operator: str  # the ONNX operator
    aten_operator: str  # aten_operator, module, source: of the FX node
    module: str
    source: str
    threads: int  # of the session
    other_threads: int  # the number of threads of the other run; the same if runs differ
    differing_runs: int  # in how many runs it differs
    difference: Difference  # the largest difference from the first run
    differs_alone: bool  # whether its node alone, on the values of the first run, gives different results

    @property
    def is_rounding(self) -> bool:
        return self.difference.is_rounding

    def as_json(self) -> dict[str, object]:
        fields = {**dataclasses.asdict(self), "is_rounding": self.is_rounding}
        return {**fields, "difference": self.difference.as_json()}


@dataclasses.dataclass(frozen=True)
class RegionDeterminism:
    """The result for one region."""

    region: int  # its number
    runs: int  # after the first run
    threads: Sequence[int]  # the numbers of threads that were compared
    results: Sequence[UnstableValue]  # outputs that differ; first between runs, then between numbers of threads
    values: Sequence[UnstableValue]  # the first values that differ although their inputs do not, in execution order

    @property
    def is_stable(self) -> bool:
        """Whether all differences are rounding."""
        return all(item.is_rounding for item in (*self.results, *self.values))

    def as_json(self) -> dict[str, object]:
        lists = {name: [item.as_json() for item in getattr(self, name)] for name in ("results", "values")}
        return {**dataclasses.asdict(self), "is_stable": self.is_stable, **lists}


def find_unstable(graph: DumpedGraph, *, runs: int = 10, threads: int | None = None) -> list[RegionDeterminism]:
    """Finds values that differ from run to run, or with another number of threads.

    Each session runs once and then ``runs`` times, with the ``threads`` of the dumped run by default.

    Raises:
        DumpError: nothing was recorded, or the session cannot be created.
        ValueError: ``runs`` is less than 1.
    """
    if runs < 1:
        raise ValueError(f"runs={runs}: at least one run must be compared with the first")
    return [_Repeated(region, runs, threads).find() for region in graph.regions]


@dataclasses.dataclass
class _Repeated:
    """The search in one region."""

    region: DumpedRegion
    runs: int
    threads: int | None

    def __post_init__(self) -> None:
        self._inputs = self.region.recorded("input")
        self._settings = region_settings(self.region, self.threads)
        self._model = load_model(self.region.optimized_model)
        self._metadata = {}
        for model in (self._model, load_model(self.region.model)):  # the second's metadata have precedence
            for node in model.proto.graph.node:
                found = {item.key: item.value for item in node.metadata_props}
                self._metadata.update({name: found for name in node.output if found})

    def find(self) -> RegionDeterminism:
        threads = [self._settings.threads, 1 if self._settings.threads > 1 else 2]
        session = self._session(self._model, self._settings)
        producers = {name: node for node in self._model.proto.graph.node for name in node.output}
        unstable = _differences(session, self._inputs, self.runs)
        results = [self._described(name, producers.get(name), *found) for name, found in unstable.items()]
        other_session = self._session(self._model, dataclasses.replace(self._settings, threads=threads[1]))
        first, second = session(self._inputs), other_session(self._inputs)
        for name in first:
            found = difference(second[name], first[name])
            if not found.is_equal and name not in unstable:
                results.append(self._described(name, producers.get(name), 1, found, other_threads=threads[1]))
        return RegionDeterminism(self.region.index, self.runs, threads, results, self._origins())

    def _session(self, model: OnnxModel, settings: Settings, write: Path | None = None) -> ModelSession:
        return session_of_region(self.region, model, settings, self._inputs, write=write)

    def _origins(self) -> list[UnstableValue]:
        """The values in the optimized model that differ although their inputs do not."""
        with tempfile.TemporaryDirectory() as folder:
            self._session(self._model, self._settings, Path(folder))
            model = load_model(Path(folder) / "model.onnx")
            session = self._session(exposing(model), self._settings.unoptimized)
            first = session(self._inputs)
            unstable: dict[str, tuple[int, Difference]] = {}
            origins: set[str] = set()
            for _ in range(self.runs):
                differing = _add_differences(unstable, first, session(self._inputs))
                for node in model.proto.graph.node:
                    if not differing.intersection(node.input):
                        origins |= differing.intersection(node.output)
            values = {**first, **self._inputs}
            parts = Parts(ir.from_proto(model.proto))
            arrays = {name: value for name, value in values.items() if isinstance(value, np.ndarray)}
            found = []
            for i, node in enumerate(model.proto.graph.node):
                for name in (name for name in node.output if name in origins):
                    alone = self._differs_alone(model, parts.cut([i], arrays), values)
                    found.append(self._described(name, node, *unstable[name], alone=alone))
            return found

    def _differs_alone(self, model: OnnxModel, node: ir.Model | None, values: Mapping[str, OnnxValue]) -> bool:
        """Whether a node by itself differs from run to run on the same inputs."""
        if node is None:
            return False
        session = self._session(model.with_proto(ir.to_proto(node)), self._settings.unoptimized)
        return bool(_differences(session, values, self.runs))

    def _described(
        self,
        name: str,
        node: onnx.NodeProto | None,
        differing_runs: int,
        worst: Difference,
        *,
        other_threads: int | None = None,
        alone: bool = False,
    ) -> UnstableValue:
        metadata = self._metadata.get(name, {})
        return UnstableValue(
            value=name,
            fx_node=metadata.get("fx_node", ""),
            operator="" if node is None else operator_of(node),
            aten_operator=metadata.get("aten_op", ""),
            module=metadata.get("module", ""),
            source=metadata.get("source", ""),
            threads=self._settings.threads,
            other_threads=other_threads or self._settings.threads,
            differing_runs=differing_runs,
            difference=worst,
            differs_alone=alone,
        )


def _differences(
    session: ModelSession, inputs: Mapping[str, OnnxValue], runs: int
) -> dict[str, tuple[int, Difference]]:
    """The outputs that differ from the first run: in how many runs, and the largest difference.

    Nothing is compared until all runs are over, since races are rarer with other work between runs.
    """
    first, *others = session.repeated(inputs, runs + 1)
    unstable: dict[str, tuple[int, Difference]] = {}
    for results in others:
        _add_differences(unstable, first, results)
    return unstable


def _add_differences(
    unstable: dict[str, tuple[int, Difference]], first: Mapping[str, OnnxValue], results: Mapping[str, OnnxValue]
) -> set[str]:
    """Adds what differs between a run and the first one; returns the names."""
    found = {name: difference(results[name], first[name]) for name in first}
    differing = {name: item for name, item in found.items() if not item.is_equal}
    for name, item in differing.items():
        count, worst = unstable.get(name, (0, NOTHING))
        worst = max(worst, item, key=lambda d: (bool(d.what), d.measured.nonfinite, d.measured.max_abs, d.differing))
        unstable[name] = (count + 1, worst)
    return set(differing)
