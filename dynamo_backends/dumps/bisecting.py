"""Finds where the fault of a dumped graph lives, and cuts out the smallest model that still has it.

::

    found = bisect(find_run("onnx_debug"), "0/forward")
    found.place              # "translation", "kernel", "ONNX pass", "ONNX Runtime optimizer", ...
    found.cut.folder         # model.onnx, its inputs and right outputs, repro.py

Between the user's program and the numbers lie, in this order: decompositions and FX passes, which PyTorch runs; the
translation; our ONNX passes; ONNX Runtime's graph optimizers; its kernels. The first two were compared in PyTorch when
the model ran, and the dump says what came of it. The others are switched off here, one after the other:

- the translation of the node that the verdict names is computed in float64 (``exact``) and compared with what PyTorch
  computed there in float64 (``culprit/`` in the dump): no kernel has a part in that;
- a kernel is wrong if ONNX Runtime, nothing optimized, is not as near to float64 as its dtype allows;
- an ONNX pass is wrong if ``model.optimized.onnx`` does not give what ``model.onnx`` does, neither optimized further;
- what is left is ONNX Runtime's optimizers, or the kernels that only they bring.

Then delta debugging removes nodes, whose values are taken from the run, as long as the rest fails in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir

from .bisection import RIGHT, WRONG, Bisection, Search, line_of
from .blame import Kind
from .candidate_runs import Feeds, Outcome, Runner
from .cut_folder import Piece
from .failing_models import bisect_ending, bisect_refused, refused_models
from .fault_search import Culprit, RanModel, wrong_kernel, wrong_optimizer, wrong_pass, wrong_translation
from .fault_test import Command, fault_of
from .model_sessions import PLAIN, check_providers, region_settings
from .models import load_ir, load_model
from .reading import DATA_SET, DumpedGraph, DumpedRegion, DumpError, Run, checked
from .schema import Settings
from .submodels import Parts, inputs_of, outputs_of


def bisect(
    run: Run,
    reference: str,
    *,
    output: Path | None = None,
    check: str | None = None,
    refused: bool = False,
    progress: Callable[[str], None] = lambda text: None,
) -> Bisection:
    """Bisects a graph: the first of those that the reference names whose verdict is not ``ok``.

    Args:
        reference: which graph, or which of its regions. Of a graph, the region that the verdict names is bisected;
            where it names none, the one whose session failed.
        output: where the cut goes; by default ``bisect`` in the graph's folder.
        check: a command of the user's that decides what fails, instead of the comparison.
        refused: whether a model that ONNX Runtime refused is looked at, also where there is another fault.
        progress: is called with what is done, now and then.

    Raises:
        DumpError: there is no such graph or region, the dump lacks what is needed, or the command cannot be used.
    """
    graphs, region = run.graphs_of(reference), run.region_named(reference)
    if region is not None:
        graphs = [graph for graph, _ in run.regions_of(reference)]
    graph = next((item for item in graphs if item.verdict not in (None, "ok")), None)
    if graph is None:
        graph = next((item for item in graphs if refused_models(item)), graphs[0])
    folder = output or graph.folder / "bisect"
    with Runner() as runner:
        search = Search(run, graph, folder, runner, progress)
        if check is not None:
            found = _by_command(search, _region(search, region), check)
        elif refused or (graph.verdict in (None, "ok") and refused_models(graph)):
            found = bisect_refused(search, _providers(run))
        else:
            found = _by_verdict(search, region)
    found.sessions = runner.count
    found.others = {item.reference: item.verdict for item in graphs if item is not graph}
    return found


def _by_verdict(search: Search, region: int | None) -> Bisection:
    """Bisects what the verdict of the run names, or what the user does."""
    found, entry = search.found, search.graph.entry
    if found.verdict in (None, "ok"):
        for item in search.graph.regions:  # a file that is cut is no model that is right
            load_model(item.model), load_model(item.optimized_model)
        found.advice.append("nothing diverges here; --check COMMAND bisects by a check of your own")
        return found
    blamed = search.blamed
    found.cause = str(blamed)
    if entry.blame is not None:
        found.value, found.source = entry.blame.value, entry.blame.source
    if blamed.is_before_translation:
        return _in_pytorch(search)
    forward = _forward(search)
    if blamed.kind == Kind.RESULT and forward is not None:
        found.place, found.cause = "forward", f"its forward {forward.verdict}"
        found.advice.append(f"dynamo-backends bisect {forward.reference}")
        return found
    if entry.status == "compared":
        search.tried("decompositions and FX passes, compared in PyTorch when the model ran", RIGHT)
    if blamed.kind == Kind.UNSTABLE:
        found.place = "kernel"
        found.advice.append(f"dynamo-backends determinism {found.graph}")
        return found
    if blamed.kind == Kind.PYTORCH:
        found.place = "PyTorch"
        found.advice.append("the node ran in PyTorch: there is no ONNX model of it to cut")
        return found
    return _in_region(search, _region(search, region))


def _region(search: Search, named: int | None) -> DumpedRegion:
    """The region that the user names, the verdict blames, or whose session failed; else the first."""
    graph, entry = search.graph, search.graph.entry
    regions = {region.index: region for region in graph.regions}
    if not regions:
        raise DumpError(f"nothing of {graph.reference} ran on ONNX Runtime; {graph.folder / 'regions.txt'} says why")
    failed = (index for index in regions if index in entry.rescued)
    candidates = [named, _blamed_region(graph), *failed, *regions]
    return next(regions[index] for index in candidates if index in regions)


def _blamed_region(graph: DumpedGraph) -> int | None:
    """The region of the value that the verdict names; of one that PyTorch computed, the nearest before it."""
    blame = graph.entry.blame
    if blame is None or blame.region is not None or not (graph.folder / "side_by_side.json").exists():
        return blame.region if blame else None
    rows = {row.name: row for row in graph.rows()}
    names = [blame.value]
    for name in names:  # which grows
        row = rows.get(name)
        if row is not None and row.region is not None:
            return row.region
        names += [other for other in (row.inputs if row else ()) if other not in names]
    return None


def _forward(search: Search) -> DumpedGraph | None:
    """The forward of a backward graph, if it diverges."""
    graphs = (graph for graph in search.run.graphs if graph.index == search.graph.index)
    wrong = (graph for graph in graphs if graph.direction == "forward" and graph.verdict not in (None, "ok"))
    return next(wrong, None) if search.graph.direction == "backward" else None


def _in_pytorch(search: Search) -> Bisection:
    """A fault before the translation: the run compared the stages in PyTorch, which is needed to cut them."""
    found = search.found
    kind, name = search.blamed.kind, search.blamed.name
    search.tried(found.cause, WRONG, found.value)
    if kind == Kind.PASS:
        found.place = "FX pass"
        found.advice.append(f"to confirm, run again with options={{'passes': {{'disable': [{name!r}]}}}}")
        found.advice.append(f"dynamo-backends passes {search.run.folder} --why {name}")
    elif kind == Kind.DECOMPOSITION:
        found.place = "decomposition"
        found.advice.append(f"to confirm, compare the decomposition with the operator: {name}")
    else:
        found.place = "stage"
        found.advice.append("no pass of ours did it: run again with backend='aot_eager', which has none of them")
    return found


def _in_region(search: Search, region: DumpedRegion) -> Bisection:
    """A region that diverges: switches off what lies between its values and PyTorch's, one after the other."""
    settings, feeds = region_settings(region), region.recorded("input")
    parts = Parts(load_ir(region.model))
    after = Parts(load_ir(region.optimized_model), region.entry.constants)
    search.progress(f"{len(parts.nodes)} nodes, {len(after.nodes)} after our passes")
    missing = {str(value.name) for value in after.model.graph.inputs} - feeds.keys()
    if missing:
        raise DumpError(f"the inputs {', '.join(sorted(missing))} of {region.optimized_model} were not recorded")
    outcome = search.runner.run(_with_constants(after, feeds), feeds, settings)
    if outcome.kind != "ran":
        return bisect_ending(search, after, feeds, settings, outcome, region.optimized_model)
    plain = search.values(parts, feeds)
    if plain.kind != "ran":
        return bisect_ending(search, parts, feeds, PLAIN, plain, region.model)
    ran, culprit = RanModel(search, parts, {**feeds, **plain.outputs}, settings), Culprit.read(region)
    found = wrong_translation(ran, culprit) or wrong_kernel(ran, culprit)
    if found is not None:
        return found
    plain = search.values(after, feeds)
    if plain.kind != "ran":
        return bisect_ending(search, after, feeds, PLAIN, plain, region.optimized_model)
    optimized = RanModel(search, after, {**feeds, **plain.outputs}, settings)
    found = wrong_pass(ran, optimized) or wrong_optimizer(optimized, region.optimized_model)
    return found or _vanished(search, region, outcome)


def _vanished(search: Search, region: DumpedRegion, ran: Outcome) -> Bisection:
    """Nothing is wrong when the dumped model runs again."""
    found = search.found
    found.place = "unknown"
    recorded = region.recorded("output")
    outputs = ran.outputs
    differing = [name for name in recorded if name in outputs and fault_of(outputs[name], recorded[name]) is not None]
    search.tried("all as it ran, in a fresh process", RIGHT, next(iter(differing), ""))
    if differing:
        found.cause = "the run returned something else than the same model on the same inputs in a fresh process"
        why = "its session held other constants (a stale weight), or is not deterministic"
        found.advice.append(f"{why}: dynamo-backends determinism {found.graph}")
    else:
        found.cause = "the fault does not show when the dumped models run again"
        found.advice.append(f"dynamo-backends replay {found.graph}")
    return found


def _by_command(search: Search, region: DumpedRegion, command: str) -> Bisection:
    """Bisects the model that ran by a command of the user's that says what fails."""
    found, path = search.found, region.optimized_model
    parts = Parts(load_ir(path))
    known: Feeds | None = None
    if (region.folder / DATA_SET).is_dir():
        feeds = region.recorded("input")
        values = search.values(parts, feeds)
        known = {**feeds, **values.outputs} if values.kind == "ran" else None
    check = Command(parts, known, command)
    every = range(len(parts.nodes))
    if not check(every):
        found.advice.append("the check succeeds on the whole model: there is nothing to cut")
        search.tried(f"--check on {path.name}", RIGHT)
        return found
    search.tried(f"--check on {path.name}", WRONG)
    if check.fails(*_trivial()):
        raise DumpError("--check fails on a model of a single Identity, too: it does not tell models apart")
    kept = search.reduce(path, command, Settings(), every, check)
    model = parts.cut(kept, known)
    assert model is not None
    found.place, found.cause = "check", command
    found.value, found.source = str(model.graph.outputs[0].name), line_of([parts.nodes[i] for i in kept])
    text = f"The check fails on it: {command}"
    inputs, right = inputs_of(model, known), outputs_of(model, known)
    piece = Piece(model, region_settings(region), inputs, right, {}, "check", text)
    return search.finish(piece, len(parts.nodes), confirm=lambda: check(kept))


def _providers(run: Run) -> Settings:
    """Settings with the providers that the run was given.

    Raises:
        DumpError: one has options that a dump may not ask for, see ``check_providers``.
    """
    given = run.manifest.options.get("providers") or ["CPUExecutionProvider"]
    form = list[str | tuple[str, dict[str, object]]]
    pairs = [(item, {}) if isinstance(item, str) else item for item in checked(run.path, given, form, "providers")]
    names = tuple(name for name, _ in pairs)
    options = tuple({key: str(value) for key, value in given.items()} for _, given in pairs)
    check_providers(names, options)
    return Settings(names, options)


def _with_constants(parts: Parts, feeds: Feeds) -> ir.Model:
    """The whole model, its weights constants as in the run."""
    model = parts.cut(range(len(parts.nodes)), feeds, constants=parts.weights)
    if model is None or [v.name for v in model.graph.outputs] != [v.name for v in parts.model.graph.outputs]:
        return parts.model
    return model


def _trivial() -> tuple[ir.Model, Feeds, Feeds]:
    """A model of one ``Identity``, with its data."""
    text = '<ir_version: 10, opset_import: ["": 18]> trivial (float[1] x) => (float[1] y) { y = Identity(x) }'
    one = np.ones(1, np.float32)
    return ir.from_onnx_text(text), {"x": one}, {"y": one}
