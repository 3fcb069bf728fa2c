"""One table as a page, in the style of the report: what an operator tool found."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

from .rendering import page, write_text

Cell = str | int | float | None


@dataclasses.dataclass(frozen=True)
class TablePage:
    """What the page shows.

    Attributes:
        title: a line.
        headers: of the columns.
        rows: their cells; numbers are sorted as such.
        wrong: the indices of rows that are marked.
        notices: said above the table.
    """

    title: str
    headers: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    wrong: Sequence[int] = ()
    notices: Sequence[str] = ()


def write_table_page(table: TablePage, path: Path) -> Path:
    """Writes the page, as ``write_text``."""
    rows = [
        [str(cell) if isinstance(cell, float) and not math.isfinite(cell) else cell for cell in row]
        for row in table.rows  # JSON has no NaN or infinity
    ]
    data = dataclasses.asdict(table) | {"rows": rows}
    text = page(table.title, ("elements.js", "grid.js", "table.js"), data, {}, has_graphs=False)
    return write_text(text, path)
