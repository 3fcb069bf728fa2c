"""``dynamo-backends compare``: runs two ONNX models on the same inputs and compares their values."""

from __future__ import annotations

import argparse
import collections
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..common.suggestions import did_you_mean
from ..common.text_table import fit_table
from .common import (
    GRAPH,
    add_dump_arguments,
    add_inputs_arguments,
    positive,
    print_json,
    try_again,
)

if TYPE_CHECKING:
    from ..dumps.model_comparison import ModelComparison
    from ..dumps.model_judging import ValueDifference
    from ..dumps.model_rows import AlignedRow
    from ..dumps.model_values import Runtime

_MAX_ROWS = 200
"""A longer table shows only values that differ, and outputs."""

DETAILS = (
    "A and B are files or graphs of a dump: 0/forward, graph_000/forward/region_1, or the path of one. A may be a "
    "PyTorch model as for bench: bert, model.py:make. Without B, A is compared with itself, as --a-… and --b-… say. "
    "Exit code 1: a value differs by more than rounding."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "first", metavar="A", help="the reference: a file, a graph of the dump, the path of one, or a PyTorch model"
    )
    parser.add_argument("second", metavar="B", nargs="?", help="the model that is judged (default: A)")
    add_inputs_arguments(parser)
    parser.add_argument(
        "--stage",
        choices=("onnx", "onnx_optimized", "session"),
        default="onnx",
        help="which model of a dumped graph: exported, after our passes, or after ONNX Runtime's optimizers "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--runs",
        type=positive,
        metavar="N",
        help="run B up to N times, until it differs: with A alone, what differs from run to run",
    )
    parser.add_argument("--all", action="store_true", help=f"print all rows of a table of more than {_MAX_ROWS}")
    _add_runtime(parser, "", "of both models")
    _add_runtime(parser, "a-", "of A only")
    _add_runtime(parser, "b-", "of B only")
    add_dump_arguments(parser)


_SWITCHES = "runtime", "provider", "optimize", "threads"


def _add_runtime(parser: argparse.ArgumentParser, prefix: str, which: str) -> None:
    """Adds what runs a model."""
    parser.add_argument(
        f"--{prefix}runtime",
        choices=("ort", "reference"),
        help=f"{which}: ONNX Runtime (default), or onnx's evaluator in Python (slow, few com.microsoft operators)",
    )
    parser.add_argument(f"--{prefix}provider", metavar="NAME", help=f"{which}: ONNX Runtime's execution provider")
    parser.add_argument(
        f"--{prefix}optimize", action="store_true", help=f"{which}: run ONNX Runtime's optimizers first"
    )
    parser.add_argument(f"--{prefix}threads", type=positive, metavar="N", help=f"{which}: threads of a session")


def run(arguments: argparse.Namespace) -> int:
    runtimes = _runtime(arguments, "a"), _runtime(arguments, "b")
    program = _program(arguments.first)
    if program is None and arguments.second is None and runtimes[0] == runtimes[1] and not arguments.runs:
        switches = "--b-optimize, --b-provider, --b-threads, --b-runtime, --runs"
        raise ValueError(f"name a second model, or what differs: {switches}")
    if program is not None:
        comparisons = [_with_program(program, arguments, runtimes[1])]
    else:
        comparisons = _of_files(arguments, runtimes)
    ok = all(comparison.ok for comparison in comparisons)
    if arguments.json:
        print_json(list(map(_as_json, comparisons)))
        return 0 if ok else 1
    for comparison in comparisons:
        sys.stdout.write(_text(comparison, everything=arguments.all))
    if not ok and all(item.name == "ort" for item in runtimes) and program is None:
        print(try_again(arguments, "--a-runtime", "reference"))
    elif ok and all(item.name == "ort" and not item.optimize for item in runtimes):
        print(try_again(arguments, "--b-optimize"))
    return 0 if ok else 1


def _of_files(arguments: argparse.Namespace, runtimes: tuple[Runtime, Runtime]) -> list[ModelComparison]:
    """The comparisons of files, or of the regions of graphs."""
    from ..bench.models import MODELS
    from ..dumps.model_comparison import compare_targets, targets_of

    references = arguments.first, arguments.second or arguments.first
    if _program(references[1]) is not None:
        raise ValueError(f"the PyTorch model comes first: compare {references[1]} {references[0]}")
    for reference in references:
        if not Path(reference).exists() and "/" not in reference and not GRAPH.fullmatch(reference):
            near = did_you_mean(reference, [*MODELS, *map(str, Path().glob("*.onnx"))])
            raise ValueError(f"{reference!r} is no file, no graph of a dump and no PyTorch model.{near}")
    first, second = (targets_of(reference, arguments.dump, arguments.stage) for reference in references)
    if arguments.inputs and len(first) > 1:
        raise ValueError(f"--inputs requires one model, A has {len(first)}: {', '.join(item.name for item in first)}")
    if len(first) != len(second):
        names = ["; ".join(item.name for item in side) for side in (first, second)]
        raise ValueError(f"A and B have other numbers of regions, name one of each: {names[0]} and {names[1]}")
    return [
        compare_targets(
            one, other, runtimes[0], runtime_of_second=runtimes[1], inputs=arguments.inputs, sizes=dict(arguments.dim),
            seed=arguments.seed, runs=arguments.runs or 1,
        )
        for one, other in zip(first, second, strict=True)
    ]  # fmt: skip


def _program(reference: str) -> str | None:
    """The reference if it names a PyTorch model."""
    from ..bench.models import MODELS

    if reference.endswith(".py") or ".py:" in reference:
        return reference
    is_other = Path(reference).exists() or GRAPH.fullmatch(reference)
    return None if is_other or not (reference in MODELS or ":" in reference) else reference


def _with_program(name: str, arguments: argparse.Namespace, runtime: Runtime) -> ModelComparison:
    """The comparison of a file with the PyTorch model that it was exported from."""
    from ..bench.case import Case, check_model

    check_model(name)
    if arguments.second is None:
        raise ValueError(f"name the ONNX file to compare {name} with")
    given = [
        arguments.inputs,
        arguments.dim,
        arguments.seed,
        arguments.runs,
        *(getattr(arguments, f"a_{item}") for item in _SWITCHES),
    ]
    if any(given):
        raise ValueError(
            f"{name} has its own inputs and runs in PyTorch: --inputs, --dim, --seed, --runs and --a-… are for files"
        )
    from ..bench.loading import load
    from ..dumps.models import load_model
    from ..dumps.program_comparison import compare_with_program

    loaded = load(Case(name))
    inputs = loaded.inputs[0]
    file = load_model(arguments.second)
    return compare_with_program(loaded.model, inputs.args, inputs.kwargs, file, runtime)


def _runtime(arguments: argparse.Namespace, side: str) -> Runtime:
    """What runs A or B."""
    from ..dumps.model_sessions import available_provider
    from ..dumps.model_values import Runtime
    from ..dumps.schema import Settings
    from ..runtime.provider_options import precision_options

    def given(name: str) -> Any:
        own = getattr(arguments, f"{side}_{name}")
        return getattr(arguments, name) if own in (None, False) else own

    name, provider = given("runtime") or "ort", given("provider")
    if name == "reference" and provider is not None:
        raise ValueError("--provider requires --runtime ort; the reference evaluator has no execution providers")
    providers = () if provider is None else (available_provider(provider),)
    settings = Settings(
        providers=providers or Settings().providers,
        provider_options=tuple(dict(precision_options(item, "highest")) for item in providers),
        threads=given("threads") or 0,
    )
    return Runtime(name, settings, bool(given("optimize")))


_RANKED = 10
"""Nodes of a quantized model that are listed."""


def _text(comparison: ModelComparison, *, everything: bool) -> str:
    """The table of a comparison, its legend and notes, and the verdict."""
    from ..dumps.model_judging import EQUAL

    shown = list(comparison.rows)
    if len(shown) > _MAX_ROWS and not everything:
        outputs = {id(row) for row in comparison.outputs}
        shown = [row for row in shown if row.mark != EQUAL or id(row) in outputs][:_MAX_ROWS]
    headers = ("", "kind", "type", "shape", "operator", "name", "operator of B", "name in B", "error", "limit", "total")
    lines = [f"A  {comparison.names[0]}", f"B  {comparison.names[1]}", ""]
    lines += [f"note: {note}" for note in comparison.notes]
    lines += [""] * bool(comparison.notes)
    lines += [fit_table([_cells(row, row is comparison.first_different) for row in shown], headers), ""]
    marks = collections.Counter(row.mark for row in comparison.rows)
    if len(shown) < len(comparison.rows):
        counts = ", ".join(f"{number} {mark}" for mark, number in marks.items())
        lines += [f"{len(comparison.rows)} rows: {counts}; --all prints them", ""]
    lines.append(legend_text(marks))
    lines += [_COLUMNS, ""]
    if comparison.is_quantized:
        ranked = comparison.ranked[:_RANKED]
        rows = [(row.name, row.first and row.first.operator, _noise(row), _place(row)) for row in ranked]
        lines += ["What each node of the quantized model adds by itself, the largest first:"]
        lines += [fit_table(rows, ("name", "operator", "relative error", "place")), ""]
    lines.append(f"{comparison.verdict}{_largest_error(comparison)}")
    return "\n".join(lines) + "\n"


_COLUMNS = (
    "error: of B against A on B's own numbers, so of this node alone; limit: what is rounding; total: how both runs "
    "differ"
)


def _noise(row: AlignedRow) -> str:
    from ..dumps.model_comparison import percent

    assert row.local is not None
    return percent(row.local.noise)


def _place(row: AlignedRow) -> str:
    return ", ".join(filter(None, (row.first.source, row.first.module))) if row.first is not None else ""


def legend_text(marks: Collection[str]) -> str:
    """What the marks in a table mean."""
    from ..dumps.model_judging import LEGEND

    return "; ".join(f"{mark} {meaning}" for mark, meaning in LEGEND.items() if mark in marks)


def _cells(row: AlignedRow, is_first: bool) -> Sequence[object]:
    from ..dumps.models import shape_text

    sides = [side for side in (row.first, row.second) if side is not None]
    measured = row.local.verdict.ours if row.local is not None else None
    error = f"{measured.error:.1e}" if measured is not None else str(row.local) if row.local is not None else ""
    return (
        f"{row.mark}{'>' * is_first}",
        sides[0].kind,
        _change([side.type for side in sides]),
        _change(["" if side.shape is None else shape_text(side.shape) for side in sides]),
        row.first and row.first.operator,
        row.first and row.first.name,
        row.second and row.second.operator,
        row.second and row.second.name,
        error or ("0" if row.local is not None else ""),
        f"{measured.limit:.1e}" if measured is not None else "",
        row.total and _error_text(row.total),
    )


def _change(values: Sequence[str]) -> str:
    """``float32``, or ``float32→float16`` if the models differ."""
    return "→".join(dict.fromkeys(values))


def _error_text(found: ValueDifference) -> str:
    """The largest error, or a few words on another kind of difference."""
    if found.is_equal:
        return "0"
    measured = found.verdict.ours
    if measured is None or found.verdict.complaint:
        return str(found)
    return f"{measured.nonfinite} NaN or infinite" if measured.nonfinite else f"{measured.max_abs:.1e}"


def _largest_error(comparison: ModelComparison) -> str:
    """The largest difference of the outputs, if all are right."""
    if not comparison.ok:
        return ""
    rows = [row for row in comparison.outputs if row.total and not row.total.is_equal]
    if not rows:
        return ": all outputs are equal"
    worst = max(rows, key=lambda row: row.total.noise if row.total else 0.0)
    return f": largest difference of the outputs {worst.total and _error_text(worst.total)}, in {worst.name}"


def _as_json(comparison: ModelComparison) -> dict[str, object]:
    first_different = comparison.first_different
    return {
        "first": comparison.names[0],
        "second": comparison.names[1],
        "verdict": comparison.verdict,
        "ok": comparison.ok,
        "first_different": first_different and first_different.as_json(),
        "notes": list(comparison.notes),
        "rows": [row.as_json() for row in comparison.rows],
    }
