"""Runs more than a hundred architectures in every mode, and compares the results with eager's.

::

    python tests/models_sweep.py --processes 4                  # all of them
    python tests/models_sweep.py --only llama,bert --mode "inference;training"
    python tests/models_sweep.py --sample 1/10 --seed 7         # a random tenth of the cases
    python tests/models_sweep.py --out results.json --write-table   # and docs/models.md
    python tests/models_sweep.py --export                       # ONNX files instead, and torch.onnx.export's

A case is an architecture of ``architectures.py`` in a mode of ``MODES``. A result must be about as near to float64 as
eager's. If the compiled model raises, or has graph breaks or more than one graph, PyTorch's backend ``aot_eager`` runs
the same case: what fails or breaks there too is PyTorch's. With ``--export`` the models become ONNX files, and
``torch.onnx.export`` is what they are compared with. Each worker is a process; a case that crashes, or takes longer
than ``--limit`` seconds, is reported.

Exit code 1: a case is wrong, raises, crashes, hangs, or has more graph breaks or graphs than with ``aot_eager``.
"""

from __future__ import annotations

import argparse
import collections
import copy
import dataclasses
import functools
import json
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import onnxruntime
import torch
import transformers
from architectures import ARCHITECTURES, Architecture, Inputs
from torch import nn
from torch._dynamo.utils import counters
from torch.utils._pytree import tree_leaves, tree_map
from workers import Ended, judged
from zoo import scalar

import dynamo_backends
from dynamo_backends.bench import loading
from dynamo_backends.bench.exported import Exported, dynamic_shapes
from dynamo_backends.bench.loading import LoadedCase

RIGHT, WRONG, ERROR, BREAKS, PYTORCHS = "right", "wrong", "error", "breaks", "PyTorch's own"
FAULTS = (WRONG, ERROR, BREAKS)
TABLE = Path(__file__).parent.parent / "docs" / "models.md"
PAGE = """\
# Models

For users who ask whether a model works: whether whole models give eager's results, and how much of them runs on ONNX
Runtime. This page is written by

```sh
python tests/models_sweep.py --out results.json --write-table
```

which skips cases that are already in `results.json`. It builds {architectures} architectures (those of `transformers`,
and two UNets), tiny and with random weights, and uses each in these modes: inference; a training step with its loss,
all gradients and buffers, without dropout; two batches and lengths with `dynamic=True`; inference under autocast to
bfloat16; for decoders `generate` with a growing cache, with a static one, and with two beams. **{run} of the {cases}
cases were run** for this page ({versions}, CPU, one thread); the others are *not run* in the table.

- *right*: each tensor is as near to float64 as eager's: its largest error is at most 8 times eager's, plus 64 roundings
  of the largest value (4 in bfloat16, and for what autocast computes), or a rounding of the largest number among all
  gradients. Integers, such as generated tokens, are equal. {by_eager} cases were compared with eager itself, because
  the model does not run in float64, or generates other tokens there.
- *breaks*: more graph breaks or more graphs than under `aot_eager`; in the last column, the most graph breaks of a
  mode.
- *PyTorch's own*: eager or `aot_eager` fails too, or differs as much.
- *on ONNX*: the share of all nodes that run on ONNX Runtime (with `placement="onnx"`). Views, random numbers and sums
  at repeated indices run in PyTorch by design.

{summary}
## What is not right

{faults}

## What fails in PyTorch too

{theirs}

## What runs in PyTorch

The operators that run in PyTorch in the most architectures, with views.

| operator | architectures |
| --- | --- |
{fallbacks}

## Architectures

{table}"""

BATCH, LENGTH = 2, 12
OTHER_BATCH, OTHER_LENGTH = 3, 16
NEW_TOKENS = 4

MULTIPLE = 8
"""Of eager's own error, which in a small tensor may be small by chance."""

ROUNDINGS = {torch.float32: 64, torch.bfloat16: 4, torch.float16: 16, torch.float64: 64}
"""Two computations of these depths are this many roundings of the largest value apart. A bfloat16 result is rounded at
its end, and what leads to it is in eager's own error."""


class Different(Exception):
    """A result is not eager's; the message says which, its error and the tolerance."""


@dataclasses.dataclass(frozen=True)
class Report:
    """What became of a case: counts are of the compiled model, ``text`` says what is wrong. ``judge`` is ``float64``,
    or ``eager`` where the model does not run in float64 or generates other tokens there."""

    name: str
    mode: str
    outcome: str
    text: str = ""
    on_onnx: int = 0
    in_pytorch: int = 0
    fallbacks: dict[str, int] = dataclasses.field(default_factory=dict)
    breaks: int = 0
    graphs: int = 0
    seconds: float = 0.0
    judge: str = "float64"

    @property
    def case(self) -> str:
        return f"{self.name}/{self.mode}"


@dataclasses.dataclass
class Results:
    """Of one way to run a model: tensors by what they are, and how many breaks and graphs there were."""

    values: dict[str, torch.Tensor]
    breaks: int = 0
    graphs: int = 0


Compile = Callable[..., Callable[..., object]]


def _uncompiled(function: Callable[..., object], **settings: object) -> Callable[..., object]:
    return function


def compiling(backend: str) -> Compile:
    options = {"cache": False, "placement": "onnx"} if backend == "onnxrt" else None
    return lambda function, **settings: torch.compile(function, backend=backend, options=options, **settings)


def exporting(export: Callable[[nn.Module, Path], Callable[..., object]]) -> Compile:
    def exported(model: nn.Module, **settings: object) -> Callable[..., object]:
        with tempfile.TemporaryDirectory() as folder:
            return export(model, Path(folder) / "model.onnx")

    return exported


def in_double(value: object) -> object:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def tensors(output: object) -> dict[str, torch.Tensor]:
    """The tensors of a model's output, named by their places; those in output objects, caches and lists too."""
    leaves = tree_leaves(_opened(output))
    return {f"result {i}": leaf for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}


def _opened(value: object) -> object:
    if hasattr(value, "to_tuple"):
        return _opened(value.to_tuple())
    if hasattr(value, "self_attention_cache"):  # of an encoder-decoder
        return [_opened(value.self_attention_cache), _opened(value.cross_attention_cache)]
    if hasattr(value, "layers") and hasattr(value, "get_seq_length"):  # keys and values, or states
        return [[part for _, part in sorted(vars(layer).items())] for layer in value.layers]
    if isinstance(value, dict):
        return [_opened(item) for item in value.values()]
    return [_opened(item) for item in value] if isinstance(value, (tuple, list)) else value


Run = Callable[[nn.Module, Architecture, list[Inputs], Compile], Iterator[tuple[str, torch.Tensor]]]


@torch.no_grad()
def _inference(model: nn.Module, entry: Architecture, feeds: list[Inputs], wrap: Compile, **settings: bool) -> Iterator:
    function = wrap(model.eval(), **settings)
    for i, inputs in enumerate(feeds):
        for what, value in tensors(function(**inputs)).items():
            yield f"call {i}, {what}", value


def _training(model: nn.Module, entry: Architecture, feeds: list[Inputs], wrap: Compile) -> Iterator:
    """A loss and all gradients, without dropout, which in float64 draws other numbers."""
    model.train()
    _without_dropout(model)
    loss = scalar(wrap(model)(**feeds[0]))
    loss.backward()
    yield "loss", loss.detach()
    for path, parameter in model.named_parameters():
        if parameter.grad is not None:
            yield f"gradient of {path}", parameter.grad
    for path, buffer in model.named_buffers():
        yield f"buffer {path}", buffer


def _dynamic(model: nn.Module, entry: Architecture, feeds: list[Inputs], wrap: Compile) -> Iterator:
    return _inference(model, entry, feeds, wrap, dynamic=True)


def _autocast(model: nn.Module, entry: Architecture, feeds: list[Inputs], wrap: Compile) -> Iterator:
    if next(model.parameters()).dtype == torch.float64:
        return _inference(model, entry, feeds, wrap)
    with torch.autocast("cpu", torch.bfloat16):
        return iter(list(_inference(model, entry, feeds, wrap)))


def _generation(**asked: object) -> Run:
    @torch.no_grad()
    def run(model: nn.Module, entry: Architecture, feeds: list[Inputs], wrap: Compile) -> Iterator:
        model.eval()
        model.forward = wrap(model.forward, dynamic=True)
        inputs = {name: value for name, value in feeds[0].items() if name != "labels"}
        generated = model.generate(  # type: ignore[operator]
            **inputs,
            **asked,
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            min_new_tokens=NEW_TOKENS,
            output_logits=True,
            output_scores=True,
            return_dict_in_generate=True,
        )
        for i, logits in enumerate(generated.logits):
            yield f"logits of token {i}", logits
        if "num_beams" in asked:
            yield "scores of the beams", generated.sequences_scores
        yield "generated tokens", generated.sequences

    return run


MODES: dict[str, Run] = {
    "inference": _inference,
    "training": _training,
    "dynamic": _dynamic,
    "autocast": _autocast,
    "generation": _generation(),
    "generation, static cache": _generation(cache_implementation="static"),
    "generation, beams": _generation(num_beams=2),
}


@torch.no_grad()
def _exported(model: nn.Module, entry: Architecture, feeds: list[Inputs], wrap: Compile) -> Iterator:
    for module in model.modules():
        if hasattr(module, "config"):
            module.config.use_cache = False
    return _inference(model, entry, feeds, wrap)


EXPORTS: dict[str, Run] = {"export": _exported, "export, dynamic": _exported}
"""The modes of ``--export``."""


def our_export(feeds: Sequence[Inputs], model: nn.Module, path: Path) -> Callable[..., object]:
    """Our file of a model as a callable; sizes that differ between the feeds are dynamic."""
    loaded = LoadedCase(model, [loading.Inputs((), inputs) for inputs in feeds])
    exported = dynamo_backends.export(model, path=path, kwargs=feeds[0], dynamic_shapes=dynamic_shapes(loaded))
    exported.run(**feeds[0])  # the session, while there is a file
    return lambda **inputs: list(exported.run(**inputs).values())


def their_export(feeds: Sequence[Inputs], model: nn.Module, path: Path) -> Callable[..., object]:
    """The same by ``torch.onnx.export``."""
    return Exported(LoadedCase(model, [loading.Inputs((), inputs) for inputs in feeds]))


def cases(modes: Iterable[str] = MODES) -> list[tuple[str, str]]:
    """All cases: architecture and mode; first one mode of all, then the next."""
    return [
        (name, mode)
        for mode in modes
        for name, entry in ARCHITECTURES.items()
        if entry.generates or not mode.startswith("generation")
    ]


def _without_dropout(model: nn.Module) -> None:
    """Sets dropout and stochastic depth to 0, including probabilities that modules hold as numbers."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and (name == "p" or "drop" in name):
                setattr(module, name, 0.0)
    config = getattr(model, "config", None)
    for name, value in list(vars(config).items()) if config is not None else []:
        if isinstance(value, float) and "drop" in name:
            setattr(config, name, 0.0)


def run_case(name: str, mode: str) -> Report:
    """Compares the compiled model with eager and float64, and if it breaks, with ``aot_eager``."""
    start = time.monotonic()
    entry = ARCHITECTURES[name]
    torch.manual_seed(0)
    model = entry.build()
    feeds = [entry.inputs(BATCH, LENGTH)]
    if "dynamic" in mode:
        feeds.append(entry.inputs(OTHER_BATCH, OTHER_LENGTH))

    def results(wrap: Compile, double: bool = False) -> Results:
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(1)
        ours = copy.deepcopy(model)
        arguments = copy.deepcopy(feeds)
        if double:
            ours, arguments = ours.double(), tree_map(in_double, arguments)
        values = dict((MODES | EXPORTS)[mode](ours, entry, arguments, wrap))
        breaks = sum(counters["graph_break"].values())
        return Results(values, breaks, counters["stats"]["unique_graphs"])

    def report(outcome: str, text: str = "", got: Results | None = None) -> Report:
        return Report(
            name,
            mode,
            outcome,
            text,
            *counted,
            got.breaks if got else 0,
            got.graphs if got else 0,
            round(time.monotonic() - start, 2),
            judge,
        )

    our_way, their_way, theirs_is = compiling("onnxrt"), compiling("aot_eager"), "aot_eager"
    if mode in EXPORTS:
        theirs_is = "torch.onnx.export"
        our_way, their_way = (exporting(functools.partial(way, feeds)) for way in (our_export, their_export))
    counted: tuple = (0, 0, {})
    judge = "float64"
    try:
        eager = results(_uncompiled)
    except Exception as error:
        return report(PYTORCHS, f"eager raises {_line(error)}")
    try:
        exact = results(_uncompiled, double=True).values
    except Exception:  # a model that makes float32 tensors of its own does not run in float64
        exact, judge = eager.values, "eager"
    if mode.startswith("generation") and not _same_tokens(exact, eager.values):
        exact, judge = eager.values, "eager"  # logits after other tokens are no measure
    try:
        actual = results(our_way)
    except Exception as error:
        try:
            results(their_way)
        except Exception as other:
            return report(PYTORCHS, f"{_line(error)}; {theirs_is} raises {_line(other)}")
        return report(ERROR, _line(error))
    counted = _counted()
    runtime_failures = counters["dynamo_backends"]["runtime_failures"]
    differs = functools.partial(difference, computed_in=torch.bfloat16 if mode == "autocast" else torch.float32)
    text = differs(actual.values, eager.values, exact)
    if text:
        try:
            theirs = results(their_way).values
        except Exception as error:
            return report(WRONG, f"{text}; {theirs_is} raises {_line(error)}", actual)
        as_theirs = differs(theirs, eager.values, exact) and not differs(actual.values, theirs, exact)
        return report(PYTORCHS if as_theirs else WRONG, f"{text}{f' as {theirs_is}' if as_theirs else ''}", actual)
    if runtime_failures:
        return report(ERROR, f"ONNX Runtime failed {runtime_failures} times", actual)
    if actual.breaks or actual.graphs > 1:
        try:
            theirs = results(their_way)
        except Exception:  # what is right needs no other measure
            return report(RIGHT, "", actual)
        if actual.breaks > theirs.breaks or actual.graphs > theirs.graphs:
            text = f"{actual.breaks} breaks, {actual.graphs} graphs; aot_eager {theirs.breaks} and {theirs.graphs}"
            return report(BREAKS, text, actual)
    return report(RIGHT, "", actual)


def _same_tokens(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return torch.equal(one["generated tokens"], other["generated tokens"])


def _counted() -> tuple[int, int, dict[str, int]]:
    ours = counters["dynamo_backends"]
    fallbacks = {event.removeprefix("fallback "): n for event, n in ours.items() if event.startswith("fallback ")}
    return ours["nodes_on_onnx"], ours["nodes_in_pytorch"], fallbacks


def difference(
    actual: dict[str, torch.Tensor],
    eager: dict[str, torch.Tensor],
    exact: dict[str, torch.Tensor],
    *,
    computed_in: torch.dtype = torch.float32,
) -> str:
    """A message about results less exact than eager's, else ``""``. ``exact`` may be eager's.

    float32 results that were computed in a lower precision get its tolerance. An error of one rounding of the largest
    number among all gradients (or all buffers) is allowed: the gradient of a bias before a normalization is 0 except
    for the rounding of sums of others.
    """
    if actual.keys() != eager.keys():
        return f"other results: {sorted(actual.keys() ^ eager.keys())[:4]}"
    largest: dict[str, float] = {}
    for what, value in exact.items():
        if value.is_floating_point() and value.isfinite().any():
            kind = what.split(" ")[0]
            largest[kind] = max(largest.get(kind, 0.0), value[value.isfinite()].abs().max().item())
    for what, expected in eager.items():
        ours, double = actual[what], exact.get(what, expected)
        if ours.dtype != expected.dtype or ours.shape != expected.shape:
            return f"{what}: {ours.dtype} {list(ours.shape)}, eager {expected.dtype} {list(expected.shape)}"
        if not expected.is_floating_point():
            if not torch.equal(ours, expected):
                return f"{what}: {int((ours != expected).sum())} of {ours.numel()} differ"
            continue
        if double.shape != expected.shape:  # float64 generated other tokens, or routed otherwise
            double = expected
        dtype = computed_in if expected.dtype is torch.float32 else expected.dtype
        rounding = torch.finfo(dtype).eps * largest.get(what.split(" ")[0], 0.0)
        text = _distance(ours.double(), expected.double(), double.double(), dtype, rounding)
        if text:
            return f"{what}: {text}"
    return ""


def _distance(ours: torch.Tensor, eager: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype, rounding: float) -> str:
    if not eager.numel():
        return ""
    finite = eager.isfinite()
    if not torch.equal(finite, ours.isfinite()):
        return f"{int((finite != ours.isfinite()).sum())} are finite on one side only"
    if not torch.equal(ours[~finite].nan_to_num(), eager[~finite].nan_to_num()):
        return "other infinities"
    finite &= exact.isfinite()
    if not finite.any():
        return ""
    ours, eager, exact = ours[finite], eager[finite], exact[finite]
    scale = exact.abs().max()
    allowed = MULTIPLE * (eager - exact).abs().max() + ROUNDINGS[dtype] * torch.finfo(dtype).eps * scale
    allowed = max(allowed, rounding)
    error = (ours - exact).abs().max()
    return f"error {error:.3g}, allowed {allowed:.3g}, largest value {scale:.3g}" if error > allowed else ""


def _line(error: BaseException) -> str:
    """The error's kind and beginning, and the innermost place in our sources."""
    text = " ".join(str(error).split())
    ours = [frame for frame in traceback.extract_tb(error.__traceback__) if "dynamo_backends" in frame.filename]
    place = f" ({Path(ours[-1].filename).name}:{ours[-1].lineno})" if ours else ""
    return f"{type(error).__name__}: {text[:300]}{place}"


def _judge(case: tuple[str, str]) -> Report:
    return run_case(*case)


def sweep(
    chosen: Sequence[tuple[str, str]],
    processes: int,
    limit: float,
    judge: Callable[[tuple[str, str]], Report] = _judge,
) -> Iterator[Report]:
    """The reports on the cases, as they come."""
    for case, answer, seconds in judged(chosen, judge, processes=processes, limit=limit):
        yield Report(*case, ERROR, answer.why, seconds=seconds) if isinstance(answer, Ended) else answer


def table(reports: Sequence[Report]) -> str:
    """Markdown: a row an architecture; a column a mode."""
    by_case = {(report.name, report.mode): report for report in reports}
    lines = [
        f"| architecture | kind | {' | '.join(MODES)} | on ONNX | breaks |",
        "|" + " --- |" * (len(MODES) + 4),
    ]
    for name, entry in ARCHITECTURES.items():
        of_one = [report for report in reports if report.name == name]
        cells = [by_case[name, mode].outcome if (name, mode) in by_case else _absent(entry, mode) for mode in MODES]
        on_onnx, in_pytorch = sum(r.on_onnx for r in of_one), sum(r.in_pytorch for r in of_one)
        share = f"{on_onnx / (on_onnx + in_pytorch):.0%}" if on_onnx + in_pytorch else ""
        breaks = str(max((report.breaks for report in of_one), default=""))
        lines.append(f"| {' | '.join([name, entry.kind, *cells, share, breaks])} |")
    return "\n".join(lines) + "\n"


def _absent(entry: Architecture, mode: str) -> str:
    return "-" if mode.startswith("generation") and not entry.generates else "not run"


def fallbacks(reports: Sequence[Report], most: int = 25) -> list[tuple[str, int]]:
    """The operators that run in PyTorch in most architectures, and in how many."""
    names = collections.defaultdict(set)
    for report in reports:
        for target in report.fallbacks:
            names[target].add(report.name)
    return sorted(((target, len(those)) for target, those in names.items()), key=lambda item: (-item[1], item[0]))[
        :most
    ]


def summary(reports: Sequence[Report], modes: Iterable[str] = MODES) -> str:
    """Markdown: how many cases of each mode came out how."""
    outcomes = [RIGHT, WRONG, ERROR, BREAKS, PYTORCHS]
    lines = [f"| mode | cases | {' | '.join(outcomes)} |", "|" + " --- |" * (len(outcomes) + 2)]
    for mode in modes:
        count = collections.Counter(report.outcome for report in reports if report.mode == mode)
        lines.append(f"| {mode} | {sum(count.values())} | {' | '.join(str(count[each]) for each in outcomes)} |")
    return "\n".join(lines) + "\n"


def page(reports: Sequence[Report]) -> str:
    """``docs/models.md``."""
    faults = [f"- `{r.case}`: {r.outcome}: {r.text}" for r in reports if r.outcome in FAULTS]
    theirs = [f"- `{r.case}`: {r.text}" for r in reports if r.outcome == PYTORCHS]
    return PAGE.format(
        architectures=len(ARCHITECTURES),
        cases=len(cases()),
        run=len({report.case for report in reports}),
        by_eager=sum(report.judge == "eager" for report in reports),
        versions=f"PyTorch {torch.__version__.split('+')[0]}, ONNX Runtime {onnxruntime.__version__}, "
        f"transformers {transformers.__version__}",
        summary=summary(reports),
        faults="\n".join(faults) or f"None of the {len(reports)} cases that were run.",
        theirs="\n".join(theirs) or f"None of the {len(reports)} cases that were run.",
        fallbacks="\n".join(f"| `{target}` | {number} |" for target, number in fallbacks(reports)),
        table=table(reports),
    ).replace("<", "&lt;")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="architectures, with commas between")
    parser.add_argument("--mode", help=f"modes, with semicolons between: {'; '.join(MODES)}")
    parser.add_argument("--export", action="store_true", help=f"the modes {', '.join(EXPORTS)}")
    parser.add_argument("--sample", default="1/1", help="a part of the cases, 1/10")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--limit", type=float, default=300, help="seconds for a case")
    parser.add_argument("--out", type=Path, help="JSON with all reports; the cases already in it are not run again")
    parser.add_argument("--again", action="store_true", help="with --out: run what is in it again")
    parser.add_argument("--write-table", action="store_true", help=f"write {TABLE.name}")
    settings = parser.parse_args(arguments)

    every = cases(EXPORTS if settings.export else MODES)
    chosen = every
    for option, place in (
        (settings.only and settings.only.split(","), 0),
        (settings.mode and settings.mode.split(";"), 1),
    ):
        if option:
            wanted = {each.strip() for each in option}
            unknown = wanted - {case[place] for case in every}
            if unknown:
                parser.error(f"no such {'architecture' if place == 0 else 'mode'}: {', '.join(sorted(unknown))}")
            chosen = [case for case in chosen if case[place] in wanted]
    part, of = map(int, settings.sample.split("/"))
    if part < of:
        chosen = random.Random(settings.seed).sample(chosen, max(1, len(chosen) * part // of))

    reports: dict[tuple[str, str], Report] = {}
    if settings.out and settings.out.exists():
        stored = [Report(**each) for each in json.loads(settings.out.read_text())]
        reports = {(each.name, each.mode): each for each in stored}
        if not settings.again:
            chosen = [case for case in chosen if case not in reports]
    start = time.monotonic()
    new = []
    for report in sweep(chosen, settings.processes, settings.limit):
        new.append(report)
        reports[report.name, report.mode] = report
        if report.outcome != RIGHT:
            print(f"{report.outcome}: {report.case}: {report.text}", flush=True)
        if settings.out:
            settings.out.write_text(json.dumps([dataclasses.asdict(each) for each in reports.values()], indent=1))
    in_order = [reports[case] for case in every if case in reports]
    modes = EXPORTS if settings.export else MODES
    print(
        summary(in_order if settings.out else new, modes),
        f"{len(new)} cases in {time.monotonic() - start:.0f} s",
        sep="\n",
    )
    if settings.write_table and not settings.export:
        TABLE.write_text(page(in_order if settings.out else new))
    return int(any(report.outcome in FAULTS for report in new))


if __name__ == "__main__":
    sys.exit(main())
