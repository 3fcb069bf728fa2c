"""The README and the pages say what the code says."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

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


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8").split()
    pages = {page.stem for page in (ROOT / "docs").glob("*.md")} - {"index"}
    assert pages <= set(index)


@pytest.mark.parametrize("switch", ["--part", "--no-backward", "--mixed", "--dynamic", "--opset", "--length"])
def test_switches_of_the_demo_are_documented(switch: str) -> None:
    assert f"`{switch}`" in (ROOT / "docs" / "command_line.md").read_text(encoding="utf-8")
