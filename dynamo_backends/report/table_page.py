"""A page with one table, the results of an operator tool, in the style of the report."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

from .rendering import page, write_text

Cell = str | int | float | None


@dataclasses.dataclass(frozen=True)
class TablePage:
    """The values of the page; ``wrong`` are the indices of highlighted rows, ``notices`` are above the table."""

    title: str
    headers: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    wrong: Sequence[int] = ()
    notices: Sequence[str] = ()


def write_table_page(table: TablePage, path: Path) -> Path:
    """Writes the page, see ``write_text``."""
    rows = [
        [str(cell) if isinstance(cell, float) and not math.isfinite(cell) else cell for cell in row]
        for row in table.rows  # JSON has no NaN or infinity
    ]
    data = dataclasses.asdict(table) | {"rows": rows}
    text = page(table.title, ("elements.js", "grid.js", "table.js"), data, {}, has_graphs=False)
    return write_text(text, path)
