"""Which operators a tool is applied to: names with wildcards, and environment variables."""

from __future__ import annotations

import difflib
import fnmatch
import logging
import os
import re
from collections.abc import Iterable, Sequence

logger = logging.getLogger(__name__)

Names = str | Iterable[str] | None


class Choice:
    """Decides about operators, and says in the log once for each what was decided.

    Args:
        tool: the tool's class name, ``OpCapture``; the variables are ``OP_CAPTURE_LIST`` and
            ``OP_CAPTURE_DISABLE_LIST``. ``OP_AUTO_COMPARE_LIST`` and ``OP_AUTOCOMPARE_LIST`` are the same.
        include: patterns of names, as ``fnmatch`` has them; ``None`` for all. A variable that is set takes its place.
        exclude: patterns of names that are left out whatever ``include`` says; a variable adds to them.
    """

    def __init__(self, tool: str, include: Names, exclude: Names) -> None:
        self._tool = tool
        chosen = _variable(tool, "LIST")
        self._include = _patterns(include if chosen is None else chosen)
        self._exclude = [*(_patterns(exclude) or []), *(_patterns(_variable(tool, "DISABLE_LIST")) or [])]
        self._decided: dict[str, bool] = {}

    def takes_name(self, name: str) -> bool:
        """Whether calls of an operator are taken, as far as its name tells."""
        decided = self._decided.get(name)
        if decided is None:
            included = self._include is None or _matches(name, self._include)
            decided = included and not _matches(name, self._exclude)
            self._decided[name] = decided
            logger.info("%s %s on %s", "apply" if decided else "skip", self._tool, name)
        return decided

    def names_query(self, name: str) -> bool:
        """Whether a function that computes nothing was asked for by name."""
        return self._include is not None and name in self._include

    def unmatched(self) -> list[str]:
        """The patterns of ``include`` that no operator had, with names that are near."""
        said = []
        for pattern in self._include or []:
            if not any(_matches(name, [pattern]) for name in self._decided):
                near = difflib.get_close_matches(pattern, list(self._decided), n=1)
                said.append(f"no operator {pattern!r} was called" + (f"; {near[0]!r} was" if near else ""))
        return said


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _patterns(names: Names) -> list[str] | None:
    if names is None:
        return None
    parts = names.split(",") if isinstance(names, str) else list(names)
    for part in parts:
        if not isinstance(part, str):
            raise TypeError(f"names of operators are strings such as 'torch.Tensor.add', not {part!r}")
    return [part.strip() for part in parts if part.strip()]


def _variable(tool: str, ending: str) -> str | None:
    words = re.findall("[A-Z][a-z]*", tool.removeprefix("Op"))
    names = (f"OP_{joined.upper()}_{ending}" for joined in ("_".join(words), "".join(words)))
    return next((os.environ[name] for name in names if name in os.environ), None)
