"""Makes each of our functions raise once, one after the other, while a small model runs: no call may fail.

::

    python tests/chaos.py --processes 4                             # all functions, each in one mode that reaches it
    python tests/chaos.py --processes 4 --every-mode                # each in all of them
    python tests/chaos.py --sample 40 --seed 3                      # forty random ones
    python tests/chaos.py --modes onnxrt --only partition.regions.split_graph # one function

Functions include methods, properties, constructors, lambdas and nested functions. All modules but those in
``NOT_RAISING`` are imported with changed source: each function first asks whether it should raise, so it does not
matter by which name or reference it is called. For each function a process is forked that runs the model: inference
with constant weights, other sizes, weights that change in place; training until autotuning has ended; and all of it
again with the cache on disk. Values, gradients and random numbers must be eager's, and a counter must show the
failure.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType

ROOT = Path(__file__).parent.parent

PACKAGES = ("dynamo_backends", "passes")

NOT_RAISING = ("common.safety_net", "errors", "events", "__init__", "__main__", "cli", "bench", "engine.locks")
"""Of both packages, left as they are: the net, what it counts with, the commands, locks."""

GROUND = {
    "graphs.pytorch_runner.boxed.run": "a call from AOTAutograd's code, which the net is under",
    "partition.runnable_region.RunnableRegion.__call__": "a call from the code of a graph; it calls the net",
    "partition.runnable_region.RunnableRegion._on_next": "the net under a region",
    "backends.fx_debug": "a call from Dynamo; it calls the net",
    "backends.onnx_debug": "a call from Dynamo; it calls the net",
    "backends.onnxrt": "a call from Dynamo; it calls the net",
    "backends.onnx_compiler.compiler": "a call from AOTAutograd; it calls the net",
    "backends.onnx_compiler.partition": "a call from AOTAutograd; it calls the net",
    "backends._compiled": "it calls the net",
    "backends._compiled.<lambda>": "asked by the net whether failures are to be raised",
    "debug.captured_graph.CapturedGraph.run_in_call": "calls the compiled graph, whose errors are the user's",
    "debug.run_comparison.ComparedEntry.__call__": "a call from Dynamo; it is the net under the comparison",
    "debug.observer._ComparedGraph.run": "a call of a graph; it calls the net",
    "debug.observer._ComparedGraph._compared": "the net under a compared run",
    "debug.record.RecordObserver.recorded.run": "a call of a graph; it calls the net",
    "pipeline.pipeline.Pipeline._partitioned": "calls the net",
    "pipeline.pipeline.Pipeline._partitioned.<lambda>": "asked by the net",
    "pipeline.pipeline.Pipeline.compile_for_aot_autograd": "a call from AOTAutograd; it calls the net",
    "pipeline.pipeline.Pipeline.partition_for_aot_autograd": "a call from AOTAutograd; it calls the net",
    "placement.autotuner.TunedGraph.__call__": "a call from AOTAutograd's code",
    "placement.autotuner.TunedGraph._chosen": "the net under autotuning",
    "placement.autotuner.TunedGraph._instead": "runs PyTorch, whose errors are the user's",
    "placement.autotuner.TunedGraph._timed": "runs PyTorch, whose errors are the user's",
    "pipeline.runners.Runners.or_in_pytorch": "calls the net",
    "pipeline.runners.Runners.or_in_pytorch.<lambda>": "asked by the net",
    "pipeline.runners.Runners.on_onnx.<lambda>": "calls the net",
    "graphs.late_compile.compile_at_first_call.run": "a call from AOTAutograd's code",
}
"""The net itself, and what calls it: these would end the user's call. Nothing else may."""

SILENT = {
    "runtime.providers.with_threads": "first called to ask ONNX Runtime of a node that it refuses anyway",
}
"""Functions that change nothing that is counted when their first call fails, and why."""

EXCEPTIONS = (KeyError, AssertionError, RuntimeError, MemoryError, RecursionError, AttributeError)

MODES = ("onnxrt", "measured", "onnx_debug", "onnx_compiler", "onnx_compiler debug", "fx_debug")


class Points:
    """The entry points of all functions: which were reached, and which one raises."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.reached: set[int] = set()
        self.armed = -1
        self.error: type[Exception] = KeyError
        self.raised = 0
        self.is_paused = False

    def new(self, name: str) -> int:
        self.names.append(name)
        return len(self.names) - 1

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """A context in which no function raises."""
        self.is_paused = True
        try:
            yield
        finally:
            self.is_paused = False

    def __call__(self, number: int) -> None:
        if self.is_paused:
            return
        self.reached.add(number)
        if number == self.armed and not self.raised:
            self.raised += 1
            raise type("Chaos", (self.error,), {})("chaos")


POINTS = Points()


class _Instrumented(ast.NodeTransformer):
    """Inserts a call of ``_question`` at the beginning of each function; inside ``try`` if that is all of the function,
    since nothing can raise before."""

    def __init__(self, module: str) -> None:
        self._path = [module]

    def _inside(self, name: str, node: ast.AST) -> None:
        self._path.append(name)
        self.generic_visit(node)
        self._path.pop()

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        self._inside(node.name, node)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        number = POINTS.new(".".join([*self._path, node.name]))
        self._inside(node.name, node)
        first = node.body[0]
        has_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
        body = node.body[int(has_docstring) :]
        if len(body) == 1 and isinstance(body[0], ast.Try):
            body[0].body.insert(0, ast.Expr(_question(number)))
        else:
            node.body.insert(int(has_docstring), ast.Expr(_question(number)))
        return node

    def visit_Lambda(self, node: ast.Lambda) -> ast.AST:
        number = POINTS.new(".".join([*self._path, "<lambda>"]))
        self._inside("<lambda>", node)
        pair = ast.Tuple([_question(number), node.body], ast.Load())
        node.body = ast.Subscript(pair, ast.Constant(1), ast.Load())
        return node


def _question(number: int) -> ast.Call:
    return ast.Call(ast.Name("_chaos_point", ast.Load()), [ast.Constant(number)], [])


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        tree = ast.parse(self.get_data(path), path)
        tree = _Instrumented(fullname.removeprefix("dynamo_backends.")).visit(tree)
        return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        package, _, rest = name.partition(".")
        if package not in PACKAGES or not rest or rest in NOT_RAISING or rest.split(".")[0] in NOT_RAISING:
            return None
        base = ROOT.joinpath(*name.split("."))
        file = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
        folders = [str(base)] if base.is_dir() else None
        loader = _Loader(name, str(file))
        return importlib.util.spec_from_file_location(name, file, loader=loader, submodule_search_locations=folders)


def use_the_model(mode: str, folder: Path) -> None:
    """The user's code. Anything that raises here, or differs from eager, is a fault.

    Args:
        mode: one of ``MODES``.
        folder: for the cache and the dump.
    """
    import torch
    from torch._dynamo.backends.common import aot_autograd

    import dynamo_backends

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(6, 8)
            self.norm = torch.nn.LayerNorm(8)
            self.last = torch.nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.nn.functional.gelu(self.first(x))
            x = torch.nn.functional.dropout(self.norm(x), 0.5, self.training)  # PyTorch runs what draws
            return torch.softmax(self.last(x.sort(1).values), 1)

    def compiled(model: torch.nn.Module) -> Callable[..., torch.Tensor]:
        options: dict[str, object] = {"cache": True, "cache_dir": str(folder / "cache")}
        options["placement"] = "measured" if mode == "measured" else "onnx"
        options["autotune_budget"] = 100
        if mode.startswith("onnx_compiler"):
            records: list[object] = []
            with POINTS.paused():  # this call is the user's, outside of any model
                compiler = dynamo_backends.onnx_compiler(
                    debug="debug" in mode, record=records, dump_dir=str(folder / "dump"), **options
                )
            backend: object = aot_autograd(fw_compiler=compiler, partition_fn=compiler.partition_fn)
            return torch.compile(model, backend=backend, fullgraph=True)
        if mode.endswith("debug"):
            options["dump_dir"] = str(folder / "dump")
        backend = "onnxrt" if mode == "measured" else mode
        return torch.compile(model, backend=backend, options=options)

    def same(actual: object, expected: object) -> None:
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)

    def infer() -> None:
        torch.manual_seed(0)
        model = Model().eval()
        function = compiled(model)
        with torch.no_grad():
            for size in (4, 4, 5, 6):
                x = torch.randn(size, 6)
                same(function(x), model(x))
            model.first.weight.mul_(1.5)
            same(function(x), model(x))
            model.last.weight.data = torch.randn(3, 8)
            same(function(x), model(x))

    def train(calls: int) -> None:
        torch.manual_seed(0)
        ours, theirs = Model(), Model()
        ours.load_state_dict(theirs.state_dict())
        function = compiled(ours)
        for seed in range(calls):
            x = torch.randn(4, 6)
            results = []
            for model, call in ((ours, function), (theirs, theirs)):
                torch.manual_seed(seed)
                model.zero_grad()
                result = call(x)
                result.square().sum().backward()
                results.append((result.detach(), [p.grad for p in model.parameters()], torch.get_rng_state()))
            same(*results)

    train(130 if mode == "measured" else 2)
    infer()
    if "debug" not in mode:
        torch._dynamo.reset()
        train(1)
        infer()
    if mode == "fx_debug":
        return
    for path in (folder / "dump").glob("run_*/manifest.json"):
        json.loads(path.read_text())


def run_one(mode: str, number: int, error: type[Exception]) -> dict[str, object]:
    """Runs the model in this process with one function that raises (-1 for none). Returns the outcome."""
    import torch
    from torch._dynamo.utils import counters

    POINTS.reached.clear()
    POINTS.armed, POINTS.error, POINTS.raised = number, error, 0
    folder = Path(tempfile.mkdtemp(prefix="chaos"))
    failure, start = "", time.perf_counter()
    torch.set_num_threads(1)
    for package in PACKAGES:
        logging.getLogger(package).setLevel(logging.CRITICAL)
    try:
        with _quiet():
            use_the_model(mode, folder)
    except BaseException:
        failure = traceback.format_exc()
    verdicts = []
    for path in folder.glob("dump/run_*/manifest.json"):
        with contextlib.suppress(ValueError):
            manifest = json.loads(path.read_text())
            verdicts = [graph["verdict"] for graph in manifest["graphs"]]
            verdicts += [
                why for graph in manifest["dynamo_graphs"] for why in (graph.get("not_compiled") or {}).values()
            ]
            verdicts += [graph["given_up"] for graph in manifest["dynamo_graphs"] if graph["given_up"]]
    shutil.rmtree(folder, ignore_errors=True)
    return {
        "failure": failure,
        "raised": POINTS.raised,
        "reached": sorted(POINTS.reached) if number < 0 else [],
        "modules": sorted(sys.modules) if number < 0 else [],
        "counters": dict(counters["dynamo_backends"]),
        "verdicts": verdicts,
        "seconds": time.perf_counter() - start,
    }


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
        yield


def forked(mode: str, number: int, error: type[Exception], file: Path) -> int:
    """Starts ``run_one`` in a child process, which writes the outcome to a file; returns the process id."""
    child = os.fork()
    if child:
        return child
    try:
        signal.alarm(300)  # a child that hangs ends itself
        file.write_text(json.dumps(run_one(mode, number, error)))
    finally:
        os._exit(0)


def results_of(
    jobs: Sequence[tuple[str, int]], processes: int, until: float = float("inf")
) -> Iterator[tuple[str, int, dict[str, object]]]:
    """The outcome of each job (a mode and a function) as they end. No job starts after ``until``."""
    folder = Path(tempfile.mkdtemp(prefix="chaos_jobs"))
    waiting, running = list(enumerate(jobs)), {}
    while waiting or running:
        if time.monotonic() > until:
            waiting.clear()
        while waiting and len(running) < processes:
            i, (mode, number) = waiting.pop(0)
            error = EXCEPTIONS[i % len(EXCEPTIONS)]
            running[forked(mode, number, error, folder / str(i))] = (i, mode, number)
        child, _ = os.wait()
        i, mode, number = running.pop(child)
        file = folder / str(i)
        yield mode, number, json.loads(file.read_text()) if file.exists() else {"failure": "the process ended, or hung"}
    shutil.rmtree(folder, ignore_errors=True)


def _import_all() -> None:
    """Imports what the children need, and compiles once, so that forks start with everything imported.

    It computes no gradients: PyTorch's autograd does not work in forks of a process that has used it.
    """
    sys.meta_path.insert(0, _Finder())
    builtins._chaos_point = POINTS  # type: ignore[attr-defined]
    sys.path.insert(0, str(ROOT))
    import torch

    for name in ("backends", "pipeline.stages", "debug.fx_debug", "debug.observer", "exporter.decompose"):
        importlib.import_module(f"dynamo_backends.{name}")
    torch.set_num_threads(1)
    with torch.no_grad():
        torch.compile(lambda x: x.sin() + 1, backend="aot_eager")(torch.ones(2))
    torch._dynamo.reset()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 1 if a call ended, a result was wrong, a failure left no trace, or nothing raised."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--every-mode", action="store_true", help="each function in each mode that reaches it")
    parser.add_argument("--sample", type=int, help="how many functions, by chance; by default all that are reached")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin nothing new after so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", default=[], help="functions, by name")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--verbose", action="store_true", help="name the functions whose failure had another answer")
    chosen = parser.parse_args(arguments)
    _import_all()
    faults, clean = [], {}
    for mode, _, result in results_of([(mode, -1) for mode in chosen.modes], chosen.processes):
        clean[mode] = result
        if result["failure"]:
            faults.append(f"{mode}, with no chaos: {result['failure']}")
    for name in dict.fromkeys(name for result in clean.values() for name in result.get("modules", [])):
        if name not in sys.modules:
            with contextlib.suppress(Exception):  # what a library makes up is no module of a file
                importlib.import_module(name)
    jobs = [(mode, number) for mode in chosen.modes for number in clean[mode].get("reached", [])]
    reached = len({number for _, number in jobs})
    skipped = sum(POINTS.names[number] in GROUND for _, number in jobs)
    jobs = [(mode, number) for mode, number in jobs if POINTS.names[number] not in GROUND]
    if chosen.only:
        jobs = [(mode, number) for mode, number in jobs if POINTS.names[number] in chosen.only]
    random.Random(chosen.seed).shuffle(jobs)
    if not chosen.every_mode:
        jobs = list({number: (mode, number) for mode, number in jobs}.values())
    jobs = jobs[: chosen.sample]
    print(f"{len(POINTS.names)} functions, {reached} of them run in one of the modes {', '.join(clean)}", flush=True)
    outcomes, silent = {"counted": 0, "answered": 0, "silent": 0, "not raised": 0}, []
    answered: list[str] = []
    ended, started = 0, time.monotonic()
    for mode, number, result in results_of(jobs, chosen.processes, time.monotonic() + 60 * chosen.minutes):
        name = POINTS.names[number]
        if result["failure"]:
            ended += 1
            faults.append(f"{mode}: {name}: {result['failure']}")
            print(f"{mode}: {name}: {str(result['failure']).strip().splitlines()[-1]}", flush=True)
            continue
        counters, expected = result["counters"], clean[mode]["counters"]
        if not result["raised"]:
            outcomes["not raised"] += 1
        elif counters.get("internal_failures"):  # type: ignore[attr-defined]
            outcomes["counted"] += 1
        elif counters != expected:
            outcomes["answered"] += 1
            changed = {key for key in {*counters, *expected} if counters.get(key) != expected.get(key)}  # type: ignore
            answered.append(f"answered: {mode}: {name}: {sorted(changed)}, verdicts {result['verdicts']}")
        else:
            outcomes["silent"] += 1
            if name in SILENT:
                continue
            print(f"{mode}: {name}: nothing tells of the failure", flush=True)
            silent.append(f"{mode}: {name}")
    if chosen.verbose:
        print("\n".join(sorted(answered)))
    for fault in faults:
        print(fault, file=sys.stderr)
    taken = time.monotonic() - started
    print(
        f"{taken:.0f} s: {sum(outcomes.values()) + ended} runs, {outcomes['counted']} failures counted by the net, "
        f"{outcomes['answered']} answered otherwise (a pass undone, an operator in PyTorch, a candidate out), "
        f"{outcomes['silent']} without a trace, {outcomes['not raised']} not reached this time; "
        f"{skipped} of the net itself left out; {ended} calls of the user ended"
    )
    if not sum(outcomes.values()):
        print("nothing was made to raise", file=sys.stderr)
    return int(bool(faults or silent) or not sum(outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
