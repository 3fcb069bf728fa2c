"""Messages for names that are not known."""

from __future__ import annotations

import difflib
from collections.abc import Sequence


def unknown_name(kind: str, name: object, valid: Sequence[str]) -> str:
    """The message for a misspelt name: the name, the close matches, all that is valid."""
    close = difflib.get_close_matches(str(name), valid, n=3)
    hint = f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
    plural = kind + ("es" if kind.endswith("s") else "s")
    return f"unknown {kind} {name!r}.{hint} Valid {plural}: {', '.join(valid)}"
