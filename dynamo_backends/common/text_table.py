"""Tables of text: of files, and of the terminal. Needs no PyTorch."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterable, Sequence

_GAP = 2
"""Spaces between two columns."""

_NARROWEST = 5
"""Columns are cut to this width, and no further."""

_NUMBER = re.compile(r"[-+]?(\d+\.?\d*(e[-+]?\d+)?( ?%| m?s)?( ± \d+\.?\d*)?|nan|inf)|-|", re.IGNORECASE)
"""What is aligned at the right: numbers, with the units that our tables have, and the marks of nothing."""


def fit_table(rows: Iterable[Sequence[object]], headers: Sequence[str]) -> str:
    """``text_table``, on a terminal cut to its width: the widest columns first, paths at their start."""
    return text_table(rows, headers, shutil.get_terminal_size().columns if sys.stdout.isatty() else None)


def text_table(rows: Iterable[Sequence[object]], headers: Sequence[str], width: int | None = None) -> str:
    """A table without a newline at its end; columns of numbers are aligned at the right.

    Args:
        rows: the cells; ``None`` is an empty one.
        headers: a name for each column.
        width: to which it is cut; ``None`` for all of it.
    """
    cells = [["" if cell is None else str(cell).strip() for cell in row] for row in rows]
    columns = [list(column) for column in zip(headers, *cells, strict=True)]
    widths = [max(map(len, column)) for column in columns]
    while width is not None and sum(widths) + _GAP * (len(widths) - 1) > width and max(widths) > _NARROWEST:
        widths[widths.index(max(widths))] -= 1
    shown = [_shown(column, wide) for column, wide in zip(columns, widths, strict=True)]
    return "\n".join((" " * _GAP).join(line).rstrip() for line in zip(*shown, strict=True))


def _shown(column: Sequence[str], width: int) -> list[str]:
    """The lines of a column, of one width, with a rule under its name."""
    is_of_numbers = len(column) > 1 and all(map(_NUMBER.fullmatch, column[1:]))
    align = str.rjust if is_of_numbers else str.ljust
    name, *cells = [align(_shortened(cell, width), width) for cell in column]
    return [name, "-" * width, *cells]


def _shortened(text: str, width: int) -> str:
    if len(text) <= width:
        return text
    is_path = "/" in text and " " not in text
    return "…" + text[len(text) - width + 1 :] if is_path else text[: width - 1] + "…"
