"""What ``manifest.json`` and the other files of JSON hold: checked once, where they are read, so that no reader has to.

A form is written as the JSON it describes: a type for a value, a range for an integer in it, ``None`` for ``null``, a
set for one of some strings, a tuple for one of several forms, a list for a list of one form, a dict for an object with
these names; one that ends in ``?`` may be missing, ``*`` stands for any other name. Names that are not described are
let be.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from .blame import Kind

Form: TypeAlias = "type | range | None | frozenset[str] | tuple[Form, ...] | list[Form] | Mapping[str, Form]"

_ANY = object

LEVELS = ("ORT_DISABLE_ALL", "ORT_ENABLE_BASIC", "ORT_ENABLE_EXTENDED", "ORT_ENABLE_LAYOUT", "ORT_ENABLE_ALL")
"""ONNX Runtime's graph optimizations."""

DIRECTIONS = ("inference", "forward", "backward")
"""What AOTAutograd makes of a graph, in the order it runs."""

_TEXT: Form = (None, str)

_PLACE: Mapping[str, Form] = {"file": str, "line": (None, int)}

_STAGE: Form = {"name": str, "file": _TEXT, "nodes": int, "same_as": _TEXT}

_PASS: Form = {
    "name": str,
    "fired": int,
    "nodes_before": int,
    "nodes_after": int,
    "milliseconds": float,
    "matches": [str],
    "refusals": [{"node": str, "reason": str, "matched": int, "of": int, "pattern": str}],
    "undone": str,
    "note": str,
}

_SESSION: Form = {
    "providers": [str],
    "provider_options": [{"*": str}],
    "graph_optimization_level": frozenset(LEVELS),
    "disabled_optimizers": [str],
    "threads": range(2**16),
    "config": {"*": str},
    "custom_op_libraries?": [str],
}

_REGION: Form = {
    "index": int,
    "folder": str,
    "nodes": int,
    "onnx_nodes": int,
    "onnx_nodes_optimized": int,
    "passes": [_PASS],
    "session": _SESSION,
    "constants": [str],
    "stages": [_STAGE],
}

_FIGURE = (None, float)

_DISTANCE: Form = {
    "max_abs": _FIGURE,
    "max_rel": _FIGURE,
    "rmse": _FIGURE,
    "max_ulp": _FIGURE,
    "nonfinite": int,
    "scale": _FIGURE,
}

GRAPH: Form = {
    "index": int,
    "direction": frozenset(DIRECTIONS),
    "folder": str,
    "nodes": int,
    "nodes_on_onnx": int,
    "share_on_onnx": float,
    "regions": [_REGION],
    "in_pytorch": [{"node": str, "operator": str, "reason": str, "source": str}],
    "passes": [_PASS],
    "stages": [_STAGE],
    "names": {"*": str},
    "seconds": {"*": float},
    "runs": int,
    "compared_runs": int,
    "runs_at_other_sizes": int,
    "compared_sizes": [{"*": _ANY}],
    "sizes": {"*": _ANY},
    "files_in?": _TEXT,
    "reference": str,
    "status": str,
    "verdict": _TEXT,
    "note": str,
    "blame": (
        None,
        {
            "kind": frozenset(kind.value for kind in Kind),
            "name": str,
            "value": str,
            "region": (None, int),
            "source": str,
        },
    ),
    "worst": (None, {"value": str, "onnx": _DISTANCE, "eager": (None, _DISTANCE)}),
    "unchecked": [str],
    "cost?": {
        "region_milliseconds": {"*": float},
        "pytorch_milliseconds": float,
        "crossing_tensors": int,
        "crossing_bytes": int,
    },
}
"""An entry of ``graphs``."""

DYNAMO_GRAPH: Form = {
    "index": int,
    "where": (None, {"function": str, "place": str, **_PLACE}),
    "end": (None, {"reason": str, **_PLACE}),
    "stages": [_STAGE],
    "given_up": (str, bool),
    "not_compiled?": {"*": str},
    "passes": [_PASS],
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
"""``manifest.json``, but for its graphs, each of which is checked when it is read: one that is damaged is not all."""

_EXTENT: Form = (None, {"smallest": _FIGURE, "largest": _FIGURE, "nan": int, "infinite": int})

_ROW: Form = {
    "name": str,
    "operator": str,
    "module": str,
    "source": str,
    "user_name": str,
    "dtype": str,
    "shape": [int],
    "region": (None, int),
    "is_output": bool,
    "eager": (None, _DISTANCE),
    "inputs": [str],
    "has_infinite_argument": bool,
    "is_uninitialized": bool,
    "eager_extent": _EXTENT,
    "onnx_extent": _EXTENT,
    "session_extent": _EXTENT,
    "nonfinite_elements": [{"value": str}],
}

COMPARISON: Form = {"rows": [_ROW]}
"""``side_by_side.json``."""

STAGE: Form = {
    "nodes": [
        {
            "kind": frozenset(("input", "node", "output")),
            **dict.fromkeys(("name", "operator", "type", "source", "user_name"), str),
            "arguments": [str],
        }
    ],
    "lines": {"*": str},
}
"""``aten.json`` and those of the other stages that are FX graphs."""


def problem(value: object, form: Form, where: str = "") -> str:
    """Why a value does not have a form, naming the first key: ``graphs[0].runs is 'x', expected a whole number``.

    Args:
        value: what ``json`` read.
        form: what it should be.
        where: its key; ``""`` for the whole file.

    Returns:
        ``""`` if it has the form.
    """
    if isinstance(form, tuple):
        if any(not problem(value, item, where) for item in form):
            return ""
        inner = [item for item in form if isinstance(item, Mapping) and isinstance(value, dict)]
        return problem(value, inner[0], where) if inner else _unexpected(value, form, where)
    if isinstance(form, list) and isinstance(value, list):
        found = (problem(item, form[0], f"{where}[{i}]") for i, item in enumerate(value))
        return next(filter(None, found), "")
    if isinstance(form, Mapping) and isinstance(value, dict):
        for key, inner_form in form.items():
            name = key.removesuffix("?")
            if name == "*":
                others = (problem(item, inner_form, f"{where}[{key!r}]") for key, item in value.items())
                said = next(filter(None, others), "")
            elif name in value:
                said = problem(value[name], inner_form, f"{where}.{name}" if where else name)
            else:
                said = "" if key.endswith("?") else f"{where or 'it'} has no {name!r}"
            if said:
                return said
        return ""
    return "" if _is_a(value, form) else _unexpected(value, form, where)


def _is_a(value: object, form: Form) -> bool:
    if form is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if isinstance(form, type):
        return isinstance(value, form) and (form is not int or not isinstance(value, bool))
    if isinstance(form, range):
        return _is_a(value, int) and value in form
    if isinstance(form, frozenset):
        return isinstance(value, str) and value in form
    return form is None and value is None


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
    if isinstance(form, list):
        return "a list"
    if isinstance(form, Mapping):
        return "an object"
    words = {str: "text", int: "a whole number", float: "a number", bool: "true or false", None: "null"}
    return words[form]  # type: ignore[index]
