"""The dump folder: files are written atomically, and no error of the file system reaches the model."""

from __future__ import annotations

import errno
import logging
import os
import signal
import threading
from pathlib import Path

import onnx
import pytest
import torch
from torch import fx

from dynamo_backends.debug.dump_folder import DumpFolder, dump_folder, graph_folder
from dynamo_backends.debug.stage_files import stage_text
from dynamo_backends.debug.tensor_files import write_tensor
from dynamo_backends.dumps.reading import DumpError, latest_run
from dynamo_backends.graphs.artifacts import GraphName
from dynamo_backends.graphs.locations import short_file


def _files(root: Path) -> list[str]:
    return sorted(path.name for path in root.rglob("*") if path.is_file())


def _disk_full(*args: object, **kwargs: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_nothing_is_made_before_the_first_file(tmp_path: Path) -> None:
    DumpFolder(tmp_path / "dump")
    assert not (tmp_path / "dump").exists()


def test_run_folder_has_process_and_latest(tmp_path: Path) -> None:
    folder = DumpFolder(tmp_path)
    assert folder.write_text("graph_000/dynamo.py", "é\n")
    assert folder.location is not None and f"_pid{os.getpid()}" in folder.location.name
    assert (tmp_path / "latest" / "graph_000" / "dynamo.py").read_text(encoding="utf-8") == "é\n"
    assert latest_run(tmp_path) == folder.location
    assert _files(folder.location) == ["dynamo.py"]


def test_rank_is_in_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    location = DumpFolder(tmp_path).location
    assert location is not None and location.name.endswith("_rank3")


def test_one_folder_for_each_process_and_root(tmp_path: Path) -> None:
    assert dump_folder(tmp_path / "a") is dump_folder(tmp_path / "b" / ".." / "a")
    assert dump_folder(tmp_path / "a") is not dump_folder(tmp_path / "b")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_child_forked_while_a_thread_makes_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_end = threading.Event(), threading.Event()
    begin = DumpFolder.__init__

    def slow(self: DumpFolder, root: str) -> None:
        begun.set()
        may_end.wait()
        begin(self, root)

    monkeypatch.setattr(DumpFolder, "__init__", slow)
    thread = threading.Thread(target=dump_folder, args=[tmp_path / "parent"])
    thread.start()
    begun.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(5)  # ends a child that waits for the lock
        DumpFolder.__init__ = begin  # type: ignore[method-assign]
        dump_folder(tmp_path / "child")
        os._exit(0)
    may_end.set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0


def test_two_folders_of_one_second_differ(tmp_path: Path) -> None:
    assert DumpFolder(tmp_path).location != DumpFolder(tmp_path).location


def test_latest_is_a_file_without_symbolic_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "symlink_to", _disk_full)
    folder = DumpFolder(tmp_path)
    assert folder.location is not None
    assert (tmp_path / "latest").read_text() == folder.location.name
    assert latest_run(tmp_path) == folder.location


def test_no_run_folder_yet(tmp_path: Path) -> None:
    with pytest.raises(DumpError, match="onnx_debug"):
        latest_run(tmp_path)


def test_unwritable_folder_warns_once_and_names_cause_and_remedy(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "occupied").write_text("a file where the folder should be")  # root could write anywhere else
    folder = DumpFolder(tmp_path / "occupied" / "dump")
    assert not folder.write_text("a.txt", "a")
    assert not folder.write_text("b.txt", "b")
    assert folder.location is None and not folder.is_enabled
    folder.announce()
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    for expected in ("occupied", "Not a directory", "dump_dir"):
        assert expected in record.getMessage()


@pytest.mark.parametrize("function", ["replace", "write_bytes"])
def test_full_disk_warns_once_and_leaves_no_half_written_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, function: str
) -> None:
    folder = DumpFolder(tmp_path)
    assert folder.write_text("whole.txt", "whole")
    with monkeypatch.context() as patch:
        patch.setattr(os if function == "replace" else Path, function, _disk_full)
        assert not folder.write_text("half.txt", "half")
        assert not folder.write_text("other.txt", "other")
    assert folder.location is not None
    assert _files(folder.location) == ["whole.txt"]
    [record] = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert os.strerror(errno.ENOSPC) in record.getMessage() and "dump_dir" in record.getMessage()
    assert not folder.write_text("later.txt", "later"), "a dump that ended does not go on with holes in it"


def test_full_disk_while_a_file_is_written(tmp_path: Path) -> None:
    folder = DumpFolder(tmp_path)

    def write(path: Path) -> None:
        path.write_text("half")
        _disk_full()

    assert not folder.write_with("model.onnx", write)
    assert folder.location is not None and _files(folder.location) == []


def test_a_failing_writer_leaves_nothing_and_is_heard(tmp_path: Path) -> None:
    folder = DumpFolder(tmp_path)

    def write(path: Path) -> None:
        path.write_text("half")
        raise ValueError("not an error of the file system")

    with pytest.raises(ValueError, match="not an error"):
        folder.write_with("model.onnx", write)
    assert folder.is_enabled
    assert folder.location is not None and _files(folder.location) == []


def test_writing_again_replaces(tmp_path: Path) -> None:
    folder = DumpFolder(tmp_path)
    folder.write_text("manifest.json", "1")
    folder.write_text("manifest.json", "2")
    assert folder.path("manifest.json").read_text() == "2"


def test_threads_share_one_folder(tmp_path: Path) -> None:
    folder = DumpFolder(tmp_path)
    threads = [
        threading.Thread(target=lambda i=i: folder.write_text(f"graph_{i:03d}/aten.py", str(i)))  # type: ignore[misc]
        for i in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert folder.location is not None
    assert len(list(tmp_path.glob("run_*"))) == 1
    assert sorted(path.read_text() for path in folder.location.rglob("*.py")) == sorted(map(str, range(16)))


def test_announced_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = DumpFolder(tmp_path)
    folder.announce()
    folder.announce()
    [record] = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert str(folder.location) in record.getMessage()


def test_graph_folder() -> None:
    assert graph_folder(GraphName(7)) == "graph_007"
    assert graph_folder(GraphName(7, "backward")) == "graph_007/backward"


def test_stage_text_has_shapes_and_the_users_lines() -> None:
    texts = []

    def backend(module: fx.GraphModule, inputs: object) -> fx.GraphModule:
        texts.append(stage_text(module))
        return module

    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    torch.compile(double, backend=backend)(torch.ones(2, 3))
    [text] = texts
    assert "f32[2, 3][3, 1]" in text
    assert f"{short_file(__file__)}:" in text and "return x * 2" in text
    compile(text, "stage", "exec")  # it is Python


def _same_file(first: Path, second: Path) -> bool:
    return os.stat(first).st_ino == os.stat(second).st_ino


def test_equal_files_are_one_file(tmp_path: Path) -> None:
    folder = DumpFolder(tmp_path)
    for name in ("a/0.pb", "b/0.pb", "b/0.pb"):
        assert folder.write_once(name, b"weight")
    assert _same_file(folder.path("a/0.pb"), folder.path("b/0.pb"))
    folder.write_once("a/0.pb", b"new weight")
    assert folder.path("b/0.pb").read_bytes() == b"weight", "writing one anew leaves the other"
    folder.write_once("c/0.pb", b"weight")
    assert folder.path("c/0.pb").read_bytes() == b"weight"
    folder.path("a/0.pb").unlink()
    folder.write_once("a/0.pb", b"new weight")
    assert folder.path("a/0.pb").read_bytes() == b"new weight"
    assert folder.location is not None and not list(folder.location.rglob("*.tmp"))


def test_equal_files_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", _disk_full)
    folder = DumpFolder(tmp_path)
    assert folder.write_once("a.pb", b"weight") and folder.write_once("b.pb", b"weight")
    assert folder.is_enabled
    assert folder.path("a.pb").read_bytes() == folder.path("b.pb").read_bytes() == b"weight"


@pytest.mark.parametrize("shape", [(0,), (), (3, 5), (9, 2000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_a_tensors_file_is_onnxs(shape: tuple[int, ...], dtype: torch.dtype, tmp_path: Path) -> None:
    value = (torch.randn(shape) * 2).to(dtype)
    folder = DumpFolder(tmp_path)
    write_tensor(folder, "x", value, "name", -1)
    proto = onnx.load_tensor(folder.path("x.pb"))
    assert proto.name == "name"
    assert torch.equal(torch.from_numpy(onnx.numpy_helper.to_array(proto).astype("float32")), value.float())
    assert folder.path("x.pb").read_bytes() == proto.SerializeToString()
