"""Which values of a dumped graph differ from run to run.

::

    for found in find_unstable(run.graphs[0], runs=10):
        for value in found.values:
            print(value.node, value.operator, value.source, value.differing_runs)

A region runs again and again on its recorded inputs, one run right after the other: as it ran, and as the model that
ONNX Runtime made of it with all its values as outputs and nothing left to optimize, so that its fusions stay. Bits
count; what differs by no more than rounding is said to be, in the sense of the comparison (``numerics/measure.py``).
The first value that differs although its inputs did not, in any run, is a culprit. It is then repeated alone, on the
values of the first run: one that differs there too differs by itself.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx

from .model_sessions import Session, operator_of, region_settings, session_of_region
from .model_values import exposing
from .models import OnnxModel, load_model
from .reading import DumpedGraph, DumpedRegion
from .schema import Settings
from .value_differences import NOTHING, Difference, OnnxValue, difference


@dataclasses.dataclass(frozen=True)
class UnstableValue:
    """A value that came out differently."""

    value: str  # its name
    fx_node: str  # the FX node it belongs to; ``""`` if the model does not say
    operator: str  # the ONNX operator that computes it
    aten_operator: str  # aten_operator, module, source: of the FX node
    module: str
    source: str
    threads: int  # of the session
    other_threads: int  # the same, or with which other number of threads it differs
    differing_runs: int  # in how many of the runs
    difference: Difference  # the largest, to the first run
    differs_alone: bool  # whether its node alone, on the values of the first run, gives different results

    @property
    def is_rounding(self) -> bool:
        """Whether the difference is no more than rounding."""
        return self.difference.is_rounding

    def as_json(self) -> dict[str, object]:
        fields = {**dataclasses.asdict(self), "is_rounding": self.is_rounding}
        return {**fields, "difference": self.difference.as_json()}


@dataclasses.dataclass(frozen=True)
class RegionDeterminism:
    """What came of running a region again and again."""

    region: int  # its number
    runs: int  # how often, besides the first run
    threads: Sequence[int]  # the numbers of threads it ran with
    # the results of the region that differed as it ran, those of the same threads first
    results: Sequence[UnstableValue]
    # the first values that differ with their inputs the same, in execution order; a value that only differs because
    # of an earlier one is not among them
    values: Sequence[UnstableValue]

    @property
    def is_stable(self) -> bool:
        """Whether nothing differed by more than rounding."""
        return all(item.is_rounding for item in (*self.results, *self.values))

    def as_json(self) -> dict[str, object]:
        lists = {name: [item.as_json() for item in getattr(self, name)] for name in ("results", "values")}
        return {**dataclasses.asdict(self), "is_stable": self.is_stable, **lists}


def find_unstable(graph: DumpedGraph, *, runs: int = 10, threads: int | None = None) -> list[RegionDeterminism]:
    """What differs from run to run, and between several threads and one.

    Each session runs so often, besides its first run; with the threads of the dumped run by default.

    Raises:
        DumpError: nothing was recorded, or the session cannot be made.
        ValueError: no run was asked for.
    """
    if runs < 1:
        raise ValueError(f"runs={runs}: at least one run is compared with the first")
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
        for model in (self._model, load_model(self.region.model)):  # the second's count where both have a value
            for node in model.proto.graph.node:
                found = {item.key: item.value for item in node.metadata_props}
                self._metadata.update({name: found for name in node.output if found})

    def find(self) -> RegionDeterminism:
        threads = [self._settings.threads, 1 if self._settings.threads > 1 else 2]
        session = self._session(self._model, self._settings)
        producers = {name: node for node in self._model.proto.graph.node for name in node.output}
        unstable = _differences(session, self._inputs, self.runs)
        results = [self._described(name, producers.get(name), *found) for name, found in unstable.items()]
        again = self._session(self._model, dataclasses.replace(self._settings, threads=threads[1]))
        first, second = session(self._inputs), again(self._inputs)
        for name in first:
            found = difference(second[name], first[name])
            if not found.is_equal and name not in unstable:
                results.append(self._described(name, producers.get(name), 1, found, other_threads=threads[1]))
        return RegionDeterminism(self.region.index, self.runs, threads, results, self._culprits())

    def _session(self, model: OnnxModel, settings: Settings, write: Path | None = None) -> Session:
        return session_of_region(self.region, model, settings, self._inputs, write=write)

    def _culprits(self) -> list[UnstableValue]:
        """The values inside the session's own model that differ although what they were computed of does not."""
        with tempfile.TemporaryDirectory() as folder:
            self._session(self._model, self._settings, Path(folder))
            model = load_model(Path(folder) / "model.onnx")
            session = self._session(exposing(model), self._settings.unoptimized)
            first = session(self._inputs)
            unstable: dict[str, tuple[int, Difference]] = {}
            guilty: set[str] = set()
            for _ in range(self.runs):
                differing = _add_differences(unstable, first, session(self._inputs))
                for node in model.proto.graph.node:
                    if not differing.intersection(node.input):
                        guilty |= differing.intersection(node.output)
            values = {**first, **self._inputs}
            found = []
            for node in model.proto.graph.node:
                for name in (name for name in node.output if name in guilty):
                    alone = self._differs_alone(model, node, values)
                    found.append(self._described(name, node, *unstable[name], alone=alone))
            return found

    def _differs_alone(self, model: OnnxModel, node: onnx.NodeProto, values: Mapping[str, OnnxValue]) -> bool:
        """Whether a node by itself differs from run to run on the same inputs."""
        initializers = [item for item in model.proto.graph.initializer if item.name in node.input]
        known = {"", *(item.name for item in initializers)}
        inputs = []
        for name in (name for name in dict.fromkeys(node.input) if name not in known):
            value = values.get(name)
            if not isinstance(value, np.ndarray):
                return False
            dtype = onnx.helper.np_dtype_to_tensor_dtype(value.dtype)
            inputs.append(onnx.helper.make_tensor_value_info(name, dtype, value.shape))
        outputs = [onnx.ValueInfoProto(name=name) for name in node.output if name]
        graph = onnx.helper.make_graph([node], "alone", inputs, outputs, initializers)
        alone = onnx.helper.make_model(graph, opset_imports=model.proto.opset_import, ir_version=model.proto.ir_version)
        session = self._session(model.with_proto(alone), self._settings.unoptimized)
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


def _differences(session: Session, inputs: Mapping[str, OnnxValue], runs: int) -> dict[str, tuple[int, Difference]]:
    """The outputs that differ from those of the first run: in how many runs, and the largest difference.

    All runs are made before anything is compared: a race shows the more rarely the more is done between them.
    """
    first, *others = session.repeated(inputs, runs + 1)
    unstable: dict[str, tuple[int, Difference]] = {}
    for results in others:
        _add_differences(unstable, first, results)
    return unstable


def _add_differences(
    unstable: dict[str, tuple[int, Difference]], first: Mapping[str, OnnxValue], results: Mapping[str, OnnxValue]
) -> set[str]:
    """Counts what differs in a run from the first one, and returns its names."""
    found = {name: difference(results[name], first[name]) for name in first}
    differing = {name: item for name, item in found.items() if not item.is_equal}
    for name, item in differing.items():
        count, worst = unstable.get(name, (0, NOTHING))
        larger = max(
            worst, item, key=lambda one: (bool(one.what), one.measured.nonfinite, one.measured.max_abs, one.differing)
        )
        unstable[name] = (count + 1, larger)
    return set(differing)
