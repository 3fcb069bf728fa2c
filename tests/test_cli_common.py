"""What the subcommands share: tables that fit the terminal, errors without a traceback."""

from __future__ import annotations

import argparse
import subprocess
import sys

import pytest

from dynamo_backends.cli.common import add_dump_arguments, fit_table, print_json, reporting_errors
from dynamo_backends.dumps.reading import DumpError


@pytest.mark.parametrize("error", [DumpError("no dump here"), ValueError("no dump here"), OSError("no dump here")])
def test_what_the_user_can_mend_is_a_line_and_exit_code_2(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> int:
        raise error

    assert reporting_errors("ls", work) == 2
    assert capsys.readouterr().err == "dynamo-backends ls: no dump here\n"


def test_other_errors_are_ours_and_keep_their_traceback() -> None:
    def work() -> int:
        raise KeyError("ours")

    with pytest.raises(KeyError):
        reporting_errors("ls", work)
    assert reporting_errors("ls", lambda: 1) == 1


def test_output_that_nobody_reads_to_its_end() -> None:
    code = (
        "import sys\n"
        "from dynamo_backends.cli.common import reporting_errors\n"
        "def work():\n"
        "    for i in range(100000): sys.stdout.write(f'{i}\\n')\n"
        "    return 1\n"
        "sys.exit(reporting_errors('ls', work))"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "0\n"
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 0


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
    assert fit_table([], HEADERS).splitlines()[0].split() == list(HEADERS)


def test_numbers_are_at_the_right_and_as_given() -> None:
    lines = fit_table([("a", "0.10"), ("b", "12.0")], ("name", "ms")).splitlines()
    assert lines[2:] == ["a     0.10", "b     12.0"]


def test_common_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_dump_arguments(parser)
    assert vars(parser.parse_args([])) == {"dump": None, "json": False}
    assert vars(parser.parse_args(["-d", "folder", "--json"])) == {"dump": "folder", "json": True}
    print_json({"a": [1]})
    assert capsys.readouterr().out == '{\n  "a": [\n    1\n  ]\n}\n'
