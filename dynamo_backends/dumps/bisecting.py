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

import dataclasses
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from .candidates import PLAIN, Feeds, Outcome, Runner
from .closeness import allowed_error, rounded
from .cut_folder import Fresh, Piece, run_repro, write_piece
from .cutting import Parts, feeds_of
from .exact import exact_outputs
from .failing import Command, Diverges, EndsAs, Memory, essence, is_same_end
from .optimizers import OPTIMIZERS
from .reading import DumpedGraph, DumpedRegion, DumpError, Run, read_tensor
from .reducing import smallest
from .repro import error_of, plain

MEMORY = "bisection.txt"
"""The file of answers beside what was cut out."""

_IN_PYTORCH = ("pass pre_grad.", "pass joint.", "pass post_grad.", "decomposition of ", "stage ")
"""How the causes begin that lie before the translation."""

_UNSTABLE = ("not deterministic", "depends on the number of threads")

_LEVELS = ("ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_ALL")

_RIGHT, _WRONG = "right", "wrong"

_FEW_NODES = 64
"""Nodes whose kernels are all looked at where the verdict names none."""

_NOTHING = (np.zeros(0, np.float32), 1)
"""In the place of a right output that nobody knows."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """What came of switching something off.

    Attributes:
        what: what ran, or was looked at.
        outcome: ``right``, ``wrong``, ``refused``, ``failed``, ``crashed``, or why it could not be told.
        value: the value that is wrong.
        error: its largest error; infinite where it is NaN or of another shape.
    """

    what: str
    outcome: str
    value: str = ""
    error: float | None = None


@dataclasses.dataclass(frozen=True)
class Cut:
    """The smallest model that was found.

    Attributes:
        folder: where it is.
        operators: of its nodes, in order.
        of: how many nodes the region's model has.
        confirmed: whether ``repro.py`` fails in the same way in a fresh process; else it counts for nothing.
        said: what it printed there.
    """

    folder: Path
    operators: Sequence[str]
    of: int
    confirmed: bool
    said: str


@dataclasses.dataclass
class Bisection:
    """What a bisection found.

    Attributes:
        graph: ``graph_000/forward``.
        verdict: of the run, ``None`` where none was compared.
        place: ``decomposition``, ``FX pass``, ``stage`` (what PyTorch makes between them), ``PyTorch`` (the node ran
            there), ``forward`` (this graph is right), ``translation``, ``kernel``, ``ONNX pass``,
            ``ONNX Runtime optimizer``, ``session`` (it cannot be made), ``run`` (it ends without a result), ``check``
            (the user's command fails), ``nothing``, ``unknown``.
        cause: the pass, the optimizer, the operator, or what was said.
        value: the first value that is wrong.
        source: the user's line.
        trials: what was switched off, in order.
        cut: what was cut out.
        advice: what to do next.
        sessions: how many were made.
        resumed: how many answers came from an earlier bisection that was stopped.
        others: the verdicts of the other graphs that were meant: ``0`` is a forward and a backward.
    """

    graph: str
    verdict: str | None
    place: str = "nothing"
    cause: str = ""
    value: str = ""
    source: str = ""
    trials: list[Trial] = dataclasses.field(default_factory=list)
    cut: Cut | None = None
    advice: list[str] = dataclasses.field(default_factory=list)
    sessions: int = 0
    resumed: int = 0
    others: dict[str, str | None] = dataclasses.field(default_factory=dict)


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
        run: the run.
        reference: which graph, or region.
        output: where the cut goes; by default ``bisect`` in the graph's folder.
        check: a command of the user's that decides what fails, instead of the comparison.
        refused: whether a model that ONNX Runtime refused is looked at, also where there is another fault.
        progress: is told what is done, now and then.

    Raises:
        DumpError: there is no such graph, the dump lacks what is needed, or the command cannot be used.
    """
    graphs = run.graphs_of(reference)
    graph = next((item for item in graphs if item.verdict not in (None, "ok")), None)
    if graph is None:
        graph = next((item for item in graphs if _refused_models(item)), graphs[0])
    folder = output or graph.folder / "bisect"
    with Runner() as runner:
        work = _Bisecting(run, graph, folder, runner, progress)
        if check is not None:
            found = work.by_command(run.regions_of(reference)[0][1], check)
        elif refused or (graph.verdict in (None, "ok") and _refused_models(graph)):
            found = work.refused()
        else:
            found = work.of_verdict()
    found.sessions = runner.count
    found.others = {item.reference: item.verdict for item in graphs if item is not graph}
    return found


class _Bisecting:
    def __init__(
        self, run: Run, graph: DumpedGraph, folder: Path, runner: Runner, progress: Callable[[str], None]
    ) -> None:
        self._run = run
        self._graph = graph
        self._folder = folder
        self._runner = runner
        self._progress = progress
        self._found = Bisection(graph.reference, graph.verdict)

    # What the dump says

    def of_verdict(self) -> Bisection:
        """Bisects what the verdict of the run names."""
        found, entry = self._found, self._graph.entry
        if found.verdict is None or found.verdict == "ok":
            found.advice.append("nothing diverges here; --check COMMAND bisects by a check of your own")
            return found
        blame = entry.get("blame") or {}
        found.value, found.cause = str(blame.get("value") or ""), str(blame.get("cause") or "")
        found.source = str(blame.get("source") or "")
        if found.cause.startswith(_IN_PYTORCH):
            return self._in_pytorch()
        forward = self._forward()
        if not blame and forward is not None:
            found.place, found.cause = "forward", f"its forward {forward.verdict}"
            found.advice.append(f"dynamo-backends bisect {forward.reference}")
            return found
        if entry["status"] == "compared":
            found.trials.append(Trial("decompositions and FX passes, compared in PyTorch when the model ran", _RIGHT))
        if found.cause in _UNSTABLE:
            found.place = "kernel"
            found.advice.append(f"dynamo-backends determinism {found.graph}")
            return found
        regions = self._graph.regions
        wanted = blame.get("region")
        if blame and wanted is None:
            found.place = "PyTorch"
            found.advice.append("the node ran in PyTorch: there is no ONNX model of it to cut")
            return found
        if not regions:
            raise DumpError(f"nothing of {found.graph} ran on ONNX Runtime")
        region = next((item for item in regions if item.index == wanted), regions[0])
        return self._in_region(region)

    def _forward(self) -> DumpedGraph | None:
        """The forward of a backward graph, if it diverges."""
        if self._graph.direction != "backward":
            return None
        forwards = (
            graph for graph in self._run.graphs if (graph.index, graph.direction) == (self._graph.index, "forward")
        )
        return next((graph for graph in forwards if graph.verdict not in (None, "ok")), None)

    def _in_pytorch(self) -> Bisection:
        """A fault before the translation: the run compared the stages in PyTorch, which is needed to cut them."""
        found = self._found
        kind, _, name = found.cause.partition(" ")
        found.trials.append(Trial(found.cause, _WRONG, found.value))
        if kind == "pass":
            found.place = "FX pass"
            found.advice.append(
                f"to confirm, run again with options={{'passes': {{'disable': [{name!r}]}}}}; "
                f"dynamo-backends passes {self._run.folder} --why {name}"
            )
        elif kind == "decomposition":
            found.place = "decomposition"
            found.advice.append(f"to confirm, compare the decomposition with the operator: {name.removeprefix('of ')}")
        else:
            found.place = "stage"
            found.advice.append("no pass of ours did it: run again with backend='aot_eager', which has none of them")
        return found

    # A region that diverges

    def _in_region(self, region: DumpedRegion) -> Bisection:
        settings = settings_of(self._run, region)
        feeds = feeds_of(region.recorded("input"))
        parts = Parts(_load(region.model))
        after = Parts(_load(region.optimized_model), region.entry.get("constants"))
        self._progress(f"{len(parts.nodes)} nodes, {len(after.nodes)} after our passes")
        missing = {str(value.name) for value in after.model.graph.inputs} - feeds.keys()
        if missing:
            raise DumpError(f"the inputs {', '.join(sorted(missing))} of {region.optimized_model} were not recorded")
        ran = self._runner.run(_with_constants(after, feeds), feeds, settings)
        if ran.kind != "ran":
            return self._ends(after, feeds, settings, ran)
        plain_run = self._values(parts, feeds)
        if plain_run.kind != "ran":
            return self._ends(parts, feeds, PLAIN, plain_run)
        known = {**feeds, **plain_run.outputs, **_constants(parts)}
        for look in (self._translation, self._kernels):
            piece = look(region, parts, known, settings)
            if piece is not None:
                return self._finish(piece, len(parts.nodes))
        plain_after = self._values(after, feeds)
        if plain_after.kind != "ran":
            return self._ends(after, feeds, PLAIN, plain_after)
        known_after = {**feeds, **plain_after.outputs, **_constants(after)}
        piece = self._passes(parts, known, after, known_after, settings)
        if piece is not None:
            return self._finish(piece, len(after.nodes))
        return self._optimizers(region, after, known_after, settings, ran)

    def _values(self, parts: Parts, feeds: Feeds) -> Outcome:
        """All tensors of a model, nothing optimized."""
        return self._runner.run(parts.exposed(parts.tensors()), feeds, PLAIN)

    def _translation(
        self, region: DumpedRegion, parts: Parts, known: Feeds, settings: Mapping[str, Any]
    ) -> Piece | None:
        """The node that the verdict names, if its ONNX nodes in float64 are not what PyTorch computes in float64."""
        found = self._found
        reference = _Culprit.read(region)
        what = "the translation: its ONNX nodes in float64, against PyTorch's float64"
        if reference is None:
            if not found.cause:
                found.trials.append(Trial(what, "not told: the dump has no PyTorch result of a node"))
            else:
                found.trials.append(Trial("the translation, compared in PyTorch when the model ran", _RIGHT))
            return None
        known = {**known, **reference.inputs}
        names = [name for name in reference.exact if name in known]
        model, kept = _node_model(parts, names, reference.inputs, known)
        feeds = {str(value.name): known[str(value.name)] for value in model.graph.inputs}
        exact = exact_outputs(model, feeds, self._runner)
        if exact is None:
            found.trials.append(Trial(what, "not told: nothing computes its ONNX nodes in float64"))
            return None
        for name in names:
            right, (eager, number) = reference.exact[name], reference.eager[name]
            its_error, _, scale = error_of(plain(eager, number), right)
            is_comparable = exact[name].shape == right.shape and known[name][1] == number
            error, nonfinite, _ = error_of(exact[name], right) if is_comparable else (float("inf"), 1, 0.0)
            if nonfinite and is_comparable and _only_overflows(exact[name], eager, number):
                nonfinite = 0
            if not nonfinite and error <= allowed_error(number, scale, its_error):
                continue
            found.trials.append(Trial(what, _WRONG, name, float("inf") if nonfinite else error))
            found.place, found.value = "translation", name
            found.cause = next(
                (self._operator_of(parts, i) for i in kept if self._operator_of(parts, i)), "a folded constant"
            )
            found.advice.append(
                "the ONNX model is not what PyTorch computes, whatever runs it; report it to dynamo-backends "
                "with the folder"
            )
            return Piece(
                model,
                self._showing(model, feeds, {name: (rounded(right, number), number)}, settings),
                feeds,
                {name: (rounded(right, number), number)},
                {name: allowed_error(number, scale, its_error)},
                "differs",
                f"The translation of {found.cause} ({name}): ONNX Runtime's result is not PyTorch's, which is in "
                "test_data_set_0.",
            )
        found.trials.append(Trial(what, _RIGHT))
        return None

    def _operator_of(self, parts: Parts, i: int) -> str:
        return parts.nodes[i].metadata_props.get("aten_op", "")

    def _showing(self, model: ir.Model, feeds: Feeds, right: Feeds, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        """The settings of the run, or where these do not show the fault those that optimize nothing."""
        outcome = self._runner.run(model, feeds, settings)
        if outcome.kind != "ran":
            return PLAIN
        for name, (array, number) in right.items():
            got, its_number = outcome.outputs[name]
            if its_number == number and got.shape == array.shape:
                error, nonfinite, scale = error_of(plain(got, number), plain(array, number))
                if not nonfinite and error <= allowed_error(number, scale):
                    return PLAIN
        return settings

    def _kernels(self, region: DumpedRegion, parts: Parts, known: Feeds, settings: Mapping[str, Any]) -> Piece | None:
        """The first node that ONNX Runtime computes wrong by itself, of those of the FX node that the verdict names."""
        found = self._found
        what = "the kernels: each node alone, nothing optimized, against float64"
        if found.cause:
            found.trials.append(Trial("the kernels, compared in PyTorch when the model ran", _RIGHT))
            return None
        reference = _Culprit.read(region)
        if reference is not None:
            kept = parts.before([name for name in reference.exact if name in known], reference.inputs)
        else:
            node = found.value.split("__")[0]
            kept = [i for i, item in enumerate(parts.nodes) if item.metadata_props.get("fx_node") == node]
        if not found.value and len(parts.nodes) <= _FEW_NODES:
            kept = list(range(len(parts.nodes)))
        if not kept:
            found.trials.append(Trial(what, "not told: the verdict names no node of this model"))
            return None
        untold = []
        for i in kept:
            model = parts.cut([i], known)
            if model is None:
                continue
            feeds = {str(value.name): known[str(value.name)] for value in model.graph.inputs}
            exact = exact_outputs(model, feeds, self._runner)
            if exact is None:
                untold.append(parts.nodes[i].op_type)
                continue
            outcome = self._runner.run(model, feeds, PLAIN)
            for name, (array, number) in outcome.outputs.items():
                error, nonfinite, scale = error_of(plain(array, number), _as_type(exact[name], number))
                if not nonfinite and error <= allowed_error(number, scale):
                    continue
                found.trials.append(Trial(what, _WRONG, name, float("inf") if nonfinite else error))
                found.place, found.value = "kernel", name
                found.cause = parts.nodes[i].op_type
                found.advice.append("a kernel of ONNX Runtime is wrong: report it to onnxruntime with the folder")
                right = {name: (rounded(exact[name], number), number)}
                return Piece(
                    model,
                    self._showing(model, feeds, right, settings),
                    feeds,
                    right,
                    {name: allowed_error(number, scale)},
                    "differs",
                    f"ONNX Runtime's kernel of {found.cause} computes something else than ONNX says; the right result "
                    "is in test_data_set_0.",
                )
        outcome_text = f"not told: nothing computes {', '.join(sorted(set(untold)))} in float64" if untold else _RIGHT
        found.trials.append(Trial(what, outcome_text))
        return None

    def _passes(
        self, before: Parts, known: Feeds, after: Parts, known_after: Feeds, settings: Mapping[str, Any]
    ) -> Piece | None:
        """The part of the model after our passes that is not what it was before, between values that both have."""
        found = self._found
        what = "our ONNX passes: model.optimized.onnx against model.onnx, ONNX Runtime's optimizers off in both"
        both = [name for name in after.tensors() if name in known and name in before.by_name]
        suspicious = {name for name in both if _differ(known_after[name], known[name])}
        right = {name for name in both if name not in suspicious}
        for name in both:
            if name not in suspicious:
                continue
            old, new = before.cut(before.before([name], right), known, outputs=[name]), after.before([name], right)
            model = after.cut(new, {**known_after, **{n: known[n] for n in right}}, outputs=[name])
            if old is None or model is None:
                continue
            feeds = {str(value.name): known[str(value.name)] for value in old.graph.inputs}
            exact = exact_outputs(old, feeds, self._runner)
            array, number = known[name]
            reference, target = 0.0, plain(array, number)
            if exact is not None and exact[name].dtype.kind == "f" and np.isfinite(exact[name]).all():
                reference, _, _ = error_of(target, exact[name])
                target = exact[name]
            if not _is_wrong(known_after[name], target, number, reference):
                continue
            error, nonfinite, scale = _error(known_after[name], target)
            found.trials.append(Trial(what, _WRONG, name, float("inf") if nonfinite else error))
            found.place, found.value = "ONNX pass", name
            found.cause = found.cause if found.cause.startswith("pass ") else "the passes of the stage onnx"
            disabled = found.cause.removeprefix("pass ") if found.cause.startswith("pass ") else "onnx.*"
            found.advice.append(
                f"to confirm, run again with options={{'passes': {{'disable': [{disabled!r}]}}}}; "
                "before.onnx in the folder is what the pass was given"
            )
            self._before = old
            inputs = {str(v.name): known.get(str(v.name), known_after[str(v.name)]) for v in model.graph.inputs}
            return Piece(
                model,
                self._showing(model, inputs, {name: (array, number)}, settings),
                inputs,
                {name: (array, number)},
                {name: allowed_error(number, scale, reference)},
                "differs",
                f"{found.cause}: model.onnx is what it made of before.onnx, whose result is in test_data_set_0.",
            )
        found.trials.append(Trial(what, _RIGHT))
        return None

    def _optimizers(
        self, region: DumpedRegion, parts: Parts, known: Feeds, settings: Mapping[str, Any], ran: Outcome
    ) -> Bisection:
        """The smallest part that ONNX Runtime's optimizers make wrong."""
        found = self._found
        check = Diverges(parts, known, settings, self._runner)
        every = range(len(parts.nodes))
        start: Sequence[int] | None = None
        for candidate in self._starts(parts, found.value, every):
            if check(candidate):
                start = candidate
                break
        if start is None:
            return self._vanished(region, ran)
        for level in _LEVELS:
            wrong = Diverges(parts, known, {**settings, "graph_optimization_level": level}, self._runner).wrong(start)
            name = max(wrong, key=lambda name: wrong[name], default="")
            text = f"ONNX Runtime's optimizers, {level.removeprefix('ORT_ENABLE_').lower()}"
            found.trials.append(Trial(text, _WRONG if wrong else _RIGHT, name, wrong.get(name)))
        memory = self._memory(region.optimized_model, "diverges", settings)
        kept = self._reduce(memory, start, check)
        outputs = list(check.wrong(kept))
        outputs = smallest(outputs, lambda names: bool(check.wrong(kept, names))) if len(outputs) > 1 else outputs
        constants = not check.wrong(kept, outputs, constants=False)
        wrong = check.wrong(kept, outputs, constants=not constants) or check.wrong(kept, outputs)
        model = parts.cut(kept, known, outputs=outputs, constants=parts.weights if constants else ())
        if model is None or not wrong:
            return self._vanished(region, ran)
        found.place, found.value = "ONNX Runtime optimizer", outputs[0]
        found.cause = self._optimizer(parts, known, settings, kept, outputs)
        found.advice.append("ONNX Runtime's optimizers change the result: report it to onnxruntime with the folder")
        feeds = {str(value.name): known[str(value.name)] for value in model.graph.inputs}
        exact = exact_outputs(model, feeds, self._runner) or {}
        right, allowed = {}, {}
        for name in outputs:
            array, number = known[name]
            target = plain(array, number)
            reference = 0.0
            if name in exact and exact[name].dtype.kind == "f" and np.isfinite(exact[name]).all():
                reference, _, _ = error_of(target, exact[name])
            right[name] = (array, number)
            allowed[name] = allowed_error(number, error_of(target, target)[2], reference)
        text = f"{found.cause} of ONNX Runtime changes the result; the right one, nothing optimized, is in "
        return self._finish(
            Piece(model, settings, feeds, right, allowed, "differs", text + "test_data_set_0."), len(parts.nodes)
        )

    def _starts(self, parts: Parts, value: str, every: Sequence[int]) -> Sequence[Sequence[int]]:
        """What is tried to begin with: all; what the value is made of; its neighbours, more and more of them."""
        found: list[Sequence[int]] = [every]
        if value in parts.by_name:
            found.append(parts.before([value]))
            at, reach = parts.by_name[value], 2
            while reach < len(parts.nodes):
                found.append(range(max(0, at - reach), min(len(parts.nodes), at + reach)))
                reach *= 4
        return found

    def _reduce(self, memory: Memory, start: Sequence[int], check: Callable[[Sequence[int]], bool]) -> list[int]:
        """Delta debugging, with the answers kept."""
        self._found.resumed = memory.resumed
        best = len(start)

        def fails(kept: Sequence[int]) -> bool:
            nonlocal best
            answer = memory.ask("fails", list(kept), lambda: check(kept))
            if answer and len(kept) < best:
                best = len(kept)
                self._progress(f"{best} nodes still fail ({self._runner.count} sessions)")
            return answer

        return smallest(list(start), fails)

    def _memory(self, model: Path, question: str, settings: Mapping[str, Any]) -> Memory:
        import hashlib

        digest = hashlib.sha256(model.read_bytes()).hexdigest()
        return Memory(self._folder / MEMORY, [digest, question, sorted(settings.items()), onnx.__version__])

    def _optimizer(
        self, parts: Parts, known: Feeds, settings: Mapping[str, Any], kept: Sequence[int], outputs: Collection[str]
    ) -> str:
        """``optimizer NAME``, or where no single one is to blame ``ONNX Runtime's optimizers``."""

        def is_right(disabled: Sequence[str]) -> bool:
            names = [*settings.get("disabled_optimizers", ()), *disabled]
            check = Diverges(parts, known, {**settings, "disabled_optimizers": names}, self._runner)
            return not check(kept, outputs)

        suspects = list(OPTIMIZERS)
        if not is_right(suspects):
            return "no single optimizer"
        while len(suspects) > 1:
            half = suspects[: len(suspects) // 2]
            suspects = half if is_right(half) else suspects[len(half) :]
        return f"the optimizer {suspects[0]}" if is_right(suspects) else "no single optimizer"

    def _vanished(self, region: DumpedRegion, ran: Outcome) -> Bisection:
        """Nothing is wrong when the dumped model runs again."""
        found = self._found
        found.place = "unknown"
        recorded = feeds_of(region.recorded("output"))
        differing = [
            name for name, value in recorded.items() if name in ran.outputs and _differ(ran.outputs[name], value)
        ]
        found.trials.append(Trial("all as it ran, in a fresh process", _RIGHT))
        if differing:
            found.cause = "the run returned something else than the same model on the same inputs in a fresh process"
            found.trials[-1] = dataclasses.replace(found.trials[-1], value=differing[0])
            found.advice.append(
                f"its session held other constants (a stale weight), or does not give the same each time: "
                f"dynamo-backends determinism {found.graph}"
            )
        else:
            found.cause = "the fault does not show when the dumped models run again"
            found.advice.append(f"dynamo-backends replay {found.graph}")
        return found

    # What ends without a result

    def refused(self) -> Bisection:
        """Bisects a model of which ONNX Runtime made no session."""
        found = self._found
        models = _refused_models(self._graph)
        if not models:
            raise DumpError(f"no model of {found.graph} was refused: there is no {self._graph.folder / 'refused'}")
        settings = {"providers": _providers(self._run)[0], "provider_options": _providers(self._run)[1]}
        for path in models:
            outcome = self._runner.run(path, None, settings)
            if outcome.kind in ("refused", "crashed"):
                found.trials.append(Trial(f"a session of {path.name}, as it ran", outcome.kind))
                parts = Parts(_typed(_load(path)))
                plain_outcome = self._runner.run(path, None, {**settings, **PLAIN})
                found.trials.append(Trial("the same, ONNX Runtime's optimizers off", _ended(plain_outcome)))
                if is_same_end(plain_outcome, outcome):
                    settings = {**settings, **PLAIN}
                return self._ends(parts, None, settings, outcome, path)
            found.trials.append(Trial(f"a session of {path.name}", "made: it was refused by dynamo-backends itself"))
        found.place = "nothing"
        said = models[0].with_suffix(".txt")
        found.cause = said.read_text(encoding="utf-8").strip() if said.exists() else ""
        found.advice.append("ONNX Runtime takes the model; the kernel is known to be wrong, see docs/upstream.md")
        return found

    def _ends(
        self,
        parts: Parts,
        feeds: Feeds | None,
        settings: Mapping[str, Any],
        outcome: Outcome,
        path: Path | None = None,
    ) -> Bisection:
        """The smallest part that ends as the whole does."""
        found = self._found
        found.place = "session" if outcome.kind == "refused" else "run"
        found.cause = outcome.message
        if path is None:
            found.trials.append(Trial("all as it ran, in a fresh process", outcome.kind))
        known = None
        if feeds is not None and outcome.kind != "refused":
            known = self._known_before(parts, feeds, settings, outcome)
        check = EndsAs(parts, known, settings, self._runner, outcome)
        question = f"{outcome.kind} {essence(outcome.message)}"
        every = range(len(parts.nodes)) if known is None else self._runnable(parts, known)
        if not check(every):
            found.advice.append("no part of the model fails in this way; the whole does")
            return found
        memory = self._memory(path or self._graph.regions[0].optimized_model, question, settings)
        kept = self._reduce(memory, every, check)
        outputs = [str(value.name) for value in parts.outputs_of(kept)]
        if len(outputs) > 1:
            outputs = smallest(outputs, lambda names: check(kept, names))
        weights = parts.weights if known is not None else ()
        model = parts.cut(kept, known, outputs=outputs, constants=weights)
        assert model is not None
        found.value, found.source = outputs[0], _line(parts, kept)
        runs = known is not None and outcome.kind != "refused"
        inputs = {str(v.name): known[str(v.name)] for v in model.graph.inputs} if runs and known is not None else {}
        right = (
            {name: known.get(name, (np.zeros(0, "f4"), 1)) for name in outputs} if runs and known is not None else {}
        )
        found.advice.append("report it to onnxruntime with the folder")
        text = {"refused": "ONNX Runtime makes no session of it", "failed": "ONNX Runtime fails while it runs"}
        said = f"{text.get(outcome.kind, 'ONNX Runtime ends the process')}: {outcome.message}"
        return self._finish(Piece(model, settings, inputs, right, {}, outcome.kind, said), len(parts.nodes), outcome)

    def _known_before(self, parts: Parts, feeds: Feeds, settings: Mapping[str, Any], outcome: Outcome) -> Feeds:
        """The values that can be computed: all if nothing optimized ends well, else those before the node that does
        not, which halving finds."""
        whole = self._values(parts, feeds)
        if whole.kind == "ran":
            return {**feeds, **whole.outputs, **_constants(parts)}
        works, fails = 0, len(parts.nodes)  # the first `works` nodes run; the first `fails` do not
        values: Feeds = {}
        while fails - works > 1:
            middle = (works + fails) // 2
            self._progress(f"it ends between nodes {works} and {fails} ({self._runner.count} sessions)")
            model = parts.cut(range(middle), feeds)
            assert model is not None
            model.graph.outputs[:] = [value for node in model.graph for value in node.outputs if value.name]
            result = self._runner.run(model, feeds, PLAIN)
            if result.kind == "ran":
                works, values = middle, result.outputs
            else:
                fails = middle
        return {**feeds, **values, **_constants(parts)}

    def _runnable(self, parts: Parts, known: Feeds) -> Sequence[int]:
        """The nodes whose inputs are known: all but those behind the one that does not run."""
        return [i for i in range(len(parts.nodes)) if all(str(v.name) in known for v in parts.inputs_of([i]))]

    # A check of the user's own

    def by_command(self, region: DumpedRegion, command: str) -> Bisection:
        """Bisects the model that ran by a command that says what fails."""
        found = self._found
        parts = Parts(_load(region.optimized_model))
        known: Feeds | None = None
        if (region.folder / "test_data_set_0").is_dir():
            feeds = feeds_of(region.recorded("input"))
            values = self._values(parts, feeds)
            known = {**feeds, **values.outputs, **_constants(parts)} if values.kind == "ran" else None
        check = Command(parts, known, command)
        every = range(len(parts.nodes))
        if not check(every):
            found.advice.append("the check succeeds on the whole model: there is nothing to cut")
            found.trials.append(Trial(f"--check on {region.optimized_model.name}", _RIGHT))
            return found
        found.trials.append(Trial(f"--check on {region.optimized_model.name}", _WRONG))
        if check.fails(*_trivial()):
            raise DumpError("--check fails on a model of a single Identity, too: it does not tell models apart")
        memory = self._memory(region.optimized_model, command, {})
        kept = self._reduce(memory, every, check)
        model = parts.cut(kept, known)
        assert model is not None
        found.place, found.cause = "check", command
        inputs = {} if known is None else {str(v.name): known[str(v.name)] for v in model.graph.inputs}
        right = {} if known is None else {str(v.name): known[str(v.name)] for v in model.graph.outputs}
        found.value, found.source = str(model.graph.outputs[0].name), _line(parts, kept)
        text = f"The check fails on it: {command}"
        piece = Piece(model, settings_of(self._run, region), inputs, right, {}, "check", text)
        return self._finish(piece, len(parts.nodes), confirm=lambda: check(kept))

    # The result

    _before: ir.Model | None = None

    def _finish(
        self,
        piece: Piece,
        of: int,
        outcome: Outcome | None = None,
        *,
        confirm: Callable[[], bool] | None = None,
    ) -> Bisection:
        """Writes the folder, and runs its ``repro.py`` in a fresh process."""
        found = self._found
        versions = self._run.manifest.get("versions", {})
        shutil.rmtree(self._folder / "test_data_set_0", ignore_errors=True)
        write_piece(self._folder, piece, versions)
        if self._before is not None:
            (self._folder / "before.onnx").write_bytes(ir.to_proto(self._before).SerializeToString())
        self._progress("running repro.py in a fresh process")
        if confirm is not None:
            confirmed, said = confirm(), f"the check fails on {self._folder / 'model.onnx'}"
        else:
            fresh = run_repro(self._folder)
            confirmed, said = _confirms(fresh, piece, outcome), fresh.said
        operators = [node.op_type for node in piece.model.graph]
        found.cut = Cut(self._folder, operators, of, confirmed, said)
        if not found.source:
            found.source = next(
                (node.metadata_props["source"] for node in piece.model.graph if node.metadata_props.get("source")), ""
            )
        found.advice.append(f"python {self._folder / 'repro.py'}")
        return found


def _confirms(fresh: Fresh, piece: Piece, outcome: Outcome | None) -> bool:
    if fresh.ends != piece.ends:
        return False
    if outcome is None or fresh.ends not in ("refused", "failed"):
        return True
    said = fresh.said.removeprefix(f"{fresh.ends}: ")
    return essence(said) == essence(outcome.message)


@dataclasses.dataclass(frozen=True)
class _Culprit:
    """What PyTorch computed at the node that the verdict names: ``culprit/`` of a region."""

    inputs: Feeds
    eager: Feeds
    exact: dict[str, np.ndarray]

    @classmethod
    def read(cls, region: DumpedRegion) -> _Culprit | None:
        folder = region.folder / "culprit"
        if not folder.is_dir():
            return None
        found: dict[str, dict[str, np.ndarray]] = {}
        for kind in ("input", "eager", "exact"):
            found[kind] = {}
            for i in range(len(list(folder.glob(f"{kind}_*.*")))):
                path = folder / f"{kind}_{i}.pb"
                if not path.exists():
                    return None  # larger than the option tensor_limit
                name, array = read_tensor(path)
                found[kind][name] = array
        return cls(feeds_of(found["input"]), feeds_of(found["eager"]), found["exact"])


def settings_of(run: Run, region: DumpedRegion) -> dict[str, Any]:
    """The settings of a region's session, as ``repro.session_of`` takes them."""
    recorded = region.entry.get("session")
    if recorded:
        return {key: value for key, value in recorded.items() if value not in (None, [], {})}
    providers, options = _providers(run)
    return {"providers": providers, "provider_options": options}


def _providers(run: Run) -> tuple[list[str], list[dict[str, Any]]]:
    given = run.manifest.get("options", {}).get("providers") or ["CPUExecutionProvider"]
    names = [item if isinstance(item, str) else item[0] for item in given]
    return names, [{} if isinstance(item, str) else dict(item[1]) for item in given]


def _refused_models(graph: DumpedGraph) -> list[Path]:
    return sorted((graph.folder / "refused").glob("*.onnx"))


def _load(path: Path) -> ir.Model:
    """A model of a dump.

    Raises:
        DumpError: it is damaged.
    """
    from google.protobuf.message import DecodeError

    try:
        return ir.load(path)
    except (DecodeError, ValueError, OSError) as error:
        raise DumpError(f"{path} is damaged: {error}; dump again") from None


def _typed(model: ir.Model) -> ir.Model:
    """The model with the types that inference finds."""
    if all(value.type is not None for node in model.graph for value in node.outputs if value.name):
        return model
    return ir.from_proto(onnx.shape_inference.infer_shapes(ir.to_proto(model)))


def _with_constants(parts: Parts, feeds: Feeds) -> ir.Model:
    """The whole model, its weights constants as in the run."""
    model = parts.cut(range(len(parts.nodes)), feeds, constants=parts.weights)
    if model is None or [v.name for v in model.graph.outputs] != [v.name for v in parts.model.graph.outputs]:
        return parts.model
    return model


def _constants(parts: Parts) -> Feeds:
    found = {name: value.const_value for name, value in parts.model.graph.initializers.items()}
    return feeds_of({name: tensor.numpy() for name, tensor in found.items() if tensor is not None})


def _node_model(
    parts: Parts, names: Sequence[str], stop: Collection[str], known: Feeds
) -> tuple[ir.Model, Sequence[int]]:
    """The ONNX nodes of an FX node as a model; where its result was folded, an ``Identity`` of the constant."""
    kept = parts.before(names, stop)
    model = parts.cut(kept, known, outputs=names) if kept else None
    if model is not None:
        return model, kept
    values = []
    for name in names:
        array, number = known[name]
        raw = array.tobytes()
        values.append(onnx.TensorProto(data_type=number, dims=array.shape, name=f"{name}__folded", raw_data=raw))
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Identity", [f"{name}__folded"], [name]) for name in names],
        "folded",
        [],
        [onnx.helper.make_tensor_value_info(name, known[name][1], known[name][0].shape) for name in names],
        values,
    )
    opset = parts.model.graph.opset_imports.get("", 18)
    proto = onnx.helper.make_model(
        graph, opset_imports=[onnx.helper.make_opsetid("", opset)], ir_version=parts.model.ir_version
    )
    return ir.from_proto(proto), []


def _trivial() -> tuple[ir.Model, Feeds, Feeds]:
    """A model of one ``Identity``, with its data."""
    info = [onnx.helper.make_tensor_value_info(name, 1, [1]) for name in "xy"]
    graph = onnx.helper.make_graph([onnx.helper.make_node("Identity", ["x"], ["y"])], "trivial", info[:1], info[1:])
    proto = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=10)
    one = (np.ones(1, np.float32), 1)
    return ir.from_proto(proto), {"x": one}, {"y": one}


def _line(parts: Parts, kept: Sequence[int]) -> str:
    lines = (parts.nodes[i].metadata_props.get("source") for i in kept)
    return next((line for line in lines if line), "")


def _ended(outcome: Outcome) -> str:
    return "made" if outcome.kind == "built" else outcome.kind


def _error(value: tuple[np.ndarray, int], right: np.ndarray) -> tuple[float, int, float]:
    array, number = value
    return error_of(plain(array, number), right) if array.shape == right.shape else (float("inf"), 1, 0.0)


def _is_wrong(value: tuple[np.ndarray, int], right: np.ndarray, number: int, reference: float) -> bool:
    error, nonfinite, scale = _error(value, right)
    return value[1] != number or bool(nonfinite) or error > allowed_error(number, scale, reference)


def _differ(value: tuple[np.ndarray, int], known: tuple[np.ndarray, int]) -> bool:
    """Whether two values in the same dtype differ by more than rounding."""
    return _is_wrong(value, plain(*known), known[1], 0.0)


def _as_type(exact: np.ndarray, number: int) -> np.ndarray:
    """A float64 result rounded to a dtype and back: what is too large for it is infinite in both."""
    return plain(rounded(exact, number), number) if exact.dtype == np.float64 else exact


def _only_overflows(exact: np.ndarray, eager: np.ndarray, number: int) -> bool:
    """Whether float64's result, rounded to the dtype, has its infinities and NaN where eager's has."""
    ours, its = _as_type(exact, number), plain(eager, number)
    return bool((np.isfinite(ours) == np.isfinite(its)).all())
