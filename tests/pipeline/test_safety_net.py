"""The safety net: if our code fails, PyTorch runs the graph; the failure is counted, and warned of once.

``chaos.py`` makes each of our functions raise; these tests cover the handlers one by one.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import assert_same_as_eager, assert_same_values, compiled, counted, runnable_region
from torch._dynamo.backends import registry
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters

from dynamo_backends import backends, events, onnx_compiler
from dynamo_backends.cache import graphs, store
from dynamo_backends.common import safety_net
from dynamo_backends.common.garbage_collection import Freezer
from dynamo_backends.debug import run_comparison
from dynamo_backends.debug.manifest import Manifest
from dynamo_backends.debug.observer import DebugObserver
from dynamo_backends.errors import CandidateError, SessionError, TranslationError
from dynamo_backends.graphs import descriptors, dynamo_frames, fake_tensors
from dynamo_backends.graphs.size_assumptions import Assumptions
from dynamo_backends.pipeline import runners, stages
from dynamo_backends.placement.autotuner import TunedGraph
from dynamo_backends.runtime.session import Session


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Dropout(), torch.nn.Linear(8, 2))


def broken(*args: object, **kwargs: object) -> object:
    raise KeyError("broken")


class _On:
    """Raises in one of its calls and otherwise calls another function; raises in all if ``call`` is ``None``."""

    def __init__(self, function: Callable[..., object], call: int | None) -> None:
        self._function = function
        self._call = call
        self.calls = 0

    def __call__(self, *args: object, **kwargs: object) -> object:
        self.calls += 1
        if self._call is None or self.calls == self._call + 1:
            raise KeyError("broken")
        return self._function(*args, **kwargs)


def assert_runs_as_eager(settings: Mapping[str, object] | None = None, calls: int = 2) -> None:
    """Asserts eager's results in training, in inference in each grad mode, and under autocast."""
    x = torch.linspace(-1, 1, 12).reshape(3, 4)
    assert_same_as_eager(model(), x, calls=calls, settings=settings)
    with torch.no_grad():
        assert_same_as_eager(model().eval(), x, settings=settings)
    with torch.inference_mode():
        assert_same_as_eager(model().eval(), x, settings=settings)


@pytest.mark.parametrize("call", [0, 1, 2, None])
def test_a_failure_while_compiling(
    call: int | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of the forward, the backward or an inference graph: it is counted, and told once."""
    split = _On(stages.split_graph, call)
    monkeypatch.setattr(stages, "split_graph", split)
    with caplog.at_level(logging.WARNING, "dynamo_backends"):
        assert_runs_as_eager()
    assert counted("internal_failures") == (split.calls if call is None else 1)
    assert [record.name for record in caplog.records].count("dynamo_backends.common.safety_net") == 1
    assert (counted("nodes_on_onnx") > 0) == (call is not None)


@pytest.mark.parametrize(
    "where", ["dynamo_frames.name_call", "descriptors.name_values", "the stage joint", "weights_of", "only_new"]
)
def test_a_failure_before_and_between_the_stages(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    holder, name = {
        "dynamo_frames.name_call": (dynamo_frames, "name_call"),
        "descriptors.name_values": (descriptors, "name_values"),
        "the stage joint": (stages, "run_joint"),
        "weights_of": (runners, "weights_of"),
        "only_new": (Freezer, "enter"),
    }[where]
    monkeypatch.setattr(holder, name, broken)
    assert_runs_as_eager()
    assert counted("internal_failures") > 0


def test_a_compile_at_a_call_that_assumes_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo has its guards by then, and would call what holds for some sizes only with others."""
    monkeypatch.setattr(Assumptions, "growth", lambda _: "planted")
    network = model().eval()

    def run(**options: object) -> None:
        function = compiled(network, dynamic=True, options={"verify_passes": True, **options})
        with torch.no_grad():
            for size in (3, 5):
                assert_same_values(function(x := torch.randn(size, 4)), network(x))

    run()
    assert counted("not_compiled_at_a_call") == 1 and counted("nodes_on_onnx") == counted("internal_failures") == 0
    torch._dynamo.reset()
    with pytest.raises(CandidateError, match="graph .* inference.*planted"):
        run(fallback="error")


def test_a_failure_inside_a_transform(monkeypatch: pytest.MonkeyPatch) -> None:
    """The levels of ``vmap`` and ``grad`` that the trace had entered are left."""
    monkeypatch.setattr(fake_tensors, "strides_of_kernel", _On(fake_tensors.strides_of_kernel, 1))

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.func.vmap(torch.func.grad(lambda row: (row.expand(1, 8) * row).roll(1, 0).sin().sum()))(x)

    for rows in (1, 3):
        x = torch.randn(rows, 8)
        assert_same_values(compiled(function)(x), function(x))
    assert counted("internal_failures") == 1


def test_dynamos_graph_as_captured() -> None:
    """Passes that changed it before the failure do not count; transforms, symbolic sizes and autocast are eager's."""

    def fails(module: torch.fx.GraphModule) -> Callable[..., object]:
        for node in module.graph.find_nodes(op="call_method"):
            node.target = "cos"
        module.recompile()
        raise KeyError("broken")

    def backend(module: torch.fx.GraphModule, inputs: Sequence[object]) -> Callable[..., object]:
        return safety_net.or_captured(module, inputs, lambda: fails(module), must_compile=lambda: False)

    def function(x: torch.Tensor) -> tuple[torch.Tensor, int]:
        with torch.autocast("cpu", torch.bfloat16):
            y = torch.func.grad(lambda y: (y.sin() @ y.t()).sum())(x)
        return y * x.shape[0], x.shape[0]

    call = torch.compile(function, backend=backend, dynamic=True, fullgraph=True)
    for size in (2, 3):
        x = torch.randn(size, 4)
        assert_same_values(call(x), function(x))


def test_a_failure_is_an_error_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "split_graph", broken)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        compiled(torch.relu, options={"fallback": "error"})(torch.ones(3))
    assert isinstance(caught.value.inner_exception, KeyError)


def test_errors_of_the_users_program_and_of_dynamo_are_theirs() -> None:
    assert not safety_net.is_meant_for_caller(KeyError())
    for name in ("RestartAnalysis", "TensorifyScalarRestartAnalysis", "SkipFrame"):
        assert safety_net.is_meant_for_caller(getattr(torch._dynamo.exc, name)())
    with pytest.raises(RuntimeError, match="too large"):
        compiled(lambda x: torch._assert_async(x.sum() < 0, "too large"))(torch.ones(3))
    assert counted("internal_failures") == 0


def told(caplog: pytest.LogCaptureFixture) -> str:
    """The safety net's warning."""
    [message] = [record.getMessage() for record in caplog.records if record.name == safety_net.__name__]
    return message


def test_what_aot_autograd_does_not_trace(caplog: pytest.LogCaptureFixture) -> None:
    """Eager runs it, so PyTorch runs the graph as it was captured; nobody need report it."""
    x = torch.randn(3, requires_grad=True)
    assert_same_values(compiled(lambda x: x // 16 + x)(x).detach(), (x // 16 + x).detach())  # type: ignore[attr-defined]
    assert counted("internal_failures") == 1
    assert "aot_eager" in told(caplog) and "report" not in told(caplog)


@pytest.mark.parametrize("where", ["Dynamo's graph", "AOTAutograd's graph", "a call"])
def test_what_is_our_fault_is_to_be_reported(
    where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    holder, name = {
        "Dynamo's graph": (dynamo_frames, "name_call"),
        "AOTAutograd's graph": (stages, "split_graph"),
        "a call": (Session, "__call__"),
    }[where]
    monkeypatch.setattr(holder, name, broken)
    compiled(torch.sin)(torch.ones(3))
    assert "aot_eager" in told(caplog) and "report" in told(caplog)


def test_finding_out_whose_fault_it_is_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No random number, gradient or guard; and code of the user's is not run once more."""
    calls = 0

    @torch._dynamo.allow_in_graph
    def users(x: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return x * 2

    def function(x: torch.Tensor, uses_it: bool) -> torch.Tensor:
        y = (layer(x) + torch.rand(4)) * x.sum(0)
        return users(y) if uses_it else y

    def run(backend: str, uses_it: bool) -> tuple[list[torch.Tensor], int, int]:
        torch._dynamo.reset()
        events.logged.clear()
        counters.clear()
        torch.manual_seed(0)
        before = calls
        call = torch.compile(function, backend=backend, dynamic=True)
        results = [call(torch.full((rows, 4), 0.5), uses_it) for rows in (2, 3, 5)]
        return results, calls - before, counters["stats"]["unique_graphs"]

    layer = torch.nn.Linear(4, 4)
    expected = [run("eager", uses_it) for uses_it in (False, True)]
    monkeypatch.setattr(dynamo_frames, "name_call", broken)
    for uses_it in (False, True):
        caplog.clear()
        results, *numbers = run("onnxrt", uses_it)
        torch.testing.assert_close(results, expected[uses_it][0])
        assert numbers == list(expected[uses_it][1:]) and layer.weight.grad is None
        assert ("not tried" in told(caplog)) == uses_it


@pytest.mark.parametrize("error", [TypeError("another interface"), MemoryError(), SessionError("not today")])
def test_a_region_that_fails_in_each_call(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is tried less and less, and told once."""
    tries = 0

    def fails(*args: object) -> None:
        nonlocal tries
        tries += 1
        raise error

    monkeypatch.setattr(Session, "__call__", fails)
    function = compiled(lambda x: x.sin() + x.cos())
    with caplog.at_level(logging.WARNING, "dynamo_backends"):
        for i in range(100):
            x = torch.full((3,), float(i))
            assert_same_values(function(x), x.sin() + x.cos())
    assert 3 < tries < 10
    assert counted("internal_failures") + counted("runtime_failures") == tries
    assert counted("calls_after_failures") == 100 - tries
    assert len(caplog.records) == 1
    function = compiled(lambda x: x.sin() - x.cos(), options={"fallback": "error"})
    for _ in range(2):
        with pytest.raises(type(error)):
            function(torch.ones(3))


class Region:
    """A region that adds one, and in PyTorch two, and that fails with some arguments or at some times."""

    def __init__(self, fails: Callable[[torch.Tensor], bool]) -> None:
        self.fails = fails
        self.tries = 0
        self.region = runnable_region(self._session, self._in_pytorch)

    def _session(self, args: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        self.tries += 1
        if self.fails(args[0]):
            raise SessionError("not today")
        return [args[0] + 1]

    def _in_pytorch(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [x + 2]

    def is_on_onnx(self, size: int) -> bool:
        """Whether ONNX Runtime ran a call."""
        [result] = self.region(torch.zeros(size))
        return bool(result[0] == 1)  # type: ignore[index]


@pytest.mark.parametrize("calls", [1, 7, 50])
def test_a_region_that_recovers(calls: int, caplog: pytest.LogCaptureFixture) -> None:
    """It takes no longer than it failed."""
    region = Region(lambda x: len(ran) < calls)
    ran: list[bool] = []
    with caplog.at_level(logging.INFO, "dynamo_backends"):
        while len(ran) <= 2 * calls + 1:
            ran.append(region.is_on_onnx(3))
        assert all(region.is_on_onnx(3) for _ in range(100))
    assert not any(ran[:calls]) and ran[-1]
    assert counted("recovered_regions") == 1 and counted("calls_after_failures") == ran.count(False) - counted(
        "runtime_failures"
    )
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def test_failures_now_and_then_keep_no_region_from_onnx_runtime() -> None:
    calls = iter(range(10_000))
    region = Region(lambda x: next(calls) % 100 == 50)
    on_onnx = [region.is_on_onnx(3) for _ in range(1_000)]
    assert on_onnx.count(False) == 20 and on_onnx[-1]  # ten failures, and one call after each


def test_sizes_that_fail_keep_no_others_from_onnx_runtime() -> None:
    region = Region(lambda x: len(x) > 5)
    assert sum(region.is_on_onnx(3) for _ in range(100) if not region.is_on_onnx(9)) > 95
    assert region.tries < 100 + 10
    for _ in range(100):
        assert not region.is_on_onnx(9)
    assert sum(region.is_on_onnx(3) for _ in range(10)) >= 9


def test_sizes_that_all_fail_are_tried_less_and_less() -> None:
    region = Region(lambda x: True)
    for size in range(500):
        assert not region.is_on_onnx(size + 1)
    assert region.tries < 12


def test_pytorchs_error_wins_over_a_regions() -> None:
    def in_pytorch(*args: object) -> list[object]:
        raise IndexError("the user's")

    region = runnable_region(broken, in_pytorch)
    for _ in range(3):
        with pytest.raises(IndexError):
            region(torch.ones(3))
    assert counted("internal_failures") == counted("calls_after_failures") == 0


@pytest.mark.parametrize("method", ["_build", "_compared_with_reference", "_settle"])
def test_a_failure_while_autotuning(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch runs the graph from then on, once in each call, with eager's random numbers."""
    monkeypatch.setattr(TunedGraph, method, broken)
    assert_runs_as_eager({"options": {"placement": "measured"}}, calls=120)
    assert 1 <= counted("internal_failures") <= 4


def test_a_candidate_that_cannot_be_compiled_is_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "split_graph", broken)
    assert_same_as_eager(model(), torch.randn(3, 4), calls=60, settings={"options": {"placement": "measured"}})
    assert counted("internal_failures") == counted("autotune_rejected ONNX Runtime") == 1


@pytest.mark.parametrize("name", ["describe", "to_record", "from_record", "constants"])
def test_a_failure_of_the_cache(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is as if nothing were there."""
    options = {"cache": True, "cache_dir": tmp_path}
    function = torch.sin
    compiled(function, options=options)(torch.ones(3))
    assert counted("cache_stored") == 1
    torch._dynamo.reset()
    monkeypatch.setattr(graphs, name, broken)
    for size in (3, 4):  # one that is there, and one that is not
        assert_same_values(compiled(function, options=options, dynamic=False)(torch.ones(size)), torch.ones(size).sin())
    assert counted("nodes_on_onnx") > 0
    assert counted("internal_failures") + counted("not_cached") > 0 or name == "from_record"


def test_a_failure_of_the_thread_that_touches_a_lock(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    touched = store.os.utime

    def utime(path: Path) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise KeyError("broken")
        touched(path)

    monkeypatch.setattr(store, "_BEAT_SECONDS", 0.001)
    monkeypatch.setattr(store.os, "utime", utime)
    with store.Store(tmp_path, 2**20).locked("key", 1.0):
        for thread in threading.enumerate():
            if thread.name == "dynamo_backends_cache_lock":
                thread.join(10)
    assert counted("internal_failures") == 1


def test_a_failure_in_the_registry_of_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "onnxrt"
    torch._dynamo.list_backends()  # finds the entry points
    monkeypatch.setitem(registry._BACKENDS, name, SimpleNamespace(load=lambda: backends.onnxrt))
    monkeypatch.delitem(registry._COMPILER_FNS, name, raising=False)
    monkeypatch.setattr(registry.register_backend, "__wrapped__", _On(registry.register_backend.__wrapped__, 0))
    assert registry.lookup_backend(name) is backends.onnxrt
    assert counted("internal_failures") == 1


@pytest.mark.parametrize("partitions", [False, True])
def test_a_failure_under_aot_autograd(partitions: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    fw_compiler = onnx_compiler()
    partitioner = {"partition_fn": fw_compiler.partition_fn} if partitions else {}
    if partitions:
        monkeypatch.setattr(stages, "run_joint", broken)
    else:
        monkeypatch.setattr(stages, "split_graph", broken)
    assert_runs_as_eager({"backend": aot_autograd(fw_compiler=fw_compiler, **partitioner)})
    assert counted("internal_failures") > 0


DEBUG = [
    (DebugObserver, "__init__"),
    (DebugObserver, "stage"),
    (DebugObserver, "pass_listener"),
    (DebugObserver, "entry"),
    (DebugObserver, "runner"),
    (DebugObserver, "judge"),
    (DebugObserver, "conclude"),
    (DebugObserver, "count_run"),
    (Manifest, "add_stage"),
    (run_comparison.Judge, "judge"),
    (run_comparison.RunSelector, "begin"),
    (run_comparison.CapturedGraph, "check"),
    (DebugObserver, "add_gradients"),
]


@pytest.mark.parametrize(("kind", "method"), DEBUG)
def test_a_failure_of_the_debug_backend(
    kind: type, method: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The call does not end, and no verdict is ``ok``."""
    monkeypatch.setattr(kind, method, broken)
    x = torch.linspace(-1, 1, 12).reshape(3, 4)
    assert_same_as_eager(model(), x, calls=2, settings={"backend": "onnx_debug", "options": {"dump_dir": tmp_path}})
    assert counted("internal_failures") > 0
    for path in tmp_path.glob("run_*/manifest.json"):
        verdicts = [graph["verdict"] for graph in json.loads(path.read_text())["graphs"]]
        assert method == "entry" or "ok" not in verdicts, verdicts
        assert not verdicts or any("not comparable" in str(verdict) for verdict in verdicts) or method == "entry"


def test_a_backward_that_was_not_compiled_is_in_the_manifest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(stages, "split_graph", _On(stages.split_graph, 1))
    settings = {"backend": "onnx_debug", "options": {"dump_dir": tmp_path}}
    assert_same_as_eager(model(), torch.randn(3, 4), settings=settings)
    [path] = tmp_path.glob("run_*/manifest.json")
    [graph] = json.loads(path.read_text())["dynamo_graphs"]
    assert list(graph["not_compiled"]) == ["backward"]


def test_a_graph_whose_nodes_do_not_move_is_not_split_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """No handler could end that."""
    split = stages.split_graph

    def fails(*args: object, **kwargs: object) -> object:
        raise TranslationError("fails")

    monkeypatch.setattr(stages, "split_graph", lambda graph, support, moved: split(graph, support, {}))
    monkeypatch.setattr(stages, "emit", fails)
    with torch.no_grad():
        assert_same_as_eager(model().eval(), torch.ones(3, 4))
    assert counted("internal_failures") == 1
