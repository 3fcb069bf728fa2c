"""Several processes and threads: distributed training, and a shared cache and dump."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest
import torch
import torch.distributed as dist
from conftest import assert_same_values, compiled

from dynamo_backends.cache.store import Store
from dynamo_backends.cli import main

TESTS = Path(__file__).parents[1]


def run(*command: str, seconds: float = 120, **environment: str) -> str:
    """The output of a process; an error with its log if it fails."""
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], env={**variables, **environment}, capture_output=True, text=True, timeout=seconds
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="no gloo")
def test_two_processes_train_as_eager_does(tmp_path: Path) -> None:
    """DDP and FSDP2, around the compiled region and within it; each process has a dump of its own."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    output = run(*launcher, str(TESTS / "distributed_steps.py"), str(tmp_path))
    assert "DDP around" in output
    runs = sorted(tmp_path.glob("run_*"))
    assert [path.name.rpartition("_")[2] for path in sorted(runs, key=lambda path: path.name[-1])] == ["rank0", "rank1"]
    for path in runs:
        graphs = json.loads((path / "manifest.json").read_text())["graphs"]
        assert graphs
        assert {graph["verdict"] for graph in graphs if graph["runs"]} == {"ok"}


AT_ONCE = """
import os, sys, torch
from dynamo_backends import backends
from dynamo_backends.pipeline import stages
from dynamo_backends.debug import observer
torch.set_num_threads(1)
cache, dump = sys.argv[1:]
x = torch.linspace(-1, 1, 12).reshape(3, 4)

def work(x):
    return torch.nn.functional.gelu(x @ x.t()).softmax(-1)

def compare(backend, **options):
    function = torch.compile(work, backend=backend, options=options, dynamic=False)
    torch.testing.assert_close(function(x), work(x))
    torch._dynamo.reset()

begin, begun = os.pipe()
children = []
for _ in range(8):
    child = os.fork()
    if child == 0:
        os.read(begin, 1)
        compare("onnxrt", cache=True, cache_dir=cache)
        compare("onnx_debug", dump_dir=dump, compare="every")
        os._exit(0)
    children.append(child)
os.write(begun, bytes(8))
assert [os.waitpid(child, 0)[1] for child in children] == [0] * 8
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_eight_processes_write_one_cache_and_one_dump_folder(tmp_path: Path) -> None:
    """Each has the right results, nothing is damaged, nothing unfinished is left."""
    cache, dump = tmp_path / "cache", tmp_path / "dump"
    run("-c", AT_ONCE, str(cache), str(dump))
    runs = list(dump.glob("run_*"))
    assert len(runs) == 8
    for path in runs:
        [graph] = json.loads((path / "manifest.json").read_text())["graphs"]
        assert graph["verdict"] == "ok"
    assert main(["ls", str(dump / "latest")]) == 0
    entries = list(cache.glob("*.cached"))
    assert entries
    assert not list(cache.rglob("*.unfinished"))
    assert all(Store(cache, 2**30).get(entry.stem) is not None for entry in entries)


SPAWNED = """
import multiprocessing, sys, torch

function = torch.compile(lambda x: x.sin() @ x, backend="onnxrt", options={"threads": 2}, dynamic=False)
x = torch.eye(64)

def work(number):
    return (function(x * number) - (x * number).sin() @ (x * number)).abs().max().item()

if __name__ == "__main__":
    function(x)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert max(pool.map(work, range(3))) < 1e-5
    print("done")
"""


def test_a_spawned_process_compiles_for_itself(tmp_path: Path) -> None:
    script = tmp_path / "spawned.py"
    script.write_text(SPAWNED)
    assert run(str(script)) == "done\n"


def together(work: Callable[[int], object], number: int = 8) -> list[object]:
    """Runs a function in as many threads, which start at once."""
    barrier = Barrier(number)

    def wait(i: int) -> object:
        barrier.wait()
        return work(i)

    with ThreadPoolExecutor(number) as pool:
        return list(pool.map(wait, range(number)))


def test_eight_threads_call_one_model() -> None:
    """Each with arguments of its own, among them sizes that are compiled while others run."""
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 16))
    function = compiled(model)
    function(torch.ones(2, 16))

    def work(i: int) -> None:
        generator = torch.Generator().manual_seed(i)
        for n in range(20):
            x = torch.randn(1 + (i + n) % 5, 16, generator=generator)
            with torch.no_grad():
                assert_same_values(function(x), model(x), rtol=1e-5, atol=1e-5)

    together(work)


def test_eight_threads_compile_at_once() -> None:
    """Forward and backward of eight models."""

    def work(i: int) -> None:
        generator = torch.Generator().manual_seed(i)
        x = torch.randn(3, 4 + i, generator=generator, requires_grad=True)
        weight = torch.randn(4 + i, 5, generator=generator)

        def function(x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.gelu(x @ weight).square().sum(0)

        actual, expected = compiled(function)(x), function(x)
        assert_same_values(actual, expected)
        gradients = [torch.autograd.grad(value.sum(), x)[0] for value in (actual, expected)]
        assert_same_values(*gradients)

    together(work)
