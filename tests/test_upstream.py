"""``docs/upstream.md`` says what is so: its script is run, and the fault it shows is still there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "upstream.md"
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@pytest.mark.skipif(CORES < 2, reason="two threads race only where there are two cores")
def test_scatter_nd_still_loses_updates() -> None:
    """When it fails, ONNX Runtime is mended: take the fault out of ``runtime/kernels.py``, and the page."""
    [script] = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    wrong = {int(threads): int(runs) for threads, runs in re.findall(r"threads (\d+): (\d+) of", run.stdout)}
    assert wrong.keys() == {1, 2, 4}, run.stdout
    assert wrong[1] == 0, run.stdout
    assert wrong[2] + wrong[4] > 0, run.stdout  # where the cores are busy, a tenth of the runs
