"""The choice of operators by name: wildcards and environment variables."""

from __future__ import annotations

import fnmatch
import logging
import os
import re
from collections.abc import Iterable, Sequence

from ..common.suggestions import did_you_mean

logger = logging.getLogger(__name__)

Names = str | Iterable[str] | None


class OperatorFilter:
    """Accepts or rejects operators by name, and logs each decision once.

    Args:
        tool: the tool's class name. For ``OpAutoCompare`` the environment variables are ``OP_AUTO_COMPARE_LIST`` and
            ``OP_AUTO_COMPARE_DISABLE_LIST``, or with ``AUTOCOMPARE``.
        include: patterns as in ``fnmatch``; ``None`` for all. The first variable overrides it.
        exclude: patterns to reject. The second variable adds to them.
    """

    def __init__(self, tool: str, include: Names, exclude: Names) -> None:
        self._tool = tool
        override = _variable(tool, "LIST")
        self._include = _patterns(include if override is None else override)
        self._exclude = [*(_patterns(exclude) or []), *(_patterns(_variable(tool, "DISABLE_LIST")) or [])]
        self._decisions: dict[str, bool] = {}

    def accepts(self, name: str) -> bool:
        """Whether an operator is accepted."""
        decision = self._decisions.get(name)
        if decision is None:
            is_included = self._include is None or _matches(name, self._include)
            decision = self._decisions[name] = is_included and not _matches(name, self._exclude)
            logger.info("%s %s on %s", "apply" if decision else "skip", self._tool, name)
        return decision

    def includes_exactly(self, name: str) -> bool:
        """Whether ``include`` has a name without wildcards."""
        return self._include is not None and name in self._include

    def unmatched(self) -> list[str]:
        """A message for each pattern of ``include`` that matched no operator, with a similar name."""
        messages = []
        for pattern in self._include or []:
            if not any(_matches(name, [pattern]) for name in self._decisions):
                messages.append(f"no operator {pattern!r} was called.{did_you_mean(pattern, self._decisions)}")
        return messages


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _patterns(names: Names) -> list[str] | None:
    if names is None:
        return None
    parts = names.split(",") if isinstance(names, str) else list(names)
    for part in parts:
        if not isinstance(part, str):
            raise TypeError(f"operator names must be strings such as 'torch.Tensor.add', not {part!r}")
    return [part.strip() for part in parts if part.strip()]


def _variable(tool: str, ending: str) -> str | None:
    words = re.findall("[A-Z][a-z]*", tool.removeprefix("Op"))
    names = (f"OP_{joined.upper()}_{ending}" for joined in ("_".join(words), "".join(words)))
    return next((os.environ[name] for name in names if name in os.environ), None)
