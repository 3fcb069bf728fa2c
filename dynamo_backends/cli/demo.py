"""``dynamo-backends demo``: runs a Llama in eager, with ``onnxrt`` and with ``onnx_debug``, and compares the results.

``onnx_debug`` compares each of its values with PyTorch's. ``onnxrt`` is right if its results are those of
``onnx_debug``, bit for bit; if they are not, they are compared with eager's and with float64.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from ..dumps.reading import read_run
from .ls import verdicts_text

if TYPE_CHECKING:
    import torch

    from ..options import Options

    Results = Mapping[str, torch.Tensor]

PARTS = ("attention", "decoder", "model")
LENGTH = 1024
LENGTH_MIXED = 256
"""Shorter, because bfloat16 products are slow on a CPU without instructions for them."""

INSTALL = "pip install 'transformers>=5'"

_REPEATS = 3
"""Timed steps after the first, which compiles."""

DETAILS = "The Llama has one layer and random weights; nothing is downloaded. Exit code 1: a graph is not ok."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--part", choices=PARTS, default="model", help="the part to run (default: %(default)s)")
    parser.add_argument("--no-backward", action="store_true", help="run the forward only, without gradients")
    parser.add_argument("--mixed", action="store_true", help="run under autocast to bfloat16")
    parser.add_argument(
        "--dynamic", action="store_true", help="use symbolic shapes, and run a second batch size on the same models"
    )
    parser.add_argument("--opset", type=int, metavar="N", help="ONNX opset of the models (default: the backends')")
    parser.add_argument(
        "--length",
        type=_length,
        metavar="N",
        help=f"tokens per sequence, at most 2048 (default: {LENGTH}, with --mixed {LENGTH_MIXED})",
    )
    parser.add_argument("--dump-dir", metavar="DIR", help="folder of the dump (default: the backends')")


def _length(text: str) -> int:
    if not text.isdigit() or not 2 <= int(text) <= 2048:
        raise argparse.ArgumentTypeError(f"expected 2 to 2048 tokens, got {text!r}")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    from ..debug.dump_folder import dump_folder
    from ..options import parse_options

    given = {"opset": arguments.opset, "dump_dir": arguments.dump_dir}
    options = parse_options({name: value for name, value in given.items() if value is not None})
    if importlib.util.find_spec("transformers") is None:
        raise ValueError(f"the demo needs transformers, which is not installed: {INSTALL}")
    folder = dump_folder(options.dump_dir)
    if folder.location is None:  # a warning has said why
        raise OSError(f"the demo reads its verdicts from the dump, and {options.dump_dir!r} cannot be written")
    failures = _run(arguments, options, folder.location)
    for failure in failures:
        print(f"WRONG  {failure}")
    return int(bool(failures))


def _run(arguments: argparse.Namespace, options: Options, folder: Path) -> list[str]:
    """Runs all backends, prints the verdicts and times, and returns the failures."""
    import torch
    from torch._dynamo.utils import counters

    from ..bench import llama

    part, backward, dynamic = arguments.part, not arguments.no_backward, arguments.dynamic
    length = arguments.length or (LENGTH_MIXED if arguments.mixed else LENGTH)
    module = llama.build(part)
    batches = [llama.BATCH, llama.BATCH + 1] if dynamic else [llama.BATCH]
    args = [llama.inputs(part, batch, length) for batch in batches]
    settings = {"placement": "onnx", "opset": options.opset, "dump_dir": options.dump_dir}

    def compiled(backend: str, **more: str) -> Callable[..., torch.Tensor]:
        return torch.compile(module, backend=backend, dynamic=dynamic or None, options={**settings, **more})

    def step(call: Callable[..., torch.Tensor], args: tuple[torch.Tensor, ...]) -> Results:
        return llama.step(module, call, args, backward=backward, mixed=arguments.mixed)

    def timed(call: Callable[..., torch.Tensor], args: tuple[torch.Tensor, ...]) -> tuple[Results, list[float]]:
        seconds = []
        for _ in range(1 + _REPEATS):
            start = time.perf_counter()
            results = step(call, args)
            seconds.append(time.perf_counter() - start)
        return results, seconds

    size = f"{sum(value.numel() for value in module.parameters()):,} parameters, {llama.BATCH}x{length} tokens"
    print(f"Llama, {part}: {size}")
    with _progress("eager PyTorch"):
        eager = [timed(module, item) for item in args]
    ours, graphs_compiled = [], []
    with _progress("onnxrt: compile and run"):
        onnxrt = compiled("onnxrt")
        for item in args:
            ours.append(timed(onnxrt, item))
            graphs_compiled.append(counters["dynamo_backends"]["graphs"])
    with _progress("onnx_debug: compile, run, compare node by node"):
        debug = compiled("onnx_debug", compare="every")
        compared = [step(debug, item) for item in args]

    graphs = read_run(folder).graphs
    print(f"\n{verdicts_text(graphs)}\n\nGraphs are numbered as in the dump, after those that onnxrt compiled.\n")
    (_, eager_seconds), (_, our_seconds) = eager[0], ours[0]
    print(
        f"time of {'forward and backward' if backward else 'forward'}: eager {min(eager_seconds[1:]):.3f} s, "
        f"onnxrt {min(our_seconds[1:]):.3f} s (first call with compilation {our_seconds[0]:.1f} s)"
    )
    if dynamic:
        print(f"batch sizes {' and '.join(map(str, batches))} ran on the same models")
    print(f"dump: {folder}")

    failures = [f"{graph.reference}: {graph.verdict}" for graph in graphs if graph.verdict != "ok"]
    if len(graphs) < 1 + backward:
        failures.append(f"{folder} has {len(graphs)} graphs of the demo, expected {1 + backward}")
    if graphs_compiled[-1] != graphs_compiled[0]:
        failures.append(f"onnxrt: batch size {batches[-1]} was compiled again")

    rounded_to = torch.bfloat16 if arguments.mixed else torch.float32
    for (our, _), (its, _), known, item in zip(ours, eager, compared, args, strict=True):
        if our.keys() != known.keys() or not all(_are_equal(our[name], known[name]) for name in known):
            failures += _disagreements_with_eager(module, item, our, its, rounded_to)
    return failures


def _are_equal(first: torch.Tensor, other: torch.Tensor) -> bool:
    from ..numerics.arrays import same_elements

    return first.dtype == other.dtype and same_elements(first, other)


def _disagreements_with_eager(
    module: torch.nn.Module, args: tuple[torch.Tensor, ...], ours: Results, eager: Results, rounded_to: torch.dtype
) -> list[str]:
    """See ``disagreements``; ``rounded_to`` is the dtype to which float32 may be rounded."""
    from ..bench import llama
    from ..numerics.function_runs import Recording, Rerun

    wide = copy.deepcopy(module).double()
    wide_args = tuple(arg.double() if arg.is_floating_point() else arg for arg in args)

    def run(seed: int | None) -> Results:
        mode = contextlib.nullcontext() if seed is None else Rerun(Recording(), seed, otherwise=rounded_to)
        with mode:
            return llama.step(wide, wide, wide_args, backward=len(eager) > 1, mixed=False)

    terms = max(parameter.numel() for parameter in module.parameters())
    return disagreements(ours, eager, run, terms, rounded_to)


@contextlib.contextmanager
def _progress(what: str) -> Iterator[None]:
    """Prints what is running to standard error."""
    print(what, file=sys.stderr)
    with Console(stderr=True).status(what):
        yield


def disagreements(
    ours: Results,
    eager: Results,
    run: Callable[[int | None], Results],
    terms: int = 1,
    rounded_to: torch.dtype | None = None,
) -> list[str]:
    """The results of ``onnxrt`` that differ from eager's by more than rounding.

    Args:
        ours, eager: by name, of ``onnxrt`` and of eager.
        run: returns them in float64, and with a seed those with random rounding.
        terms: the most terms that a sum of the model adds up.
        rounded_to: the dtype to which float32 may be rounded; by default itself.
    """
    import torch

    from ..numerics.whole_graph import ResultCheck

    check = ResultCheck(eager, run, terms=lambda: terms, coarser=rounded_to or torch.float32)
    messages = {name: str(check.judge(name, ours.get(name))) for name in eager}
    return [f"onnxrt: {name}: {message}" for name, message in messages.items() if message]
