"""``dynamo-backends demo``: a Llama eagerly, through ``onnxrt`` and through ``onnx_debug``; do they agree?

The errors are against float64, and eager PyTorch's is the measure: ``onnxrt`` is right if it is as near.
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

    Result = Mapping[str, torch.Tensor]

PARTS = ("attention", "decoder", "model")
LENGTH = 1024
LENGTH_MIXED = 256
"""Shorter, because bfloat16 products are slow on a CPU without instructions for them."""

INSTALL = "pip install 'transformers>=5'"

_REPEATS = 3
"""Measured steps after the first, which compiles."""

DESCRIPTION = (
    "Builds a Llama (one layer, random weights, nothing downloaded), runs it eagerly, "
    "through onnxrt and through onnx_debug, and prints for each graph how near to float64 ONNX Runtime "
    "and eager PyTorch come. Exit code 0: every graph is ok."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the subcommand's arguments."""
    parser.add_argument("--part", choices=PARTS, default="model", help="how much of it (default: %(default)s)")
    parser.add_argument("--no-backward", action="store_true", help="forward only, without gradients")
    parser.add_argument("--mixed", action="store_true", help="autocast to bfloat16")
    parser.add_argument(
        "--dynamic",
        action="store_true",
        help="symbolic shapes; a second batch size must run on the same models",
    )
    parser.add_argument("--opset", type=int, metavar="N", help="ONNX opset of the models (default: the backends')")
    parser.add_argument(
        "--length",
        type=_length,
        metavar="N",
        help=f"tokens in a sequence, at most 2048 (default: {LENGTH}, with --mixed {LENGTH_MIXED})",
    )
    parser.add_argument("--dump-dir", metavar="DIR", help="where the dump goes (default: the backends')")


def _length(text: str) -> int:
    if not text.isdigit() or not 2 <= int(text) <= 2048:
        raise argparse.ArgumentTypeError(f"expected 2 to 2048 tokens, got {text!r}")
    return int(text)


def run(arguments: argparse.Namespace) -> int:
    """Runs the demo. Exit code 1 if something is wrong, 2 if it cannot be run."""
    from ..debug.dump_folder import dump_folder
    from ..options import parse_options

    given = {"opset": arguments.opset, "dump_dir": arguments.dump_dir}
    options = parse_options({name: value for name, value in given.items() if value is not None})
    if importlib.util.find_spec("transformers") is None:
        raise ValueError(f"the demo needs transformers, which is not installed: {INSTALL}")
    folder = dump_folder(options.dump_dir)
    if folder.location is None:  # said why
        raise OSError(f"the demo reads its verdicts from the dump, and {options.dump_dir!r} cannot be written")
    complaints = _run(arguments, options, folder.location)
    for complaint in complaints:
        print(f"WRONG  {complaint}")
    return int(bool(complaints))


def _run(arguments: argparse.Namespace, options: Options, folder: Path) -> list[str]:
    """Runs all, prints the outcome, and returns what is wrong."""
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

    def step(call: Callable[..., torch.Tensor], args: tuple[torch.Tensor, ...]) -> Result:
        return llama.step(module, call, args, backward=backward, mixed=arguments.mixed)

    def timed(call: Callable[..., torch.Tensor], args: tuple[torch.Tensor, ...]) -> tuple[Result, list[float]]:
        seconds = []
        for _ in range(1 + _REPEATS):
            start = time.perf_counter()
            result = step(call, args)
            seconds.append(time.perf_counter() - start)
        return result, seconds

    size = f"{sum(value.numel() for value in module.parameters()):,} parameters, {llama.BATCH}x{length} tokens"
    print(f"Llama, {part}: {size}")
    with _progress("eager PyTorch"):
        eager = [timed(module, item) for item in args]
    with _progress("float64, the measure of both"):
        wide = copy.deepcopy(module).double()
        wide_args = [tuple(arg.double() if arg.is_floating_point() else arg for arg in item) for item in args]
        exact = [llama.step(wide, wide, item, backward=backward, mixed=False) for item in wide_args]
    ours, graphs_compiled = [], []
    with _progress("onnxrt: compile and run"):
        onnxrt = compiled("onnxrt")
        for item in args:
            ours.append(timed(onnxrt, item))
            graphs_compiled.append(counters["dynamo_backends"]["graphs"])
    with _progress("onnx_debug: compile, run, compare node by node"):
        debug = compiled("onnx_debug", compare="every")
        for item in args:
            step(debug, item)

    graphs = read_run(folder).graphs
    print(f"\n{verdicts_text(graphs)}\n")
    (_, eager_seconds), (_, our_seconds) = eager[0], ours[0]
    print(
        f"{'forward and backward' if backward else 'forward'}: eager {min(eager_seconds[1:]):.3f} s, "
        f"onnxrt {min(our_seconds[1:]):.3f} s (first call with compilation {our_seconds[0]:.1f} s)"
    )
    if dynamic:
        print(f"batch sizes {' and '.join(map(str, batches))} ran on the same models")
    print(f"everything it did is in {folder}")

    complaints = [f"{graph.reference}: {graph.verdict}" for graph in graphs if graph.verdict != "ok"]
    if len(graphs) < 1 + backward:
        complaints.append(f"{folder} has {len(graphs)} graphs of the demo")
    if graphs_compiled[-1] != graphs_compiled[0]:
        complaints.append(f"onnxrt: batch size {batches[-1]} was compiled anew")
    for (our, _), (its, _), exactly in zip(ours, eager, exact, strict=True):
        complaints += disagreements(our, its, exactly)
    return complaints


@contextlib.contextmanager
def _progress(what: str) -> Iterator[None]:
    """Says on standard error what is being done and how long it took."""
    start = time.perf_counter()
    with Console(stderr=True).status(what):
        yield
    print(f"{time.perf_counter() - start:6.1f} s  {what}", file=sys.stderr)


def disagreements(ours: Result, eager: Result, exact: Result) -> list[str]:
    """The results of ``onnxrt`` that are not as near to float64 as eager's, or of another type or shape."""
    from ..numerics.verdicts import verdict

    complaints = []
    for name, its in eager.items():
        our = ours.get(name)
        if our is None or our.dtype != its.dtype or our.shape != its.shape:
            here = "missing" if our is None else f"{our.dtype} {tuple(our.shape)}"
            complaints.append(f"onnxrt: {name} is {here}, eager's {its.dtype} {tuple(its.shape)}")
            continue
        said = verdict(our, its, exact[name])
        if said.is_wrong:
            complaints.append(f"onnxrt: {name} is {said}")
    return complaints
