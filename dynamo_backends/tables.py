"""Tables of text: of files, and of the terminal. Needs no PyTorch."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterable, Sequence

_GAP = 2
"""Spaces between two columns."""

_NARROWEST = 8
"""Columns are cut to this width or that of their name; further only if the table does not fit otherwise."""

_LEAST = 5
"""Columns are cut to this width, and no further."""

_NUMBER = re.compile(r"[-+]?(\d+\.?\d*(e[-+]?\d+)?( ?%| m?s)?( ± \d+\.?\d*)?|nan|inf)|-|", re.IGNORECASE)
"""What is aligned at the right: numbers, with the units that our tables have, and the marks of nothing."""


def fit_table(rows: Iterable[Sequence[object]], headers: Sequence[str]) -> str:
    """``text_table`` on a terminal cut to its width.

    The widest columns are cut first, cells with ``…`` at their end, paths at their start. Where not even columns of a
    few letters fit, each row becomes a paragraph, with a line for each cell.
    """
    return _table(rows, headers, shutil.get_terminal_size().columns if sys.stdout.isatty() else None)


def text_table(rows: Iterable[Sequence[object]], headers: Sequence[str]) -> str:
    """A table without a newline at its end; columns of numbers are aligned at the right.

    Args:
        rows: the cells; ``None`` is an empty one.
        headers: a name for each column.
    """
    return _table(rows, headers, None)


def _table(rows: Iterable[Sequence[object]], headers: Sequence[str], width: int | None) -> str:
    lines = [list(headers), *(["" if cell is None else str(cell).strip() for cell in row] for row in rows)]
    of_numbers = [all(map(_NUMBER.fullmatch, column)) for column in zip(*lines[1:], strict=True)]
    if width is not None:
        named = [max(len(header), _NARROWEST) for header in headers]
        cut = _cut(lines, named, width) or _cut(lines, [_LEAST] * len(headers), width)
        if cut is None:
            return _paragraphs(lines)
        lines = cut
    widths = _widths(lines)
    lines.insert(1, ["-" * width for width in widths])
    aligned = [str.rjust if is_number else str.ljust for is_number in of_numbers or [False] * len(headers)]
    return "\n".join(
        (" " * _GAP).join(map(lambda align, cell, width: align(cell, width), aligned, line, widths)).rstrip()
        for line in lines
    )


def _paragraphs(lines: Sequence[Sequence[str]]) -> str:
    headers, *rows = lines
    wide = max(map(len, headers))
    return "\n\n".join(
        "\n".join(f"{header:<{wide}}  {cell}".strip() for header, cell in zip(headers, row, strict=True) if cell)
        for row in rows
    )


def _cut(lines: Sequence[Sequence[str]], least: Sequence[int], width: int) -> list[list[str]] | None:
    """The lines of a table, of which the longest cells are shortened until it fits; ``None`` if no column can give
    more."""
    widths = _widths(lines)
    while sum(widths) + _GAP * (len(widths) - 1) > width:
        i = max(range(len(widths)), key=lambda i: (widths[i] > least[i], widths[i]))
        if widths[i] <= least[i]:
            return None
        widths[i] -= 1
    return [[_shortened(cell, width) for cell, width in zip(line, widths, strict=True)] for line in lines]


def _widths(lines: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*lines, strict=True)]


def _shortened(text: str, width: int) -> str:
    if len(text) <= width:
        return text
    is_path = "/" in text and " " not in text
    return "…" + text[len(text) - width + 1 :] if is_path else text[: width - 1] + "…"
