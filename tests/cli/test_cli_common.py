"""Shared parts of the subcommands: tables that fit the terminal, errors without a traceback."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import resource
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from dumped import write_manifest

from dynamo_backends.cli import COMMANDS, build_parser, main
from dynamo_backends.cli.common import add_dump_arguments, print_json, reporting_errors, try_next
from dynamo_backends.common.text_table import fit_table, listed
from dynamo_backends.dumps.candidate_runs import write_model
from dynamo_backends.dumps.reading import DumpError, write_data_set

Printed = pytest.CaptureFixture[str]


def raising(error: BaseException) -> Callable[[], int]:
    def work() -> int:
        raise error

    return work


@pytest.mark.parametrize("error", [DumpError("no dump"), ValueError("no dump"), OSError("no dump")])
def test_what_the_user_can_mend_is_a_line_and_exit_code_2(error: Exception, capsys: Printed) -> None:
    assert reporting_errors(["ls"], raising(error)) == 2
    assert capsys.readouterr() == ("", "dynamo-backends ls: no dump\n")
    assert reporting_errors(["ls", "--json"], raising(error)) == 2
    assert capsys.readouterr() == ('{\n  "error": "no dump"\n}\n', "dynamo-backends ls: no dump\n")


def test_other_errors_are_ours_and_keep_their_traceback(capsys: Printed) -> None:
    """Their exit code is not 1, which says that a graph diverges."""
    assert reporting_errors(["ls", "--json"], raising(KeyError("ours"))) == 2
    printed = capsys.readouterr()
    assert "Traceback" in printed.err and "in work" in printed.err
    assert json.loads(printed.out)["error"].endswith(": KeyError: 'ours'")
    assert reporting_errors(["ls"], lambda: 1) == 1


def test_interrupted(capsys: Printed) -> None:
    assert reporting_errors(["nan", "0", "--json"], raising(KeyboardInterrupt())) == 2
    assert capsys.readouterr() == ('{\n  "error": "interrupted"\n}\n', "dynamo-backends nan: interrupted\n")


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """No file can have more than 8 bytes: writing fails as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


MODEL = '<ir_version: 8, opset_import: ["" : 18]> g (float[8] x) => (float[8] y) { y = Exp(x) }'


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("input_0.pb", lambda folder: write_data_set(folder, "input", {"x": np.zeros(8)})),
        ("model.onnx", lambda folder: write_model(ir.from_onnx_text(MODEL), folder)),
    ],
)
def test_what_cannot_be_written_is_named(
    name: str, write: Callable[[Path], object], tmp_path: Path, capsys: Printed
) -> None:
    """The error of a full disk does not have the path."""

    def work() -> int:
        write(tmp_path)
        return 0

    with full_disk():
        assert reporting_errors(["report"], work) == 2
    assert str(tmp_path / name) in capsys.readouterr().err


def test_a_page_that_cannot_be_written_is_named(tmp_path: Path, capsys: Printed) -> None:
    write_manifest(tmp_path)
    with full_disk():
        assert main(["report", str(tmp_path), "-o", str(tmp_path / "page.html")]) == 2
    assert str(tmp_path / "page.html") in capsys.readouterr().err


def test_a_list_is_short_and_counts_what_is_equal() -> None:
    assert listed(["Exp", "Neg", "Exp"]) == "Exp x2, Neg"
    assert listed([f"n{i}" for i in range(9)], 2) == "n0, n1 and 7 more"
    assert listed([]) == ""


@pytest.mark.parametrize("command", COMMANDS)
def test_wrong_arguments_are_json_too(command: str, capsys: Printed) -> None:
    wanted = ["--json", "-"] if command == "bench" else ["--json"]
    before = ["0"] if command == "bisect" else []
    with pytest.raises(SystemExit) as caught:
        main([command, *before, *wanted, "--there-is-no-such-option"])
    assert caught.value.code == 2
    printed = capsys.readouterr()
    assert list(json.loads(printed.out)) == ["error"]
    assert json.loads(printed.out)["error"] in printed.err and "usage: " in printed.err


@pytest.mark.parametrize(
    "arguments",
    [
        ["bisect", "no-such-program", "--json"],
        ["bench", "nothing", "--json", "found.json"],
        ["ls", "--json"],
    ],
)
def test_whose_json_it_is(arguments: list[str], tmp_path: Path, monkeypatch: Any, capsys: Printed) -> None:
    """A command that is bisected has options of its own; ``bench`` writes a file."""
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert (capsys.readouterr().out != "") == (arguments[0] == "ls")


def test_what_a_bisected_command_gave_as_json(capsys: Printed) -> None:
    assert main(["bisect", "--json", sys.executable, "-c", "--json"]) == 1, "its own --json is no expression"
    assert "'eager'" in json.loads(capsys.readouterr().out)["found"]


def test_less_than_one_thread(capsys: Printed) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["profile", "0", "--threads", "-1"])
    assert re.search("--threads.* 1, got '-1'", capsys.readouterr().err)


def test_nothing_to_list_is_json(tmp_path: Path, monkeypatch: Any, capsys: Printed) -> None:
    monkeypatch.chdir(tmp_path)
    for command in (
        ["ls"],
        ["show", "0"],
        ["report"],
        ["bisect", "0"],
        ["compare", "0", "1"],
        ["compare", "a.onnx", "b"],
    ):
        assert main([*command, "--json"]) == 2
        printed = capsys.readouterr()
        assert printed.err.endswith(f"{json.loads(printed.out)['error']}\n"), command


def test_a_hint_names_the_dump_for_a_shell() -> None:
    for folder, hint in (
        (None, "try: dynamo-backends show 0"),
        ("a dump", "try: dynamo-backends show 0 -d 'a dump'"),
    ):
        assert try_next(argparse.Namespace(dump=folder), "show", "0") == hint
        words = shlex.split(hint.removeprefix("try: "))[1:]
        assert build_parser().parse_args(words).dump == folder


def test_output_that_nobody_reads_to_its_end() -> None:
    code = (
        "import sys\n"
        "from dynamo_backends.cli.common import reporting_errors\n"
        "def work():\n"
        "    for i in range(100000): sys.stdout.write(f'{i}\\n')\n"
        "    return 1\n"
        "sys.exit(reporting_errors(['ls'], work))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "0\n"
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 0


def test_what_the_terminals_encoding_does_not_have() -> None:
    """It is escaped, and nothing fails."""
    code = (
        "import sys\n"
        "from dynamo_backends.cli.common import reporting_errors\n"
        "sys.exit(reporting_errors(['ls'], lambda: print('cut\\u2026 \\u00e9 \\udcff') or 0))"
    )
    for encoding, expected in (("ascii", rb"cut\u2026 \xe9 \udcff"), ("utf-8", "cut… é ".encode() + rb"\udcff")):
        environment = {**os.environ, "PYTHONIOENCODING": encoding}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment)
        assert (done.returncode, done.stdout, done.stderr) == (0, expected + b"\n", b"")


ROWS = [
    ("graph_000/forward", "/home/someone/project/model.py:12", 120, "1.5e-05", "diverges at mm_1 (model.py:7) and on"),
    ("graph_000/backward", "/home/someone/project/model.py:7", None, "-", "ok"),
]
HEADERS = ("graph", "where", "nodes", "error", "verdict")


def test_a_table_is_cut_to_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = fit_table(ROWS, HEADERS)
    assert "/home/someone/project/model.py:12" in whole and "(model.py:7) and on" in whole, "no terminal: not cut"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for width in (200, 100, 80, 60):
        monkeypatch.setenv("COLUMNS", str(width))
        table = fit_table(ROWS, HEADERS)
        assert max(map(len, table.splitlines())) <= width
        assert (table == whole) == (width == 200)
    assert "model.py:12" in table and "…" in table, "a path keeps its end"
    assert "diverges" in table, "a sentence keeps its start"
    for width in (40, 34):
        monkeypatch.setenv("COLUMNS", str(width))
        table = fit_table(ROWS, HEADERS)
        assert max(map(len, table.splitlines())) <= width
        assert ("verdict" in table) == (width == 40), "names of columns are cut last"
    monkeypatch.setenv("COLUMNS", "80")
    assert fit_table([], HEADERS).splitlines()[0].split() == list(HEADERS)


def test_numbers_are_at_the_right_and_as_given() -> None:
    lines = fit_table([("a", "0.10"), ("b", "12.0")], ("name", "ms")).splitlines()
    assert lines[2:] == ["a     0.10", "b     12.0"]


def test_common_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_dump_arguments(parser)
    assert vars(parser.parse_args([])) == {"dump": None, "json": False}
    assert vars(parser.parse_args(["-d", "folder", "--json"])) == {"dump": "folder", "json": True}
    parser = argparse.ArgumentParser()
    add_dump_arguments(parser, positional=True)
    for given in (["folder"], ["-d", "folder"]):
        assert parser.parse_args(given).dump == "folder"
    assert parser.parse_args([]).dump is None
    print_json({"a": [1]})
    assert capsys.readouterr().out == '{\n  "a": [\n    1\n  ]\n}\n'
