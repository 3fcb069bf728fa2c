"""Runs the tests with another version of PyTorch than that of ``constraints.txt``.

::

    python tests/with_torch.py 2.15.0                    # all tests
    python tests/with_torch.py 2.15.0 tests/project/test_docs.py -n 2  # further arguments are passed to pytest

It creates a virtual environment for the version once, in the folder ``~/.cache/dynamo-backends`` (in
``$XDG_CACHE_HOME`` if that is set), and installs this checkout with the other packages of ``constraints.txt``. PyPI has
some versions with CUDA libraries only: these take 6 GB.

The exit code is pytest's, or pip's if the installation fails. ``try_versions.py`` tests all versions.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from environments import Environment  # noqa: E402


def main(arguments: list[str]) -> int:
    if not arguments or not re.match(r"\d+\.\d+", arguments[0]):
        print(__doc__, file=sys.stderr)
        return 2
    version, *for_pytest = arguments
    environment = Environment(f"torch-{version}", sys.executable)
    failed = environment.install(["-e", ".[test]", f"torch=={version}"], not_from_constraints="torch")
    return failed or subprocess.run(environment.command("-m", "pytest", *for_pytest), **environment.settings).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
