"""What a call of a captured graph returns and changes, compared with eager."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..dumps.blame import Cause, CauseKind
from ..graphs.layout import significant_strides
from ..numerics.exact import is_floating
from ..numerics.function_runs import is_strided, storage_of
from ..numerics.verdicts import Verdict, difference_in_kind, in_words
from .call_runs import CallRuns, Key, hashes, interpreted, is_value
from .captured_graph import CapturedGraph, EagerCall
from .rows import Blame, Finding
from .stage_graphs import place_of_result


def compare_call(
    captured: CapturedGraph,
    arguments: Sequence[object],
    before_call: Sequence[int | None],
    eager: EagerCall,
    results: Sequence[object],
) -> Finding:
    """Compares the layouts of the results, and the arguments after the call, with eager's.

    Results must be finite where eager's are: each piece of a program may be right on the numbers that it got, and the
    whole overflow where eager does not, as ``exp(x) / exp(x).sum()`` instead of a softmax.

    Args:
        captured: the graph.
        arguments: all its arguments, after the call.
        before_call: hashes of their memory before it.
        eager: the same call in eager, if it was made.
        results: of the call.
    """
    complaints: dict[Key, str] = {}
    if eager.results is not None:
        for key, value in enumerate(results):
            expected = eager.results.get(key)
            complaints[key] = _complaint(expected, value) or _not_finite(captured, arguments, key, expected, value)
    is_changed = [
        before is not None and before != after for before, after in zip(before_call, hashes(arguments), strict=True)
    ]
    tensors = [(j, value) for j, value in enumerate(arguments) if isinstance(value, torch.Tensor)]
    first = {storage_of(value): j for j, value in reversed(tensors) if before_call[j] is not None}
    for j in first.values() if captured.has_run else ():
        if is_changed[j] and j not in captured.written:
            complaints["argument", j] = "changed, and eager does not change it"
        elif j in eager.changed and not is_changed[j]:
            complaints["argument", j] = "not changed, and eager changes it"
    graph = captured.pre_grad.first
    places = {key: place_of_result(graph, key) for key, text in complaints.items() if text}
    wrong = [
        Blame(
            place.name,
            Cause(CauseKind.RESULT),
            source=place.source,
            module=place.module,
            difference=Verdict(complaints[key]),
        )
        for key, place in places.items()
    ]
    unknown = [item for item, found in zip(arguments, before_call, strict=True) if found is None]
    kinds = ", ".join(sorted({type(item).__name__ for item in unknown}))
    unchecked = [f"whether {len(unknown)} arguments are changed: {kinds} without memory to read"] if unknown else []
    return Finding(wrong=wrong, unchecked=list(filter(None, [eager.unchecked, *unchecked])))


def _complaint(expected: object, actual: object) -> str:
    """How a result differs from eager's, but for the numbers in tensors."""
    if isinstance(expected, torch.Tensor) != isinstance(actual, torch.Tensor):
        return f"{in_words(actual)} instead of {in_words(expected)}"
    complaint = difference_in_kind(actual, expected) if is_value(expected) and is_value(actual) else ""
    if complaint or not isinstance(expected, torch.Tensor) or not isinstance(actual, torch.Tensor):
        return complaint
    is_same = significant_strides(expected) == significant_strides(actual)
    return "" if is_same else f"strides {tuple(actual.stride())} instead of {tuple(expected.stride())}"


_SEEDS = 4
"""Runs of eager with random rounding, which show whether rounding makes results NaN."""


def _not_finite(
    captured: CapturedGraph, arguments: Sequence[object], key: int, expected: object, actual: object
) -> str:
    """Says where a result is NaN or infinite, and neither eager's is nor with other rounding."""
    if not is_floating(expected) or not is_floating(actual) or not is_strided(actual):
        return ""
    lost = ~actual.isfinite()
    if not bool(lost.any()):
        return ""
    lost &= expected.isfinite() & (expected.abs() < torch.finfo(expected.dtype).max / 2)
    if not bool(lost.any()):
        return ""
    runs = CallRuns(arguments, rounded_to=expected.dtype)
    for seed in range(_SEEDS):
        other = runs.run(interpreted(captured.pre_grad.first), seed, gradients=False).values.get(key)
        if isinstance(other, torch.Tensor) and other.shape == lost.shape:
            lost &= other.isfinite()
    count = int(lost.sum())
    return f"{count} of {lost.numel()} elements are NaN or infinite, and eager's are not" if count else ""
