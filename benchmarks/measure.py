"""Measures the passes on one model, in a process of its own.

``passes.py`` starts it, ``python -m benchmarks.measure MODEL SETTINGS RESULT``: a model's name, the settings as JSON,
and the file the result goes to, JSON too.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import gc
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import onnx_ir as ir
import torch
from torch import fx
from torch._dynamo import config as dynamo_config
from torch._dynamo.utils import counters
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from benchmarks.counting import count_attentions, count_operators
from benchmarks.exported import export
from benchmarks.models import MODELS
from dynamo_backends.bench import timing
from dynamo_backends.bench.steps import loss_of
from dynamo_backends.bench.timing import median_ratio, spread
from dynamo_backends.debug.optimized_models import save_optimized
from dynamo_backends.graphs.artifacts import GraphName, Runner
from dynamo_backends.options import parse_options
from dynamo_backends.partition.program import LoadedProgram
from dynamo_backends.pipeline.observer import Observer
from dynamo_backends.pipeline.pipeline import Pipeline
from dynamo_backends.pipeline.stage_data import CompiledGraph
from passes.engine.manager import Switches, all_passes
from passes.engine.results import PassResult

Json: TypeAlias = "dict[str, Any]"
Step: TypeAlias = Callable[[Callable[..., Any]], object]
"""Calls a model once, be it compiled or not."""

NO_PASSES = Switches(disable=("*",))
_VARIANTS_AT_ONCE = 7
"""Variants that are kept and timed together, besides ``_SAME``; each holds the weights once more."""

_SAME = ("default", "default again", "default once more", "default a fourth time")
"""Variants with all passes, compiled one by one: how much their times differ is what a compile adds by chance."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What is measured.

    Attributes:
        rounds: rounds of timing.
        pass_rounds: the same, of the variants without one pass.
        compiles: how often each variant is compiled, after the first.
        export: whether the export is measured.
        per_pass: whether the time that each pass gains is measured, in a call and in a training step.
        training: whether a training step is, of the models that have one.
        threads: threads of PyTorch and of each session; ``None``: PyTorch's own choice.
    """

    rounds: int = 21
    pass_rounds: int = 25
    compiles: int = 3
    export: bool = True
    per_pass: bool = True
    training: bool = True
    threads: int | None = None


class Recorder(Observer):
    """Keeps what one compile made."""

    def __init__(self) -> None:
        self.graphs: list[CompiledGraph] = []
        self._before_post_grad: list[PassResult] = []

    def passes(self, graph: GraphName, results: Sequence[PassResult]) -> None:
        self._before_post_grad.extend(results)

    def runner(self, graph: CompiledGraph, loaded: LoadedProgram) -> Runner:
        self.graphs.append(graph)
        return loaded.run

    @property
    def results(self) -> list[PassResult]:
        """What each pass did to each graph."""
        in_graphs = [result for graph in self.graphs for result in graph.passes]
        in_regions = [result for graph in self.graphs for region in graph.regions for result in region.passes]
        return [*self._before_post_grad, *in_graphs, *in_regions]

    @property
    def models(self) -> list[ir.Model]:
        """The ONNX models that run."""
        regions = [region for graph in self.graphs for region in graph.regions]
        return [region.optimized_model for region in regions if region.optimized_model is not None]


@dataclasses.dataclass(frozen=True)
class Variant:
    """A compiled model, what was recorded and counted while it was compiled, and how long its first call took."""

    call: Callable[..., Any]
    recorder: Recorder
    counts: Mapping[str, int]
    seconds: float

    @property
    def milliseconds_of_passes(self) -> float:
        return sum(result.milliseconds for result in self.recorder.results)

    @property
    def nodes(self) -> int:
        return sum(count_operators(self.recorder.models).values())


def compile_variant(model: torch.nn.Module, step: Step, switches: Switches) -> Variant:
    """Compiles a model with these passes, which its first step does."""
    recorder = Recorder()
    options = parse_options({"passes": switches, "placement": "onnx"})

    def backend(module: fx.GraphModule, inputs: Sequence[object]) -> Callable[..., object]:
        return Pipeline(options, recorder).compile_dynamo_graph(module, inputs)

    call = torch.compile(model, backend=backend)
    counters.clear()
    start = time.perf_counter()
    step(call)
    seconds = time.perf_counter() - start
    return Variant(call, recorder, dict(counters["dynamo_backends"]), seconds)


class AttentionCounter(TorchFunctionMode):
    """Counts the attentions that run eagerly: PyTorch's operator, and softmaxes over the scores of several heads."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        softmaxes = (torch.nn.functional.softmax, torch.softmax, torch.Tensor.softmax)
        if func is torch.nn.functional.scaled_dot_product_attention or (func in softmaxes and args[0].dim() >= 3):
            self.number += 1
        return func(*args, **(kwargs or {}))


class Measurement:
    """All that is measured of one model; ``run`` returns it as what JSON can hold."""

    def __init__(self, name: str, settings: Settings) -> None:
        self.settings = settings
        self.entry = MODELS[name]
        torch.manual_seed(0)
        self.model = self.entry.build().eval()
        self.inputs = self.entry.inputs()

    def run(self) -> Json:
        with dynamo_config.patch(recompile_limit=3 * _VARIANTS_AT_ONCE):  # each variant is an entry for the same code
            return self._run()

    def _run(self) -> Json:
        imported = _milliseconds_to_import_passes()
        _pay_what_is_due_once()
        result: Json = {"parameters": sum(item.numel() for item in self.model.parameters())}
        with torch.no_grad():
            result |= self._inference()
        result["compile"]["import_passes_milliseconds"] = imported
        if self.settings.training and self.entry.trains:
            result["training"] = self._training()
        return result

    def _inference(self) -> Json:
        with AttentionCounter() as counter:
            expected = self.model(**self.inputs)
        compile_times, ours, plain = self._compile(self._call)
        result: Json = {"attentions": counter.number, "compile": compile_times}
        functions: dict[str, Callable[[], object]] = {
            "eager": functools.partial(self.model, **self.inputs),
            "ours": functools.partial(ours.call, **self.inputs),
            "without_passes": functools.partial(plain.call, **self.inputs),
        }
        result["ours"], result["without_passes"] = _describe(ours), _describe(plain)
        if self.settings.export:
            result["export"], run = export(self.model, self.inputs)
            if run is not None:
                functions["export"] = run
        for name in functions.keys() - {"eager"}:
            result[name]["error"] = _relative_error(functions[name](), expected)
        result["latency"] = _latency(functions, self.settings.rounds)
        by_pass = _by_pass(ours.recorder.results)
        if self.settings.per_pass:
            functions.clear()
            del ours, plain
            result["noise"] = self._time_each_pass(by_pass, self._call)
        result["passes"] = by_pass
        return result

    def _call(self, function: Callable[..., Any]) -> object:
        return function(**self.inputs)

    def _step(self, function: Callable[..., Any]) -> None:
        """Forward and backward, without the optimizer's part."""
        self.model.zero_grad(set_to_none=True)
        loss_of(function(**self.inputs)).backward()

    def _training(self) -> Json:
        self.model.train()
        compile_times, ours, plain = self._compile(self._step)
        functions: dict[str, Callable[[], object]] = {
            "eager": functools.partial(self._step, self.model),
            "ours": functools.partial(self._step, ours.call),
            "without_passes": functools.partial(self._step, plain.call),
        }
        result: Json = {
            "compile": compile_times,
            "ours": _describe(ours),
            "without_passes": _describe(plain),
            "passes": _by_pass(ours.recorder.results),
            "latency": _latency(functions, self.settings.rounds),
        }
        if self.settings.per_pass:
            functions.clear()
            del ours, plain
            result["noise"] = self._time_each_pass(result["passes"], self._step)
        return result

    def _compile(self, step: Step) -> tuple[Json, Variant, Variant]:
        """Compiles with and without passes in turn; returns the times, and one of each to run.

        The times are those of a first call, which runs once too. The very first compile, with passes, stands apart: it
        also pays for what passes do once in a process.
        """
        first = compile_variant(self.model, step, Switches())
        times: dict[str, list[float]] = collections.defaultdict(list)
        for _ in range(self.settings.compiles):
            _forget_compiled()
            plain = compile_variant(self.model, step, NO_PASSES)
            _forget_compiled()
            ours = compile_variant(self.model, step, Switches())
            times["without_passes_seconds"].append(plain.seconds)
            times["seconds"].append(ours.seconds)
            times["passes_milliseconds"].append(ours.milliseconds_of_passes)
            times["share_of_passes"].append(ours.milliseconds_of_passes / 1e3 / ours.seconds)
        result = {name: statistics.median(values) for name, values in times.items()}
        result["first_seconds"] = first.seconds
        result["first_passes_milliseconds"] = first.milliseconds_of_passes
        return result, ours, compile_variant(self.model, step, NO_PASSES)  # the one before was forgotten

    def _time_each_pass(self, by_pass: dict[str, Json], step: Step) -> Json:
        """Adds to ``by_pass`` what each pass gains in a step; returns what a pass that does nothing would seem to gain.

        For a pass that is on and fired, all but this one are compared with all; for one that is off by default, the
        default with the default and this one. Both ways, positive is what the pass is good for. A standard error is
        that of the rounds and that of the compile: equal variants, compiled one by one, differ by more than the rounds
        of one of them tell.
        """
        toggles = {
            item.name: Switches(disable=(item.name,))
            for item in all_passes()
            if item.default and by_pass.get(item.name, {}).get("fired")
        }
        toggles |= {name: Switches(enable=(name,)) for name in self._fire_if_enabled(step)}
        noise: Json = {}
        names = list(toggles)
        for start in range(0, max(len(names), 1), _VARIANTS_AT_ONCE):
            _forget_compiled()
            batch = names[start : start + _VARIANTS_AT_ONCE]
            in_order = [*_SAME[:2], *batch, *_SAME[2:]]  # what is compiled later in a process is faster by a hundredth
            compiled = {name: compile_variant(self.model, step, toggles.get(name, Switches())) for name in in_order}
            default, variants = compiled["default"], {name: compiled[name] for name in batch}
            functions = {name: functools.partial(step, variant.call) for name, variant in compiled.items()}
            rounds = milliseconds_by_round(functions, self.settings.pass_rounds)
            between = statistics.stdev(statistics.median(rounds[name]) for name in _SAME)
            reference = [statistics.mean(values) for values in zip(*(rounds[name] for name in _SAME), strict=True)]
            if not noise:
                noise = _gained(rounds[_SAME[-1]], reference, between)
            for name, variant in variants.items():
                if toggles[name].disable:
                    saved = variant.nodes - default.nodes
                    gained = _gained(rounds[name], reference, between)
                else:
                    by_pass[name] = _by_pass(variant.recorder.results)[name]
                    saved = default.nodes - variant.nodes
                    gained = _gained(reference, rounds[name], between)
                by_pass[name] |= {"saved_nodes": saved, **gained}
        return noise

    def _fire_if_enabled(self, step: Step) -> list[str]:
        """The passes that are off by default and have something to do in a step of this model."""
        off = tuple(item.name for item in all_passes() if not item.default)
        if not off:
            return []
        _forget_compiled()
        found = _by_pass(compile_variant(self.model, step, Switches(enable=off)).recorder.results)
        return [name for name in off if name in found and found[name]["fired"]]


def _milliseconds_to_import_passes() -> float:
    start = time.perf_counter()
    all_passes()
    return (time.perf_counter() - start) * 1e3


def _pay_what_is_due_once() -> None:
    """Compiles another model without passes, for what PyTorch imports and builds at a process's first compile."""
    compile_variant(torch.nn.Linear(8, 8), lambda call: call(torch.ones(2, 8)).sum().backward(), NO_PASSES)
    _forget_compiled()


def _forget_compiled() -> None:
    torch._dynamo.reset()
    gc.collect()


def _describe(variant: Variant) -> Json:
    """The size of what a variant runs, and where it runs."""
    operators = count_operators(variant.recorder.models)
    on_onnx, in_pytorch = (variant.counts.get(name, 0) for name in ("nodes_on_onnx", "nodes_in_pytorch"))
    fallbacks = {name.split()[1]: number for name, number in variant.counts.items() if name.startswith("fallback ")}
    return {
        "graphs": variant.counts["graphs"],
        "regions": len(variant.recorder.models),
        "share_on_onnx": on_onnx / max(on_onnx + in_pytorch, 1),
        "in_pytorch": fallbacks,
        "nodes": sum(operators.values()),
        "session_nodes": _session_nodes(variant),
        "attentions": count_attentions(operators),
        "operators": dict(operators.most_common()),
    }


def _session_nodes(variant: Variant) -> int:
    """Nodes that are left after ONNX Runtime's own optimization."""
    models = []
    with tempfile.TemporaryDirectory() as folder:
        for graph in variant.recorder.graphs:
            for region in graph.regions:
                if region.bound is not None:
                    models.append(ir.load(save_optimized(region.bound, folder)))
        return sum(count_operators(models).values())


def _by_pass(results: Sequence[PassResult]) -> dict[str, Json]:
    """What each pass did to all graphs together."""
    found: dict[str, Json] = {}
    for item in results:
        entry = found.setdefault(item.name, {"fired": 0, "removed_nodes": 0, "compile_milliseconds": 0.0})
        entry["fired"] += item.fired
        entry["removed_nodes"] += item.nodes_before - item.nodes_after
        entry["compile_milliseconds"] += item.milliseconds
    return found


def _gained(without: Sequence[float], with_it: Sequence[float], between: float) -> Json:
    """The gain; ``between`` is the standard deviation between equal variants."""
    difference, error = median_difference(without, with_it)
    return {"gained_milliseconds": difference, "standard_error": math.hypot(error, between)}


def _latency(functions: Mapping[str, Callable[[], object]], rounds: int) -> Json:
    """Milliseconds and spread of each function, and how many times as fast as the others ``ours`` is."""
    found = milliseconds_by_round(functions, rounds)
    result: Json = {
        name: {"milliseconds": statistics.median(values), "spread": spread(values)} for name, values in found.items()
    }
    result["times_as_fast_as"] = {
        name: median_ratio(values, found["ours"]) for name, values in found.items() if name != "ours"
    }
    return result


def milliseconds_by_round(functions: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """How long one call of each function took in each round, in turns of another order each time."""
    found: dict[str, list[float]] = {name: [] for name in functions}
    order = list(functions)
    for i in range(rounds):
        random.Random(i).shuffle(order)  # what is first in a round is a hundredth slower
        for name in order:
            found[name].append(timing.milliseconds(functions[name]))
    return found


def median_difference(minuend: Sequence[float], subtrahend: Sequence[float]) -> tuple[float, float]:
    """The median of the difference in each round, and its standard error: from the interquartile range, which is 1.349
    deviations of a normal distribution."""
    differences = [a - b for a, b in zip(minuend, subtrahend, strict=True)]
    return statistics.median(differences), 1.2533 * spread(differences) / 1.349 / math.sqrt(len(differences))


def _relative_error(actual: object, expected: object) -> float:
    """The largest difference of a result from eager's, over eager's largest magnitude."""
    worst = 0.0
    for ours, eagers in zip(_tensors(actual), _tensors(expected), strict=True):
        if eagers.is_floating_point() and eagers.numel():
            scale = max(float(eagers.abs().max()), 1e-12)
            worst = max(worst, float((ours - eagers).abs().max()) / scale)
    return worst


def _tensors(structure: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(structure) if isinstance(leaf, torch.Tensor)]


def main() -> None:
    name, settings_text, path = sys.argv[1:]
    settings = Settings(**json.loads(settings_text))
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    result = Measurement(name, settings).run()
    result["threads"] = torch.get_num_threads()
    Path(path).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
