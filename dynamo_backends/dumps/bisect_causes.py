"""Searches for a wrong translation, kernel, ONNX pass or optimizer, and for the part of a model that cannot run."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

from . import optimizers
from .bisection import (
    RIGHT,
    WRONG,
    Bisection,
    BisectionSearch,
    RanModel,
    delta_debug,
    fault_of,
    is_same_failure,
    line_of,
    reference,
)
from .blame import Cause, CauseKind
from .candidate_runs import CandidateOutcome, Feeds
from .cut_folder import CutModel
from .model_sessions import PLAIN, RANDOM
from .models import load_ir
from .reading import DumpedGraph, DumpedRegion, DumpError, read_data_set
from .schema import Level, Settings, node_of
from .submodels import Parts, known_of
from .value_differences import difference_from_reference, tolerance

_UNKNOWN = np.zeros(0, np.float32)  # stands for an expected output that could not be computed

_LEVELS: Sequence[Level] = ("ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_ALL")


@dataclasses.dataclass(frozen=True)
class NodeResults:
    """PyTorch's values of the node that the verdict names: its inputs, eager's results, and those in float64."""

    operator: str
    inputs: Feeds
    eager: Feeds
    exact: Feeds

    @classmethod
    def read(cls, graph: DumpedGraph, region: DumpedRegion) -> NodeResults | None:
        """The values in ``culprit/`` of a region; ``None`` if there are none. ``DumpError`` if a file is damaged."""
        folder = region.folder / "culprit"
        if not folder.is_dir():
            return None
        values = [dict(read_data_set(folder, kind)) for kind in ("input", "eager", "exact")]
        operators = (row.operator for row in graph.rows() if row.name in values[1])
        return cls(next(operators, "an unknown operator"), *values)


def wrong_translation(search: BisectionSearch, ran: RanModel, node: NodeResults | None) -> Bisection | None:
    """The node that the verdict names, if its ONNX nodes in float64 differ from PyTorch's float64."""
    what = "the translation: its ONNX nodes in float64, against PyTorch's float64"
    if node is None:
        if search.blamed.blames_no_node:
            search.tried("the translation, compared in PyTorch when the model ran", RIGHT)
        else:
            search.tried(what, "unknown: the dump has no PyTorch result of a node")
        return None
    model, known = _node_model(ran, node)
    results = search.runner.exact(model, known)
    if results is None:
        search.tried(what, "unknown: its ONNX nodes cannot be computed in float64")
        return None
    for name, eager in node.eager.items():
        if name in results and _overflows_alike(results[name], eager):
            results = {**results, name: _as_type(results[name], eager.dtype)}
    return _wrong_node(search, ran, node, "translation", what, results)


def wrong_node(search: BisectionSearch, ran: RanModel, node: NodeResults | None) -> Bisection | None:
    """The node that the verdict names, if its ONNX nodes, computed by ONNX Runtime, differ from PyTorch's float64.

    Where float64 is not available, it is not known whether the translation or a kernel is wrong.
    """
    if node is None:
        return None
    what = "translation and kernels: its ONNX nodes on ONNX Runtime, nothing optimized, against PyTorch's float64"
    results = search.runner.run(*_node_model(ran, node), PLAIN).outputs
    return _wrong_node(search, ran, node, "translation or kernel", what, results)


def _wrong_node(
    search: BisectionSearch, ran: RanModel, node: NodeResults, place: str, what: str, results: Feeds
) -> Bisection | None:
    """The bisection if the results of a node differ from PyTorch's."""
    result = search.result
    model, known = _node_model(ran, node)
    for name, value in results.items():
        exact, eager = node.exact[name], node.eager[name]
        has_right_type = known[name].dtype == eager.dtype
        error = difference_from_reference(value, exact, [eager], dtype=eager.dtype)
        if has_right_type and error.is_rounding:
            continue
        search.tried(what, WRONG, name, error.error if has_right_type else float("inf"))
        result.place, result.value = place, name
        # Not of the ONNX nodes: one that another FX node has, too, may belong to that.
        result.cause = node.operator
        code = search.blame.code if search.blame is not None else ""
        to_mend = f"mend the registered converter ({code})"
        result.advice.append(to_mend if code else "report it with the folder to dynamo-backends")
        text = f"The {place} of {result.cause} ({name}): ONNX Runtime's result is not PyTorch's"
        piece = _piece(ran, model, known, {name: _as_type(exact, eager.dtype)}, tolerance(eager, exact), text)
        return search.finish(piece, len(ran.parts.nodes))
    search.tried(what, RIGHT)
    return None


def wrong_kernel(search: BisectionSearch, ran: RanModel, node: NodeResults | None) -> Bisection | None:
    """The first ONNX node of the FX node that the verdict names which ONNX Runtime computes wrong by itself."""
    parts, known, result = ran.parts, ran.known, search.result
    what = "the kernels: each node alone, nothing optimized, against float64"
    if search.blamed.blames_no_node:
        search.tried("the kernels, compared in PyTorch when the model ran", RIGHT)
        return None
    kept = list(range(len(parts.nodes)))
    if node is not None:
        kept = parts.before([name for name in node.exact if name in known], node.inputs)
    elif result.value:
        fx_node = node_of(result.value)
        kept = [i for i in kept if parts.nodes[i].metadata_props.get("fx_node") == fx_node]
    if not kept:
        search.tried(what, "unknown: the verdict names no node of this model")
        return None
    unknown = set()
    for i in kept:
        model = parts.cut([i], known)
        if model is None or parts.nodes[i].op_type in RANDOM:
            continue
        exact = search.runner.exact(model, known)
        if exact is None:
            unknown.add(parts.nodes[i].op_type)
            continue
        # ``known`` is of the whole model, in which nothing is fused: its values are those of nodes that run alone.
        for name, array in known_of(model.graph.outputs, known).items():
            right = _as_type(exact[name], array.dtype)
            if difference_from_reference(array, right).is_rounding:
                continue
            error = search.runner.error(model, known, name, array, exact[name], [])
            if error is None:
                continue
            search.tried(what, WRONG, name, error)
            result.place, result.value, result.cause = "kernel", name, parts.nodes[i].op_type
            result.advice.append("a kernel of ONNX Runtime is wrong: report it to onnxruntime with the folder")
            text = f"ONNX Runtime's kernel of {result.cause} does not compute what ONNX specifies"
            piece = _piece(ran, model, known, {name: right}, 1.0, text)
            return search.finish(piece, len(parts.nodes))
    search.tried(what, f"unknown: {', '.join(sorted(unknown))} cannot be computed in float64" if unknown else RIGHT)
    return None


def wrong_pass(search: BisectionSearch, ran: RanModel, optimized: RanModel) -> Bisection | None:
    """The part of the model after our passes, between values of both models, that computes something else."""
    result, before, known, after, known_after = search.result, ran.parts, ran.known, optimized.parts, optimized.known
    what = "our ONNX passes: model.optimized.onnx against model.onnx, ONNX Runtime's optimizers off in both"
    both = [name for name in after.tensors() if name in known and name in before.by_name]
    suspicious = [name for name in both if fault_of(known_after[name], known[name]) is not None]
    right = set(both).difference(suspicious)
    for name in suspicious:
        old, new = before.cut(before.before([name], right), known, outputs=[name]), after.before([name], right)
        model = after.cut(new, {**known_after, **{n: known[n] for n in right}}, outputs=[name])
        if old is None or model is None:
            continue
        exact = search.runner.exact(old, known) or {}
        error = fault_of(known_after[name], known[name], exact.get(name))
        if error is None:
            continue
        search.tried(what, WRONG, name, error)
        name_of_pass = search.blamed.name if search.blamed.kind == CauseKind.PASS else ""
        result.place, result.value = "ONNX pass", name
        result.cause = str(Cause(CauseKind.PASS, name_of_pass))
        options = {"passes": {"disable": [name_of_pass or "onnx.*"]}}
        result.advice.append(f"to confirm, run again with {options=}; before.onnx is what the pass was given")
        if name_of_pass:
            result.advice.append(f"dynamo-backends passes --why {name_of_pass}")
        text = f"{result.cause} rewrote before.onnx as model.onnx, which has another result"
        allowed = _allowed(known[name], exact.get(name))
        piece = _piece(ran, model, {**known_after, **known}, {name: known[name]}, allowed, text)
        return search.finish(piece, len(after.nodes), before=old)
    search.tried(what, RIGHT)
    return None


def wrong_optimizer(search: BisectionSearch, ran: RanModel) -> Bisection | None:
    """The smallest part of a model that ONNX Runtime's optimizers make wrong."""
    parts, known, result = ran.parts, ran.known, search.result
    start = next((candidate for candidate in _starts(parts, result.value) if ran(candidate)), None)
    if start is None:
        return None
    for level in _LEVELS:
        at_level = dataclasses.replace(ran.settings, graph_optimization_level=level)
        wrong = dataclasses.replace(ran, settings=at_level).wrong(start)
        name = max(wrong, key=lambda name: wrong[name], default="")
        text = f"ONNX Runtime's optimizers, {level.removeprefix('ORT_ENABLE_').lower()}"
        search.tried(text, WRONG if wrong else RIGHT, name, wrong.get(name))
    kept = search.reduce(start, ran)
    outputs = list(ran.wrong(kept))
    outputs = delta_debug(outputs, lambda names: ran(kept, names)) if len(outputs) > 1 else outputs
    model = parts.cut(kept, known, outputs=outputs, constants=parts.weights)
    if model is None or not outputs:
        return None
    result.place, result.value = "ONNX Runtime optimizer", outputs[0]
    result.cause = _optimizer(ran, kept, outputs)
    result.advice.append("ONNX Runtime's optimizers change the result: report it to onnxruntime with the folder")
    exact = ran.runner.exact(model, known) or {}
    expected = {name: known[name] for name in outputs}
    allowed = {name: _allowed(array, exact.get(name)) for name, array in expected.items()}
    text = f"{result.cause} of ONNX Runtime changes the result"
    piece = CutModel(model, ran.settings, known_of(model.graph.inputs, known), expected, allowed, "differs", text)
    return search.finish(piece, len(parts.nodes))


def _piece(ran: RanModel, model: ir.Model, known: Feeds, expected: Feeds, allowed: float, text: str) -> CutModel:
    """A cut that returns a wrong result, with the settings of the run, or unoptimized if only that shows the fault."""
    outcome = ran.runner.run(model, known, ran.settings)
    shows = outcome.kind == "ran" and all(
        fault_of(outcome.outputs[name], value) is not None for name, value in expected.items()
    )
    settings = ran.settings if shows else PLAIN
    allowed_by_output = dict.fromkeys(expected, allowed)
    return CutModel(model, settings, known_of(model.graph.inputs, known), expected, allowed_by_output, "differs", text)


def _allowed(known: np.ndarray, exact: np.ndarray | None) -> float:
    """See ``CutModel.allowed``."""
    return tolerance(known, reference(known, exact)[0])


def _starts(parts: Parts, value: str) -> Sequence[Sequence[int]]:
    """Where delta debugging may start: all nodes; those that the value depends on; more and more of its neighbours."""
    starts: list[Sequence[int]] = [range(len(parts.nodes))]
    if value in parts.by_name:
        starts.append(parts.before([value]))
        at, reach = parts.by_name[value], 2
        while reach < len(parts.nodes):
            starts.append(range(max(0, at - reach), min(len(parts.nodes), at + reach)))
            reach *= 4
    return starts


def _optimizer(ran: RanModel, kept: Sequence[int], outputs: Collection[str]) -> str:
    """``the optimizer NAME``; ``no single optimizer`` if none alone is to blame."""

    def is_right(disabled: Sequence[str]) -> bool:
        names = (*ran.settings.disabled_optimizers, *disabled)
        without = dataclasses.replace(ran.settings, disabled_optimizers=names)
        return not dataclasses.replace(ran, settings=without)(kept, outputs)

    found = optimizers.wrong_optimizer(is_right)
    return f"the optimizer {found}" if found else "no single optimizer"


def _node_model(ran: RanModel, node: NodeResults) -> tuple[ir.Model, Feeds]:
    """The ONNX nodes of an FX node as a model, with values; an ``Identity`` if its result was folded."""
    parts = ran.parts
    initializers = parts.model.graph.initializers
    values = {name: initializers[name].const_value for name in node.exact if name in initializers}
    constants = {name: value.numpy() for name, value in values.items() if value is not None}
    known = {**ran.known, **constants, **node.inputs}
    names = [name for name in node.exact if name in known]
    kept = parts.before(names, node.inputs)
    model = parts.cut(kept, known, outputs=names) if kept else None
    if model is not None:
        return model, known
    folded = [onnx.numpy_helper.from_array(known[name], f"{name}__folded") for name in names]
    nodes = [onnx.helper.make_node("Identity", [f"{name}__folded"], [name]) for name in names]
    outputs = [onnx.ValueInfoProto(name=name) for name in names]
    graph = onnx.helper.make_graph(nodes, "folded", [], outputs, folded)
    opset = onnx.helper.make_opsetid("", parts.model.graph.opset_imports.get("", 18))
    proto = onnx.helper.make_model(graph, opset_imports=[opset], ir_version=parts.model.ir_version)
    return ir.from_proto(onnx.shape_inference.infer_shapes(proto)), known


def _as_type(exact: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A float64 result in a dtype; what is too large becomes infinite."""
    with np.errstate(over="ignore"):
        return exact.astype(dtype) if exact.dtype == np.float64 else exact


def _overflows_alike(exact: np.ndarray, eager: np.ndarray) -> bool:
    """Whether the rounded float64 result has NaN and infinities at the same places as eager's."""
    rounded = _as_type(exact, eager.dtype).astype(np.float64)
    return bool((np.isfinite(rounded) == np.isfinite(eager.astype(np.float64))).all())


def rejected_models(graph: DumpedGraph) -> list[Path]:
    """The models that ONNX Runtime rejected when the graph was compiled."""
    return sorted((graph.folder / "rejected").glob("*.onnx"))


def bisect_rejected(search: BisectionSearch, graph: DumpedGraph, settings: Settings) -> Bisection:
    """The smallest part of a model that ONNX Runtime rejects; ``DumpError`` if no model was rejected."""
    result = search.result
    models = rejected_models(graph)
    if not models:
        raise DumpError(f"no model of {result.graph} was rejected: there is no {graph.folder / 'rejected'}")
    for path in models:
        parts = Parts(typed(load_ir(path)))
        outcome = search.runner.run(path, None, settings)
        if outcome.kind in ("rejected", "crashed"):
            search.tried(f"a session of {path.name}, with the settings of the run", outcome.kind)
            plain = search.runner.run(path, None, settings.unoptimized)
            search.tried("the same, ONNX Runtime's optimizers off", "created" if plain.kind == "built" else plain.kind)
            if is_same_failure(plain, outcome):
                settings = settings.unoptimized
            return bisect_failure(search, parts, None, settings, outcome)
        search.tried(f"a session of {path.name}", "created: dynamo-backends itself rejected the model")
    result.place = "nothing"
    message = models[0].with_suffix(".txt")
    result.cause = message.read_text(encoding="utf-8", errors="replace").strip() if message.exists() else ""
    result.advice.append(
        "ONNX Runtime accepts the model, but one of its kernels is known to be wrong: docs/upstream.md"
    )
    return result


def bisect_failure(
    search: BisectionSearch, parts: Parts, feeds: Feeds | None, settings: Settings, outcome: CandidateOutcome
) -> Bisection:
    """The smallest part of a model with the failure ``outcome``.

    ``feeds`` are its inputs; ``None`` if it was not run.
    """
    result = search.result
    result.place = "session" if outcome.kind == "rejected" else "run"
    result.cause = outcome.message
    if feeds is not None:
        search.tried("the model with the settings of the run, in a fresh process", outcome.kind)
    known = _known_values(search, parts, feeds) if feeds is not None and outcome.kind != "rejected" else None
    start: Sequence[int] = range(len(parts.nodes))
    if known is not None:  # without the nodes that depend on the one that fails
        start = [i for i in start if all(str(value.name) in known for value in parts.inputs_of([i]))]

    def check(kept: Collection[int], outputs: Collection[str] | None = None) -> bool:
        model = parts.cut(kept, known, outputs=outputs, constants=parts.weights)
        given = None if outcome.kind == "rejected" else known
        return model is not None and is_same_failure(search.runner.run(model, given, settings), outcome)

    if not check(start):
        result.advice.append("only the whole model fails in this way, no part of it does")
        return result
    kept = search.reduce(start, check)
    outputs = [str(value.name) for value in parts.outputs_of(kept)]
    if len(outputs) > 1:
        outputs = delta_debug(outputs, lambda names: check(kept, names))
    model = parts.cut(kept, known, outputs=outputs, constants=parts.weights)
    assert model is not None
    result.value, result.source = outputs[0], line_of([parts.nodes[i] for i in kept])
    expected = {} if known is None else {name: known.get(name, _UNKNOWN) for name in outputs}
    result.advice.append("report it to onnxruntime with the folder")
    text = {"rejected": "ONNX Runtime rejects the model", "failed": "ONNX Runtime fails in the run"}
    said = f"{text.get(outcome.kind, 'ONNX Runtime crashes the process')}: {outcome.message}"
    piece = CutModel(model, settings, known_of(model.graph.inputs, known), expected, {}, outcome.kind, said)
    return search.finish(piece, len(parts.nodes), outcome)


def _known_values(search: BisectionSearch, parts: Parts, feeds: Feeds) -> Feeds:
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


def typed(model: ir.Model) -> ir.Model:
    """The model with inferred types, if some are missing."""
    if all(value.type is not None for node in model.graph for value in node.outputs if value.name):
        return model
    return ir.from_proto(onnx.shape_inference.infer_shapes(ir.to_proto(model)))
