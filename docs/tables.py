"""The tables of the documentation that are made from the code, so that they stay true.

``python docs/tables.py`` prints them; ``conf.py`` puts them into the pages, a test holds the README to them.
"""

from __future__ import annotations

import dataclasses

from dynamo_backends.options import Options
from passes.manager import all_passes


def options_table() -> str:
    """Every option of the backends: name, default, what it does; Markdown."""
    rows = [(f"`{item.name}`", f"`{item.default!r}`", item.metadata["help"]) for item in dataclasses.fields(Options)]
    return _table(("option", "default", "what it does"), rows)


def passes_table() -> str:
    """Every pass in the order it runs: name with its stage in front, one sentence; Markdown."""
    return _table(("pass", "what it does"), [(f"`{item.name}`", item.sentence) for item in all_passes()])


def _table(headers: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [headers, tuple("---" for _ in headers), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines) + "\n"


if __name__ == "__main__":
    print(options_table(), passes_table(), sep="\n")
