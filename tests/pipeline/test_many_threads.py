"""Several threads translate, compile and compare at once without affecting each other."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import assert_same_values, compiled
from onnxscript import evaluator
from torch import fx, nn
from torch._dynamo.backends import registry
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.proxy_tensor import make_fx

from dynamo_backends import backends, decomposition_table, onnx_compiler
from dynamo_backends.debug import manifest
from dynamo_backends.debug.manifest import Manifest
from dynamo_backends.exporter.translate import RegionInput, RegionOutput, serialize, translate

OPSET = 23


@pytest.fixture
def quick_switches() -> Iterator[None]:
    """Python switches threads a thousand times as often as usual."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-6)
    yield
    sys.setswitchinterval(before)


def at_once(*works: Callable[[], object], times: int = 1) -> list[object]:
    """Runs each function in a thread of its own, ``times`` times, all started together; returns the last results."""
    barrier = threading.Barrier(len(works))

    def repeat(work: Callable[[], object]) -> object:
        barrier.wait()
        for _ in range(times):
            result = work()
        return result

    with ThreadPoolExecutor(len(works)) as pool:
        return [future.result() for future in [pool.submit(repeat, work) for work in works]]


def traced(function: Callable[..., object], *args: torch.Tensor) -> fx.GraphModule:
    return make_fx(function, tracing_mode="fake")(*args)


def translated(module: fx.GraphModule) -> bytes:
    graph = module.graph
    calls = [node for node in graph.nodes if node.op == "call_function"]
    inputs = [RegionInput(node) for node in graph.find_nodes(op="placeholder")]
    results = [RegionOutput(node) for node in graph.output_node().all_input_nodes]
    return serialize(translate(calls, inputs, results, opset=OPSET))


def many_products(x: torch.Tensor) -> torch.Tensor:
    for _ in range(5):
        x = torch.nn.functional.gelu(x @ x.t()) * 0.5 + 1.0
    return x


def many_norms(x: torch.Tensor) -> torch.Tensor:
    for _ in range(5):
        x = torch.nn.functional.layer_norm(x.clamp(min=-3.0), (4,)).softmax(-1) - 2.0
    return x


def test_two_threads_translate_at_once(quick_switches: None) -> None:
    modules = [traced(function, torch.randn(4, 4)) for function in (many_products, many_norms)]
    expected = [translated(module) for module in modules]

    def work(number: int) -> None:
        assert translated(modules[number]) == expected[number]

    at_once(lambda: work(0), lambda: work(1), times=10)


def test_a_translation_is_not_seen_by_who_runs_onnxscript_in_another_thread(quick_switches: None) -> None:
    """Who calls a function of onnxscript computes numbers, also while a translation records nodes."""
    module = traced(many_products, torch.randn(4, 4))
    usual = evaluator.default()
    done = threading.Event()

    def translate_many() -> None:
        for _ in range(10):
            translated(module)
        done.set()

    def look() -> list[evaluator.Evaluator]:
        seen = {}
        while not done.is_set():
            found = evaluator.default()
            seen[id(found)] = found
        return list(seen.values())

    _, seen = at_once(translate_many, look)
    assert seen == [usual]


def test_a_translation_takes_no_notice_of_an_export_in_another_thread(quick_switches: None) -> None:
    """``torch.onnx.export`` sets onnxscript's evaluator for the whole process; its nodes and ours stay apart."""
    module = traced(many_norms, torch.randn(4, 4))
    expected = translated(module)
    x = torch.randn(4, 4)
    export = torch.export.export(nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.LayerNorm(4)), (x,))

    done = threading.Event()

    def export_nodes() -> list[str]:
        return [node.op_type for node in torch.onnx.export(export, dynamo=True, verbose=False).model.graph]

    def export_many() -> list[list[str]]:
        try:
            return [export_nodes() for _ in range(3)]
        finally:
            done.set()

    def translate_many() -> None:
        while not done.is_set():
            assert translated(module) == expected

    alone = export_nodes()
    _, theirs = at_once(translate_many, export_many)
    assert theirs == [alone] * 3


def test_backwards_compile_at_once(quick_switches: None) -> None:
    """AOTAutograd compiles each backward at its first call, in whatever thread, under no lock of Dynamo's."""
    sizes = (3, 4, 5, 6)
    models = [nn.Sequential(nn.Linear(n, n), nn.GELU(), nn.LayerNorm(n), nn.Linear(n, 2)) for n in sizes]
    functions = [compiled(model) for model in models]
    losses = [function(torch.ones(2, n)).square().sum() for function, n in zip(functions, sizes, strict=True)]
    at_once(*(loss.backward for loss in losses))
    for model, n in zip(models, sizes, strict=True):
        actual = [parameter.grad for parameter in model.parameters()]
        expected = torch.autograd.grad(model(torch.ones(2, n)).square().sum(), list(model.parameters()))
        assert_same_values(actual, list(expected))


def test_backwards_that_compile_at_once_are_named_each_by_its_own_graph(quick_switches: None) -> None:
    records: list = []
    compiler = onnx_compiler(record=records)
    backend = aot_autograd(
        fw_compiler=compiler,
        partition_fn=compiler.partition_fn,
        decompositions=decomposition_table(),
    )
    models = [nn.Sequential(nn.Linear(n, n), nn.GELU(), nn.Linear(n, n)) for n in range(3, 9)]
    functions = [torch.compile(model, backend=backend) for model in models]
    losses = [function(torch.ones(2, n)).sum() for n, function in enumerate(functions, 3)]
    numbers = [record.index for record in records]
    assert len(set(numbers)) == 6
    at_once(*(loss.backward for loss in losses))
    widths = {record.index: record.runs[0].inputs[0].shape[-1] for record in records if record.direction == "forward"}
    backwards = [record for record in records if record.direction == "backward"]
    assert sorted(record.index for record in backwards) == numbers
    for record in backwards:
        shapes = {tuple(value.shape) for value in record.runs[0].outputs if isinstance(value, torch.Tensor)}
        assert (widths[record.index], widths[record.index]) in shapes


def test_graphs_without_a_name_are_numbered_each_by_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """AOTAutograd names what it compiles; who calls the compiler directly, or a later PyTorch, need not."""
    records: list = []
    compiler = onnx_compiler(record=records)
    x = torch.ones(3)
    for function in (lambda x: (x.sin(),), lambda x: (x.cos(),)):
        run = compiler(traced(function, x), [x])
        assert_same_values(tuple(run([x])), function(x))
    first, second = records
    assert first.index != second.index
    assert (first.direction, second.direction) == ("inference", "inference")


@pytest.mark.parametrize("name", ["onnxrt", "onnx_debug", "fx_debug"])
def test_threads_that_look_a_backend_up_first_at_once_get_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All load the entry point before one registers it, as when the import takes long."""
    torch._dynamo.list_backends()  # finds the entry points
    loaded = threading.Barrier(8)
    function = getattr(backends, name)
    entry = SimpleNamespace(load=lambda: loaded.wait() is not None and function)
    monkeypatch.setitem(registry._BACKENDS, name, entry)
    monkeypatch.delitem(registry._COMPILER_FNS, name, raising=False)
    assert at_once(*8 * [lambda: registry.lookup_backend(name)]) == 8 * [function]
    assert name in torch._dynamo.list_backends(exclude_tags=())


def test_another_function_of_a_registered_name_is_still_an_error() -> None:
    registry.lookup_backend("onnxrt")
    with pytest.raises(AssertionError, match="duplicate name"):
        registry.register_backend(lambda module, inputs: module, name="onnxrt")


FIRST_AT_ONCE = """
import threading

import torch

barrier, results = threading.Barrier(8), []

def work(number):
    barrier.wait()
    backend = ("onnxrt", "onnx_debug", "fx_debug")[number % 3]
    results.append(callable(torch.compile(torch.nn.ReLU(), backend=backend)))

threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert results == 8 * [True], results
"""


def test_threads_of_a_process_compile_first_at_once() -> None:
    done = subprocess.run([sys.executable, "-c", FIRST_AT_ONCE], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_threads_that_dump_first_at_once_share_a_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``onnx_compiler`` is called under no lock of Dynamo's."""
    made = []

    def slow(*args: object) -> Manifest:
        time.sleep(0.01)
        made.append(Manifest(*args))  # type: ignore[arg-type]
        return made[-1]

    monkeypatch.setattr(manifest, "Manifest", slow)
    at_once(*4 * [lambda: onnx_compiler(debug=True, dump_dir=str(tmp_path))])
    assert len(made) == 1
