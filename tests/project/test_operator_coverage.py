"""``docs/operators.md`` lists all entries of PyTorch's database, with the right places."""

from __future__ import annotations

import re

import pytest
import torch
from operator_coverage import DOCUMENT, measure
from operators import entries

pytestmark = pytest.mark.filterwarnings("ignore")
WRITTEN_WITH = "2.13"


def rows() -> dict[str, list[str]]:
    """The cells of each row by the entry's name."""
    lines = re.findall(r"^\| `([^`]+)` \|(.*)\|$", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    return {name: [cell.strip() for cell in re.split(r"(?<!\\)\|", cells)] for name, cells in lines}


@pytest.mark.skipif(not torch.__version__.startswith(WRITTEN_WITH), reason="the table is of another PyTorch")
def test_the_table_lists_every_entry() -> None:
    assert set(rows()) == set(entries())


SAMPLE = ["add", "lgamma", "cdist", "topk", "fft.rfft", "linalg.svd", "randn_like", "t", "nonzero", "masked.cumprod"]


@pytest.mark.skipif(not torch.__version__.startswith(WRITTEN_WITH), reason="the table is of another PyTorch")
@pytest.mark.parametrize("name", SAMPLE)
def test_a_row_is_true(name: str) -> None:
    row = measure(name)
    assert rows()[name][:3] == [row.dtype, row.where, row.kind]
