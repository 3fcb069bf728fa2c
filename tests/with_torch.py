"""Runs the tests with another version of PyTorch than that of ``constraints.txt``::

    python tests/with_torch.py 2.15.0                    # all tests
    python tests/with_torch.py 2.15.0 tests/test_docs.py -n 2  # what follows the version is for pytest

It makes a virtual environment for the version, once, in the folder ``~/.cache/dynamo-backends`` (in
``$XDG_CACHE_HOME`` if that is set), and installs this checkout in it with all else from ``constraints.txt``. PyPI has
some versions with the libraries of CUDA only: that takes 6 GB.

The exit code is pytest's, or pip's if the installation fails.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main(arguments: list[str]) -> int:
    if not arguments or not re.match(r"\d+\.\d+", arguments[0]):
        print(__doc__, file=sys.stderr)
        return 2
    version, *for_pytest = arguments
    # PYTHONPATH would put another checkout, or another environment's packages, before those installed here.
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    folder = environment_of(version)
    python = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    constraints = folder / "constraints.txt"
    constraints.write_text(constraints_without_torch(), encoding="utf-8")
    # Every time: the checkout may be another one, or ask for more. Quick where all is there.
    pip = [str(python), "-m", "pip", "install", "--quiet", "-c", str(constraints)]
    installed = subprocess.run([*pip, "-e", ".[test]", f"torch=={version}"], cwd=ROOT, env=variables)
    if installed.returncode:
        return installed.returncode
    return subprocess.run([str(python), "-m", "pytest", *for_pytest], cwd=ROOT, env=variables).returncode


def environment_of(version: str) -> Path:
    """The folder of the virtual environment: one for each version of PyTorch and of Python."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "dynamo-backends" / f"torch-{version}-python-{sys.version_info.major}.{sys.version_info.minor}"


def constraints_without_torch() -> str:
    """The text of ``constraints.txt`` without torch."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("torch=="))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
