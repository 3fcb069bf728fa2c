"""Messages for unknown names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


def unknown_name(kind: str, name: object, valid: Sequence[str]) -> str:
    """The message for an unknown name, with close matches and all valid names."""
    plural = kind + ("es" if kind.endswith("s") else "s")
    return f"unknown {kind} {name!r}.{did_you_mean(str(name), valid)} Valid {plural}: {', '.join(valid)}"


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """A sentence with close matches of a name; ``""`` if there are none."""
    names = list(valid)
    close = difflib.get_close_matches(name, names, n=3)
    close = close or [item for item in names if name and item.lower().startswith(name.lower())][:3]
    return f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
