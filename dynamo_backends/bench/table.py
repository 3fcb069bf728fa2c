"""The measurements as text for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any, TypeAlias

from ..common.text_table import text_table

Json: TypeAlias = "dict[str, Any]"

_WIDTH = 100


def table(results: Json) -> str:
    """The machine, a table for each case with its errors below, geometric means.

    Args:
        results: what ``measuring.Bench.run`` returned.
    """
    parts = [_machine(results)]
    parts += [_case(case, results["settings"]["backends"]) for case in results["cases"]]
    if len([case for case in results["cases"] if not case["message"]]) > 1:
        parts.append(_means(results))
    return "\n\n".join(parts) + "\n"


def _machine(results: Json) -> str:
    machine, rounds = results["machine"], results["settings"]["rounds"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    threads = machine["threads"]
    return _wrapped(
        f"{machine['processor']}, {machine['cores']} cores, {threads} thread{'s' * (threads != 1)}; {versions}; "
        f"{rounds} rounds"
    )


def _case(case: Json, backends: Sequence[str]) -> str:
    if case["message"]:
        return _wrapped(f"{case['label']}: {case['message']}")
    about = f"{case['parameters'] / 1e6:.3g} million parameters; inputs {'; '.join(case['sizes'])}"
    if case["bytes_quantized"] is not None:
        before, after = (case[name] / 2**20 for name in ("bytes_of_weights", "bytes_quantized"))
        about += f"; weights {before:.3g} MB, quantized {after:.3g} MB"
    title = f"{case['label']} ({about})"
    base, decodes, rows = backends[0], case["case"]["mode"] == "decode", case["rows"].values()
    columns = {
        "backend": list(case["rows"]),
        "tokens/s" if decodes else "ms a call": [_speed(row, decodes) for row in rows],
        f"x {base}": [_number(times_as_fast(case, backend, base), 2) for backend in case["rows"]],
        "error": ["-" if row["relative_error"] is None else f"{row['relative_error']:.2g}" for row in rows],
        "first s": [_seconds(row["first_seconds"]) for row in rows],
        "again s": [_seconds(row["again_seconds"]) for row in rows],
        "saved s": [_seconds(row["saved_seconds"]) for row in rows],
        "peak MB": [_number(row["peak_bytes"], 0, 2**20) for row in rows],
        "steady MB": [_number(row["steady_bytes"], 0, 2**20) for row in rows],
        "outside us": [_number(row["microseconds_outside_sessions"], 0) for row in rows],
        "result": [row["status"] for row in rows],
    }
    for optional in ("error", "again s", "saved s", "outside us"):
        if set(columns[optional]) == {"-"}:
            del columns[optional]
    text = text_table(zip(*columns.values(), strict=True), list(columns))
    notes = [
        _wrapped(f"{name}: {row['status']}: {row['message']}") for name, row in case["rows"].items() if row["message"]
    ]
    return "\n".join([_wrapped(title), text, *notes])


def times_as_fast(case: Json, backend: str, base: str) -> float | None:
    """How many times as fast a backend is as the baseline on a case; ``None`` if one of them has no time."""
    if backend == base:
        return 1.0 if case["rows"][backend]["rounds"] else None
    ratio: float | None = case["times_as_fast"][backend].get(base)
    return ratio


def _speed(row: Json, decodes: bool) -> str:
    """Milliseconds or tokens per second, with the interquartile range."""
    if row["milliseconds"] is None:
        return "-"
    value = row["tokens_per_second"] if decodes else row["milliseconds"]
    decimals = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 4
    return f"{value:.{decimals}f} ± {row['spread'] / row['milliseconds'] * value:.{decimals}f}"


def _number(value: float | None, decimals: int, unit: float = 1) -> str:
    return "-" if value is None else f"{value / unit:.{decimals}f}"


def _seconds(value: float | None) -> str:
    return _number(value, 2 if value is None or value >= 0.1 else 4)


def _means(results: Json) -> str:
    """How many times as fast each backend is as each other: the geometric mean, the worst case, the number of cases."""
    means = results["times_as_fast"]
    backends = [name for name in results["settings"]["backends"] if name in means]

    def cell(item: Json | None) -> str:
        return f"{item['geometric_mean']:.2f} ({item['worst']:.2f}) {item['cases']}" if item else ""

    rows = [[name, *(cell(means[name].get(other)) for other in backends)] for name in backends]
    text = text_table(rows, ["times as fast as", *backends])
    return f"geometric mean (worst) and number of cases on which both are right\n{text}"


def _wrapped(text: str) -> str:
    return "\n".join(textwrap.wrap(text, _WIDTH, subsequent_indent="  ")) if text else ""
