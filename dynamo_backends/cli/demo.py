"""``dynamo-backends demo``: a Llama eagerly, through ``onnxrt`` and through ``onnx_debug``; do they agree?

::

    graph    direction  nodes  on ONNX  worst error  eager's  verdict
    -------  ---------  -----  -------  -----------  -------  -------
    graph 1  forward      130  100.0 %      2.4e-06  2.7e-06  ok
    graph 1  backward     195  100.0 %      3.6e-04  5.8e-04  ok

The errors are against float64, and eager PyTorch's is the measure: ``onnxrt`` is right if it is as near.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import importlib.util
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from ..tables import text_table

if TYPE_CHECKING:
    import torch

    from ..numerics.distance import Distance
    from ..options import Options
    from .llama import Result

    Arguments = tuple[torch.Tensor, ...]

PARTS = ("attention", "decoder", "model")
LENGTH = 1024
LENGTH_MIXED = 256
"""Shorter, because bfloat16 products are slow on a CPU without instructions for them."""

INSTALL = "pip install 'transformers>=5'"

_REPEATS = 3
_SECONDS = 10.0
"""No further repetition of a measured step after this time; the first, which compiles, is not measured."""


@dataclasses.dataclass(frozen=True)
class Timed:
    """The result of the last of several equal steps, and the time of the fastest."""

    result: Result
    first_seconds: float
    best_seconds: float


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
    return Demo(arguments, options, folder.location).run()


class Demo:
    """One run of the demo."""

    def __init__(self, arguments: argparse.Namespace, options: Options, folder: Path) -> None:
        self.part: str = arguments.part
        self.backward = not arguments.no_backward
        self.mixed: bool = arguments.mixed
        self.dynamic: bool = arguments.dynamic
        self.length: int = arguments.length or (LENGTH_MIXED if arguments.mixed else LENGTH)
        self.options = options
        self.folder = folder
        self._progress = _Progress()

    def run(self) -> int:
        """Runs all, prints the outcome, and returns the exit code: 0 if everything is right, else 1."""
        import torch
        from torch._dynamo.utils import counters

        from . import llama

        module = llama.build(self.part)
        batches = [llama.BATCH, llama.BATCH + 1] if self.dynamic else [llama.BATCH]
        args = {batch: llama.inputs(self.part, batch, self.length) for batch in batches}
        settings = {"placement": "onnx", "opset": self.options.opset, "dump_dir": self.options.dump_dir}
        onnxrt = torch.compile(module, backend="onnxrt", dynamic=self.dynamic or None, options=settings)
        debug = torch.compile(
            module,
            backend="onnx_debug",
            dynamic=self.dynamic or None,
            options={**settings, "compare": "every"},
        )

        size = f"{_number_of_parameters(module):,} parameters, {llama.BATCH}x{self.length} tokens"
        print(f"Llama, {self.part}: {size}")
        with self._progress("eager PyTorch"):
            eager = {batch: self._timed(module, module, args[batch]) for batch in batches}
        with self._progress("float64, the measure of both"):
            exact = {batch: self._exact(module, args[batch]) for batch in batches}
        ours, compiled = {}, []
        with self._progress("onnxrt: compile and run"):
            for batch in batches:
                ours[batch] = self._timed(module, onnxrt, args[batch])
                compiled.append(counters["dynamo_backends"]["graphs"])
        known = {_key(graph) for graph in self._graphs()}
        with self._progress("onnx_debug: compile, run, compare node by node"):
            for batch in batches:
                self._step(module, debug, args[batch])

        graphs = [graph for graph in self._graphs() if _key(graph) not in known]
        complaints = [f"{_name(graph)}: {_verdict(graph)}" for graph in graphs if graph["verdict"] != "ok"]
        if len(graphs) < 1 + self.backward:
            complaints.append(f"{self.folder / 'manifest.json'} has {len(graphs)} graphs of the demo")
        if compiled[-1] != compiled[0]:
            complaints.append(f"onnxrt: batch size {batches[-1]} was compiled anew")
        for batch in batches:
            complaints.extend(_disagreements(ours[batch].result, eager[batch].result, exact[batch]))
        self._print(graphs, eager[batches[0]], ours[batches[0]], batches)
        for complaint in complaints:
            print(f"WRONG  {complaint}")
        return 1 if complaints else 0

    def _step(self, module: torch.nn.Module, call: Callable[..., torch.Tensor], args: Arguments) -> Result:
        from . import llama

        return llama.step(module, call, args, backward=self.backward, mixed=self.mixed)

    def _timed(self, module: torch.nn.Module, call: Callable[..., torch.Tensor], args: Arguments) -> Timed:
        seconds: list[float] = []
        while len(seconds) < 2 or (len(seconds) <= _REPEATS and sum(seconds[1:]) < _SECONDS):
            start = time.perf_counter()
            result = self._step(module, call, args)
            seconds.append(time.perf_counter() - start)
        return Timed(result, seconds[0], min(seconds[1:] or seconds))

    def _exact(self, module: torch.nn.Module, args: Arguments) -> Result:
        from . import llama

        wide = copy.deepcopy(module).double()
        wide_args = tuple(arg.double() if arg.is_floating_point() else arg for arg in args)
        return llama.step(wide, wide, wide_args, backward=self.backward, mixed=False)

    def _graphs(self) -> list[dict[str, object]]:
        manifest = self.folder / "manifest.json"
        return json.loads(manifest.read_text(encoding="utf-8"))["graphs"] if manifest.is_file() else []

    def _print(self, graphs: list[dict[str, object]], eager: Timed, ours: Timed, batches: list[int]) -> None:
        rows = [
            (
                f"graph {graph['index']}",
                graph["direction"],
                graph["nodes"],
                f"{graph['share_on_onnx']:.1%}",
                _worst(graph, "onnx"),
                _worst(graph, "eager"),
                _verdict(graph),
            )
            for graph in graphs
        ]
        headers = ["graph", "direction", "nodes", "on ONNX", "worst error", "eager's", "verdict"]
        print()
        print(text_table(rows, headers))
        print()
        what = "forward and backward" if self.backward else "forward"
        print(f"{what}: eager {eager.best_seconds:.3f} s, onnxrt {ours.best_seconds:.3f} s", end="")
        print(f" (first call with compilation {ours.first_seconds:.1f} s)")
        if self.dynamic:
            print(f"batch sizes {' and '.join(map(str, batches))} ran on the same models")
        print(f"everything it did is in {self.folder}")


class _Progress:
    """Says on standard error what is being done and how long it took; a spinner where that is a terminal."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False)

    @contextlib.contextmanager
    def __call__(self, what: str) -> Iterator[None]:
        start = time.perf_counter()
        with self._console.status(what):
            yield
        self._console.print(f"[dim]{time.perf_counter() - start:6.1f} s  {what}[/dim]")


def _disagreements(ours: Result, eager: Result, exact: Result) -> list[str]:
    """The output and gradients of ``onnxrt`` that are not as near to float64 as eager's."""
    from ..numerics.distance import distance, is_explained

    values = {"the output": (ours.output, eager.output, exact.output)}
    for name, value in eager.gradients.items():
        if name not in ours.gradients:
            return [f"onnxrt gives no gradient for {name}"]
        values[f"the gradient of {name}"] = (ours.gradients[name], value, exact.gradients[name])
    complaints = []
    for name, (our, its, wide) in values.items():
        if our.dtype != its.dtype or our.shape != its.shape:
            complaints.append(f"onnxrt: {name} is {_type(our)}, eager's {_type(its)}")
            continue
        our_error, its_error = distance(our, wide), distance(its, wide)
        if not is_explained(our_error, its_error, its.dtype):
            complaints.append(f"onnxrt: {name} is off by {_error(our_error)}, eager's by {_error(its_error)}")
    return complaints


def _type(value: torch.Tensor) -> str:
    return f"{value.dtype} {tuple(value.shape)}"


def _error(item: Distance) -> str:
    return f"{item.nonfinite} NaN or infinite values" if item.nonfinite else f"{item.max_abs:.1e}"


def _worst(graph: dict[str, object], side: str) -> str:
    """The graph's worst error, or ``-`` if there is none, as where nothing was compared."""
    worst = graph.get("worst")
    measures = worst.get(side) if isinstance(worst, dict) else None
    if not measures:
        return "-"
    return f"{measures['nonfinite']} NaN/Inf" if measures.get("nonfinite") else f"{measures['max_abs']:.1e}"


def _verdict(graph: dict[str, object]) -> str:
    return str(graph["verdict"] or "not compared")


def _key(graph: dict[str, object]) -> tuple[object, object]:
    return graph["index"], graph["direction"]


def _name(graph: dict[str, object]) -> str:
    return f"graph {graph['index']} {graph['direction']}"


def _number_of_parameters(module: torch.nn.Module) -> int:
    return sum(value.numel() for value in module.parameters())
