"""Finds softmax that is written out, and writes it as one operator.

Rule: ``exp(x - amax(x, d)) / sum(exp(x - amax(x, d)), d)`` over one dimension becomes ``aten._softmax(x, d, False)``.
Not if the maximum and the sum are over other dimensions or do not keep them, and not in half precisions, where each
step rounds.

Infinities: a row of -inf alone is NaN either way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..patterns import Pattern, pattern_pass

if TYPE_CHECKING:
    from torch._inductor.pattern_matcher import Match


def _search(x: torch.Tensor) -> torch.Tensor:
    exponentials = torch.exp(x - x.amax(-1, keepdim=True))
    return exponentials / exponentials.sum(-1, keepdim=True)


def _replacement(x: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten._softmax.default(x, -1, False)


def _search_last_of_four(x: torch.Tensor) -> torch.Tensor:
    exponentials = torch.exp(x - x.amax(3, keepdim=True))
    return exponentials / exponentials.sum(3, keepdim=True)


def _refusal(match: Match) -> str | None:
    dtype = match.kwargs["x"].meta["val"].dtype
    return None if dtype in (torch.float32, torch.float64) else f"it is computed in {dtype}, where each step rounds"


def _refusal_last_of_four(match: Match) -> str | None:
    if match.kwargs["x"].meta["val"].ndim != 4:
        return "dimension 3 is not the last"
    return _refusal(match)


def _patterns() -> list[Pattern]:
    last = Pattern("last", _search, _replacement, [torch.empty(2, 3)], check=_refusal, is_stored=True)
    of_four = Pattern(
        "last_of_four",
        _search_last_of_four,
        _replacement,
        [torch.empty(2, 3, 4, 5)],
        check=_refusal_last_of_four,
        is_stored=True,
    )
    return [last, of_four]


PASS = pattern_pass("post_grad.find_softmax", "Writes softmax that is written out as one operator.", _patterns)
