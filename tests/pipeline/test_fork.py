"""Forked processes: right results, own threads, and an own dump folder."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dynamo_backends.cli import main

PROGRAM = """
import os, sys, threading, torch
torch.set_num_threads(1)  # with more, eager itself hangs in the child
torch.manual_seed(0)
backend, dump = sys.argv[1:]
options = {"threads": 2}
if backend == "onnx_debug":
    options.update(dump_dir=dump, compare="every")
model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU(), torch.nn.Linear(512, 512))
function = torch.compile(model, backend=backend, options=options, dynamic=False)
x, other = torch.randn(256, 512), torch.randn(128, 512)
with torch.no_grad():
    expected, expected_other = model(x), model(other)
    torch.testing.assert_close(function(x), expected)
    child = os.fork()
    if child == 0:
        for _ in range(3):
            torch.testing.assert_close(function(x), expected)  # compiled by the parent
        torch.testing.assert_close(function(other), expected_other)  # compiled here
        grandchild = os.fork()
        if grandchild == 0:
            torch.testing.assert_close(function(x), expected)
            os._exit(0)
        status = os.waitpid(grandchild, 0)[1]
        assert status == 0, status
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    torch.testing.assert_close(function(x), expected)
print("done")
"""


POOL = """
import multiprocessing, torch
torch.set_num_threads(1)
function = torch.compile(lambda x: x.sin() @ x, backend="onnxrt", options={"threads": 2})
x = torch.eye(256)
function(x)

def work(number):
    return (function(x * number) - (x * number).sin() @ (x * number)).abs().max().item()

if __name__ == "__main__":
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert max(pool.map(work, range(20))) < 1e-5
print("done")
"""


def run(program: str, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", program, *arguments]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, env=environment, text=True, start_new_session=True, **pipes)
    try:
        output, errors = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the children too
        raise
    assert process.returncode == 0, errors
    return output


pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")


def test_a_forked_child_runs_what_its_parent_compiled() -> None:
    """The threads of the parent's sessions are not in the child: a call there would wait for them for ever."""
    assert run(PROGRAM, "onnxrt", "") == "done\n"


def test_a_forked_child_writes_to_a_folder_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(PROGRAM, "onnx_debug", str(tmp_path)) == "done\n"
    manifests = {path.parent.name: json.loads(path.read_text()) for path in tmp_path.glob("run_*/manifest.json")}
    assert len(manifests) == 3
    parent = next(name for name, manifest in manifests.items() if manifest["forked_from"] is None)
    child = next(name for name, manifest in manifests.items() if manifest["forked_from"] == parent)
    grandchild = next(name for name, manifest in manifests.items() if manifest["forked_from"] == child)
    files_in = {name: [graph["files_in"] for graph in manifest["graphs"]] for name, manifest in manifests.items()}
    assert files_in == {parent: [None], child: [parent, None], grandchild: [parent, child]}
    assert main(["ls", str(tmp_path / grandchild)]) == 0
    listed = capsys.readouterr().out
    assert re.search(rf"0/inference: .*{tmp_path / parent}$", listed, re.M)
    assert re.search(rf"1/inference: .*{tmp_path / child}$", listed, re.M)
    for command in (
        ["show", "0"],
        ["show", "1", "--stage", "onnx"],
        ["show", "0", "--stage", "dynamo"],
        ["compare", "1", "--runs", "1"],
    ):
        assert main([*command, "-d", str(tmp_path / grandchild)]) == 0, command
    assert main(["report", str(tmp_path / grandchild)]) == 0
    shutil.rmtree(tmp_path / parent)
    capsys.readouterr()
    assert main(["show", "0", "-d", str(tmp_path / grandchild)]) == 2
    assert parent in capsys.readouterr().err
    runs = {name: [(graph["verdict"], graph["runs"]) for graph in manifests[name]["graphs"]] for name in manifests}
    assert runs == {parent: [("ok", 2)], child: [("ok", 3), ("ok", 1)], grandchild: [("ok", 1), (None, 0)]}


def test_a_pool_of_forked_processes() -> None:
    assert run(POOL) == "done\n"


LOCKED = """
import os, signal, threading, torch
from dynamo_backends.runtime.node_support import ANSWERS
torch.set_num_threads(1)
held, done = threading.Event(), threading.Event()

def compile_something():
    with ANSWERS.lock:
        held.set()
        done.wait()

threading.Thread(target=compile_something).start()
held.wait()
child = os.fork()
if child == 0:
    signal.alarm(40)
    torch.compile(lambda x: x.cos() * 2, backend="onnxrt")(torch.ones(3))
    os._exit(0)
status = os.waitpid(child, 0)[1]
done.set()
assert status == 0, status
print("done")
"""


def test_a_child_waits_for_no_thread_of_its_parent() -> None:
    assert run(LOCKED).endswith("done\n")
