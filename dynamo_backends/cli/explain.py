"""``dynamo-backends explain``: what ``torch.compile`` makes of a model, and what of it would run on ONNX Runtime."""

from __future__ import annotations

import argparse

from .common import add_json_argument, add_options_argument, print_json
from .trace import add_model_argument

DESCRIPTION = (
    "Says what torch.compile makes of a model: graphs, graph breaks with the reason and the line, operators, guards; "
    "and of each graph what would run on ONNX Runtime, what not, why, and what would change that. The model runs once, "
    "in PyTorch."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the subcommand's arguments."""
    add_model_argument(parser)
    parser.add_argument("--train", action="store_true", help="the model in training, with its backward graphs")
    parser.add_argument("--dynamic", action="store_true", help="with symbolic sizes")
    add_options_argument(parser, "onnxrt")
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Prints the explanation. Exit code 2 for a wrong argument."""
    from ..bench.case import Case, check_model

    check_model(arguments.model)
    from ..bench.loading import load
    from ..explanations.functions import explain
    from ..options import options_from_text

    loaded = load(Case(arguments.model, "train" if arguments.train else "inference"))
    inputs = loaded.inputs[0]
    import torch

    with torch.set_grad_enabled(arguments.train):
        explained = explain(
            loaded.model, options=options_from_text(dict(arguments.options)), dynamic=arguments.dynamic or None
        )
        explanation = explained(*inputs.args, **inputs.kwargs)
    if arguments.json:
        print_json(explanation.as_json())
    else:
        print(explanation)
    return 0
