"""Finds the node of a model whose value differs from run to run.

The session is repeated on the same inputs, and so is the model as ONNX Runtime optimized it, with all its values
exposed and no further optimization, so that its fusions stay. A node whose result differs in a run in which its inputs
do not is the origin of a difference.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from .bisection import RIGHT, WRONG, Bisection, BisectionSearch, line_of
from .cut_folder import CutModel
from .model_judging import ValueDifference, difference
from .model_sessions import ModelSession, operator_of
from .model_values import exposing
from .models import OnnxModel, OnnxValue, load_ir, load_model
from .reading import DumpError
from .schema import Settings
from .submodels import Feeds, Parts, known_of

RUNS = 10  # after the first


def bisect_runs(
    search: BisectionSearch, model: OnnxModel, settings: Settings, inputs: Feeds, constants: Feeds, runs: int
) -> Bisection:
    """The first node that differs between runs by more than rounding, else by rounding, as a model of its own.

    Raises:
        DumpError: ``runs`` is less than 1, or the session cannot be created.
    """
    if runs < 1:
        raise DumpError(f"--runs {runs}: at least one run must be compared with the first")
    what = f"{runs + 1} runs with {settings.threads} thread{'s' * (settings.threads != 1)}"
    with tempfile.TemporaryDirectory() as folder:
        session = ModelSession(model, settings, constants, write=Path(folder))
        first, *others = session.repeated(inputs, runs + 1)  # nothing is compared in between: races are rarer then
        optimized, parts = load_model(Path(folder) / "model.onnx"), Parts(load_ir(Path(folder) / "model.onnx"))
        exposed = ModelSession(exposing(optimized), settings.unoptimized, constants)
        known = {**exposed(inputs), **inputs}
        results = _largest(first, others)
        nodes: dict[str, ValueDifference] = {}
        for _ in range(runs):
            now = _largest({name: known[name] for name in parts.tensors()}, [exposed(inputs)])
            for name, found in now.items():
                read = parts.nodes[parts.by_name[name]].inputs
                if now.keys().isdisjoint(str(value.name) for value in read if value is not None):
                    nodes[name] = _larger(nodes.get(name), found)
        _tell(search, f"{what}: results", results)
        nodes = {name: nodes[name] for name in parts.tensors() if name in nodes}
        is_node = _tell(search, f"{what}: nodes with equal inputs", nodes)
        wrong = next((name for item in (nodes, results) for name in item if item[name].is_wrong), "")
        again = f"dynamo-backends bisect {search.result.graph} --runs"
        if not wrong:
            search.result.advice.append(f"a race may need more runs to show: {again} {10 * runs}")
            return search.result
        node = parts.nodes[parts.by_name[wrong]] if is_node else None
        cause = operator_of(node) if node is not None else "no node, if all values are results"
        search.found("run to run", wrong, cause, f"{again} {runs} --threads 1")
        if node is None:
            return search.result
        search.result.source = line_of([node])
        arrays = {key: value for key, value in known.items() if isinstance(value, np.ndarray)}
        cut = parts.cut([parts.by_name[wrong]], arrays)
        assert cut is not None
        given, expected = known_of(cut.graph.inputs, arrays), {wrong: arrays[wrong]}
        text = f"{cause} differs from run to run"
        return search.finish(
            CutModel(cut, settings.unoptimized, given, expected, "differs", text, runs), len(parts.nodes)
        )


def _tell(search: BisectionSearch, what: str, found: Mapping[str, ValueDifference]) -> bool:
    """Records the first value that differs by more than rounding and returns whether there is one; else by rounding."""
    wrong = next((name for name, item in found.items() if item.is_wrong), "")
    name = wrong or next(iter(found), "")
    search.tried(what, WRONG if wrong else "right, differs by rounding" if name else RIGHT, name, found.get(name))
    return bool(wrong)


def _largest(first: Mapping[str, OnnxValue], runs: list[dict[str, OnnxValue]]) -> dict[str, ValueDifference]:
    """The largest differences of runs from the first one, of the values that differ."""
    found: dict[str, ValueDifference] = {}
    for values in runs:
        now = {name: difference(first[name], values[name]) for name in first}
        found |= {name: _larger(found.get(name), item) for name, item in now.items() if not item.is_equal}
    return found


def _larger(one: ValueDifference | None, other: ValueDifference) -> ValueDifference:
    return other if one is None or other.error > one.error else one
