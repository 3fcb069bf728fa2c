"""``dynamo-backends export``: a model as an ONNX file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..common.text_table import fit_table
from .common import MODEL_HELP, add_json_argument, count_text, print_json

DETAILS = (
    "The file has only operators of ONNX and ONNX Runtime. Prints the names, dtypes and sizes of inputs and outputs. "
    "Exit code 1: the model cannot be exported, or with --check, a result is wrong; then no file is written."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("file", metavar="FILE", type=Path, help="the ONNX file")
    parser.add_argument(
        "--dynamic",
        action="store_true",
        help="sizes that differ between inputs are dynamic; the function must return (model, inputs, inputs, …)",
    )
    parser.add_argument(
        "--check", action="store_true", help="compare results with eager and float64; with --dynamic, for all inputs"
    )
    parser.add_argument("--opset", type=int, metavar="N", help="the ONNX opset (default: that of the option opset)")
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    from ..bench.case import Case, check_model

    check_model(arguments.model)
    if not arguments.file.resolve().parent.is_dir():
        raise ValueError(f"{arguments.file}: there is no folder {arguments.file.resolve().parent}")

    from ..bench.exported import dynamic_shapes
    from ..bench.loading import load
    from ..errors import ExportError
    from ..onnx_files.export import export

    loaded = load(Case(arguments.model, dynamic=arguments.dynamic))
    first, *others = loaded.inputs
    check: bool | list[tuple[tuple[Any, ...], dict[str, Any]]] = arguments.check
    if arguments.check and others:
        check = [(inputs.args, inputs.kwargs) for inputs in others]
    try:
        exported = export(
            loaded.model,
            *first.args,
            path=arguments.file,
            kwargs=first.kwargs,
            dynamic_shapes=dynamic_shapes(loaded),
            opset_version=arguments.opset,
            check=check,
        )
    except ExportError as error:
        if arguments.json:
            print_json({"error": str(error)})
        else:
            print(f"no file was written: {error}")
        return 1
    if arguments.json:
        names = ("inputs", "outputs", "sizes", "conditions", "checked", "unchecked")
        print_json({"file": str(exported.path), **{name: getattr(exported, name) for name in names}})
        return 0
    rows = [(kind, *item) for kind in ("input", "output", "size") for item in getattr(exported, f"{kind}s").items()]
    rows += [("condition", condition, "") for condition in exported.conditions]
    print(fit_table(rows, ("", "name", "type or limits")))
    checked = f"right for {count_text(len(exported.checked), 'call')}" if exported.checked else "not checked"
    print(f"\nwrote {arguments.file}; its results are {checked}")
    for text in exported.unchecked:
        print(f"not checked: {text}")
    return 0
