"""Bisects models without results: ONNX Runtime rejects the model, fails in the run, or crashes the process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

from .bisection import Bisection, FailsAs, Search, essence, is_same_failure, line_of, smallest
from .candidate_runs import Feeds, Outcome
from .cut_folder import Piece
from .model_sessions import PLAIN
from .models import load_ir
from .reading import DumpedGraph, DumpError
from .schema import Settings
from .submodels import Parts, inputs_of

_UNKNOWN = np.zeros(0, np.float32)  # stands for an expected output that could not be computed


def refused_models(graph: DumpedGraph) -> list[Path]:
    """The models that ONNX Runtime rejected when the graph was compiled."""
    return sorted((graph.folder / "refused").glob("*.onnx"))


def bisect_refused(search: Search, settings: Settings) -> Bisection:
    """The smallest part of a model that ONNX Runtime rejects; ``DumpError`` if no model was rejected."""
    found = search.found
    models = refused_models(search.graph)
    if not models:
        raise DumpError(f"no model of {found.graph} was refused: there is no {search.graph.folder / 'refused'}")
    for path in models:
        parts = Parts(_typed(load_ir(path)))
        outcome = search.runner.run(path, None, settings)
        if outcome.kind in ("refused", "crashed"):
            search.tried(f"a session of {path.name}, with the settings of the run", outcome.kind)
            plain = search.runner.run(path, None, settings.unoptimized)
            search.tried("the same, ONNX Runtime's optimizers off", "created" if plain.kind == "built" else plain.kind)
            if is_same_failure(plain, outcome):
                settings = settings.unoptimized
            return bisect_failure(search, parts, None, settings, outcome, path)
        search.tried(f"a session of {path.name}", "created: dynamo-backends itself refused the model")
    found.place = "nothing"
    message = models[0].with_suffix(".txt")
    found.cause = message.read_text(encoding="utf-8", errors="replace").strip() if message.exists() else ""
    found.advice.append("ONNX Runtime accepts the model, but one of its kernels is known to be wrong: docs/upstream.md")
    return found


def bisect_failure(
    search: Search, parts: Parts, feeds: Feeds | None, settings: Settings, outcome: Outcome, path: Path
) -> Bisection:
    """The smallest part of a model with the same failure.

    Args:
        search: the bisection.
        parts, path: the model, and its file.
        feeds: its inputs; ``None`` if it was not run.
        settings: of the session.
        outcome: the failure.
    """
    found = search.found
    found.place = "session" if outcome.kind == "refused" else "run"
    found.cause = outcome.message
    if feeds is not None:
        search.tried("the model with the settings of the run, in a fresh process", outcome.kind)
    known = _known_values(search, parts, feeds) if feeds is not None and outcome.kind != "refused" else None
    start = range(len(parts.nodes)) if known is None else _with_known_inputs(parts, known)
    check = FailsAs(parts, known, settings, search.runner, outcome)
    if not check(start):
        found.advice.append("only the whole model fails in this way, no part of it does")
        return found
    kept = search.reduce(path, f"{outcome.kind} {essence(outcome.message)}", settings, start, check)
    outputs = [str(value.name) for value in parts.outputs_of(kept)]
    if len(outputs) > 1:
        outputs = smallest(outputs, lambda names: check(kept, names))
    model = parts.cut(kept, known, outputs=outputs, constants=parts.weights)
    assert model is not None
    found.value, found.source = outputs[0], line_of([parts.nodes[i] for i in kept])
    expected = {} if known is None else {name: known.get(name, _UNKNOWN) for name in outputs}
    found.advice.append("report it to onnxruntime with the folder")
    text = {"refused": "ONNX Runtime rejects the model", "failed": "ONNX Runtime fails in the run"}
    said = f"{text.get(outcome.kind, 'ONNX Runtime crashes the process')}: {outcome.message}"
    piece = Piece(model, settings, inputs_of(model, known), expected, {}, outcome.kind, said)
    return search.finish(piece, len(parts.nodes), outcome)


def _known_values(search: Search, parts: Parts, feeds: Feeds) -> Feeds:
    """All values if the model runs without optimizations, else those before the node that fails, found by halving."""
    whole = search.values(parts, feeds)
    if whole.kind == "ran":
        return {**feeds, **whole.outputs}
    works, fails = 0, len(parts.nodes)  # the first `works` nodes run; the first `fails` do not
    values: Feeds = {}
    while fails - works > 1:
        middle = (works + fails) // 2
        search.progress(f"the failure is between nodes {works} and {fails} ({search.runner.count} sessions)")
        model = parts.cut(range(middle), feeds)
        assert model is not None
        model.graph.outputs[:] = [value for node in model.graph for value in node.outputs if value.name]
        result = search.runner.run(model, feeds, PLAIN)
        if result.kind == "ran":
            works, values = middle, result.outputs
        else:
            fails = middle
    return {**feeds, **values}


def _with_known_inputs(parts: Parts, known: Feeds) -> list[int]:
    """The nodes whose inputs are all known: those that do not depend on the node that fails."""
    return [i for i in range(len(parts.nodes)) if all(str(v.name) in known for v in parts.inputs_of([i]))]


def _typed(model: ir.Model) -> ir.Model:
    """The model with inferred types, if some are missing."""
    if all(value.type is not None for node in model.graph for value in node.outputs if value.name):
        return model
    return ir.from_proto(onnx.shape_inference.infer_shapes(ir.to_proto(model)))
