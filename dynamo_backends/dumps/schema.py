"""What ``manifest.json`` and the other files of JSON hold: checked once, where they are read, so that no reader has to.

A form is written as the JSON it describes: a type for a value, a range for an integer in it, ``None`` for ``null``, a
set for one of some strings, a tuple for one of several forms, a list for a list of one form, a dict for an object with
these names; one that ends in ``?`` may be missing, ``*`` stands for any other name. Names that are not described are
ignored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

from .blame import Kind

Form: TypeAlias = "type | range | None | frozenset[str] | tuple[Form, ...] | list[Form] | Mapping[str, Form]"

_ANY = object

DIRECTIONS = ("inference", "forward", "backward")  # what AOTAutograd makes of a graph, in the order it runs

_TEXT: Form = (None, str)
_INDEX: Form = (None, int)
_FIGURE: Form = (None, float)

_STAGES: Form = [{"name": str, "file": _TEXT, "nodes": int, "same_as": _TEXT}]

_PASSES: Form = [
    {
        **dict.fromkeys(("name", "undone", "note"), str),
        **dict.fromkeys(("fired", "nodes_before", "nodes_after"), int),
        "milliseconds": float,
        "matches": [str],
        "refusals": [{"node": str, "reason": str, "matched": int, "of": int, "pattern": str}],
    }
]

_SESSION: Form = {
    "providers": [str],
    "provider_options": [{"*": str}],
    "graph_optimization_level": frozenset(
        ("ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_LAYOUT", "ORT_ENABLE_ALL")
    ),
    "disabled_optimizers": [str],
    "threads": range(2**16),
    "config": {"*": str},
    "custom_op_libraries?": [str],
}

_REGION: Form = {
    "folder": str,
    **dict.fromkeys(("index", "nodes", "onnx_nodes", "onnx_nodes_optimized"), int),
    "passes": _PASSES,
    "session": _SESSION,
    "constants": [str],
    "stages": _STAGES,
}

_DISTANCE: Form = {
    "nonfinite": int,
    **dict.fromkeys(("max_abs", "max_rel", "rmse", "max_ulp", "scale", "share"), _FIGURE),
}

_BLAME: Form = {
    "kind": frozenset(kind.value for kind in Kind),
    **dict.fromkeys(("name", "value", "source", "module?", "code?"), str),
    "region": _INDEX,
}

_COST: Form = {
    "region_milliseconds": {"*": float},
    "pytorch_milliseconds": float,
    "crossing_tensors": int,
    "crossing_bytes": int,
}

GRAPH: Form = {
    "direction": frozenset(DIRECTIONS),
    **dict.fromkeys(("index", "nodes", "nodes_on_onnx", "runs", "compared_runs", "runs_at_other_sizes"), int),
    **dict.fromkeys(("folder", "reference", "status", "note"), str),
    "share_on_onnx": float,
    "regions": [_REGION],
    "in_pytorch": [{"node": str, "operator": str, "reason": str, "source": str}],
    "passes": _PASSES,
    "stages": _STAGES,
    "names": {"*": str},
    "seconds": {"*": float},
    "files_in?": _TEXT,
    "verdict": _TEXT,
    "blame": (None, _BLAME),
    "worst": (None, {"value": str, "onnx": _DISTANCE, "eager": (None, _DISTANCE)}),
    "unchecked": [str],
    "rescued?": {"*": str},
    "cost?": _COST,
}
"""An entry of ``graphs``."""

_PLACE: Mapping[str, Form] = {"file": str, "line": _INDEX}

DYNAMO_GRAPH: Form = {
    "index": int,
    "where": (None, {"function": str, "place": str, **_PLACE}),
    "end": (None, {"reason": str, **_PLACE}),
    "stages": _STAGES,
    "given_up": (str, bool),
    "not_compiled?": {"*": str},
    "passes": _PASSES,
}
"""An entry of ``dynamo_graphs``."""

MANIFEST: Form = {
    "schema_version": int,
    "started?": str,
    "forked_from?": _TEXT,
    "versions": {"*": str},
    "options": {"*": _ANY, "providers?": [(str, [_ANY])]},
    "counters": {"*": _ANY},
    "dynamo_graphs": [_ANY],
    "graphs": [_ANY],
}
"""``manifest.json``, but for its graphs: each is checked when it is read, so that a damaged one hides no others."""

_EXTENT: Form = (None, {"smallest": _FIGURE, "largest": _FIGURE, "nan": int, "infinite": int})

_ROW: Form = {
    **dict.fromkeys(("name", "operator", "module", "source", "user_name", "dtype"), str),
    "shape": [int],
    "region": _INDEX,
    "eager": (None, _DISTANCE),
    "inputs": [str],
    **dict.fromkeys(("is_output", "has_infinite_argument", "is_uninitialized"), bool),
    **dict.fromkeys(("eager_extent", "onnx_extent", "session_extent"), _EXTENT),
    "nonfinite_elements": [{"value": str}],
}

COMPARISON: Form = {"rows": [_ROW]}  # ``side_by_side.json``

_NODE: Form = {
    "kind": frozenset(("input", "node", "output")),
    **dict.fromkeys(("name", "operator", "type", "source", "user_name"), str),
    "arguments": [str],
}

STAGE: Form = {"nodes": [_NODE], "lines": {"*": str}}  # ``aten.json`` and those of the other stages that are FX graphs


def problem(value: object, form: Form, where: str = "") -> str:
    """Why a value that ``json`` read does not have a form, naming its first wrong key; ``""`` if it has it.

    For example ``graphs[0].runs is 'x', expected a whole number``. ``where`` is the key of the value.
    """
    if isinstance(form, tuple):
        if any(not problem(value, item, where) for item in form):
            return ""
        inner = next((item for item in form if isinstance(item, Mapping) and isinstance(value, dict)), None)
        return problem(value, inner, where) if inner else _unexpected(value, form, where)
    if isinstance(form, list) and isinstance(value, list):
        return _first(problem(item, form[0], f"{where}[{i}]") for i, item in enumerate(value))
    if isinstance(form, Mapping) and isinstance(value, dict):
        return _first(_problem_of_key(value, key, inner, where) for key, inner in form.items())
    return "" if _is_a(value, form) else _unexpected(value, form, where)


def _problem_of_key(value: dict[str, object], key: str, form: Form, where: str) -> str:
    name = key.removesuffix("?")
    if name == "*":
        return _first(problem(item, form, f"{where}[{other!r}]") for other, item in value.items())
    if name in value:
        return problem(value[name], form, f"{where}.{name}" if where else name)
    return "" if key.endswith("?") else f"{where or 'it'} has no {name!r}"


def _first(problems: Iterable[str]) -> str:
    return next(filter(None, problems), "")


def _is_a(value: object, form: Form) -> bool:
    if isinstance(form, range):
        return _is_a(value, int) and value in form
    if isinstance(form, frozenset):
        return isinstance(value, str) and value in form
    if form in (int, float):
        return isinstance(value, (int, form)) and not isinstance(value, bool)
    return isinstance(value, form) if isinstance(form, type) else form is None and value is None


def _unexpected(value: object, form: Form, where: str) -> str:
    said = repr(value)
    said = said if len(said) <= 40 else f"{said[:37]}..."
    return f"{where or 'it'} is {said}, expected {_in_words(form)}"


def _in_words(form: Form) -> str:
    if isinstance(form, tuple):
        return " or ".join(dict.fromkeys(_in_words(item) for item in form))
    if isinstance(form, frozenset):
        return f"one of {', '.join(sorted(form))}"
    if isinstance(form, range):
        return f"a whole number from {form[0]} to {form[-1]}"
    if isinstance(form, (list, Mapping)):
        return "a list" if isinstance(form, list) else "an object"
    words = {str: "text", int: "a whole number", float: "a number", bool: "true or false", None: "null"}
    return words[form]  # type: ignore[index]
