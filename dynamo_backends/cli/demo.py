"""``dynamo-backends demo``: runs a Llama of the bench in eager, with ``onnxrt`` and with ``onnx_debug``.

``onnx_debug`` compares each of its values with PyTorch's. ``onnxrt`` is right if its results are those of
``onnx_debug``; if they are not equal bit for bit, the bench's judge compares them with float64.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from ..common.garbage_collection import no_collection, only_new
from ..dumps.reading import read_run
from .ls import verdicts_text

MODEL = "llama-seed"
BATCH, LENGTH = 2, 1024

_STEPS = 2
"""Timed steps; with ``onnxrt``, another one before them compiles."""

DETAILS = "The Llama has one layer and random weights; nothing is downloaded. Exit code 1: a result is wrong."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-backward", action="store_true", help="run the forward only, without gradients")
    parser.add_argument(
        "--dynamic", action="store_true", help="use symbolic shapes, and run a second batch size on the same models"
    )
    parser.add_argument(
        "--length",
        type=_length,
        metavar="N",
        default=LENGTH,
        help="tokens per sequence, at most 2048 (default: %(default)s)",
    )


def _length(text: str) -> int:
    if not text.isdigit() or not 2 <= int(text) <= 2048:
        raise argparse.ArgumentTypeError(f"expected 2 to 2048 tokens, got {text!r}")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    with no_collection():
        from ..bench.case import check_model
        from ..debug.dump_folder import dump_folder
        from ..options import parse_options

    check_model(MODEL)
    dump_dir = parse_options().dump_dir
    folder = dump_folder(dump_dir).location
    if folder is None:  # a warning has said why
        raise OSError(f"the demo reads its verdicts from the dump, and {dump_dir!r} cannot be written")
    with only_new():  # what was imported stays
        failures = _run(arguments, folder)
    for failure in failures:
        print(f"WRONG  {failure}")
    return int(bool(failures))


def _run(arguments: argparse.Namespace, folder: Path) -> list[str]:
    """Runs all backends, prints the verdicts and times, and returns the failures."""
    import torch
    from torch._dynamo.utils import counters

    from ..bench.case import Case
    from ..bench.loading import Inputs, LoadedCase, load
    from ..bench.models import MODELS
    from ..bench.reference import CaseJudge
    from ..bench.steps import Steps

    backward = not arguments.no_backward
    case = Case(MODEL, "train" if backward else "inference", arguments.dynamic)
    batches = [BATCH, BATCH + 1] if arguments.dynamic else [BATCH]
    model = load(case).model
    inputs = [Inputs((), MODELS[MODEL].inputs((batch, arguments.length))) for batch in batches]
    steps = Steps(case, LoadedCase(model, inputs))

    def compiled(backend: str, **more: str) -> Callable[..., Any]:
        options = {"placement": "onnx", **more}
        return torch.compile(model, backend=backend, dynamic=arguments.dynamic or None, options=options)

    def seconds(forward: Callable[..., Any]) -> float:
        start = time.perf_counter()
        steps.calls(forward)[0]()
        return time.perf_counter() - start

    size = f"{sum(value.numel() for value in model.parameters()):,} parameters, {BATCH}x{arguments.length} tokens"
    print(f"Llama: {size}")
    with torch.set_grad_enabled(backward):
        with _progress("eager PyTorch"):
            eager = min(seconds(model) for _ in range(_STEPS))
        with _progress("onnxrt: compile and run"):
            onnxrt = compiled("onnxrt")
            first, *others = [seconds(onnxrt) for _ in range(1 + _STEPS)]
            compiles = counters["dynamo_backends"]["graphs"]
            actual = steps.results(onnxrt)
            is_compiled_again = counters["dynamo_backends"]["graphs"] != compiles
        with _progress("onnx_debug: compile, run, compare node by node"):
            known = steps.results(compiled("onnx_debug", compare="every"))
        wrong = "" if _are_equal(actual, known) else CaseJudge(steps).difference(actual)
    graphs = read_run(folder).graphs
    print(f"\n{verdicts_text(graphs)}\n\nGraphs are numbered as in the dump, after those that onnxrt compiled.\n")
    print(
        f"time of {'forward and backward' if backward else 'forward'}: eager {eager:.3f} s, onnxrt {min(others):.3f} s "
        f"(first call with compilation {first:.1f} s)"
    )
    if arguments.dynamic:
        print(f"batch sizes {' and '.join(map(str, batches))} ran on the same models")
    print(f"dump: {folder}")
    failures = [f"{graph.reference}: {graph.verdict}" for graph in graphs if graph.verdict != "ok"]
    if len(graphs) < 1 + backward:
        failures.append(f"{folder} has {len(graphs)} graphs of the demo, expected {1 + backward}")
    if is_compiled_again:
        failures.append(f"onnxrt: batch size {batches[-1]} was compiled again")
    return failures + [f"onnxrt: {wrong}"] * bool(wrong)


def _are_equal(first: object, other: object) -> bool:
    """Whether results are equal bit for bit."""
    import torch
    from torch.utils._pytree import tree_leaves

    from ..numerics.arrays import same_elements

    leaves = zip(tree_leaves(first), tree_leaves(other), strict=True)
    return all(same_elements(one, two) if isinstance(one, torch.Tensor) else one == two for one, two in leaves)


@contextlib.contextmanager
def _progress(what: str) -> Iterator[None]:
    """Prints what is running to standard error."""
    print(what, file=sys.stderr)
    with Console(stderr=True).status(what):
        yield
