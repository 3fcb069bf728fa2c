"""The measurements as a bar chart: how many times as fast each backend is as the first, for each case."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from .case import UsageError
from .table import times_as_fast

INSTALL = "pip install 'matplotlib>=3.8'"


def check_plot(path: Path) -> None:
    """Checks before measuring that the chart can be written.

    Raises:
        UsageError: matplotlib is not installed or does not know the format, or the folder does not exist.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UsageError(f"--plot needs matplotlib, which is not installed: {INSTALL}")
    from matplotlib.figure import Figure

    formats = Figure().canvas.get_supported_filetypes()
    if path.suffix.lstrip(".") not in formats:
        raise UsageError(f"--plot {path}: expected a file that ends in .{', .'.join(sorted(formats))}")
    if not path.resolve().parent.is_dir():
        raise UsageError(f"--plot {path}: there is no folder {path.resolve().parent}")


def plot(results: dict[str, Any], path: Path) -> None:
    """Draws the chart.

    Args:
        results: what ``measuring.Bench.run`` returned.
        path: the file; its suffix is the format.
    """
    from matplotlib.figure import Figure

    base, *_ = backends = results["settings"]["backends"]
    cases = [case for case in results["cases"] if not case["message"]]
    height = 0.8 / len(backends)
    figure = Figure(figsize=(8, 1.2 + 0.3 * len(backends) * max(len(cases), 1)), layout="constrained")
    axes = figure.subplots()
    longest = 1.0
    for index, backend in enumerate(backends):
        positions = [row + (index - (len(backends) - 1) / 2) * height for row in range(len(cases))]
        lengths = [times_as_fast(case, backend, base) or 0.0 for case in cases]
        longest = max(longest, *lengths)
        bars = axes.barh(positions, lengths, height * 0.95, label=backend)
        labels = [_label(case["rows"][backend], length) for case, length in zip(cases, lengths, strict=True)]
        axes.bar_label(bars, labels, padding=3)
    axes.axvline(1, color="black", linewidth=0.5)
    axes.set_yticks(range(len(cases)), [case["label"] for case in cases])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.4 * longest)  # room for the labels
    axes.set_xlabel(f"times as fast as {base}")
    threads = results["machine"]["threads"]
    axes.set_title(f"{results['machine']['processor']}, {threads} thread{'s' * (threads != 1)}")
    figure.legend(loc="outside lower center", ncols=len(backends))
    figure.savefig(path)


def _label(row: dict[str, Any], length: float) -> str:
    """The ratio and the time; the status if there is no time."""
    if row["milliseconds"] is None:
        return str(row["status"])
    return f"{length:.2f} ({row['milliseconds']:.3g} ms)" if length else f"{row['milliseconds']:.3g} ms"
