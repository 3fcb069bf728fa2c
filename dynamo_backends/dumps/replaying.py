"""Runs a dumped model again on the dumped inputs, and compares with the recorded outputs. Needs no PyTorch.

::

    run = find_run()
    for graph, region in run.regions_of("0/forward"):
        replayed = replay(graph, region, Variant())
        print(replayed.name, replayed.ok)

With nothing changed it is the very model that ran (``model.optimized.onnx``), with the session's settings and with the
same inputs as constants. What a ``Variant`` changes is all that is different. Neither result is the truth; by how much
rounding may move an output is measured, as in ``comparing``.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from .comparing import DIFFERENT, EQUAL, ROUNDING, coarsest_unit, difference_text
from .differences import Difference, OnnxValue, difference
from .models import OnnxModel, load_model
from .reading import DumpedGraph, DumpedRegion, DumpError
from .running import (
    LEVELS,
    RANDOM_OPERATORS,
    Runtime,
    Settings,
    available_provider,
    make_session,
    moved_by_rounding,
    operators,
    run_model,
    run_session,
)


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
        mark: ``=``, ``~`` or ``!``, see ``comparing.LEGEND``.
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
    """

    name: str
    model: Path
    settings: str
    outputs: Sequence[ReplayedOutput]
    notes: Sequence[str]

    @property
    def ok(self) -> bool:
        """Whether rounding explains all differences."""
        return all(item.mark in (EQUAL, ROUNDING) for item in self.outputs)

    @property
    def verdict(self) -> str:
        """``ok``, or ``diverges at OUTPUT: …``."""
        worst = next((item for item in self.outputs if item.mark == DIFFERENT), None)
        if worst is None:
            return "ok"
        return f"diverges at the output {worst.name}: {difference_text(worst.difference, worst.limit)}"


def replay(graph: DumpedGraph, region: DumpedRegion, variant: Variant) -> Replayed:
    """Runs a region again.

    Args:
        graph: the graph.
        region: one of its regions.
        variant: what is to be otherwise.

    Raises:
        DumpError: a file is not there, the model cannot be converted, or what is to run it cannot.
    """
    from .differences import described

    name = f"{graph.reference}/region_{region.index}"
    path = region.optimized_model
    model = load_model(path, name)
    notes = []
    if variant.opset is not None:
        model = converted(model, variant.opset)
    inputs, recorded = region.recorded("input"), region.recorded("output")
    settings = session_settings(region.entry.get("session", {}))
    if variant.provider is not None:
        settings = dataclasses.replace(settings, providers=(available_provider(variant.provider),), provider_options=())
    elif variant.runtime == "ort":
        for provider in settings.providers:
            available_provider(provider)
    if not variant.optimize:
        settings = settings.unoptimized
    constants = {key: inputs[key] for key in region.entry.get("constants", ()) if key in inputs}
    found = _run(model, inputs, constants, settings, variant.runtime)
    movements: Mapping[str, Difference] = {}
    if any(not difference(found[key], recorded[key]).is_equal for key in recorded if key in found):
        movements = _movements(model, inputs, constants, settings, variant.runtime, found)
        drawn = sorted(RANDOM_OPERATORS.intersection(operators(model)))
        if drawn:
            notes.append(f"{', '.join(drawn)} draws other numbers in each run")
    outputs = []
    for key, value in recorded.items():
        if key not in found:
            raise DumpError(f"{name}: {path.name} has no output {key}, which was recorded: the dump is damaged")
        item = difference(found[key], value)
        movement = movements.get(key, Difference())
        mark = EQUAL if item.is_equal else ROUNDING if item.is_explained(movement) else DIFFERENT
        outputs.append(ReplayedOutput(key, described(found[key]), mark, item, item.limit(movement)))
    how = _in_words(settings, constants) if variant.runtime == "ort" else "reference evaluator"
    return Replayed(name, path, how, outputs, notes)


def session_settings(entry: Mapping[str, object]) -> Settings:
    """The settings of the session that ran, from a region's ``session`` in the manifest.

    Raises:
        DumpError: they are damaged.
    """
    try:
        level = str(entry.get("graph_optimization_level", "all")).lower()
        level = level.removeprefix("ort_enable_").removeprefix("ort_")
        if level not in LEVELS:
            raise ValueError(f"graph_optimization_level {level!r}")
        return Settings(
            providers=tuple(map(str, _list(entry.get("providers")) or ("CPUExecutionProvider",))),
            provider_options=tuple(dict(item) for item in _list(entry.get("provider_options"))),
            level=level,
            disabled_optimizers=tuple(map(str, _list(entry.get("disabled_optimizers")))),
            threads=int(str(entry.get("threads") or 0)),
            config={str(key): str(item) for key, item in dict(entry.get("config") or {}).items()},  # type: ignore[call-overload]
        )
    except (TypeError, ValueError) as error:
        raise DumpError(f"the session's settings in the manifest are damaged: {error}; dump again") from None


def _list(value: object) -> list:
    if not isinstance(value, (list, tuple, type(None))):
        raise TypeError(f"{value!r} is no list")
    return list(value or ())


def converted(model: OnnxModel, opset: int) -> OnnxModel:
    """A model in another opset, by onnx's version converter.

    Raises:
        DumpError: there is no way to convert it, with what the converter said.
    """
    import onnx
    from onnx import version_converter

    from ..errors import first_line

    newest = onnx.defs.onnx_opset_version()
    if not 1 <= opset <= newest:
        raise DumpError(f"--opset {opset}: this version of onnx knows opsets 1 to {newest}")
    foreign = sorted({name for name in operators(model) if "::" in name})
    try:
        return model.with_proto(version_converter.convert_version(model.proto, opset))
    except (RuntimeError, ValueError, onnx.checker.ValidationError) as error:
        also = f" (the model also has {', '.join(foreign)}, which it leaves as they are)" if foreign else ""
        raise DumpError(
            f"{model.name}: onnx's version converter cannot make opset {opset} of it: {first_line(str(error))}{also}"
        ) from error


def _run(
    model: OnnxModel,
    inputs: Mapping[str, OnnxValue],
    constants: Mapping[str, OnnxValue],
    settings: Settings,
    runtime: str,
) -> dict[str, OnnxValue]:
    if runtime == "reference":
        return dict(run_model(model, inputs, Runtime("reference")).outputs)
    with tempfile.TemporaryDirectory() as folder:
        session = make_session(with_constants(model, constants, Path(folder)), settings)
        return run_session(session, model.name, inputs, model.outputs)


def with_constants(model: OnnxModel, constants: Mapping[str, OnnxValue], folder: Path) -> OnnxModel:
    """A model with some of its inputs as initializers.

    Args:
        model: the model.
        constants: the values, by the names of inputs.
        folder: for the values, which are external data: a model may have no more than 2 GB in itself. One that has
            external data already gets them in itself.
    """
    import numpy as np
    import onnx

    if not constants:
        return model
    changed = model.copy()
    graph = changed.proto.graph
    kept = [item for item in graph.input if item.name not in constants]
    del graph.input[:]
    graph.input.extend(kept)
    if model.external:
        graph.initializer.extend(onnx.numpy_helper.from_array(value, key) for key, value in constants.items())
        return changed
    place = folder / "constants.data"
    with place.open("wb") as file:
        for key, value in constants.items():
            assert isinstance(value, np.ndarray)
            tensor = onnx.TensorProto(
                name=key,
                dims=value.shape,
                data_type=onnx.helper.np_dtype_to_tensor_dtype(value.dtype),
                data_location=onnx.TensorProto.EXTERNAL,
            )
            content = np.ascontiguousarray(value)
            file.seek(-file.tell() % 4096, 1)
            where = {"location": place.name, "offset": file.tell(), "length": content.nbytes}
            tensor.external_data.extend(onnx.StringStringEntryProto(key=k, value=str(v)) for k, v in where.items())
            file.write(content.tobytes())
            graph.initializer.append(tensor)
    return dataclasses.replace(changed, folder=folder)


def _movements(
    model: OnnxModel,
    inputs: Mapping[str, OnnxValue],
    constants: Mapping[str, OnnxValue],
    settings: Settings,
    runtime: str,
    found: Mapping[str, OnnxValue],
) -> dict[str, Difference]:
    """By how much each output moves when all that it is computed from moves by one unit of rounding."""
    unit = coarsest_unit([*found.values(), *inputs.values()])
    moved, feeds = moved_by_rounding(model, inputs, unit)
    again = _run(moved, feeds, {key: feeds[key] for key in constants}, settings, runtime)
    return {key: difference(value, found[key]) for key, value in again.items()}


def _in_words(settings: Settings, constants: Mapping[str, OnnxValue]) -> str:
    provider = settings.providers[0].removesuffix("ExecutionProvider")
    level = "not optimized" if settings.level == "disable_all" else f"optimizations: {settings.level}"
    without = f" without {', '.join(settings.disabled_optimizers)}" if settings.disabled_optimizers else ""
    held = f", {len(constants)} weights as constants" if constants else ""
    return f"ONNX Runtime, {provider}, {level}{without}{held}"
