"""What was measured, as a picture: bars of how many times as fast each backend is as the first, for each case."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from .case import UsageError

INSTALL = "pip install 'matplotlib>=3.8'"


def check_plot(path: Path) -> None:
    """Checks before anything is measured that a picture can be made of it.

    Raises:
        UsageError: matplotlib is not installed, it does not know the format, or the folder is not there.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(f"--plot needs matplotlib, which is not installed: {INSTALL}")
    from matplotlib.figure import Figure

    formats = Figure().canvas.get_supported_filetypes()
    if path.suffix.lstrip(".") not in formats:
        raise UsageError(f"--plot {path}: expected a file that ends in .{', .'.join(sorted(formats))}")
    if not path.resolve().parent.is_dir():
        raise UsageError(f"--plot {path}: there is no folder {path.resolve().parent}")


def plot(found: dict[str, Any], path: Path) -> None:
    """Draws and writes the picture.

    Args:
        found: what ``measuring.Bench.run`` returned.
        path: the file; its ending is the format.
    """
    from matplotlib.figure import Figure

    base, *_ = backends = found["settings"]["backends"]
    cases = [case for case in found["cases"] if not case["message"]]
    height = 0.8 / len(backends)
    figure = Figure(figsize=(8, 1.2 + 0.3 * len(backends) * max(len(cases), 1)), layout="constrained")
    axes = figure.subplots()
    longest = 1.0
    for index, backend in enumerate(backends):
        places = [row + (index - (len(backends) - 1) / 2) * height for row in range(len(cases))]
        bars = [_times_as_fast(case, backend, base) for case in cases]
        longest = max(longest, *bars)
        drawn = axes.barh(places, bars, height * 0.95, label=backend)
        axes.bar_label(drawn, [_label(case, backend, bar) for case, bar in zip(cases, bars, strict=True)], padding=3)
    axes.axvline(1, color="black", linewidth=0.5)
    axes.set_yticks(range(len(cases)), [case["label"] for case in cases])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.4 * longest)  # room for the labels
    axes.set_xlabel(f"times as fast as {base}")
    threads = found["machine"]["threads"]
    axes.set_title(f"{found['machine']['processor']}, {threads} thread{'s' * (threads != 1)}")
    figure.legend(loc="outside lower center", ncols=len(backends))
    figure.savefig(path)


def _times_as_fast(case: dict[str, Any], backend: str, base: str) -> float:
    if backend == base:
        return 1.0 if case["rows"][backend]["rounds"] else 0.0
    return case["times_as_fast"][backend].get(base) or 0.0


def _label(case: dict[str, Any], backend: str, bar: float) -> str:
    """The bar's length and the time; without a time, why."""
    row = case["rows"][backend]
    if row["milliseconds"] is None:
        return str(row["status"])
    return f"{bar:.2f} ({row['milliseconds']:.3g} ms)" if bar else f"{row['milliseconds']:.3g} ms"
