"""Tables of what ``passes.py`` measured, in Markdown; the documentation's are made by the same functions."""

from __future__ import annotations

import collections
import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from passes.engine.manager import Pass, all_passes

RESULTS = Path(__file__).with_name("passes.json")
"""Where a full run's result is kept."""

NOT_MEASURED = "not measured"

KEPT_WITHOUT_GAIN = {
    "pre_grad.activations": "training steps that run in PyTorch, which are not measured: 45 ms instead of 48 for GPT-2",
    "joint.common_subexpressions": "PyTorch's partitioner would merge them otherwise, and merges random draws, too",
    "post_grad.direct_writes": "writes into stacked caches, which are not measured: 0.03 instead of 1.1 ms for a key",
    "post_grad.bfloat16_in_float32": "bfloat16 models, which are not measured: PyTorch takes 1.6 to 7 times as long",
    "onnx.lift_constants": "other passes on ONNX models match constants only if they are initializers",
    "onnx.quantized_products": "quantized models, which are not measured: a Llama takes a third ([](quantized.md))",
    "onnx.quantized_convolutions": "the same, on request",
    "onnx.gelu": "quick GELU: two runs with 3.0 ± 1.7 and 4.3 ± 2.0 % of CLIP's call",
}
"""Passes of which the measurement shows no gain, and what each is kept for."""


def load_results(path: Path = RESULTS) -> dict[str, Any]:
    """A run's result; one without models if there is none."""
    if not path.exists():
        return {"passes": {}, "models": {}}
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def run_sentence(results: Mapping[str, Any]) -> str:
    """The command that gives these figures, and the machine it ran on."""
    if "machine" not in results:
        return "Not measured yet: `python benchmarks/passes.py` does it.\n"
    machine = results["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return (
        f"`{results['command']}`, on {machine['cores']} cores of a {machine['processor']} ({machine['architecture']}), "
        f"{machine['system']}, PyTorch and each session with {machine['threads']} threads; {versions}.\n"
    )


@dataclasses.dataclass(frozen=True)
class Gain:
    """What a pass gains in one way of running.

    Attributes:
        part: of the time of a call or of a training step, over all models in which it fired, each by its certainty.
        error: the standard error of ``part``.
        best: the model that gains most for its certainty.
        best_part, best_error: what that one gains.
    """

    part: float
    error: float
    best: str
    best_part: float
    best_error: float

    @property
    def is_shown(self) -> bool:
        """Whether it is more than chance: two standard errors over all models; four for one model, of many tried."""
        return self.part >= 2 * self.error or self.best_part >= 4 * self.best_error

    def __str__(self) -> str:
        best = f"{self.best} {self.best_part:+.1%} ± {self.best_error:.1%}"
        return f"{self.part:+.2%} ± {self.error:.2%} of the time, most of all {best}"


_FINEST = 0.001
"""Of the time of a call: no error is smaller, as other things differ between processes too."""


def gains(results: Mapping[str, Any]) -> dict[str, dict[str, Gain]]:
    """What each pass gains, by ``inference`` and ``training``, where it fired and was left out for a measurement."""
    found: dict[tuple[str, str], list[tuple[str, float, float]]] = collections.defaultdict(list)
    for name, model in _measured(results).items():
        for way, measured in (("inference", model), ("training", model.get("training"))):
            for item, of_pass in (measured or {}).get("passes", {}).items():
                if "gained_milliseconds" in of_pass:
                    whole = measured["latency"]["ours"]["milliseconds"]
                    part, error = of_pass["gained_milliseconds"] / whole, of_pass["standard_error"] / whole
                    found[item, way].append((name, part, max(error, _FINEST)))
    summed: dict[str, dict[str, Gain]] = collections.defaultdict(dict)
    for (item, way), parts in found.items():
        weights = [1 / error**2 for _, _, error in parts]
        part = sum(weight * part for weight, (_, part, _) in zip(weights, parts, strict=True)) / sum(weights)
        summed[item][way] = Gain(part, sum(weights) ** -0.5, *max(parts, key=lambda item: item[1] / item[2]))
    return summed


@dataclasses.dataclass
class _Total:
    """One pass on all models."""

    fired: int = 0
    removed: int = 0
    saved: int | None = None
    compile_milliseconds: float = 0.0
    gained: float | None = None
    variance: float = 0.0
    models: int = 0
    fired_in_training: int = 0
    gained_in_training: float | None = None
    variance_in_training: float = 0.0

    def add(self, found: Mapping[str, Any]) -> None:
        self.fired += found["fired"]
        self.removed += found["removed_nodes"]
        self.compile_milliseconds += found["compile_milliseconds"]
        self.models += bool(found["fired"])
        if "gained_milliseconds" in found:
            self.saved = (self.saved or 0) + found["saved_nodes"]
            self.gained = (self.gained or 0.0) + found["gained_milliseconds"]
            self.variance += found["standard_error"] ** 2

    def add_training(self, found: Mapping[str, Any]) -> None:
        self.fired_in_training += found["fired"]
        if "gained_milliseconds" in found:
            self.gained_in_training = (self.gained_in_training or 0.0) + found["gained_milliseconds"]
            self.variance_in_training += found["standard_error"] ** 2


def passes_table(results: Mapping[str, Any], passes: Iterable[Pass] | None = None) -> str:
    """Every pass in the order it runs: what it does, and what it did to the measured models, all together."""
    measured = _measured(results)
    rows = []
    for item in all_passes() if passes is None else passes:
        about = (f"`{item.name}`", item.stage, item.sentence, "on" if item.default else "off")
        if item.name not in results["passes"]:
            rows.append((*about, *[NOT_MEASURED] * 7))
            continue
        total = _Total()
        for model in measured.values():
            if item.name in model["passes"]:
                total.add(model["passes"][item.name])
            in_training = model.get("training", {}).get("passes", {})
            if item.name in in_training:
                total.add_training(in_training[item.name])
        rows.append(
            (
                *about,
                f"{total.fired} in {total.models} of {len(measured)}",
                str(total.fired_in_training),
                str(total.removed),
                "" if total.saved is None else str(total.saved),
                _plus_minus(total.gained, total.variance),
                _plus_minus(total.gained_in_training, total.variance_in_training),
                f"{total.compile_milliseconds:.0f}",
            )
        )
    headers = (
        *("pass", "stage", "what it does", "default", "fired (inference)", "fired (training)", "nodes it removed"),
        *("nodes saved in the end", "ms gained a call", "ms gained a training step", "ms of compiling"),
    )
    return markdown(headers, rows)


def kept_table() -> str:
    """The passes that are kept although the measurement shows no gain, and the reasons."""
    needed = [(item.name, "results would be wrong without it") for item in all_passes() if item.is_needed]
    rows = [(f"`{name}`", reason) for name, reason in (*KEPT_WITHOUT_GAIN.items(), *needed)]
    return markdown(("pass", "kept for"), rows)


def _plus_minus(value: float | None, variance: float) -> str:
    return "" if value is None else f"{value:+.2f} ± {math.sqrt(variance):.2f}"


def models_table(results: Mapping[str, Any]) -> str:
    """Each measured model: ONNX nodes and milliseconds a call, with passes, without, and exported."""
    rows = []
    for name, model in _measured(results).items():
        exported, latency = model.get("export", {}), model["latency"]
        rows.append(
            (
                name,
                *(_number(found.get("nodes")) for found in (model["ours"], model["without_passes"], exported)),
                f"{model['ours']['attentions']} of {model['attentions']}",
                *(_milliseconds(latency.get(variant)) for variant in ("eager", "ours", "without_passes", "export")),
                *(_times(latency, other) for other in ("eager", "without_passes", "export")),
            )
        )
    headers = (
        *("model", "nodes", "without passes", "exported", "attentions that are one node"),
        *("eager ms", "ours ms", "without passes ms", "exported ms"),
        *("as fast as eager", "as without passes", "as exported"),
    )
    return markdown(headers, rows)


def details_table(results: Mapping[str, Any]) -> str:
    """Each measured model: where it ran, nodes after ONNX Runtime's own optimization, and how exact the results are."""
    rows = []
    for name, model in _measured(results).items():
        exported = model.get("export", {})
        variants = (model["ours"], model["without_passes"], exported)
        rows.append(
            (
                name,
                f"{model['parameters'] / 1e6:.1f} M",
                model["ours"]["regions"],
                f"{model['ours']['share_on_onnx']:.1%}",
                *(_number(found.get("session_nodes")) for found in variants),
                f"{exported.get('attentions', '')}",
                *(f"{found['error']:.1e}" if "error" in found else "" for found in variants),
                exported.get("failed", ""),
            )
        )
    headers = (
        *("model", "parameters", "regions", "operators on ONNX"),
        *("session nodes", "without passes", "exported", "exported attentions that are one node"),
        *("error", "without passes", "exported", "where exporting failed"),
    )
    return markdown(headers, rows)


def compile_table(results: Mapping[str, Any]) -> str:
    """Each measured model, then each training step: seconds to compile with and without passes, the passes' share."""
    rows = []
    for name, model in _measured(results).items():
        rows.append((name, *_compile_cells(model["compile"])))
    for name, model in _trained(results).items():
        rows.append((f"{name}, training", *_compile_cells(model["training"]["compile"])))
    headers = (
        *("model", "with passes s", "without s", "passes ms", "their share"),
        *("first in a process: s", "passes ms", "importing them ms"),
    )
    return markdown(headers, rows)


def _compile_cells(found: Mapping[str, float]) -> tuple[str, ...]:
    return (
        f"{found['seconds']:.2f}",
        f"{found['without_passes_seconds']:.2f}",
        f"{found['passes_milliseconds']:.0f}",
        f"{found['share_of_passes']:.1%}",
        f"{found['first_seconds']:.2f}",
        f"{found['first_passes_milliseconds']:.0f}",
        f"{found['import_passes_milliseconds']:.0f}" if "import_passes_milliseconds" in found else "",
    )


def training_table(results: Mapping[str, Any]) -> str:
    """A training step, forward and backward, of the models that have one."""
    rows = []
    for name, model in _trained(results).items():
        found = model["training"]
        rows.append(
            (
                name,
                *(found[variant]["nodes"] for variant in ("ours", "without_passes")),
                *(found[variant]["regions"] for variant in ("ours", "without_passes")),
                f"{found['ours']['share_on_onnx']:.1%}",
                *(_milliseconds(found["latency"][variant]) for variant in ("eager", "ours", "without_passes")),
                *(_times(found["latency"], other) for other in ("eager", "without_passes")),
            )
        )
    headers = (
        *("model", "nodes", "without passes", "regions", "without passes", "operators on ONNX"),
        *("eager ms", "ours ms", "without passes ms", "as fast as eager", "as without passes"),
    )
    return markdown(headers, rows)


def surplus_table(results: Mapping[str, Any]) -> str:
    """For each model the operators of which ours has more nodes than the export, and those of which it has fewer."""
    rows = []
    for name, model in _measured(results).items():
        if "operators" not in model.get("export", {}):
            continue
        difference = collections.Counter(model["ours"]["operators"])
        difference.subtract(model["export"]["operators"])
        more = [f"{operator} +{number}" for operator, number in difference.most_common() if number > 0]
        fewer = [f"{operator} {number}" for operator, number in reversed(difference.most_common()) if number < 0]
        rows.append((name, f"{difference.total():+d}", ", ".join(more), ", ".join(fewer)))
    return markdown(("model", "nodes", "ours has more", "ours has fewer"), rows)


def per_pass_table(results: Mapping[str, Any]) -> str:
    """Each model and training step, each pass that fired on it, and the difference between two equal variants."""
    rows = []
    measured = _measured(results)
    training = {f"{name}, training": model["training"] for name, model in _trained(results).items()}
    for name, model in (measured | training).items():
        for item, found in model["passes"].items():
            if found["fired"]:
                gained = _gained(found)
                cells = (found["fired"], found["removed_nodes"], found.get("saved_nodes", ""), gained)
                rows.append((name, f"`{item}`", *cells, f"{found['compile_milliseconds']:.1f}"))
        if "noise" in model:
            rows.append((name, "(none: noise)", "", "", "", _gained(model["noise"]), ""))
    headers = ("model", "pass", "fired", "nodes it removed", "nodes saved in the end", "ms gained", "ms of compiling")
    return markdown(headers, rows)


def report(results: Mapping[str, Any]) -> str:
    """All of it."""
    sections: tuple[tuple[str, Callable[[Mapping[str, Any]], str]], ...] = (
        ("Models", models_table),
        ("Where and how exactly they run", details_table),
        ("Compiling", compile_table),
        ("Training steps", training_table),
        ("Passes", passes_table),
        ("Passes, by model", per_pass_table),
        ("Nodes beyond the export's", surplus_table),
    )
    parts = [run_sentence(results)]
    parts += [f"## {heading}\n\n{table(results)}" for heading, table in sections]
    failed = [f"- {name}: {model['failed']}" for name, model in results["models"].items() if "failed" in model]
    if failed:
        parts.append("## Not measured\n\n" + "\n".join(failed) + "\n")
    return "\n".join(parts)


def markdown(headers: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table; bars in its cells are escaped."""
    cells = [[str(cell).replace("|", "\\|") for cell in row] for row in rows]
    return tabulate(cells, headers, tablefmt="pipe", disable_numparse=True) + "\n"


def _measured(results: Mapping[str, Any]) -> dict[str, Any]:
    return {name: model for name, model in results["models"].items() if "failed" not in model}


def _trained(results: Mapping[str, Any]) -> dict[str, Any]:
    return {name: model for name, model in _measured(results).items() if "training" in model}


def _number(value: int | None) -> str:
    return "" if value is None else str(value)


def _milliseconds(found: Mapping[str, float] | None) -> str:
    return "" if found is None else f"{found['milliseconds']:.2f} ± {found['spread'] / 2:.2f}"


def _times(latency: Mapping[str, Any], other: str) -> str:
    ratio = latency["times_as_fast_as"].get(other)
    return "" if ratio is None else f"{ratio:.2f} x"


def _gained(found: Mapping[str, float]) -> str:
    if "gained_milliseconds" not in found:
        return ""
    return f"{found['gained_milliseconds']:+.2f} ± {found['standard_error']:.2f}"
