"""Text tables for files and terminals. Needs no PyTorch."""

from __future__ import annotations

import collections
import itertools
import re
import shutil
import sys
from collections.abc import Iterable, Sequence

_GAP = 2
"""Spaces between columns."""

_MIN_WIDTH = 5
"""Columns are not cut below this width."""

_NUMBER = re.compile(r"[-+]?(\d+\.?\d*(e[-+]?\d+)?( ?%| m?s)?( ± \d+\.?\d*)?|nan|inf)|-|", re.IGNORECASE)
"""Cells that are aligned right: numbers, with units, and marks of empty cells."""


def fit_table(rows: Iterable[Sequence[object]], headers: Sequence[str]) -> str:
    """``text_table``, cut to the width of the terminal: the widest columns first, paths at their start."""
    return text_table(rows, headers, shutil.get_terminal_size().columns if sys.stdout.isatty() else None)


def text_table(rows: Iterable[Sequence[object]], headers: Sequence[str], width: int | None = None) -> str:
    """A table without a trailing newline; columns of numbers are aligned right.

    Args:
        rows: the cells; ``None`` is an empty cell.
        headers: the names of the columns.
        width: the maximal width; ``None`` for no limit.
    """
    cells = [["" if cell is None else str(cell).strip() for cell in row] for row in rows]
    columns = [list(column) for column in zip(headers, *cells, strict=True)]
    widths = [max(map(len, column)) for column in columns]
    while width is not None and sum(widths) + _GAP * (len(widths) - 1) > width and max(widths) > _MIN_WIDTH:
        widths[widths.index(max(widths))] -= 1
    shown = [_shown(column, wide) for column, wide in zip(columns, widths, strict=True)]
    return "\n".join((" " * _GAP).join(line).rstrip() for line in zip(*shown, strict=True))


def listed(names: Iterable[str], most: int = 6) -> str:
    """The first names, each once with its number, and how many follow: ``Exp x2, Neg and 3 more``."""
    counts = collections.Counter(names)
    shown = dict(itertools.islice(counts.items(), most))
    more = counts.total() - sum(shown.values())
    text = ", ".join(f"{name} x{number}" if number > 1 else name for name, number in shown.items())
    return f"{text} and {more} more" if more else text


def _shown(column: Sequence[str], width: int) -> list[str]:
    """The lines of a column, padded to its width, with a rule under the header."""
    is_numeric = len(column) > 1 and all(map(_NUMBER.fullmatch, column[1:]))
    align = str.rjust if is_numeric else str.ljust
    name, *cells = [align(_shortened(cell, width), width) for cell in column]
    return [name, "-" * width, *cells]


def _shortened(text: str, width: int) -> str:
    if len(text) <= width:
        return text
    is_path = "/" in text and " " not in text
    return "…" + text[len(text) - width + 1 :] if is_path else text[: width - 1] + "…"
