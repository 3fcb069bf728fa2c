"""Which values of a dumped graph differ from run to run.

::

    for found in find_unstable(run.graphs[0], runs=10):
        for value in found.values:
            print(value.node, value.operator, value.source, value.differing_runs)

A region runs again and again on its recorded inputs, one run right after the other: as it ran, and as the model that
ONNX Runtime made of it with all its values as outputs and nothing left to optimize, so that its fusions stay. Bits
count; what differs by no more than rounding is said to be, in the sense of the comparison (``numerics/rounding.py``).
The first value that differs although its inputs did not, in any run, is a culprit. It is then repeated alone, on the
values of the first run: one that differs there too differs by itself.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .differences import NOTHING, Difference, OnnxValue, difference
from .execution import Session, region_settings, session_of_region
from .models import OnnxModel, load_model
from .reading import DumpedGraph, DumpedRegion, DumpError

if TYPE_CHECKING:
    import onnx


@dataclasses.dataclass(frozen=True)
class UnstableValue:
    """A value that came out differently.

    Attributes:
        value: its name.
        fx_node: the FX node it belongs to; ``""`` if the model does not say.
        operator: the ONNX operator that computes it.
        aten_operator, module, source: of the FX node.
        threads: of the session.
        other_threads: the same, or with which other number of threads it differs.
        differing_runs: in how many of the runs.
        difference: the largest, to the first run.
        differs_alone: whether its node alone, on the values of the first run, gives different results.
    """

    value: str
    fx_node: str
    operator: str
    aten_operator: str
    module: str
    source: str
    threads: int
    other_threads: int
    differing_runs: int
    difference: Difference
    differs_alone: bool

    @property
    def is_rounding(self) -> bool:
        """Whether the difference is no more than rounding."""
        return self.difference.is_explained(NOTHING)

    def as_json(self) -> dict[str, object]:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**fields, "difference": self.difference.as_json(), "is_rounding": self.is_rounding}


@dataclasses.dataclass(frozen=True)
class RegionDeterminism:
    """What came of running a region again and again.

    Attributes:
        region: its number.
        runs: how often, besides the first run.
        threads: the numbers of threads it ran with.
        results: the results of the region that differed as it ran, those of the same threads first.
        values: the first values that differ with their inputs the same, in execution order; a value that only
            differs because of an earlier one is not among them.
    """

    region: int
    runs: int
    threads: Sequence[int]
    results: Sequence[UnstableValue]
    values: Sequence[UnstableValue]

    @property
    def is_stable(self) -> bool:
        """Whether nothing differed by more than rounding."""
        return all(item.is_rounding for item in (*self.results, *self.values))

    def as_json(self) -> dict[str, object]:
        return {
            "region": self.region,
            "runs": self.runs,
            "threads": list(self.threads),
            "is_stable": self.is_stable,
            "results": [item.as_json() for item in self.results],
            "values": [item.as_json() for item in self.values],
        }


def find_unstable(graph: DumpedGraph, *, runs: int = 10, threads: int | None = None) -> list[RegionDeterminism]:
    """What differs from run to run, and between several threads and one.

    Args:
        graph: the graph.
        runs: how often each session runs, besides its first run.
        threads: of the sessions; as in the dumped run by default.

    Raises:
        DumpError: nothing was recorded, or the session cannot be made.
        ValueError: no run was asked for.
    """
    if runs < 1:
        raise ValueError(f"runs={runs}: at least one run is compared with the first")
    return [_Repeated(region, runs, threads).find() for region in graph.regions]


class _Repeated:
    def __init__(self, region: DumpedRegion, runs: int, threads: int | None) -> None:
        self._region = region
        self._runs = runs
        self._inputs = region.recorded("input")
        self._settings = region_settings(region, threads)
        self._threads = self._settings.threads
        self._model = load_model(region.optimized_model)
        self._session = session_of_region(region, self._model, settings=self._settings, inputs=self._inputs)
        self._known = {}
        for path in (region.optimized_model, region.model):  # the second's metadata count where both have a value
            for node in load_model(path).proto.graph.node:
                found = {item.key: item.value for item in node.metadata_props}
                self._known.update({name: found for name in node.output if found})

    def find(self) -> RegionDeterminism:
        other = 1 if self._threads > 1 else 2
        producers = {name: node for node in self._model.proto.graph.node for name in node.output}
        results = [
            self._described(name, producers.get(name), self._threads, count, worst)
            for name, (count, worst) in _differences(self._session, self._inputs, self._runs).items()
        ]
        settings = dataclasses.replace(self._settings, threads=other)
        again = session_of_region(self._region, self._model, settings=settings, inputs=self._inputs)
        first, second = self._session(self._inputs), again(self._inputs)
        told = {item.value for item in results}
        for name in first:
            found = difference(second[name], first[name])
            if not found.is_equal and name not in told:
                results.append(self._described(name, producers.get(name), other, 1, found))
        return RegionDeterminism(self._region.index, self._runs, [self._threads, other], results, self._inside())

    def _inside(self) -> list[UnstableValue]:
        """The values inside the session's own model that differ although what they were computed of does not."""
        with tempfile.TemporaryDirectory() as folder:
            session_of_region(
                self._region, self._model, settings=self._settings, inputs=self._inputs, write=Path(folder)
            )
            exposed = _exposed(load_model(Path(folder) / "model.onnx"))
            return self._culprits(exposed, self._as_it_is(exposed))

    def _as_it_is(self, model: OnnxModel) -> Session:
        """A session of a model that ONNX Runtime optimized already."""
        return session_of_region(self._region, model, settings=self._settings.unoptimized, inputs=self._inputs)

    def _culprits(self, exposed: OnnxModel, session: Session) -> list[UnstableValue]:
        inputs = self._inputs
        first = session(inputs)
        unstable: dict[str, tuple[int, Difference]] = {}
        guilty: dict[str, onnx.NodeProto] = {}
        for _ in range(self._runs):
            results = session(inputs)
            found = {name: difference(results[name], first[name]) for name in first}
            differing = {name for name, item in found.items() if not item.is_equal}
            for node in exposed.proto.graph.node:
                if differing.intersection(node.output) and not differing.intersection(node.input):
                    for name in differing.intersection(node.output):
                        guilty[name] = node
            for name in differing:
                count, worst = unstable.get(name, (0, NOTHING))
                unstable[name] = (count + 1, _larger(worst, found[name]))
        order = {name: i for i, node in enumerate(exposed.proto.graph.node) for name in node.output}
        values = {**first, **inputs}
        return [
            self._described(
                name, guilty[name], self._threads, *unstable[name], alone=self._alone(exposed, guilty[name], values)
            )
            for name in sorted(guilty, key=order.__getitem__)
        ]

    def _alone(self, model: OnnxModel, node: onnx.NodeProto, values: Mapping[str, OnnxValue]) -> bool:
        """Whether a node by itself differs from run to run, or with other threads, on the same inputs."""
        import onnx

        types = {
            item.name: item
            for item in (*model.proto.graph.value_info, *model.proto.graph.output, *model.proto.graph.input)
        }
        initializers = [item for item in model.proto.graph.initializer if item.name in node.input]
        known = {item.name for item in initializers}
        reads = [name for name in dict.fromkeys(node.input) if name and name not in known]
        if any(name not in types or name not in values for name in reads) or any(
            name not in types for name in node.output
        ):
            return False
        graph = onnx.helper.make_graph(
            [node],
            "alone",
            [types[name] for name in reads],
            [types[name] for name in node.output if name],
            initializers,
        )
        alone = onnx.helper.make_model(graph, opset_imports=model.proto.opset_import, ir_version=model.proto.ir_version)
        return bool(_differences(self._as_it_is(model.with_proto(alone)), values, self._runs))

    def _described(
        self,
        name: str,
        node: onnx.NodeProto | None,
        other_threads: int,
        count: int,
        worst: Difference,
        *,
        alone: bool = False,
    ) -> UnstableValue:
        known = self._known.get(name, {})
        operator = "" if node is None else f"{node.domain}.{node.op_type}".removeprefix("ai.onnx").removeprefix(".")
        return UnstableValue(
            value=name,
            fx_node=known.get("fx_node", ""),
            operator=operator,
            aten_operator=known.get("aten_op", ""),
            module=known.get("module", ""),
            source=known.get("source", ""),
            threads=self._threads,
            other_threads=other_threads,
            differing_runs=count,
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
        for name in first:
            found = difference(results[name], first[name])
            if not found.is_equal:
                count, worst = unstable.get(name, (0, NOTHING))
                unstable[name] = (count + 1, _larger(worst, found))
    return unstable


def _larger(first: Difference, second: Difference) -> Difference:
    return max(first, second, key=lambda item: (bool(item.what), item.nonfinite, item.max_abs, item.differing))


def _exposed(model: OnnxModel) -> OnnxModel:
    """The model with every value of known type as an output."""
    import onnx

    changed = model.copy()
    graph = changed.proto.graph
    types = {item.name: item for item in graph.value_info}
    outputs = {item.name for item in graph.output}
    missing = [
        name for node in graph.node for name in node.output if name and name not in types and name not in outputs
    ]
    if missing:
        try:
            inferred = onnx.shape_inference.infer_shapes(changed.proto)
        except onnx.shape_inference.InferenceError as error:
            raise DumpError(f"{model.name}: the types of its values are not known: {error}") from None
        types = {item.name: item for item in inferred.graph.value_info}
    graph.output.extend(
        types[name] for node in graph.node for name in node.output if name in types and name not in outputs
    )
    del graph.value_info[:]
    graph.value_info.extend(item for name, item in types.items())
    return changed
