"""The measurements as text for a terminal."""

from __future__ import annotations

import textwrap
from typing import Any, TypeAlias

from ..common.text_table import text_table

Json: TypeAlias = "dict[str, Any]"

_WIDTH = 100


def table(results: Json) -> str:
    """The machine, a table for each case with its errors below, geometric means.

    Args:
        results: what ``measuring.Bench.run`` returned.
    """
    baseline = results["settings"]["backends"][0]
    parts = [_machine(results), *(_case(case, baseline) for case in results["cases"])]
    if len([case for case in results["cases"] if not case["message"]]) > 1:
        rows = [
            (name, f"{item['geometric_mean']:.2f}", f"{item['worst']:.2f}", item["worst_case"], item["cases"])
            for name, item in results["times_as_fast"].items()
        ]
        parts.append(text_table(rows, ["backend", f"x {baseline}, geometric mean", "worst", "of", "cases"]))
    return "\n\n".join(parts) + "\n"


def _machine(results: Json) -> str:
    machine, rounds = results["machine"], results["settings"]["rounds"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    threads = machine["threads"]
    return _wrapped(
        f"{machine['processor']}, {machine['cores']} cores, {threads} thread{'s' * (threads != 1)}; {versions}; "
        f"{rounds} rounds"
    )


def _case(case: Json, baseline: str) -> str:
    if case["message"]:
        return _wrapped(f"{case['label']}: {case['message']}")
    title = f"{case['label']} ({case['parameters'] / 1e6:.3g} million parameters; inputs {'; '.join(case['sizes'])})"
    rows = case["rows"].values()
    columns = {
        "backend": list(case["rows"]),
        "tokens/s" if case["case"]["mode"] == "decode" else "ms a call": list(map(_speed, rows)),
        "prefill/s": [_number(row["prefill_tokens_per_second"], 0) for row in rows],
        "decode/s": [_number(row["decode_tokens_per_second"], 0) for row in rows],
        f"x {baseline}": [_number(row["times_as_fast"], 2) for row in rows],
        "first s": [_seconds(row["first_seconds"]) for row in rows],
        "again s": [_seconds(row["again_seconds"]) for row in rows],
        "peak MB": [_number(row["peak_bytes"], 0, 2**20) for row in rows],
        "steady MB": [_number(row["steady_bytes"], 0, 2**20) for row in rows],
        "GPU MB": [_number(row["gpu_bytes"], 0, 2**20) for row in rows],
        "result": [row["status"] for row in rows],
    }
    for name in ("again s", "prefill/s", "decode/s", "GPU MB"):
        if set(columns[name]) == {"-"}:
            del columns[name]
    notes = [f"{name}: {row['status']}: {row['message']}" for name, row in case["rows"].items() if row["message"]]
    text = text_table(zip(*columns.values(), strict=True), list(columns))
    return "\n".join([_wrapped(title), text, *map(_wrapped, notes)])


def _speed(row: Json) -> str:
    """Milliseconds or tokens per second, with the interquartile range."""
    if row["milliseconds"] is None:
        return "-"
    value = row["tokens_per_second"] or row["milliseconds"]
    decimals = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 4
    return f"{value:.{decimals}f} ± {row['spread'] / row['milliseconds'] * value:.{decimals}f}"


def _number(value: float | None, decimals: int, unit: float = 1) -> str:
    return "-" if value is None else f"{value / unit:.{decimals}f}"


def _seconds(value: float | None) -> str:
    return _number(value, 2 if value is None or value >= 0.1 else 4)


def _wrapped(text: str) -> str:
    return "\n".join(textwrap.wrap(text, _WIDTH, subsequent_indent="  ")) if text else ""
