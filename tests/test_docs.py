"""The README and the pages say what the code says."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from passes.engine.manager import all_passes

ROOT = Path(__file__).parent.parent


def test_readme_has_the_table_of_options() -> None:
    tables = runpy.run_path(str(ROOT / "docs" / "tables.py"))
    expected = tables["options_table"]().strip()
    assert expected in (ROOT / "README.md").read_text(encoding="utf-8"), "put in what python docs/tables.py prints"


def test_readme_opens_with_the_two_commands() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    demo = text.index("pip install -c constraints.txt -e '.[demo]' && dynamo-backends demo")
    test = text.index("pip install -c constraints.txt -e '.[test]' && python -m pytest")
    assert demo < test < text.index("## What it is")


def test_every_pass_has_been_measured() -> None:
    report = runpy.run_path(str(ROOT / "benchmarks" / "report.py"))
    missing = {item.name for item in all_passes()} - set(report["load_results"]()["passes"])
    assert not missing, f"not in benchmarks/passes.json: {sorted(missing)}; python benchmarks/passes.py measures anew"


def test_table_of_passes_says_which_are_not_measured() -> None:
    report = runpy.run_path(str(ROOT / "benchmarks" / "report.py"))
    table = report["passes_table"]({"passes": {}, "models": {}})
    rows = [row for row in table.splitlines()[2:] if row]
    assert [row.split("`")[1] for row in rows] == [item.name for item in all_passes()]
    assert all(row.count("not measured") == 6 for row in rows)


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8").split()
    pages = {page.stem for page in (ROOT / "docs").glob("*.md")} - {"index"}
    assert pages <= set(index)


@pytest.mark.parametrize("switch", ["--part", "--no-backward", "--mixed", "--dynamic", "--opset", "--length"])
def test_switches_of_the_demo_are_documented(switch: str) -> None:
    assert f"`{switch}`" in (ROOT / "docs" / "command_line.md").read_text(encoding="utf-8")
