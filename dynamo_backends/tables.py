"""Tables of text that fit the terminal. Needs no PyTorch."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterable, Sequence

_GAP = 2
"""Spaces that tabulate puts between two columns."""

_NARROWEST = 8
"""Columns are cut to this width or that of their name; further only if the table does not fit otherwise."""

_LEAST = 5
"""Columns are cut to this width, and no further."""

_NUMBER = re.compile(r"[-+]?(\d+\.?\d*(e[-+]?\d+)?( ?%| m?s)?|nan|inf)|-|", re.IGNORECASE)
"""What is aligned at the right: numbers, with the units that our tables have, and the marks of nothing."""


def fit_table(rows: Sequence[Sequence[object]], headers: Sequence[str]) -> str:
    """A table without a newline at its end; on a terminal, cut to its width.

    The widest columns are cut first, cells with ``…`` at their end, paths at their start. Where not even columns of a
    few letters fit, each row becomes a paragraph, with a line for each cell.

    Args:
        rows: the cells; ``None`` is an empty one.
        headers: a name for each column.
    """
    import tabulate

    lines = [list(headers), *(["" if cell is None else str(cell) for cell in row] for row in rows)]
    aligned = ["right" if _is_of_numbers(line[i] for line in lines[1:]) else "left" for i in range(len(headers))]
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
        named = [max(len(header), _NARROWEST) for header in headers]
        cut = _cut(lines, named, width) or _cut(lines, [_LEAST] * len(headers), width)
        if cut is None:
            return _paragraphs(lines)
        lines = cut
    # As rows: tabulate's own header makes each column two wider than its name.
    rule = ["-" * width for width in _widths(lines)]
    table = [lines[0], rule, *lines[1:]]
    return tabulate.tabulate(table, tablefmt="plain", colalign=aligned, disable_numparse=True)


def _paragraphs(lines: Sequence[Sequence[str]]) -> str:
    headers, *rows = lines
    wide = max(map(len, headers))
    return "\n\n".join(
        "\n".join(f"{header:<{wide}}  {cell}".strip() for header, cell in zip(headers, row, strict=True) if cell)
        for row in rows
    )


def _is_of_numbers(cells: Iterable[str]) -> bool:
    return all(_NUMBER.fullmatch(cell) for cell in cells)


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
