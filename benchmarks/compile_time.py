"""Where the time of a compile goes, by stage, and how each stage grows with the graph.

::

    python benchmarks/compile_time.py        # Llama of 8 and 32 layers, each graph of 2,000 and 20,000 nodes
    python benchmarks/compile_time.py --graphs chain --nodes 5000 10000
    python benchmarks/compile_time.py --graphs --layers 8 16 32 64 --passes

Each size is compiled in a process of its own that has compiled a small graph before, so that nothing is imported for
the first time, and most questions to the runtime are answered. A figure is processor time in milliseconds of one run;
other work on the machine changes it too, if less than the time on the clock. The last column is what a node, or a
layer, of the largest costs, divided by what one of the smallest does. What costs in proportion has 1 there.

The graphs are ATen graphs as AOTAutograd hands them over:

    chain      each node reads the one before
    layers     products, biases, views, transpositions and activations, for which there are passes
    fan_out    one value read by half of the nodes, added up in pairs
    inputs     a third of the nodes are inputs
    outputs    half of the nodes are results
    regions    each 19th node runs in PyTorch, so that there are many regions
    random     the same with random numbers, which keep their order
    branches   each tenth node runs in PyTorch, in 16 branches side by side
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # not this folder: its passes.py is not the package

os.environ["DYNAMO_BACKENDS_CACHE"] = "0"  # a second run would measure what is there

import torch  # noqa: E402
from torch import fx  # noqa: E402
from torch._subclasses import FakeTensorMode  # noqa: E402

aten = torch.ops.aten


class Builder:
    """Builds an ATen graph with a fake tensor for each node, as AOTAutograd does."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode()
        self.graph = fx.Graph()
        self.size = 0

    def input(self, *shape: int) -> fx.Node:
        node = self.graph.placeholder(f"arg{self.size}_1")
        with self.mode:
            node.meta["val"] = torch.empty(shape)
        self.size += 1
        return node

    def call(self, target: Callable[..., Any], *args: Any) -> fx.Node:
        node = self.graph.call_function(target, args)
        with self.mode:
            node.meta["val"] = target(*fx.map_arg(args, lambda item: item.meta["val"]))
        self.size += 1
        return node

    def total(self, nodes: Sequence[fx.Node]) -> fx.Node:
        """The sum of nodes, taken in pairs."""
        while len(nodes) > 1:
            odd = nodes[len(nodes) // 2 * 2 :]
            pairs = zip(nodes[::2], nodes[1::2], strict=False)
            nodes = [*(self.call(aten.add.Tensor, one, other) for one, other in pairs), *odd]
        return nodes[0]

    def module(self, *results: fx.Node) -> fx.GraphModule:
        self.graph.output(results)
        return fx.GraphModule(torch.nn.Module(), self.graph)


_UNARY = (aten.sigmoid.default, aten.tanh.default, aten.cos.default, aten.sin.default)


def chain(size: int) -> fx.GraphModule:
    build = Builder()
    x = y = build.input(2, 4)
    while build.size < size:
        y = build.call(_UNARY[build.size % 4], y)
        y = build.call(aten.add.Tensor, y, x)
    return build.module(y)


def layers(size: int) -> fx.GraphModule:
    build = Builder()
    x = build.input(2, 4, 8)
    weights = [build.input(8, 8) for _ in range(4)]
    bias = build.input(8)
    while build.size < size:
        for weight in weights:
            flat = build.call(aten.view.default, x, [8, 8])
            product = build.call(aten.mm.default, flat, build.call(aten.permute.default, weight, [1, 0]))
            y = build.call(aten.add.Tensor, build.call(aten.view.default, product, [2, 4, 8]), bias)
            heads = build.call(aten.permute.default, build.call(aten.view.default, y, [2, 4, 2, 4]), [0, 2, 1, 3])
            same = build.call(aten.expand.default, heads, [2, 2, 4, 4])
            scaled = build.call(aten.mul.Tensor, build.call(aten.clone.default, same), 0.5)
            back = build.call(aten.clone.default, build.call(aten.permute.default, scaled, [0, 2, 1, 3]))
            y = build.call(aten.gelu.default, build.call(aten.view.default, back, [2, 4, 8]))
            x = build.call(aten.add.Tensor, x, y)
    return build.module(x)


def fan_out(size: int) -> fx.GraphModule:
    build = Builder()
    x = build.input(2, 4)
    middle = build.call(aten.sigmoid.default, x)
    return build.module(build.total([build.call(aten.mul.Tensor, middle, i / 8) for i in range(2, size // 2)]))


def inputs(size: int) -> fx.GraphModule:
    build = Builder()
    given = [build.input(2, 4) for _ in range(size // 3)]
    return build.module(build.total([build.call(aten.cos.default, item) for item in given]))


def outputs(size: int) -> fx.GraphModule:
    build = Builder()
    y = build.input(2, 4)
    results = []
    while build.size < size:
        y = build.call(aten.sigmoid.default, y)
        results.append(build.call(aten.cos.default, y))
    return build.module(*results)


def regions(size: int, alone: Callable[..., Any] = aten.special_bessel_j0.default) -> fx.GraphModule:
    build = Builder()
    x = y = build.input(2, 4)
    while build.size < size:
        for _ in range(9):
            y = build.call(aten.add.Tensor, build.call(_UNARY[build.size % 4], y), x)
        y = build.call(alone, y)
    return build.module(y)


def random(size: int) -> fx.GraphModule:
    return regions(size, aten.rand_like.default)


def branches(size: int) -> fx.GraphModule:
    build = Builder()
    ends = [build.input(2, 4) for _ in range(16)]
    while build.size < size:
        for i, y in enumerate(ends):
            for _ in range(9):
                y = build.call(_UNARY[build.size % 4], y)
            ends[i] = build.call(aten.special_bessel_j0.default, y)
    return build.module(build.total(ends))


GRAPHS = {
    function.__name__: function for function in (chain, layers, fan_out, inputs, outputs, regions, random, branches)
}

STAGES = (
    ("dynamo_backends.pipeline.stage_passes", "StagePasses.run", "passes"),
    ("dynamo_backends.pipeline.stages", "read_memory_of_owners", "shared memory"),
    ("dynamo_backends.pipeline.stages", "separate_returned_views", "shared memory"),
    ("dynamo_backends.pipeline.stages", "split_graph", "split"),
    ("dynamo_backends.partition.regions", "Support.probe", "probe"),
    ("dynamo_backends.pipeline.emission", "translate", "translate"),
    ("dynamo_backends.pipeline.emission", "fold_constants", "fold constants"),
    ("dynamo_backends.pipeline.emission", "optimizers_to_disable", "serialize"),
    ("dynamo_backends.pipeline.emission", "serialized", "serialize"),
    ("dynamo_backends.partition.program", "RegionSession", "session"),
    ("dynamo_backends.pipeline.emission", "region_graph", "region in PyTorch"),
    ("dynamo_backends.pipeline.stages", "assemble", "assemble"),
    ("dynamo_backends.pipeline.stages", "compile_graph", "rest of the stages"),
    ("dynamo_backends.pipeline.stages", "load", "load"),
    ("dynamo_backends.pipeline.runners", "Runners.on_onnx", "rest of the pipeline"),
    ("dynamo_backends.pipeline.pipeline", "Pipeline.compile_dynamo_graph", "AOTAutograd"),
)
"""The functions whose time is taken, with what it is called in the table; without that of others of them they call."""


class Clock:
    """Adds up the processor time of functions, each without that of those it calls."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner: list[float] = []
        self._collector_start = 0.0

    def measure(self, function: Callable[..., Any], label: Callable[..., str]) -> Callable[..., Any]:
        @functools.wraps(function)
        def measured(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            self._inner.append(0.0)
            try:
                return function(*args, **kwargs)
            finally:
                elapsed = time.process_time() - start
                self.seconds[label(*args, **kwargs)] += elapsed - self._inner.pop()
                if self._inner:
                    self._inner[-1] += elapsed

        return measured

    def _collected(self, phase: str, info: object) -> None:
        """Takes the time of Python's garbage collector apart: it falls on whatever was running."""
        if phase == "start":
            self._collector_start = time.process_time()
        else:
            elapsed = time.process_time() - self._collector_start
            self.seconds["Python's garbage collector"] += elapsed
            if self._inner:
                self._inner[-1] += elapsed

    def install(self, *, passes: bool) -> None:
        """Measures ``STAGES``; each pass by itself if asked for."""
        gc.callbacks.append(self._collected)
        for module, path, label in STAGES:
            *holders, name = path.split(".")
            holder: Any = functools.reduce(getattr, holders, __import__(module, fromlist=["_"]))
            said = label + ", {}" if label == "passes" else label
            setattr(
                holder, name, self.measure(getattr(holder, name), lambda *args, said=said, **_: said.format(*args[1:2]))
            )
        if passes:
            from passes.engine.manager import PassManager

            PassManager._run_one = self.measure(  # type: ignore[method-assign]
                PassManager._run_one, lambda _, item, *rest: f"pass {item.name}"
            )


def compile_graph(name: str, size: int) -> None:
    from dynamo_backends.graphs.artifacts import GraphName
    from dynamo_backends.options import Options
    from dynamo_backends.pipeline.observer import Observer
    from dynamo_backends.pipeline.runners import Runners

    module = GRAPHS[name](size)
    measured = functools.partial(Runners(Options(), Observer()).on_onnx, GraphName(0, "inference"))
    measured(module, is_joint=True)


def compile_llama(size: int) -> None:
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=size,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=128,
        use_cache=False,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        torch.compile(model, backend="onnxrt")(torch.randint(0, 128, (1, 16)))


def measure_one(name: str, size: int, *, passes: bool, small: int) -> dict[str, float]:
    """Processor time in seconds of each stage of one compile in this process."""
    sys.setrecursionlimit(10_000)
    compile_one = compile_llama if name == "llama" else functools.partial(compile_graph, name)
    clock = Clock()
    clock.install(passes=passes)
    compile_one(small)
    torch._dynamo.reset()
    clock.seconds.clear()
    start = time.process_time()
    compile_one(size)
    if name == "llama":
        clock.seconds["Dynamo, and the first call"] = time.process_time() - start - sum(clock.seconds.values())
    return clock.seconds


def table(name: str, unit: str, measured: dict[int, dict[str, float]]) -> str:
    """The stages of a graph by size, in milliseconds."""
    smallest, largest = min(measured), max(measured)
    labels = list(dict.fromkeys(label for seconds in measured.values() for label in seconds))
    rows = [(label, [measured[size].get(label, 0.0) for size in measured]) for label in labels]
    rows.append(("together", [sum(seconds.values()) for seconds in measured.values()]))
    header = f"| {name}: ms | {' | '.join(f'{size:,} {unit}' for size in measured)} | growth of one |"
    lines = [header, "|---|" + "---|" * (len(measured) + 1)]
    for label, seconds in rows:
        growth = (seconds[-1] / largest) / (seconds[0] / smallest) if seconds[0] > 0.004 else None
        shown = "" if growth is None else f"{growth:.2f}"
        lines.append(f"| {label} | {' | '.join(f'{item * 1e3:.0f}' for item in seconds)} | {shown} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="*", default=[8, 32], help="of the Llama; none leaves it out")
    parser.add_argument("--nodes", type=int, nargs="*", default=[2_000, 20_000], help="of the graphs")
    parser.add_argument("--graphs", nargs="*", default=list(GRAPHS), choices=list(GRAPHS), help="which graphs")
    parser.add_argument("--passes", action="store_true", help="each pass by itself")
    parser.add_argument("--one", nargs=2, metavar=("GRAPH", "SIZE"), help="measure here, print JSON")
    given = parser.parse_args()
    if given.one:
        name, size = given.one[0], int(given.one[1])
        print(json.dumps(measure_one(name, size, passes=given.passes, small=2 if name == "llama" else 100)))
        return
    print("processor time in milliseconds; torch", torch.__version__, "\n", flush=True)
    for name in ["llama", *given.graphs]:
        sizes = sorted(given.layers if name == "llama" else given.nodes)
        measured = {}
        for size in sizes:
            command = [sys.executable, __file__, "--one", name, str(size), *(["--passes"] if given.passes else [])]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"{name} of {size} failed:\n{done.stderr}")
            output = done.stdout
            measured[size] = json.loads(output.splitlines()[-1])
        if measured:
            print(table(name, "layers" if name == "llama" else "nodes", measured), flush=True)
            print(flush=True)


if __name__ == "__main__":
    main()
