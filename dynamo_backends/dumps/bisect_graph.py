"""Finds the cause of a dumped graph's wrong result, and cuts out the smallest model that shows it.

::

    found = bisect(find_run("onnx_debug"), "0/forward")
    found.place              # "translation", "kernel", "ONNX pass", "ONNX Runtime optimizer", ...
    found.cut.folder         # model.onnx, its inputs and expected outputs, repro.py

The possible causes are checked in this order:

1. decompositions and FX passes: compared in PyTorch during the run, the dump has the result;
2. the translation: the ONNX nodes of the blamed node in float64, against PyTorch's float64 (``culprit/`` in the dump);
3. kernels: each node on ONNX Runtime without optimizations, against float64; if there is none, all of the node at once;
4. ONNX passes: ``model.optimized.onnx`` against ``model.onnx``, both without ONNX Runtime's optimizations;
5. what is left: ONNX Runtime's optimizers, or the kernels that only they use.

Then delta debugging removes nodes, and replaces them by their values in the run, while the rest fails in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime

from .bisect_causes import (
    NodeResults,
    bisect_failure,
    bisect_rejected,
    rejected_models,
    typed,
    wrong_kernel,
    wrong_node,
    wrong_optimizer,
    wrong_pass,
)
from .bisection import RIGHT, WRONG, Bisection, BisectionSearch, BisectionStep, Command, RanModel, line_of
from .blame import CauseKind
from .candidate_runs import CandidateRunner
from .cut_folder import CutModel
from .model_judging import difference
from .model_sessions import PLAIN, check_provider_options, region_settings
from .models import load_ir, load_model
from .reading import DATA_SET, DumpedGraph, DumpedRegion, DumpedRun, DumpError, checked
from .schema import GraphEntry, Settings
from .submodels import Feeds, Parts, known_of

_AGAIN = "compare {} --stage onnx_optimized --runs 10"
"""The command that finds what differs from run to run."""


def bisect(
    run: DumpedRun,
    reference: str,
    *,
    output: Path | None = None,
    check: str | None = None,
    rejected: bool = False,
    progress: Callable[[str], None] = lambda text: None,
) -> Bisection:
    """Bisects the first graph that the reference names whose verdict is not ``ok``.

    Args:
        run, reference: a graph, or one of its regions; by default the region that the verdict names, or whose session
            failed.
        output: the folder of the cut; by default ``bisect`` in the graph's folder.
        check: a command that decides what fails, instead of the comparison.
        rejected: whether to bisect a model that ONNX Runtime rejected, even if there is another fault.
        progress: is called with a line of text now and then.

    Raises:
        DumpError: there is no such graph or region, the dump is incomplete, or the command cannot be used.
    """
    graphs, region = run.graphs_of(reference), run.region_named(reference)
    if region is not None:
        graphs = [graph for graph, _ in run.regions_of(reference)]
    graph = next((item for item in graphs if item.verdict not in (None, "ok")), None)
    if graph is None:
        graph = next((item for item in graphs if rejected_models(item)), graphs[0])
    result, blame, versions = Bisection(graph.reference, graph.verdict), graph.entry.blame, run.manifest.versions
    with CandidateRunner() as runner:
        search = BisectionSearch(result, output or graph.folder / "bisect", runner, progress, versions, blame)
        if check is not None:
            _by_command(search, _region(graph, region), check)
        elif rejected or (graph.verdict in (None, "ok") and rejected_models(graph)):
            bisect_rejected(search, graph, _providers(run))
        else:
            _by_verdict(search, run, graph, region)
    result.sessions, result.source = runner.count, result.source or _source(graph, result.value)
    result.others = {item.reference: item.verdict for item in graphs if item is not graph}
    return result


def _source(graph: DumpedGraph, value: str) -> str:
    """The user's line of the node that computes a value."""
    paths = (path for region in graph.regions for path in (region.model, region.optimized_model)) if value else ()
    models = (Parts(load_ir(path)) for path in paths)
    return next((line_of([parts.nodes[parts.by_name[value]]]) for parts in models if value in parts.by_name), "")


def bisect_file(
    path: Path,
    feeds: Feeds,
    *,
    output: Path | None = None,
    check: str | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> Bisection:
    """Bisects an ONNX file: a kernel, an optimizer, or what makes the session or the run fail.

    Args:
        path: the file, whose values are computed on the inputs ``feeds``.
        output: the folder of the cut; by default that of the file, with ``.bisect`` added.
        check, progress: as for ``bisect``.

    Raises:
        DumpError: the file is no ONNX model, or the command cannot be used.
    """
    versions = {"onnx": onnx.__version__, "onnxruntime": onnxruntime.__version__}
    result, settings = Bisection(str(path), None), Settings()
    with CandidateRunner() as runner:
        search = BisectionSearch(result, output or path.with_suffix(".bisect"), runner, progress, versions)
        parts = Parts(typed(load_ir(path)))
        if check is not None:
            _check_parts(search, parts, path, feeds, settings, check)
        elif isinstance(ran := _ran(search, parts, feeds, settings), RanModel):
            found = wrong_kernel(search, ran, None) or wrong_optimizer(search, ran)
            if found is None:
                search.tried("ONNX Runtime's optimizers, against no optimization", RIGHT)
    result.sessions = runner.count
    return result


def _ran(search: BisectionSearch, parts: Parts, feeds: Feeds, settings: Settings) -> RanModel | Bisection:
    """The values of a model without optimizations; the bisection of the failure if it does not run."""
    outcome = search.runner.run(_with_constants(parts, feeds), feeds, settings)
    if outcome.kind != "ran":
        return bisect_failure(search, parts, feeds, settings, outcome)
    plain = search.runner.run(parts.exposed(), feeds, PLAIN)
    if plain.kind != "ran":
        return bisect_failure(search, parts, feeds, PLAIN, plain)
    return RanModel(parts, {**feeds, **plain.outputs}, settings, search, outcome.outputs)


def _by_verdict(search: BisectionSearch, run: DumpedRun, graph: DumpedGraph, region: int | None) -> Bisection:
    """Bisects a graph whose verdict says that it diverges."""
    result, entry = search.result, graph.entry
    if result.verdict in (None, "ok"):
        for item in graph.regions:  # a truncated file is an error, not a right model
            load_model(item.model), load_model(item.optimized_model)
        result.advice.append("nothing diverges; --check COMMAND bisects with a check of your own")
        return result
    blamed = search.blamed
    result.cause = str(blamed)
    if entry.blame is not None:
        result.value, result.source = entry.blame.value, entry.blame.source
    if blamed.is_before_translation:
        return _in_pytorch(search, entry)
    forward = _forward(run, graph)
    if blamed.kind == CauseKind.RESULT and forward is not None:
        result.place, result.cause = "forward", f"its forward {forward.verdict}"
        result.advice.append(f"dynamo-backends bisect {forward.reference}")
        return result
    if entry.status == "compared":
        search.tried("decompositions and FX passes, compared in PyTorch when the model ran", RIGHT)
    if blamed.kind == CauseKind.UNSTABLE:
        search.found("run to run", result.value, result.cause, f"dynamo-backends {_AGAIN.format(result.graph)}")
        return result
    if blamed.kind == CauseKind.PYTORCH:
        result.place = "PyTorch"
        result.advice.append("the node ran in PyTorch: it has no ONNX model")
        return result
    return _in_region(search, graph, _region(graph, region))


def _region(graph: DumpedGraph, named: int | None) -> DumpedRegion:
    """The region that the user names, that the verdict blames, or whose session failed; else the first."""
    entry = graph.entry
    regions = {region.index: region for region in graph.regions}
    if not regions:
        raise DumpError(f"nothing of {graph.reference} ran on ONNX Runtime: {entry.why_in_pytorch}")
    failed = (index for index in regions if index in entry.rescued)
    candidates = [named, _blamed_region(graph), *failed, *regions]
    return next(regions[index] for index in candidates if index in regions)


def _blamed_region(graph: DumpedGraph) -> int | None:
    """The region of the value that the verdict names, or the nearest before it if PyTorch computed the value."""
    blame = graph.entry.blame
    if blame is None or blame.region is not None or not (graph.folder / "side_by_side.json").exists():
        return blame.region if blame else None
    rows = {row.name: row for row in graph.rows()}
    names = [blame.value]
    for name in names:  # grows in the loop
        row = rows.get(name)
        if row is not None and row.region is not None:
            return row.region
        names += [read for read in (row.inputs if row else ()) if read not in names]
    return None


def _forward(run: DumpedRun, backward: DumpedGraph) -> DumpedGraph | None:
    """The forward of a backward graph, if it diverges."""
    for graph in run.graphs if backward.direction == "backward" else ():
        if graph.index == backward.index and graph.direction == "forward" and graph.verdict not in (None, "ok"):
            return graph
    return None


def _in_pytorch(search: BisectionSearch, entry: GraphEntry) -> Bisection:
    """A fault before the translation, which the run found. It cannot be cut without PyTorch."""
    result, kind, name = search.result, search.blamed.kind, search.blamed.name
    error = entry.worst.onnx.max_abs if entry.worst is not None else None
    result.trials.append(BisectionStep(result.cause, WRONG, result.value, error))
    disabled = f"to confirm, run again with options={{'passes': {{'disable': [{name!r}]}}}}"
    places = {
        CauseKind.PASS: ("FX pass", disabled, f"dynamo-backends passes --why {name}"),
        CauseKind.DECOMPOSITION: ("decomposition", f"to confirm, compare the decomposition with the operator {name}"),
    }
    not_ours = "to confirm that no pass of ours is the cause, run with backend='aot_eager', which has none of them"
    place, *advice = places.get(kind, ("stage", not_ours))
    search.found(place, result.value, result.cause, *advice)
    return result


def _in_region(search: BisectionSearch, graph: DumpedGraph, region: DumpedRegion) -> Bisection:
    """Bisects a region that diverges."""
    settings, feeds = region_settings(region), region.recorded("input")
    parts = Parts(load_ir(region.model))
    after = Parts(load_ir(region.optimized_model), region.entry.constants)
    search.progress(f"{len(parts.nodes)} nodes, {len(after.nodes)} after our passes")
    missing = {str(value.name) for value in after.model.graph.inputs} - feeds.keys()
    if missing:
        raise DumpError(
            f"the dump is incomplete: {region.optimized_model} has no recorded input {', '.join(sorted(missing))}"
        )
    declared = {str(value.name): value.dtype for value in after.model.graph.inputs}
    given = {name: ir.DataType.from_numpy(feeds[name].dtype) for name in declared}
    if lies := [f"{n} is {given[n].name} instead of {declared[n]!r}" for n in given if given[n] != declared[n]]:
        # What PyTorch computes has another dtype than its fake tensor, as of a custom operator.
        search.found("PyTorch", search.result.value, graph.entry.rescued.get(region.index, "; ".join(lies)))
        return search.result
    optimized = _ran(search, after, feeds, settings)
    if not isinstance(optimized, RanModel):
        return optimized
    plain = search.runner.run(parts.exposed(), feeds, PLAIN)
    if plain.kind != "ran":
        return bisect_failure(search, parts, feeds, PLAIN, plain)
    ran, node = RanModel(parts, {**feeds, **plain.outputs}, settings, search), NodeResults.read(graph, region)
    return (
        wrong_node(search, ran, node, wide=True)
        or wrong_kernel(search, ran, node)
        or wrong_node(search, ran, node, wide=False)
        or wrong_pass(search, ran, optimized)
        or wrong_optimizer(search, optimized)
        or _not_reproduced(search, region, optimized.outputs)
    )


def _not_reproduced(search: BisectionSearch, region: DumpedRegion, outputs: Feeds) -> Bisection:
    """The result if the fault does not show when the dumped model runs again."""
    result, recorded = search.result, region.recorded("output")
    differing = [n for n in recorded if n in outputs and difference(recorded[n], outputs[n]).is_wrong]
    search.tried("the model with the settings of the run, in a fresh process", RIGHT, next(iter(differing), ""))
    if differing:
        cause = "the run returned other values than the same model with the same inputs in a fresh process"
        why = "its session had other constants (a stale weight), or is not deterministic"
        advice = f"{why}: dynamo-backends {_AGAIN.format(result.graph)}"
    else:
        unknown = [trial.outcome for trial in result.trials if trial.outcome.startswith("unknown")]
        what = unknown[-1] if unknown else "the fault does not show when the dumped models run again"
        cause, advice = what.removeprefix("unknown: "), f"python {region.folder / 'repro.py'}"
    search.found("unknown", result.value, cause, advice)
    return result


def _by_command(search: BisectionSearch, region: DumpedRegion, command: str) -> Bisection:
    """Bisects the model that ran with the user's command."""
    path = region.optimized_model
    feeds = region.recorded("input") if (region.folder / DATA_SET).is_dir() else None
    return _check_parts(search, Parts(load_ir(path)), path, feeds, region_settings(region), command)


def _check_parts(
    search: BisectionSearch, parts: Parts, path: Path, feeds: Feeds | None, settings: Settings, command: str
) -> Bisection:
    """Bisects a model with the user's command."""
    result, known = search.result, None
    if feeds is not None and (values := search.plain(parts.exposed(), feeds)) is not None:
        known = {**feeds, **values}
    check, every = Command(parts, known, command), range(len(parts.nodes))
    if not check(every):
        result.advice.append("the check succeeds on the whole model: there is nothing to bisect")
        search.tried(f"--check on {path.name}", RIGHT)
        return result
    search.tried(f"--check on {path.name}", WRONG)
    if check.fails(*_trivial()):
        raise DumpError("--check also fails on a model with a single Identity: it always fails")
    kept = search.reduce(every, check)
    model = parts.cut(kept, known)
    assert model is not None
    search.found("check", str(model.graph.outputs[0].name), command)
    result.source = line_of(parts.nodes[i] for i in kept)
    inputs, expected = known_of(model.graph.inputs, known), known_of(model.graph.outputs, known)
    piece = CutModel(model, settings, inputs, expected, "check", f"The check fails: {command}")
    return search.finish(piece, len(parts.nodes), confirm=lambda: check(kept))


def _providers(run: DumpedRun) -> Settings:
    """Settings with the providers that the run was given.

    Raises ``DumpError`` if one has options that a dump may not set, see ``check_provider_options``.
    """
    given = run.manifest.options.get("providers") or ["CPUExecutionProvider"]
    form = list[str | tuple[str, dict[str, object]]]
    pairs = [(item, {}) if isinstance(item, str) else item for item in checked(run.path, given, form, "providers")]
    names = tuple(name for name, _ in pairs)
    options = tuple({key: str(value) for key, value in given.items()} for _, given in pairs)
    check_provider_options(names, options)
    return Settings(names, options)


def _with_constants(parts: Parts, feeds: Feeds) -> ir.Model:
    """The whole model, with its weights as constants as in the run."""
    model = parts.cut(range(len(parts.nodes)), feeds, constants=parts.weights)
    if model is None or [v.name for v in model.graph.outputs] != [v.name for v in parts.model.graph.outputs]:
        return parts.model
    return model


def _trivial() -> tuple[ir.Model, Feeds]:
    """A model with one ``Identity``, and its values."""
    text = '<ir_version: 10, opset_import: ["": 18]> trivial (float[1] x) => (float[1] y) { y = Identity(x) }'
    one = np.ones(1, np.float32)
    return ir.from_onnx_text(text), {"x": one, "y": one}
