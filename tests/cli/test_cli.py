"""The command ``dynamo-backends``: its output and exit codes."""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dynamo_backends.bench.steps import Steps
from dynamo_backends.cli import COMMANDS, main
from dynamo_backends.dumps.reading import DumpedGraph, latest_run

SMALL = ["demo", "--length", "8"]


@pytest.fixture(autouse=True)
def _one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Small operators are many times slower on PyTorch's thread pool while other processes use the cores."""
    torch._dynamo.reset()
    monkeypatch.setenv("DYNAMO_BACKENDS_DUMP_DIR", str(tmp_path))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _rows(printed: str) -> list[list[str]]:
    """The table's lines: graph, nodes, on ONNX, compared, worst error, eager's, verdict."""
    return [re.split(r"\s{2,}", line.strip()) for line in printed.splitlines() if re.match(r"\d+/", line)]


def test_demo_in_a_process_of_its_own(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dynamo_backends", *SMALL]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DYNAMO_BACKENDS_DUMP_DIR": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=600, env=environment)
    assert done.returncode == 0, done.stderr
    rows = _rows(done.stdout)
    assert [row[0].split("/")[1] for row in rows] == ["forward", "backward"]
    for row in rows:
        assert float(row[2].rstrip("%")) > 90 and row[6] == "ok"
    assert str(latest_run(tmp_path)) in done.stdout
    assert "onnxrt: " in done.stderr and "onnxrt: " not in done.stdout, "progress is not among the results"


def test_demo_forward_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--no-backward"]) == 0
    [row] = _rows(capsys.readouterr().out)
    assert row[0].endswith("/inference")


def test_demo_dynamic_serves_two_batch_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--dynamic"]) == 0
    printed = capsys.readouterr().out
    assert len(_rows(printed)) == 2
    assert "sizes 2 and 3 " in printed


def test_another_verdict_than_ok_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(DumpedGraph, "verdict", "diverges at mm_1 (model.py:7)")
    assert main([*SMALL, "--no-backward"]) == 1
    assert "WRONG" in capsys.readouterr().out


@pytest.mark.parametrize("factor", [1 + 2**-24, 1.01])
def test_results_of_onnxrt_that_eager_does_not_have(
    factor: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They may be off by rounding."""
    results, calls = Steps.results, itertools.count()

    def changed(steps: Steps, forward: Callable[..., Any]) -> list[list[Any]]:
        found = results(steps, forward)
        is_first = next(calls) == 0  # of onnxrt; then come those of onnx_debug, and of eager
        return [[value * factor for value in values] for values in found] if is_first else found

    monkeypatch.setattr(Steps, "results", changed)
    assert main([*SMALL, "--no-backward"]) == int(factor == 1.01)
    assert ("onnxrt: result 0" in capsys.readouterr().out) == (factor == 1.01)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--length", "many"], "2 to 2048"),
        (["demonstrate"], "demo"),
        ([], "COMMAND"),
    ],
)
def test_bad_arguments_are_explained(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main(arguments)
    except SystemExit as caught:  # the parser's
        code = int(str(caught.code))
    assert code == 2
    assert message in capsys.readouterr().err


def test_unwritable_dump_folder_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "occupied").write_text("a file where the folder should be")
    monkeypatch.setenv("DYNAMO_BACKENDS_DUMP_DIR", str(tmp_path / "occupied" / "dump"))
    assert main(SMALL) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_missing_transformers_is_explained(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(SMALL) == 2
    assert "pip install 'transformers>=5'" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert re.fullmatch(r"dynamo-backends \d+\.\d+\.\d+\n", capsys.readouterr().out)


HELP = """
import sys
from dynamo_backends.cli import main
try:
    main(sys.argv[1:])
except SystemExit as stopped:
    assert stopped.code == 0
slow = {"torch", "onnxruntime", "onnx", "onnx_ir", "numpy", "pandas", "matplotlib", "transformers"}
assert not slow & set(sys.modules), slow & set(sys.modules)
"""


@pytest.mark.sampled(7)
@pytest.mark.parametrize("arguments", [["--help"], ["--version"], *([name, "--help"] for name in COMMANDS)])
def test_help_imports_nothing_that_takes_time(arguments: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", HELP, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "dynamo-backends" in done.stdout


def test_module_of_the_package_is_the_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "dynamo_backends", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("usage: dynamo-backends")


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["pases"], "'passes'?"),
        (["demo", "--lenght", "16"], "'--length'?"),
        (["passes", "--wyh=joint"], "'--why'?"),
        (["--versoin"], "'--version'?"),
    ],
)
def test_misspelt_names_are_answered_with_near_ones(
    arguments: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert hint in said
    command = arguments[0] if arguments[0] in COMMANDS else ""
    assert said.splitlines()[-1].startswith(f"dynamo-backends {command}".strip()), "the error is the subcommand's"
