"""Models that end without a result: ONNX Runtime makes no session of them, fails, or ends the process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

from .bisection import Bisection, Search, line_of
from .candidate_runs import Feeds, Outcome
from .cut_folder import Piece
from .fault_test import EndsAs, essence, is_same_end, smallest
from .model_sessions import PLAIN
from .models import load_ir
from .reading import DumpedGraph, DumpError
from .schema import Settings
from .submodels import Parts, inputs_of

_NOTHING = np.zeros(0, np.float32)  # in the place of a right output that nobody knows


def refused_models(graph: DumpedGraph) -> list[Path]:
    """The models of which ONNX Runtime made no session when the graph was compiled."""
    return sorted((graph.folder / "refused").glob("*.onnx"))


def bisect_refused(search: Search, settings: Settings) -> Bisection:
    """The smallest part of a model of which ONNX Runtime makes no session; ``DumpError`` if no model was refused."""
    found = search.found
    models = refused_models(search.graph)
    if not models:
        raise DumpError(f"no model of {found.graph} was refused: there is no {search.graph.folder / 'refused'}")
    for path in models:
        parts = Parts(_typed(load_ir(path)))
        outcome = search.runner.run(path, None, settings)
        if outcome.kind in ("refused", "crashed"):
            search.tried(f"a session of {path.name}, as it ran", outcome.kind)
            plain = search.runner.run(path, None, settings.unoptimized)
            said = "made" if plain.kind == "built" else plain.kind
            search.tried("the same, ONNX Runtime's optimizers off", said)
            if is_same_end(plain, outcome):
                settings = settings.unoptimized
            return bisect_ending(search, parts, None, settings, outcome, path)
        search.tried(f"a session of {path.name}", "made: it was refused by dynamo-backends itself")
    found.place = "nothing"
    said_file = models[0].with_suffix(".txt")
    found.cause = said_file.read_text(encoding="utf-8", errors="replace").strip() if said_file.exists() else ""
    found.advice.append("ONNX Runtime takes the model; the kernel is known to be wrong, see docs/upstream.md")
    return found


def bisect_ending(
    search: Search, parts: Parts, feeds: Feeds | None, settings: Settings, outcome: Outcome, path: Path
) -> Bisection:
    """The smallest part of a model that ends as the whole does.

    Args:
        search: takes down what is tried and found.
        parts, path: the model, and its file.
        feeds: its inputs; ``None`` where it was not run.
        settings: of the session.
        outcome: how the whole ended.
    """
    found = search.found
    found.place = "session" if outcome.kind == "refused" else "run"
    found.cause = outcome.message
    if feeds is not None:
        search.tried("all as it ran, in a fresh process", outcome.kind)
    known = _known_before(search, parts, feeds) if feeds is not None and outcome.kind != "refused" else None
    every = range(len(parts.nodes)) if known is None else _runnable(parts, known)
    check = EndsAs(parts, known, settings, search.runner, outcome)
    if not check(every):
        found.advice.append("no part of the model fails in this way; the whole does")
        return found
    question = f"{outcome.kind} {essence(outcome.message)}"
    kept = search.reduce(path, question, settings, every, check)
    outputs = [str(value.name) for value in parts.outputs_of(kept)]
    if len(outputs) > 1:
        outputs = smallest(outputs, lambda names: check(kept, names))
    model = parts.cut(kept, known, outputs=outputs, constants=parts.weights)
    assert model is not None
    found.value, found.source = outputs[0], line_of([parts.nodes[i] for i in kept])
    right = {} if known is None else {name: known.get(name, _NOTHING) for name in outputs}
    found.advice.append("report it to onnxruntime with the folder")
    text = {"refused": "ONNX Runtime makes no session of it", "failed": "ONNX Runtime fails while it runs"}
    said = f"{text.get(outcome.kind, 'ONNX Runtime ends the process')}: {outcome.message}"
    piece = Piece(model, settings, inputs_of(model, known), right, {}, outcome.kind, said)
    return search.finish(piece, len(parts.nodes), outcome)


def _known_before(search: Search, parts: Parts, feeds: Feeds) -> Feeds:
    """The values that can be computed: all if nothing optimized ends well, else those before the node that does
    not, which halving finds."""
    whole = search.values(parts, feeds)
    if whole.kind == "ran":
        return {**feeds, **whole.outputs}
    works, fails = 0, len(parts.nodes)  # the first `works` nodes run; the first `fails` do not
    values: Feeds = {}
    while fails - works > 1:
        middle = (works + fails) // 2
        search.progress(f"it ends between nodes {works} and {fails} ({search.runner.count} sessions)")
        model = parts.cut(range(middle), feeds)
        assert model is not None
        model.graph.outputs[:] = [value for node in model.graph for value in node.outputs if value.name]
        result = search.runner.run(model, feeds, PLAIN)
        if result.kind == "ran":
            works, values = middle, result.outputs
        else:
            fails = middle
    return {**feeds, **values}


def _runnable(parts: Parts, known: Feeds) -> list[int]:
    """The nodes whose inputs are known: all but those behind the one that does not run."""
    return [i for i in range(len(parts.nodes)) if all(str(v.name) in known for v in parts.inputs_of([i]))]


def _typed(model: ir.Model) -> ir.Model:
    """The model with the types that inference finds."""
    if all(value.type is not None for node in model.graph for value in node.outputs if value.name):
        return model
    return ir.from_proto(onnx.shape_inference.infer_shapes(ir.to_proto(model)))
