"""``with dump(folder)``: what is compiled in the block is dumped; the block changes nothing else."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd

import dynamo_backends
from dynamo_backends import decomposition_table, onnx_compiler
from dynamo_backends.backends import current_block
from dynamo_backends.dumps.reading import find_run


def onnxrt(model: Any, **options: object) -> Any:
    return torch.compile(model, backend="onnxrt", options=options, dynamic=False)


def with_compiler(model: Any, **options: Any) -> Any:
    compiler = onnx_compiler(**options)
    backend = aot_autograd(
        fw_compiler=compiler, partition_fn=compiler.partition_fn, decompositions=decomposition_table()
    )
    return torch.compile(model, backend=backend, dynamic=False)


def graphs(folder: Path) -> list[tuple[str, str | None]]:
    return [(graph.direction, graph.verdict) for graph in find_run(folder).graphs]


@pytest.mark.parametrize("compiling", [onnxrt, with_compiler])
def test_what_is_compiled_in_the_block_is_dumped_and_compared(compiling: Callable[..., Any], tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    with dynamo_backends.dump(tmp_path / "dump") as folder:
        compiling(model)(torch.randn(2, 3)).sum().backward()
    assert folder == tmp_path / "dump"
    assert graphs(folder) == [("forward", "ok"), ("backward", "ok")]
    assert set(find_run(folder).graphs[0].entry.names.values()) == {"weight", "bias", "input"}


@pytest.mark.parametrize("backend", ["onnx_debug", "fx_debug"])
def test_the_debug_backends_write_into_the_block_too(backend: str, tmp_path: Path) -> None:
    compiled = torch.compile(torch.sin, backend=backend, options={"dump_dir": str(tmp_path / "own")})
    with dynamo_backends.dump(tmp_path / "dump"):
        compiled(torch.randn(3))
    assert len(list((tmp_path / "dump").glob("run_*/graph_*/dynamo.py"))) == 1
    assert not (tmp_path / "own").exists()


@pytest.mark.parametrize("compiling", [onnxrt, with_compiler])
def test_nothing_is_left_of_the_block(compiling: Callable[..., Any], tmp_path: Path) -> None:
    """What was compiled in it runs on, unwatched; what is compiled before and after is not dumped."""
    environment = copy.copy(os.environ)
    compiled = compiling(torch.tanh, compare="every")
    before, inside, after = torch.randn(2), torch.randn(3), torch.randn(4)
    compiled(before)
    with dynamo_backends.dump(tmp_path):
        compiled(before)
        compiled(inside)
        compiled(inside)
    [graph] = find_run(tmp_path).graphs
    assert graph.entry.verdict == "ok"
    files = sorted(tmp_path.rglob("*"))
    changed = [path.stat().st_mtime_ns for path in files]
    for x in (inside, after):
        torch.testing.assert_close(compiled(x), torch.tanh(x))
    assert sorted(tmp_path.rglob("*")) == files
    assert [path.stat().st_mtime_ns for path in files] == changed
    assert os.environ == environment


def test_a_backward_that_is_compiled_after_the_block(tmp_path: Path) -> None:
    model, reference = nn.Linear(3, 3), nn.Linear(3, 3)
    reference.load_state_dict(model.state_dict())
    x = torch.randn(2, 3)
    with dynamo_backends.dump(tmp_path):
        result = onnxrt(model)(x)
    result.sum().backward()
    reference(x).sum().backward()
    torch.testing.assert_close(model.weight.grad, reference.weight.grad)
    assert graphs(tmp_path) == [("forward", "ok"), ("backward", None)], "the check of the stages compiled it"


def test_records_go_on_after_the_block(tmp_path: Path) -> None:
    records: list[Any] = []
    compiled = with_compiler(torch.tanh, record=records)
    with dynamo_backends.dump(tmp_path):
        compiled(torch.randn(3))
    compiled(torch.randn(3))
    [record] = records
    assert len(record.runs) == 2 and record.comparison is not None


def test_a_compiler_that_is_made_in_a_block_is_watched_there_only(tmp_path: Path) -> None:
    with dynamo_backends.dump(tmp_path):
        compiled = with_compiler(torch.tanh)
    compiled(torch.randn(3))
    assert not list(tmp_path.rglob("*"))


def test_blocks_in_blocks_and_after_errors(tmp_path: Path) -> None:
    outer, inner = tmp_path / "outer", tmp_path / "inner"
    with dynamo_backends.dump(outer):
        onnxrt(torch.sin)(torch.randn(3))
        with pytest.raises(ZeroDivisionError), dynamo_backends.dump(inner):
            onnxrt(torch.cos)(torch.randn(3))
            raise ZeroDivisionError
        onnxrt(torch.tanh)(torch.randn(3))
    onnxrt(torch.exp)(torch.randn(3))
    codes = [[path.read_text() for path in sorted(folder.glob("run_*/graph_*/dynamo.py"))] for folder in (outer, inner)]
    assert [[name for name in ("sin", "cos", "tanh", "exp") if f"torch.{name}(" in text] for text in codes[0]] == [
        ["sin"],
        ["tanh"],
    ]
    assert len(codes[1]) == 1 and "torch.cos(" in codes[1][0]


def test_another_thread_is_not_in_the_block(tmp_path: Path) -> None:
    with dynamo_backends.dump(tmp_path):
        thread = threading.Thread(target=lambda: onnxrt(torch.sin)(torch.randn(3)))
        thread.start()
        thread.join()
        onnxrt(torch.cos)(torch.randn(3))
    [file] = tmp_path.glob("run_*/graph_*/dynamo.py")
    assert "torch.cos(" in file.read_text()


def test_all_observers_are_closed_where_one_cannot_write(tmp_path: Path) -> None:
    closed = []

    class Observer:
        def __init__(self, name: str, *, fails: bool) -> None:
            self.name = name
            self.fails = fails

        def close(self) -> None:
            closed.append(self.name)
            if self.fails:
                raise OSError("no space")

    with pytest.raises(OSError, match="no space"), dynamo_backends.dump(tmp_path):
        block = current_block.get()
        assert block is not None
        block.observers += [Observer("first", fails=True), Observer("second", fails=False)]
    assert closed == ["first", "second"]
