"""Runs a dumped model again on the dumped inputs, and compares with the recorded outputs. Needs no PyTorch.

::

    run = find_run()
    for graph, region in run.regions_of("0/forward"):
        replayed = replay(graph, region, Variant())
        print(replayed.name, replayed.verdict)

With nothing changed it is the very model that ran (``model.optimized.onnx``), with the session's settings and with the
same inputs as constants. What a ``Variant`` changes is all that is different. Neither result is the truth; by how much
rounding may move an output is measured (``running.movements``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx

from ..errors import first_line
from .model_sessions import available_provider, drawing, region_settings, session_of_region
from .model_values import Runtime, coarsest_unit, moved_values, run_model
from .models import OnnxModel, load_model
from .reading import DumpedGraph, DumpedRegion, DumpError
from .value_differences import DIFFERENT, EQUAL, ROUNDING, Difference, OnnxValue, described, difference


@dataclasses.dataclass(frozen=True)
class Variant:
    """What is changed from the run."""

    provider: str | None = None  # the execution provider, by its name or short (``cpu``); ``None``: that of the run
    opset: int | None = None  # the model is converted to it; ``None``: as it is
    runtime: str = "ort"  # ``ort`` or ``reference``
    optimize: bool = True  # whether ONNX Runtime's graph optimizations run as they did


@dataclasses.dataclass(frozen=True)
class ReplayedOutput:
    """An output of a region: its dtype and shape (``described``), and its difference from the recorded value.

    ``mark`` is a key of ``differences.LEGEND``.
    """

    name: str
    described: str
    mark: str
    difference: Difference


@dataclasses.dataclass(frozen=True)
class Replayed:
    """A region that ran again."""

    name: str  # ``graph_000/forward/region_0``
    model: Path  # the file
    settings: str  # in words, how it ran
    outputs: Sequence[ReplayedOutput]  # in order
    notes: Sequence[str]  # what else to know
    recorded_verdict: str | None = None  # on the graph, when it ran; ``None`` if no run was compared

    @property
    def is_same(self) -> bool:
        """Whether rounding explains all differences to what was recorded, right or wrong."""
        return all(item.mark in (EQUAL, ROUNDING) for item in self.outputs)

    @property
    def ok(self) -> bool:
        """Whether it is as recorded, and the graph was found right when it ran."""
        return self.is_same and self.recorded_verdict == "ok"

    @property
    def verdict(self) -> str:
        """``ok``; ``same as recorded; verdict: …`` where the graph was not found right when it ran;
        ``diverges at the output NAME: …`` where it is not the same."""
        worst = next((item for item in self.outputs if item.mark == DIFFERENT), None)
        if worst is not None:
            return f"diverges at the output {worst.name}: {worst.difference}"
        if self.ok:
            return "ok"
        verdict = "no run was compared" if self.recorded_verdict is None else f"verdict: {self.recorded_verdict}"
        return f"same as recorded; {verdict}"


def replay(graph: DumpedGraph, region: DumpedRegion, variant: Variant) -> Replayed:
    """Runs a region of a graph again.

    Raises:
        DumpError: a file is not there, the model cannot be converted, or what is to run it cannot.
    """
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
        raise DumpError(f"{path} has no output {missing[0]}, which was recorded: the dump is damaged")
    moved: Mapping[str, OnnxValue] = {}
    notes = []
    if not all(difference(value, found[key]).is_equal for key, value in recorded.items()):
        moved = moved_values(model, inputs, run, coarsest_unit([*found.values(), *inputs.values()]))
        notes = drawing(model)
    outputs = []
    for key, value in recorded.items():
        item = difference(found[key], value, moved.get(key))
        outputs.append(ReplayedOutput(key, described(found[key]), item.mark(), item))
    held = len(region.entry.constants)
    how = f"{settings.text}, {held} weights as constants" if held else settings.text
    return Replayed(model.name, path, "reference evaluator" if is_reference else how, outputs, notes, graph.verdict)


def _converted(model: OnnxModel, opset: int) -> OnnxModel:
    """A model in another opset, by onnx's version converter."""
    from onnx import version_converter

    newest = onnx.defs.onnx_opset_version()
    if not 1 <= opset <= newest:
        raise DumpError(f"--opset {opset}: this version of onnx knows opsets 1 to {newest}")
    try:
        return model.with_proto(version_converter.convert_version(model.proto, opset))
    except (RuntimeError, ValueError, onnx.checker.ValidationError) as error:
        said = f"onnx's version converter cannot make opset {opset} of it: {first_line(str(error))}"
        raise DumpError(f"{model.name}: {said}") from error
