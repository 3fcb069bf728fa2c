"""``dynamo-backends trace``: one model as TorchScript, ``torch.export`` and Dynamo see it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .common import add_json_argument, print_json

DESCRIPTION = (
    "Takes a model through torch.jit.trace, torch.jit.script, torch.export or torch.compile, prints its graph and the "
    "dtypes of its results. Where a way does not lead to a graph, it says what PyTorch said, and which ways do. Exit "
    "code 1: it does not."
)

METHODS = ("trace", "script", "export", "compile")
PRECISIONS = ("float32", "float16", "bfloat16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the subcommand's arguments."""
    add_model_argument(parser)
    parser.add_argument("--method", choices=METHODS, default="compile", help="the way (default: %(default)s)")
    parser.add_argument(
        "--precision",
        choices=PRECISIONS,
        default="float32",
        help="of the weights and inputs that are floating-point numbers (default: %(default)s)",
    )
    parser.add_argument(
        "--device", default="cpu", help="where the model runs: cpu, cuda, cuda:1 (default: %(default)s)"
    )
    parser.add_argument("--onnx", type=Path, metavar="FILE", help="save what our exporter makes of the model")
    add_json_argument(parser)


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    """Adds ``MODEL``, as in ``bench``."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a name that bench --help lists, file.py:function or package.module:function; the function returns "
        "(model, inputs): a tensor, a tuple of positional or a dict of keyword arguments",
    )


def run(arguments: argparse.Namespace) -> int:
    """Prints the graphs. Exit code 1 if the way does not lead to one, or to no ONNX file; 2 for a wrong argument."""
    from ..bench.case import Case, check_model

    check_model(arguments.model)
    if arguments.onnx is not None and not arguments.onnx.resolve().parent.is_dir():
        raise ValueError(f"--onnx {arguments.onnx}: there is no folder {arguments.onnx.resolve().parent}")
    import torch

    from ..bench.loading import load
    from ..errors import TranslationError
    from ..explanations.tracing import TracingError, dtypes_of, export_model, said, trace
    from ..options import parse_options

    loaded = load(Case(arguments.model))
    try:
        model, args, kwargs = (
            moved(value, arguments.device, arguments.precision)
            for value in (loaded.model, loaded.inputs[0].args, loaded.inputs[0].kwargs)
        )
        with torch.no_grad():
            model(*args, **kwargs)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(
            f"PyTorch does not run {arguments.model} in {arguments.precision} on {arguments.device}: {said(error)}"
        ) from error

    call = (args, kwargs)
    found: dict[str, Any] = {"model": arguments.model, "method": arguments.method}
    code = 0
    with torch.no_grad():
        try:
            traced = trace(arguments.method, model, call)
            found |= {"dtypes": dtypes_of(traced.run(*args, **kwargs)), "graphs": list(traced.graphs)}
        except TracingError as error:
            code = 1
            others = [method for method in METHODS if method != arguments.method and _leads(method, model, call)]
            found |= {"error": str(error), "methods_that_can": others}
    if arguments.onnx is not None:
        try:
            export_model(model, call, arguments.onnx, parse_options())
            found["onnx"] = str(arguments.onnx)
        except TranslationError as error:
            code = 1
            found["onnx_error"] = str(error)
    if arguments.json:
        print_json(found)
    else:
        print(_text(found))
    return code


def moved(value: Any, device: str, precision: str) -> Any:
    """A module, or arguments, with its floating-point tensors in another precision, and all on another device."""
    import torch
    from torch.utils import _pytree as pytree

    dtype = getattr(torch, precision)
    if isinstance(value, torch.nn.Module):
        return value.to(device, dtype)

    def move(leaf: torch.Tensor) -> torch.Tensor:
        return leaf.to(device, dtype if leaf.is_floating_point() else None)

    return pytree.tree_map_only(torch.Tensor, move, value)


def _leads(method: str, model: Any, call: Any) -> bool:
    from ..explanations.tracing import TracingError, trace

    try:
        trace(method, model, call)
    except TracingError:
        return False
    return True


def _text(found: dict[str, Any]) -> str:
    lines = []
    for i, graph in enumerate(found.get("graphs", ())):
        if len(found["graphs"]) > 1:
            lines.append(f"graph {i}")
        lines += [graph.rstrip(), ""]
    if "dtypes" in found:
        lines.append(f"output dtype: {', '.join(dict.fromkeys(found['dtypes'])) or 'no tensor'}")
    if "error" in found:
        ways = ", ".join(f"--method {method}" for method in found["methods_that_can"])
        lines += [f"--method {found['method']} does not lead to a graph. PyTorch says:", f"  {found['error']}"]
        lines.append(f"these do: {ways}" if found["methods_that_can"] else "no other way does")
    if "onnx" in found:
        lines.append(f"wrote {found['onnx']}")
    if "onnx_error" in found:
        lines.append(f"no ONNX file was written: {found['onnx_error']}")
    return "\n".join(lines)
