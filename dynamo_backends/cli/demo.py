"""``dynamo-backends demo``: runs a Llama in eager, with ``onnxrt`` and with ``onnx_debug``, and compares the results.

``onnx_debug`` compares each of its values with PyTorch's. ``onnxrt`` is right if its results are those of
``onnx_debug``; those that are not equal bit for bit are compared with float64.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from ..common.garbage_collection import no_collection, only_new
from ..dumps.reading import read_run
from .ls import verdicts_text

if TYPE_CHECKING:
    import torch

    Results = Mapping[str, torch.Tensor]
    Arguments = tuple[torch.Tensor, ...]

PARTS = ("attention", "decoder", "model")
LENGTH = 1024
LENGTH_MIXED = 256
"""Shorter, because bfloat16 products are slow on a CPU without instructions for them."""

_STEPS = 2
"""Timed steps; with ``onnxrt``, another one before them compiles."""

DETAILS = "The Llama has one layer and random weights; nothing is downloaded. Exit code 1: a result is wrong."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--part", choices=PARTS, default="model", help="the part to run (default: %(default)s)")
    parser.add_argument("--no-backward", action="store_true", help="run the forward only, without gradients")
    parser.add_argument("--mixed", action="store_true", help="run under autocast to bfloat16")
    parser.add_argument(
        "--dynamic", action="store_true", help="use symbolic shapes, and run a second batch size on the same models"
    )
    parser.add_argument(
        "--length",
        type=_length,
        metavar="N",
        help=f"tokens per sequence, at most 2048 (default: {LENGTH}, with --mixed {LENGTH_MIXED})",
    )


def _length(text: str) -> int:
    if not text.isdigit() or not 2 <= int(text) <= 2048:
        raise argparse.ArgumentTypeError(f"expected 2 to 2048 tokens, got {text!r}")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    with no_collection():
        from ..debug.dump_folder import dump_folder
        from ..options import parse_options

    dump_dir = parse_options().dump_dir
    if importlib.util.find_spec("transformers") is None:
        raise ValueError("the demo needs transformers, which is not installed: pip install 'transformers>=5'")
    folder = dump_folder(dump_dir).location
    if folder is None:  # a warning has said why
        raise OSError(f"the demo reads its verdicts from the dump, and {dump_dir!r} cannot be written")
    with no_collection():
        from ..bench import llama
    with only_new():  # what was imported stays
        failures = _run(arguments, folder, llama.build(arguments.part))
    for failure in failures:
        print(f"WRONG  {failure}")
    return int(bool(failures))


def _run(arguments: argparse.Namespace, folder: Path, module: torch.nn.Module) -> list[str]:
    """Runs all backends, prints the verdicts and times, and returns the failures."""
    import torch
    from torch._dynamo.utils import counters

    from ..bench import llama

    backward, mixed = not arguments.no_backward, arguments.mixed
    length = arguments.length or (LENGTH_MIXED if mixed else LENGTH)
    batches = [llama.BATCH, llama.BATCH + 1] if arguments.dynamic else [llama.BATCH]
    inputs = [llama.inputs(arguments.part, batch, length) for batch in batches]

    def compiled(backend: str, **more: str) -> Callable[..., torch.Tensor]:
        options = {"placement": "onnx", **more}
        return torch.compile(module, backend=backend, dynamic=arguments.dynamic or None, options=options)

    def step(call: Callable[..., torch.Tensor], args: Arguments) -> tuple[Results, float]:
        start = time.perf_counter()
        results = llama.step(module, call, args, backward=backward, mixed=mixed)
        return results, time.perf_counter() - start

    size = f"{sum(value.numel() for value in module.parameters()):,} parameters, {llama.BATCH}x{length} tokens"
    print(f"Llama, {arguments.part}: {size}")
    with _progress("eager PyTorch"):
        eager = [step(module, inputs[0])[1] for _ in range(_STEPS)]
    with _progress("onnxrt: compile and run"):
        onnxrt = compiled("onnxrt")
        runs = [step(onnxrt, inputs[0]) for _ in range(1 + _STEPS)]
        compiles = counters["dynamo_backends"]["graphs"]
        actual = [runs[-1][0], *(step(onnxrt, args)[0] for args in inputs[1:])]
    is_compiled_again = counters["dynamo_backends"]["graphs"] != compiles
    with _progress("onnx_debug: compile, run, compare node by node"):
        debug = compiled("onnx_debug", compare="every")
        expected = [step(debug, args)[0] for args in inputs]

    graphs = read_run(folder).graphs
    print(f"\n{verdicts_text(graphs)}\n\nGraphs are numbered as in the dump, after those that onnxrt compiled.\n")
    print(
        f"time of {'forward and backward' if backward else 'forward'}: eager {min(eager):.3f} s, onnxrt "
        f"{min(taken for _, taken in runs[1:]):.3f} s (first call with compilation {runs[0][1]:.1f} s)"
    )
    if arguments.dynamic:
        print(f"batch sizes {' and '.join(map(str, batches))} ran on the same models")
    print(f"dump: {folder}")

    failures = [f"{graph.reference}: {graph.verdict}" for graph in graphs if graph.verdict != "ok"]
    if len(graphs) < 1 + backward:
        failures.append(f"{folder} has {len(graphs)} graphs of the demo, expected {1 + backward}")
    if is_compiled_again:
        failures.append(f"onnxrt: batch size {batches[-1]} was compiled again")
    for args, ours, known in zip(inputs, actual, expected, strict=True):
        failures += _wrong_results(module, args, ours, known, torch.bfloat16 if mixed else torch.float32)
    return failures


def _wrong_results(
    module: torch.nn.Module, args: Arguments, ours: Results, known: Results, rounded_to: torch.dtype
) -> list[str]:
    """The results of ``onnxrt`` that differ from those of ``onnx_debug`` by more than rounding to a dtype."""
    from ..bench import llama
    from ..numerics.function_runs import Recording, Rerun
    from ..numerics.whole_graph import ResultCheck

    wide = functools.cache(lambda: copy.deepcopy(module).double())
    wide_args = tuple(arg.double() if arg.is_floating_point() else arg for arg in args)

    def run(seed: int | None) -> Results:
        with contextlib.nullcontext() if seed is None else Rerun(Recording(), seed, otherwise=rounded_to):
            return llama.step(wide(), wide(), wide_args, backward=len(known) > 1, mixed=False)

    terms = max(parameter.numel() for parameter in module.parameters())
    check = ResultCheck(known, run, terms=lambda: terms, coarser=rounded_to)
    messages = {name: str(check.judge(name, ours.get(name))) for name in known}
    return [f"onnxrt: {name}: {message}" for name, message in messages.items() if message]


@contextlib.contextmanager
def _progress(what: str) -> Iterator[None]:
    """Prints what is running to standard error."""
    print(what, file=sys.stderr)
    with Console(stderr=True).status(what):
        yield
