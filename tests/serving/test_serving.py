"""For programs that serve a model: the warm-up, the metrics of one model, and one compile for several processes."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import prometheus_client
import pytest
import torch
from conftest import compiled, counted
from torch import nn

from dynamo_backends import WarmUpError, metrics, prometheus_collector, warm_up
from dynamo_backends.cache import store as store_module
from dynamo_backends.cache.store import Store
from dynamo_backends.common.call_statistics import CallStatistics
from dynamo_backends.errors import SessionError
from dynamo_backends.events import GraphSummary
from dynamo_backends.runtime.session import Session


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).relu()


class CompiledInItsClass(Model):
    @torch.compile(backend="onnxrt")
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).sin()


def in_part(x: torch.Tensor) -> torch.Tensor:
    """Has an operator that ONNX lacks."""
    return torch.linalg.eigvalsh(x.sin() + x.sin().mT).cos()


def compiled_forward() -> nn.Module:
    model = Model()
    model.forward = torch.compile(model.forward, backend="onnxrt")  # type: ignore[method-assign]
    return model


def compiled_in_place() -> nn.Module:
    model = Model()
    model.compile(backend="onnxrt")
    return model


WAYS: dict[str, Callable[[], Callable[..., object]]] = {
    "a module": lambda: compiled(Model()),
    "a layer of PyTorch": lambda: compiled(nn.Linear(4, 4)),
    "a function": lambda: compiled(lambda x: x.sin() + 1),
    "forward": compiled_forward,
    "in place": compiled_in_place,
}


@pytest.mark.parametrize("way", WAYS)
@torch.inference_mode()
def test_metrics_of_one_model(way: str) -> None:
    """Two models of a class may share their compiled graph; their metrics differ."""
    first, second = WAYS[way](), WAYS[way]()
    x = torch.randn(2, 4)
    first(x)
    for model in (first, second):
        assert metrics(model)["calls"] == 0
    for _ in range(3):
        first(x)
    second(x)
    for model, calls in ((first, 3), (second, 1)):
        result = json.loads(json.dumps(metrics(model)))
        assert result["calls"] == calls and result["graphs"] == 1 and result["operators_on_onnx"] > 0
        assert not result["fallbacks"] and not result["failures"] and not result["recompiles"]
        assert not result["calls_without_graph"]
        latency = result["latency_seconds"]
        assert 0 < latency["p50"] <= latency["p90"] <= latency["p99"] <= result["seconds"]
        assert 0 < result["seconds_outside_session"] < result["seconds"]


@torch.no_grad()
def test_metrics_count_what_one_model_does() -> None:
    first, second, part = compiled(Model()), compiled(Model()), compiled(in_part)
    for function in (first, second, part):
        metrics(function)
    first(torch.randn(2, 4))
    first.layer.weight.fill_(1.0)  # type: ignore[attr-defined]
    first(torch.randn(2, 4))
    second(torch.randn(3, 4))
    part(torch.randn(4, 4))
    assert metrics(copy.deepcopy(first))["calls"] == 0
    assert metrics(first)["recompiles"] == 0
    first(torch.randn(1, 4))
    assert metrics(first)["recompiles"] == 1 and metrics(second)["recompiles"] == 0  # ``second`` compiled one graph
    assert metrics(first)["weight_refreshes"] == 1 and metrics(second)["weight_refreshes"] == 0
    [fallback] = metrics(part)["fallbacks"]
    assert fallback["operator"] == "aten._linalg_eigh.default" and fallback["number"] == 1 and fallback["reason"]
    assert not metrics(first)["fallbacks"]


@torch.inference_mode()
def test_failed_calls_have_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    function = compiled(lambda x: x.sin() + 1)
    x = torch.randn(2)
    assert not metrics(function)["failures"]
    function(x)

    def fails(session: Session, args: object) -> None:
        raise SessionError("out of order")

    monkeypatch.setattr(Session, "__call__", fails)
    function(x)
    [failure] = metrics(function)["failures"]
    assert failure["event"] == "runtime_failures" and "out of order" in str(failure["reason"])
    with pytest.raises(WarmUpError) as raised:
        warm_up(function, [(x,)], fallback="error")
    [reason] = raised.value.reasons
    assert "out of order" in reason and "\n" not in reason
    assert not warm_up(function, [(x,)]).inputs[0].fallbacks


@torch.inference_mode()
def test_a_graph_whose_compile_failed_is_a_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object, **kwargs: object) -> None:
        raise AssertionError("broken")

    monkeypatch.setattr("dynamo_backends.pipeline.stages.compile_graph", fails)
    function = compiled(lambda x: x.sin() + 1)
    function(torch.randn(2))
    metrics(function)
    function(torch.randn(2))
    [fallback] = metrics(function)["fallbacks"]
    assert "broken" in str(fallback["reason"]) and fallback["number"] == 2


class Skipped(nn.Module):
    @torch.compiler.disable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin()


NOT_ON_ONNX: dict[str, tuple[Callable[..., object], list[tuple[torch.Tensor]]]] = {
    "not compiled": (torch.sin, [(torch.ones(2),)]),
    "another backend": (torch.compile(torch.nn.Tanh(), backend="eager"), [(torch.ones(2),)]),
    "skipped": (compiled(Skipped()), [(torch.ones(2),)]),
    "too many sizes": (compiled(lambda x: x.cos(), dynamic=False), [(torch.ones(size),) for size in range(2, 12)]),
}


@pytest.mark.parametrize("case", NOT_ON_ONNX)
@torch.inference_mode()
def test_calls_without_a_compiled_graph_are_failures(case: str) -> None:
    function, inputs = NOT_ON_ONNX[case]
    if case != "not compiled":
        metrics(function)
    with torch._dynamo.config.patch(recompile_limit=8):
        missed = [item.title for item in warm_up(function, inputs).inputs if item.failures]
        assert len(missed) == (2 if case == "too many sizes" else 1)
        with pytest.raises(WarmUpError) as raised:
            warm_up(function, inputs, fallback="error", recompile="error")
    assert [reason.split(":")[0] for reason in raised.value.reasons] == missed
    if case != "not compiled":
        now = metrics(function)
        assert now["calls_without_graph"] >= len(missed)
        assert [failure["event"] for failure in now["failures"]] == ["calls_without_graph"]


@torch.inference_mode()
def test_calls_with_a_graph_or_an_error_are_not_without_graph() -> None:
    """Also if the graph has no operators for ONNX Runtime, and if the caller handles an error."""

    def fails(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] == 3:
            raise ValueError
        return x.sin()

    views, failing = compiled(lambda x: x.detach()), compiled(fails)
    tuned = torch.compile(Model(), backend="onnxrt", mode="max-autotune")
    for function in (views, failing, tuned):
        metrics(function)
        for _ in range(12):
            function(torch.randn(2, 4))
        with pytest.raises(ValueError) if function is failing else contextlib.nullcontext():
            function(torch.randn(3, 4))
        assert metrics(function)["calls"] == 13 and not metrics(function)["calls_without_graph"]
    metrics(skips := compiled(Skipped()))
    try:
        raise ValueError
    except ValueError:
        skips(torch.randn(2))
    assert metrics(skips)["calls_without_graph"] == 1


@torch.inference_mode()
def test_a_second_model_of_a_class_does_not_recompile() -> None:
    for layers in (nn.Linear(4, 4), nn.Tanh()):
        model = compiled(nn.Sequential(layers))
        warm_up(model, [(torch.randn(2, 4),)], recompile="error")
        with pytest.raises(WarmUpError):
            warm_up(model, [(torch.randn(1, 4),)], recompile="error")


def test_metrics_are_read_while_graphs_are_called() -> None:
    statistics, graphs, are_read = CallStatistics(), [], threading.Event()

    def call() -> None:
        while not are_read.is_set():
            graphs.append(GraphSummary("a graph", 1, 0, ()))
            statistics.add_graph(graphs[-1])
            statistics.add(f"event {len(graphs)}", 1, "")
            if len(graphs) > 200:
                graphs.clear()

    calls = threading.Thread(target=call)
    calls.start()
    try:
        assert all(len(statistics.snapshot().graphs) <= 202 for _ in range(1000))
    finally:
        are_read.set()
        calls.join()


def test_what_is_not_compiled_by_itself_is_refused() -> None:
    @functools.wraps(compiled(lambda x: x))
    def wrapped(x: object) -> object:
        return x

    for other in (Model(), torch.sin, wrapped, 3, CompiledInItsClass()):
        with pytest.raises(TypeError):
            metrics(other)
    assert metrics(CompiledInItsClass.forward)["calls"] == 0


@torch.inference_mode()
def test_metrics_keep_no_model_alive() -> None:
    model = Model()
    function = compiled(model)
    collector = prometheus_collector({"model": function})
    function(torch.randn(2, 4))
    alive = weakref.ref(model)
    torch._dynamo.reset()
    del model, function
    gc.collect()
    assert alive() is None and collector is not None


@torch.inference_mode()
def test_prometheus() -> None:
    first, second = compiled(Model()), compiled(in_part)
    registry = prometheus_client.CollectorRegistry(auto_describe=True)
    registry.register(prometheus_collector({"first": first, "second": second}))
    first(torch.randn(2, 4))
    second(torch.randn(4, 4))
    second(torch.randn(4, 4))
    name = "dynamo_backends_"
    for model, calls in (("first", 1), ("second", 2)):
        assert registry.get_sample_value(f"{name}call_seconds_count", {"model": model}) == calls
        assert registry.get_sample_value(f"{name}call_seconds", {"model": model, "quantile": "0.99"}) > 0
        assert registry.get_sample_value(f"{name}events_total", {"model": model, "event": "graphs"}) == 1
    assert registry.get_sample_value(f"{name}operators", {"model": "second", "place": "pytorch"}) == 1
    assert f'{name}fallbacks{{model="second"' in prometheus_client.generate_latest(registry).decode()


@torch.inference_mode()
def test_warm_up() -> None:
    model = Model()
    function = compiled(model)
    inputs = [(torch.randn(2, 4),), {"x": torch.randn(3, 4)}, [torch.randn(5, 4)]]
    result = warm_up(function, inputs)
    assert result.is_settled and [item.graphs for item in result.inputs] == [1, 1, 0]
    assert all(item.calls == 2 and item.first_seconds > 0 and not item.fallbacks for item in result.inputs)
    again = warm_up(function, inputs, fallback="error", recompile="error")
    assert again.is_settled and all(item.calls == 1 and not item.graphs for item in again.inputs)
    assert "float32[3, 4]" in str(result)


def test_warm_up_waits_for_the_engine_of_its_own_model_only() -> None:
    other = torch.compile(Model(), backend="onnxrt", options={"placement": "fastest"})
    other(torch.randn(2, 4)).sum().backward()  # autotuning has just begun
    with torch.inference_mode():
        assert warm_up(compiled(Model()), [(torch.randn(2, 4),)]).inputs[0].calls == 2
        tuned = torch.compile(Model(), backend="onnxrt", mode="max-autotune")
        result = warm_up(tuned, [(torch.randn(2, 4),)], most_calls=500)
    assert result.is_settled and result.inputs[0].calls > 2


@torch.inference_mode()
def test_warm_up_refuses_recompiles_and_ends() -> None:
    function = compiled(lambda x: x.sin())
    with pytest.raises(WarmUpError) as raised:
        warm_up(function, [(torch.randn(2, 4),), (torch.randn(3, 4),)], recompile="error")
    assert len(raised.value.reasons) == 1 and "[3, 4]" in raised.value.reasons[0]

    def forgets(x: torch.Tensor) -> object:
        torch._dynamo.reset()
        return function(x)

    result = warm_up(forgets, [(torch.randn(2),)], most_calls=3)
    assert not result.is_settled and result.inputs[0].calls == 3


def test_warm_up_checks_its_arguments() -> None:
    with pytest.raises(TypeError, match=r"\(x,\)"):
        warm_up(compiled(torch.sin), [torch.ones(2)])  # type: ignore[list-item]
    with pytest.raises(ValueError):
        warm_up(compiled(torch.sin), [], fallback="never")


def test_without_a_terminal_nothing_is_imported_for_the_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)  # its import fails
    assert warm_up(lambda x: x, [(torch.ones(2),)]).is_settled


# Processes that start at once


COMPILES = """
import sys
import torch
from torch._dynamo.utils import counters
from dynamo_backends.cache.graphs import CachedGraphs
from dynamo_backends.pipeline import stages

what, folder = sys.argv[1:]
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU()).eval()
compile_it, lock = stages.compile_graph, CachedGraphs.locked

def locked(*args):
    print("locks", flush=True)
    return lock(*args)

def slowly(*args, **kwargs):
    print("compiles", flush=True)
    if what == "hangs":
        sys.stdin.read()
    return compile_it(*args, **kwargs)

stages.compile_graph, CachedGraphs.locked = slowly, locked
print("starts", flush=True)
sys.stdin.readline()
compiled = torch.compile(model, backend="onnxrt", options={"cache": True, "cache_dir": folder})
with torch.no_grad():
    torch.testing.assert_close(compiled(torch.ones(2, 4)), model(torch.ones(2, 4)))
print(counters["dynamo_backends"]["cache_misses"], counters["dynamo_backends"]["cache_hits"])
"""


class Starting:
    """A process that is ready to compile a model, with what is sent to it next."""

    def __init__(self, what: str, folder: Path) -> None:
        command = [sys.executable, "-c", COMPILES, what, str(folder)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def compile(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def prints(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


def test_processes_that_start_at_once_compile_a_graph_once(tmp_path: Path) -> None:
    """One hangs while it compiles, and is killed. Then one of the others that waited compiles for both."""
    hanging, *others = processes = [Starting(what, tmp_path) for what in ("hangs", "compiles", "compiles")]
    try:
        assert [process.prints() for process in processes] == ["starts"] * 3
        hanging.compile()
        assert [hanging.prints(), hanging.prints()] == ["locks", "compiles"]
        for process in others:
            process.compile()
        assert [process.prints() for process in others] == ["locks"] * 2
        hanging.process.kill()
        printed = sorted(process.process.communicate()[0].split() for process in others)
        assert printed == [["0", "1"], ["compiles", "1", "0"]]
        assert {path.suffix for path in tmp_path.iterdir()} == {".cached"}
    finally:
        for process in processes:
            process.process.kill()
            process.process.communicate()


def _hold(store: Store, keys: Sequence[str], connection: Connection) -> None:
    with contextlib.ExitStack() as locks:
        for key in keys:
            locks.enter_context(store.locked(key, 0.0))
        connection.send("holds")
        connection.recv()


def test_a_suspended_process_is_not_waited_for_graph_by_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_STALLED_SECONDS", 2.0)
    monkeypatch.setattr(store_module, "_BEAT_SECONDS", 0.1)
    store, keys = Store(tmp_path, 1000), [f"key {number}" for number in range(8)]
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_hold, args=(store, keys, theirs), daemon=True)
    process.start()
    assert process.pid is not None
    try:
        assert ours.recv() == "holds"
        time.sleep(2.5)
        with store.locked(keys[0], 0.1):  # its holder shows progress, but takes too long
            assert (counted("cache_waits"), counted("cache_locks_ignored")) == (1, 1)
        os.kill(process.pid, signal.SIGSTOP)
        for key in keys:
            with store.locked(key, 600.0):
                assert len(list(tmp_path.iterdir())) == 8
        assert (counted("cache_waits"), counted("cache_locks_ignored")) == (2, 9)
    finally:
        process.kill()


def test_a_lock_that_is_never_free_is_not_waited_for_forever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each wait is counted; a warning says while it lasts what is waited for, and one that it was in vain."""
    monkeypatch.setattr(store_module, "_SILENT_SECONDS", 0.01)
    store = Store(tmp_path, 1000)
    with store.locked("key", 0.0), store.locked("another key", 0.0):
        assert counted("cache_waits") == 0
        with store.locked("key", 0.2):
            assert len(list(tmp_path.iterdir())) == 2
    assert not list(tmp_path.iterdir())
    assert counted("cache_waits") == counted("cache_locks_ignored") == 1
    assert [record.levelname for record in caplog.records if record.name == store_module.__name__] == ["WARNING"] * 2
