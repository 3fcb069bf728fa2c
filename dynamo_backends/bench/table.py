"""What was measured, as text for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any, TypeAlias

from ..tables import text_table
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
    decodes = case["case"]["mode"] == "decode"
    with_sessions = any(row["microseconds_outside_sessions"] is not None for row in case["rows"].values())
    again = any(row["again_seconds"] is not None for row in case["rows"].values())
    base = backends[0]
    headers = ["backend", "tokens/s" if decodes else "ms a call", f"x {base}", "first s"]
    headers += ["again s"] * again + ["peak MB", "steady MB"] + ["outside us"] * with_sessions + ["result"]
    rows = []
    for name, row in case["rows"].items():
        ratio = 1.0 if name == base and row["rounds"] else case["times_as_fast"][name].get(base)
        cells = [name, _speed(row, decodes), _number(ratio, 2), _seconds(row["first_seconds"])]
        cells += [_seconds(row["again_seconds"])] * again
        cells += [_megabytes(row["peak_bytes"]), _megabytes(row["steady_bytes"])]
        cells += [_number(row["microseconds_outside_sessions"], 0)] * with_sessions + [row["status"]]
        rows.append(cells)
    text = text_table(rows, headers)
    told = ((name, row) for name, row in case["rows"].items() if row["message"])
    notes = [_wrapped(f"{name}: {row['status']}: {row['message']}") for name, row in told]
    return "\n".join([_wrapped(title), text, *notes])


def _speed(row: Json, decodes: bool) -> str:
    """Milliseconds, or tokens a second, with the distance between the quartiles."""
    if row["milliseconds"] is None:
        return "-"
    spread = row["spread"] / row["milliseconds"]
    value = row["tokens_per_second"] if decodes else row["milliseconds"]
    return f"{_digits(value)} ± {_digits(spread * value, of=value)}"


def _digits(value: float, *, of: float | None = None) -> str:
    """Three digits of a number, or as many decimals as another has then."""
    size = value if of is None else of
    return f"{value:.{0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 4}f}"


def _number(value: float | None, decimals: int) -> str:
    return "-" if value is None else f"{value:.{decimals}f}"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.{2 if value >= 0.1 else 4}f}"


def _megabytes(value: int | None) -> str:
    return "-" if value is None else f"{value / 2**20:.0f}"


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
