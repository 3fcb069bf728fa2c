"""What changed from one stage to the next, to read: under each line of the user's code its nodes, before and after.

::

    @@ model.py:12  return torch.relu(x) * 2
    -mul: f32[4][1] = aten.mul.Tensor(relu, 2)
    +mul: f32[4] = Mul(relu, val_0)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..dumps.stage_diff import Change, StageDiff


def change_lines(diffs: Iterable[StageDiff]) -> list[str]:
    """The lines of what changed; ``@@`` begins a group, then ``-``, ``+`` or a space before each line.

    Args:
        diffs: one, or one for each region.

    Returns:
        Nothing if nothing changed.
    """
    return [line for diff in diffs for line in _of_one(diff)]


def _of_one(diff: StageDiff) -> Iterator[str]:
    prefix = "" if diff.region is None else f"region_{diff.region}  "
    group = None
    for change in sorted(diff.changes, key=lambda change: change.node.kind != "node"):  # inputs last
        header = f"@@ {prefix}{_where(change)}".rstrip()
        if header != group:
            yield header
            group = header
        note = f"  ({change.note})" if change.note else ""
        if change.before is not None:
            yield f"-{change.before.text}{note if change.after is None else ''}"
        if change.after is not None:
            yield f"+{change.after.text}{note}"


def _where(change: Change) -> str:
    node = change.node
    if node.kind != "node":
        return {"output": "what it returns", "input": "inputs"}.get(node.kind, "initializers")
    code = next((item.code for item in (change.after, change.before) if item is not None and item.code), "")
    return f"{change.source}  {code}".strip() or "of no line"
