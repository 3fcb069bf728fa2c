"""What a comparison costs: time by what is done in it, memory, and the disk of its dump.

::

    python benchmarks/comparison.py               # the demo's model, 4 layers of BERT, Llama and GPT-2, ResNet-50
    python benchmarks/comparison.py bert --layers 24 --threads 4 --phases

Each model takes a forward and a backward. A process of its own runs it eagerly, one with ``onnx_debug`` and
``"compare": "never"``, and one with ``"compare": "every"``. *First* is the comparison of the first call, that of the
stages included and the compile not; *again* is a later compared call, and *later* one that is not compared:
``onnxrt``'s work. Peaks are of the resident set of a whole process, libraries and compile included. Linux only.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tabulate

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # not this folder: its passes.py is not the package

BATCH, TOKENS, VOCABULARY = 2, 128, 4096
MODELS = ("demo", "bert", "llama", "gpt2", "resnet")
_MODES = ("eager", "never", "every")
_EAGER_RUNS = 3
_COMPILE = "compile"

Step = Callable[[Callable[..., Any]], None]
"""Calls a model, compiled or not, forward and backward."""


def build(name: str, layers: int, width: int) -> tuple[Any, Step]:
    """A model of random weights and its training step; the demo's has one layer, 512 wide; ResNet-50 is complete."""
    import torch
    import transformers as tf

    if name == "demo":
        from dynamo_backends.bench.models import MODELS as OF_BENCH

        demo = OF_BENCH["llama-seed"]
        module, inputs = demo.build().train(), demo.inputs(demo.sizes[0])
        return module, lambda call: call(**inputs, use_cache=False)[0].square().mean().backward()
    torch.manual_seed(0)
    inner, heads = 4 * width, width // 64
    sizes = {"vocab_size": VOCABULARY, "hidden_size": width, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": heads, "intermediate_size": inner}
    tokens = {"input_ids": torch.randint(3, VOCABULARY, (BATCH, TOKENS))}
    if name == "bert":
        module, inputs = tf.BertForMaskedLM(tf.BertConfig(**sizes)), tokens
    elif name == "llama":
        module, inputs = tf.LlamaForCausalLM(tf.LlamaConfig(**sizes, use_cache=False)), tokens
    elif name == "gpt2":
        config = tf.GPT2Config(vocab_size=VOCABULARY, n_embd=width, n_layer=layers, n_head=heads, use_cache=False)
        module, inputs = tf.GPT2LMHeadModel(config), tokens
    else:
        module = tf.ResNetForImageClassification(tf.ResNetConfig(num_labels=1000))
        inputs = {"pixel_values": torch.randn(BATCH, 3, 224, 224)}
    module.train()

    def step(call: Callable[..., Any]) -> None:
        module.zero_grad(set_to_none=True)
        call(**inputs).logits.square().mean().backward()

    return module, step


class Phases:
    """How long functions take by themselves, without the others that are watched and that they call."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.seconds: collections.defaultdict[str, float] = collections.defaultdict(float)
        self.calls: collections.Counter[str] = collections.Counter()
        self._inside: list[str] = []
        self._since = 0.0

    def watch(self, owner: Any, function: str, phase: str) -> None:
        """Counts the calls of ``owner.function`` as a phase."""
        call = getattr(owner, function)

        @functools.wraps(call)
        def watched(*args: Any, **kwargs: Any) -> Any:
            with self._of(phase):
                return call(*args, **kwargs)

        setattr(owner, function, watched)

    @contextlib.contextmanager
    def _of(self, phase: str) -> Iterator[None]:
        self._charge()
        self._inside.append(phase)
        self.calls[phase] += 1
        try:
            yield
        finally:
            self._charge()
            self._inside.pop()

    def _charge(self) -> None:
        now = self._clock()
        if self._inside:
            self.seconds[self._inside[-1]] += now - self._since
        self._since = now


def _watch_comparison(phases: Phases) -> None:
    """All that a compared call does more than another."""
    from dynamo_backends.debug import (
        call_runs,
        captured_graph,
        node_comparison,
        observer,
        recorded_run,
        row_making,
        run_comparison,
        run_values,
        session_values,
    )
    from dynamo_backends.numerics import operator_facts, segments
    from dynamo_backends.pipeline.runners import Runners

    phases.watch(Runners, "or_in_pytorch", _COMPILE)  # the stages call the backward before the user does
    phases.watch(run_comparison.ComparedEntry, "_compared", "the call itself")
    phases.watch(observer, "record_run", "the call itself")
    phases.watch(recorded_run, "repeat_region", "run again")
    phases.watch(run_comparison, "compare_call", "the results of the call")
    phases.watch(captured_graph.CapturedGraph, "check", "stages: the rest")
    phases.watch(captured_graph._Search, "run_eager", "stages: eager")
    phases.watch(call_runs.CallRuns, "run", "stages: runs")
    phases.watch(run_comparison, "compare_run", "values: the rest")
    phases.watch(session_values.SessionValues, "__init__", "values: the model that shows them")
    phases.watch(run_values.RunValues, "_show", "values: in the session")
    phases.watch(segments, "run_eager", "values: eager")
    phases.watch(segments, "run_only_exact", "values: float64")
    phases.watch(segments, "judge", "values: distances")
    phases.watch(operator_facts, "magnitudes", "values: magnitudes of sums")
    phases.watch(row_making.RowMaker, "row", "values: rows")
    phases.watch(node_comparison._Search, "verdict", "search for the cause")
    phases.watch(observer.DebugObserver, "_write_test_data", "writing")
    phases.watch(observer.DebugObserver, "conclude", "writing")


def measure(name: str, layers: int, width: int, threads: int, mode: str, clock: Callable[[], float]) -> dict[str, Any]:
    """What one process does: ``mode`` is ``eager``, or the option ``compare``."""
    import torch
    import torch._dynamo

    from dynamo_backends.bench.machine import peak

    torch.set_num_threads(threads)
    module, step = build(name, layers, width)
    if mode == "eager":
        seconds = [_seconds(clock, lambda: step(module)) for _ in range(1 + _EAGER_RUNS)]
        return {"seconds": min(seconds[1:]), "peak": peak()}
    phases = Phases(clock)
    with tempfile.TemporaryDirectory() as folder:
        _watch_comparison(phases)
        options = {"dump_dir": folder, "compare": mode, "placement": "onnx"}
        compiled = torch.compile(module, backend="onnx_debug", options=options)
        first = _seconds(clock, lambda: step(compiled))
        spent, calls = dict(phases.seconds), dict(phases.calls)
        spent.pop(_COMPILE)
        later = min(_seconds(clock, lambda: step(compiled)) for _ in range(_EAGER_RUNS))
        latest = Path(folder, "latest").resolve()
        manifest = json.loads((latest / "manifest.json").read_text())
        files = [path for path in latest.rglob("*") if path.is_file()]
        return {
            "first": first,
            "later": later,
            "seconds": spent,
            "calls": calls,
            "peak": peak(),
            "nodes": sum(graph["nodes"] for graph in manifest["graphs"]),
            "graphs": [[graph["direction"], graph["verdict"]] for graph in manifest["graphs"]],
            "disk": sum(path.stat().st_size for path in files),
            "files": len(files),
        }


def _seconds(clock: Callable[[], float], work: Callable[[], object]) -> float:
    start = clock()
    work()
    return clock() - start


def _in_process(name: str, arguments: argparse.Namespace, mode: str) -> dict[str, Any]:
    threads = str(arguments.threads)
    command = [sys.executable, __file__, name, "--layers", str(arguments.layers), "--width", str(arguments.width)]
    command += ["--threads", threads, "--mode", mode]
    if arguments.processor_time:
        command.append("--processor-time")
    environment = {**os.environ, "DYNAMO_BACKENDS_CACHE": "0", "OMP_NUM_THREADS": threads}
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=environment, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)} (default: all)")
    parser.add_argument("--layers", type=int, default=4, help="of the transformers (default: %(default)s)")
    parser.add_argument("--width", type=int, default=768, help="of the transformers (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch and ONNX Runtime (default: %(default)s)")
    parser.add_argument("--phases", action="store_true", help="what the time of the comparison is spent on")
    parser.add_argument("--processor-time", action="store_true", help="where other work is on the machine; one thread")
    parser.add_argument("--mode", choices=_MODES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.models = arguments.models or MODELS
    if unknown := set(arguments.models) - set(MODELS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(MODELS)}")
    if arguments.mode:
        clock = time.process_time if arguments.processor_time else time.perf_counter
        model = arguments.models[0], arguments.layers, arguments.width
        print(json.dumps(measure(*model, arguments.threads, arguments.mode, clock)))
        return
    rows = []
    for name in arguments.models:
        eager, never, every = (_in_process(name, arguments, mode) for mode in _MODES)
        compared = sum(every["seconds"].values())
        memory = [f"{item['peak'] / 2**20:.0f}" for item in (eager, never, every)]
        wrong = [verdict for _, verdict in every["graphs"] if verdict != "ok"]
        rows.append(
            [
                name,
                every["nodes"],
                f"{eager['seconds']:.2f}",
                f"{never['first']:.1f}",
                f"{compared:.2f}",
                f"{every['later']:.2f}",
                f"{never['later']:.2f}",
                *memory,
                f"{every['disk'] / 2**20:.0f}",
                "; ".join(wrong) or "ok",
            ]
        )
        if arguments.phases:
            ordered = sorted(every["seconds"].items(), key=lambda item: -item[1])
            table = [(phase, f"{seconds:.2f}", every["calls"][phase]) for phase, seconds in ordered]
            print(f"{name}\n{tabulate.tabulate(table, headers=['phase', 's', 'calls'], disable_numparse=True)}\n")
    headers = ["model", "nodes", "eager s", "compile s", "first s", "again s", "later s"]
    headers += ["eager MB", "compiled MB", "compared MB", "dump MB", "verdict"]
    print(tabulate.tabulate(rows, headers=headers, disable_numparse=True, tablefmt="pipe"))


if __name__ == "__main__":
    main()
