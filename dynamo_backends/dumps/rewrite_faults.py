"""What is wrong although each node is right by itself: one of our ONNX passes, or one of ONNX Runtime's optimizers."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np

from ..runtime.optimizers import OPTIMIZERS
from .bisection import RIGHT, WRONG, Bisection, Search, inputs_of
from .blame import Cause, Kind
from .candidates import Feeds
from .cut_folder import Piece
from .cutting import Parts
from .differences import NOTHING, Difference, distance
from .exact import exact_outputs
from .execution import Settings
from .failing import Diverges
from .reducing import smallest

_LEVELS = ("ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_ALL")


def wrong_pass(
    search: Search, before: Parts, known: Feeds, after: Parts, known_after: Feeds, settings: Settings
) -> Bisection | None:
    """The part of the model after our passes that is not what it was before, between values that both have.

    Args:
        search: is told what was tried and found.
        before, known: the model before our passes, and the values of all its tensors.
        after, known_after: the same after them.
        settings: of the session that ran.
    """
    found = search.found
    what = "our ONNX passes: model.optimized.onnx against model.onnx, ONNX Runtime's optimizers off in both"
    both = [name for name in after.tensors() if name in known and name in before.by_name]
    suspicious = [name for name in both if differ(known_after[name], known[name])]
    right = set(both).difference(suspicious)
    for name in suspicious:
        old, new = before.cut(before.before([name], right), known, outputs=[name]), after.before([name], right)
        model = after.cut(new, {**known_after, **{n: known[n] for n in right}}, outputs=[name])
        if old is None or model is None:
            continue
        target, reference = _reference(known[name], exact_outputs(old, inputs_of(old, known), search.runner), name)
        error = distance(known_after[name], target)
        if known_after[name].dtype == known[name].dtype and error.is_explained(reference):
            continue
        search.tried(what, WRONG, name, error.error)
        name_of_pass = search.blamed.name if search.blamed.kind == Kind.PASS else ""
        found.place, found.value = "ONNX pass", name
        found.cause = str(Cause(Kind.PASS, name_of_pass))
        disabled = name_of_pass or "onnx.*"
        found.advice.append(
            f"to confirm, run again with options={{'passes': {{'disable': [{disabled!r}]}}}}; "
            "before.onnx in the folder is what the pass was given"
        )
        if name_of_pass:
            found.advice.append(f"dynamo-backends passes {search.run.folder} --why {name_of_pass}")
        inputs = inputs_of(model, {**known_after, **known})
        returned = {name: known[name]}
        text = f"{found.cause}: model.onnx is what it made of before.onnx, whose result is in test_data_set_0."
        shown, allowed = search.showing(model, inputs, returned, settings), {name: error.limit(reference)}
        piece = Piece(model, shown, inputs, returned, allowed, "differs", text)
        return search.finish(piece, len(after.nodes), before=old)
    search.tried(what, RIGHT)
    return None


def wrong_optimizer(search: Search, path: Path, parts: Parts, known: Feeds, settings: Settings) -> Bisection | None:
    """The smallest part that ONNX Runtime's optimizers make wrong; ``None`` if nothing is.

    Args:
        search: is told what was tried and found.
        path: the model after our passes.
        parts: the same.
        known: right values of all its tensors, nothing optimized.
        settings: of the session that ran.
    """
    found, runner = search.found, search.runner
    check = Diverges(parts, known, settings, runner)
    start = next((candidate for candidate in _starts(parts, found.value) if check(candidate)), None)
    if start is None:
        return None
    for level in _LEVELS:
        wrong = Diverges(parts, known, dataclasses.replace(settings, level=level), runner).wrong(start)
        name = max(wrong, key=lambda name: wrong[name], default="")
        text = f"ONNX Runtime's optimizers, {level.removeprefix('ORT_ENABLE_').lower()}"
        search.tried(text, WRONG if wrong else RIGHT, name, wrong.get(name))
    kept = search.reduce(search.memory(path, "diverges", settings.as_json()), start, check)
    outputs = list(check.wrong(kept))
    outputs = smallest(outputs, lambda names: bool(check.wrong(kept, names))) if len(outputs) > 1 else outputs
    constants = not check.wrong(kept, outputs, constants=False)
    wrong = check.wrong(kept, outputs, constants=not constants) or check.wrong(kept, outputs)
    model = parts.cut(kept, known, outputs=outputs, constants=parts.weights if constants else ())
    if model is None or not wrong:
        return None
    found.place, found.value = "ONNX Runtime optimizer", outputs[0]
    found.cause = _optimizer(search, parts, known, settings, kept, outputs)
    found.advice.append("ONNX Runtime's optimizers change the result: report it to onnxruntime with the folder")
    feeds = inputs_of(model, known)
    exact = exact_outputs(model, feeds, runner)
    right = {name: known[name] for name in outputs}
    allowed = {name: distance(array, array).limit(_reference(array, exact, name)[1]) for name, array in right.items()}
    text = f"{found.cause} of ONNX Runtime changes the result; the right one, nothing optimized, is in test_data_set_0."
    return search.finish(Piece(model, settings, feeds, right, allowed, "differs", text), len(parts.nodes))


def _starts(parts: Parts, value: str) -> Sequence[Sequence[int]]:
    """What is tried to begin with: all; what the value is made of; its neighbours, more and more of them."""
    found: list[Sequence[int]] = [range(len(parts.nodes))]
    if value in parts.by_name:
        found.append(parts.before([value]))
        at, reach = parts.by_name[value], 2
        while reach < len(parts.nodes):
            found.append(range(max(0, at - reach), min(len(parts.nodes), at + reach)))
            reach *= 4
    return found


def _optimizer(
    search: Search, parts: Parts, known: Feeds, settings: Settings, kept: Sequence[int], outputs: Collection[str]
) -> str:
    """``the optimizer NAME``, or where no single one is to blame ``no single optimizer``."""

    def is_right(disabled: Sequence[str]) -> bool:
        names = (*settings.disabled_optimizers, *disabled)
        check = Diverges(parts, known, dataclasses.replace(settings, disabled_optimizers=names), search.runner)
        return not check(kept, outputs)

    suspects = list(OPTIMIZERS)
    if not is_right(suspects):
        return "no single optimizer"
    while len(suspects) > 1:
        half = suspects[: len(suspects) // 2]
        suspects = half if is_right(half) else suspects[len(half) :]
    return f"the optimizer {suspects[0]}" if is_right(suspects) else "no single optimizer"


def _reference(known: np.ndarray, exact: Feeds | None, name: str) -> tuple[np.ndarray, Difference]:
    """What a value is compared with, and the known one's own distance to it: float64 where that is finite."""
    found = None if exact is None else exact[name]
    if found is None or found.dtype != np.float64 or not np.isfinite(found).all():
        return known, NOTHING
    return found, distance(known, found)


def differ(value: np.ndarray, known: np.ndarray) -> bool:
    """Whether two values differ in dtype or by more than rounding."""
    return value.dtype != known.dtype or not distance(value, known).is_explained(NOTHING)
