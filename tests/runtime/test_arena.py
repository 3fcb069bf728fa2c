"""The memory of intermediate results in sessions: kept between calls, freed when no session runs."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import onnx
import onnxruntime
import pytest
import torch
from conftest import counted

from dynamo_backends.bench import machine
from dynamo_backends.runtime import memory_arena

MB = 2**20


def test_the_model_is_an_identity() -> None:
    model = onnx.load_from_string(memory_arena.IDENTITY)
    onnx.checker.check_model(model)
    assert [node.op_type for node in model.graph.node] == ["Identity"]


def watchers() -> list[threading.Thread]:
    """The threads that wait until no session runs."""
    return [thread for thread in threading.enumerate() if thread.name == "dynamo_backends_arena"]


GIVING_BACK = """
import time
import torch
from dynamo_backends.bench import machine

def large(x):
    y = torch.stack([x + i for i in range(100)])  # 400 MB
    return (y.sin() * y.cos()).sum()

compiled, x = torch.compile(large, backend="onnxrt", options={"idle_seconds": 1}), torch.randn(2**20)
with torch.no_grad():
    torch.testing.assert_close(compiled(x), large(x), rtol=1e-3, atol=1.0)  # sums in another order
    compiled(x)
before = machine.resident()
end = time.monotonic() + 200
while machine.resident() > before - 200 * 2**20 and time.monotonic() < end:
    time.sleep(0.1)
print(before - machine.resident())
"""


@pytest.mark.skipif(machine.resident() is None, reason="not on Linux")
def test_memory_is_given_back_when_no_session_runs() -> None:
    """In a process of its own: in this one, sessions of other tests hold parts of large blocks."""
    done = subprocess.run([sys.executable, "-c", GIVING_BACK], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 200 * MB


PAUSES = """
import resource
import time
import torch

def large(x):
    y = torch.stack([x + i for i in range(100)])  # 100 MB
    return (y.sin() * y.cos()).sum()

compiled, x = torch.compile(large, backend="onnxrt"), torch.randn(2**18)

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    compiled(x)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

with torch.no_grad():
    faults()
    first = faults()  # compiling returned the memory
    at_once = faults()
    time.sleep(0.8)
    print(first, at_once, faults())
"""


@pytest.mark.skipif(machine.resident() is None, reason="not on Linux")
def test_a_call_after_a_pause_finds_its_memory() -> None:
    done = subprocess.run([sys.executable, "-c", PAUSES], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    first, at_once, after_pause = map(int, done.stdout.split())
    pages = 100 * MB // os.sysconf("SC_PAGE_SIZE")
    assert first > pages, "the intermediate values are smaller than they should be"
    assert max(at_once, after_pause) < pages / 10


def test_sessions_run_while_memory_is_given_back() -> None:
    compiled = torch.compile(lambda x: (x.sin() @ x.cos()).relu(), backend="onnxrt")
    x = torch.randn(200, 200)
    expected = (x.sin() @ x.cos()).relu()
    end = threading.Event()

    def shrink() -> None:
        while not end.is_set():
            memory_arena.ARENA.shrink()

    with torch.no_grad():
        thread = threading.Thread(target=shrink)
        compiled(x)
        thread.start()
        try:
            for _ in range(200):
                torch.testing.assert_close(compiled(x), expected)
        finally:
            end.set()
            thread.join()


ENDING = """
import torch
from dynamo_backends.runtime import memory_arena
used = memory_arena.ARENA.used
memory_arena.ARENA.used = lambda seconds: used({seconds})
compiled = torch.compile(lambda x: x.sin() + 1, backend="onnxrt")
with torch.no_grad():
    for _ in range(3):
        compiled(torch.ones(1000))
print("ran")
"""


@pytest.mark.parametrize("seconds", [0.0001, 600])
def test_a_process_ends_at_once_whatever_the_thread_does(seconds: float) -> None:
    """Before its arena is idle for so long."""
    script = ENDING.format(seconds=seconds)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout == "ran\n", done.stderr


LEAVING = """
import threading
import time
from dynamo_backends.runtime import memory_arena
begun = threading.Event()

def give_back():
    begun.set()
    time.sleep(0.3)
    print("gave back")

memory_arena.give_back = give_back
memory_arena.ARENA.used(0.001)
begun.wait()
"""


def test_a_process_does_not_end_while_memory_is_given_back() -> None:
    """A thread inside ONNX Runtime would crash it."""
    done = subprocess.run([sys.executable, "-c", LEAVING], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout == "gave back\n", done.stderr


def test_a_session_without_an_arena_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    made = memory_arena.onnxruntime.InferenceSession

    def fails(*args: object, **kwargs: object) -> object:
        raise RuntimeError("no memory")

    arena, options = memory_arena.Arena(), onnxruntime.SessionOptions()
    monkeypatch.setattr(memory_arena.onnxruntime, "InferenceSession", fails)
    arena.use(options)
    monkeypatch.undo()
    assert counted("sessions_without_arena") == 1 and not options.enable_cpu_mem_arena
    made(memory_arena.IDENTITY, options, providers=["CPUExecutionProvider"])
    arena.use(options)
    assert counted("sessions_without_arena") == 1 and options.enable_cpu_mem_arena


def test_memory_that_could_not_be_given_back_is_counted_and_given_back_later(monkeypatch: pytest.MonkeyPatch) -> None:
    arena, gave_back = memory_arena.Arena(), threading.Event()

    def fails() -> None:
        raise KeyError("planted")

    def used() -> None:
        before = watchers()
        arena.used(0)
        for thread in set(watchers()) - set(before):
            thread.join()

    monkeypatch.setattr(memory_arena, "give_back", fails)
    used()
    assert counted("memory_kept") == 1
    monkeypatch.setattr(memory_arena, "give_back", gave_back.set)
    used()
    assert gave_back.wait(10)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_gives_back_too() -> None:
    compiled = torch.compile(lambda x: x.sin() + 1, backend="onnxrt")
    with torch.no_grad():
        compiled(torch.ones(10))
        child = os.fork()
        if child == 0:
            is_clean = not watchers()
            compiled(torch.ones(10))
            os._exit(0 if is_clean and len(watchers()) == 1 else 1)
    assert os.waitpid(child, 0)[1] == 0
