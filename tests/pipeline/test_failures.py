"""Failures around a compile or a call: the result is right or the error clear, and the next compile works."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import types
from pathlib import Path

import onnxruntime
import pytest
import torch
from conftest import assert_same_values, compiled, counted
from onnxscript.onnx_opset import opset23 as op

import dynamo_backends
import passes
from dynamo_backends.dumps.reading import find_run
from dynamo_backends.exporter.converters.registry import CONVERTERS
from dynamo_backends.runtime import session as session_module
from dynamo_backends.runtime.memory_arena import ARENA
from dynamo_backends.runtime.node_support import ANSWERS


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 2))


def assert_trains_as_eager(backend: str = "onnxrt", **options: object) -> None:
    """Asserts eager's results and gradients for a newly compiled model."""
    torch._dynamo.reset()
    ours, theirs = model(), model()
    x = torch.linspace(-1, 1, 12).reshape(3, 4)
    function = torch.compile(ours, backend=backend, options=options, dynamic=False)
    with torch.no_grad():
        assert_same_values(function(x), theirs(x))
    actual, expected = function(x), theirs(x)
    assert_same_values(actual, expected)
    actual.square().sum().backward()
    expected.square().sum().backward()
    assert_same_values([p.grad for p in ours.parameters()], [p.grad for p in theirs.parameters()])


@pytest.mark.parametrize(
    "error", [RuntimeError("no"), MemoryError(), onnxruntime.capi.onnxruntime_pybind11_state.Fail()]
)
def test_a_runtime_that_makes_no_session(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch runs the whole model; afterwards ONNX Runtime is asked again, if it was for want of memory at once."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(ANSWERS, "known", {})
    with monkeypatch.context() as patched:
        patched.setattr(onnxruntime, "InferenceSession", refuse)
        patched.setattr(ARENA, "_session", None)
        assert_trains_as_eager()
        assert counted("nodes_on_onnx") == 0
    if not isinstance(error, MemoryError):
        ANSWERS.known.clear()
    assert_trains_as_eager()
    assert counted("nodes_on_onnx") > 0


@pytest.mark.parametrize("error", [RuntimeError("broke"), MemoryError()])
@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_runtime_that_fails_in_a_call(error: Exception, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an inference, of a forward or of its backward: PyTorch runs the region."""
    calls = iter(range(100))

    class Failing:
        def __init__(self, session: onnxruntime.InferenceSession) -> None:
            self._sess = self
            self._session = session

        def run_with_ortvaluevector(self, *args: object) -> None:
            if next(calls) >= after:
                raise error
            self._session._sess.run_with_ortvaluevector(*args)

    make = session_module.Session.ort_session
    with monkeypatch.context() as patched:
        patched.setattr(session_module.Session, "ort_session", lambda self, threads: Failing(make(self, threads)))
        assert_trains_as_eager()
        assert counted("runtime_failures") == 3 - after
    assert_trains_as_eager()
    assert counted("runtime_failures") == 3 - after


@pytest.mark.parametrize("backend", ["onnxrt", "onnx_debug"])
def test_a_fake_implementation_that_is_wrong_is_named(
    backend: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with torch.library._scoped_library("wrongly_faked", "FRAGMENT") as library:
        library.define("order(Tensor x) -> Tensor")
        library.impl("order", lambda x: x.argsort(-1).float(), "CPU")
        torch.library.register_fake("wrongly_faked::order", lambda x: torch.empty_like(x, dtype=torch.int64))
        order = torch.ops.wrongly_faked.order.default
        function = compiled(lambda x: (order(x * 2) + 1) * 3, backend=backend, options={"dump_dir": str(tmp_path)})
        x = torch.randn(3, 4)
        with torch.no_grad():
            assert_same_values(function(x), (order(x * 2) + 1) * 3)
    said = " ".join(caplog.messages)
    assert "operator of order" in said and "torch.float32" in said and "torch.int64" in said
    if backend == "onnx_debug":
        (graph,) = find_run(tmp_path).graphs
        assert "wrongly_faked.order.default (" in str(graph.verdict) and "test_failures.py:" in str(graph.verdict)


def test_no_thread_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        patched.setattr(ARENA, "_watcher", None)
        assert_trains_as_eager()
        assert counted("nodes_on_onnx") > 0


def test_a_runtime_that_returns_nan_is_no_ok(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(CONVERTERS, torch.ops.aten.tanh.default, lambda x: op.Log(op.Neg(op.Abs(x))))
    function = compiled(lambda x: x.tanh() + 1, backend="onnx_debug", options={"dump_dir": tmp_path})
    function(torch.ones(3))
    torch._dynamo.reset()
    [path] = tmp_path.glob("run_*/manifest.json")
    [graph] = json.loads(path.read_text())["graphs"]
    assert "diverges" in graph["verdict"]


@pytest.mark.parametrize("backend", ["onnxrt", "onnx_debug", "fx_debug"])
def test_folders_that_disappear(backend: str, tmp_path: Path) -> None:
    """Between a compile and a call, and between two compiles, of a cache and of a dump."""
    options = (
        {"cache": True, "cache_dir": tmp_path / "cache"} if backend == "onnxrt" else {"dump_dir": tmp_path / "dump"}
    )
    if backend == "onnx_debug":
        options["compare"] = "every"
    function = torch.compile(lambda x: x.sin() @ x, backend=backend, options=options)
    x = torch.eye(3)
    for _ in range(2):
        assert_same_values(function(x), x.sin() @ x)
        for path in tmp_path.iterdir():
            shutil.rmtree(path)
    assert_same_values(function(x.double()), x.double().sin() @ x.double())
    for path in tmp_path.iterdir():
        shutil.rmtree(path)
        path.write_text("a file is in its place")
    assert_same_values(function(x[:2, :2]), x[:2, :2].sin() @ x[:2, :2])
    torch._dynamo.reset()
    assert_same_values(function(x), x.sin() @ x)


class _Interrupted(BaseException):
    """Like KeyboardInterrupt, which would end the tests if it came a moment late."""


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers")
@pytest.mark.parametrize("backend", ["onnxrt", "onnx_debug"])
def test_an_interrupt_anywhere_in_our_part_of_a_compile(backend: str, tmp_path: Path) -> None:
    """The interrupt arrives, and the next compile is right.

    In PyTorch's own code an interrupt may end the process (its C++ calls Python where no exception may leave) or
    leave a dispatch mode behind, with every backend: one that arrives there waits until the next line of ours.
    """
    folders = (
        {"cache": True, "cache_dir": tmp_path / "cache"} if backend == "onnxrt" else {"dump_dir": tmp_path / "dump"}
    )
    assert_trains_as_eager(backend, **folders)
    chance, arrived = random.Random(0), 0
    ours = tuple(str(Path(package.__file__).parent) for package in (dynamo_backends, passes))

    def interrupt(signal_number: int, frame: types.FrameType | None) -> None:
        if frame is None or not frame.f_code.co_filename.startswith(ours):
            signal.setitimer(signal.ITIMER_REAL, 0.0002)
            return
        raise _Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for i in range(12):
            try:
                signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.001, 0.6))
                if backend == "onnxrt":
                    shutil.rmtree(tmp_path, ignore_errors=True)
                assert_trains_as_eager(backend, **folders)
            except _Interrupted:
                arrived += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            if i % 3 == 2:
                assert_trains_as_eager(backend, **folders)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert arrived


LIMITED = """
import logging, resource, sys, torch
from pathlib import Path
sys.path[:0] = [sys.argv[2], sys.argv[2] + "/.."]
import conftest
from dynamo_backends.cache.store import Store
from test_failures import assert_trains_as_eager
torch.set_num_threads(1)
folder = Path(sys.argv[1])
cached = {"cache": True, "cache_dir": folder / "cache"}

def limit(what, size):
    resource.setrlimit(what, (size, resource.getrlimit(what)[1]))

def all_is_well():
    assert_trains_as_eager(**cached)
    assert_trains_as_eager("onnx_debug", dump_dir=folder / "dump")
    assert not list((folder / "cache").glob("*.unfinished"))
    store = Store(folder / "cache", 2**30)
    assert all(store.get(path.stem) is not None for path in store.folder.glob("*.cached"))

# no space on the disk, from none to nearly enough
for size in (0, 100, 3_000, 20_000):
    limit(resource.RLIMIT_FSIZE, size)
    all_is_well()
limit(resource.RLIMIT_FSIZE, resource.RLIM_INFINITY)
all_is_well()
assert list((folder / "cache").glob("*.cached"))

# no memory for a result, and for what is computed on the way to it
def work(x):
    return (x.exp() + 1).sum(0)

function = torch.compile(work, backend="onnxrt", dynamic=True)
function(torch.ones(2, 1000))
function(torch.ones(3, 1000))
large = torch.ones(20_000, 1000)
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
outcomes = set()
for more in (1, 30, 70, 100, 200, 400):
    limit(resource.RLIMIT_AS, used + more * 2**20)
    try:
        result = function(large)
        outcomes.add("right")
        torch.testing.assert_close(result[:3], torch.full((3,), 20_000 * (torch.ones(()).exp() + 1).item()))
        del result
    except (RuntimeError, MemoryError) as error:
        assert "emory" in str(error) or isinstance(error, MemoryError), error
        outcomes.add("error")
limit(resource.RLIMIT_AS, resource.RLIM_INFINITY)
assert "error" in outcomes, outcomes
torch.testing.assert_close(function(large[:5]), work(large[:5]))
all_is_well()
print("done")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the limits are Linux's")
def test_a_full_disk_and_no_memory(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", LIMITED, str(tmp_path), str(Path(__file__).parent)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.stdout.endswith("done\n"), (done.returncode, done.stderr[-3000:])


KILLED = """
import os, random, signal, sys, time
from pathlib import Path
from dynamo_backends.cache.store import StoredRecord, Store
chance = random.Random(0)
store = Store(Path(sys.argv[1]), 2**30)
content = [bytes([i]) * 2_000_000 for i in range(4)]
for _ in range(20):
    child = os.fork()
    if child == 0:
        while True:
            for i, item in enumerate(content):
                store.put(str(i), StoredRecord({"number": i}, [item]))
    time.sleep(chance.uniform(0.001, 0.03))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    for i, item in enumerate(content):
        found = store.get(str(i))
        assert found is None or (found.header == {"number": i} and list(found.blobs) == [item])
        assert found is not None or not (store.folder / f"{i}.cached").exists()
assert store.put("last", StoredRecord(None)) and store.get("last") is not None
print("done")
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_process_that_is_killed_while_it_writes_the_cache(tmp_path: Path) -> None:
    """An entry is there whole, or not at all."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.stdout == "done\n", done.stderr[-3000:]
