"""Finds SiLU that is written out, and writes it as one operator.

Rule: ``x * sigmoid(x)`` becomes ``aten.silu(x)``. Not in half precisions, where each of the two steps rounds, and not
if the sigmoid has another user.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..patterns import Pattern, pattern_pass

if TYPE_CHECKING:
    from torch._inductor.pattern_matcher import Match


def _search(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)


def _replacement(x: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten.silu.default(x)


def _refusal(match: Match) -> str | None:
    dtype = match.kwargs["x"].meta["val"].dtype
    return None if dtype in (torch.float32, torch.float64) else f"it is computed in {dtype}, where each step rounds"


def _patterns() -> list[Pattern]:
    return [Pattern("silu", _search, _replacement, [torch.empty(2, 3)], check=_refusal, is_stored=True)]


PASS = pattern_pass("post_grad.find_silu", "Writes x * sigmoid(x) as SiLU.", _patterns)
