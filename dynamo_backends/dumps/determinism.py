"""Finds the node of a region whose value differs from run to run.

The session of the run is repeated on the recorded inputs, and so is the model as ONNX Runtime optimized it, with all
its values exposed and no further optimization, so that its fusions stay. A node whose result differs in a run in which
its inputs do not is the origin of a difference.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from .bisection import RIGHT, WRONG, Bisection, BisectionSearch
from .cut_folder import CutModel
from .model_sessions import operator_of, region_settings, session_of_region
from .model_values import exposing
from .models import load_ir, load_model
from .reading import DumpedRegion, DumpError
from .submodels import Parts, known_of
from .value_differences import NOTHING, Difference, OnnxValue, difference

RUNS = 10  # after the first


def bisect_runs(search: BisectionSearch, region: DumpedRegion, runs: int, threads: int | None) -> Bisection:
    """The first node that differs between runs by more than rounding, else by rounding, as a model of its own.

    Raises:
        DumpError: ``runs`` is less than 1, nothing was recorded, or the session cannot be created.
    """
    if runs < 1:
        raise DumpError(f"--runs {runs}: at least one run must be compared with the first")
    result, inputs, settings = search.result, region.recorded("input"), region_settings(region, threads)
    model = load_model(region.optimized_model)
    what = f"{runs + 1} runs with {settings.threads} thread{'s' * (settings.threads != 1)}: "
    with tempfile.TemporaryDirectory() as folder:
        session = session_of_region(region, model, settings, inputs, write=Path(folder))
        first, *others = session.repeated(inputs, runs + 1)  # nothing is compared in between: races are rarer then
        results: dict[str, Difference] = {}
        for values in others:
            _add_differences(results, first, values)
        optimized, parts = load_model(Path(folder) / "model.onnx"), Parts(load_ir(Path(folder) / "model.onnx"))
        exposed = session_of_region(region, exposing(optimized), settings.unoptimized, inputs)
        known = {**exposed(inputs), **inputs}
        found: dict[str, Difference] = {}
        origins: set[int] = set()
        for _ in range(runs):
            differing = _add_differences(found, {name: known[name] for name in parts.tensors()}, exposed(inputs))
            for name in differing:
                node = parts.nodes[parts.by_name[name]]
                if differing.isdisjoint(value.name for value in node.inputs if value is not None):
                    origins.add(parts.by_name[name])
        _tell(search, f"{what}results", results)
        names = [str(value.name) for i in sorted(origins) for value in parts.nodes[i].outputs if value.name in found]
        nodes = {name: found[name] for name in names}
        is_wrong = _tell(search, f"{what}nodes with equal inputs", nodes)
        wrong = next((name for item in (nodes, results) for name in item if not item[name].is_rounding), "")
        if not wrong:
            result.advice.append(
                f"a race may need more runs to show: dynamo-backends bisect {result.graph} --runs {10 * runs}"
            )
            return result
        metadata = _metadata(region, wrong)
        result.place, result.value, result.source = "run to run", wrong, metadata.get("source", "")
        result.advice.append(f"dynamo-backends bisect {result.graph} --runs {runs} --threads 1")
        if not is_wrong:
            result.cause = "no node, if all values are results"
            return result
        node = parts.nodes[parts.by_name[wrong]]
        result.cause = operator_of(node)
        arrays = {key: value for key, value in known.items() if isinstance(value, np.ndarray)}
        cut = parts.cut([parts.by_name[wrong]], arrays)
        assert cut is not None
        text = f"{result.cause} differs from run to run"
        expected = {wrong: arrays[wrong]}
        piece = CutModel(
            cut, settings.unoptimized, known_of(cut.graph.inputs, arrays), expected, {}, "differs", text, runs
        )
        return search.finish(piece, len(parts.nodes))


def _tell(search: BisectionSearch, what: str, found: Mapping[str, Difference]) -> bool:
    """Records the first value that differs by more than rounding and returns whether there is one; else by rounding."""
    wrong = next((name for name, item in found.items() if not item.is_rounding), "")
    name = wrong or next(iter(found), "")
    outcome = WRONG if wrong else "right, differs by rounding" if name else RIGHT
    search.tried(what, outcome, name, found[name].error if name else None)
    return bool(wrong)


def _add_differences(
    found: dict[str, Difference], first: Mapping[str, OnnxValue], values: Mapping[str, OnnxValue]
) -> set[str]:
    """Adds the largest differences of a run from the first one; returns the names of values that are not equal."""
    now = {name: difference(values[name], first[name]) for name in first}
    differing = {name: item for name, item in now.items() if not item.is_equal}
    for name, item in differing.items():
        found[name] = max(found.get(name, NOTHING), item, key=lambda d: (bool(d.what), d.measured.share))
    return set(differing)


def _metadata(region: DumpedRegion, name: str) -> Mapping[str, str]:
    """The metadata of the node that computes a value, in the exported model if it is there."""
    for path in (region.model, region.optimized_model):
        parts = Parts(load_ir(path))
        if name in parts.by_name:
            return parts.nodes[parts.by_name[name]].metadata_props
    return {}
