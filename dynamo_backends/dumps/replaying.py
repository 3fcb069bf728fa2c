"""Runs a dumped model again on the dumped inputs, and compares with the recorded outputs. Needs no PyTorch.

::

    run = find_run()
    for graph, region in run.regions_of("0/forward"):
        replayed = replay(graph, region, Variant())
        print(replayed.name, replayed.verdict)

With nothing changed it is the very model that ran (``model.optimized.onnx``), with the session's settings and with the
same inputs as constants. What a ``Variant`` changes is all that is different. Neither result is the truth; by how much
rounding may move an output is measured (``movement.py``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from .differences import DIFFERENT, EQUAL, NOTHING, ROUNDING, Difference, OnnxValue, described, difference
from .execution import Settings, available_provider, converted, drawing, region_settings, session_of_region
from .models import OnnxModel, load_model
from .movement import coarsest_unit, movements
from .reading import DumpedGraph, DumpedRegion, DumpError
from .running import Runtime, run_model


@dataclasses.dataclass(frozen=True)
class Variant:
    """What is otherwise than when the graph ran.

    Attributes:
        provider: the execution provider, by its name or short (``cpu``); ``None``: as it was.
        opset: the model is converted to it; ``None``: as it is.
        runtime: ``ort`` or ``reference``.
        optimize: whether ONNX Runtime's graph optimizations run as they did.
    """

    provider: str | None = None
    opset: int | None = None
    runtime: str = "ort"
    optimize: bool = True

    @property
    def text(self) -> str:
        """In words; ``""`` if nothing is otherwise."""
        parts = [
            self.provider and f"on {self.provider}",
            self.opset and f"opset {self.opset}",
            "reference evaluator" if self.runtime == "reference" else "" if self.optimize else "not optimized",
        ]
        return ", ".join(part for part in parts if part)


@dataclasses.dataclass(frozen=True)
class ReplayedOutput:
    """An output of a region.

    Attributes:
        name: its name.
        described: dtype and shape, as it is now.
        mark: ``=``, ``~`` or ``!``, see ``differences.LEGEND``.
        difference: from the recorded value.
        limit: the largest difference that rounding explains.
    """

    name: str
    described: str
    mark: str
    difference: Difference
    limit: float


@dataclasses.dataclass(frozen=True)
class Replayed:
    """A region that ran again.

    Attributes:
        name: ``graph_000/forward/region_0``.
        model: the file.
        settings: in words, how it ran.
        outputs: in order.
        notes: what else to know.
        recorded_verdict: on the graph, when it ran; ``None`` if no run was compared.
    """

    name: str
    model: Path
    settings: str
    outputs: Sequence[ReplayedOutput]
    notes: Sequence[str]
    recorded_verdict: str | None = None

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
            return f"diverges at the output {worst.name}: {worst.difference.text(worst.limit)}"
        if self.ok:
            return "ok"
        verdict = "no run was compared" if self.recorded_verdict is None else f"verdict: {self.recorded_verdict}"
        return f"same as recorded; {verdict}"


def replay(graph: DumpedGraph, region: DumpedRegion, variant: Variant) -> Replayed:
    """Runs a region again.

    Args:
        graph: the graph.
        region: one of its regions.
        variant: what is to be otherwise.

    Raises:
        DumpError: a file is not there, the model cannot be converted, or what is to run it cannot.
    """
    name = f"{graph.reference}/region_{region.index}"
    path = region.optimized_model
    model = load_model(path, name)
    if variant.opset is not None:
        model = converted(model, variant.opset)
    inputs, recorded = region.recorded("input"), region.recorded("output")
    settings = region_settings(region, provider="cpu" if variant.runtime == "reference" else variant.provider)
    for provider in settings.providers:
        available_provider(provider)
    if not variant.optimize:
        settings = settings.unoptimized

    def run(model: OnnxModel, inputs: Mapping[str, OnnxValue]) -> Mapping[str, OnnxValue]:
        if variant.runtime == "reference":
            return run_model(model, inputs, Runtime("reference")).outputs
        return session_of_region(region, model, settings=settings, inputs=inputs)(inputs)

    found = run(model, inputs)
    missing = [key for key in recorded if key not in found]
    if missing:
        raise DumpError(f"{path} has no output {missing[0]}, which was recorded: the dump is damaged")
    moved: Mapping[str, Difference] = {}
    notes = []
    if any(not difference(found[key], value).is_equal for key, value in recorded.items()):
        moved = movements(model, inputs, run, found, coarsest_unit([*found.values(), *inputs.values()]))
        notes = drawing(model)
    outputs = []
    for key, value in recorded.items():
        item, movement = difference(found[key], value), moved.get(key, NOTHING)
        outputs.append(ReplayedOutput(key, described(found[key]), item.mark(movement), item, item.limit(movement)))
    return Replayed(name, path, _how(settings, region, variant), outputs, notes, graph.verdict)


def _how(settings: Settings, region: DumpedRegion, variant: Variant) -> str:
    """In words, how a region ran again."""
    if variant.runtime == "reference":
        return "reference evaluator"
    held = len(region.entry["constants"])
    return f"{settings.text}, {held} weights as constants" if held else settings.text
