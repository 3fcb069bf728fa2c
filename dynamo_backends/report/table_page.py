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
    """Writes the page; the file is whole or not there.

    Returns:
        Its path.

    Raises:
        OSError: it cannot be written.
    """
    data = dataclasses.asdict(table) | {"rows": [[_finite(cell) for cell in row] for row in table.rows]}
    text = page(table.title, ("elements.js", "grid.js", "table.js"), data, {}, has_graphs=False)
    return write_text(text, path)


def _finite(cell: Cell) -> Cell:
    """JSON has no NaN or infinity."""
    return str(cell) if isinstance(cell, float) and not math.isfinite(cell) else cell
