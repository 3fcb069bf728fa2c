"""What was measured, as text for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any, TypeAlias

from ..common.text_table import text_table
from .case import DYNAMO_EAGER

Json: TypeAlias = "dict[str, Any]"

_WIDTH = 100


def table(found: Json) -> str:
    """All of it: the machine, a table for each case with what is wrong under it, geometric means, the overhead.

    Args:
        found: what ``measuring.Bench.run`` returned.
    """
    parts = [_machine(found)]
    parts += [_case(case, found["settings"]["backends"]) for case in found["cases"]]
    if len([case for case in found["cases"] if not case["message"]]) > 1:
        parts.append(_means(found))
    if found["overhead"]:
        parts.append(_overhead(found["overhead"]))
    return "\n\n".join(parts) + "\n"


def _machine(found: Json) -> str:
    machine = found["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    threads = machine["threads"]
    settings = found["settings"]
    return _wrapped(
        f"{machine['processor']}, {machine['cores']} cores, {threads} thread{'s' * (threads != 1)}; {versions}; "
        f"{settings['rounds']} rounds"
    )


def _case(case: Json, backends: Sequence[str]) -> str:
    if case["message"]:
        return _wrapped(f"{case['label']}: {case['message']}")
    title = f"{case['label']} ({case['parameters'] / 1e6:.3g} million parameters; inputs {'; '.join(case['sizes'])})"
    rows = case["rows"]
    base = backends[0]
    decodes = case["case"]["mode"] == "decode"
    ratios = {
        name: 1.0 if name == base and row["rounds"] else case["times_as_fast"][name].get(base)
        for name, row in rows.items()
    }
    columns = {
        "backend": list(rows),
        "tokens/s" if decodes else "ms a call": [_speed(row, decodes) for row in rows.values()],
        f"x {base}": [_number(ratio, 2) for ratio in ratios.values()],
        "first s": [_seconds(row["first_seconds"]) for row in rows.values()],
        "again s": [_seconds(row["again_seconds"]) for row in rows.values()],
        "peak MB": [_number(row["peak_bytes"], 0, 2**20) for row in rows.values()],
        "steady MB": [_number(row["steady_bytes"], 0, 2**20) for row in rows.values()],
        "outside us": [_number(row["microseconds_outside_sessions"], 0) for row in rows.values()],
        "result": [row["status"] for row in rows.values()],
    }
    for optional in ("again s", "outside us"):
        if set(columns[optional]) == {"-"}:
            del columns[optional]
    text = text_table(zip(*columns.values(), strict=True), list(columns))
    notes = [_wrapped(f"{name}: {row['status']}: {row['message']}") for name, row in rows.items() if row["message"]]
    return "\n".join([_wrapped(title), text, *notes])


def _speed(row: Json, decodes: bool) -> str:
    """Milliseconds, or tokens a second, with the distance between the quartiles."""
    if row["milliseconds"] is None:
        return "-"
    value = row["tokens_per_second"] if decodes else row["milliseconds"]
    decimals = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 4
    return f"{value:.{decimals}f} ± {row['spread'] / row['milliseconds'] * value:.{decimals}f}"


def _number(value: float | None, decimals: int, unit: float = 1) -> str:
    return "-" if value is None else f"{value / unit:.{decimals}f}"


def _seconds(value: float | None) -> str:
    return _number(value, 2 if value is None or value >= 0.1 else 4)


def _means(found: Json) -> str:
    """How many times as fast each backend is as each other: the geometric mean, and the worst case."""
    backends = [name for name in found["settings"]["backends"] if name in found["times_as_fast"]]
    rows = []
    for name in backends:
        cells = [name]
        for other in backends:
            item = found["times_as_fast"][name].get(other)
            cells.append("" if item is None else f"{item['geometric_mean']:.2f} ({item['worst']:.2f}) {item['cases']}")
        rows.append(cells)
    headers = ["times as fast as", *backends]
    text = text_table(rows, headers)
    return f"geometric mean (worst) and number of cases on which both are right\n{text}"


def _overhead(overhead: Json) -> str:
    lines = [f'overhead of a call: an MLP of two layers of 64, above torch.compile(backend="eager") ({DYNAMO_EAGER})']
    for name, item in overhead.items():
        if "message" in item:
            lines.append(_wrapped(f"  {name}: {item['message']}"))
        else:
            lines.append(f"  {name}: {item['microseconds']:+.1f} ± {item['standard_error']:.1f} us")
    return "\n".join(lines)


def _wrapped(text: str) -> str:
    return "\n".join(textwrap.wrap(text, _WIDTH, subsequent_indent="  ")) if text else ""
