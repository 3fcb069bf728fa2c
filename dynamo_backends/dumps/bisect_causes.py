"""The possible causes of a wrong model, and what checks each: translation, kernel, ONNX pass, optimizer, failure."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir

from ..numerics.verdicts import Verdict
from ..numerics.whole_graph import ResultCheck
from . import optimizers
from .bisection import RIGHT, WRONG, Bisection, BisectionSearch, RanModel, delta_debug, is_same_failure, line_of
from .blame import Cause, CauseKind
from .candidate_runs import CandidateOutcome
from .cut_folder import CutModel
from .model_judging import ValueDifference, as_tensor, difference
from .model_sessions import PLAIN, RANDOM
from .models import load_ir
from .reading import DumpedGraph, DumpedRegion, DumpError, read_data_set
from .reference_evaluator import computed_in_float64
from .schema import Settings, node_of
from .submodels import Feeds, Parts, known_of

_UNKNOWN = np.zeros(0, np.float32)  # stands for an expected output that could not be computed


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

    def right(self, name: str) -> np.ndarray:
        """The result in float64, rounded to eager's dtype."""
        with np.errstate(over="ignore"):
            return self.exact[name].astype(self.eager[name].dtype)

    def judge(self, name: str, value: np.ndarray) -> ValueDifference:
        """How a result differs from PyTorch's; eager's own error is allowed some times over."""
        eager, exact = self.eager[name], self.exact[name]
        if value.shape != eager.shape:
            return ValueDifference(Verdict(f"shape {value.shape} instead of {eager.shape}"))
        terms = max((item.size for item in self.inputs.values()), default=1)
        check = ResultCheck(
            {0: as_tensor(eager)},
            lambda seed: {0: as_tensor(exact if seed is None else eager.astype(exact.dtype))},
            terms=lambda: terms,
        )
        with np.errstate(over="ignore"):
            return ValueDifference(check.judge(0, as_tensor(value.astype(eager.dtype))))


def wrong_node(search: BisectionSearch, ran: RanModel, node: NodeResults | None, *, wide: bool) -> Bisection | None:
    """The node that the verdict names, if its ONNX nodes differ from PyTorch's float64.

    With ``wide`` they are computed in float64, so that the translation is wrong. Without, ONNX Runtime computes them:
    where there is no float64, it is not known whether the translation or a kernel is wrong.
    """
    place = "translation" if wide else "translation or kernel"
    how = "the translation: its ONNX nodes in float64" if wide else f"{place}: its ONNX nodes, nothing optimized"
    what = f"{how}, against PyTorch's float64"
    if node is None:
        if search.blamed.blames_no_node and wide:
            search.tried("the translation, compared in PyTorch when the model ran", RIGHT)
        elif wide:
            search.tried(what, "unknown: the dump has no PyTorch result of a node")
        return None
    model, known = _node_model(ran, node)
    results = computed_in_float64(model, known, search.plain) if wide else search.plain(model, known)
    if results is None:
        search.tried(what, "unknown: its ONNX nodes cannot be computed in float64")
        return None
    for name, value in results.items():
        found, eager = node.judge(name, value), node.eager[name]
        if known[name].dtype != eager.dtype:
            found = ValueDifference(Verdict(f"{known[name].dtype} instead of {eager.dtype}"))
        if not found.is_wrong:
            continue
        search.tried(what, WRONG, name, found)
        # The cause is not one of the ONNX nodes: one that another FX node has, too, may belong to that.
        code = search.blame.code if search.blame is not None else ""
        to_mend = f"mend the registered converter ({code})" if code else "report it with the folder to dynamo-backends"
        search.found(place, name, node.operator, to_mend)
        text = f"The {place} of {node.operator} ({name}): ONNX Runtime's result is not PyTorch's"
        return search.finish(_piece(ran, model, known, {name: node.right(name)}, text), len(ran.parts.nodes))
    search.tried(what, RIGHT)
    return None


def wrong_kernel(search: BisectionSearch, ran: RanModel, node: NodeResults | None) -> Bisection | None:
    """The first ONNX node of the FX node that the verdict names which ONNX Runtime computes wrong by itself."""
    parts, known = ran.parts, ran.known
    what = "the kernels: each node alone, nothing optimized, against float64"
    if search.blamed.blames_no_node:
        search.tried("the kernels, compared in PyTorch when the model ran", RIGHT)
        return None
    kept = list(range(len(parts.nodes)))
    if node is not None:
        kept = parts.before([name for name in node.exact if name in known], node.inputs)
    elif search.result.value:
        fx_node = node_of(search.result.value)
        kept = [i for i in kept if parts.nodes[i].metadata_props.get("fx_node") == fx_node]
    unknown = set() if kept else {"the verdict names no node of this model"}
    for i in kept:
        model, operator = parts.cut([i], known), parts.nodes[i].op_type
        for output in model.graph.outputs if model is not None and operator not in RANDOM else ():
            # ``known`` is of the whole model, in which nothing is fused: its values are those of nodes that run alone.
            name = str(output.name)
            found = search.judge(model, known, name, known[name])
            if found is None:
                unknown.add(f"{operator} cannot be computed in float64")
            elif found.is_wrong:
                search.tried(what, WRONG, name, found)
                advice = "a kernel of ONNX Runtime is wrong: report it to onnxruntime with the folder"
                search.found("kernel", name, operator, advice)
                exact = computed_in_float64(model, known, search.plain) or known
                text = f"ONNX Runtime's kernel of {operator} does not compute what ONNX specifies"
                with np.errstate(over="ignore"):
                    right = {name: exact[name].astype(known[name].dtype)}
                return search.finish(_piece(ran, model, known, right, text), len(parts.nodes))
    search.tried(what, f"unknown: {', '.join(sorted(unknown))}" if unknown else RIGHT)
    return None


def wrong_pass(search: BisectionSearch, ran: RanModel, optimized: RanModel) -> Bisection | None:
    """The part of the model after our passes, between values of both models, that computes something else."""
    before, known, after, known_after = ran.parts, ran.known, optimized.parts, optimized.known
    what = "our ONNX passes: model.optimized.onnx against model.onnx, ONNX Runtime's optimizers off in both"
    both = [name for name in after.tensors() if name in known and name in before.by_name]
    suspicious = [name for name in both if difference(known[name], known_after[name]).is_wrong]
    right = set(both).difference(suspicious)
    for name in suspicious:
        old, new = before.cut(before.before([name], right), known, outputs=[name]), after.before([name], right)
        model = after.cut(new, {**known_after, **{n: known[n] for n in right}}, outputs=[name])
        found = search.judge(old, known, name, known_after[name], known[name]) if old and model else None
        if found is None or not found.is_wrong:
            continue
        search.tried(what, WRONG, name, found)
        name_of_pass = search.blamed.name if search.blamed.kind == CauseKind.PASS else ""
        options = {"passes": {"disable": [name_of_pass or "onnx.*"]}}
        cause = str(Cause(CauseKind.PASS, name_of_pass))
        search.found(
            "ONNX pass", name, cause, f"to confirm, run again with {options=}; before.onnx is what the pass was given"
        )
        if name_of_pass:
            search.result.advice.append(f"dynamo-backends passes --why {name_of_pass}")
        text = f"{cause} rewrote before.onnx as model.onnx, which has another result"
        piece = _piece(ran, model, {**known_after, **known}, {name: known[name]}, text)
        return search.finish(piece, len(after.nodes), before=old)
    search.tried(what, RIGHT)
    return None


def wrong_optimizer(search: BisectionSearch, ran: RanModel) -> Bisection | None:
    """The smallest part of a model that ONNX Runtime's optimizers make wrong."""
    parts, known = ran.parts, ran.known
    start = next((candidate for candidate in _starts(parts, search.result.value) if ran(candidate)), None)
    if start is None:
        return None
    wrong = ran.wrong(start)
    name = max(wrong, key=lambda name: wrong[name].error)
    search.tried("ONNX Runtime's optimizers, against no optimization", WRONG, name, wrong[name])
    kept = search.reduce(start, ran)
    outputs = list(ran.wrong(kept))
    outputs = delta_debug(outputs, lambda names: ran(kept, names)) if len(outputs) > 1 else outputs

    def is_right(disabled: Sequence[str]) -> bool:
        names = (*ran.settings.disabled_optimizers, *disabled)
        without = dataclasses.replace(ran.settings, disabled_optimizers=names)
        return not dataclasses.replace(ran, settings=without)(kept, outputs)

    model = parts.cut(kept, known, outputs=outputs, constants=parts.weights)
    assert model is not None
    name = optimizers.wrong_optimizer(is_right)
    cause = f"the optimizer {name}" if name else "no single optimizer"
    advice = "ONNX Runtime's optimizers change the result: report it to onnxruntime with the folder"
    search.found("ONNX Runtime optimizer", outputs[0], cause, advice)
    expected = {name: known[name] for name in outputs}
    text = f"{cause} of ONNX Runtime changes the result"
    piece = CutModel(model, ran.settings, known_of(model.graph.inputs, known), expected, "differs", text)
    return search.finish(piece, len(parts.nodes))


def _piece(ran: RanModel, model: ir.Model, known: Feeds, expected: Feeds, text: str) -> CutModel:
    """A cut that returns a wrong result, with the settings of the run, or unoptimized if only that shows the fault."""
    outcome = ran.search.runner.run(model, known, ran.settings)
    is_shown = outcome.kind == "ran" and all(
        difference(value, outcome.outputs[name]).is_wrong for name, value in expected.items()
    )
    settings = ran.settings if is_shown else PLAIN
    return CutModel(model, settings, known_of(model.graph.inputs, known), expected, "differs", text)


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
    weights = [ir.Value(name=f"{name}__folded", const_value=ir.tensor(known[name])) for name in names]
    nodes = [ir.node("Identity", [weight]) for weight in weights]
    for name, folded in zip(names, nodes, strict=True):
        folded.outputs[0].name = name
    outputs = [folded.outputs[0] for folded in nodes]
    graph = ir.Graph([], outputs, nodes=nodes, initializers=weights, opset_imports={"": 18})
    return typed(ir.Model(graph, ir_version=parts.model.ir_version)), known


def rejected_models(graph: DumpedGraph) -> list[Path]:
    """The models that ONNX Runtime rejected when the graph was compiled."""
    return sorted((graph.folder / "rejected").glob("*.onnx"))


def bisect_rejected(search: BisectionSearch, graph: DumpedGraph, settings: Settings) -> Bisection:
    """The smallest part of a model that ONNX Runtime rejects; ``DumpError`` if no model was rejected."""
    models = rejected_models(graph)
    if not models:
        raise DumpError(f"no model of {graph.reference} was rejected: there is no {graph.folder / 'rejected'}")
    for path in models:
        outcome = search.runner.run(path, None, settings)
        if outcome.kind in ("rejected", "crashed"):
            search.tried(f"a session of {path.name}, with the settings of the run", outcome.kind)
            plain = search.runner.run(path, None, settings.unoptimized)
            search.tried("the same, ONNX Runtime's optimizers off", "created" if plain.kind == "built" else plain.kind)
            if is_same_failure(plain, outcome):
                settings = settings.unoptimized
            return bisect_failure(search, Parts(typed(load_ir(path))), None, settings, outcome)
        search.tried(f"a session of {path.name}", "created: dynamo-backends itself rejected the model")
    message = models[0].with_suffix(".txt")
    cause = message.read_text(encoding="utf-8", errors="replace").strip() if message.exists() else ""
    accepted = "ONNX Runtime accepts the model, but one of its kernels is known to be wrong: docs/upstream.md"
    search.found("nothing", "", cause, accepted)
    return search.result


def bisect_failure(
    search: BisectionSearch, parts: Parts, feeds: Feeds | None, settings: Settings, outcome: CandidateOutcome
) -> Bisection:
    """The smallest part of a model with the failure ``outcome``.

    ``feeds`` are its inputs; ``None`` if it was not run.
    """
    search.found("session" if outcome.kind == "rejected" else "run", search.result.value, outcome.message)
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
        search.result.advice.append("only the whole model fails in this way, no part of it does")
        return search.result
    kept = search.reduce(start, check)
    outputs = [str(value.name) for value in parts.outputs_of(kept)]
    if len(outputs) > 1:
        outputs = delta_debug(outputs, lambda names: check(kept, names))
    model = parts.cut(kept, known, outputs=outputs, constants=parts.weights)
    assert model is not None
    search.result.value, search.result.source = outputs[0], line_of(parts.nodes[i] for i in kept)
    search.result.advice.append("report it to onnxruntime with the folder")
    expected = {} if known is None else {name: known.get(name, _UNKNOWN) for name in outputs}
    text = {"rejected": "ONNX Runtime rejects the model", "failed": "ONNX Runtime fails in the run"}
    said = f"{text.get(outcome.kind, 'ONNX Runtime crashes the process')}: {outcome.message}"
    piece = CutModel(model, settings, known_of(model.graph.inputs, known), expected, outcome.kind, said)
    return search.finish(piece, len(parts.nodes), outcome)


def _known_values(search: BisectionSearch, parts: Parts, feeds: Feeds) -> Feeds:
    """All values if the model runs without optimizations, else those before the node that fails, found by halving."""
    whole = search.plain(parts.exposed(), feeds)
    if whole is not None:
        return {**feeds, **whole}
    works, fails = 0, len(parts.nodes)  # the first `works` nodes run; the first `fails` do not
    values: Feeds = {}
    while fails - works > 1:
        middle = (works + fails) // 2
        search.progress(f"the failure is between nodes {works} and {fails} ({search.runner.count} sessions)")
        model = parts.cut(range(middle), feeds)
        assert model is not None
        model.graph.outputs[:] = [value for node in model.graph for value in node.outputs if value.name]
        found = search.plain(model, feeds)
        if found is not None:
            works, values = middle, found
        else:
            fails = middle
    return {**feeds, **values}


def typed(model: ir.Model) -> ir.Model:
    """The model with inferred types, if some are missing."""
    if all(value.type is not None for node in model.graph for value in node.outputs if value.name):
        return model
    return ir.from_proto(onnx.shape_inference.infer_shapes(ir.to_proto(model)))
