"""``dynamo-backends trace``: the graph of a model by TorchScript, ``torch.export`` or Dynamo."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .common import MODEL_HELP, add_json_argument, print_json

DETAILS = (
    "No backend is involved. To see what this package makes of a model, use the command explain; for the graphs of a "
    "dump, show; for those of a running program, the backend fx_debug. Also prints the dtypes of the results. If the "
    "method fails, prints PyTorch's message and the methods that succeed. Exit code 1: the method, or the export to "
    "ONNX, fails."
)

METHODS = ("trace", "script", "export", "compile")
PRECISIONS = ("float32", "float16", "bfloat16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument(
        "--method",
        choices=METHODS,
        default="compile",
        help="torch.jit.trace, torch.jit.script, torch.export or Dynamo (default: %(default)s)",
    )
    parser.add_argument(
        "--precision",
        choices=PRECISIONS,
        default="float32",
        help="dtype of floating-point weights and inputs (default: %(default)s)",
    )
    parser.add_argument("--device", default="cpu", help="device: cpu, cuda, cuda:1 (default: %(default)s)")
    parser.add_argument("--onnx", type=Path, metavar="FILE", help="also write an ONNX file, unchecked; see export")
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    from ..bench.case import Case, check_model

    check_model(arguments.model)
    if arguments.onnx is not None and not arguments.onnx.resolve().parent.is_dir():
        raise ValueError(f"--onnx {arguments.onnx}: there is no folder {arguments.onnx.resolve().parent}")
    import torch
    from torch.utils import _pytree as pytree

    from ..bench.loading import errors_of_user, load
    from ..errors import ExportError
    from ..explanations.tracing import TracingError, dtypes_of, trace
    from ..onnx_files.export import export

    loaded = load(Case(arguments.model))
    dtype = getattr(torch, arguments.precision)

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(arguments.device, dtype if tensor.is_floating_point() else None)

    with (
        torch.no_grad(),
        errors_of_user(f"PyTorch cannot run MODEL {arguments.model!r} in {arguments.precision} on {arguments.device}:"),
    ):
        model = loaded.model.to(arguments.device, dtype)
        args, kwargs = pytree.tree_map_only(torch.Tensor, moved, (loaded.inputs[0].args, loaded.inputs[0].kwargs))
        model(*args, **kwargs)

    call = (args, kwargs)
    result: dict[str, Any] = {"model": arguments.model, "method": arguments.method}
    code = 0
    with torch.no_grad():
        try:
            traced = trace(arguments.method, model, call)
            result |= {"dtypes": dtypes_of(traced.run(*args, **kwargs)), "graphs": list(traced.graphs)}
        except TracingError as error:
            code = 1
            succeeding = [method for method in METHODS if method != arguments.method and _succeeds(method, model, call)]
            result |= {"error": str(error), "methods_that_can": succeeding}
    if arguments.onnx is not None:
        try:
            export(model, *args, path=arguments.onnx, kwargs=kwargs)
            result["onnx"] = str(arguments.onnx)
        except ExportError as error:
            code = 1
            result["onnx_error"] = str(error)
    if arguments.json:
        print_json(result)
    else:
        print(_text(result))
    return code


def _succeeds(method: str, model: Any, call: Any) -> bool:
    from ..explanations.tracing import TracingError, trace

    try:
        trace(method, model, call)
    except TracingError:
        return False
    return True


def _text(result: dict[str, Any]) -> str:
    lines = []
    for i, graph in enumerate(result.get("graphs", ())):
        if len(result["graphs"]) > 1:
            lines.append(f"graph {i}")
        lines += [graph.rstrip(), ""]
    if "dtypes" in result:
        lines.append(f"output dtype: {', '.join(dict.fromkeys(result['dtypes'])) or 'no tensor'}")
    if "error" in result:
        lines += [f"--method {result['method']} fails. PyTorch's message:", f"  {result['error']}"]
        succeeding = ", ".join(f"--method {method}" for method in result["methods_that_can"])
        lines.append(f"these succeed: {succeeding}" if succeeding else "no other method succeeds")
    if "onnx" in result:
        lines.append(f"wrote {result['onnx']}")
    if "onnx_error" in result:
        lines.append(f"no ONNX file was written: {result['onnx_error']}")
    return "\n".join(lines)
