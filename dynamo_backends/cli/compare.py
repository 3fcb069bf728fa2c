"""``dynamo-backends compare``: two ONNX models side by side, run on the same inputs.

::

    dynamo-backends compare before.onnx after.onnx                     # on made-up inputs
    dynamo-backends compare a.onnx b.onnx --inputs feeds.npz --runtime reference
    dynamo-backends compare 0/forward 1/forward                        # two graphs of a dump
    dynamo-backends compare onnx_debug/run_A/graph_000 onnx_debug/run_B/graph_000
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..tables import fit_table
from .common import GRAPH, add_dump_arguments, complete_graphs, print_json, run_with, try_next

if TYPE_CHECKING:
    from ..dumps.comparing import Comparison
    from ..dumps.rows import Row, Side
    from ..dumps.running import Runtime

_MOST_ROWS = 200
_AROUND = 15
"""Rows before and behind the first different one that are shown of a longer table."""


DESCRIPTION = (
    "Runs two ONNX models on the same inputs, aligns their values, and names the first that diverges. "
    "A and B are files, or graphs of a dump: 0/forward, graph_000/forward/region_1, or the path of one. Exit code "
    "1 if an output differs by more than rounding explains."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the subcommand's arguments."""
    first = parser.add_argument("first", metavar="A", help="a model: a file, a graph of the dump, or the path of one")
    second = parser.add_argument("second", metavar="B", help="the other model")
    for action in (first, second):
        action.completer = complete_models  # type: ignore[attr-defined]
    parser.add_argument(
        "--inputs",
        nargs="+",
        metavar="PATH",
        default=[],
        help="a folder with input_0.pb …, .pb files, or an .npz; by default those of A's (or B's) dump, else made up",
    )
    parser.add_argument(
        "--dim", action="append", metavar="NAME=N", default=[], help="the size of a symbolic dimension, 3 by default"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of made-up inputs")
    parser.add_argument(
        "--stage",
        choices=("onnx", "onnx_optimized", "session"),
        default="onnx",
        help="of a dump's graphs: the export, the model after our passes, or what ONNX Runtime made of it",
    )
    parser.add_argument("--optimize", action="store_true", help="compare what ONNX Runtime's optimizer makes of each")
    parser.add_argument("--all", action="store_true", help=f"all rows of a table of more than {_MOST_ROWS}")
    add_runtime_arguments(parser)
    add_dump_arguments(parser)


def complete_models(prefix: str, parsed_args: argparse.Namespace, **_: object) -> list[str]:
    """The models and folders that a path begins, and the graphs of the dump; see ``argcomplete``."""
    folder, slash, begun = prefix.rpartition("/")
    start = Path(folder + slash or ".")
    found = sorted(start.glob("*")) if start.is_dir() else []
    files = [f"{path}/" if path.is_dir() else str(path) for path in found if path.is_dir() or path.suffix == ".onnx"]
    near = [path for path in files if Path(path).name.startswith(begun)]
    return near + complete_graphs(prefix, parsed_args)


def add_runtime_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds ``--runtime`` and ``--provider``."""
    parser.add_argument(
        "--runtime",
        choices=("ort", "reference"),
        default="ort",
        help="ONNX Runtime, or onnx's evaluator in Python (slow, and without most of com.microsoft)",
    )
    parser.add_argument(
        "--provider", metavar="NAME", help="execution provider of ONNX Runtime: cpu, cuda or CUDAExecutionProvider …"
    )


def run(arguments: argparse.Namespace) -> int:
    """Exit code 1 if an output differs by more than rounding explains, 2 if the models cannot be compared."""
    from ..dumps.comparing import compare_targets, paired, targets_of

    for reference in (arguments.first, arguments.second):
        if GRAPH.fullmatch(reference) and not Path(reference).exists():
            run_with(arguments, reference)  # says what is the matter where Dynamo gave it up
    sizes = dict(map(_size, arguments.dim))
    first = targets_of(arguments.first, arguments.dump, arguments.stage)
    second = targets_of(arguments.second, arguments.dump, arguments.stage)
    if arguments.inputs and len(first) > 1:
        raise ValueError(f"--inputs is for one model, A has {len(first)}: {', '.join(item.name for item in first)}")
    pairs, left_out = paired(first, second)
    runtime = _runtime(arguments)
    inputs = [_inputs(item, arguments.dump) for item in arguments.inputs]
    comparisons = [
        compare_targets(one, other, runtime, inputs=inputs, sizes=sizes, seed=arguments.seed) for one, other in pairs
    ]
    if arguments.json:
        print_json([*map(_as_json, comparisons), *({"left_out": item.name} for item in left_out)])
    else:
        for item in comparisons:
            sys.stdout.write(comparison_text(item, everything=arguments.all))
        if left_out:
            which, more, fewer = ("A", first, second) if len(first) > len(second) else ("B", second, first)
            names = ", ".join(item.name for item in left_out)
            print(f"left out, as {which} has {len(more)} models and the other {len(fewer)}: {names}")
        _hint(arguments, comparisons)
    return 0 if all(item.ok for item in comparisons) else 1


def _size(text: str) -> tuple[str, int]:
    name, _, size = text.partition("=")
    if not name or not size.isdigit():
        raise ValueError(f"--dim {text}: expected a name and a size, as in --dim batch=3")
    return name, int(size)


def _inputs(path: str, dump: str | None) -> str:
    """A path, or the data of a region of the dump."""
    from ..dumps.comparing import targets_of

    if Path(path).exists() or path.endswith((".pb", ".npz")):
        return path
    targets = targets_of(path, dump)
    if len(targets) != 1 or targets[0].data is None:
        raise ValueError(f"--inputs {path}: name one region with stored inputs, as in graph_000/forward/region_0")
    return str(targets[0].data)


def _runtime(arguments: argparse.Namespace) -> Runtime:
    from ..dumps.execution import Settings, available_provider
    from ..dumps.running import Runtime

    settings = Settings()
    if arguments.provider is not None:
        if arguments.runtime == "reference":
            raise ValueError("--provider is for --runtime ort; the reference evaluator has no execution providers")
        settings = Settings(providers=(available_provider(arguments.provider),))
    return Runtime(arguments.runtime, settings, arguments.optimize)


def comparison_text(comparison: Comparison, *, everything: bool) -> str:
    """The table of a comparison, its legend, its notes, and the verdict."""
    from ..dumps.differences import LEGEND

    rows, left_out = _shown(comparison, everything)
    headers = ("", "kind", "type", "shape", "digest", "operator", "name", "operator of B", "name in B", "difference")
    table = fit_table([_cells(row, row is comparison.first_different) for row in rows], headers)
    lines = [f"A  {comparison.names[0]}", f"B  {comparison.names[1]}", ""]
    lines += [f"note: {note}" for note in comparison.notes]
    lines += [""] * bool(comparison.notes) + [table, ""]
    if left_out:
        lines += [f"{left_out} rows that say less are left out; --all shows them", *_counts(comparison.rows), ""]
    marks = [mark for mark in LEGEND if any(row.mark == mark for row in comparison.rows)]
    lines.append("; ".join(f"{mark} {LEGEND[mark]}" for mark in marks))
    measure = "10 times what one unit of rounding in all inputs and weights makes there, and " * comparison.measured
    lines += [f"Rounding explains {measure}64 units of the dtype (4 of float16 and bfloat16) at the largest value.", ""]
    lines.append(f"{comparison.verdict}{_worst(comparison)}")
    return "\n".join(lines) + "\n"


def _shown(comparison: Comparison, everything: bool) -> tuple[list[Row], int]:
    """The rows to show: of a long table those around the first different one, or the nearest to it, and the outputs."""
    rows = list(comparison.rows)
    if everything or len(rows) <= _MOST_ROWS:
        return rows, 0
    first = next((i for i, row in enumerate(rows) if row is comparison.first_different), None)
    if first is None:
        order = sorted(range(len(rows)), key=lambda i: _share(rows[i]), reverse=True)
        chosen = set(order[:_AROUND])
    else:
        chosen = set(range(first - _AROUND, first + _AROUND + 1))
    outputs = {id(row) for row in comparison.outputs}
    shown = [row for i, row in enumerate(rows) if i in chosen or id(row) in outputs][:_MOST_ROWS]
    return shown, len(rows) - len(shown)


def _share(row: Row) -> float:
    """How much of what rounding explains a difference is."""
    if row.difference is None or row.difference.is_equal:
        return 0.0
    return row.difference.max_abs / row.limit if row.limit else 1.0


def _counts(rows: Sequence[Row]) -> list[str]:
    """For each kind of value, how many rows have which mark."""
    from ..dumps.differences import LEGEND

    found: dict[str, dict[str, int]] = {}
    for row in rows:
        side = row.first or row.second
        assert side is not None
        marks = found.setdefault(side.kind, dict.fromkeys(LEGEND, 0))
        marks[row.mark] += 1
    return [
        f"{kind}s: {', '.join(f'{number} {mark}' for mark, number in marks.items() if number)}"
        for kind, marks in found.items()
    ]


def _cells(row: Row, is_first: bool) -> Sequence[object]:
    side = row.first or row.second
    assert side is not None
    difference = ""
    if row.difference is not None:
        difference = "0" if row.difference.is_equal else _amount(row)
    return (
        f"{row.mark}{'>' * is_first}",
        side.kind,
        _both(*(side.type if side else None for side in (row.first, row.second))),
        _both(_shape(row.first), _shape(row.second)),
        _both(*(side.digest if side else None for side in (row.first, row.second))),
        row.first and row.first.operator,
        row.first and row.first.name,
        row.second and row.second.operator,
        row.second and row.second.name,
        difference,
    )


def _amount(row: Row) -> str:
    found = row.difference
    assert found is not None
    if found.what:
        return found.what
    if found.nonfinite:
        return f"{found.nonfinite} NaN or infinite"
    return f"{found.max_abs:.1e}" if found.dtype else f"{found.differing} differ"


def _both(first: str | None, second: str | None) -> str:
    """What both have, or ``float32→float16``."""
    if first is None or second is None or first == second:
        return first if first is not None else second or ""
    return f"{first}→{second}"


def _shape(side: Side | None) -> str | None:
    from ..dumps.models import shape_text

    return None if side is None else "" if side.shape is None else shape_text(side.shape)


def _worst(comparison: Comparison) -> str:
    """The largest difference of the outputs, in words."""
    found = [row for row in comparison.outputs if row.difference is not None and row.difference.dtype]
    if not found or not comparison.ok:
        return ""
    worst = max(found, key=lambda row: row.difference.relative if row.difference is not None else 0.0)
    assert worst.difference is not None
    if worst.difference.is_equal:
        return ": all outputs are equal"
    return (
        f": the output that differs most is {worst.name}, by {worst.difference.max_abs:.1e} at values up to "
        f"{worst.difference.scale:.2g}; rounding explains {worst.limit:.1e}"
    )


def _hint(arguments: argparse.Namespace, comparisons: Sequence[Comparison]) -> None:
    """The same comparison, run in another way."""
    words = ["compare", arguments.first, arguments.second]
    words += ["--inputs", *arguments.inputs] if arguments.inputs else []
    for item in arguments.dim:
        words += ["--dim", item]
    words += ["--seed", str(arguments.seed)] if arguments.seed else []
    words += ["--stage", arguments.stage] if arguments.stage != "onnx" else []
    if not all(item.ok for item in comparisons) and arguments.runtime == "ort":
        print(try_next(arguments, *words, "--runtime", "reference"))
    elif not arguments.optimize:
        words += ["--runtime", arguments.runtime] if arguments.runtime != "ort" else []
        words += ["--provider", arguments.provider] if arguments.provider is not None else []
        print(try_next(arguments, *words, "--optimize"))


def _as_json(comparison: Comparison) -> dict[str, object]:
    import dataclasses

    def row_as_json(row: Row) -> dict[str, object]:
        return {
            "mark": row.mark,
            "first": row.first and dataclasses.asdict(row.first),
            "second": row.second and dataclasses.asdict(row.second),
            "difference": row.difference and row.difference.as_json(),
            "limit": row.limit,
        }

    first = comparison.first_different
    return {
        "first": comparison.names[0],
        "second": comparison.names[1],
        "verdict": comparison.verdict,
        "ok": comparison.ok,
        "first_different": None if first is None else row_as_json(first),
        "notes": list(comparison.notes),
        "rounding_was_measured": comparison.measured,
        "rows": [row_as_json(row) for row in comparison.rows],
    }
