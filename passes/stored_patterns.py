"""Patterns of our passes, traced ahead and kept in ``traced_patterns.json``: their operators, and how they are made.

::

    python -m passes.stored_patterns     # traces them anew and writes the file
"""

from __future__ import annotations

import functools
import json
import operator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch._inductor.pattern_matcher import PatternExpr

FILE = Path(__file__).with_name("traced_patterns.json")


@functools.cache
def _stored() -> dict[str, tuple[frozenset[str], str]]:
    return {name: (frozenset(operators), text) for name, (operators, text) in json.loads(FILE.read_text()).items()}


def function_name(pass_name: str, pattern_name: str) -> str:
    """What a pattern is called in the file."""
    return f"{pass_name}: {pattern_name}"


def operators(name: str) -> frozenset[str]:
    """The operators of a stored pattern, as text: all of them are in a graph it matches.

    Raises:
        KeyError: it is not stored; the file must be written anew.
    """
    return _stored()[name][0]


def build(name: str) -> PatternExpr:
    """A stored pattern as PyTorch's matcher takes it.

    Raises:
        KeyError: it is not stored; the file must be written anew.
    """
    from torch._inductor import pattern_matcher

    from .matching import CommutativeCall

    names: dict[str, object] = {
        "aten": torch.ops.aten,
        "prims": torch.ops.prims,
        "torch": torch,
        "operator": operator,
        "device": torch.device,
        "CommutativeCall": CommutativeCall,
    }
    for kind in ("CallFunction", "Ignored", "KeywordArg", "MultiOutputPattern"):
        names[kind] = getattr(pattern_matcher, kind)
    exec(_stored()[name][1], names)  # our own file: PyTorch's matcher writes patterns as Python
    return names["result"]


def as_text(patterns: dict[str, tuple[list[str], str]]) -> str:
    """The file's text."""
    return json.dumps(patterns, indent=1) + "\n"


def main() -> None:
    """Writes the file anew."""
    from .matching import stored_texts
    from .registry import all_passes

    FILE.write_text(as_text(stored_texts(all_passes())))


if __name__ == "__main__":
    from passes import stored_patterns  # under its own name, the one the passes know

    stored_patterns.main()
