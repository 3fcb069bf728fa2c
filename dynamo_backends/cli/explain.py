"""``dynamo-backends explain``: the graphs that ``torch.compile`` makes of a model, and what ONNX Runtime would run."""

from __future__ import annotations

import argparse

from .common import MODEL_HELP, add_device_argument, add_json_argument, add_options_argument, print_json

DETAILS = (
    "Prints the graphs with their regions, each graph break with its reason and line, the operators on ONNX Runtime, "
    "those that would run in PyTorch with the reason and the remedy, the kernels of quantized products, and the number "
    "of guards. The model runs once, in PyTorch."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--train", action="store_true", help="training mode, with the backward graphs")
    parser.add_argument("--dynamic", action="store_true", help="symbolic shapes")
    parser.add_argument("--all", action="store_true", help="show all graphs, operators and hints instead of a few")
    add_device_argument(parser)
    add_options_argument(parser, "onnxrt")
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    from ..bench.case import Case, check_model

    check_model(arguments.model)
    import torch

    from ..bench.loading import errors_of_user, load
    from ..explanations.functions import explain
    from ..options import options_from_text

    loaded = load(Case(arguments.model, "train" if arguments.train else "inference", device=arguments.device))
    inputs = loaded.inputs[0]
    options = options_from_text(dict(arguments.options))
    with torch.set_grad_enabled(arguments.train):
        explained = explain(loaded.model, options=options, dynamic=arguments.dynamic or None)
        try:
            explanation = explained(*inputs.args, **inputs.kwargs)
        except Exception:
            with errors_of_user(f"MODEL {arguments.model!r} raised"):
                loaded.model(*inputs.args, **inputs.kwargs)  # if it fails in eager, too, the error is the user's
            raise
    if arguments.json:
        print_json(explanation.as_json())
    else:
        print(explanation.text(all_rows=arguments.all))
    return 0
