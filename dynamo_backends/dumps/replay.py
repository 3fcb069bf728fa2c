"""Runs a dumped model again on the dumped inputs, and compares the outputs with the recorded ones.

::

    run = find_run()
    for graph, region in run.regions_of("0/forward"):
        replayed = replay(graph, region, Variant())
        print(replayed.name, replayed.verdict)

The default is the model that ran (``model.optimized.onnx``) with the settings and constants of the run; a ``Variant``
changes that. The rounding error of each output is measured, see ``perturbed_values``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx

from ..errors import first_line
from .model_sessions import available_provider, random_operators, region_settings, session_of_region
from .model_values import Runtime, coarsest_unit, perturbed_values, run_model
from .models import OnnxModel, load_model
from .reading import DumpedGraph, DumpedRegion, DumpError
from .value_differences import DIFFERENT, EQUAL, ROUNDING, Difference, OnnxValue, described, difference


@dataclasses.dataclass(frozen=True)
class Variant:
    """What differs from the run."""

    provider: str | None = None  # the execution provider, ``CPUExecutionProvider`` or ``cpu``; ``None``: as in the run
    opset: int | None = None  # to which the model is converted; ``None``: not converted
    runtime: str = "ort"  # ``ort`` or ``reference``
    optimize: bool = True  # whether ONNX Runtime's graph optimizations run, if they did in the run


@dataclasses.dataclass(frozen=True)
class ReplayedOutput:
    """An output of a region, and its difference from the recorded value."""

    name: str
    described: str  # its dtype and shape
    mark: str  # a key of ``value_differences.LEGEND``
    difference: Difference


@dataclasses.dataclass(frozen=True)
class Replayed:
    """The result of running a region again."""

    name: str  # ``graph_000/forward/region_0``
    model: Path
    settings: str  # a description of the session
    outputs: Sequence[ReplayedOutput]
    notes: Sequence[str]
    recorded_verdict: str | None = None  # of the graph in the run; ``None`` if no run was compared

    @property
    def is_same(self) -> bool:
        """Whether the differences from the recorded outputs, right or wrong, are rounding."""
        return all(item.mark in (EQUAL, ROUNDING) for item in self.outputs)

    @property
    def ok(self) -> bool:
        """Whether the outputs are as recorded, and the verdict of the run was ``ok``."""
        return self.is_same and self.recorded_verdict == "ok"

    @property
    def verdict(self) -> str:
        """``ok``, ``diverges at the output NAME: …``, or ``same as recorded; verdict: …`` if the run was not ``ok``."""
        worst = next((item for item in self.outputs if item.mark == DIFFERENT), None)
        if worst is not None:
            return f"diverges at the output {worst.name}: {worst.difference}"
        if self.ok:
            return "ok"
        verdict = "no run was compared" if self.recorded_verdict is None else f"verdict: {self.recorded_verdict}"
        return f"same as recorded; {verdict}"


def replay(graph: DumpedGraph, region: DumpedRegion, variant: Variant) -> Replayed:
    """Runs a region of a graph again; ``DumpError`` if a file is missing, or the model cannot be converted or run."""
    path = region.optimized_model
    model = load_model(path, f"{graph.reference}/region_{region.index}")
    if variant.opset is not None:
        model = _converted(model, variant.opset)
    inputs, recorded = region.recorded("input"), region.recorded("output")
    is_reference = variant.runtime == "reference"
    settings = region_settings(region, provider="cpu" if is_reference else variant.provider)
    for provider in settings.providers:
        available_provider(provider)
    if not variant.optimize:
        settings = settings.unoptimized

    def run(model: OnnxModel, inputs: Mapping[str, OnnxValue]) -> Mapping[str, OnnxValue]:
        if is_reference:
            return run_model(model, inputs, Runtime("reference")).outputs
        return session_of_region(region, model, settings, inputs)(inputs)

    found = run(model, inputs)
    missing = [key for key in recorded if key not in found]
    if missing:
        raise DumpError(f"the dump is damaged: {path} does not have the recorded output {missing[0]}")
    rounded: Mapping[str, OnnxValue] = {}
    notes = []
    if not all(difference(value, found[key]).is_equal for key, value in recorded.items()):
        rounded = perturbed_values(model, inputs, run, coarsest_unit([*found.values(), *inputs.values()]))
        notes = random_operators(model)
    outputs = []
    for key, value in recorded.items():
        item = difference(found[key], value, rounded.get(key))
        outputs.append(ReplayedOutput(key, described(found[key]), item.mark(), item))
    constants = len(region.entry.constants)
    how = f"{settings.text}, {constants} weights as constants" if constants else settings.text
    return Replayed(model.name, path, "reference evaluator" if is_reference else how, outputs, notes, graph.verdict)


def _converted(model: OnnxModel, opset: int) -> OnnxModel:
    """The model in another opset."""
    from onnx import version_converter

    newest = onnx.defs.onnx_opset_version()
    if not 1 <= opset <= newest:
        raise DumpError(f"--opset {opset}: this version of onnx has opsets 1 to {newest}")
    try:
        return model.with_proto(version_converter.convert_version(model.proto, opset))
    except (RuntimeError, ValueError, onnx.checker.ValidationError) as error:
        raise DumpError(f"{model.name} cannot be converted to opset {opset}: {first_line(str(error))}") from error
